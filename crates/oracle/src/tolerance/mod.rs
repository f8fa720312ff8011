//! When an answer is good enough.
//!
//! Rules, each with a reason of its own; an answer passes when all that apply to its dtype pass. The 8-bit dtypes have
//! theirs in [`eight_bit`]; for the others:
//!
//! - **absolute** (f16, bf16): each element within 1e-3 of the oracle for V ~ N(0, 1), plus half a unit in the last place
//!   of the output format at that element. Attention is linear in V, so the 1e-3 grows with V's size.
//!   In adversarial families, rows that see [`MANY_KEYS`] or more may add what rounding their weights can do, unless the problem asks for
//!   high precision.
//! - **twice-naive** (f16, bf16): FlashAttention's rule. The largest error is at most twice that of the unfused
//!   computation in the same dtype, plus output rounding. Where weights may be rounded, the unfused error counts as at least
//!   what that rounding can do: it rounds them too, and may have been lucky.
//! - **bound** (f32, f16, bf16): each element within a forward error bound of fp32 accumulation and of weights rounded to
//!   the dtype; see [`error_bound`].
//!
//! Where the oracle is not finite the answer must not be finite either, and nowhere else.

mod distance;
pub mod eight_bit;

use evosdpa_core::{Float, Problem, TensorView};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::reference::Reference;
use distance::Distances;
pub use distance::Errors;
use eight_bit::EndToEnd;

/// Absolute tolerance of 16-bit kernels for V ~ N(0, 1).
pub const ABSOLUTE: f64 = 1e-3;

/// Rows that see so many keys may show that their weights were rounded; those that see fewer may not.
pub const MANY_KEYS: usize = 256;

/// Unit roundoff of the fp32 arithmetic that every kernel accumulates in.
const U32: f64 = 5.960_464_477_539_063e-8;

/// One rule's word on an output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// The rule's name.
    pub name: String,
    /// Whether it can be asked of any output here; when not, `detail` says why and `passed` is true.
    pub applies: bool,
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

    /// Whether FlashAttention's own rule holds (twice the naive error; for f32 the error bound), with NaN and infinity
    /// where they belong. This is what other people's kernels promise, and what they are held to as baselines.
    pub fn passed_as_a_baseline(&self) -> bool {
        let twice_naive = self.rules.iter().any(|rule| rule.name == "twice-naive");
        let promised = |rule: &&Rule| match rule.name.as_str() {
            "finite" | "twice-naive" => true,
            "bound" => !twice_naive,
            _ => false,
        };
        self.rules.iter().filter(promised).all(|rule| rule.passed)
    }

    /// The rules that failed, with their numbers; or the largest error, and the rules that could not be applied.
    pub fn summary(&self) -> String {
        let told = |wanted: &dyn Fn(&Rule) -> bool| -> Vec<String> {
            let rules = self.rules.iter().filter(|rule| wanted(rule));
            rules.map(|rule| format!("{}: {}", rule.name, rule.detail)).collect()
        };
        let failed = told(&|rule| !rule.passed);
        if failed.is_empty() {
            let mut parts = vec![format!("max error {:.2e}", self.errors.max)];
            parts.extend(told(&|rule| !rule.applies));
            parts.join("; ")
        } else {
            failed.join("; ")
        }
    }
}

/// What an output is judged against.
#[derive(Clone, Debug)]
pub struct Truth {
    /// The oracle's answer; for 8-bit problems, to the dequantised inputs.
    pub reference: Reference,
    /// What the dtype is held to beside the oracle.
    pub standard: Standard,
    /// How large V is ([`crate::inputs::Family::value_scale`]).
    pub value_scale: f64,
}

/// What outputs are held to beside the oracle: a matter of the problem's dtype.
#[derive(Clone, Debug)]
pub enum Standard {
    /// f32: the error bound alone.
    Single,
    /// f16 and bf16: also the absolute tolerance, and the unfused computation.
    Half {
        /// Largest error of the unfused computation in the problem's dtype.
        naive_max_error: f64,
        /// Whether rows that see many keys may show that their weights were rounded.
        rounds_weights: bool,
    },
    /// u8, e4m3 and i8: see [`eight_bit`].
    EightBit {
        /// The oracle's output for the inputs before quantisation.
        original: Vec<f64>,
        /// How far the oracle's output for the quantised inputs is from that.
        quantisation: EndToEnd,
    },
}

