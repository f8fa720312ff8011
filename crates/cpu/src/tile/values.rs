//! PV, and a second PV of the rounding residuals of weights.

use super::{Gemm, TileStep, ends_in_tails, packed_ends};
use crate::simd::Simd;

/// How many floats ahead of its columns the value kernel fetches: one cache line.
const VALUES_AHEAD: usize = 16;

/// `Oᵀ = Oᵀ·rescale + Vᵀ·P`, `MR` value columns at a time, the last ones `TAIL` at a time where that wastes less.
///
/// With `EXACT`, weights of keys a query does not see are not even multiplied, and what rounding took from weights in pairs only with
/// finite values: needed only where V holds NaN or infinity, because 0·NaN and 0·∞ are NaN.
///
/// # Safety
/// As [`softmax`], which ran before on the same `t`.
#[inline(always)]
pub(crate) unsafe fn values<
    S: Gemm,
    const MR: usize,
    const TAIL: usize,
    const NR: usize,
    const EXACT: bool,
>(
    t: &TileStep,
) {
    let mut column = 0;
    while column < t.dim_v {
        // SAFETY: in bounds by this function's contract.
        unsafe {
            if ends_in_tails::<MR, TAIL>(t.dim_v - column) {
                value_columns::<S, TAIL, NR, EXACT>(t, column);
                column += TAIL;
            } else {
                value_columns::<S, MR, NR, EXACT>(t, column);
                column += MR;
            }
        }
    }
}

/// `MR` value columns from `column` on.
#[inline(always)]
unsafe fn value_columns<S: Gemm, const MR: usize, const NR: usize, const EXACT: bool>(
    t: &TileStep,
    column: usize,
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let out = t.output.add(column * width);
        let mut acc = [[S::splat(0.0); NR]; MR];
        for v in 0..NR {
            let rescale = S::load(t.rescale.add(v * S::LANES));
            for r in 0..MR {
                let factor = S::for_sums(rescale, r);
                acc[r][v] = S::mul(S::load(out.add(r * width + v * S::LANES)), factor);
            }
        }
        let (mut end, mut heavy) = (packed_ends::<S>(t), 0);
        if S::DEPTH > S::PACKED {
            end = end.map(|end| end.next_multiple_of(S::DEPTH));
        }
        add_rows::<S, MR, NR, 0, EXACT>(t, column, t.key_begin, end[0], &mut heavy, &mut acc);
        if NR > 1 {
            add_rows::<S, MR, NR, 1, EXACT>(t, column, end[0], end[1], &mut heavy, &mut acc);
        }
        if NR > 2 {
            add_rows::<S, MR, NR, 2, EXACT>(t, column, end[1], end[2], &mut heavy, &mut acc);
        }
        for r in 0..MR {
            for v in 0..NR {
                S::store(out.add(r * width + v * S::LANES), acc[r][v]);
            }
        }
    }
}

/// Adds key rows `begin..end`, weighted, for `MR` value columns and the tile's vectors from `FIRST` on, and then what rounding took from the heavy ones
/// among them, which begin at `heavy` in their list.
#[inline(always)]
unsafe fn add_rows<S: Gemm, const MR: usize, const NR: usize, const FIRST: usize, const EXACT: bool>(
    t: &TileStep,
    column: usize,
    begin: usize,
    end: usize,
    heavy: &mut usize,
    acc: &mut [[S::V; NR]; MR],
) {
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let live = t.weighed.live;
        let (first, last) = if S::PACKED == 1 { (begin, end) } else { (begin.max(live.0), end.min(live.1)) };
        let mut row = first;
        while row < last {
            S::add_keys::<MR, NR, FIRST, EXACT, false>(t, column, row, acc);
            row += S::DEPTH;
        }
        while S::PACKED == 2 && *heavy < t.weighed.heavy {
            let row = *t.heavy_rows.add(*heavy) as usize;
            if row >= end {
                break;
            }
            *heavy += 1;
            S::add_keys::<MR, NR, FIRST, EXACT, true>(t, column, row, acc);
        }
    }
}

/// [`Gemm::add_keys`] of one key row or pair of rows, an element or pair of its values at a time.
///
/// # Safety
/// As [`values`].
#[inline(always)]
pub(crate) unsafe fn add_by_rows<
    S: Simd,
    const MR: usize,
    const NR: usize,
    const FIRST: usize,
    const EXACT: bool,
    const LOST: bool,
