//! How far an output is from an answer, element by element and in sum.

use serde::{Deserialize, Serialize};

use evosdpa_core::Float;

/// How far an output is from the oracle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Errors {
    /// Largest absolute error.
    pub max: f64,
    /// Mean absolute error.
    pub mean: f64,
    /// ‖O − ref‖ / ‖ref‖; 0 when both are zero.
    pub relative: f64,
    /// Percent of elements that break the element-wise rules.
    pub percent_bad: f64,
    /// Elements that are finite where the oracle is not, or the other way round.
    pub wrongly_finite: usize,
    /// Where the largest error is: `[batch, query head, query, column]`.
    pub worst_at: [usize; 4],
}

/// Sums up errors, one element at a time.
#[derive(Default)]
pub(super) struct Distances {
    pub(super) count: usize,
    pub(super) max: f64,
    /// Elements that break an element-wise rule; the caller's rules are the caller's to count.
    pub(super) bad: usize,
    sum: f64,
    sum_squares: f64,
    reference_squares: f64,
    worst_at: [usize; 4],
    wrongly_finite: usize,
}

impl Distances {
    /// The error of one element; `None` where the answer or the output is not finite and there is nothing to measure.
    pub(super) fn add(&mut self, got: f64, want: f64, output: Float, at: [usize; 4]) -> Option<f64> {
        self.count += 1;
        if !want.is_finite() {
            // Where the truth overflows the dtype or is NaN there is nothing to measure.
            self.wrongly_finite += usize::from(got.is_finite());
            return None;
        }
        if !got.is_finite() && output.round(want).is_finite() {
            self.wrongly_finite += 1;
            self.bad += 1;
            return None;
        }
        let error = (got - want).abs();
        self.sum += error;
        self.sum_squares += error * error;
        self.reference_squares += want * want;
        if error > self.max {
            (self.max, self.worst_at) = (error, at);
        }
        Some(error)
    }

    /// An element without an answer, in a row of which only this is asked: to be written and finite.
    pub(super) fn add_unanswered(&mut self, got: f64) {
        self.wrongly_finite += usize::from(!got.is_finite());
    }

    /// Adds what another part of the same output has shown. Parts are merged in order: of equal errors the first counts.
    pub(super) fn merge(&mut self, other: Self) {
        self.count += other.count;
        self.bad += other.bad;
        self.sum += other.sum;
        self.sum_squares += other.sum_squares;
        self.reference_squares += other.reference_squares;
        self.wrongly_finite += other.wrongly_finite;
        if other.max > self.max {
            (self.max, self.worst_at) = (other.max, other.worst_at);
        }
    }

    pub(super) fn errors(&self) -> Errors {
        let count = self.count.max(1) as f64;
        Errors {
            max: self.max,
            mean: self.sum / count,
            relative: if self.sum_squares == 0.0 {
                0.0
            } else {
                (self.sum_squares / self.reference_squares).sqrt()
            },
            percent_bad: 100.0 * self.bad as f64 / count,
            wrongly_finite: self.wrongly_finite,
            worst_at: self.worst_at,
        }
    }
}
