//! NEON with matrix multiply-adds of bfloat16 (ARMv8.6's BF16): everything of [`NeonBf16`], but `bfmmla` for QKᵀ and PV.
//!
//! The instruction multiplies two rows of four elements with two others: 2×2 sums, a block, each of which adds the products of one pair, and then of the other, as
//! `bfdot` does, bit for bit. Its operands are quads: four elements of the inner dimension of one row, and those of its neighbour behind them.
//!
//! | packed | as |
//! |---|---|
//! | keys | `[pair of keys][quad of columns]`, in the place of two rows |
//! | queries | `[quad of columns][half][vector]`: pairs of lanes, the first of each vector in the even row, the second in the odd one |
//! | values | `[quad of keys][pair of value columns]`, in the place of two rows of pairs |
//! | weights | `[quad of keys][vector]`, the first half in the row of the first pair, the second in that of the second; behind each what rounding took |
//! | output | blocks, in the rows of their two value columns: the first half in the even one |
//!
//! Its intrinsics are not stable in Rust 1.95, so the instruction is written as assembly.

use crate::kernels::{Kernels, kernels_of};
use crate::neon::Neon;
use crate::neon_bf16::NeonBf16;
use crate::pack::Rows;
use crate::pairs::{copy_rows, pair_tiles};
use crate::peak::{CHAINS, ROUNDS};
use crate::simd::{Simd, simd_of};
use crate::tile::{self, Gemm, MAX_VECTORS, TileStep, Weighed, add_infinite, finite_part, packed_ends};
use evosdpa_core::DType;
use std::arch::aarch64::*;
use std::arch::asm;
use std::hint::black_box;
use std::sync::atomic::{Ordering, compiler_fence};

/// Elements of the inner dimension that are multiplied at a time.
const QUAD: usize = 4;
const LANES: usize = <Neon as Simd>::LANES;
/// Value columns that are packed at a time: a vector of bfloat16.
const COLUMNS: usize = 2 * LANES;

/// Marker for NEON with BF16's matrix multiply-adds, for queries, keys and values of bfloat16.
#[derive(Clone, Copy)]
pub(crate) struct NeonMmla;

impl Simd for NeonMmla {
    type V = float32x4_t;
    const LANES: usize = LANES;
    const REGISTERS: usize = 32;
    const PACKED: usize = 2;

    simd_of!(Neon);

    #[inline(always)]
    unsafe fn dot(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { NeonBf16::dot(a, b, c) }
    }
    #[inline(always)]
    unsafe fn round_pair(even: float32x4_t, odd: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { NeonBf16::round_pair(even, odd) }
    }
    #[inline(always)]
    unsafe fn lost_pair(even: float32x4_t, odd: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { NeonBf16::lost_pair(even, odd) }
    }
}

/// Adds to a block, `[row of a][row of b]`, the products of two quads with two quads.
///
/// # Safety
/// NEON with BF16.
#[inline(always)]
unsafe fn bfmmla(a: float32x4_t, b: float32x4_t, block: float32x4_t) -> float32x4_t {
    let mut sums = block;
    // SAFETY: registers only; by contract.
    unsafe {
        asm!("bfmmla {sums:v}.4s, {a:v}.8h, {b:v}.8h", sums = inout(vreg) sums, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sums
}

/// The first halves of two vectors, and the second: from the blocks of a vector's two pairs of lanes to its two rows of sums, and back.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn turn(a: float32x4_t, b: float32x4_t) -> [float32x4_t; 2] {
    // SAFETY: by contract.
    unsafe {
        let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        [vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b))]
    }
}

/// From two rows of pairs to the quads of a vector's first pair of lanes, and of its second.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn quads(lower: float32x4_t, upper: float32x4_t) -> [float32x4_t; 2] {
    // SAFETY: by contract.
    unsafe { [vzip1q_f32(lower, upper), vzip2q_f32(lower, upper)] }
}

