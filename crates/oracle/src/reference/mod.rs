//! The right answer: attention in f64, and the same computation rounded to the tensors' own dtype.
//!
//! The softmax is computed in two passes over whole rows, nothing streamed, so that it shares no cleverness with the
//! kernels it judges. What a row gives when its inputs are not ordinary numbers:
//!
//! - no visible key, or only scores of −∞: O = 0 and LSE = −∞;
//! - a visible score that is NaN or +∞: the row of O and its LSE are NaN;
//! - a NaN or ±∞ in V at a visible key: that column of the row follows IEEE arithmetic.

mod panels;
mod product;
mod sample;

use evosdpa_core::{Float, Problem, TensorView};
use rayon::prelude::*;

use panels::Panels;
use product::Real;
pub use sample::Sample;

/// Rows of the softmax that are worked on together.
const ROWS: usize = product::ROWS;

/// The oracle's answer to a problem, rows in `[batch, query heads, queries]` order.
#[derive(Clone, Debug)]
pub struct Reference {
    /// Output, `rows × dim_v`.
    pub o: Vec<f64>,
    /// Natural logarithm of each row's sum of exponentials; −∞ where no key is visible.
    pub lse: Vec<f64>,
    /// Σ weight·|v| for each output element: what rounding errors of weights are multiplied with.
    pub abs_o: Vec<f64>,
    /// For each row, a bound of Σ|q·k|·scale over its visible keys, and the largest distance of a visible score from
    /// the row's maximum: what errors of the scores grow with.
    pub score_size: Vec<RowScores>,
    /// Columns of `o`.
    pub dim_v: usize,
    /// The rows that were worked out; the others are zero.
    pub sample: Sample,
}

/// What the error of a row's scores grows with.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowScores {
    /// Upper bound of Σ|q·k|·|scale| over visible keys, by Cauchy and Schwarz.
    pub absolute: f64,
    /// Largest score minus smallest visible score.
    pub range: f64,
    /// Number of visible keys.
    pub keys: usize,
}

/// Solves a problem in f64. The views must have the problem's shapes ([`Problem::check`]) and hold the values meant: for an
/// 8-bit problem the dequantised ones ([`crate::inputs::Inputs::dequantized`]), since codes alone lack their scales.
pub fn solve(problem: &Problem, q: &TensorView<'_>, k: &TensorView<'_>, v: &TensorView<'_>) -> Reference {
    solve_rows(problem, q, k, v, Sample::whole())
}

/// As [`solve`], for the rows of a sample.
pub fn solve_rows(
    problem: &Problem,
    q: &TensorView<'_>,
    k: &TensorView<'_>,
    v: &TensorView<'_>,
    sample: Sample,
) -> Reference {
    let solved = run::<f64>(problem, q, k, v, &|x| x, true, &sample);
    Reference {
        o: solved.o,
        lse: solved.lse,
        abs_o: solved.abs_o,
        score_size: solved.score_size,
        dim_v: problem.sizes().dim_v,
        sample,
    }
}

/// The output of [`solve`] alone.
pub fn solve_output(
    problem: &Problem,
    q: &TensorView<'_>,
    k: &TensorView<'_>,
    v: &TensorView<'_>,
) -> Vec<f64> {
    run::<f64>(problem, q, k, v, &|x| x, false, &Sample::whole()).o
}

/// The same computation as PyTorch's unfused one in the problem's output dtype: scores, weights and output each rounded to it,
/// sums in f32. Its distance from [`solve`] is the error that a user of that dtype already accepts. Rows outside the sample are
/// zero.
pub fn solve_in_dtype(
    problem: &Problem,
    q: &TensorView<'_>,
    k: &TensorView<'_>,
    v: &TensorView<'_>,
    sample: &Sample,
) -> Vec<f64> {
    let o = match problem.output_float() {
        Float::F32 => run::<f32>(problem, q, k, v, &|x| x, false, sample).o,
        Float::F16 => run::<f32>(problem, q, k, v, &|x| half::f16::from_f32(x).to_f32(), false, sample).o,
        Float::BF16 => run::<f32>(problem, q, k, v, &|x| half::bf16::from_f32(x).to_f32(), false, sample).o,
    };
    o.into_iter().map(f64::from).collect()
}

/// The answer in f32: quicker than [`solve`], and close enough to stand for an answer to *another* question.
pub(crate) fn solve_roughly(
    problem: &Problem,
    q: &TensorView<'_>,
    k: &TensorView<'_>,
    v: &TensorView<'_>,
) -> Vec<f64> {
    run::<f32>(problem, q, k, v, &|x| x, false, &Sample::whole()).o.into_iter().map(f64::from).collect()
}

struct Solved<R> {
    o: Vec<R>,
    lse: Vec<R>,
    abs_o: Vec<R>,
    score_size: Vec<RowScores>,
}

