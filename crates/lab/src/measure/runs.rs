//! Comparing what was measured at different times: the unit is the run.
//!
//! Samples of one run share its process, its addresses and what else the machine did meanwhile, so a thousand of them say
//! no more about the next run than a few. What differs between two versions is therefore held against what differs between
//! runs of one version, as Kalibera and Jones ask for ("Rigorous benchmarking in reasonable time", ISMM 2013): the level of
//! repetition that is compared is the highest one that varies. One run each says nothing.
//!
//! A run is summed up by two numbers: its median, and its 10th percentile, which a busy machine disturbs least. FAST and SLOW
//! need all of these:
//!
//! - at least five runs on each side: fewer cannot reach 1 % by any order of theirs (5 against 5 has 252 orders, two of them
//!   extreme);
//! - every run of one side beyond every run of the other, in both numbers;
//! - the 99 % interval of the ratio of the medians (Welch, on logarithms, runs as the unit) beyond the margin;
//! - a gap between the two sides several times as wide as what the runs of either side differ by among themselves. A machine
//!   whose speed wanders moves whole sets of runs that were made one after the other, but then each set is spread, too. Five
//!   runs need four times, six need three times, eight need twice: so many that 2 % of wrong words are kept on a machine of
//!   which each run remembers 97 % of what disturbed the last (a test).
//!
//! No rule can tell two programs from two moments if the machine changes its speed between the two sets and holds it: then
//! the runs of the two sets have to be made in turns.

use serde::Serialize;

use super::{
    compare::Outcome,
    samples::{median, quantile_of},
};

/// Runs that each side needs.
pub const FEWEST_RUNS: usize = 5;

/// The quantile that is disturbed least.
const QUIET: f64 = 0.1;

/// How many times as fast a set of runs is as another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OfRuns {
    /// Time of the other over time of the candidate: of the geometric means of the runs' medians.
    pub ratio: f64,
    /// 99 % interval of the ratio, with runs as the unit; `None` with one run on a side.
    pub interval: Option<[f64; 2]>,
    /// Runs of the candidate, and of the other.
    pub runs: [usize; 2],
    /// The verdict; AMBIGUOUS wherever it cannot be known.
    pub verdict: Outcome,
}

impl OfRuns {
    /// Compares runs by their samples; `None` when a side has none. A margin of 0.02 is 2 %.
    pub fn compare(candidate: &[&[f64]], other: &[&[f64]], margin: f64) -> Option<Self> {
        let sides = [Side::of(candidate)?, Side::of(other)?];
        let [own, other] = &sides;
        let log = mean(&other.medians) - mean(&own.medians);
        let interval = welch(&own.medians, &other.medians).map(|half| [log - half, log + half]);
        let enough = sides.iter().all(|side| side.medians.len() >= FEWEST_RUNS);
        let within = (1.0 + margin).ln();
        let verdict = match interval {
            Some([low, high]) if enough => match () {
                () if low >= -within && high <= within => Outcome::Same,
                () if low > within && own.is_below(other) => Outcome::Fast,
                () if high < -within && other.is_below(own) => Outcome::Slow,
                () => Outcome::Ambiguous,
            },
            _ => Outcome::Ambiguous,
        };
        Some(Self {
            ratio: log.exp(),
            // JSON has no infinity, and two runs may say nearly as little.
            interval: interval.map(|interval| interval.map(|log| log.exp().min(f64::MAX))),
            runs: sides.map(|side| side.medians.len()),
            verdict,
        })
    }

    /// Whether there are too few runs to say anything.
    pub fn cannot_know(&self) -> bool {
        self.runs.iter().any(|&runs| runs < FEWEST_RUNS)
    }
}

/// Logarithms of what each run comes to.
struct Side {
    medians: Vec<f64>,
    quiet: Vec<f64>,
}

impl Side {
    fn of(runs: &[&[f64]]) -> Option<Self> {
        let whole: Vec<&[f64]> = runs.iter().copied().filter(|samples| !samples.is_empty()).collect();
        (!whole.is_empty()).then(|| Self {
            medians: whole.iter().map(|samples| median(samples).ln()).collect(),
            quiet: whole.iter().map(|samples| quantile_of(samples, QUIET).ln()).collect(),
        })
    }

