//! Comparing two things that were timed.
//!
//! A ratio above one means that the candidate is faster. The verdict follows from the 95 % interval of the ratio and a
//! margin below which a difference does not matter:
//!
//! - **FAST** when the whole interval is above one, and **SLOW** when it is below, by more than nothing and with the
//!   estimate itself past the margin;
//! - **SAME** when the whole interval is within the margin of one;
//! - **AMBIGUOUS** otherwise: more samples may decide.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    Resampler,
    samples::{interval, median, resampled},
};

/// A difference smaller than this does not matter, unless the caller says otherwise.
pub const MARGIN: f64 = 0.02;

/// Rounds below this give no interval worth the name.
const FEWEST_ROUNDS: usize = 5;

/// What a comparison says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Outcome {
    /// The candidate is faster.
    Fast,
    /// The candidate is slower.
    Slow,
    /// No difference that matters.
    Same,
    /// The samples do not decide.
    Ambiguous,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fast => "FAST",
            Self::Slow => "SLOW",
            Self::Same => "SAME",
            Self::Ambiguous => "AMBIGUOUS",
        })
    }
}

/// How many times as fast a candidate is, with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Time of the other over time of the candidate.
    pub ratio: f64,
    /// 95 % bootstrap interval of the ratio.
    pub interval: [f64; 2],
    /// Rounds, or samples of the smaller set, behind it.
    pub rounds: usize,
    /// The verdict.
    pub verdict: Outcome,
    /// What is not excluded by a duel, however often it was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<[f64; 2]>,
    /// 95 % bootstrap interval of the ratio in cycles, where the device's clock can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cycles: Option<[f64; 2]>,
    /// Blocks set aside because the clock sank or moved.
    #[serde(default)]
    pub discarded: usize,
}

impl Comparison {
    /// Compares rounds that were timed side by side: the statistic is the log-ratio of the medians of each round, so what
    /// disturbs a whole round disturbs both sides.
    pub fn paired(candidate: &[Vec<f64>], other: &[Vec<f64>], margin: f64) -> Option<Self> {
        let rounds = candidate.iter().zip(other).filter(|(a, b)| !a.is_empty() && !b.is_empty());
        let logs: Vec<f64> = rounds.map(|(a, b)| (median(b) / median(a)).ln()).collect();
        if logs.is_empty() {
            return None;
        }
        let estimates = resampled(&mut Resampler::new(), &logs);
        Some(Self::new(median(&logs), interval(&estimates), margin, logs.len()))
    }

    /// Compares two sets that were timed at different times: the log-ratio of their medians.
    pub fn unpaired(candidate: &[f64], other: &[f64], margin: f64) -> Option<Self> {
        if candidate.is_empty() || other.is_empty() {
            return None;
        }
        let mut resampler = Resampler::new();
        let (a, b) = (resampled(&mut resampler, candidate), resampled(&mut resampler, other));
        let estimates: Vec<f64> = a.iter().zip(&b).map(|(a, b)| (b / a).ln()).collect();
        let fewest = candidate.len().min(other.len());
        Some(Self::new((median(other) / median(candidate)).ln(), interval(&estimates), margin, fewest))
    }

    fn new(log: f64, [low, high]: [f64; 2], margin: f64, rounds: usize) -> Self {
        let within = (1.0 + margin).ln();
        let verdict = match () {
            () if rounds < FEWEST_ROUNDS => Outcome::Ambiguous,
            () if low >= -within && high <= within => Outcome::Same,
            () if low > 0.0 && log > within => Outcome::Fast,
            () if high < 0.0 && log < -within => Outcome::Slow,
            () => Outcome::Ambiguous,
        };
        Self {
            ratio: log.exp(),
            interval: [low.exp(), high.exp()],
            rounds,
            verdict,
            sequence: None,
            cycles: None,
            discarded: 0,
        }
    }

