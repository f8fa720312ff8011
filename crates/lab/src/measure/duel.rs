//! Two contestants, block by block, until the answer is clear.
//!
//! A block is four readings in the order ABBA or BAAB, drawn by a coin: a drift within the block cancels, and under "no
//! difference" the sign of the block's log-ratio *is* the coin. A block whose clock sank below three quarters of the best
//! seen, or moved by more than 2 % between two readings of the same side, is set aside and counted. After every block the
//! evidence is looked at ([`super::sequence`]), in time and, where the device has a clock to read, in cycles: both must
//! agree.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{
    Reading, Resampler,
    compare::{Comparison, Outcome},
    rng::Rng,
    samples::{interval as middle_95, median, resampled},
    sequence::{self, Evidence},
};
use crate::Error;

/// One side of a duel.
pub trait Arm {
    /// One reading.
    fn read(&mut self) -> Result<Reading, Error>;

    /// Called before every block: an arm whose memory can be elsewhere moves, because where it lies must not decide.
    fn relocate(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Called at moments that nobody can foresee: an arm that can be checked is checked now.
    fn audit(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// When a duel ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Probability, at most, of a wrong FAST or SLOW.
    pub alpha: f64,
    /// Effects below this share say nothing of a kernel: FAST and SLOW are beyond it, SAME is within.
    pub margin: f64,
    /// Blocks, at most.
    pub most_blocks: usize,
    /// Time, at most.
    pub limit: Option<Duration>,
    /// A candidate whose first blocks are all slower than this ratio is hopeless; 0 never gives up early.
    pub hopeless_below: f64,
    /// Rest before each reading, for thread pools that spin after their last call.
    pub settle: Duration,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            alpha: 0.01,
            margin: MARGIN,
            most_blocks: 120,
            limit: None,
            hopeless_below: 0.0,
            settle: Duration::ZERO,
        }
    }
}

/// Two copies of one kernel differ steadily for where their code and buffers happen to lie: by 0.2 to 0.9 %, measured on an
/// H200. Only what is beyond that is about the kernel.
pub const MARGIN: f64 = 0.01;

/// Blocks that must all be hopeless before a duel is given up.
const HOPELESS_BLOCKS: usize = 4;
/// A clock below this share of the best seen is throttled.
const THROTTLED_BELOW: f64 = 0.75;
/// Two readings of one side whose clocks differ by more than this share were not taken at one speed.
const STEADY_WITHIN: f64 = 0.02;
/// One in so many blocks is preceded by an audit.
const AUDIT_ONE_IN: usize = 8;

/// Four readings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Whether the candidate had the outer places.
    pub candidate_outside: bool,
    /// The four readings in the order they were taken.
    pub readings: [Reading; 4],
}

impl Block {
    /// The candidate's two readings, then the other's.
    fn sides(&self) -> [[&Reading; 2]; 2] {
        let [a, b, c, d] = &self.readings;
        if self.candidate_outside { [[a, d], [b, c]] } else { [[b, c], [a, d]] }
    }

    /// Log of how many times as fast the candidate was, in time and in cycles.
    fn logs(&self) -> (f64, Option<f64>) {
        let [candidate, other] = self.sides();
        let log = |side: [&Reading; 2]| 0.5 * (side[0].time_us.ln() + side[1].time_us.ln());
        let cycles =
            |side: [&Reading; 2]| Some(0.5 * (side[0].kilocycles()?.ln() + side[1].kilocycles()?.ln()));
        (log(other) - log(candidate), cycles(other).zip(cycles(candidate)).map(|(other, own)| other - own))
    }
}

/// Why a duel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The evidence suffices.
    Decided,
    /// Every block so far was far slower.
    Hopeless,
    /// As many blocks as were allowed.
    Blocks,
    /// As much time as was allowed.
    Time,
    /// Too many blocks were set aside.
    Throttled,
    /// Someone asked to stop.
    Stopped,
}

