//! When an answer is good enough.
//!
//! Three rules, each with a reason of its own; an answer passes when all that apply to its dtype pass.
//!
//! - **absolute** (f16, bf16): each element within 1e-3 of the oracle for V ~ N(0, 1), plus half a unit in the last place
//!   of the output format at that element. Attention is linear in V, so the 1e-3 grows with V's size.
//! - **twice-naive** (f16, bf16): FlashAttention's rule. The largest error is at most twice that of the unfused
//!   computation in the same dtype, plus output rounding.
//! - **bound** (every dtype): each element within a forward error bound of fp32 accumulation and of weights rounded to
//!   the dtype; see [`error_bound`].
//!
//! Where the oracle is not finite the answer must not be finite either, and nowhere else.

use serde::{Deserialize, Serialize};

use crate::{DType, Problem, TensorView, oracle::Reference};

/// Absolute tolerance of 16-bit kernels for V ~ N(0, 1).
pub const ABSOLUTE: f64 = 1e-3;

/// Unit roundoff of the fp32 arithmetic that every kernel accumulates in.
const U32: f64 = 5.960_464_477_539_063e-8;

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

/// One rule's word on an output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// The rule's name.
    pub name: String,
    /// Whether the output keeps it.
    pub passed: bool,
    /// The numbers behind the word.
    pub detail: String,
}

/// What all rules say of an output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// The distances.
    pub errors: Errors,
    /// Each rule's word.
    pub rules: Vec<Rule>,
}

impl Judgement {
    /// Whether every rule passed.
    pub fn passed(&self) -> bool {
        self.rules.iter().all(|rule| rule.passed)
    }

    /// The rules that failed, with their numbers; or the largest error.
    pub fn summary(&self) -> String {
        let failed: Vec<String> = self
            .rules
            .iter()
            .filter(|rule| !rule.passed)
            .map(|rule| format!("{}: {}", rule.name, rule.detail))
            .collect();
        if failed.is_empty() { format!("max error {:.2e}", self.errors.max) } else { failed.join("; ") }
    }
}

/// What an output is judged against.
#[derive(Clone, Debug)]
pub struct Truth {
    /// The oracle's answer.
    pub reference: Reference,
    /// Largest error of the unfused computation in the problem's dtype; `None` for f32, to which the rule does not apply.
    pub naive_max_error: Option<f64>,
    /// How large V is ([`crate::inputs::Family::value_scale`]).
    pub value_scale: f64,
}

/// Judges an output and, when there is one, its LSE. The view must have the problem's output shape.
pub fn judge(problem: &Problem, truth: &Truth, o: &TensorView<'_>, lse: Option<&[f32]>) -> Judgement {
    let dtype = problem.dtype();
    let reference = &truth.reference;
    let dim_v = reference.dim_v;
    let mut tally = Tally::default();
    let mut row = Vec::with_capacity(dim_v);
    let sizes = problem.sizes();
    for r in 0..problem.rows() {
        let (head, s) = (r / sizes.seq_q, r % sizes.seq_q);
        let (b, h) = (head / sizes.heads_q, head % sizes.heads_q);
        o.row_f64(b, h, s, &mut row);
        for (d, &got) in row.iter().enumerate() {
            let want = reference.o[r * dim_v + d];
            let absolute = ABSOLUTE * truth.value_scale + dtype.rounding_error(want);
            let bound = error_bound(problem, reference, r, d);
            tally.add(got, want, absolute, bound, dtype, [b, h, s, d]);
        }
    }
    let errors = tally.errors();
    let element_rule = |name: &str, broken: usize, worst: f64| Rule {
        name: name.to_owned(),
        passed: broken == 0,
        detail: format!(
            "{broken} of {} elements past the tolerance, the worst at {worst:.2}× of it; max error {:.2e} at {:?}",
            tally.count, errors.max, errors.worst_at
        ),
    };
    let mut rules = vec![Rule {
        name: "finite".to_owned(),
        passed: errors.wrongly_finite == 0,
        detail: format!(
            "{} elements are NaN or infinite where they must not be, or the reverse",
            errors.wrongly_finite
        ),
    }];
    if dtype != DType::F32 {
        rules.push(element_rule("absolute", tally.past_absolute, tally.worst_absolute));
    }
    rules.push(element_rule("bound", tally.past_bound, tally.worst_bound));
    if let Some(naive) = truth.naive_max_error {
        let allowed = 2.0 * naive + tally.largest_rounding;
        rules.push(Rule {
            name: "twice-naive".to_owned(),
            passed: errors.max <= allowed,
            detail: format!(
                "max error {:.2e}, allowed {allowed:.2e} (2 × {naive:.2e} + rounding)",
                errors.max
            ),
        });
    }
    if let Some(lse) = lse {
        rules.push(judge_lse(problem, reference, lse));
    }
    Judgement { errors, rules }
}

