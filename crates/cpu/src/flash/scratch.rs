//! A thread's scratch memory: what lies where.

use crate::job::Shape;
use crate::kernels::Kernels;
use crate::options::FlashTiles;
use crate::pack::packed_stride;
use crate::shown::words;
use crate::simd::MAX_LANES;
use crate::workspace::Carver;

/// Where each piece of a thread's scratch memory begins, in floats.
pub(crate) struct Scratch {
    pub(super) queries: usize,
    pub(super) queries_per_tile: usize,
    pub(super) output: usize,
    pub(super) output_per_tile: usize,
    pub(super) keys: usize,
    pub(super) key_stride: usize,
    pub(super) values: usize,
    pub(super) value_stride: usize,
    pub(super) scores: usize,
    pub(super) heavy_rows: usize,
    /// What is hidden from whom, as the scores lie.
    pub(super) hidden: usize,
    pub(super) rows: usize,
    pub(super) row_stride: usize,
    /// Values of a block as they are given, where pages are to be packed in pairs.
    pub(super) together: usize,
    /// Running maximum, its successor, sum, rescale, two sums of squares, most hope: seven vectors' worth per tile.
    pub(super) state: usize,
    /// Per tile and lane: ALiBi's slope, and the addresses of its rows of bias, mask and block table.
    pub(super) slopes: usize,
    pub(super) bias_rows: usize,
    pub(super) mask_rows: usize,
    pub(super) block_rows: usize,
    /// Per tile, what a boolean mask and a block table show of a block, as bits.
    pub(super) shown: usize,
    pub(super) shown_per_tile: usize,
    pub(crate) floats: usize,
}

impl Scratch {
    /// Lays out scratch for units of up to `rows` rows.
    pub(crate) fn new<K: Kernels>(shape: &Shape, tiles: &FlashTiles, rows: usize) -> Scratch {
        const POINTER: usize = size_of::<*const u8>() / size_of::<f32>();
        let width = K::VECTORS * K::LANES;
        let count = rows.div_ceil(width);
        let whole = |n: usize| n.div_ceil(MAX_LANES) * MAX_LANES;
        let (queries_per_tile, output_per_tile) = (whole(shape.dim_qk) * width, whole(shape.dim_v) * width);
        let (key_stride, value_stride) = (packed_stride(shape.dim_qk), packed_stride(shape.dim_v));
        let row_stride = key_stride.max(value_stride);
        let shown_per_tile = words(tiles.block_kv) * width;
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
            // Matrix tiles take weights up to a whole tile of keys.
            scores: carver.take(tiles.block_kv.next_multiple_of(K::STEP) * width),
            heavy_rows: carver.take(if K::PACKED > 1 { tiles.block_kv } else { 0 }),
            rows: carver.take(MAX_LANES * row_stride),
            row_stride,
            together: carver.take(if K::PACKED > 1 { tiles.block_kv * shape.dim_v.div_ceil(2) } else { 0 }),
            state: carver.take(count * 7 * width),
            slopes: carver.take(count * width),
            // And the row behind the last.
            hidden: carver.take((tiles.block_kv + 1) * width),
            bias_rows: carver.take(count * width * POINTER),
            mask_rows: carver.take(count * width * POINTER),
            block_rows: carver.take(count * width * POINTER),
            shown: carver.take(count * shown_per_tile),
            shown_per_tile,
            floats: carver.floats(),
        }
    }
}
