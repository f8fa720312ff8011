//! The end of a row: maximum and sum become a factor and an LSE, and partial results of split key ranges are merged.

use crate::job::Job;
use crate::kernels::Kernels;
use crate::pack::packed_stride;
use crate::plan::SplitRows;
use crate::portable::exp2;
use std::f32::consts::{LN_2, LOG2_E};

/// Unnormalised rows of split units: maximum (log2), sum, output.
pub(crate) struct Partials {
    data: *mut f32,
    dim: usize,
}

// SAFETY: units write disjoint rows; rows are read only after all units are done.
unsafe impl Sync for Partials {}

impl Partials {
    /// Floats needed for `rows` partial rows of `dim` columns.
    pub(crate) fn floats(rows: usize, dim: usize) -> usize {
        rows * (dim + 2)
    }

    /// Uses `data`, which holds `floats(rows, dim)` and outlives every use.
    pub(crate) fn new(data: &mut [f32], dim: usize) -> Partials {
        Partials { data: data.as_mut_ptr(), dim }
    }

    /// Stores one row.
    ///
    /// # Safety
    /// `row` is one of those planned, written by nobody else; `output` is valid for `dim` floats.
    pub(crate) unsafe fn put(&self, row: usize, maximum: f32, sum: f32, output: *const f32) {
        // SAFETY: by contract.
        unsafe {
            let at = self.data.add(row * (self.dim + 2));
            *at = maximum;
            *at.add(1) = sum;
            std::ptr::copy_nonoverlapping(output, at.add(2), self.dim);
        }
    }

    /// # Safety
    /// The row was put before, and nobody writes it any more.
    unsafe fn row(&self, row: usize) -> (f32, f32, &[f32]) {
        // SAFETY: by contract.
        unsafe {
            let at = self.data.add(row * (self.dim + 2));
            (*at, *at.add(1), std::slice::from_raw_parts(at.add(2), self.dim))
        }
    }
}

/// Merges the splits of `split` in their order and writes the final rows.
///
/// # Safety
/// The instruction set of `K`; all units of the plan are done; nobody else writes these rows.
pub(crate) unsafe fn merge<K: Kernels>(job: &Job<'_>, partials: &Partials, split: &SplitRows) {
    let (shape, queries) = (&job.shape, job.span(split.sequence).queries);
    let mut output = vec![0.0f32; packed_stride(shape.dim_v)];
    for row in split.rows.clone() {
        let at = |s: usize| split.first_partial + s * split.rows.len() + (row - split.rows.start);
        // SAFETY: rows of the plan, all put, indices within the tensors.
        unsafe {
            let maximum = (0..split.splits).fold(f32::NEG_INFINITY, |m, s| m.max(partials.row(at(s)).0));
            let shift = maximum.max(f32::MIN);
            let mut sum = 0.0;
            output.fill(0.0);
            for s in 0..split.splits {
                let (part_max, part_sum, part) = partials.row(at(s));
                let weight = exp2(part_max - shift);
                sum += part_sum * weight;
                for (o, x) in output.iter_mut().zip(part) {
                    *o += x * weight;
                }
            }
            let (head, query) = (split.kv_head * shape.group() + row / queries, row % queries);
            let sink = job.modifiers.sink(|| head);
            let factor = factor(maximum, sum, sink);
            output.iter_mut().for_each(|x| *x *= factor);
            let dst = job.output_row(split.sequence, head, query);
            K::narrow_row(job.output, output.as_ptr(), dst, shape.dim_v);
            job.put_lse(split.sequence, head, query, || log_sum_exp(maximum, sum, sink));
        }
    }
}

/// What a row's sums of weighted values are multiplied with, from its maximum in units of log2 and the sum of its weights. A sink is one
/// more weight. 0 for a row without any, so that its output is 0 and not NaN.
#[inline]
pub(crate) fn factor(maximum: f32, sum: f32, sink: Option<f32>) -> f32 {
    let (keys, total) = sink.map_or((1.0, sum), |sink| with_sink(maximum, sum, sink));
    if total == 0.0 { 0.0 } else { keys / total }
}

/// The natural logarithm of a row's sum of exponentials. -inf for a row without any.
pub(crate) fn log_sum_exp(maximum: f32, sum: f32, sink: Option<f32>) -> f32 {
    let total = sink.map_or(sum, |sink| with_sink(maximum, sum, sink).1);
    match sink {
        _ if total == 0.0 => f32::NEG_INFINITY,
        // A row whose keys weigh nothing has its sink, exactly.
        Some(sink) if maximum < sink * LOG2_E => sink + total.ln(),
        _ => (maximum + total.log2()) * LN_2,
    }
}

/// The weight of the largest key beside a sink, and the sum of all weights with it. Not by the kernels' exponential: beside a large
/// sink every key may weigh less than what that takes for zero.
fn with_sink(maximum: f32, sum: f32, sink: f32) -> (f32, f32) {
    // A row that sees nothing and has a sink of -inf keeps finite differences.
    let shift = maximum.max(sink * LOG2_E).max(f32::MIN);
    let keys = (maximum - shift).exp2();
    (keys, sum * keys + (sink * LOG2_E - shift).exp2())
}
