//! Flash attention for few queries: the driver of the kernels in `decode`.

use crate::decode::{DECODE_BLOCK, DecodeScores, DecodeValues};
use crate::flash::{log_sum_exp, share};
use crate::job::{Job, Shape};
use crate::kernels::Kernels;
use crate::pack::{Rows, packed_stride};
use crate::partial::Partials;
use crate::plan::Unit;
use crate::workspace::Carver;

/// Query heads served by one pass over K and V.
const MAX_ROWS: usize = 4;

/// Where each piece of a thread's scratch memory begins, in floats.
pub(crate) struct Scratch {
    queries: usize,
    query_stride: usize,
    output: usize,
    output_stride: usize,
    scores: usize,
    maximum: usize,
    sum: usize,
    pub(crate) floats: usize,
}

impl Scratch {
    /// Lays out scratch for units of this shape.
    pub(crate) fn new(shape: &Shape) -> Scratch {
        let rows = shape.group() * shape.seq_q + MAX_ROWS;
        let (query_stride, output_stride) = (packed_stride(shape.dim_qk), packed_stride(shape.dim_v));
        let mut carver = Carver::default();
        Scratch {
            queries: carver.take(rows * query_stride),
            query_stride,
            output: carver.take(rows * output_stride),
            output_stride,
            scores: carver.take(MAX_ROWS * DECODE_BLOCK),
            maximum: carver.take(rows),
            sum: carver.take(rows),
            floats: carver.floats(),
        }
    }
}

/// Rows are kept query by query, so that the heads of one query, which see the same keys, are neighbours.
fn slot(shape: &Shape, head: usize, query: usize) -> usize {
    query * shape.group() + head
}

/// Computes one unit: all queries that share a key/value head, over the unit's keys.
///
/// # Safety
/// As `flash::run_unit`.
pub(crate) unsafe fn run_unit<K: Kernels>(
    job: &Job,
    layout: &Scratch,
    unit: &Unit,
    partials: &Partials,
    scratch: *mut f32,
) {
    let shape = &job.shape;
    let rows = unit.rows.len();
    // SAFETY: scratch offsets are those of the layout; tensors are valid by contract.
    unsafe {
        std::slice::from_raw_parts_mut(scratch, layout.floats).fill(0.0);
        std::slice::from_raw_parts_mut(scratch.add(layout.maximum), rows).fill(f32::NEG_INFINITY);
        load_queries::<K>(job, layout, unit, scratch);
        let mut block = unit.keys.start;
        while block < unit.keys.end {
            let until = (block + DECODE_BLOCK).min(unit.keys.end);
            for query in 0..shape.seq_q {
                let seen = shape.seen_by_any(query, query);
                let (begin, end) = (seen.0.max(block), seen.1.min(until));
                let mut head = 0;
                while begin < end && head < shape.group() {
                    let count = match shape.group() - head {
                        1 => 1,
                        2 | 3 => 2,
                        _ => MAX_ROWS,
                    };
                    let at = slot(shape, head, query);
                    step::<K>(job, layout, unit, at, count, begin, end - begin, scratch);
                    head += count;
                }
            }
            block = until;
        }
        store_rows::<K>(job, layout, unit, partials, scratch);
    }
}

