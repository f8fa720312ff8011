//! The right answer: attention in f64, and the same computation rounded to the tensors' own dtype.
//!
//! The softmax is computed in two passes over whole rows, nothing streamed, so that it shares no cleverness with the
//! kernels it judges. What a row gives when its inputs are not ordinary numbers:
//!
//! - no visible key, or only scores of −∞: O = 0 and LSE = −∞, or the head's sink where it has one;
//! - a visible score that is NaN or +∞: the row of O and its LSE are NaN;
//! - a NaN or ±∞ in V at a visible key: that column of the row follows IEEE arithmetic.

mod gang;
mod gemm;
mod modifiers;
mod panels;
mod sample;

use evosdpa_core::{Error, Float, Problem, Sequences, SideInputs, TensorView};
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use gang::{Line, Scratch};
use gemm::Real;
use modifiers::Modifiers;
use panels::Panels;
pub use sample::Sample;

/// Rows of the softmax that are worked on together.
const ROWS: usize = gemm::ROWS;

/// A problem with its data: everything an answer depends on.
///
/// The tensors hold the values meant: of 8-bit codes the dequantised ones ([`crate::inputs::Inputs::dequantized`]), since
/// codes alone lack their scales.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    problem: Problem,
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    sequences: Sequences<'a>,
    modifiers: Modifiers<'a>,
}

impl<'a> Question<'a> {
    /// Checks shapes, lengths, pages and modifiers.
    pub fn new(
        problem: &Problem,
        [q, k, v]: [TensorView<'a>; 3],
        side: &SideInputs<'a>,
    ) -> Result<Self, Error> {
        problem.check_shapes(q.shape(), k.shape(), v.shape())?;
        if q.shape() != problem.q_shape() {
            return Err(Error::TensorShape { tensor: "Q", got: q.shape(), expected: problem.q_shape() });
        }
        let sequences = Sequences::new(problem, side, q.shape(), k.shape())?;
        problem.check_modifiers(side)?;
        let modifiers = Modifiers::new(problem, side);
        Ok(Self { problem: *problem, q, k, v, sequences, modifiers })
    }

    /// Where its sequences lie.
    pub(crate) fn sequences(&self) -> &Sequences<'a> {
        &self.sequences
    }
}

/// The oracle's answer to a problem, rows in the order of the output: its shape without the head dimension.
#[derive(Clone, Debug)]
pub struct Reference {
    /// Output, `rows × dim_v`.
    pub o: Vec<f64>,
    /// Natural logarithm of each row's sum of exponentials; −∞ where no key is visible.
    pub lse: Vec<f64>,
    /// Σ weight·|v| for each output element: what rounding errors of weights are multiplied with.
    pub abs_o: Vec<f64>,
    /// What the errors of each row's scores grow with.
    pub score_size: Vec<RowScores>,
    /// Columns of `o`.
    pub dim_v: usize,
    /// The rows that were worked out; the others are zero.
    pub sample: Sample,
    /// Which rows belong to a sequence; `None` when all do.
    owned: Option<Vec<bool>>,
}

impl Reference {
    /// Whether a row belongs to a sequence. Behind packed queries, and behind those that a sequence uses, there may be some that
    /// belong to none: they are zeros, with a log-sum-exp of −∞.
    pub fn is_owned(&self, row: usize) -> bool {
        self.owned.as_ref().is_none_or(|owned| owned[row])
    }
}

/// What the error of a row's scores grows with.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowScores {
    /// Upper bound of Σ|q·k|·|scale| over visible keys, by Cauchy and Schwarz.
    pub absolute: f64,
    /// Upper bound of what modifiers made of a score: the softcap, and the largest sum of bias and ALiBi.
    pub added: f64,
    /// Largest score minus smallest visible score.
    pub range: f64,
    /// Number of visible keys.
    pub keys: usize,
    /// Upper bound of Σ|v| over the visible keys whose weight, relative to the largest, is below f16's smallest normal number.
    pub faint: f64,
}

/// Solves a problem in f64.
pub fn solve(question: &Question<'_>) -> Reference {
    solve_rows(question, Sample::whole())
}

