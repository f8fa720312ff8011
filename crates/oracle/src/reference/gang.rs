//! Some rows of one sequence that see the same keys and values: scores, softmax, weighted sum.

use std::ops::Range;

use evosdpa_core::Float;

use super::{
    Question, ROWS, Rounding, RowScores,
    gemm::{self, LANES, Real},
    modifiers::Row,
    panels::Panels,
};

/// Keys that stay in a processor's cache while all rows meet them.
const TILE: usize = 4 * LANES;
/// Rows that meet them, and bytes of their scores, at most.
const MOST_ROWS: usize = 64;
const SCORE_BYTES: usize = 4 << 20;

/// A row that is to be worked out, and where its results go.
pub(super) struct Line<'a, R> {
    pub(super) head: usize,
    /// Counted in its sequence.
    pub(super) query: usize,
    pub(super) o: &'a mut [R],
    /// Empty where it is not asked for.
    pub(super) abs_o: &'a mut [R],
    pub(super) lse: &'a mut R,
    pub(super) score_size: &'a mut RowScores,
}

/// How many rows are worked on together where there are so many keys.
pub(super) fn rows_together<R>(keys: usize) -> usize {
    let affordable = SCORE_BYTES / (keys.max(1) * size_of::<R>());
    (affordable / ROWS * ROWS).clamp(ROWS, MOST_ROWS)
}

/// `ROWS` rows, the last of them perhaps missing.
struct Group<R> {
    q: Vec<[R; ROWS]>,
    norms: [f64; ROWS],
    visible: [Range<usize>; ROWS],
    /// All that they see.
    union: Range<usize>,
}

/// Memory that one thread uses again and again.
pub(super) struct Scratch<R> {
    /// Scores, then weights: `[row][key]`.
    scores: Vec<R>,
    /// Which of them a boolean mask or a block table hides; empty where there is neither.
    hidden: Vec<bool>,
    /// `[row][column]`.
    sums: Vec<R>,
}

/// Works out rows that share the keys and values of one head.
pub(super) fn solve<R: Real>(
    question: &Question<'_>,
    (sequence, panels): (usize, &Panels<R>),
    lines: &mut [Line<'_, R>],
    scratch: &mut Scratch<R>,
    rounding: &impl Rounding<R>,
) {
    let groups: Vec<Group<R>> =
        lines.chunks(ROWS).map(|lines| Group::new(question, sequence, lines)).collect();
    let stride = panels.score_stride();
    scratch.scores.resize(groups.len() * ROWS * stride, R::ZERO);
    for_tiles(&groups, |g, group, keys| {
        let scores = &mut scratch.scores[g * ROWS * stride..][..ROWS * stride];
        R::scores(&group.q, panels, keys, scores);
    });

    scratch.hidden.clear();
    if question.modifiers.hides() {
        scratch.hidden.resize(scratch.scores.len(), false);
    }
    for (r, line) in lines.iter_mut().enumerate() {
        let group = &groups[r / ROWS];
        let scores = &mut scratch.scores[r * stride..][..stride];
        let hidden = scratch.hidden.get_mut(r * stride..(r + 1) * stride).unwrap_or_default();
        let seen = group.visible[r % ROWS].clone();
        scores[group.union.start..seen.start.max(group.union.start)].fill(R::ZERO);
        scores[seen.end.min(group.union.end)..group.union.end].fill(R::ZERO);
        line.weigh(question, (sequence, panels), group.norms[r % ROWS], seen, scores, hidden, rounding);
    }

    scratch.sum_up(panels, &groups, false);
    let width = panels.value_blocks() * LANES;
    for (line, sums) in lines.iter_mut().zip(scratch.sums.chunks(width.max(1))) {
        line.o.copy_from_slice(&sums[..line.o.len()]);
        rounding.output(line.o);
    }
    if lines.iter().any(|line| !line.abs_o.is_empty()) {
        scratch.sum_up(panels, &groups, true);
        for (line, sums) in lines.iter_mut().zip(scratch.sums.chunks(width.max(1))) {
            line.abs_o.copy_from_slice(&sums[..line.abs_o.len()]);
        }
    }
}

impl<R: Real> Group<R> {
    fn new(question: &Question<'_>, sequence: usize, lines: &[Line<'_, R>]) -> Self {
        let Question { problem, q, sequences, .. } = question;
        let (queries, keys) = (sequences.queries(sequence), sequences.keys(sequence));
        let mut group = Self {
            q: vec![[R::ZERO; ROWS]; problem.sizes().dim_qk],
            norms: [0.0; ROWS],
            visible: [0..0, 0..0, 0..0, 0..0],
            union: 0..0,
        };
        let mut row = Vec::new();
        for (r, line) in lines.iter().enumerate() {
            group.visible[r] = problem.visible(line.query, queries.len(), keys);
            q.row_f64(sequences.query_batch(sequence), line.head, queries.start + line.query, &mut row);
            group.norms[r] = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            for (q, &x) in group.q.iter_mut().zip(&row) {
                q[r] = R::from_f64(x);
            }
        }
        group.union = gemm::union(group.visible.iter().cloned());
        group
    }
}