    /// Whether every run is faster than every run of the other, by several times what either's runs differ by.
    fn is_below(&self, other: &Self) -> bool {
        let times = match self.medians.len().min(other.medians.len()) {
            ..=5 => 4.0,
            6..=7 => 3.0,
            _ => 2.0,
        };
        [(&self.medians, &other.medians), (&self.quiet, &other.quiet)].into_iter().all(|(own, other)| {
            let ([low, high], [other_low, other_high]) = (range(own), range(other));
            other_low > high && other_low - high >= times * (high - low).max(other_high - other_low)
        })
    }
}

fn range(values: &[f64]) -> [f64; 2] {
    values.iter().fold([f64::INFINITY, f64::NEG_INFINITY], |[low, high], x| [low.min(*x), high.max(*x)])
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Half the width of Welch's 99 % interval of a difference of means.
fn welch(a: &[f64], b: &[f64]) -> Option<f64> {
    let of_mean = |values: &[f64]| {
        let (count, mean) = (values.len() as f64, mean(values));
        let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
        (values.len() > 1).then(|| (squares / (count - 1.0) / count, count - 1.0))
    };
    let ((va, na), (vb, nb)) = (of_mean(a)?, of_mean(b)?);
    let total = va + vb;
    // Welch and Satterthwaite's degrees of freedom; without any spread there is nothing to divide.
    let freedom = if total > 0.0 { total * total / (va * va / na + vb * vb / nb) } else { na.min(nb) };
    Some(student_99(freedom) * total.sqrt())
}

/// The 99.5 % quantile of Student's t, at the next lower number of degrees that is listed, which is on the safe side.
fn student_99(freedom: f64) -> f64 {
    const LISTED: [(f64, f64); 15] = [
        (60.0, 2.660),
        (30.0, 2.750),
        (20.0, 2.845),
        (15.0, 2.947),
        (12.0, 3.055),
        (10.0, 3.169),
        (9.0, 3.250),
        (8.0, 3.355),
        (7.0, 3.499),
        (6.0, 3.707),
        (5.0, 4.032),
        (4.0, 4.604),
        (3.0, 5.841),
        (2.0, 9.925),
        (0.0, 63.657),
    ];
    // A sum of rounded squares may fall a hair short of a whole number.
    LISTED.iter().find(|(least, _)| freedom + 1e-9 >= *least).map_or(63.657, |(_, t)| *t)
}

/// How often sets of runs of one and the same thing are called different.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rates {
    /// Comparisons.
    pub comparisons: usize,
    /// Called FAST.
    pub fast: usize,
    /// Called SLOW.
    pub slow: usize,
    /// Called SAME.
    pub same: usize,
    /// Left open.
    pub ambiguous: usize,
}

impl Rates {
    /// Cuts runs of one thing, in the order they were made, into sets of neighbours, and compares each set with each later one.
    pub fn against_itself(runs: &[&[f64]], per_set: usize, margin: f64) -> Self {
        let sets: Vec<&[&[f64]]> = runs.chunks_exact(per_set.max(1)).collect();
        let mut rates = Self::default();
        for (i, earlier) in sets.iter().enumerate() {
            for later in &sets[i + 1..] {
                let Some(compared) = OfRuns::compare(later, earlier, margin) else { continue };
                rates.comparisons += 1;
                match compared.verdict {
                    Outcome::Fast => rates.fast += 1,
                    Outcome::Slow => rates.slow += 1,
                    Outcome::Same => rates.same += 1,
                    Outcome::Ambiguous => rates.ambiguous += 1,
                }
            }
        }
        rates
    }

