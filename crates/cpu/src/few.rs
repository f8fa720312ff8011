//! Flash attention for few queries: the driver of the kernels in `decode`.

use crate::decode::{Ahead, DECODE_BLOCK, DecodeScores, DecodeValues, KeyRows};
use crate::hook::RowHook;
use crate::job::{Job, Shape};
use crate::kernels::Kernels;
use crate::pack::{Rows, packed_stride};
use crate::partial::{Partials, factor, log_sum_exp};
use crate::plan::Unit;
use crate::span::Span;
use crate::workspace::Carver;
use evosdpa_core::DType;
use std::ops::Range;
use std::ptr;

/// Query heads served by one pass over K and V.
const MAX_ROWS: usize = 4;

/// How many of the heads of a group, from `head` on, are served at once.
fn heads_at_once(shape: &Shape, head: usize) -> usize {
    match shape.group() - head {
        1 => 1,
        _ if shape.heads_apart => 1,
        2 | 3 => 2,
        _ => MAX_ROWS,
    }
}

/// What so many queries of a group cost beside others, in quarters of what a pass for four heads costs.
pub(crate) fn cost(shape: &Shape, queries: usize) -> usize {
    let (mut head, mut cost) = (0, 0);
    while head < shape.group() {
        let count = heads_at_once(shape, head);
        cost += if count == MAX_ROWS { 4 } else { count + 1 };
        head += count;
    }
    queries.saturating_mul(cost)
}

/// Where each piece of a thread's scratch memory begins, in floats.
pub(crate) struct Scratch {
    queries: usize,
    query_stride: usize,
    output: usize,
    output_stride: usize,
    scores: usize,
    /// Of one row: how far each key is, and its bias.
    distance: usize,
    bias: usize,
    maximum: usize,
    sum: usize,
    pub(crate) floats: usize,
}

impl Scratch {
    /// Lays out scratch for units of up to `rows` rows.
    pub(crate) fn new(shape: &Shape, rows: usize) -> Scratch {
        let rows = rows + MAX_ROWS;
        let (query_stride, output_stride) = (packed_stride(shape.dim_qk), packed_stride(shape.dim_v));
        let mut carver = Carver::default();
        Scratch {
            queries: carver.take(rows * query_stride),
            query_stride,
            output: carver.take(rows * output_stride),
            output_stride,
            scores: carver.take(MAX_ROWS * DECODE_BLOCK),
            distance: carver.take(DECODE_BLOCK),
            bias: carver.take(DECODE_BLOCK),
            maximum: carver.take(rows),
            sum: carver.take(rows),
            floats: carver.floats(),
        }
    }
}

/// A unit at work.
struct Work<'a> {
    job: &'a Job<'a>,
    layout: &'a Scratch,
    unit: &'a Unit,
    span: Span,
    scratch: *mut f32,
}

/// The keys of a block that some rows see, and where they lie.
struct Keys {
    /// One behind the other from here on, unless there is a list.
    range: Range<usize>,
    count: usize,
    listed: bool,
    index: [usize; DECODE_BLOCK],
    key: [*const u8; DECODE_BLOCK],
    value: [*const u8; DECODE_BLOCK],
    key_scale: [f32; DECODE_BLOCK],
    value_scale: [f32; DECODE_BLOCK],
}

/// Computes one unit: all queries that share a key/value head, over the unit's keys.
///
/// # Safety
/// As `flash::run_unit`.
pub(crate) unsafe fn run_unit<K: Kernels>(
    job: &Job<'_>,
    layout: &Scratch,
    unit: &Unit,
    partials: &Partials,
    scratch: *mut f32,
) {
    let span = job.span(unit.sequence);
    let work = Work { job, layout, unit, span, scratch };
    let heads_apart = job.shape.heads_apart;
    let (mut now, mut next) = (&mut Keys::new(), &mut Keys::new());
    // SAFETY: scratch offsets are those of the layout; tensors are valid by contract.
    unsafe {
        ptr::write_bytes(scratch, 0, layout.floats);
        work.load_queries::<K>();
        let mut block = unit.keys.start;
        while block < unit.keys.end {
            let until = (block + DECODE_BLOCK).min(unit.keys.end);
            // Who comes after the first finds the rows in a cache.
            let mut fetched = false;
            for query in 0..span.queries {
                let range = work.seen(query, block);
                if range.is_empty() {
                    continue;
                }
                // A single query knows what it wants next.
                let known = span.queries == 1 && !heads_apart;
                if !(known && now.range == range) {
                    work.find_keys(now, 0, query, range.clone());
                }
                next.count = 0;
                if known && until < unit.keys.end {
                    work.find_keys(next, 0, query, work.seen(query, until));
                }
                let mut head = 0;
                while head < job.shape.group() {
                    let count = heads_at_once(&job.shape, head);
                    if heads_apart && head > 0 {
                        work.find_keys(now, head, query, range.clone());
                    }
                    if now.count > 0 {
                        work.step::<K>(head, count, query, now, next, !fetched);
                        fetched = true;
                    }
                    head += count;
                }
            }
            std::mem::swap(&mut now, &mut next);
            block = until;
        }
        work.store_rows::<K>(partials);
    }
}

