//! Inner kernels for few queries: one row of scores at a time, vectors along the head dimension.
//!
//! With one or a handful of queries the time is that of reading K and V once, so the kernels read them straight
//! from the tensors, widening in registers, and serve `RB` query heads that share a key/value head in one pass.

use crate::element::Element;
use crate::simd::{MAX_LANES, Simd};

/// Keys a decode step handles at once: scores of this many keys live on the stack-sized scratch.
pub(crate) const DECODE_BLOCK: usize = 128;

/// Most value columns one pass keeps in accumulators, in vectors.
const COLUMN_VECTORS: usize = 8;

/// Where rows of K or V lie.
#[derive(Clone, Copy)]
pub(crate) struct KeyRows {
    pub(crate) first: *const u8,
    /// Bytes from row to row, where there is no list.
    pub(crate) stride: usize,
    /// The address of each row; null where they lie one behind the other.
    pub(crate) list: *const *const u8,
}

impl KeyRows {
    /// # Safety
    /// There is a row `index`.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, index: usize) -> *const u8 {
        // SAFETY: by contract.
        unsafe {
            if self.list.is_null() { self.first.add(index * self.stride) } else { *self.list.add(index) }
        }
    }
}

/// How far ahead of what is computed with rows are fetched, into the first-level cache: more than memory delivers to a thread in its latency, and a small part of that cache.
const AHEAD_BYTES: usize = 8192;

/// The order in which rows are read, so that they are fetched while others are computed with. No hardware fetches along a list, nor across 4 KB pages in time.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) rows: KeyRows,
    pub(crate) count: usize,
    pub(crate) row_bytes: usize,
    /// What is read when these rows are done.
    pub(crate) then: KeyRows,
    pub(crate) then_count: usize,
    pub(crate) then_bytes: usize,
}

impl Ahead {
    /// Fetches what is wanted [`AHEAD_BYTES`] after each of `count` rows from `first` on.
    ///
    /// # Safety
    /// The instruction set of `S`; lists, if there are any, have as many entries as rows are counted.
    #[inline(always)]
    pub(crate) unsafe fn fetch<S: Simd>(&self, first: usize, count: usize) {
        let first = first + AHEAD_BYTES / self.row_bytes.max(1);
        for index in first..first + count {
            // SAFETY: by contract; a prefetch reads nothing.
            unsafe {
                if index < self.count {
                    fetch_row::<S>(self.rows.row(index), self.row_bytes);
                } else if index - self.count < self.then_count {
                    fetch_row::<S>(self.then.row(index - self.count), self.then_bytes);
                }
            }
        }
    }
}

/// # Safety
/// The instruction set of `S`.
#[inline(always)]
unsafe fn fetch_row<S: Simd>(row: *const u8, bytes: usize) {
    for byte in (0..bytes).step_by(64) {
        // SAFETY: by contract; a prefetch reads nothing.
        unsafe { S::prefetch_near(row.wrapping_add(byte)) };
    }
}

/// `RB` query rows against `keys` rows of K.
pub(crate) struct DecodeScores {
    /// Scaled f32 queries, `[RB][query_stride]`, zero beyond `dim`.
    pub(crate) queries: *const f32,
    pub(crate) query_stride: usize,
    pub(crate) dim: usize,
    pub(crate) key: KeyRows,
    pub(crate) keys: usize,
    /// `[RB][DECODE_BLOCK]`.
    pub(crate) scores: *mut f32,
    /// What scores of pairs are multiplied with.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "pairs are x86-64's"))]
    pub(crate) scale: f32,
    pub(crate) ahead: Ahead,
}

/// Dot products of every query row with every key; scores past `keys` up to a whole vector become -inf.
///
/// # Safety
/// The instruction set of `S`; all of `a` valid; `keys <= DECODE_BLOCK`.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd, E: Element, const RB: usize>(a: &DecodeScores) {
    let whole = a.dim / S::LANES * S::LANES;
    let tail = a.dim - whole;
    // Partial sums of LANES keys, one vector per key, for each query row; then transposed and added up.
    let mut partial = [[0.0f32; MAX_LANES * MAX_LANES]; RB];
    let mut turned = [0.0f32; MAX_LANES * MAX_LANES];
    let mut base = 0;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        while base < a.keys {
            let count = (a.keys - base).min(S::LANES);
            for j in 0..count {
                a.ahead.fetch::<S>(base + j, 1);
                let key = a.key.row(base + j).cast::<E>();
                let mut acc = [S::splat(0.0); RB];
                let mut column = 0;
                while column < whole {
                    let k = E::load::<S>(key.add(column));
                    for r in 0..RB {
                        acc[r] = S::fma(k, S::load(a.queries.add(r * a.query_stride + column)), acc[r]);
                    }
                    column += S::LANES;
                }
                if tail > 0 {
                    let k = E::load_first::<S>(key.add(column), tail);
                    for r in 0..RB {
                        acc[r] = S::fma(k, S::load(a.queries.add(r * a.query_stride + column)), acc[r]);
                    }
                }
                for r in 0..RB {
                    S::store(partial[r].as_mut_ptr().add(j * S::LANES), acc[r]);
                }
            }
            for r in 0..RB {
                S::transpose(partial[r].as_ptr(), S::LANES, turned.as_mut_ptr(), S::LANES);
                let mut sum = S::splat(0.0);
                for lane in 0..S::LANES {
                    sum = S::add(sum, S::load(turned.as_ptr().add(lane * S::LANES)));
                }
                let out = a.scores.add(r * DECODE_BLOCK + base);
                S::store(out, sum);
                for j in count..S::LANES {
                    *out.add(j) = f32::NEG_INFINITY;
                }
            }
            base += S::LANES;
        }
    }
}