    /// Share of comparisons that saw a difference.
    pub fn false_positives(&self) -> f64 {
        (self.fast + self.slow) as f64 / self.comparisons.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::compare::MARGIN;
    use evosdpa_oracle::rng::Rng;

    /// Runs of 40 samples each; `moods` is how much the next run is slower than the last.
    fn runs(
        count: usize,
        mean_us: f64,
        rng: &mut Rng,
        mut mood: impl FnMut(&mut Rng) -> f64,
    ) -> Vec<Vec<f64>> {
        (0..count)
            .map(|_| {
                let scale = mean_us * mood(rng);
                (0..40).map(|_| scale * (1.0 + 0.03 * rng.normal().abs())).collect()
            })
            .collect()
    }

    fn compare(a: &[Vec<f64>], b: &[Vec<f64>]) -> OfRuns {
        let slices = |runs: &[Vec<f64>]| runs.iter().map(Vec::clone).collect::<Vec<_>>();
        let (a, b) = (slices(a), slices(b));
        let (a, b): (Vec<&[f64]>, Vec<&[f64]>) =
            (a.iter().map(Vec::as_slice).collect(), b.iter().map(Vec::as_slice).collect());
        OfRuns::compare(&b, &a, MARGIN).unwrap()
    }

    #[test]
    fn one_run_each_cannot_know_and_five_can() {
        let rng = &mut Rng::new(1);
        let mut quiet = |count, mean_us| runs(count, mean_us, rng, |rng| 1.0 + 0.002 * rng.normal());
        let alone = compare(&quiet(1, 100.0), &quiet(1, 150.0));
        assert_eq!((alone.verdict, alone.cannot_know(), alone.interval), (Outcome::Ambiguous, true, None));
        let four = compare(&quiet(4, 100.0), &quiet(4, 150.0));
        assert_eq!((four.verdict, four.cannot_know()), (Outcome::Ambiguous, true));
        let slower = compare(&quiet(5, 100.0), &quiet(5, 110.0));
        assert_eq!((slower.verdict, slower.runs), (Outcome::Slow, [5, 5]), "{slower:?}");
        assert!((slower.ratio - 1.0 / 1.1).abs() < 0.01, "{slower:?}");
        assert_eq!(compare(&quiet(5, 110.0), &quiet(6, 100.0)).verdict, Outcome::Fast);
        assert_eq!(compare(&quiet(6, 100.0), &quiet(6, 100.0)).verdict, Outcome::Same);
        // More runs let a smaller gap suffice.
        assert_eq!(compare(&quiet(8, 100.0), &quiet(8, 104.0)).verdict, Outcome::Slow);
    }

    /// However many samples: what counts is whether the runs agree among themselves.
    #[test]
    fn runs_that_differ_among_themselves_decide_nothing() {
        let rng = &mut Rng::new(2);
        let mut noisy = |mean_us| runs(6, mean_us, rng, |rng| 1.0 + 0.3 * rng.unit());
        let compared = compare(&noisy(100.0), &noisy(112.0));
        assert_eq!(compared.verdict, Outcome::Ambiguous, "{compared:?}");
    }

    /// Five kinds of machine: quiet, busy at random, two whose speed wanders from run to run, and one of two speeds that
    /// last for about twenty runs. Neighbouring runs are alike on the last three, which makes sets of neighbours differ.
    #[test]
    fn sets_of_one_thing_are_rarely_called_different() {
        for (kind, per_set) in (0..5).flat_map(|kind| [5, 6, 8].map(|per_set| (kind, per_set))) {
            let mut rates = Rates::default();
            for seed in 0..40 {
                let (rng, mut state) = (&mut Rng::of_series(seed, kind), 0.0_f64);
                let made = runs(60, 100.0, rng, |rng| match kind {
                    0 => 1.0 + 0.003 * rng.normal(),
                    1 => 1.0 + 0.5 * rng.unit(),
                    2 | 3 => {
                        state = if kind == 2 { 0.9 } else { 0.97 } * state + 0.05 * rng.normal();
                        state.exp()
                    }
                    _ => {
                        state = if rng.below(20) == 0 { 0.3 - state } else { state };
                        (state + 0.05 * rng.normal()).exp()
                    }
                });
                let slices: Vec<&[f64]> = made.iter().map(Vec::as_slice).collect();
                let found = Rates::against_itself(&slices, per_set, MARGIN);
                rates.comparisons += found.comparisons;
                rates.fast += found.fast;
                rates.slow += found.slow;
            }
            println!("kind {kind}, {per_set} runs: {rates:?}");
            assert!(rates.false_positives() <= 0.02, "kind {kind}, {per_set} runs: {rates:?}");
        }
    }

    #[test]
    fn students_quantiles_are_those_of_the_tables() {
        assert_eq!((student_99(8.0), student_99(8.7), student_99(1.0)), (3.355, 3.355, 63.657));
        assert_eq!(student_99(1e9), 2.660);
        // Five runs each of spread 1: t(8) · √(2/5).
        let values = [-1.2649, -0.6325, 0.0, 0.6325, 1.2649];
        assert!((welch(&values, &values).unwrap() - 3.355 * (0.4_f64).sqrt()).abs() < 1e-3);
    }
}