/// How many times as fast the candidate is, in one unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Median over blocks.
    pub ratio: f64,
    /// 95 % bootstrap interval of that median.
    pub bootstrap: [f64; 2],
    /// What is not excluded at the rule's level, however often one looked; 0 and infinity are no bound.
    pub sequence: [f64; 2],
}

impl Effect {
    fn of(logs: &[f64], alpha: f64) -> Self {
        let [low, high] = middle_95(&resampled(&mut Resampler::new(), logs));
        let [below, above] = sequence::interval(logs, alpha);
        Self {
            ratio: median(logs).exp(),
            bootstrap: [low.exp(), high.exp()],
            // JSON has no infinity.
            sequence: [below.exp(), above.exp().min(f64::MAX)],
        }
    }
}

/// A finished duel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Duel {
    /// What it says of the candidate.
    pub verdict: Outcome,
    /// Why it ended.
    pub ended: Ended,
    /// In time.
    pub time: Effect,
    /// In cycles, where the device's clock can be read.
    pub cycles: Option<Effect>,
    /// Seed of the orders.
    pub seed: u64,
    /// Blocks set aside because the clock had sunk.
    pub throttled: usize,
    /// Blocks set aside because the clock moved within them.
    pub unsteady: usize,
    /// All blocks that count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<Block>,
}

impl Duel {
    /// The candidate's median time.
    pub fn candidate_p50_us(&self) -> f64 {
        self.p50_us(0)
    }

    /// The other's median time.
    pub fn other_p50_us(&self) -> f64 {
        self.p50_us(1)
    }

    fn p50_us(&self, side: usize) -> f64 {
        let times: Vec<f64> =
            self.blocks.iter().flat_map(|block| block.sides()[side].map(|reading| reading.time_us)).collect();
        if times.is_empty() { f64::NAN } else { median(&times) }
    }

    /// In the form that rows record.
    pub fn comparison(&self) -> Comparison {
        Comparison {
            ratio: self.time.ratio,
            interval: self.time.bootstrap,
            rounds: self.blocks.len(),
            verdict: self.verdict,
            sequence: Some(self.time.sequence),
            cycles: self.cycles.map(|cycles| cycles.bootstrap),
            discarded: self.throttled + self.unsteady,
        }
    }
}

/// The evidence in one unit.
struct Watch {
    faster: Evidence,
    slower: Evidence,
    not_much_slower: Evidence,
    not_much_faster: Evidence,
    logs: Vec<f64>,
}

impl Watch {
    fn new(margin: f64) -> Self {
        let margin = (1.0 + margin).ln();
        Self {
            faster: Evidence::above(margin),
            slower: Evidence::below(-margin),
            not_much_slower: Evidence::above(-margin),
            not_much_faster: Evidence::below(margin),
            logs: Vec::new(),
        }
    }

    fn add(&mut self, log: f64) {
        for evidence in
            [&mut self.faster, &mut self.slower, &mut self.not_much_slower, &mut self.not_much_faster]
        {
            evidence.add(log);
        }
        self.logs.push(log);
    }

    fn word(&self, alpha: f64) -> Outcome {
        match () {
            () if self.not_much_slower.suffices(alpha) && self.not_much_faster.suffices(alpha) => {
                Outcome::Same
            }
            () if self.faster.suffices(alpha) => Outcome::Fast,
            () if self.slower.suffices(alpha) => Outcome::Slow,
            () => Outcome::Ambiguous,
        }
    }
}

/// What both units say together.
fn together(time: &Watch, cycles: Option<&Watch>, alpha: f64) -> Outcome {
    let word = time.word(alpha);
    match cycles {
        Some(cycles) if cycles.word(alpha) != word => Outcome::Ambiguous,
        _ => word,
    }
}