unsafe fn load_queries<K: Kernels>(job: &Job, layout: &Scratch, unit: &Unit, scratch: *mut f32) {
    let shape = &job.shape;
    let score_scale = job.score_scale(unit.batch, unit.kv_head);
    for row in unit.rows.clone() {
        let (head, query) = (row / shape.seq_q, row % shape.seq_q);
        let (at, head) = (slot(shape, head, query), unit.kv_head * shape.group() + head);
        let factor = score_scale * job.q.row_scale(unit.batch, unit.batch, head, query);
        // SAFETY: as `run_unit`.
        unsafe {
            let dst = scratch.add(layout.queries + at * layout.query_stride);
            let rows = Rows {
                src: job.q.row(unit.batch, head, query),
                src_stride: job.q.row_stride,
                rows: 1,
                columns: shape.dim_qk,
                dst,
                dst_stride: layout.query_stride,
            };
            K::widen_rows(job.q.dtype, &rows);
            std::slice::from_raw_parts_mut(dst, shape.dim_qk).iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// `count` rows from slot `at` on against keys `begin .. begin + keys`, all of which they see.
unsafe fn step<K: Kernels>(
    job: &Job,
    layout: &Scratch,
    unit: &Unit,
    at: usize,
    count: usize,
    begin: usize,
    keys: usize,
    scratch: *mut f32,
) {
    let shape = &job.shape;
    // SAFETY: as `run_unit`.
    unsafe {
        let scores = scratch.add(layout.scores);
        let (mut key, mut value) = ([std::ptr::null(); DECODE_BLOCK], [std::ptr::null(); DECODE_BLOCK]);
        for j in 0..keys {
            key[j] = job.k.row(unit.batch, unit.kv_head, begin + j);
            value[j] = job.v.row(unit.batch, unit.kv_head, begin + j);
        }
        K::decode_scores(
            job.k.dtype,
            count,
            &DecodeScores {
                queries: scratch.add(layout.queries + at * layout.query_stride),
                query_stride: layout.query_stride,
                dim: shape.dim_qk,
                key: key.as_ptr(),
                keys,
                scores,
            },
        );
        if let Some(scales) = job.k.row_scales(unit.batch, unit.kv_head, begin) {
            scale_lines(scores, count, &scales[..keys]);
        }
        let mut rescale = [0.0f32; MAX_ROWS];
        for r in 0..count {
            let (maximum, sum) = (scratch.add(layout.maximum + at + r), scratch.add(layout.sum + at + r));
            let (new_max, weights, factor) = K::decode_softmax(scores.add(r * DECODE_BLOCK), keys, *maximum);
            *maximum = new_max;
            *sum = *sum * factor + weights;
            rescale[r] = factor;
        }
        if let Some(scales) = job.v.row_scales(unit.batch, unit.kv_head, begin) {
            scale_lines(scores, count, &scales[..keys]);
        }
        K::decode_values(
            job.v.dtype,
            count,
            &DecodeValues {
                weights: scores,
                rescale: rescale.as_ptr(),
                value: value.as_ptr(),
                keys,
                dim: shape.dim_v,
                output: scratch.add(layout.output + at * layout.output_stride),
                output_stride: layout.output_stride,
            },
        );
    }
}

/// Multiplies each key's column of `count` lines of scores or weights with its scale.
unsafe fn scale_lines(lines: *mut f32, count: usize, scales: &[f32]) {
    for r in 0..count {
        // SAFETY: lines are `DECODE_BLOCK` long, which no more keys than that are given for.
        let line = unsafe { std::slice::from_raw_parts_mut(lines.add(r * DECODE_BLOCK), scales.len()) };
        line.iter_mut().zip(scales).for_each(|(x, scale)| *x *= scale);
    }
}

unsafe fn store_rows<K: Kernels>(
    job: &Job,
    layout: &Scratch,
    unit: &Unit,
    partials: &Partials,
    scratch: *mut f32,
) {
    let shape = &job.shape;
    for row in unit.rows.clone() {
        let (head, query) = (row / shape.seq_q, row % shape.seq_q);
        let at = slot(shape, head, query);
        // SAFETY: as `run_unit`.
        unsafe {
            let (maximum, sum) = (*scratch.add(layout.maximum + at), *scratch.add(layout.sum + at));
            let src = scratch.add(layout.output + at * layout.output_stride);
            let value_scale = job.v.scale(unit.batch, unit.kv_head);
            let factor = if unit.partial.is_some() { value_scale } else { share(value_scale, sum) };
            std::slice::from_raw_parts_mut(src, shape.dim_v).iter_mut().for_each(|x| *x *= factor);
            if let Some(first) = unit.partial {
                partials.put(first + row - unit.rows.start, maximum, sum, src);
                continue;
            }
            let head = unit.kv_head * shape.group() + head;
            K::narrow_row(job.output, src, job.o.row(unit.batch, head, query), shape.dim_v);
            job.put_lse(unit.batch, head, query, log_sum_exp(maximum, sum));
        }
    }
}
