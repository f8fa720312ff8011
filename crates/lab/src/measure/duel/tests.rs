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

fn run(ratio: f64, clock: Option<[f64; 2]>, rule: &Rule, seed: u64, mood: Box<dyn FnMut() -> f64>) -> Duel {
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
            3 => 1.0 + 0.005 * rng.normal().abs() + if rng.below(10) == 0 { 2.0 * rng.unit() } else { 0.0 },
            // A drift that never ends, and a period of four readings.
            _ => (1.0 + 0.001 * step) * (1.0 + 0.05 * f64::from(u8::from(step as u64 % 4 < 2))),
        }
    })
}

/// The same coins, each turned over.
struct Swapped(Rng);

impl Draws for Swapped {
    fn first(&mut self) -> usize {
        1 - self.0.first()
    }

    fn one_in(&mut self, times: usize) -> bool {
        self.0.one_in(times)
    }
}

/// A machine on which everything has its price for whoever comes next, so that no order goes unnoticed.
struct Machine {
    log: String,
    state: u64,
}

impl Machine {
    /// What the next reading is multiplied with: it depends on every operation so far, and on whose they were.
    fn does(&mut self, operation: &str, by: char) -> f64 {
        self.log.push_str(operation);
        self.log.push(by);
        for byte in operation.bytes().chain([by as u8]) {
            self.state = (self.state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3).rotate_left(7);
        }
        1.0 + 0.3 * Rng::new(self.state).unit()
    }
}

struct Touchy {
    name: char,
    time_us: f64,
    machine: Rc<RefCell<Machine>>,
}

impl Arm for Touchy {
    fn read(&mut self) -> Result<Reading, Error> {
        let noise = self.machine.borrow_mut().does("read", self.name);
        Ok(Reading { time_us: self.time_us * noise, clock_ghz: Some(2.0 - 0.01 * noise) })
    }

    fn relocate(&mut self) -> Result<(), Error> {
        self.machine.borrow_mut().does("move", self.name);
        Ok(())
    }

    fn audit(&mut self) -> Result<(), Error> {
        self.machine.borrow_mut().does("audit", self.name);
        Ok(())
    }
}

/// Swapping the labels, and with them the coins, gives the same operations in the same order on the same kernels: every
/// log-ratio has the other sign, the words are opposite, and nothing else is different. Were one operation the candidate's
/// alone, or always the candidate's first, the two logs would differ.
#[test]
fn swapping_the_labels_flips_the_sign_and_nothing_else() {
    let rule = Rule { most_blocks: 50, margin: 0.002, ..Rule::default() };
    let mut words = std::collections::BTreeMap::new();
    for seed in 1..=300 {
        let machine = || Rc::new(RefCell::new(Machine { log: String::new(), state: seed }));
        let arms = |machine: &Rc<RefCell<Machine>>| {
            let ratio = 1.0 + 0.4 * (Rng::of_series(7, seed).unit() - 0.5);
            [('x', 100.0), ('y', 100.0 * ratio)].map(|(name, time_us)| Touchy {
                name,
                time_us,
                machine: Rc::clone(machine),
            })
        };
        let (one, two) = (machine(), machine());
        let ([mut x, mut y], [mut x2, mut y2]) = (arms(&one), arms(&two));
        let as_is = fight(Pair([&mut x, &mut y]), &rule, &mut Rng::new(seed), || true).unwrap();
        let swapped = fight(Pair([&mut y2, &mut x2]), &rule, &mut Swapped(Rng::new(seed)), || true).unwrap();
        assert_eq!(one.borrow().log, two.borrow().log, "seed {seed}");
        let opposite = match as_is.verdict {
            Outcome::Fast => Outcome::Slow,
            Outcome::Slow => Outcome::Fast,
            same => same,
        };
        assert_eq!((swapped.verdict, swapped.ended), (opposite, as_is.ended), "seed {seed}");
        for unit in [
            |fought: &Fought| fought.time.logs.clone(),
            |fought: &Fought| fought.cycles.as_ref().unwrap().logs.clone(),
        ] {
            let flipped: Vec<f64> = unit(&swapped).iter().map(|log| -log).collect();
            assert_eq!(unit(&as_is), flipped, "seed {seed}");
        }
        assert!(one.borrow().log.contains("auditx") == one.borrow().log.contains("audity"));
        *words.entry(as_is.verdict.to_string()).or_insert(0) += 1;
    }
    assert!(["FAST", "SLOW", "AMBIGUOUS"].iter().all(|word| words.contains_key(*word)), "{words:?}");
}

/// A tune gives up early on what is far slower. Noise alone must not make it do so.
#[test]
fn a_thing_is_not_hopeless_against_itself() {
    let rule = Rule { most_blocks: 12, hopeless_below: 0.85, ..Rule::default() };
    const RUNS: u64 = 4000;
    for kind in 0..5 {
        let hopeless = (0..RUNS)
            .filter(|&run_number| {
                let mood: Mood = Rc::new(RefCell::new(noise(kind, run_number)));
                let mut sides =
                    [0, 1].map(|_| Made { time_us: 100.0, clock_ghz: None, mood: Rc::clone(&mood) });
                let [candidate, other] = &mut sides;
                let draws = &mut Rng::of_series(98, run_number);
                fight(Pair([candidate, other]), &rule, draws, || true).unwrap().ended == Ended::Hopeless
            })
            .count();
        assert!(hopeless <= RUNS as usize / 1000, "noise {kind}: {hopeless} of {RUNS}");
    }
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
            let mut sides = [0, 1].map(|_| Made { time_us: 100.0, clock_ghz: None, mood: Rc::clone(&mood) });
            let [candidate, other] = &mut sides;
            let seed = Rng::of_series(99, run_number).below(1 << 30) as u64;
            let draws = &mut Rng::new(seed);
            let word = fight(Pair([candidate, other]), &rule, draws, || true).unwrap().verdict;
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
        assert!(duel.time.sequence[0] > 1.01 && duel.time.sequence[1] > 1.05 && duel.ended == Ended::Decided);
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