/// The rows of pairs that [`quads`] had.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn pairs_of(first: float32x4_t, second: float32x4_t) -> [float32x4_t; 2] {
    // SAFETY: by contract.
    unsafe { [vuzp1q_f32(first, second), vuzp2q_f32(first, second)] }
}

/// Adds a quad of the inner dimension: `left` has the quads of pairs of rows, those of queries lie in rows at `right` and `apart` from there.
///
/// # Safety
/// NEON with BF16; both rows valid for `NR` vectors.
#[inline(always)]
unsafe fn multiply<const MR: usize, const NR: usize, const FIRST: usize>(
    left: impl Fn(usize) -> float32x4_t,
    right: *const f32,
    apart: usize,
    blocks: &mut [[float32x4_t; NR]; MR],
) {
    // SAFETY: by contract.
    unsafe {
        let mut queries = [[vdupq_n_f32(0.0); NR]; 2];
        for half in 0..2 {
            for v in FIRST..NR {
                queries[half][v] = vld1q_f32(right.add(half * apart + v * LANES));
            }
        }
        for pair in 0..MR / 2 {
            let rows = left(pair);
            for v in FIRST..NR {
                for half in 0..2 {
                    blocks[2 * pair + half][v] = bfmmla(rows, queries[half][v], blocks[2 * pair + half][v]);
                }
            }
        }
    }
}

impl Gemm for NeonMmla {
    const DEPTH: usize = QUAD;

    #[inline(always)]
    unsafe fn key_products<const MR: usize, const NR: usize, const FIRST: usize>(
        t: &TileStep,
        row: usize,
    ) -> [[float32x4_t; NR]; MR] {
        let width = NR * LANES;
        // SAFETY: trait contract; packed queries and keys are zero up to two quads.
        unsafe {
            let mut blocks = [[vdupq_n_f32(0.0); NR]; MR];
            let mut query = t.queries;
            let mut keys = [t.keys; MR];
            for pair in 0..MR / 2 {
                keys[pair] = t.keys.add((row + 2 * pair) * t.key_stride);
            }
            for _ in 0..t.dim_qk.div_ceil(QUAD) {
                for quad in 0..2 {
                    let left = |pair: usize| vld1q_f32(keys[pair].add(quad * LANES));
                    multiply::<MR, NR, FIRST>(left, query.add(2 * quad * width), width, &mut blocks);
                    // The compiler would load both quads first, for which there are no registers left.
                    compiler_fence(Ordering::SeqCst);
                }
                query = query.add(4 * width);
                for pair in 0..MR / 2 {
                    keys[pair] = keys[pair].add(2 * LANES);
                }
            }
            for pair in 0..MR / 2 {
                for v in FIRST..NR {
                    let rows = turn(blocks[2 * pair][v], blocks[2 * pair + 1][v]);
                    (blocks[2 * pair][v], blocks[2 * pair + 1][v]) = (rows[0], rows[1]);
                }
            }
            blocks
        }
    }

    #[inline(always)]
    unsafe fn lay_weights<const NR: usize>(t: &TileStep, weighed: Weighed) -> Weighed {
        let ends = packed_ends::<Self>(t);
        let (mut laid, mut heavy) = (0, 0);
        // SAFETY: trait contract; quads of heavy pairs are no more than these.
        unsafe {
            for row in (t.key_begin..t.key_end).step_by(QUAD) {
                lay_quad::<NR>(t, row, [true; 2], 0, &ends);
            }
            while heavy < weighed.heavy {
                let row = *t.heavy_rows.add(heavy) as usize / QUAD * QUAD;
                let mut lost = [false; 2];
                while heavy < weighed.heavy && *t.heavy_rows.add(heavy) as usize / QUAD * QUAD == row {
                    lost[(*t.heavy_rows.add(heavy) as usize - row) / 2] = true;
                    heavy += 1;
                }
                lay_quad::<NR>(t, row, lost, 1, &ends);
                *t.heavy_rows.add(laid) = row as u32;
                laid += 1;
            }
        }
        Weighed { live: (weighed.live.0 / QUAD * QUAD, weighed.live.1), heavy: laid }
    }

