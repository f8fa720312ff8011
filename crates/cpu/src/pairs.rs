//! Packing rows into pairs of bfloat16 and back, for every instruction set that multiplies pairs ([`Simd::PACKED`] is 2).

use crate::element::Element;
use crate::pack::Rows;
use crate::simd::{MAX_LANES, Simd};

/// Rows of bfloat16 are rows of pairs; they are filled with zeros up to a whole vector.
///
/// # Safety
/// As `Kernels::pack_rows`.
pub(crate) unsafe fn copy_rows<S: Simd>(a: &Rows) {
    let filled = a.columns.next_multiple_of(2 * S::LANES);
    for row in 0..a.rows {
        // SAFETY: a source row has `columns` elements; as many f32 rounded up to a vector hold `filled` of half the size.
        unsafe {
            let src = a.src.cast::<u16>().add(row * a.src_stride);
            let dst = a.dst.add(row * a.dst_stride).cast::<u16>();
            src.copy_to_nonoverlapping(dst, a.columns);
            dst.add(a.columns).write_bytes(0, filled - a.columns);
        }
    }
}

/// Rows of neighbouring keys become rows of pairs. Says whether all are finite, when `checked`.
///
/// # Safety
/// As `Kernels::pack_values`.
#[inline(always)]
pub(crate) unsafe fn pair_rows<S: Simd, E: Element>(checked: bool, a: &Rows) -> bool {
    // SAFETY: by contract.
    unsafe {
        let mut taint = S::splat(0.0);
        for first in (0..a.rows).step_by(2) {
            let dst = a.dst.add(first / 2 * a.dst_stride);
            for column in (0..a.columns).step_by(S::LANES) {
                S::store(dst.add(column), load_pair::<S, E>(a, first, column, checked, &mut taint));
            }
        }
        is_zero::<S>(taint)
    }
}

/// A vector of columns of two neighbouring rows, the first of them in the low halves; zeros behind the last row and column. When `checked`, `taint` is
/// NaN after it where one was not finite.
///
/// # Safety
/// As [`pair_rows`].
#[inline(always)]
pub(crate) unsafe fn load_pair<S: Simd, E: Element>(
    a: &Rows,
    first: usize,
    column: usize,
    checked: bool,
    taint: &mut S::V,
) -> S::V {
    let tensor = a.src.cast::<E>();
    // SAFETY: by contract.
    unsafe {
        let zero = S::splat(0.0);
        let (mut even, mut odd) = (zero, zero);
        if first < a.rows {
            even = load_row::<S, E>(tensor.add(first * a.src_stride), column, a.columns);
        }
        if first + 1 < a.rows {
            odd = load_row::<S, E>(tensor.add((first + 1) * a.src_stride), column, a.columns);
        }
        if checked {
            // 0·x is NaN exactly when x is not finite.
            *taint = S::fma(odd, zero, S::fma(even, zero, *taint));
        }
        S::round_pair(even, odd)
    }
}

/// Whether all lanes are zero, and not NaN.
///
/// # Safety
/// The instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn is_zero<S: Simd>(taint: S::V) -> bool {
    let mut lanes = [0.0f32; MAX_LANES];
    // SAFETY: by contract; there is room for the widest vector.
    unsafe { S::store(lanes.as_mut_ptr(), taint) };
    lanes.iter().all(|x| *x == 0.0)
}

/// A vector of a row from `column` on, zero beyond its `columns`.
///
/// # Safety
/// The instruction set of `S`; the row has `columns` elements.
#[inline(always)]
pub(crate) unsafe fn load_row<S: Simd, E: Element>(row: *const E, column: usize, columns: usize) -> S::V {
    let left = columns.saturating_sub(column);
    // SAFETY: by contract.
    unsafe {
        if left >= S::LANES {
            E::load::<S>(row.add(column))
        } else if left > 0 {
            E::load_first::<S>(row.add(column), left)
        } else {
            S::splat(0.0)
        }
    }
}

/// `pack::transpose_queries` of pairs, which are only moved: the scale is left for the scores.
///
/// # Safety
/// As `pack::transpose_queries`.
#[inline(always)]
pub(crate) unsafe fn transpose_pairs<S: Simd>(
    rows: *const f32,
    row_stride: usize,
    columns: usize,
    tile: *mut f32,
    tile_stride: usize,
) {
    for column in (0..columns.div_ceil(2)).step_by(S::LANES) {
        // SAFETY: by contract.
        unsafe { S::transpose(rows.add(column), row_stride, tile.add(column * tile_stride), tile_stride) };
    }
}

/// Those functions of `Kernels` that multiply pairs in register tiles of 8×3, and the packing of queries for them by `$transpose`.
macro_rules! pair_tiles {
    ($transpose:path, #[$feature:meta]) => {
        #[$feature]
        unsafe fn scores(vectors: usize, t: &TileStep) {
            // SAFETY: trait contract.
            unsafe {
                match vectors {
                    1 => tile::scores::<Self, 8, 8, 1>(t),
                    2 => tile::scores::<Self, 8, 8, 2>(t),
                    _ => tile::scores::<Self, 8, 8, 3>(t),
                }
            }
        }
        #[$feature]
        unsafe fn softmax(vectors: usize, t: &TileStep) -> Weighed {
            // SAFETY: trait contract.
            unsafe {
                match vectors {
                    1 => tile::softmax::<Self, 1>(t),
                    2 => tile::softmax::<Self, 2>(t),
                    _ => tile::softmax::<Self, 3>(t),
                }
            }
        }
        #[$feature]
        unsafe fn values(vectors: usize, exact: bool, t: &TileStep) {
            // SAFETY: trait contract.
            unsafe {
                match (vectors, exact) {
                    (1, false) => tile::values::<Self, 8, 8, 1, false>(t),
                    (2, false) => tile::values::<Self, 8, 8, 2, false>(t),
                    (_, false) => tile::values::<Self, 8, 8, 3, false>(t),
                    (1, true) => tile::values::<Self, 8, 8, 1, true>(t),
                    (2, true) => tile::values::<Self, 8, 8, 2, true>(t),
                    (_, true) => tile::values::<Self, 8, 8, 3, true>(t),
                }
            }
        }

        /// Pairs are only moved: the scale is left for the scores.
        #[$feature]
        unsafe fn transpose_queries(
            rows: *const f32,
            row_stride: usize,
            columns: usize,
            _scale: f32,
            tile: *mut f32,
            tile_stride: usize,
        ) {
            // SAFETY: trait contract.
            unsafe { $transpose(rows, row_stride, columns, tile, tile_stride) }
        }
    };
}
pub(crate) use pair_tiles;
