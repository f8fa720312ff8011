//! Flash attention over register tiles: the driver of the kernels in `tile`.

use crate::job::{Job, Operand, Shape};
use crate::kernels::Kernels;
use crate::options::FlashTiles;
use crate::pack::{Rows, packed_stride};
use crate::partial::Partials;
use crate::plan::{Unit, query_span};
use crate::simd::MAX_LANES;
use crate::tile::{Ahead, MAX_VECTORS, TileMask, TileStep};
use crate::workspace::Carver;
use std::ops::Range;

/// Widest query tile of any instruction set.
const MAX_TILE_ROWS: usize = MAX_VECTORS * MAX_LANES;

/// A row that sees fewer keys has some weights so large that their rounding to bfloat16 (one part in 512) would move the output by more than
/// rounding the output does; from here on the errors of many small weights cancel.
const FEW_KEYS: usize = 512;

/// Where each piece of a thread's scratch memory begins, in floats.
pub(crate) struct Scratch {
    queries: usize,
    queries_per_tile: usize,
    output: usize,
    output_per_tile: usize,
    keys: usize,
    key_stride: usize,
    values: usize,
    value_stride: usize,
    scores: usize,
    rows: usize,
    row_stride: usize,
    /// Running maximum, its successor, sum, rescale: four vectors' worth per tile.
    state: usize,
    pub(crate) floats: usize,
}

impl Scratch {
    /// Lays out scratch for units of up to `rows` rows.
    pub(crate) fn new<K: Kernels>(shape: &Shape, tiles: &FlashTiles, rows: usize) -> Scratch {
        let width = K::VECTORS * K::LANES;
        let count = rows.div_ceil(width);
        let whole = |n: usize| n.div_ceil(MAX_LANES) * MAX_LANES;
        let (queries_per_tile, output_per_tile) = (whole(shape.dim_qk) * width, whole(shape.dim_v) * width);
        let (key_stride, value_stride) = (packed_stride(shape.dim_qk), packed_stride(shape.dim_v));
        let row_stride = key_stride.max(value_stride);
        let mut carver = Carver::default();
        Scratch {
            queries: carver.take(count * queries_per_tile),
            queries_per_tile,
            output: carver.take(count * output_per_tile),
            output_per_tile,
            keys: carver.take(tiles.block_kv * key_stride),
            key_stride,
            values: carver.take(tiles.block_kv * value_stride),
            value_stride,
            scores: carver.take(tiles.block_kv * width),
            rows: carver.take(MAX_LANES * row_stride),
            row_stride,
            state: carver.take(count * 4 * width),
            floats: carver.floats(),
        }
    }
}

/// One query tile of a unit.
struct Tile {
    rows: Range<usize>,
    vectors: usize,
    first_query: usize,
    last_query: usize,
    lane_query: [f32; MAX_TILE_ROWS],
}

impl Tile {
    fn new<K: Kernels>(shape: &Shape, rows: Range<usize>) -> Tile {
        let (first_query, last_query) = query_span(shape, &rows);
        let mut lane_query = [0.0; MAX_TILE_ROWS];
        for (lane, index) in lane_query.iter_mut().enumerate() {
            // Lanes beyond the last row repeat it; what they compute is never written.
            let row = (rows.start + lane).min(rows.end - 1);
            *index = (row % shape.seq_q - first_query) as f32;
        }
        let vectors = rows.len().div_ceil(K::LANES);
        Tile { rows, vectors, first_query, last_query, lane_query }
    }

    /// Whether a row of the tile sees so few keys that rounding its weights to 16 bits could show in the output. The number of keys in a band
    /// is smallest for the first or the last query.
    fn sees_few_keys(&self, shape: &Shape) -> bool {
        [self.first_query, self.last_query].iter().any(|&query| {
            let (begin, end) = shape.seen_by_any(query, query);
            end - begin < FEW_KEYS
        })
    }