>(
    t: &TileStep,
    column: usize,
    row: usize,
    acc: &mut [[S::V; NR]; MR],
) {
    // SAFETY: by contract.
    unsafe {
        if EXACT {
            add_seen_row::<S, MR, NR, FIRST, LOST>(t, column, row, acc);
        } else {
            add_row::<S, MR, NR, FIRST, LOST>(t, column, row, acc);
        }
    }
}

/// Adds one key row, or pair of rows, where no value is NaN or infinite, or every query sees every key. With `LOST`, what rounding took from its weights.
#[inline(always)]
unsafe fn add_row<S: Simd, const MR: usize, const NR: usize, const FIRST: usize, const LOST: bool>(
    t: &TileStep,
    column: usize,
    row: usize,
    acc: &mut [[S::V; NR]; MR],
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let weight = t.scores.add((row + usize::from(LOST)) * width);
        let value = t.values.add(row / S::PACKED * t.value_stride + column);
        // The next columns of this row: K and V of a block together are larger than the first-level cache.
        S::prefetch_near(value.wrapping_add(VALUES_AHEAD).cast());
        let mut p = [S::splat(0.0); NR];
        for v in FIRST..NR {
            p[v] = S::load(weight.add(v * S::LANES));
        }
        for r in 0..MR {
            let x = S::splat(*value.add(r));
            for v in FIRST..NR {
                acc[r][v] = S::dot(x, p[v], acc[r][v]);
            }
        }
    }
}

/// [`add_row`] that leaves out what a query does not see. What is not finite is added apart, and zero is multiplied in its place, as the weight of zero of
/// a hidden key is with any finite value: so the sums of those who do not see it are, bit for bit, those of [`add_row`], in whatever order an
/// instruction adds.
#[inline(always)]
unsafe fn add_seen_row<S: Simd, const MR: usize, const NR: usize, const FIRST: usize, const LOST: bool>(
    t: &TileStep,
    column: usize,
    row: usize,
    acc: &mut [[S::V; NR]; MR],
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let weight = t.scores.add((row + usize::from(LOST)) * width);
        let value = t.values.add(row / S::PACKED * t.value_stride + column);
        for r in 0..MR {
            let x = *value.add(r);
            let finite = finite_part::<S>(x);
            for v in FIRST..NR {
                let p = S::load(weight.add(v * S::LANES));
                acc[r][v] = S::dot(S::splat(finite), p, acc[r][v]);
                if !LOST && finite.to_bits() != x.to_bits() {
                    acc[r][v] = add_infinite::<S>(t, x, p, row, v * S::LANES, width, acc[r][v]);
                }
            }
        }
    }
}

/// Adds to the lanes that see them the products of one lane of values that are not finite.
///
/// # Safety
/// As [`values`]; `p` are the weights of `row`, or of the pair that begins there, from `lane` of a tile of this width on.
#[inline(always)]
pub(crate) unsafe fn add_infinite<S: Simd>(
    t: &TileStep,
    value: f32,
    p: S::V,
    row: usize,
    lane: usize,
    width: usize,
    mut sum: S::V,
) -> S::V {
    for part in 0..S::PACKED {
        // SAFETY: by contract; the row behind the last has a place among what is hidden.
        unsafe {
            let mut x = value;
            let mut weight = p;
            if S::PACKED == 2 {
                x = f32::from_bits(value.to_bits() >> (16 * part) << 16);
                weight = S::part_bf16(p, part);
            }
            if !x.is_finite() {
                let hidden = S::load(t.hidden.add((row + part) * width + lane));
                let next = S::fma(S::splat(x), weight, sum);
                sum = S::select_between(hidden, 0.0, 0.0, next, sum);
            }
        }
    }
    sum
}

/// A lane of values with zeros for what is not finite.
#[inline(always)]
pub(crate) fn finite_part<S: Simd>(value: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80;
    if S::PACKED == 1 {
        return if value.is_finite() { value } else { 0.0 };
    }
    let keep = |half: u32| if half & EXPONENT == EXPONENT { 0 } else { half };
    let bits = value.to_bits();
    f32::from_bits(keep(bits >> 16) << 16 | keep(bits & 0xffff))
}
