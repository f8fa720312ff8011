//! Moving rows between tensors and the f32 tiles kernels work on.
//!
//! Tiles are bounded by the tile sizes, never by the sequence: this is where f16 and bf16 become f32, where ragged
//! head dimensions are padded with zeros, and where arbitrary strides end.

use crate::element::{Element, Rounded};
use crate::simd::{MAX_LANES, Simd};

/// Floats from one row of a packed tile to the next: whole cache lines, an odd number of them, so that
/// the rows of a tile spread over all cache sets whatever the head dimension.
pub(crate) fn packed_stride(columns: usize) -> usize {
    const LINE: usize = 16;
    let lines = columns.div_ceil(LINE);
    (lines + (lines + 1) % 2) * LINE
}

/// Rows of a tensor to be widened into a tile.
pub(crate) struct Rows {
    /// The tensor's type says which [`Element`] these are.
    pub(crate) src: *const u8,
    /// Elements from row to row of the tensor.
    pub(crate) src_stride: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) dst: *mut f32,
    pub(crate) dst_stride: usize,
}

/// Widens rows to f32, zero-filling each up to a whole vector. With `CHECK`, says whether all were finite.
///
/// # Safety
/// The instruction set of `S`; every source row valid for `columns` elements, every destination row for
/// `columns` rounded up to whole vectors.
#[inline(always)]
pub(crate) unsafe fn widen_rows<S: Simd, E: Element, const CHECK: bool>(a: &Rows) -> bool {
    let tensor = a.src.cast::<E>();
    let whole = a.columns / S::LANES * S::LANES;
    let tail = a.columns - whole;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let zero = S::splat(0.0);
        let mut taint = [zero; 2];
        for row in 0..a.rows {
            let (src, dst) = (tensor.add(row * a.src_stride), a.dst.add(row * a.dst_stride));
            let mut column = 0;
            while column < whole {
                let x = E::load::<S>(src.add(column));
                S::store(dst.add(column), x);
                if CHECK {
                    // 0·x is NaN exactly when x is not finite.
                    taint[row % 2] = S::fma(x, zero, taint[row % 2]);
                }
                column += S::LANES;
            }
            if tail > 0 {
                let x = E::load_first::<S>(src.add(whole), tail);
                S::store(dst.add(whole), x);
                if CHECK {
                    taint[row % 2] = S::fma(x, zero, taint[row % 2]);
                }
            }
        }
        let mut lanes = [0.0f32; MAX_LANES];
        S::store(lanes.as_mut_ptr(), S::add(taint[0], taint[1]));
        lanes.iter().all(|x| *x == 0.0)
    }
}

/// Multiplies each of `rows` widened rows with its scale. Says whether all are finite.
///
/// # Safety
/// The instruction set of `S`; rows valid for `columns` rounded up to whole vectors, `scales` for `rows`.
#[inline(always)]
pub(crate) unsafe fn scale_rows<S: Simd>(
    data: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
    scales: *const f32,
) -> bool {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let zero = S::splat(0.0);
        let mut taint = zero;
        for row in 0..rows {
            let scale = S::splat(*scales.add(row));
            for column in (0..columns).step_by(S::LANES) {
                let p = data.add(row * stride + column);
                let x = S::mul(S::load(p), scale);
                S::store(p, x);
                taint = S::fma(x, zero, taint);
            }
        }
        let mut lanes = [0.0f32; MAX_LANES];
        S::store(lanes.as_mut_ptr(), taint);
        lanes.iter().all(|x| *x == 0.0)
    }
}

/// Transposes `LANES` query rows of f32 (from [`widen_rows`]) into one vector column of a query tile and scales them.
///
/// `rows` is `[LANES][row_stride]`, `tile` is `[columns][tile_stride]`; columns beyond the head dimension are
/// written too (as what `rows` holds there), up to whole vectors.
///
/// # Safety
/// The instruction set of `S`; both valid for `columns` rounded up to whole vectors.
#[inline(always)]
pub(crate) unsafe fn transpose_queries<S: Simd>(
    rows: *const f32,
    row_stride: usize,
    columns: usize,
    scale: f32,
    tile: *mut f32,
    tile_stride: usize,
) {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let factor = S::splat(scale);
        let mut column = 0;
        while column < columns {
            let dst = tile.add(column * tile_stride);
            S::transpose(rows.add(column), row_stride, dst, tile_stride);
            for c in 0..S::LANES {
                let p = dst.add(c * tile_stride);
                S::store(p, S::mul(S::load(p), factor));
            }
            column += S::LANES;
        }
    }
}

/// Transposes one vector column of an output tile back into `LANES` rows, each lane multiplied by its factor.
///
/// `tile` is `[columns][tile_stride]`, `rows` is `[LANES][row_stride]`.
///
/// # Safety
/// The instruction set of `S`; both valid for `columns` rounded up to whole vectors; `factors` for one vector.
#[inline(always)]
pub(crate) unsafe fn transpose_outputs<S: Simd>(
    tile: *mut f32,
    tile_stride: usize,
    columns: usize,
    factors: *const f32,
    rows: *mut f32,
    row_stride: usize,
) {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let factor = S::load(factors);
        let mut column = 0;
        while column < columns {
            let src = tile.add(column * tile_stride);
            for c in 0..S::LANES {
                let p = src.add(c * tile_stride);
                S::store(p, S::mul(S::load(p), factor));
            }
            S::transpose(src, tile_stride, rows.add(column), row_stride);
            column += S::LANES;
        }
    }
}

/// Rounds one f32 row into a tensor row.
///
/// # Safety
/// The instruction set of `S`; `src` valid for `columns` rounded up to whole vectors, `dst` for `columns`.
#[inline(always)]
pub(crate) unsafe fn narrow_row<S: Simd, E: Rounded>(src: *const f32, dst: *mut E, columns: usize) {
    let whole = columns / S::LANES * S::LANES;
    let mut column = 0;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        while column < whole {
            E::store::<S>(dst.add(column), S::load(src.add(column)));
            column += S::LANES;
        }
        if column < columns {
            E::store_first::<S>(dst.add(column), columns - column, S::load(src.add(column)));
        }
    }
}