/// Lets a candidate run against another until the rule ends it; `proceed` is asked before every block. `None` when not one
/// block could be read.
pub fn duel(
    candidate: &mut dyn Arm,
    other: &mut dyn Arm,
    rule: &Rule,
    seed: u64,
    proceed: impl FnMut() -> bool,
) -> Result<Option<Duel>, Error> {
    let Fought { verdict, ended, time, cycles, throttled, unsteady, blocks } =
        fight(candidate, other, rule, seed, proceed)?;
    if blocks.is_empty() {
        return Ok(None);
    }
    Ok(Some(Duel {
        verdict,
        ended,
        time: Effect::of(&time.logs, rule.alpha),
        cycles: cycles.map(|watch| Effect::of(&watch.logs, rule.alpha)),
        seed,
        throttled,
        unsteady,
        blocks,
    }))
}

/// A duel before its effects are estimated.
struct Fought {
    verdict: Outcome,
    ended: Ended,
    time: Watch,
    cycles: Option<Watch>,
    throttled: usize,
    unsteady: usize,
    blocks: Vec<Block>,
}

fn fight(
    candidate: &mut dyn Arm,
    other: &mut dyn Arm,
    rule: &Rule,
    seed: u64,
    mut proceed: impl FnMut() -> bool,
) -> Result<Fought, Error> {
    let mut rng = Rng::new(seed);
    let start = Instant::now();
    // Once untimed each: code, caches and clocks.
    candidate.read()?;
    other.read()?;
    let (mut time, mut cycles) = (Watch::new(rule.margin), None::<Watch>);
    let (mut blocks, mut best_clock) = (Vec::new(), 0.0_f64);
    let (mut throttled, mut unsteady) = (0, 0);
    let ended = loop {
        match () {
            () if blocks.len() >= rule.most_blocks => break Ended::Blocks,
            () if rule.limit.is_some_and(|limit| start.elapsed() > limit) && !blocks.is_empty() => {
                break Ended::Time;
            }
            () if throttled + unsteady > rule.most_blocks => break Ended::Throttled,
            () if !proceed() => break Ended::Stopped,
            () => {}
        }
        if rng.below(AUDIT_ONE_IN) == 0 {
            candidate.audit()?;
            candidate.read()?;
        }
        candidate.relocate()?;
        other.relocate()?;
        let candidate_outside = rng.coin();
        let mut readings = [Reading { time_us: 0.0, clock_ghz: None }; 4];
        for (place, reading) in readings.iter_mut().enumerate() {
            std::thread::sleep(rule.settle);
            let outside = place == 0 || place == 3;
            *reading = if outside == candidate_outside { candidate.read()? } else { other.read()? };
        }
        let block = Block { candidate_outside, readings };
        match clock_of(&block, &mut best_clock) {
            Clock::Fine => {}
            Clock::Throttled => {
                throttled += 1;
                continue;
            }
            Clock::Unsteady => {
                unsteady += 1;
                continue;
            }
        }
        let (in_time, in_cycles) = block.logs();
        time.add(in_time);
        if blocks.is_empty() {
            cycles = in_cycles.map(|_| Watch::new(rule.margin));
        }
        // A block without a clock among blocks with one would unpair the two units.
        if let (Some(watch), Some(log)) = (&mut cycles, in_cycles) {
            watch.add(log);
        }
        blocks.push(block);
        let is_hopeless = |log: &f64| *log < rule.hopeless_below.ln();
        if rule.hopeless_below > 0.0
            && (HOPELESS_BLOCKS..2 * HOPELESS_BLOCKS).contains(&blocks.len())
            && time.logs.iter().all(is_hopeless)
        {
            break Ended::Hopeless;
        }
        if together(&time, cycles.as_ref(), rule.alpha) != Outcome::Ambiguous {
            break Ended::Decided;
        }
    };
    let verdict = match ended {
        Ended::Decided => together(&time, cycles.as_ref(), rule.alpha),
        Ended::Hopeless => Outcome::Slow,
        _ => Outcome::Ambiguous,
    };
    Ok(Fought { verdict, ended, time, cycles, throttled, unsteady, blocks })
}

enum Clock {
    Fine,
    Throttled,
    Unsteady,
}