/// Calls `each(number, group, keys)` for every KV tile and every group that sees some of it, tile by tile.
fn for_tiles<R>(groups: &[Group<R>], mut each: impl FnMut(usize, &Group<R>, Range<usize>)) {
    let all = gemm::union(groups.iter().map(|group| group.union.clone()));
    for tile in all.start / TILE..all.end.div_ceil(TILE) {
        for (g, group) in groups.iter().enumerate() {
            let keys = group.union.start.max(tile * TILE)..group.union.end.min((tile + 1) * TILE);
            if !keys.is_empty() {
                each(g, group, keys);
            }
        }
    }
}

impl<R: Real> Line<'_, R> {
    /// Turns raw scores into weights, and says what is to be known of the row.
    fn weigh(
        &mut self,
        question: &Question<'_>,
        (sequence, panels): (usize, &Panels<R>),
        norm: f64,
        seen: Range<usize>,
        scores: &mut [R],
        hidden: &mut [bool],
        rounding: &impl Rounding<R>,
    ) {
        let Question { problem, sequences, modifiers, .. } = question;
        let scale = R::from_f64(problem.scale() as f64);
        let scores = &mut scores[seen.clone()];
        scores.iter_mut().for_each(|score| *score = *score * scale);
        rounding.inside(scores);
        let (mut added, mut keys) = (0.0, seen.len());
        if modifiers.any() {
            let (queries, all) = (sequences.queries(sequence).len(), sequences.keys(sequence));
            let position = problem.position(self.query, queries, all);
            let at = Row { sequence, head: self.head, query: self.query, position };
            added = modifiers.apply(at, seen.start, scores);
            rounding.inside(scores);
            if modifiers.hides() {
                modifiers.hide(at, seen.start, scores, &mut hidden[seen.clone()]);
            }
            if modifiers.has_blocks() {
                keys -= hidden[seen.clone()].iter().filter(|hidden| **hidden).count();
            }
        }
        let stats = softmax(scores, modifiers.sink(self.head).map(R::from_f64), rounding);
        *self.lse = stats.lse;
        *self.score_size = RowScores {
            absolute: norm * panels.largest_key_norm() * (problem.scale() as f64).abs(),
            added,
            range: stats.range.to_f64(),
            keys,
            faint: stats.faint as f64 * panels.largest_value(),
        };
    }
}

impl<R: Real> Scratch<R> {
    pub(super) fn new() -> Self {
        Self { scores: Vec::new(), hidden: Vec::new(), sums: Vec::new() }
    }

    /// Weighted sums of values, or of their absolute values.
    fn sum_up(&mut self, panels: &Panels<R>, groups: &[Group<R>], absolute: bool) {
        let (stride, width) = (panels.score_stride(), panels.value_blocks() * LANES);
        self.sums.clear();
        self.sums.resize(groups.len() * ROWS * width, R::ZERO);
        if panels.values_finite() {
            for_tiles(groups, |g, _, keys| {
                let weights = std::array::from_fn(|r| &self.scores[(g * ROWS + r) * stride..][..stride]);
                let sums = &mut self.sums[g * ROWS * width..][..ROWS * width];
                R::weighted_sum(weights, panels, keys, absolute, sums);
            });
            return;
        }
        // Zero times NaN is NaN: a row must not even touch the keys that it does not see.
        for (r, seen) in groups.iter().flat_map(|group| &group.visible).enumerate() {
            let is_hidden = |key: usize| self.hidden.get(r * stride + key) == Some(&true);
            for (block, sums) in self.sums[r * width..][..width].chunks_mut(LANES).enumerate() {
                for key in seen.clone().filter(|&key| !is_hidden(key)) {
                    let weight = self.scores[r * stride + key];
                    for (sum, &v) in sums.iter_mut().zip(&panels.value_block(block)[key]) {
                        *sum = *sum + weight * if absolute { v.abs() } else { v };
                    }
                }
            }
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
fn softmax<R: Real>(scores: &mut [R], sink: Option<R>, rounding: &impl Rounding<R>) -> RowStats<R> {
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
        *score = *score / sum;
    }
    rounding.inside(scores);
    let lse = if poisoned || largest == R::INFINITY { R::NAN } else { largest + sum.ln() };
    let range = if smallest < largest { largest - smallest } else { R::ZERO };
    RowStats { lse, range, faint }
}