/// Judges an output and, when there is one, its LSE. The view must have the problem's output shape.
pub fn judge(problem: &Problem, truth: &Truth, o: &TensorView<'_>, lse: Option<&[f32]>) -> Judgement {
    match &truth.standard {
        Standard::Single => judge_float(problem, truth, None, false, o, lse),
        Standard::Half { naive_max_error, rounds_weights } => {
            judge_float(problem, truth, Some(*naive_max_error), *rounds_weights, o, lse)
        }
        Standard::EightBit { original, quantisation } => {
            eight_bit::judge(problem, truth, original, *quantisation, o, lse)
        }
    }
}

/// Whether an output passes. One that is wrong all over, as a control is, is refused by the first of its rows that are looked at.
pub(crate) fn passes(problem: &Problem, truth: &Truth, o: &TensorView<'_>) -> bool {
    let element_rules = match &truth.standard {
        Standard::Single => ElementRules { problem, truth, absolute: false, rounds_weights: false },
        Standard::Half { rounds_weights, .. } => {
            ElementRules { problem, truth, absolute: true, rounds_weights: *rounds_weights }
        }
        // Their rules are about all of an output.
        Standard::EightBit { .. } => return judge(problem, truth, o, None).passed(),
    };
    let refused = |first: usize| {
        let seen: Seen =
            part(problem, o, first, |seen, row, at, values| element_rules.look(seen, row, at, values));
        seen.distances.bad > 0
    };
    !parts(problem).into_par_iter().any(refused) && judge(problem, truth, o, None).passed()
}

/// What is asked of each element of a floating-point output.
#[derive(Clone, Copy)]
struct ElementRules<'a> {
    problem: &'a Problem,
    truth: &'a Truth,
    /// Whether the absolute tolerance applies, as to the 16-bit dtypes.
    absolute: bool,
    rounds_weights: bool,
}

impl ElementRules<'_> {
    fn look(&self, seen: &mut Seen, row: usize, at: Place<'_>, values: &[f64]) {
        let Self { problem, truth, absolute, rounds_weights } = *self;
        let (reference, output) = (&truth.reference, problem.output_float());
        if !reference.is_owned(row) {
            return;
        }
        if !reference.sample.has(row) {
            return values.iter().for_each(|&got| seen.distances.add_unanswered(got));
        }
        let bound = RowBound::of(problem, reference, row);
        let weight_roundoff = if rounds_weights { weight_roundoff(problem, reference, row) } else { 0.0 };
        let first = row * reference.dim_v;
        for (d, &got) in values.iter().enumerate() {
            let (want, abs) = (reference.o[first + d], reference.abs_o[first + d]);
            let Some(error) = seen.distances.add(got, want, output, at(d)) else { continue };
            let rounding = output.rounding_error(want);
            let of_weights = weight_roundoff * abs;
            let past_bound = seen.past_bound.add(error, bound.of_element(abs, rounding));
            let past_absolute =
                seen.past_absolute.add(error, ABSOLUTE * truth.value_scale + of_weights + rounding);
            seen.distances.bad += usize::from(past_bound || absolute && past_absolute);
            seen.largest_weight_rounding = seen.largest_weight_rounding.max(of_weights);
            seen.largest_rounding = seen.largest_rounding.max(rounding);
        }
    }
}

/// `naive_max_error` is there for the 16-bit dtypes, which the absolute tolerance applies to as well.
fn judge_float(
    problem: &Problem,
    truth: &Truth,
    naive_max_error: Option<f64>,
    rounds_weights: bool,
    o: &TensorView<'_>,
    lse: Option<&[f32]>,
) -> Judgement {
    let reference = &truth.reference;
    let element_rules = ElementRules { problem, truth, absolute: naive_max_error.is_some(), rounds_weights };
    let Seen { distances, past_absolute, past_bound, largest_rounding, largest_weight_rounding } =
        over_rows(problem, o, |seen: &mut Seen, row, at, values| element_rules.look(seen, row, at, values));
    let errors = distances.errors();
    let element_rule = |name: &str, past: &Past| Rule {
        name: name.to_owned(),
        applies: true,
        passed: past.count == 0,
        detail: format!(
            "{} of {} elements past the tolerance, the worst at {:.2}× of it; max error {:.2e} at {:?}",
            past.count, distances.count, past.worst, errors.max, errors.worst_at
        ),
    };
    let mut rules = vec![finite_rule(&errors)];
    if naive_max_error.is_some() {
        rules.push(element_rule("absolute", &past_absolute));
    }
    rules.push(element_rule("bound", &past_bound));
    if let Some(naive) = naive_max_error {
        let allowed = (2.0 * naive).max(largest_weight_rounding) + largest_rounding;
        rules.push(Rule {
            name: "twice-naive".to_owned(),
            applies: true,
            passed: errors.max <= allowed,
            detail: format!(
                "max error {:.2e}, allowed {allowed:.2e} (2 × {naive:.2e} + rounding)",
                errors.max
            ),
        });
    }
    rules.extend(lse.map(|lse| judge_lse(problem, reference, lse)));
    rules.extend(reference.sample.count(problem).map(|chosen| Rule {
        name: "sample".to_owned(),
        applies: false,
        passed: true,
        detail: format!(
            "{chosen} of {} rows were compared, the others are only known to be finite",
            problem.rows()
        ),
    }));
    Judgement { errors, rules }
}

