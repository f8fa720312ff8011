//! Results of split key ranges, and how they become final rows.

use crate::flash::{log_sum_exp, share};
use crate::job::Job;
use crate::kernels::Kernels;
use crate::pack::packed_stride;
use crate::plan::SplitRows;
use crate::portable::exp2;

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
pub(crate) unsafe fn merge<K: Kernels>(job: &Job, partials: &Partials, split: &SplitRows) {
    let shape = &job.shape;
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
            let factor = share(1.0, sum);
            let (head, query) = (split.kv_head * shape.group() + row / shape.seq_q, row % shape.seq_q);
            output.iter_mut().for_each(|x| *x *= factor);
            K::narrow_row(job.output, output.as_ptr(), job.o.row(split.batch, head, query), shape.dim_v);
            job.put_lse(split.batch, head, query, log_sum_exp(maximum, sum));
        }
    }
}