/// As [`solve`], for the rows of a sample.
pub fn solve_rows(question: &Question<'_>, sample: Sample) -> Reference {
    let solved = run::<f64>(question, &Unrounded, true, &sample);
    Reference {
        o: solved.o,
        lse: solved.lse,
        abs_o: solved.abs_o,
        score_size: solved.score_size,
        dim_v: question.problem.sizes().dim_v,
        sample,
        owned: has_unowned_rows(&question.problem).then(|| owned_rows(question)),
    }
}

/// The output of [`solve`] alone.
pub fn solve_output(question: &Question<'_>) -> Vec<f64> {
    run::<f64>(question, &Unrounded, false, &Sample::whole()).o
}

/// The same computation as PyTorch's unfused one in the queries' dtype: scores and weights each rounded to it, sums in f32,
/// the output rounded to its own. Its distance from [`solve`] is the error that a user of that dtype already accepts. Rows
/// outside the sample are zero.
pub fn solve_in_dtype(question: &Question<'_>, sample: &Sample) -> Vec<f32> {
    let rounding =
        InDtype { inside: question.problem.compute_float(), output: question.problem.output_float() };
    run::<f32>(question, &rounding, false, sample).o
}

/// The answer in f32: quicker than [`solve`], and close enough to stand for an answer to *another* question.
pub(crate) fn solve_roughly(question: &Question<'_>, sample: &Sample) -> Vec<f32> {
    run::<f32>(question, &Unrounded, false, sample).o
}

/// What scores and weights are rounded to, and what outputs.
trait Rounding<R>: Sync {
    fn inside(&self, values: &mut [R]);
    fn output(&self, values: &mut [R]);
}

/// To nothing but the type they are computed in.
struct Unrounded;

impl<R> Rounding<R> for Unrounded {
    fn inside(&self, _: &mut [R]) {}
    fn output(&self, _: &mut [R]) {}
}

/// To a problem's own types.
struct InDtype {
    inside: Float,
    output: Float,
}

impl Rounding<f32> for InDtype {
    fn inside(&self, values: &mut [f32]) {
        round_to(self.inside, values);
    }

    fn output(&self, values: &mut [f32]) {
        round_to(self.output, values);
    }
}

fn round_to(float: Float, values: &mut [f32]) {
    fn through<T: Copy + Default>(
        values: &mut [f32],
        to: impl Fn(&mut [T], &[f32]),
        back: impl Fn(&[T], &mut [f32]),
    ) {
        let mut rounded = [T::default(); 256];
        for values in values.chunks_mut(rounded.len()) {
            let rounded = &mut rounded[..values.len()];
            to(rounded, values);
            back(rounded, values);
        }
    }
    match float {
        Float::F32 => {}
        Float::F16 => through::<half::f16>(
            values,
            |to, from| to.convert_from_f32_slice(from),
            |from, to| from.convert_to_f32_slice(to),
        ),
        Float::BF16 => through::<half::bf16>(
            values,
            |to, from| to.convert_from_f32_slice(from),
            |from, to| from.convert_to_f32_slice(to),
        ),
    }
}

struct Solved<R> {
    o: Vec<R>,
    lse: Vec<R>,
    abs_o: Vec<R>,
    score_size: Vec<RowScores>,
}

/// The rows of one sequence and head: consecutive in the output.
struct Segment {
    sequence: usize,
    head: usize,
    first_row: usize,
    queries: usize,
}

/// Every segment, in the order of the output.
fn segments(question: &Question<'_>) -> Vec<Segment> {
    let [_, heads, rows_per_head, _] = question.problem.o_shape();
    let sequences = question.sequences;
    let segment = |sequence: usize, head: usize| {
        let queries = sequences.queries(sequence);
        let first_row = (sequences.query_batch(sequence) * heads + head) * rows_per_head + queries.start;
        Segment { sequence, head, first_row, queries: queries.len() }
    };
    if question.problem.lengths().packed_queries {
        (0..heads).flat_map(|h| (0..sequences.count()).map(move |b| segment(b, h))).collect()
    } else {
        (0..sequences.count()).flat_map(|b| (0..heads).map(move |h| segment(b, h))).collect()
    }
}

