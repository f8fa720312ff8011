//! Matrix tiles of bfloat16 (AMX): QKᵀ and PV by `tdpbf16ps`, everything between them in vectors of pairs.
//!
//! A tile register has 16 rows of 16 lanes, and a lane is an f32 or a pair of bfloat16. One instruction multiplies 16 rows of 16 pairs with 16 rows of 16 pairs
//! the other way round and adds to 16×16 sums. The kernels' layouts are what it wants: a lane holds a pair, queries lie side by side, so packed keys are
//! a left operand, packed queries and weights (in every other row of the score tile) right ones, and only values are turned when they are packed, once for all
//! tiles of a unit. Sums are kept 2×2 at a time: four of them hide the instruction's latency, and each operand loaded is used twice.
//!
//! What the tiles compute is written once, over a [`TileUnit`]: the processor's ([`Hardware`]), or a model of it, by which tests run all of this
//! on machines that have none.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod hardware;
mod model;
#[cfg(test)]
mod tests;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use hardware::{Hardware, burst, lacks};
pub(crate) use model::{Model, PortablePairs};

use crate::element::Element;
use crate::kernels::{Kernels, kernels_of};
use crate::pack::Rows;
use crate::pairs::{copy_rows, is_zero, load_pair, transpose_pairs};
use crate::portable::Lanes;
use crate::simd::Simd;
use crate::tile::{self, MAX_VECTORS, Start, TileStep, Weighed, add_infinite, finite_part, packed_ends};
use evosdpa_core::{DType, E4M3Code, I8Code, U8Code};
use half::bf16;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Rows of a tile register, and lanes of each.
const SIDE: usize = 16;
/// Keys that a tile of pairs holds.
const KEYS: usize = 2 * SIDE;
/// Vectors of a query tile.
const VECTORS: usize = 2;

/// Tile registers of 16 rows of 64 bytes.
pub(crate) trait TileUnit: Copy + Send + Sync + 'static {
    /// Sets the tile registers of this thread up; [`TileUnit::leave`] gives them back.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn enter();
    /// # Safety
    /// After [`TileUnit::enter`], on the same thread.
    unsafe fn leave();
    /// Adds to `ROWS`×`COLUMNS` tiles of sums, each 1 or 2, the products of `depth` tiles of the left by the right operand; with `FRESH` the sums begin at zero.
    ///
    /// # Safety
    /// Between [`TileUnit::enter`] and [`TileUnit::leave`]; all tiles of all operands valid; `depth` is not 0.
    unsafe fn multiply<const ROWS: usize, const COLUMNS: usize, const FRESH: bool>(a: &Product);
}

/// Operands of [`TileUnit::multiply`]; strides and steps in bytes. Tiles of the same row lie side by side, those of a column 16 rows apart.
pub(crate) struct Product {
    pub(crate) sums: *mut f32,
    pub(crate) sum_stride: usize,
    pub(crate) left: *const f32,
    pub(crate) left_stride: usize,
    /// From one tile to the next that is multiplied.
    pub(crate) left_step: usize,
    pub(crate) right: *const f32,
    pub(crate) right_stride: usize,
    pub(crate) right_step: usize,
    pub(crate) depth: usize,
}

impl Product {
    /// # Safety
    /// As [`TileUnit::multiply`], with `rows` and `columns` of 1 or 2.
    #[inline(always)]
    unsafe fn run<U: TileUnit, const FRESH: bool>(&self, rows: usize, columns: usize) {
        // SAFETY: by contract.
        unsafe {
            match (rows, columns) {
                (1, 1) => U::multiply::<1, 1, FRESH>(self),
                (1, _) => U::multiply::<1, 2, FRESH>(self),
                (_, 1) => U::multiply::<2, 1, FRESH>(self),
                _ => U::multiply::<2, 2, FRESH>(self),
            }
        }
    }
}

/// Kernels that multiply by the tiles of `U` and do all else in the vectors of `S`.
#[derive(Clone, Copy)]
pub(crate) struct Amx<U, S>(PhantomData<(U, S)>);