/// A bound on |O − exact| for a kernel that accumulates in fp32 and rounds weights to the dtype.
///
/// A score is a sum of `d` products, so its error is at most `(d + 3)·u·Σ|q·k|·scale`; the exponent's argument and the
/// exponential add a few `u`, growing with the distance from the maximum; rounding a weight adds the dtype's own unit
/// roundoff. A relative error ε of all weights moves the output by at most `2ε·Σ w|v|` (once in the numerator, once in
/// the sum), and adding up `n` terms by another `2n·u·Σ w|v|`. Last, the output itself is rounded.
pub fn error_bound(problem: &Problem, reference: &Reference, row: usize, column: usize) -> f64 {
    let dtype = problem.dtype();
    let scores = reference.score_size[row];
    let score_error = score_error(problem, reference, row);
    let weight_error = score_error + U32 * (8.0 + 2.0 * scores.range.min(110.0)) + dtype.unit_roundoff();
    let index = row * reference.dim_v + column;
    reference.abs_o[index] * (2.0 * weight_error + 2.0 * scores.keys as f64 * U32)
        + dtype.rounding_error(reference.o[index])
        + f32::MIN_POSITIVE as f64
}

fn score_error(problem: &Problem, reference: &Reference, row: usize) -> f64 {
    (problem.sizes().dim_qk + 3) as f64 * U32 * reference.score_size[row].absolute
}

fn judge_lse(problem: &Problem, reference: &Reference, lse: &[f32]) -> Rule {
    let base = if problem.dtype() == DType::F32 { 1e-5 } else { ABSOLUTE };
    let mut worst = 0.0f64;
    let mut broken = 0usize;
    for (row, (&got, &want)) in lse.iter().zip(&reference.lse).enumerate() {
        let got = got as f64;
        if got == want || (got.is_nan() && want.is_nan()) {
            continue;
        }
        let error = (got - want).abs();
        let allowed = base + score_error(problem, reference, row) + 4.0 * U32 * want.abs();
        broken += usize::from(error.is_nan() || error > allowed);
        worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
    }
    Rule {
        name: "lse".to_owned(),
        passed: broken == 0 && lse.len() == reference.lse.len(),
        detail: format!("{broken} of {} rows past the tolerance; max error {worst:.2e}", reference.lse.len()),
    }
}

#[derive(Default)]
struct Tally {
    count: usize,
    sum: f64,
    sum_squares: f64,
    reference_squares: f64,
    max: f64,
    worst_at: [usize; 4],
    wrongly_finite: usize,
    past_absolute: usize,
    past_bound: usize,
    bad: usize,
    worst_absolute: f64,
    worst_bound: f64,
    largest_rounding: f64,
}

impl Tally {
    fn add(&mut self, got: f64, want: f64, absolute: f64, bound: f64, dtype: DType, at: [usize; 4]) {
        self.count += 1;
        if !want.is_finite() {
            // Where the truth overflows the dtype or is NaN there is nothing to measure.
            self.wrongly_finite += usize::from(got.is_finite());
            return;
        }
        if !got.is_finite() && dtype.round(want).is_finite() {
            self.wrongly_finite += 1;
            self.bad += 1;
            return;
        }
        let error = (got - want).abs();
        self.sum += error;
        self.sum_squares += error * error;
        self.reference_squares += want * want;
        if error > self.max {
            (self.max, self.worst_at) = (error, at);
        }
        self.past_absolute += usize::from(error > absolute);
        self.past_bound += usize::from(error > bound);
        self.bad += usize::from(error > bound || (dtype != DType::F32 && error > absolute));
        self.worst_absolute = self.worst_absolute.max(error / absolute);
        self.worst_bound = self.worst_bound.max(error / bound);
        self.largest_rounding = self.largest_rounding.max(dtype.rounding_error(want));
    }

    fn errors(&self) -> Errors {
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
