//! The baseline: scores of a block of rows are written out whole, then normalised, then multiplied with V.
//!
//! Plain loops over f32 rows, no tiling, no explicit vectors; what a careful first version looks like. It answers every
//! problem there is: packed, paged, modified, 8-bit.

mod modifiers;
mod rows;

use std::ops::Range;

use evosdpa_core::{Float, Problem, Sequences, SideInputs, TensorView};
use half::{bf16, f16};

use crate::error::Error;
use crate::job::{Operand, Shape};
use crate::options::CpuOptions;
use crate::span::Span;
use crate::{dispatch, pool};
use modifiers::{Modifiers, Row};
use rows::Rows;

/// Rows whose scores are materialised at a time.
const BLOCK: usize = 16;

/// One call: tensors that were checked against the problem.
pub(crate) struct Naive<'a> {
    problem: &'a Problem,
    sequences: Sequences<'a>,
    modifiers: Modifiers<'a>,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    o: Operand<'a, *mut u8>,
    /// `[batch][heads][queries]` as O has them, contiguous; null when not wanted.
    lse: *mut f32,
    /// Rows of O a head.
    rows_per_head: usize,
}

// SAFETY: tasks write disjoint rows of `o` and `lse` and only read the others.
unsafe impl Sync for Naive<'_> {}