    /// Per vector, one past the last key row of a block that its queries see, within `begin..=end`; never falling.
    fn vector_end<K: Kernels>(
        &self,
        shape: &Shape,
        block: usize,
        begin: usize,
        end: usize,
    ) -> [usize; MAX_VECTORS] {
        let mut ends = [end; MAX_VECTORS];
        // Where rows of several heads share the tile, query indices start again within it.
        let one_head = self.last_query - self.first_query + 1 == self.rows.len();
        if one_head {
            for (vector, limit) in ends.iter_mut().enumerate().take(self.vectors - 1) {
                let last_query = self.first_query + (vector + 1) * K::LANES - 1;
                *limit = shape.seen_by_any(last_query, last_query).1.saturating_sub(block).clamp(begin, end);
            }
        }
        ends
    }
}

/// Computes one unit.
///
/// # Safety
/// The instruction set of `K`; `job` describes valid tensors; `scratch` holds `layout.floats`; no other thread
/// writes the unit's rows.
pub(crate) unsafe fn run_unit<K: Kernels>(
    job: &Job,
    tiles: &FlashTiles,
    layout: &Scratch,
    unit: &Unit,
    partials: &Partials,
    scratch: *mut f32,
) {
    let width = K::VECTORS * K::LANES;
    let cut: Vec<Tile> = (unit.rows.clone().step_by(width))
        .map(|start| Tile::new::<K>(&job.shape, start..(start + width).min(unit.rows.end)))
        .collect();
    // SAFETY: scratch offsets are those of the layout; tensors are valid by contract.
    unsafe {
        for (index, tile) in cut.iter().enumerate() {
            begin_tile::<K>(job, layout, unit, index, tile, scratch);
        }
        let mut block = unit.keys.start / tiles.block_kv * tiles.block_kv;
        while block < unit.keys.end {
            run_block::<K>(job, tiles, layout, unit, &cut, block, scratch);
            block += tiles.block_kv;
        }
        for (index, tile) in cut.iter().enumerate() {
            finish_tile::<K>(job, layout, unit, index, tile, partials, scratch);
        }
    }
}

/// Packs a tile's queries and clears its state.
unsafe fn begin_tile<K: Kernels>(
    job: &Job,
    layout: &Scratch,
    unit: &Unit,
    index: usize,
    tile: &Tile,
    scratch: *mut f32,
) {
    let shape = &job.shape;
    let width = tile.vectors * K::LANES;
    let score_scale = job.score_scale(unit.batch, unit.kv_head);
    // SAFETY: as `run_unit`.
    unsafe {
        let packed = scratch.add(layout.queries + index * layout.queries_per_tile);
        let staged = scratch.add(layout.rows);
        for vector in 0..tile.vectors {
            let from = tile.rows.start + vector * K::LANES;
            let until = (from + K::LANES).min(tile.rows.end);
            std::slice::from_raw_parts_mut(staged, K::LANES * layout.row_stride).fill(0.0);
            let mut row = from;
            while row < until {
                // As many rows at once as lie in the same head.
                let (head, query) = (row / shape.seq_q, row % shape.seq_q);
                let count = (until - row).min(shape.seq_q - query);
                let head = unit.kv_head * shape.group() + head;
                let rows = Rows {
                    src: job.q.row(unit.batch, head, query),
                    src_stride: job.q.row_stride,
                    rows: count,
                    columns: shape.dim_qk,
                    dst: staged.add((row - from) * layout.row_stride),
                    dst_stride: layout.row_stride,
                };
                K::pack_rows(job.q.dtype, &rows);
                if job.q.scales.is_some() {
                    let mut scales = [1.0; MAX_LANES];
                    for (i, scale) in scales.iter_mut().enumerate().take(count) {
                        *scale = job.q.row_scale(unit.batch, unit.batch, head, query + i);
                    }
                    K::scale_rows(rows.dst, rows.dst_stride, count, shape.dim_qk, scales.as_ptr());
                }
                row += count;
            }
            let dst = packed.add(vector * K::LANES);
            K::transpose_queries(staged, layout.row_stride, shape.dim_qk, score_scale, dst, width);
        }
        let output = scratch.add(layout.output + index * layout.output_per_tile);
        std::slice::from_raw_parts_mut(output, layout.output_per_tile).fill(0.0);
        let state = scratch.add(layout.state + index * 4 * K::VECTORS * K::LANES);
        for lane in 0..width {
            *state.add(lane) = f32::NEG_INFINITY;
            *state.add(2 * width + lane) = 0.0;
        }
    }
}