/// What the elements of a floating-point output, or of a part of it, have shown.
#[derive(Default)]
struct Seen {
    distances: Distances,
    past_absolute: Past,
    past_bound: Past,
    largest_rounding: f64,
    largest_weight_rounding: f64,
}

impl Tally for Seen {
    fn merge(&mut self, other: Self) {
        self.distances.merge(other.distances);
        self.past_absolute.merge(other.past_absolute);
        self.past_bound.merge(other.past_bound);
        self.largest_rounding = self.largest_rounding.max(other.largest_rounding);
        self.largest_weight_rounding = self.largest_weight_rounding.max(other.largest_weight_rounding);
    }
}

/// Elements past a tolerance of their own, and the worst of them in units of it.
#[derive(Default)]
struct Past {
    count: usize,
    worst: f64,
}

impl Past {
    fn add(&mut self, error: f64, tolerance: f64) -> bool {
        self.count += usize::from(error > tolerance);
        // A division takes longer than all else that is done with an element.
        if error > self.worst * tolerance {
            self.worst = error / tolerance;
        }
        error > tolerance
    }

    fn merge(&mut self, other: Self) {
        self.count += other.count;
        self.worst = self.worst.max(other.worst);
    }
}

/// Sums that are made of parts of an output and then put together.
trait Tally: Default + Send {
    /// Adds the part that comes next.
    fn merge(&mut self, other: Self);
}

/// Rows of one part: few enough that small outputs have several, and never a matter of how many threads there are, so
/// that sums come out the same everywhere.
const PART_ROWS: usize = 128;

/// `[batch, head, query, column]` of a row's columns.
type Place<'a> = &'a dyn Fn(usize) -> [usize; 4];