impl<'a> Naive<'a> {
    /// Of tensors and what comes beside them, all checked. `o` points at elements of the problem's output
    /// type, with strides in elements, and `lse` is null or points at as many values as O has rows.
    pub(crate) fn new(
        problem: &'a Problem,
        sequences: Sequences<'a>,
        [q, k, v]: [TensorView<'a>; 3],
        side: &SideInputs<'a>,
        o: Operand<'a, *mut u8>,
        lse: *mut f32,
    ) -> Self {
        let reach = problem.scale_granularity();
        Self {
            problem,
            sequences,
            modifiers: Modifiers::new(problem, side),
            rows_per_head: q.shape()[2],
            q: Rows::new(q, side.scales.q, reach),
            k: Rows::new(k, side.scales.k, reach),
            v: Rows::new(v, side.scales.v, reach),
            o,
            lse,
        }
    }

    /// Computes everything.
    pub(crate) fn run(&self, options: &CpuOptions) -> Result<(), Error> {
        let shape = Shape::new(self.problem);
        let span = |sequence: usize| {
            let queries = self.sequences.queries(sequence).len();
            Span::new(self.problem, queries, self.sequences.keys(sequence))
        };
        let threads = dispatch::useful_threads(&shape, span, options.thread_count()?);
        let blocks: Vec<(usize, Range<usize>)> = (0..self.sequences.count())
            .flat_map(|sequence| {
                let queries = self.sequences.queries(sequence).len();
                let block = move |first: usize| (sequence, first..queries.min(first + BLOCK));
                (0..queries).step_by(BLOCK).map(block)
            })
            .collect();
        pool::run(threads, blocks.len() * shape.heads_q, &|task| {
            let (sequence, queries) = &blocks[task / shape.heads_q];
            self.block(*sequence, task % shape.heads_q, queries.clone());
        });
        Ok(())
    }

    /// Some queries of one sequence and head.
    fn block(&self, sequence: usize, head: usize, queries: Range<usize>) {
        let (sizes, rows) = (self.problem.sizes(), queries.len());
        let kv_head = head / self.problem.group();
        let (all_queries, keys) = (self.sequences.queries(sequence), self.sequences.keys(sequence));
        let query_block = self.sequences.query_batch(sequence);
        let seen: Vec<Range<usize>> =
            queries.clone().map(|i| self.problem.visible(i, all_queries.len(), keys)).collect();
        let begin = seen.iter().filter(|s| !s.is_empty()).map(|s| s.start).min().unwrap_or(0);
        let end = seen.iter().filter(|s| !s.is_empty()).map(|s| s.end).max().unwrap_or(0);

        let mut query_rows = vec![0.0f32; rows * sizes.dim_qk];
        for (r, query) in query_rows.chunks_exact_mut(sizes.dim_qk).enumerate() {
            self.q.read(sequence, query_block, head, all_queries.start + queries.start + r, query);
        }
        let mut scores = vec![f32::NEG_INFINITY; rows * keys];
        let mut row = vec![0.0f32; sizes.dim_qk.max(sizes.dim_v)];
        for key in begin..end {
            let at = self.sequences.key(sequence, key);
            let k_row = &mut row[..sizes.dim_qk];
            self.k.read(sequence, at.batch, kv_head, at.row, k_row);
            for (r, query) in query_rows.chunks_exact(sizes.dim_qk).enumerate() {
                if seen[r].contains(&key) {
                    scores[r * keys + key] = dot(query, k_row) * self.problem.scale();
                }
            }
        }
        let mut hidden = vec![false; if self.modifiers.hide() { rows * keys } else { 0 }];
        let mut sums = [0.0f32; BLOCK];
        for r in 0..rows {
            let (line, seen) = (&mut scores[r * keys..][..keys], seen[r].clone());
            let query = queries.start + r;
            if self.modifiers.any() {
                let position = self.problem.position(query, all_queries.len(), keys);
                let at = Row { sequence, head, query, position };
                self.modifiers.change(at, seen.start, &mut line[seen.clone()]);
                if self.modifiers.hide() {
                    self.modifiers.mask(
                        at,
                        seen.start,
                        &mut line[seen.clone()],
                        &mut hidden[r * keys..][seen],
                    );
                }
            }
            let sink = self.modifiers.sink(head);
            let maximum = line.iter().fold(sink.unwrap_or(f32::NEG_INFINITY), |m, s| m.max(*s));
            let shift = maximum.max(f32::MIN);
            line.iter_mut().for_each(|s| *s = (*s - shift).exp());
            sums[r] = line.iter().sum::<f32>() + sink.map_or(0.0, |sink| (sink - shift).exp());
            let lse = if sums[r] == 0.0 { f32::NEG_INFINITY } else { maximum + sums[r].ln() };
            self.put_lse(query_block, head, all_queries.start + query, lse);
        }
        let mut output = vec![0.0f32; rows * sizes.dim_v];
        for key in begin..end {
            let at = self.sequences.key(sequence, key);
            let v_row = &mut row[..sizes.dim_v];
            self.v.read(sequence, at.batch, kv_head, at.row, v_row);
            for (r, out) in output.chunks_exact_mut(sizes.dim_v).enumerate() {
                if seen[r].contains(&key) && hidden.get(r * keys + key) != Some(&true) {
                    let weight = scores[r * keys + key];
                    out.iter_mut().zip(v_row.iter()).for_each(|(o, x)| *o += weight * x);
                }
            }
        }
        for (r, out) in output.chunks_exact_mut(sizes.dim_v).enumerate() {
            let factor = if sums[r] == 0.0 { 0.0 } else { 1.0 / sums[r] };
            out.iter_mut().for_each(|x| *x *= factor);
            self.put_row(query_block, head, all_queries.start + queries.start + r, out);
        }
    }

    fn put_lse(&self, block: usize, head: usize, row: usize, value: f32) {
        if !self.lse.is_null() {
            let at = (block * self.problem.sizes().heads_q + head) * self.rows_per_head + row;
            // SAFETY: the length was checked against O's rows, and each row is one task's.
            unsafe { *self.lse.add(at) = value };
        }
    }

    fn put_row(&self, block: usize, head: usize, row: usize, values: &[f32]) {
        let float = self.problem.output_float();
        // SAFETY: O was checked against the problem, the row is within it, and each row is one task's.
        unsafe {
            let start = self.o.row(block, head, row);
            match float {
                Float::F32 => put(start.cast::<f32>(), values, |x| x),
                Float::F16 => put(start.cast(), values, f16::from_f32),
                Float::BF16 => put(start.cast(), values, bf16::from_f32),
            }
        }
    }
}

/// # Safety
/// `start` is valid for as many elements as there are values.
unsafe fn put<T>(start: *mut T, values: &[f32], round: impl Fn(f32) -> T) {
    for (column, &x) in values.iter().enumerate() {
        // SAFETY: by contract.
        unsafe { *start.add(column) = round(x) };
    }
}

/// Eight running sums, so that the compiler may use vectors: a single f32 sum may not be reordered.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (whole_a, whole_b) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f32 = whole_a.remainder().iter().zip(whole_b.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in whole_a.zip(whole_b) {
        for lane in 0..8 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    sums.iter().sum::<f32>() + tail
}