/// Turns one row of scores into weights in place. Returns `(new maximum, sum of weights, rescale factor)`.
///
/// # Safety
/// The instruction set of `S`; `scores` valid for `keys` rounded up to whole vectors, -inf past `keys`.
#[inline(always)]
pub(crate) unsafe fn softmax_row<S: Simd>(scores: *mut f32, keys: usize, old_max: f32) -> (f32, f32, f32) {
    let mut lanes = [0.0f32; MAX_LANES];
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let mut maximum = S::splat(old_max);
        let mut at = 0;
        while at < keys {
            maximum = S::max(S::load(scores.add(at)), maximum);
            at += S::LANES;
        }
        S::store(lanes.as_mut_ptr(), maximum);
        let new_max = halve::<S>(&mut lanes, f32::max).max(old_max);
        let shift = new_max.max(f32::MIN);
        let mut sum = S::splat(0.0);
        at = 0;
        while at < keys {
            let weight = S::exp2(S::sub(S::load(scores.add(at)), S::splat(shift)));
            S::store(scores.add(at), weight);
            sum = S::add(sum, weight);
            at += S::LANES;
        }
        S::store(lanes.as_mut_ptr(), sum);
        let total = halve::<S>(&mut lanes, |a, b| a + b);
        S::store(lanes.as_mut_ptr(), S::exp2(S::splat(old_max - shift)));
        (new_max, total, lanes[0])
    }
}

/// A vector's lanes made one, half of them with the other half at a time: a chain of all of them would be waited for.
#[inline(always)]
fn halve<S: Simd>(lanes: &mut [f32; MAX_LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut left = S::LANES;
    while left > 1 {
        left /= 2;
        for i in 0..left {
            lanes[i] = join(lanes[i], lanes[i + left]);
        }
    }
    lanes[0]
}

/// `RB` rows of weights against `keys` rows of V.
pub(crate) struct DecodeValues {
    /// `[RB][DECODE_BLOCK]`.
    pub(crate) weights: *const f32,
    pub(crate) rescale: *const f32,
    pub(crate) value: KeyRows,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    /// `[RB][output_stride]`, f32 accumulators.
    pub(crate) output: *mut f32,
    pub(crate) output_stride: usize,
    pub(crate) ahead: Ahead,
}

/// `O = O·rescale + P·V` for `RB` rows.
///
/// # Safety
/// The instruction set of `S`; all of `a` valid, output rows up to whole vectors.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd, E: Element, const RB: usize>(a: &DecodeValues) {
    let vectors = a.dim / S::LANES;
    let mut first = 0;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        while RB <= 2 && first + COLUMN_VECTORS <= vectors {
            value_columns::<S, E, RB, COLUMN_VECTORS>(a, first * S::LANES);
            first += COLUMN_VECTORS;
        }
        while first + 4 <= vectors {
            value_columns::<S, E, RB, 4>(a, first * S::LANES);
            first += 4;
        }
        while first < vectors {
            value_columns::<S, E, RB, 1>(a, first * S::LANES);
            first += 1;
        }
        let done = vectors * S::LANES;
        if done < a.dim {
            value_tail::<S, E, RB>(a, done);
        }
    }
}

/// `C` whole vectors of value columns starting at `column`.
#[inline(always)]
unsafe fn value_columns<S: Simd, E: Element, const RB: usize, const C: usize>(
    a: &DecodeValues,
    column: usize,
) {
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let mut acc = [[S::splat(0.0); C]; RB];
        for r in 0..RB {
            let rescale = S::splat(*a.rescale.add(r));
            for c in 0..C {
                let out = a.output.add(r * a.output_stride + column + c * S::LANES);
                acc[r][c] = S::mul(S::load(out), rescale);
            }
        }
        for j in 0..a.keys {
            if column == 0 {
                a.ahead.fetch::<S>(j, 1);
            }
            let value = a.value.row(j).cast::<E>().add(column);
            let mut weight = [S::splat(0.0); RB];
            for r in 0..RB {
                weight[r] = S::splat(*a.weights.add(r * DECODE_BLOCK + j));
            }
            for c in 0..C {
                let x = E::load::<S>(value.add(c * S::LANES));
                for r in 0..RB {
                    acc[r][c] = S::fma(weight[r], x, acc[r][c]);
                }
            }
        }
        for r in 0..RB {
            for c in 0..C {
                S::store(a.output.add(r * a.output_stride + column + c * S::LANES), acc[r][c]);
            }
        }
    }
}

/// The last columns, fewer than a vector.
#[inline(always)]
unsafe fn value_tail<S: Simd, E: Element, const RB: usize>(a: &DecodeValues, column: usize) {
    let count = a.dim - column;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let mut acc = [S::splat(0.0); RB];
        for r in 0..RB {
            let out = a.output.add(r * a.output_stride + column);
            acc[r] = S::mul(S::load(out), S::splat(*a.rescale.add(r)));
        }
        for j in 0..a.keys {
            let x = E::load_first::<S>(a.value.row(j).cast::<E>().add(column), count);
            for r in 0..RB {
                acc[r] = S::fma(S::splat(*a.weights.add(r * DECODE_BLOCK + j)), x, acc[r]);
            }
        }
        for r in 0..RB {
            S::store(a.output.add(r * a.output_stride + column), acc[r]);
        }
    }
}
