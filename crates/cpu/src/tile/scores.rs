//! QKᵀ, with bias, ALiBi or mask added on the way, the band mask at the edges and the running maximum.

use super::{Gemm, Start, TileStep, ends_in_tails};
use crate::dense::of_words;
use crate::simd::Simd;

/// Columns of QKᵀ between two looks at the loop's counters; divides a vector.
const COLUMNS_AT_ONCE: usize = 4;

/// `Sᵀ = K·Qᵀ` for the block's key rows, masked at the edges, with the running maximum updated.
///
/// # Safety
/// The instruction set of `S`; `t` describes valid buffers for tiles of `NR` vectors.
#[inline(always)]
pub(crate) unsafe fn scores<S: Gemm, const MR: usize, const TAIL: usize, const NR: usize>(t: &TileStep) {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let mut maximum = [S::splat(0.0); NR];
        for v in 0..NR {
            maximum[v] = S::load(t.old_max.add(v * S::LANES));
        }
        let mut row = t.key_begin;
        while row < t.key_end {
            if ends_in_tails::<MR, TAIL>(t.key_end - row) {
                score_step::<S, TAIL, NR>(t, row, &mut maximum);
                row += TAIL;
            } else {
                score_step::<S, MR, NR>(t, row, &mut maximum);
                row += MR;
            }
        }
        for v in 0..NR {
            S::store(t.new_max.add(v * S::LANES), maximum[v]);
        }
    }
}

/// `MR` key rows from `row` on, against the vectors that see any of them.
#[inline(always)]
unsafe fn score_step<S: Gemm, const MR: usize, const NR: usize>(
    t: &TileStep,
    row: usize,
    maximum: &mut [S::V; NR],
) {
    // SAFETY: in bounds by the contract of `scores`.
    unsafe {
        for ahead in &t.ahead {
            ahead.prefetch::<S>(row, MR);
        }
        // The first vector that still sees one of these keys.
        if row < t.vector_end[0] {
            score_rows::<S, MR, NR, 0>(t, row, maximum);
        } else if row < t.vector_end[1] {
            score_rows::<S, MR, NR, 1>(t, row, maximum);
        } else {
            score_rows::<S, MR, NR, 2>(t, row, maximum);
        }
    }
}

/// [`Gemm::key_products`], an element or pair of a row of keys at a time.
///
/// # Safety
/// As [`scores`].
#[inline(always)]
pub(crate) unsafe fn products_by_rows<S: Simd, const MR: usize, const NR: usize, const FIRST: usize>(
    t: &TileStep,
    row: usize,
) -> [[S::V; NR]; MR] {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `scores`.
    unsafe {
        let mut acc = [[S::splat(0.0); NR]; MR];
        let mut query = t.queries;
        // A pointer for every third row: an address can hold once or twice the stride, so that rows cost no arithmetic.
        let mut key = [t.keys.add(row * t.key_stride); MR];
        for r in 0..MR {
            key[r] = t.keys.add((row + r / 3 * 3) * t.key_stride);
        }
        // Packed queries and keys are zero up to whole vectors: the last columns need no loop of their own.
        for _ in 0..t.dim_qk.div_ceil(COLUMNS_AT_ONCE) {
            for c in 0..COLUMNS_AT_ONCE {
                let mut q = [S::splat(0.0); NR];
                for v in FIRST..NR {
                    q[v] = S::load(query.add(c * width + v * S::LANES));
                }
                for r in 0..MR {
                    let k = S::splat(*key[r].add(r % 3 * t.key_stride + c));
                    for v in FIRST..NR {
                        acc[r][v] = S::dot(k, q[v], acc[r][v]);
                    }
                }
            }
            query = query.add(COLUMNS_AT_ONCE * width);
            for r in (0..MR).step_by(3) {
                key[r] = key[r].add(COLUMNS_AT_ONCE);
            }
            for r in 0..MR {
                key[r] = key[r / 3 * 3];
            }
        }
        acc
    }
}

/// `MR` key rows against the tile's vectors from `FIRST` on.
#[inline(always)]
unsafe fn score_rows<S: Gemm, const MR: usize, const NR: usize, const FIRST: usize>(
    t: &TileStep,
    row: usize,
    maximum: &mut [S::V; NR],
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `scores`.
    unsafe {
        let mut acc = S::key_products::<MR, NR, FIRST>(t, row);
        let out = t.scores.add(row * width);
        if S::PACKED == 2 {
            let scale = S::splat(t.score_scale);
            for r in 0..MR {
                for v in FIRST..NR {
                    acc[r][v] = S::mul(acc[r][v], scale);
                }
            }
        }
        if t.start == Start::Added {
            for r in 0..MR {
                for v in FIRST..NR {
                    acc[r][v] = S::add(acc[r][v], S::load(out.add(r * width + v * S::LANES)));
                }
            }
        }
        if t.start == Start::Words {
            for r in 0..MR {
                for v in FIRST..NR {
                    // Steps are of even numbers of rows: both of a pair are in this one.
                    let words = S::load(out.add(r / 2 * 2 * width + v * S::LANES));
                    acc[r][v] = S::add(acc[r][v], of_words::<S>(words, r));
                }
            }
        }
        if !t.shown.is_null() {
            for r in 0..MR {
                for v in FIRST..NR {
                    acc[r][v] = t.hide::<S, NR>(row + r, v, acc[r][v]);
                }
            }
        }
        for r in 0..MR {
            for v in FIRST..NR {
                S::store(out.add(r * width + v * S::LANES), acc[r][v]);
            }
        }
        if row >= t.mask.clear_begin && row + MR <= t.mask.clear_end.min(t.key_end) {
            for r in 0..MR {
                for v in FIRST..NR {
                    // NaN is left out here and comes back through the exponential.
                    maximum[v] = S::max(acc[r][v], maximum[v]);
                }
            }
        } else {
            // From memory again: accumulators indexed in a loop would not stay in registers on the path above.
            for r in row..(row + MR).min(t.key_end) {
                let (lo, hi) = t.mask.bounds(r);
                for v in FIRST..NR {
                    let p = t.scores.add(r * width + v * S::LANES);
                    let index = S::load(t.mask.lane_query.add(v * S::LANES));
                    let hidden = S::splat(f32::NEG_INFINITY);
                    let score = S::select_between(index, lo, hi, S::load(p), hidden);
                    S::store(p, score);
                    maximum[v] = S::max(score, maximum[v]);
                }
            }
        }
    }
}
