//! The baseline: scores of a block of rows are written out whole, then normalised, then multiplied with V.
//!
//! Plain loops over f32 rows, no tiling, no explicit vectors; what a careful first version looks like.

use crate::element::Element;
use crate::error::Error;
use crate::job::Job;
use crate::options::CpuOptions;
use crate::{dispatch, pool};

/// Rows whose scores are materialised at a time.
const BLOCK: usize = 16;

/// Runs the naive kernel.
pub(crate) fn run_naive<E: Element>(job: &Job<E>, options: &CpuOptions) -> Result<(), Error> {
    let shape = &job.shape;
    let threads = dispatch::useful_threads(shape, options.thread_count()?);
    let blocks = shape.seq_q.div_ceil(BLOCK);
    pool::run(threads, shape.batch * shape.heads_q * blocks, &|task| {
        let (batch_head, block) = (task / blocks, task % blocks);
        let (batch, head) = (batch_head / shape.heads_q, batch_head % shape.heads_q);
        let first = block * BLOCK;
        // SAFETY: the indices are within the tensors, and each task owns its rows.
        unsafe { row_block(job, batch, head, first, BLOCK.min(shape.seq_q - first)) };
    });
    Ok(())
}

/// # Safety
/// The indices are within the tensors, and nobody else writes these rows.
unsafe fn row_block<E: Element>(job: &Job<E>, batch: usize, head: usize, first: usize, rows: usize) {
    let shape = &job.shape;
    let kv_head = head / shape.group();
    let mut scores = vec![f32::NEG_INFINITY; rows * shape.seq_kv];
    let mut queries = vec![0.0f32; rows * shape.dim_qk];
    let mut row = vec![0.0f32; shape.dim_qk.max(shape.dim_v)];
    let mut output = vec![0.0f32; rows * shape.dim_v];
    let (begin, end) = shape.seen_by_any(first, first + rows - 1);
    // SAFETY: by contract.
    unsafe {
        for (r, query) in queries.chunks_exact_mut(shape.dim_qk).enumerate() {
            widen(job.q.row(batch, head, first + r), query);
        }
        for key in begin..end {
            widen(job.k.row(batch, kv_head, key), &mut row[..shape.dim_qk]);
            for (r, query) in queries.chunks_exact(shape.dim_qk).enumerate() {
                let (from, until) = shape.seen_by_any(first + r, first + r);
                if (from..until).contains(&key) {
                    scores[r * shape.seq_kv + key] = dot(query, &row[..shape.dim_qk]) * job.scale;
                }
            }
        }
        let mut sums = [0.0f32; BLOCK];
        for (r, line) in scores.chunks_exact_mut(shape.seq_kv).enumerate() {
            let maximum = line.iter().fold(f32::NEG_INFINITY, |m, s| m.max(*s));
            let shift = maximum.max(f32::MIN);
            line.iter_mut().for_each(|s| *s = (*s - shift).exp());
            sums[r] = line.iter().sum();
            let lse = if sums[r] == 0.0 { f32::NEG_INFINITY } else { maximum + sums[r].ln() };
            job.put_lse(batch, head, first + r, lse);
        }
        for key in begin..end {
            widen(job.v.row(batch, kv_head, key), &mut row[..shape.dim_v]);
            for (r, out) in output.chunks_exact_mut(shape.dim_v).enumerate() {
                let (from, until) = shape.seen_by_any(first + r, first + r);
                if (from..until).contains(&key) {
                    let weight = scores[r * shape.seq_kv + key];
                    out.iter_mut().zip(&row).for_each(|(o, x)| *o += weight * x);
                }
            }
        }
        for (r, out) in output.chunks_exact(shape.dim_v).enumerate() {
            let factor = if sums[r] == 0.0 { 0.0 } else { 1.0 / sums[r] };
            let dst = job.o.row(batch, head, first + r);
            for (column, x) in out.iter().enumerate() {
                *dst.add(column) = E::from_f32(x * factor);
            }
        }
    }
}

/// # Safety
/// `src` is valid for as many elements as `dst` has.
unsafe fn widen<E: Element>(src: *const E, dst: &mut [f32]) {
    for (column, x) in dst.iter_mut().enumerate() {
        // SAFETY: by contract.
        *x = unsafe { *src.add(column) }.to_f32();
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