/// Implements [`Kernels`] for the tiles of `$unit` with vectors of pairs `$simd`, whose f32 kernels are `$base`'s and kernels for few queries `$few`'s.
macro_rules! tile_kernels {
    ($unit:ty, $simd:ty, of $base:ty, few $few:ty, $(#[$feature:meta])?) => {
        impl Kernels for Amx<$unit, $simd> {
            type Few = $few;
            const LANES: usize = SIDE;
            const STEP: usize = KEYS;
            const VECTORS: usize = VECTORS;

            /// Tiles are cheap here, and pairs in vectors slow.
            fn few_limit(_dim: usize) -> usize {
                7
            }
            const PACKED: usize = 2;
            // Sums are finished row by row.
            const WORDS: bool = false;

            unsafe fn enter() {
                // SAFETY: trait contract.
                unsafe { <$unit>::enter() }
            }
            unsafe fn leave() {
                // SAFETY: trait contract.
                unsafe { <$unit>::leave() }
            }
            $(#[$feature])?
            unsafe fn scores(vectors: usize, t: &TileStep) {
                // SAFETY: trait contract.
                unsafe {
                    match vectors {
                        1 => scores::<$unit, $simd, 1>(t),
                        _ => scores::<$unit, $simd, 2>(t),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn softmax(vectors: usize, t: &TileStep) -> Weighed {
                // SAFETY: trait contract.
                unsafe {
                    match vectors {
                        1 => tile::softmax::<$simd, 1>(t),
                        _ => tile::softmax::<$simd, 2>(t),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn values(vectors: usize, exact: bool, t: &TileStep) {
                // SAFETY: trait contract.
                unsafe {
                    match (vectors, exact) {
                        (1, false) => values::<$unit, $simd, 1, false>(t),
                        (_, false) => values::<$unit, $simd, 2, false>(t),
                        (1, true) => values::<$unit, $simd, 1, true>(t),
                        (_, true) => values::<$unit, $simd, 2, true>(t),
                    }
                }
            }
            unsafe fn pack_rows(dtype: DType, a: &Rows) {
                // SAFETY: trait contract.
                unsafe {
                    if dtype == DType::BF16 {
                        copy_rows::<$simd>(a);
                    } else {
                        <$few as Kernels>::pack_rows(dtype, a);
                    }
                }
            }
            $(#[$feature])?
            unsafe fn pack_values(dtype: DType, checked: bool, a: &Rows) -> bool {
                // SAFETY: trait contract.
                unsafe {
                    match dtype {
                        DType::E4M3 => turn_values::<$simd, E4M3Code>(checked, a),
                        DType::I8 => turn_values::<$simd, I8Code>(checked, a),
                        DType::U8 => turn_values::<$simd, U8Code>(checked, a),
                        _ => turn_values::<$simd, bf16>(checked, a),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn transpose_queries(
                rows: *const f32,
                row_stride: usize,
                columns: usize,
                _scale: f32,
                tile: *mut f32,
                tile_stride: usize,
            ) {
                // SAFETY: trait contract.
                unsafe { transpose_pairs::<$simd>(rows, row_stride, columns, tile, tile_stride) }
            }
            unsafe fn decode_scores(dtype: DType, rows: usize, a: &crate::decode::DecodeScores) {
                // SAFETY: trait contract.
                unsafe { <$few as Kernels>::decode_scores(dtype, rows, a) }
            }
            unsafe fn decode_values(dtype: DType, rows: usize, a: &crate::decode::DecodeValues) {
                // SAFETY: trait contract.
                unsafe { <$few as Kernels>::decode_values(dtype, rows, a) }
            }
            kernels_of!($base);
        }
    };
}

tile_kernels!(Model, PortablePairs, of Lanes<SIDE>, few Lanes<SIDE>,);
#[cfg(target_arch = "x86_64")]
tile_kernels!(
    Model, crate::avx512bf16::Avx512Bf16, of crate::avx512::Avx512, few crate::avx512bf16::Avx512Bf16,
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
);
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
tile_kernels!(
    Hardware, crate::avx512bf16::Avx512Bf16, of crate::avx512::Avx512, few crate::avx512bf16::Avx512Bf16,
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
);

/// Bytes of so many floats.
const fn bytes(floats: usize) -> usize {
    floats * size_of::<f32>()
}

/// What products of 2×2 tiles are written to.
#[repr(align(64))]
struct Sums([f32; 4 * SIDE * SIDE]);

/// `tile::scores` by tiles.
///
/// # Safety
/// As `tile::scores`; keys and queries are zero up to whole tiles of pairs.
#[inline(always)]
unsafe fn scores<U: TileUnit, S: Simd, const NR: usize>(t: &TileStep) {
    // SAFETY: in bounds by this function's contract: there is room for keys up to whole tiles.
    unsafe {
        let mut maximum = [S::splat(0.0); NR];
        for v in 0..NR {
            maximum[v] = S::load(t.old_max.add(v * SIDE));
        }
        // Where the score tile holds nothing yet, all products come first, so that the tile unit need not wait for the vectors.
        let straight = t.start == Start::Nothing;
        let mut sums = MaybeUninit::<Sums>::uninit();
        if straight {
            for row in (t.key_begin..t.key_end).step_by(KEYS) {
                multiply_rows::<U, NR>(t, row, t.scores.add(row * NR * SIDE));
            }
        }
        for row in (t.key_begin..t.key_end).step_by(KEYS) {
            for ahead in &t.ahead {
                ahead.prefetch::<S>(row, KEYS);
            }
            let mut products = t.scores.add(row * NR * SIDE);
            if !straight {
                products = sums.as_mut_ptr().cast();
                multiply_rows::<U, NR>(t, row, products);
            }
            let end = (row + KEYS).min(t.key_end);
            let masked = row < t.mask.clear_begin || end > t.mask.clear_end;
            match (first_vector::<NR>(t, row), masked) {
                (0, false) => finish_rows::<S, NR, 0, false>(t, row, end, products, &mut maximum),
                (0, true) => finish_rows::<S, NR, 0, true>(t, row, end, products, &mut maximum),
                (_, false) => finish_rows::<S, NR, 1, false>(t, row, end, products, &mut maximum),
                (_, true) => finish_rows::<S, NR, 1, true>(t, row, end, products, &mut maximum),
            }
        }
        for v in 0..NR {
            S::store(t.new_max.add(v * SIDE), maximum[v]);
        }
    }
}

/// The first vector that still sees one of a tile of keys.
#[inline(always)]
fn first_vector<const NR: usize>(t: &TileStep, row: usize) -> usize {
    if NR == 2 && row >= t.vector_end[0] { 1 } else { 0 }
}

/// The products of a tile of key rows with the queries that see any of them, written as the score tile lies.
#[inline(always)]
unsafe fn multiply_rows<U: TileUnit, const NR: usize>(t: &TileStep, row: usize, sums: *mut f32) {
    let (width, first) = (NR * SIDE, first_vector::<NR>(t, row));
    // SAFETY: in bounds by the contract of `scores`.
    unsafe {
        let product = Product {
            sums: sums.add(first * SIDE),
            sum_stride: bytes(width),
            left: t.keys.add(row * t.key_stride),
            left_stride: bytes(t.key_stride),
            left_step: bytes(SIDE),
            right: t.queries.add(first * SIDE),
            right_stride: bytes(width),
            right_step: bytes(SIDE * width),
            depth: t.dim_qk.div_ceil(SIDE),
        };
        product.run::<U, true>((t.key_end - row).div_ceil(SIDE).min(2), NR - first);
    }
}

/// Scales the products of key rows, puts to them what the score tile began with, hides what is masked and writes them there.
#[inline(always)]
unsafe fn finish_rows<S: Simd, const NR: usize, const FIRST: usize, const MASKED: bool>(
    t: &TileStep,
    row: usize,
    end: usize,
    sums: *const f32,
    maximum: &mut [S::V; NR],
) {
    let width = NR * SIDE;
    // SAFETY: in bounds by the contract of `scores`.
    unsafe {
        let scale = S::splat(t.score_scale);
        let mut largest = *maximum;
        for r in row..end {
            for v in FIRST..NR {
                let p = t.scores.add(r * width + v * SIDE);
                let mut score = S::mul(S::load(sums.add((r - row) * width + v * SIDE)), scale);
                if t.start == Start::Added {
                    score = S::add(score, S::load(p));
                }
                score = t.hide::<S, NR>(r, v, score);
                if MASKED {
                    let (lo, hi) = t.mask.bounds(r);
                    let index = S::load(t.mask.lane_query.add(v * SIDE));
                    score = S::select_between(index, lo, hi, score, S::splat(f32::NEG_INFINITY));
                }
                S::store(p, score);
                largest[v] = S::max(score, largest[v]);
            }
        }
        *maximum = largest;
    }
}

/// `tile::values` by tiles. Where values are not all finite (`EXACT`), zeros are multiplied in the place of those that are not, which are added apart.
///
/// # Safety
/// As `tile::values`, with values as [`turn_values`] leaves them; the score tile has room for keys up to whole tiles.
#[inline(always)]
unsafe fn values<U: TileUnit, S: Simd, const NR: usize, const EXACT: bool>(t: &TileStep) {
    let width = NR * SIDE;
    let ends = packed_ends::<S>(t);
    // SAFETY: in bounds by this function's contract.
    unsafe {
        rescale_output::<S, NR>(t);
        for v in 0..NR {
            // Weights of keys that a vector does not see were not written: they are multiplied up to the end of a tile.
            for row in (ends[v].next_multiple_of(2)..ends[v].next_multiple_of(KEYS)).step_by(2) {
                S::store(t.scores.add(row * width + v * SIDE), S::splat(0.0));
            }
        }
        let begin = t.key_begin.max(t.weighed.live.0 / KEYS * KEYS);
        let last = t.weighed.live.1.next_multiple_of(KEYS);
        let mut from = begin;
        for first in 0..NR {
            let until = ends[first].next_multiple_of(KEYS).min(last);
            if from < until {
                add_keys::<U, S, NR, EXACT>(t, from, until, first, false);
                from = until;
            }
        }
        let mut heavy = 0;
        while heavy < t.weighed.heavy {
            let from = *t.heavy_rows.add(heavy) as usize / KEYS * KEYS;
            heavy = keep_heavy::<S, NR>(t, from, heavy, &ends);
            add_keys::<U, S, NR, EXACT>(t, from, from + KEYS, 0, true);
        }
    }
}

/// What a new maximum takes from the sums so far.
#[inline(always)]
unsafe fn rescale_output<S: Simd, const NR: usize>(t: &TileStep) {
    let width = NR * SIDE;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        for v in 0..NR {
            let rescale = S::load(t.rescale.add(v * SIDE));
            if !S::exceeds(S::abs(S::sub(rescale, S::splat(1.0))), S::splat(0.0)) {
                continue;
            }
            for column in 0..t.dim_v {
                let p = t.output.add(column * width + v * SIDE);
                S::store(p, S::mul(S::load(p), rescale));
            }
        }
    }
}

/// Of the rows behind the pairs of a tile from key row `from` on, leaves those that hold what rounding took from weights, and makes zeros of the others. Says
/// which heavy pair is the first behind them.
#[inline(always)]
unsafe fn keep_heavy<S: Simd, const NR: usize>(
    t: &TileStep,
    from: usize,
    mut heavy: usize,
    ends: &[usize; MAX_VECTORS],
) -> usize {
    let width = NR * SIDE;
    for row in (from..from + KEYS).step_by(2) {
        // SAFETY: in bounds by the contract of `values`.
        unsafe {
            let is_heavy = heavy < t.weighed.heavy && *t.heavy_rows.add(heavy) as usize == row;
            heavy += usize::from(is_heavy);
            for v in 0..NR {
                if !is_heavy || row >= ends[v] {
                    S::store(t.scores.add((row + 1) * width + v * SIDE), S::splat(0.0));
                }
            }
        }
    }
    heavy
}

/// Adds key rows `from..until`, whole tiles, to the sums of the vectors from `first` on; with `lost` what rounding took from their weights.
#[inline(always)]
unsafe fn add_keys<U: TileUnit, S: Simd, const NR: usize, const EXACT: bool>(
    t: &TileStep,
    from: usize,
    until: usize,
    first: usize,
    lost: bool,
) {
    let width = NR * SIDE;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        for column in (0..t.dim_v).step_by(2 * SIDE) {
            let product = Product {
                sums: t.output.add(column * width + first * SIDE),
                sum_stride: bytes(width),
                left: t.values.add(from / 2 * t.value_stride + column * SIDE),
                left_stride: bytes(SIDE),
                left_step: bytes(SIDE * t.value_stride),
                right: t.scores.add((from + usize::from(lost)) * width + first * SIDE),
                right_stride: bytes(2 * width),
                right_step: bytes(KEYS * width),
                depth: (until - from) / KEYS,
            };
            let rows = (t.dim_v - column).div_ceil(SIDE).min(2);
            if EXACT {
                add_seen_keys::<U, S, NR>(t, &product, from, first, rows, lost);
            } else {
                product.run::<U, false>(rows, NR - first);
            }
        }
    }
}

/// [`add_keys`] of one or two tiles of value columns that may hold what is not finite.
#[inline(always)]
unsafe fn add_seen_keys<U: TileUnit, S: Simd, const NR: usize>(
    t: &TileStep,
    product: &Product,
    from: usize,
    first: usize,
    rows: usize,
    lost: bool,
) {
    let width = NR * SIDE;
    for depth in 0..product.depth {
        // SAFETY: in bounds by the contract of `values`.
        unsafe {
            let left = product.left.byte_add(depth * product.left_step);
            let mut finite = Sums([0.0; 4 * SIDE * SIDE]);
            for at in 0..rows * SIDE * SIDE {
                finite.0[at] = finite_part::<S>(*left.add(at));
            }
            let right = product.right.byte_add(depth * product.right_step);
            let part = Product { left: finite.0.as_ptr(), right, depth: 1, ..*product };
            part.run::<U, false>(rows, NR - first);
            if lost {
                continue;
            }
            for at in 0..rows * SIDE * SIDE {
                let x = *left.add(at);
                let row = from + depth * KEYS + at % SIDE * 2;
                if finite.0[at].to_bits() == x.to_bits() || row >= t.key_end {
                    continue;
                }
                for v in first..NR {
                    let sum = product.sums.add(at / SIDE * width + (v - first) * SIDE);
                    let p = S::load(t.scores.add(row * width + v * SIDE));
                    S::store(sum, add_infinite::<S>(t, x, p, row, v * SIDE, width, S::load(sum)));
                }
            }
        }
    }
}

/// Rows of values become tiles of value columns by pairs of keys, `[tile of keys][value column][pair]`, zero behind the last key; a tile of keys takes what as
/// many packed pairs of rows would. Says whether all are finite, when `checked`.
///
/// # Safety
/// As `Kernels::pack_values`; the first row is the first of a tile of keys.
#[inline(always)]
unsafe fn turn_values<S: Simd, E: Element>(checked: bool, a: &Rows) -> bool {
    let mut pairs = [0.0f32; SIDE * SIDE];
    // SAFETY: by contract.
    unsafe {
        let mut taint = S::splat(0.0);
        for first in (0..a.rows).step_by(KEYS) {
            let dst = a.dst.add(first / 2 * a.dst_stride);
            for column in (0..a.columns).step_by(SIDE) {
                for pair in 0..SIDE {
                    let loaded = load_pair::<S, E>(a, first + 2 * pair, column, checked, &mut taint);
                    S::store(pairs.as_mut_ptr().add(pair * SIDE), loaded);
                }
                S::transpose(pairs.as_ptr(), SIDE, dst.add(column * SIDE), SIDE);
            }
        }
        is_zero::<S>(taint)
    }
}