    #[inline(always)]
    unsafe fn for_sums(of_queries: float32x4_t, row: usize) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { turn(of_queries, of_queries)[row % 2] }
    }

    #[inline(always)]
    unsafe fn add_keys<
        const MR: usize,
        const NR: usize,
        const FIRST: usize,
        const EXACT: bool,
        const LOST: bool,
    >(
        t: &TileStep,
        column: usize,
        row: usize,
        blocks: &mut [[float32x4_t; NR]; MR],
    ) {
        let width = NR * LANES;
        // SAFETY: trait contract.
        unsafe {
            let weights = t.scores.add((row + usize::from(LOST)) * width);
            let values = t.values.add(row / 2 * t.value_stride + 2 * column);
            // The next columns of these keys: K and V of a block together may be larger than the first-level cache.
            Self::prefetch_near(values.wrapping_add(MR * 2).cast());
            let left = |pair: usize| {
                let rows = vld1q_f32(values.add(pair * LANES));
                if EXACT { finite(rows) } else { rows }
            };
            multiply::<MR, NR, FIRST>(left, weights, 2 * width, blocks);
            if EXACT && !LOST {
                add_others::<MR, NR, FIRST>(t, values, row, blocks);
            }
        }
    }
}

/// Two rows of pairs of weights, from `row` on, become rows of quads; with `part` 1 those of what rounding took. A pair that is not `held`, or that a
/// vector does not see, is zero.
///
/// # Safety
/// As [`Gemm::lay_weights`].
#[inline(always)]
unsafe fn lay_quad<const NR: usize>(
    t: &TileStep,
    row: usize,
    held: [bool; 2],
    part: usize,
    ends: &[usize; MAX_VECTORS],
) {
    let width = NR * LANES;
    for v in 0..NR {
        // SAFETY: by contract; the score tile has room for whole quads.
        unsafe {
            let at = t.scores.add((row + part) * width + v * LANES);
            let pair = |i: usize| {
                let weighs = held[i] && row + 2 * i < ends[v];
                if weighs { vld1q_f32(at.add(2 * i * width)) } else { vdupq_n_f32(0.0) }
            };
            let [first, second] = quads(pair(0), pair(1));
            vst1q_f32(at, first);
            vst1q_f32(at.add(2 * width), second);
        }
    }
}

/// Quads with zeros for what is not finite.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn finite(rows: float32x4_t) -> float32x4_t {
    // SAFETY: by contract.
    unsafe {
        let (bits, exponent) = (vreinterpretq_u16_f32(rows), vdupq_n_u16(0x7f80));
        vreinterpretq_f32_u16(vbicq_u16(bits, vceqq_u16(vandq_u16(bits, exponent), exponent)))
    }
}

/// Adds the products of values that are not finite, of `MR` columns of the keys from `row` on, for those queries that see them.
///
/// # Safety
/// As [`Gemm::add_keys`]; `values` is what that multiplied.
#[inline(always)]
unsafe fn add_others<const MR: usize, const NR: usize, const FIRST: usize>(
    t: &TileStep,
    values: *const f32,
    row: usize,
    blocks: &mut [[float32x4_t; NR]; MR],
) {
    let width = NR * LANES;
    for at in 0..MR * 2 {
        // A float is a pair of keys of one column.
        let (column, pair) = (at / 2, at % 2);
        let key = row + 2 * pair;
        // SAFETY: by contract.
        unsafe {
            let value = *values.add(at);
            if finite_part::<NeonMmla>(value).to_bits() == value.to_bits() || key >= t.key_end {
                continue;
            }
            for v in FIRST..NR {
                let weights = t.scores.add(row * width + v * LANES);
                let weights = pairs_of(vld1q_f32(weights), vld1q_f32(weights.add(2 * width)))[pair];
                let even = column / 2 * 2;
                let mut rows = turn(blocks[even][v], blocks[even + 1][v]);
                let sum = rows[column % 2];
                rows[column % 2] = add_infinite::<NeonMmla>(t, value, weights, key, v * LANES, width, sum);
                (blocks[even][v], blocks[even + 1][v]) = turn(rows[0], rows[1]).into();
            }
        }
    }
}