/// Whether some rows of the output may belong to no sequence.
fn has_unowned_rows(problem: &Problem) -> bool {
    problem.lengths().packed_queries || problem.lengths().used_queries
}

fn owned_rows(question: &Question<'_>) -> Vec<bool> {
    let mut owned = vec![false; question.problem.rows()];
    for segment in segments(question) {
        owned[segment.first_row..][..segment.queries].fill(true);
    }
    owned
}

fn run<R: Real>(
    question: &Question<'_>,
    rounding: &impl Rounding<R>,
    with_abs: bool,
    sample: &Sample,
) -> Solved<R> {
    let problem = &question.problem;
    let sizes = problem.sizes();
    let mut solved = Solved {
        o: vec![R::ZERO; problem.rows() * sizes.dim_v],
        abs_o: vec![R::ZERO; if with_abs { problem.rows() * sizes.dim_v } else { 0 }],
        lse: vec![R::ZERO; problem.rows()],
        score_size: vec![RowScores::default(); problem.rows()],
    };
    // Panels live as long as their rows are worked on: those of a large cache would not all fit in memory.
    lines(question, &mut solved, sample).into_par_iter().enumerate().for_each(|(i, mut lines)| {
        if lines.is_empty() {
            return;
        }
        let sequence = i / sizes.heads_kv;
        let panels = Panels::pack(question, sequence, i % sizes.heads_kv);
        let together = gang::rows_together::<R>(question.sequences.keys(sequence));
        lines.par_chunks_mut(together).for_each_init(Scratch::new, |scratch, lines| {
            gang::solve(question, (sequence, &panels), lines, scratch, rounding);
        });
    });
    solved
}

/// The rows to be worked out, by sequence and key/value head.
fn lines<'a, R: Real>(
    question: &Question<'_>,
    solved: &'a mut Solved<R>,
    sample: &Sample,
) -> Vec<Vec<Line<'a, R>>> {
    let sizes = question.problem.sizes();
    let mut rest = Rest {
        row: 0,
        o: &mut solved.o,
        abs_o: &mut solved.abs_o,
        lse: &mut solved.lse,
        score_size: &mut solved.score_size,
    };
    let mut lines: Vec<Vec<Line<'a, R>>> = Vec::new();
    lines.resize_with(sizes.batch * sizes.heads_kv, Vec::new);
    for Segment { sequence, head, first_row, queries } in segments(question) {
        rest.skip(first_row - rest.row, sizes.dim_v);
        let lines = &mut lines[sequence * sizes.heads_kv + head / question.problem.group()];
        for query in 0..queries {
            if sample.has(first_row + query) {
                lines.push(rest.line(head, query, sizes.dim_v));
            } else {
                rest.skip(1, sizes.dim_v);
            }
        }
    }
    lines
}

/// The results from a row on.
struct Rest<'a, R> {
    row: usize,
    o: &'a mut [R],
    abs_o: &'a mut [R],
    lse: &'a mut [R],
    score_size: &'a mut [RowScores],
}

impl<'a, R> Rest<'a, R> {
    fn skip(&mut self, rows: usize, dim_v: usize) {
        self.row += rows;
        split(&mut self.o, rows * dim_v);
        let abs = if self.abs_o.is_empty() { 0 } else { rows * dim_v };
        split(&mut self.abs_o, abs);
        split(&mut self.lse, rows);
        split(&mut self.score_size, rows);
    }

    /// The next row.
    fn line(&mut self, head: usize, query: usize, dim_v: usize) -> Line<'a, R> {
        self.row += 1;
        let abs = if self.abs_o.is_empty() { 0 } else { dim_v };
        Line {
            head,
            query,
            o: split(&mut self.o, dim_v),
            abs_o: split(&mut self.abs_o, abs),
            // There is a result for every row.
            lse: &mut split(&mut self.lse, 1)[0],
            score_size: &mut split(&mut self.score_size, 1)[0],
        }
    }
}

fn split<'a, T>(rest: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let (first, second) = std::mem::take(rest).split_at_mut(count);
    *rest = second;
    first
}

#[cfg(test)]
mod tests;