/// Packs one block of keys and values and runs every tile of the unit against it.
unsafe fn run_block<K: Kernels>(
    job: &Job,
    tiles: &FlashTiles,
    layout: &Scratch,
    unit: &Unit,
    cut: &[Tile],
    block: usize,
    scratch: *mut f32,
) {
    let shape = &job.shape;
    // Rows of the block that any tile can want; the first is rounded down to a whole step.
    let begin = unit.keys.start.saturating_sub(block) / K::STEP * K::STEP;
    let end = unit.keys.end.min(block + tiles.block_kv) - block;
    let (first, last) = query_span(shape, &unit.rows);
    let clear = shape.seen_by_all(first, last);
    let all_clear = clear.0 <= block + begin && clear.1 >= block + end;
    // SAFETY: as `run_unit`.
    unsafe {
        let (keys, values) = (scratch.add(layout.keys), scratch.add(layout.values));
        let key_rows = Rows {
            src: job.k.row(unit.batch, unit.kv_head, block + begin),
            src_stride: job.k.row_stride,
            rows: end - begin,
            columns: shape.dim_qk,
            dst: keys.add(begin * layout.key_stride),
            dst_stride: layout.key_stride,
        };
        K::pack_rows(job.k.dtype, &key_rows);
        if let Some(scales) = job.k.row_scales(unit.batch, unit.kv_head, block + begin) {
            K::scale_rows(key_rows.dst, key_rows.dst_stride, end - begin, shape.dim_qk, scales.as_ptr());
        }
        let value_rows = Rows {
            src: job.v.row(unit.batch, unit.kv_head, block + begin),
            src_stride: job.v.row_stride,
            rows: end - begin,
            columns: shape.dim_v,
            dst: values.add(begin / K::PACKED * layout.value_stride),
            dst_stride: layout.value_stride,
        };
        // Only where some query is masked does it matter whether V is finite.
        let mut finite = K::pack_values(job.v.dtype, !all_clear, &value_rows) || all_clear;
        if let Some(scales) = job.v.row_scales(unit.batch, unit.kv_head, block + begin) {
            let scales = scales.as_ptr();
            finite &= K::scale_rows(value_rows.dst, value_rows.dst_stride, end - begin, shape.dim_v, scales);
        }
        let next = (block + tiles.block_kv).min(unit.keys.end);
        let next_rows = |tensor: &Operand<*const u8>, columns: usize, tile: usize| Ahead {
            // Only an address to prefetch from, and none is when no rows are left.
            first: tensor.row_address(unit.batch, unit.kv_head, next),
            row_bytes: columns * tensor.dtype.bytes(),
            stride_bytes: tensor.row_bytes(),
            rows: (unit.keys.end - next).min(tiles.block_kv),
            tile,
            tiles: cut.len(),
        };
        for (index, tile) in cut.iter().enumerate() {
            let seen = shape.seen_by_any(tile.first_query, tile.last_query);
            let key_begin = (seen.0.max(block + begin) - block) / K::STEP * K::STEP;
            let key_end = seen.1.clamp(block, block + end) - block;
            if key_begin >= key_end {
                continue;
            }
            let clear = shape.seen_by_all(tile.first_query, tile.last_query);
            let width = tile.vectors * K::LANES;
            let state = scratch.add(layout.state + index * 4 * K::VECTORS * K::LANES);
            let origin = block as i64 - tile.first_query as i64;
            let step = TileStep {
                queries: scratch.add(layout.queries + index * layout.queries_per_tile),
                dim_qk: shape.dim_qk.div_ceil(K::PACKED),
                score_scale: job.score_scale(unit.batch, unit.kv_head),
                keys,
                key_stride: layout.key_stride,
                values,
                value_stride: layout.value_stride,
                output: scratch.add(layout.output + index * layout.output_per_tile),
                dim_v: shape.dim_v,
                scores: scratch.add(layout.scores),
                whole_weights: job.precise || tile.sees_few_keys(shape),
                key_begin,
                key_end,
                vector_end: tile.vector_end::<K>(shape, block, key_begin, key_end),
                old_max: state,
                new_max: state.add(width),
                sum: state.add(2 * width),
                rescale: state.add(3 * width),
                mask: TileMask {
                    lane_query: tile.lane_query.as_ptr(),
                    // Query i sees key j when j - band_hi <= i <= j - band_lo.
                    first: origin.saturating_sub(shape.band_hi),
                    last: origin.saturating_sub(shape.band_lo),
                    clear_begin: clear.0.saturating_sub(block),
                    clear_end: clear.1.saturating_sub(block),
                },
                ahead: [next_rows(&job.k, shape.dim_qk, index), next_rows(&job.v, shape.dim_v, index)],
            };
            let masked = key_begin < step.mask.clear_begin || key_end > step.mask.clear_end;
            K::scores(tile.vectors, &step);
            K::softmax(tile.vectors, &step);
            K::values(tile.vectors, masked && !finite, &step);
        }
    }
}

