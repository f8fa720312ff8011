//! A few rows of one sequence and head: scores, softmax, weighted sum.

use evosdpa_core::Float;

use super::{
    Question, ROWS, Rounding, RowScores,
    modifiers::Row,
    panels::Panels,
    product::{self, Real},
};

/// Up to `ROWS` rows of one head, and where their results go.
pub(super) struct Block<'a, R> {
    pub(super) sequence: usize,
    pub(super) head: usize,
    /// The first query, counted in its sequence.
    pub(super) first: usize,
    pub(super) o: &'a mut [R],
    pub(super) abs_o: &'a mut [R],
    pub(super) lse: &'a mut [R],
    pub(super) score_size: &'a mut [RowScores],
}

impl<R: Real> Block<'_, R> {
    pub(super) fn solve(
        self,
        question: &Question<'_>,
        panels: &Panels<R>,
        scores: &mut Vec<R>,
        rounding: &Rounding<'_, R>,
    ) {
        let Question { problem, q, sequences, modifiers, .. } = question;
        let queries = sequences.queries(self.sequence);
        let (rows, keys) = (self.lse.len(), sequences.keys(self.sequence));
        let visible: Vec<_> =
            (0..rows).map(|r| problem.visible(self.first + r, queries.len(), keys)).collect();
        let sink = modifiers.sink(self.head);
        let union = product::union(&visible);
        if union.is_empty() {
            self.lse.fill(sink.map_or(-R::INFINITY, R::from_f64));
            return;
        }

        let mut q_rows = vec![[R::ZERO; ROWS]; problem.sizes().dim_qk];
        let mut norms = [0.0f64; ROWS];
        let mut row = Vec::new();
        for r in 0..rows {
            let place = queries.start + self.first + r;
            q.row_f64(sequences.query_batch(self.sequence), self.head, place, &mut row);
            norms[r] = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            for (d, &x) in row.iter().enumerate() {
                q_rows[d][r] = R::from_f64(x);
            }
        }
        let stride = panels.score_stride();
        scores.clear();
        scores.resize(ROWS * stride, R::ZERO);
        R::scores(&q_rows, panels, union, scores);

        let scale = R::from_f64(problem.scale() as f64);
        let mut hidden = if modifiers.hides() { vec![false; ROWS * stride] } else { Vec::new() };
        for r in 0..rows {
            let row_scores = &mut scores[r * stride..][..stride];
            let seen = visible[r].clone();
            row_scores[..seen.start].fill(R::ZERO);
            row_scores[seen.end..].fill(R::ZERO);
            let line = &mut row_scores[seen.clone()];
            line.iter_mut().for_each(|score| *score = (rounding.inside)(*score * scale));
            let mut added = 0.0;
            if modifiers.any() {
                let query = self.first + r;
                let position = problem.position(query, queries.len(), keys);
                let at = Row { sequence: self.sequence, head: self.head, query, position };
                added = modifiers.apply(at, seen.start, line);
                line.iter_mut().for_each(|score| *score = (rounding.inside)(*score));
                if modifiers.hides() {
                    modifiers.hide(at, seen.start, line, &mut hidden[r * stride..][seen.clone()]);
                }
            }
            let stats = softmax(line, sink.map(R::from_f64), rounding.inside);
            self.lse[r] = stats.lse;
            self.score_size[r] = RowScores {
                absolute: norms[r] * panels.largest_key_norm() * (problem.scale() as f64).abs(),
                added,
                range: stats.range.to_f64(),
                keys: seen.len(),
                faint: stats.faint as f64 * panels.largest_value(),
            };
        }
        R::weighted_sum(scores, panels, &visible, &hidden, false, self.o, rounding.output);
        if !self.abs_o.is_empty() {
            R::weighted_sum(scores, panels, &visible, &hidden, true, self.abs_o, &|x| x);
        }
    }
}

struct RowStats<R> {
    lse: R,
    range: R,
    /// Weights that f16 holds with fewer digits, relative to the largest.
    faint: usize,
}

/// Turns a row's scores into normalised, rounded weights. A sink is one more score, whose weight nobody gets.
fn softmax<R: Real>(scores: &mut [R], sink: Option<R>, round: &(dyn Fn(R) -> R + Sync)) -> RowStats<R> {
    let (mut largest, mut smallest) = (sink.unwrap_or(-R::INFINITY), R::INFINITY);
    let mut poisoned = sink.is_some_and(Real::is_nan);
    for score in scores.iter() {
        largest = if *score > largest { *score } else { largest };
        // A key with no weight at all is as good as hidden.
        smallest = if *score < smallest && *score > -R::INFINITY { *score } else { smallest };
        poisoned |= score.is_nan();
    }
    if largest == -R::INFINITY && !poisoned {
        scores.fill(R::ZERO);
        return RowStats { lse: -R::INFINITY, range: R::ZERO, faint: 0 };
    }
    let mut sum = sink.map_or(R::ZERO, |sink| (sink - largest).exp());
    let (mut faint, smallest_normal) = (0, R::from_f64(Float::F16.min_normal()));
    for score in scores.iter_mut() {
        // NaN − x and ∞ − ∞ are NaN, which is what such rows are defined to give.
        *score = (*score - largest).exp();
        sum = sum + *score;
        faint += usize::from(*score > R::ZERO && *score < smallest_normal);
    }
    for score in scores.iter_mut() {
        *score = round(*score / sum);
    }
    let lse = if poisoned || largest == R::INFINITY { R::NAN } else { largest + sum.ln() };
    let range = if smallest < largest { largest - smallest } else { R::ZERO };
    RowStats { lse, range, faint }
}
