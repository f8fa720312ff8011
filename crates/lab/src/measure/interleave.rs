//! Timing several contestants side by side in one run.
//!
//! Every contestant is timed in every round, a few calls at a time, in an order that is drawn anew for each round: whatever
//! the machine does meanwhile, it does to all, and who comes after whom is chance.

use std::time::{Duration, Instant};

use super::CACHES_MATTER_US;
use crate::Error;
use evosdpa_oracle::rng::Rng;

/// Something that can be timed.
pub trait Contestant {
    /// Runs once on an input set and says how long it took.
    fn time_us(&mut self, set: usize) -> Result<f64, Error>;

    /// Called once in every turn, at a moment that nobody can foresee: a contestant that can be checked is checked now.
    fn audit(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Called after the last round.
    fn final_audit(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// How much is timed.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Timed calls per contestant.
    pub iters: usize,
    /// Untimed calls per contestant before the first round.
    pub warmup: usize,
    /// Input sets to rotate through.
    pub sets: usize,
    /// Time after which no new round starts; contestants then have fewer samples than asked for.
    pub budget: Option<Duration>,
    /// Decides the moments of audits.
    pub seed: u64,
    /// What moments are counted from.
    pub epoch: Instant,
}

/// Rounds that the calls are spread over.
pub const ROUNDS: usize = 10;

/// Idle time before each turn: thread pools that spin after their last call go to sleep first.
pub(crate) const SETTLE: Duration = Duration::from_millis(5);

/// One contestant's times, by round.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// Microseconds, by round.
    pub rounds: Vec<Vec<f64>>,
    /// When each sample's call began, in the same order: nanoseconds since [`Plan::epoch`].
    pub began_ns: Vec<u64>,
}

impl Times {
    /// All samples in the order they were taken.
    pub fn all(&self) -> Vec<f64> {
        self.rounds.concat()
    }
}

/// Times all contestants. `proceed` is asked before every turn and ends the measurement early by answering no.
/// A contestant that fails is out, with its error; the others go on.
pub fn interleave(
    contestants: &mut [&mut dyn Contestant],
    plan: &Plan,
    mut proceed: impl FnMut(f64) -> bool,
) -> Vec<Result<Times, Error>> {
    let mut results: Vec<Result<Times, Error>> = contestants.iter().map(|_| Ok(Times::default())).collect();
    let mut rng = Rng::new(plan.seed);
    let start = Instant::now();
    let share = plan.budget.map(|budget| budget / (ROUNDS * contestants.len().max(1)) as u32);
    let mut per_turn = vec![plan.iters.div_ceil(ROUNDS).max(1); contestants.len()];
    let mut caches_matter = vec![true; contestants.len()];

    for (i, contestant) in contestants.iter_mut().enumerate() {
        match warm_up(*contestant, plan, share) {
            Ok(typical) => {
                caches_matter[i] = typical < CACHES_MATTER_US;
                if let Some(share) = share {
                    let affordable = (share.as_secs_f64() * 1e6 / typical.max(0.1)) as usize;
                    per_turn[i] = per_turn[i].min(affordable).max(1);
                }
            }
            Err(error) => results[i] = Err(error),
        }
    }
    let rounds = ROUNDS.min(plan.iters.max(1));
    for round in 0..rounds {
        let spent = plan.budget.is_some_and(|budget| start.elapsed() > budget);
        if spent && round > 0 {
            break;
        }
        for (turn, i) in shuffled(contestants.len(), &mut rng).into_iter().enumerate() {
            if !proceed((round * contestants.len() + turn) as f64 / (rounds * contestants.len()) as f64) {
                return results;
            }
            let Ok(times) = &mut results[i] else { continue };
            std::thread::sleep(SETTLE);
            let done: usize = times.rounds.iter().map(Vec::len).sum();
            let calls = per_turn[i].min(plan.iters.saturating_sub(done));
            match turn_of(contestants[i], calls, done, caches_matter[i], plan, &mut rng) {
                Ok((round, began_ns)) => {
                    times.rounds.push(round);
                    times.began_ns.extend(began_ns);
                }
                Err(error) => results[i] = Err(error),
            }
        }
    }
    for (result, contestant) in results.iter_mut().zip(contestants) {
        if result.is_ok()
            && let Err(error) = contestant.final_audit()
        {
            *result = Err(error);
        }
    }
    results
}

/// Every number below `n`, in an order by chance (Fisher and Yates).
fn shuffled(n: usize, rng: &mut Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for last in (1..n).rev() {
        order.swap(last, rng.below(last + 1));
    }
    order
}

/// Calls untimed until warm, and says how long a call takes.
fn warm_up(contestant: &mut dyn Contestant, plan: &Plan, share: Option<Duration>) -> Result<f64, Error> {
    let start = Instant::now();
    let mut typical = f64::INFINITY;
    for call in 0..plan.warmup.max(1) {
        typical = typical.min(contestant.time_us(call % plan.sets)?);
        if share.is_some_and(|share| start.elapsed() > share) {
            break;
        }
    }
    Ok(typical)
}

fn turn_of(
    contestant: &mut dyn Contestant,
    calls: usize,
    done: usize,
    caches_matter: bool,
    plan: &Plan,
    rng: &mut Rng,
) -> Result<(Vec<f64>, Vec<u64>), Error> {
    if calls == 0 {
        return Ok((Vec::new(), Vec::new()));
    }
    let sets = plan.sets;
    let audited_before = rng.below(calls);
    let (mut times, mut began_ns) = (Vec::with_capacity(calls), Vec::with_capacity(calls));
    for call in 0..calls {
        if call == audited_before {
            contestant.audit()?;
        }
        if caches_matter && (call == 0 || call == audited_before) {
            // Once untimed: another contestant or an audit has had the caches.
            contestant.time_us((done + call) % sets)?;
        }
        began_ns.push(u64::try_from(plan.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX));
        times.push(contestant.time_us((done + call) % sets)?);
    }
    Ok((times, began_ns))
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use super::*;

    struct Scripted {
        name: char,
        log: Rc<RefCell<String>>,
        fails: bool,
    }

    impl Contestant for Scripted {
        fn time_us(&mut self, set: usize) -> Result<f64, Error> {
            self.log.borrow_mut().push(self.name);
            if self.fails {
                return Err(Error::Baseline { baseline: "scripted", why: "failed".into() });
            }
            Ok(1.0 + set as f64)
        }
    }

    fn run(plan: Plan, fails: bool) -> (String, Vec<Result<Times, Error>>) {
        let log = Rc::new(RefCell::new(String::new()));
        let mut a = Scripted { name: 'a', log: log.clone(), fails };
        let mut b = Scripted { name: 'b', log: log.clone(), fails: false };
        let results = interleave(&mut [&mut a, &mut b], &plan, |_| true);
        let text = log.borrow().clone();
        (text, results)
    }

    #[test]
    fn the_order_is_drawn_and_every_call_is_kept() {
        let (log, results) =
            run(Plan { iters: 20, warmup: 1, sets: 2, budget: None, seed: 1, epoch: Instant::now() }, false);
        // Warm-ups, then rounds: one untimed and two timed calls a turn, and one more untimed after an audit in its middle.
        assert!(log.starts_with("ab" /* warm-up */), "{log}");
        // Both orders come; nobody is served twice in a round, so at most two turns of one follow each other.
        assert!(log[2..].contains("aaab") && log[2..].contains("bbba"), "{log}");
        assert!(!log[2..].contains("aaaaaaaaa"), "{log}");
        for result in results {
            let times = result.unwrap();
            assert_eq!((times.rounds.len(), times.all().len(), times.began_ns.len()), (10, 20, 20));
            assert!(times.began_ns.is_sorted(), "one call after the other");
            assert_eq!(times.rounds[0], [1.0, 2.0]);
        }
    }

    #[test]
    fn one_failure_does_not_stop_the_others() {
        let (_, results) =
            run(Plan { iters: 10, warmup: 1, sets: 1, budget: None, seed: 1, epoch: Instant::now() }, true);
        assert!(results[0].is_err());
        assert_eq!(results[1].as_ref().unwrap().all().len(), 10);
    }

    #[test]
    fn a_budget_gives_fewer_samples_and_at_least_one() {
        let plan = Plan {
            iters: 1_000_000,
            warmup: 1,
            sets: 1,
            budget: Some(Duration::from_millis(30)),
            seed: 1,
            epoch: Instant::now(),
        };
        let (_, results) = run(plan, false);
        let count = results[0].as_ref().unwrap().all().len();
        assert!((1..1_000_000).contains(&count), "{count}");
    }

    #[test]
    fn no_means_stop() {
        let log = Rc::new(RefCell::new(String::new()));
        let mut a = Scripted { name: 'a', log, fails: false };
        let mut turns = 0;
        let plan = Plan { iters: 10, warmup: 1, sets: 1, budget: None, seed: 1, epoch: Instant::now() };
        let results = interleave(&mut [&mut a], &plan, |_| {
            turns += 1;
            turns <= 3
        });
        assert_eq!(results[0].as_ref().unwrap().all().len(), 3);
    }
}