impl Kernels for NeonMmla {
    // Few queries are bound by memory: keys are widened as they are read.
    type Few = Neon;
    const LANES: usize = LANES;
    const STEP: usize = <Neon as Kernels>::STEP;
    const VECTORS: usize = <Neon as Kernels>::VECTORS;
    const PACKED: usize = 2;

    pair_tiles!(transpose_quads, #[target_feature(enable = "neon,bf16")]);
    kernels_of!(Neon);

    #[target_feature(enable = "neon,bf16")]
    unsafe fn pack_rows(_dtype: DType, a: &Rows) {
        // SAFETY: trait contract; problems of other types take `Neon`.
        unsafe { copy_rows::<Self>(a) }
    }
    #[target_feature(enable = "neon,bf16")]
    unsafe fn pack_keys(_dtype: DType, first: usize, a: &Rows) {
        // SAFETY: as above.
        unsafe { quad_keys(first, a) }
    }
    #[target_feature(enable = "neon,bf16")]
    unsafe fn pack_values(_dtype: DType, checked: bool, a: &Rows) -> bool {
        // SAFETY: as above.
        unsafe { quad_values(checked, a) }
    }
    #[target_feature(enable = "neon,bf16")]
    unsafe fn order_outputs(tile: *mut f32, tile_stride: usize, columns: usize) {
        for column in (0..columns).step_by(2) {
            // SAFETY: trait contract; PV leaves whole blocks.
            unsafe {
                let (even, odd) = (tile.add(column * tile_stride), tile.add((column + 1) * tile_stride));
                let rows = turn(vld1q_f32(even), vld1q_f32(odd));
                vst1q_f32(even, rows[0]);
                vst1q_f32(odd, rows[1]);
            }
        }
    }
    unsafe fn decode_scores(dtype: DType, rows: usize, a: &crate::decode::DecodeScores) {
        // SAFETY: trait contract.
        unsafe { <Neon as Kernels>::decode_scores(dtype, rows, a) }
    }
    unsafe fn decode_values(dtype: DType, rows: usize, a: &crate::decode::DecodeValues) {
        // SAFETY: trait contract.
        unsafe { <Neon as Kernels>::decode_values(dtype, rows, a) }
    }
}

/// Rows of keys become every other quad of a place that two neighbours share, from row `first` of a block on; filled with zeros up to two quads.
///
/// # Safety
/// As `Kernels::pack_keys`.
#[inline(always)]
unsafe fn quad_keys(first: usize, a: &Rows) {
    for row in 0..a.rows {
        let odd = (first + row) % 2;
        // SAFETY: a source row has `columns` elements; two packed rows have room for those of both, up to whole vectors.
        unsafe {
            let src = a.src.cast::<u16>().add(row * a.src_stride);
            let dst = a.dst.add(row * a.dst_stride).sub(odd * a.dst_stride).add(2 * odd);
            let put = |column: usize, quads: [u64; 2]| {
                dst.add(column).cast::<u64>().write_unaligned(quads[0]);
                dst.add(column + LANES).cast::<u64>().write_unaligned(quads[1]);
            };
            let whole = a.columns / (2 * QUAD) * (2 * QUAD);
            for column in (0..whole).step_by(2 * QUAD) {
                put(column, src.add(column).cast::<[u64; 2]>().read_unaligned());
            }
            if whole < a.columns {
                let mut last = [0u64; 2];
                src.add(whole).copy_to_nonoverlapping(last.as_mut_ptr().cast(), a.columns - whole);
                put(whole, last);
            }
        }
    }
}

/// Queries of a vector, in rows of bfloat16, become quads by pairs of lanes. They are only moved: the scale is left for the scores.
///
/// # Safety
/// As `pack::transpose_queries`.
#[inline(always)]
unsafe fn transpose_quads(
    rows: *const f32,
    row_stride: usize,
    columns: usize,
    tile: *mut f32,
    tile_stride: usize,
) {
    // Four floats are two quads.
    for at in (0..columns.div_ceil(2)).step_by(LANES) {
        // SAFETY: by contract.
        unsafe {
            let row = |i: usize| vld1q_f32(rows.add(i * row_stride + at));
            let (first, second) = (turn(row(0), row(1)), turn(row(2), row(3)));
            for (i, quads) in [first[0], second[0], first[1], second[1]].into_iter().enumerate() {
                vst1q_f32(tile.add((at + i) * tile_stride), quads);
            }
        }
    }
}

/// Rows of values become quads of keys by pairs of columns, zero behind the last key. Says whether all are finite, when `checked`.
///
/// # Safety
/// As `Kernels::pack_values`; the first row is the first of a quad.
#[inline(always)]
unsafe fn quad_values(checked: bool, a: &Rows) -> bool {
    // SAFETY: by contract.
    unsafe {
        let mut largest = vdupq_n_u16(0);
        for first in (0..a.rows).step_by(QUAD) {
            let dst = a.dst.add(first / 2 * a.dst_stride);
            for column in (0..a.columns).step_by(COLUMNS) {
                let key = |i: usize| load_values(a, first + i, column);
                let keys = [key(0), key(1), key(2), key(3)];
                if checked {
                    for key in keys {
                        largest = vmaxq_u16(largest, vandq_u16(key, vdupq_n_u16(0x7fff)));
                    }
                }
                let lower = [vzip1q_u16(keys[0], keys[2]), vzip2q_u16(keys[0], keys[2])];
                let upper = [vzip1q_u16(keys[1], keys[3]), vzip2q_u16(keys[1], keys[3])];
                for half in 0..2 {
                    let to = dst.add(2 * column + half * COLUMNS).cast::<u16>();
                    vst1q_u16(to, vzip1q_u16(lower[half], upper[half]));
                    vst1q_u16(to.add(COLUMNS), vzip2q_u16(lower[half], upper[half]));
                }
            }
        }
        vmaxvq_u16(largest) < 0x7f80
    }
}

/// A vector of values of a key; zeros behind the last row and column.
///
/// # Safety
/// As [`quad_values`].
#[inline(always)]
unsafe fn load_values(a: &Rows, row: usize, column: usize) -> uint16x8_t {
    // SAFETY: a source row has `columns` elements.
    unsafe {
        if row >= a.rows {
            return vdupq_n_u16(0);
        }
        let src = a.src.cast::<u16>().add(row * a.src_stride + column);
        if a.columns - column >= COLUMNS {
            return vld1q_u16(src);
        }
        let mut some = [0u16; COLUMNS];
        src.copy_to_nonoverlapping(some.as_mut_ptr(), a.columns - column);
        vld1q_u16(some.as_ptr())
    }
}

/// Multiplies blocks of ones as fast as the processor can, and says how many operations that were.
///
/// # Safety
/// NEON with BF16.
#[target_feature(enable = "neon,bf16")]
pub(crate) unsafe fn burst() -> f64 {
    // SAFETY: the features are enabled here.
    unsafe {
        let ones = vreinterpretq_f32_u16(vdupq_n_u16(black_box(0x3f80)));
        let mut blocks = [ones; CHAINS];
        for _ in 0..ROUNDS {
            for block in &mut blocks {
                *block = bfmmla(ones, ones, *block);
            }
        }
        for block in blocks {
            black_box(vgetq_lane_f32::<0>(block));
        }
    }
    // 2×2 sums of four products.
    (2 * 4 * QUAD * CHAINS * ROUNDS) as f64
}

#[cfg(test)]
mod tests;
