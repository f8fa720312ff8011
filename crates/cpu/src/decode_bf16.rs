//! The decode kernels of AVX512-BF16: queries, keys and values are bfloat16 and multiplied as they lie in memory.
//!
//! Scores are sums of pairs, which multiply exactly. Weights stay f32: values are widened, the even and the odd columns of a vector apart, which
//! costs one instruction each where columns in their order cost two.

use crate::decode::{DECODE_BLOCK, DecodeScores, DecodeValues};
use half::bf16;
use std::arch::x86_64::*;
use std::mem::transmute;

/// Elements of a vector of bfloat16, and floats.
const ELEMENTS: usize = 32;
const LANES: usize = 16;

/// Scores of `RB` query rows of pairs, 16 sums at a time; those past `keys` up to a whole vector become -inf.
///
/// # Safety
/// AVX512-BF16; all of `a` valid, its queries pairs that are zero up to whole vectors; `1 <= keys <= DECODE_BLOCK`; `RB` is 1, 2 or 4.
#[inline(always)]
pub(crate) unsafe fn scores<const RB: usize>(a: &DecodeScores) {
    let keys_at_once = LANES / RB;
    let whole = a.dim / ELEMENTS;
    let tail = a.dim % ELEMENTS;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let zero = _mm512_setzero_ps();
        let tail_mask = (1u32 << tail) - 1;
        for base in (0..a.keys).step_by(keys_at_once) {
            a.ahead.fetch::<crate::avx512::Avx512>(base, keys_at_once);
            let mut row = [std::ptr::null::<bf16>(); LANES];
            for j in 0..keys_at_once {
                // Past the last key it is read again: its sums are not kept.
                row[j] = a.key.row((base + j).min(a.keys - 1)).cast();
            }
            let mut sums = [zero; LANES];
            for step in 0..whole {
                let mut query = [zero; RB];
                for r in 0..RB {
                    query[r] = _mm512_loadu_ps(a.queries.add(r * a.query_stride + step * LANES));
                }
                for j in 0..keys_at_once {
                    let key = _mm512_loadu_ps(row[j].add(step * ELEMENTS).cast());
                    for r in 0..RB {
                        let i = r * keys_at_once + j;
                        sums[i] = dot(query[r], key, sums[i]);
                    }
                }
            }
            if tail > 0 {
                for j in 0..keys_at_once {
                    let key = _mm512_maskz_loadu_epi16(tail_mask, row[j].add(whole * ELEMENTS).cast());
                    for r in 0..RB {
                        let query = _mm512_loadu_ps(a.queries.add(r * a.query_stride + whole * LANES));
                        let i = r * keys_at_once + j;
                        sums[i] = dot(query, _mm512_castsi512_ps(key), sums[i]);
                    }
                }
            }
            let mut lanes = [0.0f32; LANES];
            _mm512_storeu_ps(lanes.as_mut_ptr(), _mm512_mul_ps(add_up(&sums), _mm512_set1_ps(a.scale)));
            for r in 0..RB {
                let line = a.scores.add(r * DECODE_BLOCK + base);
                line.copy_from_nonoverlapping(lanes.as_ptr().add(r * keys_at_once), keys_at_once);
            }
        }
        for r in 0..RB {
            for past in a.keys..a.keys.next_multiple_of(LANES) {
                *a.scores.add(r * DECODE_BLOCK + past) = f32::NEG_INFINITY;
            }
        }
    }
}

/// # Safety
/// AVX512-BF16.
#[inline(always)]
unsafe fn dot(a: __m512, b: __m512, sum: __m512) -> __m512 {
    // SAFETY: by contract; lanes of pairs are bits, whatever their type says.
    unsafe { _mm512_dpbf16_ps(sum, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b)) }
}

/// The sum of each vector's lanes.
///
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn add_up(x: &[__m512; LANES]) -> __m512 {
    // SAFETY: by contract.
    unsafe {
        let first = add_halves(add_four(x[0], x[1], x[2], x[3]), add_four(x[4], x[5], x[6], x[7]));
        let second = add_halves(add_four(x[8], x[9], x[10], x[11]), add_four(x[12], x[13], x[14], x[15]));
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x88>(first, second),
            _mm512_shuffle_f32x4::<0xdd>(first, second),
        )
    }
}

/// Four vectors become one, with a sum of each in every 128-bit lane.
///
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn add_four(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    // SAFETY: by contract.
    unsafe {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        _mm512_add_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd))
    }
}