fn run<R: Real>(
    problem: &Problem,
    q: &TensorView<'_>,
    k: &TensorView<'_>,
    v: &TensorView<'_>,
    round: &(dyn Fn(R) -> R + Sync),
    with_abs: bool,
    sample: &Sample,
) -> Solved<R> {
    let sizes = problem.sizes();
    let panels: Vec<Panels<R>> = (0..sizes.batch * sizes.heads_kv)
        .into_par_iter()
        .map(|i| Panels::pack(k, v, i / sizes.heads_kv, i % sizes.heads_kv))
        .collect();
    let mut o = vec![R::ZERO; problem.rows() * sizes.dim_v];
    let mut abs_o = vec![R::ZERO; if with_abs { o.len() } else { 0 }];
    let mut lse = vec![R::ZERO; problem.rows()];
    let mut score_size = vec![RowScores::default(); problem.rows()];

    // Blocks of rows never cross a head, so each works with one set of panels.
    let per_head = sizes.seq_q * sizes.dim_v;
    let abs_heads: Vec<&mut [R]> = if with_abs {
        abs_o.chunks_mut(per_head).collect()
    } else {
        (0..sizes.batch * sizes.heads_q).map(|_| Default::default()).collect()
    };
    o.chunks_mut(per_head)
        .zip(abs_heads)
        .zip(lse.chunks_mut(sizes.seq_q).zip(score_size.chunks_mut(sizes.seq_q)))
        .enumerate()
        .flat_map(|(head, ((o, abs_o), (lse, score_size)))| {
            let abs_blocks: Vec<&mut [R]> = if abs_o.is_empty() {
                (0..sizes.seq_q.div_ceil(ROWS)).map(|_| Default::default()).collect()
            } else {
                abs_o.chunks_mut(ROWS * sizes.dim_v).collect()
            };
            o.chunks_mut(ROWS * sizes.dim_v)
                .zip(abs_blocks)
                .zip(lse.chunks_mut(ROWS).zip(score_size.chunks_mut(ROWS)))
                .enumerate()
                .map(move |(block, ((o, abs_o), (lse, score_size)))| Block {
                    head,
                    first_row: block * ROWS,
                    o,
                    abs_o,
                    lse,
                    score_size,
                })
                .filter(|block| sample.has(block.head * sizes.seq_q + block.first_row))
                .collect::<Vec<_>>()
        })
        .collect::<Vec<_>>()
        .into_par_iter()
        .for_each_init(Vec::new, |scores, block| {
            let (b, h) = (block.head / sizes.heads_q, block.head % sizes.heads_q);
            let panels = &panels[b * sizes.heads_kv + h / problem.group()];
            block.solve(problem, q, (b, h), panels, scores, round);
        });
    Solved { o, lse, abs_o, score_size }
}

/// Up to `ROWS` rows of one head, and where their results go.
struct Block<'a, R> {
    head: usize,
    first_row: usize,
    o: &'a mut [R],
    abs_o: &'a mut [R],
    lse: &'a mut [R],
    score_size: &'a mut [RowScores],
}

impl<R: Real> Block<'_, R> {
    fn solve(
        self,
        problem: &Problem,
        q: &TensorView<'_>,
        (b, h): (usize, usize),
        panels: &Panels<R>,
        scores: &mut Vec<R>,
        round: &(dyn Fn(R) -> R + Sync),
    ) {
        let sizes = problem.sizes();
        let rows = self.lse.len();
        let visible: Vec<_> =
            (0..rows).map(|r| problem.band().visible(self.first_row + r, sizes.seq_kv)).collect();
        let keys = product::union(&visible);
        if keys.is_empty() {
            self.lse.fill(-R::INFINITY);
            return;
        }

        let mut q_rows = vec![[R::ZERO; ROWS]; sizes.dim_qk];
        let mut norms = [0.0f64; ROWS];
        let mut row = Vec::new();
        for r in 0..rows {
            q.row_f64(b, h, self.first_row + r, &mut row);
            norms[r] = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            for (d, &x) in row.iter().enumerate() {
                q_rows[d][r] = R::from_f64(x);
            }
        }
        let stride = panels.score_stride();
        scores.clear();
        scores.resize(ROWS * stride, R::ZERO);
        R::scores(&q_rows, panels, keys, scores);

        let scale = R::from_f64(problem.scale() as f64);
        for r in 0..rows {
            let row_scores = &mut scores[r * stride..][..stride];
            let seen = visible[r].clone();
            row_scores[..seen.start].fill(R::ZERO);
            row_scores[seen.end..].fill(R::ZERO);
            let stats = softmax(&mut row_scores[seen.clone()], scale, round);
            self.lse[r] = stats.lse;
            self.score_size[r] = RowScores {
                absolute: norms[r] * panels.largest_key_norm() * (problem.scale() as f64).abs(),
                range: stats.range.to_f64(),
                keys: seen.len(),
            };
        }
        R::weighted_sum(scores, panels, &visible, false, self.o, round);
        if !self.abs_o.is_empty() {
            R::weighted_sum(scores, panels, &visible, true, self.abs_o, &|x| x);
        }
    }
}

struct RowStats<R> {
    lse: R,
    range: R,
}

/// Turns a row's raw products into normalised, rounded weights.
fn softmax<R: Real>(scores: &mut [R], scale: R, round: &(dyn Fn(R) -> R + Sync)) -> RowStats<R> {
    let (mut largest, mut smallest) = (-R::INFINITY, R::INFINITY);
    let mut poisoned = false;
    for score in scores.iter_mut() {
        *score = round(*score * scale);
        largest = if *score > largest { *score } else { largest };
        smallest = if *score < smallest { *score } else { smallest };
        poisoned |= score.is_nan();
    }
    if largest == -R::INFINITY && !poisoned {
        scores.fill(R::ZERO);
        return RowStats { lse: -R::INFINITY, range: R::ZERO };
    }
    let mut sum = R::ZERO;
    for score in scores.iter_mut() {
        // NaN − x and ∞ − ∞ are NaN, which is what such rows are defined to give.
        *score = (*score - largest).exp();
        sum = sum + *score;
    }
    for score in scores.iter_mut() {
        *score = round(*score / sum);
    }
    let lse = if poisoned || largest == R::INFINITY { R::NAN } else { largest + sum.ln() };
    RowStats { lse, range: largest - smallest }
}

#[cfg(test)]
mod tests;