impl Keys {
    fn new() -> Keys {
        Keys {
            range: 0..0,
            count: 0,
            listed: false,
            index: [0; DECODE_BLOCK],
            key: [ptr::null(); DECODE_BLOCK],
            value: [ptr::null(); DECODE_BLOCK],
            key_scale: [1.0; DECODE_BLOCK],
            value_scale: [1.0; DECODE_BLOCK],
        }
    }

    /// These rows of K or V.
    fn rows(&self, list: &[*const u8; DECODE_BLOCK], stride: usize) -> KeyRows {
        KeyRows { first: list[0], stride, list: if self.listed { list.as_ptr() } else { ptr::null() } }
    }

    /// The number of the `j`th key in its sequence.
    fn index(&self, j: usize) -> usize {
        if self.listed { self.index[j] } else { self.range.start + j }
    }
}

/// # Safety
/// As [`run_unit`], of every function.
impl Work<'_> {
    /// Rows are kept query by query, so that the heads of one query, which see the same keys, are neighbours.
    fn slot(&self, head: usize, query: usize) -> usize {
        query * self.job.shape.group() + head
    }

    /// Which of all query heads one of the unit's is.
    fn query_head(&self, head: usize) -> usize {
        self.unit.kv_head * self.job.shape.group() + head
    }

    /// The keys of a block that a query sees.
    fn seen(&self, query: usize, block: usize) -> Range<usize> {
        let (begin, end) = self.span.seen_by_any(query, query);
        begin.max(block)..end.min(block + DECODE_BLOCK).min(self.unit.keys.end)
    }

    /// Queries widened and scaled, or as pairs, and nothing seen yet.
    unsafe fn load_queries<K: Kernels>(&self) {
        let Work { job, layout, unit, span, scratch } = *self;
        let score_scale = job.score_scale(unit.sequence, unit.kv_head);
        for row in unit.rows.clone() {
            let (head, query) = (row / span.queries, row % span.queries);
            let (at, head) = (self.slot(head, query), self.query_head(head));
            let (batch, place) = job.query_place(unit.sequence, query);
            let factor = score_scale * job.q.row_scale(unit.sequence, batch, head, place);
            // SAFETY: as `run_unit`.
            unsafe {
                let dst = scratch.add(layout.queries + at * layout.query_stride);
                let rows = Rows {
                    src: job.q.row(batch, head, place),
                    src_stride: job.q.row_stride,
                    rows: 1,
                    columns: job.shape.dim_qk,
                    dst,
                    dst_stride: layout.query_stride,
                };
                K::pack_rows(job.q.dtype, &rows);
                if K::PACKED == 1 {
                    let query = std::slice::from_raw_parts_mut(dst, job.shape.dim_qk);
                    query.iter_mut().for_each(|x| *x *= factor);
                }
                *scratch.add(layout.maximum + at) = f32::NEG_INFINITY;
            }
        }
    }

    /// The keys of a range that a boolean mask and a block table leave to a query, all of them where there is neither. They need a list where they
    /// do not lie one behind the other.
    unsafe fn find_keys(&self, keys: &mut Keys, head: usize, query: usize, range: Range<usize>) {
        let Work { job, unit, .. } = *self;
        let Unit { sequence, kv_head, .. } = *unit;
        let mask = job.modifiers.mask.as_ref().map(|mask| mask.row(sequence, self.query_head(head), query));
        keys.range = range.clone();
        let blocks = job.modifiers.blocks.as_ref();
        let blocks = blocks.map(|table| (table.keys(), table.row(sequence, self.query_head(head), query)));
        let is_hidden = |key: usize| blocks.is_some_and(|(size, row)| row[key / size] == 0);
        keys.listed = job.modifiers.hide() || job.page.is_some();
        keys.count = 0;
        let mut first = range.start;
        while first < range.end {
            let (place, run) = job.key_run(sequence, first, range.end - first);
            let scales = [&job.k, &job.v].map(|tensor| tensor.row_scales(place.batch, kv_head, place.row));
            // SAFETY: as `run_unit`; masks have a byte for every key.
            unsafe {
                let (key, value) =
                    (job.k.row(place.batch, kv_head, place.row), job.v.row(place.batch, kv_head, place.row));
                let (key_bytes, value_bytes) = (job.k.row_bytes(), job.v.row_bytes());
                if !keys.listed {
                    (keys.key[0], keys.value[0]) = (key, value);
                }
                for i in 0..if keys.listed || scales[0].or(scales[1]).is_some() { run } else { 0 } {
                    if is_hidden(first + i) || mask.is_some_and(|mask| *mask.add(first + i) == 0) {
                        continue;
                    }
                    let at = keys.count;
                    if keys.listed {
                        keys.index[at] = first + i;
                        keys.key[at] = key.wrapping_add(i * key_bytes);
                        keys.value[at] = value.wrapping_add(i * value_bytes);
                    }
                    if let Some(scales) = scales[0] {
                        keys.key_scale[at] = scales[i];
                    }
                    if let Some(scales) = scales[1] {
                        keys.value_scale[at] = scales[i];
                    }
                    keys.count += 1;
                }
            }
            first += run;
        }
        if !keys.listed {
            keys.count = range.len();
        }
    }

    /// `count` heads of a query from `head` on against keys, all of which they see. Behind the keys their values are read, then the `next` keys; rows are fetched
    /// ahead where that is asked for.
    unsafe fn step<K: Kernels>(
        &self,
        head: usize,
        count: usize,
        query: usize,
        keys: &Keys,
        next: &Keys,
        fetch: bool,
    ) {
        let Work { job, layout, unit, scratch, .. } = *self;
        let at = self.slot(head, query);
        let (key, value) =
            (keys.rows(&keys.key, job.k.row_bytes()), keys.rows(&keys.value, job.v.row_bytes()));
        let next_key = next.rows(&next.key, job.k.row_bytes());
        let fetched = |count: usize| if fetch { count } else { 0 };
        let (key_bytes, value_bytes) =
            (job.shape.dim_qk * job.k.dtype.bytes(), job.shape.dim_v * job.v.dtype.bytes());
        // SAFETY: as `run_unit`.
        unsafe {
            let scores = scratch.add(layout.scores);
            let dots = DecodeScores {
                queries: scratch.add(layout.queries + at * layout.query_stride),
                query_stride: layout.query_stride,
                dim: job.shape.dim_qk,
                key,
                keys: keys.count,
                scores,
                scale: job.score_scale(unit.sequence, unit.kv_head),
                ahead: Ahead {
                    rows: key,
                    count: fetched(keys.count),
                    row_bytes: key_bytes,
                    then: value,
                    then_count: fetched(keys.count),
                    then_bytes: value_bytes,
                },
            };
            K::decode_scores(job.k.dtype, count, &dots);
            if job.k.row_scales(0, 0, 0).is_some() {
                scale_lines(scores, count, &keys.key_scale[..keys.count]);
            }
            if job.modifiers.change() {
                self.modify_scores::<K>(head, count, query, keys, scores);
            }
            let mut rescale = [0.0f32; MAX_ROWS];
            for r in 0..count {
                let (maximum, sum) = (scratch.add(layout.maximum + at + r), scratch.add(layout.sum + at + r));
                let (new_max, weights, factor) =
                    K::decode_softmax(scores.add(r * DECODE_BLOCK), keys.count, *maximum);
                *maximum = new_max;
                *sum = *sum * factor + weights;
                rescale[r] = factor;
            }
            if job.v.row_scales(0, 0, 0).is_some() {
                scale_lines(scores, count, &keys.value_scale[..keys.count]);
            }
            let sums = DecodeValues {
                weights: scores,
                rescale: rescale.as_ptr(),
                value,
                keys: keys.count,
                dim: job.shape.dim_v,
                output: scratch.add(layout.output + at * layout.output_stride),
                output_stride: layout.output_stride,
                ahead: Ahead {
                    rows: value,
                    count: fetched(keys.count),
                    row_bytes: value_bytes,
                    then: next_key,
                    then_count: fetched(next.count),
                    then_bytes: key_bytes,
                },
            };
            K::decode_values(job.v.dtype, count, &sums);
        }
    }

    /// Softcap, ALiBi and bias.
    unsafe fn modify_scores<K: Kernels>(
        &self,
        head: usize,
        count: usize,
        query: usize,
        keys: &Keys,
        scores: *mut f32,
    ) {
        let Work { job, layout, unit, span, scratch } = *self;
        let modifiers = &job.modifiers;
        // SAFETY: as `run_unit`.
        unsafe {
            let (distance, bias) = (scratch.add(layout.distance), scratch.add(layout.bias));
            if modifiers.alibi() {
                for j in 0..keys.count {
                    let away = query as i64 + span.position - keys.index(j) as i64;
                    *distance.add(j) = away.abs() as f32;
                }
            }
            for r in 0..count {
                let head = self.query_head(head + r);
                if let Some(dense) = &modifiers.bias {
                    let row = dense.row(unit.sequence, head, query);
                    if modifiers.hide() {
                        // Keys that a mask or a block table hides are left out.
                        for j in 0..keys.count {
                            *bias.add(j) = element(dense.dtype(), row, keys.index(j));
                        }
                    } else {
                        let src = row.wrapping_add(keys.range.start * dense.dtype().bytes());
                        let columns = keys.count;
                        let rows = Rows { src, src_stride: 0, rows: 1, columns, dst: bias, dst_stride: 0 };
                        K::widen_rows(dense.dtype(), &rows);
                    }
                }
                let hook = RowHook {
                    cap: modifiers.cap,
                    slope: modifiers.slope(head),
                    distance: if modifiers.alibi() { distance } else { ptr::null() },
                    bias: if modifiers.bias.is_some() { bias } else { ptr::null() },
                };
                K::modify_row(scores.add(r * DECODE_BLOCK), keys.count, &hook);
            }
        }
    }

    unsafe fn store_rows<K: Kernels>(&self, partials: &Partials) {
        let Work { job, layout, unit, span, scratch } = *self;
        let value_scale = job.v.scale(unit.sequence, unit.kv_head);
        for row in unit.rows.clone() {
            let (head, query) = (row / span.queries, row % span.queries);
            let (at, head) = (self.slot(head, query), self.query_head(head));
            // SAFETY: as `run_unit`.
            unsafe {
                let (maximum, sum) = (*scratch.add(layout.maximum + at), *scratch.add(layout.sum + at));
                let src = scratch.add(layout.output + at * layout.output_stride);
                let sink = job.modifiers.sink(|| head);
                let share = if unit.partial.is_some() { 1.0 } else { factor(maximum, sum, sink) };
                let factor = value_scale * share;
                std::slice::from_raw_parts_mut(src, job.shape.dim_v).iter_mut().for_each(|x| *x *= factor);
                if let Some(first) = unit.partial {
                    partials.put(first + row - unit.rows.start, maximum, sum, src);
                    continue;
                }
                let dst = job.output_row(unit.sequence, head, query);
                K::narrow_row(job.output, src, dst, job.shape.dim_v);
                job.put_lse(unit.sequence, head, query, || log_sum_exp(maximum, sum, sink));
            }
        }
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

/// One element of a bias.
#[inline(always)]
unsafe fn element(dtype: DType, row: *const u8, index: usize) -> f32 {
    // SAFETY: the row has an element for every key, and biases have one of these types.
    unsafe {
        match dtype {
            DType::F16 => (*row.cast::<half::f16>().add(index)).to_f32(),
            DType::BF16 => (*row.cast::<half::bf16>().add(index)).to_f32(),
            _ => *row.cast::<f32>().add(index),
        }
    }
}