fn clock_of(block: &Block, best: &mut f64) -> Clock {
    let [a, b, c, d] = block.readings.map(|reading| reading.clock_ghz);
    let (Some(a), Some(b), Some(c), Some(d)) = (a, b, c, d) else { return Clock::Fine };
    *best = [a, b, c, d].into_iter().fold(*best, f64::max);
    if [a, b, c, d].into_iter().any(|clock| clock < THROTTLED_BELOW * *best) {
        return Clock::Throttled;
    }
    let apart = |x: f64, y: f64| (x / y).ln().abs() > STEADY_WITHIN;
    if apart(a, d) || apart(b, c) { Clock::Unsteady } else { Clock::Fine }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use super::*;

    /// A machine's mood, shared by both arms: every reading of either is multiplied with the next of its noise.
    type Mood = Rc<RefCell<Box<dyn FnMut() -> f64>>>;

    struct Made {
        time_us: f64,
        clock_ghz: Option<f64>,
        mood: Mood,
    }

    impl Arm for Made {
        fn read(&mut self) -> Result<Reading, Error> {
            let noise = (self.mood.borrow_mut())();
            Ok(Reading { time_us: self.time_us * noise, clock_ghz: self.clock_ghz })
        }
    }

    fn run(
        ratio: f64,
        clock: Option<[f64; 2]>,
        rule: &Rule,
        seed: u64,
        mood: Box<dyn FnMut() -> f64>,
    ) -> Duel {
        let mood = Rc::new(RefCell::new(mood));
        let mut candidate =
            Made { time_us: 100.0 / ratio, clock_ghz: clock.map(|clock| clock[0]), mood: Rc::clone(&mood) };
        let mut other = Made { time_us: 100.0, clock_ghz: clock.map(|clock| clock[1]), mood };
        duel(&mut candidate, &mut other, rule, seed, || true).unwrap().unwrap()
    }

    fn noise(kind: usize, seed: u64) -> Box<dyn FnMut() -> f64> {
        let mut rng = Rng::of_series(seed, kind as u64);
        let (mut state, mut step) = (0.0, 0.0);
        Box::new(move || {
            step += 1.0;
            match kind {
                // Independent.
                0 => 1.0 + 0.02 * rng.normal(),
                // Autocorrelated: each reading remembers 95 % of the last one's trouble.
                1 => {
                    state = 0.95 * state + 0.02 * rng.normal();
                    f64::exp(state)
                }
                // Long quiet stretches at one of two speeds.
                2 => {
                    if rng.below(40) == 0 {
                        state = 0.1 - state;
                    }
                    (1.0 + state) * (1.0 + 0.002 * rng.normal())
                }
                // Heavy tails: one reading in ten is up to three times as long.
                3 => {
                    1.0 + 0.005 * rng.normal().abs() + if rng.below(10) == 0 { 2.0 * rng.unit() } else { 0.0 }
                }
                // A drift that never ends, and a period of four readings.
                _ => (1.0 + 0.001 * step) * (1.0 + 0.05 * f64::from(u8::from(step as u64 % 4 < 2))),
            }
        })
    }

    /// The accept rule's false positives, measured: a thing against itself, under five kinds of noise, looked at after
    /// every block. The rule promises at most 1 % of FAST and SLOW together, and it must do so without the help of a margin.
    #[test]
    fn a_thing_is_not_faster_than_itself() {
        let rule = Rule { most_blocks: 60, margin: 0.0, ..Rule::default() };
        const RUNS: u64 = 2000;
        for kind in 0..5 {
            let (mut fast, mut slow) = (0, 0);
            for run_number in 0..RUNS {
                let mood: Mood = Rc::new(RefCell::new(noise(kind, run_number)));
                let mut sides =
                    [0, 1].map(|_| Made { time_us: 100.0, clock_ghz: None, mood: Rc::clone(&mood) });
                let [candidate, other] = &mut sides;
                let seed = Rng::of_series(99, run_number).below(1 << 30) as u64;
                let word = fight(candidate, other, &rule, seed, || true).unwrap().verdict;
                fast += u64::from(word == Outcome::Fast);
                slow += u64::from(word == Outcome::Slow);
            }
            println!("noise {kind}: {fast} FAST and {slow} SLOW of {RUNS}");
            assert!(fast + slow <= RUNS / 100, "noise {kind}: {fast} FAST, {slow} SLOW of {RUNS}");
        }
    }

    #[test]
    fn differences_are_found_soon_and_sameness_too() {
        for kind in [0, 1, 2] {
            let duel = run(1.05, None, &Rule::default(), 5, noise(kind, 1));
            assert_eq!(duel.verdict, Outcome::Fast, "{kind}: {:?}", duel.time);
            assert!(
                duel.time.sequence[0] > 1.01 && duel.time.sequence[1] > 1.05 && duel.ended == Ended::Decided
            );
            assert_eq!(run(0.95, None, &Rule::default(), 6, noise(kind, 2)).verdict, Outcome::Slow);
        }
        let duel = run(1.0, None, &Rule::default(), 7, Box::new(|| 1.0));
        assert_eq!(duel.verdict, Outcome::Same, "{duel:?}");
        let slow = run(0.5, None, &Rule { hopeless_below: 0.8, ..Rule::default() }, 8, noise(0, 3));
        assert_eq!((slow.ended, slow.blocks.len(), slow.verdict), (Ended::Hopeless, 4, Outcome::Slow));
    }

    /// Half a per cent that comes from where a copy lies is not called a difference, however clearly it shows.
    #[test]
    fn what_is_within_the_margin_is_not_faster() {
        for seed in 0..200 {
            let word = run(1.005, None, &Rule::default(), seed, noise(2, seed)).verdict;
            assert!(matches!(word, Outcome::Same | Outcome::Ambiguous), "{seed}: {word}");
        }
        let wide = Rule { margin: 0.1, ..Rule::default() };
        assert_eq!(run(1.05, None, &wide, 1, noise(0, 1)).verdict, Outcome::Same);
        assert_eq!(run(1.3, None, &wide, 1, noise(0, 1)).verdict, Outcome::Fast);
    }

    #[test]
    fn time_and_cycles_must_agree() {
        let rule = Rule { most_blocks: 40, ..Rule::default() };
        let with_clocks = |candidate, other| run(1.05, Some([candidate, other]), &rule, 9, noise(0, 4));
        assert_eq!(with_clocks(1.98, 1.98).verdict, Outcome::Fast);
        // Five per cent less time at a clock five per cent higher is no better kernel.
        let lucky = with_clocks(1.98 * 1.05, 1.98);
        assert_eq!(lucky.verdict, Outcome::Ambiguous, "{lucky:?}");
        assert!((lucky.cycles.unwrap().ratio - 1.0).abs() < 0.02);
    }

    #[test]
    fn throttled_and_unsteady_blocks_are_set_aside_and_counted() {
        let mut reading = 0;
        let mood: Mood = Rc::new(RefCell::new(Box::new(|| 1.0)));
        struct Sinking<'a>(&'a mut u32, Mood);
        impl Arm for Sinking<'_> {
            fn read(&mut self) -> Result<Reading, Error> {
                *self.0 += 1;
                let clock = match *self.0 {
                    10..=17 => 1.0,
                    18..=25 => 1.6 + 0.06 * f64::from(*self.0 - 18),
                    _ => 2.0,
                };
                Ok(Reading { time_us: (self.1.borrow_mut())(), clock_ghz: Some(clock) })
            }
        }
        let mut candidate = Sinking(&mut reading, Rc::clone(&mood));
        let mut other = Made { time_us: 1.0, clock_ghz: Some(2.0), mood };
        let rule = Rule { most_blocks: 30, ..Rule::default() };
        let duel = duel(&mut candidate, &mut other, &rule, 1, || true).unwrap().unwrap();
        assert!(duel.throttled >= 4 && duel.unsteady >= 1, "{} {}", duel.throttled, duel.unsteady);
    }
}