/// Calls `each(tally, row, place, values)` for every row of an output, in logical order, parts of it in parallel.
fn over_rows<T: Tally>(
    problem: &Problem,
    o: &TensorView<'_>,
    each: impl Fn(&mut T, usize, Place<'_>, &[f64]) + Sync,
) -> T {
    let part = |first: usize| part(problem, o, first, &each);
    let starts = parts(problem);
    // Waking threads for a small output takes longer than looking at it.
    let parts: Vec<T> = if starts.len() <= 8 {
        starts.into_iter().map(part).collect()
    } else {
        starts.into_par_iter().map(part).collect()
    };
    parts.into_iter().fold(T::default(), |mut whole, part| {
        whole.merge(part);
        whole
    })
}

/// The first rows of an output's parts.
fn parts(problem: &Problem) -> Vec<usize> {
    (0..problem.rows()).step_by(PART_ROWS).collect()
}

/// What the rows of one part show.
fn part<T: Tally>(
    problem: &Problem,
    o: &TensorView<'_>,
    first: usize,
    each: impl Fn(&mut T, usize, Place<'_>, &[f64]),
) -> T {
    let [_, heads, seq, dim] = problem.o_shape();
    let mut tally = T::default();
    let mut values = Vec::with_capacity(dim);
    for row in first..problem.rows().min(first + PART_ROWS) {
        let (b, h, s) = (row / (heads * seq), row / seq % heads, row % seq);
        o.row_f64(b, h, s, &mut values);
        each(&mut tally, row, &|d| [b, h, s, d], &values);
    }
    tally
}

fn finite_rule(errors: &Errors) -> Rule {
    Rule {
        name: "finite".to_owned(),
        applies: true,
        passed: errors.wrongly_finite == 0,
        detail: format!(
            "{} elements are NaN or infinite where they must not be, or the reverse",
            errors.wrongly_finite
        ),
    }
}

/// A bound on |O − exact| for a kernel that accumulates in fp32 and rounds weights to the output's dtype.
///
/// A score is a sum of `d` products, so its error is at most `(d + 3)·u·Σ|q·k|·scale`; a softcap, bias or slope adds at most
/// `8u` of its own size (tanh, a product, a sum, each rounded, and tanh shrinks what was there); the exponent's argument and the
/// exponential add a few `u`, growing with the distance from the maximum; rounding a weight adds the dtype's own unit
/// roundoff, or half the distance of its subnormal numbers where the weight is one (f16 below 2⁻¹⁴ of the largest). A relative error ε of all weights moves the output by at most `2ε·Σ w|v|` (once in the numerator, once in
/// the sum), and adding up `n` terms by another `2n·u·Σ w|v|`. Last, the output itself is rounded.
pub fn error_bound(problem: &Problem, reference: &Reference, row: usize, column: usize) -> f64 {
    let index = row * reference.dim_v + column;
    let rounding = problem.output_float().rounding_error(reference.o[index]);
    RowBound::of(problem, reference, row).of_element(reference.abs_o[index], rounding)
}

/// What the elements of a row have in common in [`error_bound`].
#[derive(Clone, Copy)]
struct RowBound {
    /// For each unit of Σ w|v|.
    of_abs: f64,
    /// Of weights that are subnormal.
    of_faint: f64,
}

impl RowBound {
    fn of(problem: &Problem, reference: &Reference, row: usize) -> Self {
        let (compute, scores) = (problem.compute_float(), reference.score_size[row]);
        let of_weights = score_error(problem, reference, row)
            + U32 * (8.0 + 2.0 * scores.range.min(110.0))
            + compute.unit_roundoff();
        Self {
            of_abs: 2.0 * of_weights + 2.0 * scores.keys as f64 * U32,
            of_faint: compute.rounding_error(0.0) * scores.faint,
        }
    }

    /// With the output's own rounding.
    fn of_element(self, abs: f64, rounding: f64) -> f64 {
        abs * self.of_abs + self.of_faint + rounding + f32::MIN_POSITIVE as f64
    }
}

/// What rounding the weights to the dtype, before they are multiplied with V, can do to an element of a row that sees many
/// keys, for each unit of `Σ p|v|`.
///
/// A weight `p` becomes `p·(1 + δ)` with `|δ| ≤ u`, the unit roundoff of the dtype (2⁻⁸ for bf16, 2⁻¹¹ for f16); the sum that
/// they are divided by is of the unrounded ones. So the element moves by at most `Σ p·|δ|·|v| ≤ u·Σ p|v|`. Independent
/// roundings of many weights of one size average out far below that; of a few weights that hold most of the sum they do not.
fn weight_roundoff(problem: &Problem, reference: &Reference, row: usize) -> f64 {
    if reference.score_size[row].keys < MANY_KEYS { 0.0 } else { problem.compute_float().unit_roundoff() }
}

fn score_error(problem: &Problem, reference: &Reference, row: usize) -> f64 {
    let scores = reference.score_size[row];
    U32 * ((problem.sizes().dim_qk + 3) as f64 * scores.absolute + 8.0 * scores.added)
}

fn judge_lse(problem: &Problem, reference: &Reference, lse: &[f32]) -> Rule {
    let base = match problem.compute_float() {
        // An error of all scores moves the LSE by as much as it moves weights, relatively.
        _ if problem.has_codes() => eight_bit::DEQUANTISED,
        Float::F32 => 1e-5,
        Float::F16 | Float::BF16 => ABSOLUTE,
    };
    let mut worst = 0.0f64;
    let mut broken = 0usize;
    for (row, (&got, &want)) in lse.iter().zip(&reference.lse).enumerate() {
        if !reference.is_owned(row) {
            continue;
        }
        if !reference.sample.has(row) {
            broken += usize::from(got.is_nan());
            continue;
        }
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
        applies: true,
        passed: broken == 0 && lse.len() == reference.lse.len(),
        detail: format!("{broken} of {} rows past the tolerance; max error {worst:.2e}", reference.lse.len()),
    }
}