/// Normalises a tile and writes its rows: final ones to the output, those of a split unit to the partials.
unsafe fn finish_tile<K: Kernels>(
    job: &Job,
    layout: &Scratch,
    unit: &Unit,
    index: usize,
    tile: &Tile,
    partials: &Partials,
    scratch: *mut f32,
) {
    let shape = &job.shape;
    let width = tile.vectors * K::LANES;
    // SAFETY: as `run_unit`.
    unsafe {
        let state = scratch.add(layout.state + index * 4 * K::VECTORS * K::LANES);
        let output = scratch.add(layout.output + index * layout.output_per_tile);
        let staged = scratch.add(layout.rows);
        for vector in 0..tile.vectors {
            let at = vector * K::LANES;
            let mut factors = [job.v.scale(unit.batch, unit.kv_head); MAX_LANES];
            if unit.partial.is_none() {
                for (lane, factor) in factors.iter_mut().enumerate().take(K::LANES) {
                    *factor = share(*factor, *state.add(2 * width + at + lane));
                }
            }
            let columns = output.add(at);
            K::transpose_outputs(columns, width, shape.dim_v, factors.as_ptr(), staged, layout.row_stride);
            let from = tile.rows.start + at;
            for row in from..(from + K::LANES).min(tile.rows.end) {
                let lane = row - from;
                let (maximum, sum) = (*state.add(at + lane), *state.add(2 * width + at + lane));
                let src = staged.add(lane * layout.row_stride);
                if let Some(first) = unit.partial {
                    partials.put(first + row - unit.rows.start, maximum, sum, src);
                } else {
                    let (head, query) = (unit.kv_head * shape.group() + row / shape.seq_q, row % shape.seq_q);
                    K::narrow_row(job.output, src, job.o.row(unit.batch, head, query), shape.dim_v);
                    job.put_lse(unit.batch, head, query, log_sum_exp(maximum, sum));
                }
            }
        }
    }
}

/// part/sum; 0 for a row that saw no key, so that its output is 0 and not NaN.
pub(crate) fn share(part: f32, sum: f32) -> f32 {
    if sum == 0.0 { 0.0 } else { part / sum }
}

/// The natural logarithm of the sum of exponentials, from a maximum in units of log2. -inf for a row that saw no key.
pub(crate) fn log_sum_exp(maximum: f32, sum: f32) -> f32 {
    if sum == 0.0 { f32::NEG_INFINITY } else { (maximum + sum.log2()) * std::f32::consts::LN_2 }
}