    /// The comparison in plain words.
    pub fn sentence(&self, candidate: &str, other: &str) -> String {
        let [low, high] = self.interval;
        match self.verdict {
            Outcome::Fast => {
                format!(
                    "{candidate} is {:.2}× as fast as {other} (95 % interval {low:.2}–{high:.2})",
                    self.ratio
                )
            }
            Outcome::Slow => format!(
                "{candidate} is {:.2}× as slow as {other} (95 % interval {:.2}–{:.2})",
                1.0 / self.ratio,
                1.0 / high,
                1.0 / low
            ),
            Outcome::Same => format!("{candidate} and {other} are equally fast (ratio {low:.2}–{high:.2})"),
            // The interval may lie on one side and still be all luck, if it was looked at often or made of little.
            Outcome::Ambiguous if self.rounds < FEWEST_ROUNDS || low > 1.0 || high < 1.0 => format!(
                "{candidate} seems {:.2}× as fast as {other}, but {} too few to say so",
                self.ratio,
                if self.rounds == 1 {
                    "1 round is".to_owned()
                } else {
                    format!("{} rounds are", self.rounds)
                }
            ),
            Outcome::Ambiguous => {
                format!("no difference shown between {candidate} and {other} (ratio {low:.2}–{high:.2})")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times around `mean` with 5 % noise; `seed` keeps sets apart.
    fn times(mean: f64, count: usize, seed: usize) -> Vec<f64> {
        let mut noise = Resampler::new();
        for _ in 0..seed * 1000 {
            noise.below(2);
        }
        (0..count).map(|_| mean * (0.95 + noise.below(1000) as f64 / 10_000.0)).collect()
    }

    #[test]
    fn verdicts_follow_the_interval() {
        let base = times(100.0, 100, 1);
        let verdict = |candidate: &[f64]| Comparison::unpaired(candidate, &base, MARGIN).unwrap().verdict;
        assert_eq!(verdict(&times(80.0, 100, 2)), Outcome::Fast);
        assert_eq!(verdict(&times(125.0, 100, 3)), Outcome::Slow);
        assert_eq!(verdict(&times(100.0, 100, 4)), Outcome::Same);
        // Four samples prove nothing, however far apart.
        assert_eq!(verdict(&times(50.0, 4, 5)), Outcome::Ambiguous);
    }

    #[test]
    fn what_is_not_shown_is_not_said() {
        let say = |ratio: f64, [low, high]: [f64; 2], rounds| {
            let comparison = Comparison::new(ratio.ln(), [low.ln(), high.ln()], MARGIN, rounds);
            Comparison { verdict: Outcome::Ambiguous, ..comparison }.sentence("new", "old")
        };
        assert_eq!(
            say(2.7, [2.5, 2.9], 8),
            "new seems 2.70× as fast as old, but 8 rounds are too few to say so"
        );
        assert_eq!(
            say(2.7, [2.7, 2.7], 1),
            "new seems 2.70× as fast as old, but 1 round is too few to say so"
        );
        assert_eq!(say(1.1, [0.9, 1.3], 9), "no difference shown between new and old (ratio 0.90–1.30)");
    }

    #[test]
    fn pairing_cancels_what_disturbs_a_whole_round() {
        // The machine slows down fivefold over the run; the candidate is always 10 % faster.
        let drift = |scale: f64| -> Vec<Vec<f64>> {
            (0..10).map(|r| times(scale * (1.0 + 0.5 * r as f64), 10, 10 + r)).collect()
        };
        let paired = Comparison::paired(&drift(90.0), &drift(100.0), MARGIN).unwrap();
        assert_eq!(paired.verdict, Outcome::Fast);
        assert!((paired.ratio - 100.0 / 90.0).abs() < 0.01, "{paired:?}");
    }

    #[test]
    fn a_thing_is_not_faster_than_itself() {
        let mut wrong = 0;
        for seed in 0..100 {
            let a: Vec<_> = (0..10).map(|r| times(100.0, 10, 31 * seed + 2 * r)).collect();
            let b: Vec<_> = (0..10).map(|r| times(100.0, 10, 31 * seed + 2 * r + 1)).collect();
            let word = Comparison::paired(&a, &b, MARGIN).unwrap().verdict;
            wrong += usize::from(matches!(word, Outcome::Fast | Outcome::Slow));
        }
        assert!(wrong <= 1, "{wrong} of 100");
    }
}
