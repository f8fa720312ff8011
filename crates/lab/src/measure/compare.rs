//! Comparing the samples of two kernels or baselines.
//!
//! A ratio above one means that the candidate is faster. Side by side, in blocks or rounds whose order is drawn, the rule of
//! duels decides ([`super::duel`]); what was measured at different times is compared run by run ([`super::runs`]).

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    Resampler,
    duel::{Rule, outcome_of},
    samples::{interval, median, resampled},
    sequence,
};

/// A difference smaller than this does not matter between stored runs, unless the caller says otherwise.
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
    /// The ratio of the median times that stand beside it in a table, where it comes from a duel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_medians: Option<f64>,
}

/// A ratio of medians further than this from the duel's is shown beside it.
const APART: f64 = 0.1;

impl Comparison {
    /// Compares rounds that were timed side by side, in an order drawn by chance: the log-ratio of the medians of each round is
    /// what a duel's block gives, and the rule of duels decides.
    pub fn paired(candidate: &[Vec<f64>], other: &[Vec<f64>], margin: f64) -> Option<Self> {
        let rounds = candidate.iter().zip(other).filter(|(a, b)| !a.is_empty() && !b.is_empty());
        let logs: Vec<f64> = rounds.map(|(a, b)| (median(b) / median(a)).ln()).collect();
        if logs.is_empty() {
            return None;
        }
        let alpha = Rule::default().alpha;
        let [low, high] = interval(&resampled(&mut Resampler::new(), &logs));
        let [below, above] = sequence::interval(&logs, alpha);
        Some(Self {
            ratio: median(&logs).exp(),
            interval: [low.exp(), high.exp()],
            rounds: logs.len(),
            verdict: outcome_of(&logs, margin, alpha),
            // JSON has no infinity.
            sequence: Some([below.exp(), above.exp().min(f64::MAX)]),
            cycles: None,
            discarded: 0,
            of_medians: None,
        })
    }

    /// With the ratio of the medians that a table shows beside it. A word that they contradict is not said: one of the two
    /// sides has more than one speed, and which of them it had was chance.
    pub fn beside_medians(self, of_medians: f64) -> Self {
        let contradicted = match self.verdict {
            Outcome::Fast => of_medians < 1.0,
            Outcome::Slow => of_medians > 1.0,
            Outcome::Same | Outcome::Ambiguous => false,
        };
        let verdict = if contradicted { Outcome::Ambiguous } else { self.verdict };
        Self { verdict, of_medians: Some(of_medians), ..self }
    }

    /// The ratio of the medians, where it is another than this one.
    pub fn medians_apart(&self) -> Option<f64> {
        self.of_medians.filter(|of_medians| (of_medians / self.ratio).ln().abs() > APART)
    }

    /// The comparison in plain words.
    pub fn sentence(&self, candidate: &str, other: &str) -> String {
        let [low, high] = self.interval;
        if let Some(of_medians) = self.medians_apart().filter(|_| self.verdict == Outcome::Ambiguous) {
            return format!(
                "{candidate} beside {other}: {:.2}× in the duel, {of_medians:.2}× by the medians; they do not agree, so neither \
                 is faster",
                self.ratio
            );
        }
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

    fn ambiguous(ratio: f64, interval: [f64; 2], rounds: usize) -> Comparison {
        let verdict = Outcome::Ambiguous;
        let (sequence, cycles, of_medians) = (None, None, None);
        Comparison { ratio, interval, rounds, verdict, sequence, cycles, discarded: 0, of_medians }
    }

    /// A word and the medians beside it never contradict each other.
    #[test]
    fn what_the_medians_contradict_is_not_said() {
        let fast = Comparison { verdict: Outcome::Fast, ..ambiguous(1.36, [1.3, 1.4], 20) };
        let agreeing = fast.beside_medians(1.30);
        assert_eq!((agreeing.verdict, agreeing.medians_apart()), (Outcome::Fast, None));
        let apart = fast.beside_medians(1.01);
        assert_eq!((apart.verdict, apart.medians_apart()), (Outcome::Fast, Some(1.01)));
        let contradicted = fast.beside_medians(0.93);
        assert_eq!(contradicted.verdict, Outcome::Ambiguous);
        let sentence = contradicted.sentence("new", "old");
        assert!(sentence.contains("1.36× in the duel, 0.93× by the medians"), "{sentence}");
        let slow = Comparison { verdict: Outcome::Slow, ..ambiguous(0.82, [0.8, 0.85], 20) };
        assert_eq!(slow.beside_medians(1.14).verdict, Outcome::Ambiguous);
        assert_eq!(slow.beside_medians(0.80).verdict, Outcome::Slow);
    }

    #[test]
    fn what_is_not_shown_is_not_said() {
        let say = |ratio: f64, interval: [f64; 2], rounds| {
            ambiguous(ratio, interval, rounds).sentence("new", "old")
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

    /// Ten rounds whose order is drawn, on a machine that remembers 95 % of its last trouble and slows down whoever comes
    /// second by 3 %: at most 1 % may be called different.
    #[test]
    fn a_thing_is_not_faster_than_itself() {
        use evosdpa_oracle::rng::Rng;
        const RUNS: u64 = 2000;
        let mut wrong = 0;
        for run in 0..RUNS {
            let (mut rng, mut state) = (Rng::of_series(5, run), 0.0);
            let mut sides = [Vec::new(), Vec::new()];
            for _ in 0..10 {
                let first = usize::from(rng.coin());
                for (place, side) in [first, 1 - first].into_iter().enumerate() {
                    let turn = (0..5).map(|_| {
                        state = 0.95 * state + 0.02 * rng.normal();
                        100.0 * f64::exp(state) * (1.0 + 0.03 * place as f64)
                    });
                    sides[side].push(turn.collect::<Vec<f64>>());
                }
            }
            let word = Comparison::paired(&sides[0], &sides[1], 0.01).unwrap().verdict;
            wrong += u64::from(matches!(word, Outcome::Fast | Outcome::Slow));
        }
        println!("{wrong} of {RUNS}");
        assert!(wrong <= RUNS / 100, "{wrong} of {RUNS}");
    }
}