/// Both halves of each vector added, one behind the other.
///
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn add_halves(a: __m512, b: __m512) -> __m512 {
    // SAFETY: by contract.
    unsafe { _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b)) }
}

/// `O = O·rescale + P·V` for `RB` rows.
///
/// # Safety
/// AVX512-BF16; all of `a` valid, output rows up to whole vectors.
#[inline(always)]
pub(crate) unsafe fn values<const RB: usize>(a: &DecodeValues) {
    let mut column = 0;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        while RB <= 2 && column + 4 * ELEMENTS <= a.dim {
            value_columns::<RB, 4>(a, column);
            column += 4 * ELEMENTS;
        }
        while column + 2 * ELEMENTS <= a.dim {
            value_columns::<RB, 2>(a, column);
            column += 2 * ELEMENTS;
        }
        while column < a.dim {
            value_columns::<RB, 1>(a, column);
            column += ELEMENTS;
        }
    }
}

/// `C` vectors of value columns from `column` on; of a single one, what lies in the row.
#[inline(always)]
unsafe fn value_columns<const RB: usize, const C: usize>(a: &DecodeValues, column: usize) {
    let left = a.dim - column;
    let mask = if left >= ELEMENTS { u32::MAX } else { (1 << left) - 1 };
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let mut sums = [[[_mm512_setzero_ps(); 2]; C]; RB];
        for r in 0..RB {
            let rescale = _mm512_set1_ps(*a.rescale.add(r));
            for c in 0..C {
                let [even, odd] = load_apart(a.output.add(r * a.output_stride + column + c * ELEMENTS), left);
                sums[r][c] = [_mm512_mul_ps(even, rescale), _mm512_mul_ps(odd, rescale)];
            }
        }
        for j in 0..a.keys {
            if column == 0 {
                a.ahead.fetch::<crate::avx512::Avx512>(j, 1);
            }
            let row = a.value.row(j).cast::<bf16>().add(column);
            let mut weight = [_mm512_setzero_ps(); RB];
            for r in 0..RB {
                weight[r] = _mm512_set1_ps(*a.weights.add(r * DECODE_BLOCK + j));
            }
            for c in 0..C {
                let p = row.add(c * ELEMENTS).cast();
                let bits =
                    if C == 1 { _mm512_maskz_loadu_epi16(mask, p) } else { _mm512_loadu_si512(p.cast()) };
                let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits));
                let odd = _mm512_castsi512_ps(_mm512_and_si512(bits, high));
                for r in 0..RB {
                    let [evens, odds] = sums[r][c];
                    sums[r][c] =
                        [_mm512_fmadd_ps(weight[r], even, evens), _mm512_fmadd_ps(weight[r], odd, odds)];
                }
            }
        }
        for r in 0..RB {
            for c in 0..C {
                store_together(a.output.add(r * a.output_stride + column + c * ELEMENTS), left, sums[r][c]);
            }
        }
    }
}

/// Where the even columns of two vectors lie, the odd ones, and where those of each lie again after both were taken apart.
const EVEN: [u32; LANES] = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];
const ODD: [u32; LANES] = [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31];
const FIRST: [u32; LANES] = [0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23];
const SECOND: [u32; LANES] = [8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31];

/// The even and the odd ones of 32 floats, of which `left` rounded up to a whole vector are there.
///
/// # Safety
/// AVX-512; `p` is valid for these.
#[inline(always)]
unsafe fn load_apart(p: *const f32, left: usize) -> [__m512; 2] {
    // SAFETY: by contract.
    unsafe {
        let first = _mm512_loadu_ps(p);
        let second = if left > LANES { _mm512_loadu_ps(p.add(LANES)) } else { _mm512_setzero_ps() };
        let (even, odd) = (_mm512_loadu_si512(EVEN.as_ptr().cast()), _mm512_loadu_si512(ODD.as_ptr().cast()));
        [_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, odd, second)]
    }
}

/// The reverse of [`load_apart`].
///
/// # Safety
/// AVX-512; `p` is valid for these.
#[inline(always)]
unsafe fn store_together(p: *mut f32, left: usize, [even, odd]: [__m512; 2]) {
    // SAFETY: by contract.
    unsafe {
        let order = _mm512_loadu_si512(FIRST.as_ptr().cast());
        _mm512_storeu_ps(p, _mm512_permutex2var_ps(even, order, odd));
        if left > LANES {
            let order = _mm512_loadu_si512(SECOND.as_ptr().cast());
            _mm512_storeu_ps(p.add(LANES), _mm512_permutex2var_ps(even, order, odd));
        }
    }
}
