//! The decode kernels of AVX512-BF16: queries are bfloat16, keys and values too or 8-bit codes, whose values bfloat16 holds exactly.
//!
//! Scores are sums of pairs, which multiply exactly. Weights stay f32: values are widened, the even and the odd columns of a vector apart, which
//! costs one instruction each where columns in their order cost two.

use crate::decode::{DECODE_BLOCK, DecodeScores, DecodeValues};
use crate::portable::E4M3_OVER_256;
use evosdpa_core::{E4M3Code, I8Code, U8Code};
use half::bf16;
use std::arch::x86_64::*;
use std::mem::transmute;

/// Elements of a vector of bfloat16, and floats.
const ELEMENTS: usize = 32;
const LANES: usize = 16;

/// Most vectors that are read at once.
const MAX_VECTORS: usize = 2;

/// What keys and values are stored as.
///
/// # Safety
/// The instruction sets that an element says; `p` is valid for what is read.
pub(crate) trait Stored: Copy {
    /// Vectors of 32 bfloat16 that are read at once.
    const VECTORS: usize;
    /// Elements that are read at once.
    const ELEMENTS: usize = Self::VECTORS * ELEMENTS;

    unsafe fn load(p: *const Self) -> [__m512i; MAX_VECTORS];
    /// The first `count` elements, fewer than are read at once; the others are zero.
    unsafe fn load_first(p: *const Self, count: usize) -> [__m512i; MAX_VECTORS];
}

/// AVX-512.
impl Stored for bf16 {
    const VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn load(p: *const bf16) -> [__m512i; MAX_VECTORS] {
        // SAFETY: trait contract.
        unsafe { [_mm512_loadu_si512(p.cast()), _mm512_setzero_si512()] }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const bf16, count: usize) -> [__m512i; MAX_VECTORS] {
        // SAFETY: trait contract.
        unsafe { [_mm512_maskz_loadu_epi16((1 << count) - 1, p.cast()), _mm512_setzero_si512()] }
    }
}

/// AVX-512 with VBMI.
impl Stored for E4M3Code {
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const E4M3Code) -> [__m512i; MAX_VECTORS] {
        // SAFETY: trait contract.
        unsafe { widen_codes(_mm512_loadu_si512(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const E4M3Code, count: usize) -> [__m512i; MAX_VECTORS] {
        // SAFETY: trait contract.
        unsafe { widen_codes(_mm512_maskz_loadu_epi8((1 << count) - 1, p.cast())) }
    }
}

/// AVX-512 with VBMI.
impl Stored for I8Code {
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const I8Code) -> [__m512i; MAX_VECTORS] {
        // SAFETY: trait contract.
        unsafe { widen_integers(_mm512_loadu_si512(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const I8Code, count: usize) -> [__m512i; MAX_VECTORS] {
        // SAFETY: trait contract.
        unsafe { widen_integers(_mm512_maskz_loadu_epi8((1 << count) - 1, p.cast())) }
    }
}

/// AVX-512 with VBMI. Codes less 128, as [`crate::element::unit`] has it.
impl Stored for U8Code {
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const U8Code) -> [__m512i; MAX_VECTORS] {
        // SAFETY: trait contract.
        unsafe { widen_integers(_mm512_xor_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi8(i8::MIN))) }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const U8Code, count: usize) -> [__m512i; MAX_VECTORS] {
        // SAFETY: trait contract.
        unsafe {
            let zero = _mm512_set1_epi8(i8::MIN);
            widen_integers(_mm512_xor_si512(_mm512_mask_loadu_epi8(zero, (1 << count) - 1, p.cast()), zero))
        }
    }
}

/// The low and the high bytes of a bfloat16 for each of 128 magnitudes.
type Bytes = [[u8; 128]; 2];

/// Of e4m3 codes' values over 256.
static E4M3_BYTES: Bytes = {
    let mut bytes = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let [_, _, low, high] = E4M3_OVER_256[code].to_bits().to_le_bytes();
        (bytes[0][code], bytes[1][code]) = (low, high);
        code += 1;
    }
    bytes
};

/// Of whole numbers.
static INTEGER_BYTES: Bytes = {
    let mut bytes = [[0; 128]; 2];
    let mut number = 0;
    while number < 128 {
        let [_, _, low, high] = (number as f32).to_bits().to_le_bytes();
        (bytes[0][number], bytes[1][number]) = (low, high);
        number += 1;
    }
    bytes
};

/// Which eight codes come where, so that unpacking each 128-bit lane leaves them in their order.
static BEFORE_UNPACKING: [u64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn before_unpacking(codes: __m512i) -> __m512i {
    // SAFETY: by contract.
    unsafe { _mm512_permutexvar_epi64(_mm512_loadu_si512(BEFORE_UNPACKING.as_ptr().cast()), codes) }
}

/// The bytes that the low seven bits of each lane stand for.
///
/// # Safety
/// AVX-512 with VBMI.
#[inline(always)]
unsafe fn look_up(bytes: &[u8; 128], lanes: __m512i) -> __m512i {
    // SAFETY: by contract; the two halves of a table are a vector each.
    unsafe {
        let (first, second) =
            (_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().add(64).cast()));
        _mm512_permutex2var_epi8(first, lanes, second)
    }
}

/// Magnitudes' bytes and signs, brought before unpacking, as bfloat16.
///
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn unpack(low: __m512i, high: __m512i, signs: __m512i) -> [__m512i; MAX_VECTORS] {
    // SAFETY: by contract.
    unsafe {
        // high | signs & sign
        let high = _mm512_ternarylogic_epi32::<0xf8>(high, signs, _mm512_set1_epi8(i8::MIN));
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }
}

/// 64 e4m3 codes as bfloat16, their values over 256.
///
/// # Safety
/// AVX-512 with VBMI.
#[inline(always)]
unsafe fn widen_codes(codes: __m512i) -> [__m512i; MAX_VECTORS] {
    // SAFETY: by contract.
    unsafe {
        let codes = before_unpacking(codes);
        unpack(look_up(&E4M3_BYTES[0], codes), look_up(&E4M3_BYTES[1], codes), codes)
    }
}

/// 64 signed bytes as bfloat16, which holds every one of them.
///
/// # Safety
/// AVX-512 with VBMI.
#[inline(always)]
unsafe fn widen_integers(numbers: __m512i) -> [__m512i; MAX_VECTORS] {
    const HIGH_OF_128: i8 = 0x43;
    // SAFETY: by contract.
    unsafe {
        let numbers = before_unpacking(numbers);
        let size = _mm512_abs_epi8(numbers);
        // -128 is looked up as 0, whose low byte is the same.
        let least = _mm512_cmpeq_epi8_mask(numbers, _mm512_set1_epi8(i8::MIN));
        let high = look_up(&INTEGER_BYTES[1], size);
        let high = _mm512_mask_blend_epi8(least, high, _mm512_set1_epi8(HIGH_OF_128));
        unpack(look_up(&INTEGER_BYTES[0], size), high, numbers)
    }
}

/// Scores of `RB` query rows of pairs, 16 sums at a time; those past `keys` up to a whole vector become -inf.
///
/// # Safety
/// AVX512-BF16 and what `E` asks for; all of `a` valid, its queries pairs that are zero up to whole vectors; `1 <= keys <= DECODE_BLOCK`; `RB` is 1, 2 or 4.
#[inline(always)]
pub(crate) unsafe fn scores<E: Stored, const RB: usize>(a: &DecodeScores) {
    let keys_at_once = LANES / RB;
    let whole = a.dim / E::ELEMENTS;
    let tail = a.dim % E::ELEMENTS;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let zero = _mm512_setzero_ps();
        for base in (0..a.keys).step_by(keys_at_once) {
            a.ahead.fetch::<crate::avx512::Avx512>(base, keys_at_once);
            let mut row = [std::ptr::null::<E>(); LANES];
            for j in 0..keys_at_once {
                // Past the last key it is read again: its sums are not kept.
                row[j] = a.key.row((base + j).min(a.keys - 1)).cast();
            }
            let mut sums = [zero; LANES];
            for step in 0..whole {
                let mut query = [[zero; MAX_VECTORS]; RB];
                for r in 0..RB {
                    for i in 0..E::VECTORS {
                        let pairs = r * a.query_stride + (step * E::VECTORS + i) * LANES;
                        query[r][i] = _mm512_loadu_ps(a.queries.add(pairs));
                    }
                }
                for j in 0..keys_at_once {
                    let key = E::load(row[j].add(step * E::ELEMENTS));
                    for r in 0..RB {
                        for i in 0..E::VECTORS {
                            let sum = &mut sums[r * keys_at_once + j];
                            *sum = dot(query[r][i], key[i], *sum);
                        }
                    }
                }
            }
            if tail > 0 {
                for j in 0..keys_at_once {
                    let key = E::load_first(row[j].add(whole * E::ELEMENTS), tail);
                    for r in 0..RB {
                        for i in 0..tail.div_ceil(ELEMENTS) {
                            let pairs = r * a.query_stride + (whole * E::VECTORS + i) * LANES;
                            let sum = &mut sums[r * keys_at_once + j];
                            *sum = dot(_mm512_loadu_ps(a.queries.add(pairs)), key[i], *sum);
                        }
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
unsafe fn dot(a: __m512, b: __m512i, sum: __m512) -> __m512 {
    // SAFETY: by contract; lanes of pairs are bits, whatever their type says.
    unsafe { _mm512_dpbf16_ps(sum, transmute::<__m512, __m512bh>(a), transmute::<__m512i, __m512bh>(b)) }
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
/// AVX512-BF16 and what `E` asks for; all of `a` valid, output rows up to whole vectors.
#[inline(always)]
pub(crate) unsafe fn values<E: Stored, const RB: usize>(a: &DecodeValues) {
    let mut column = 0;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        while RB <= 2 && column + 4 * ELEMENTS <= a.dim {
            value_columns::<E, RB, 4>(a, column);
            column += 4 * ELEMENTS;
        }
        while column + 2 * ELEMENTS <= a.dim {
            value_columns::<E, RB, 2>(a, column);
            column += 2 * ELEMENTS;
        }
        while E::VECTORS == 1 && column + ELEMENTS <= a.dim {
            value_columns::<E, RB, 1>(a, column);
            column += ELEMENTS;
        }
        if column < a.dim {
            last_columns::<E, RB>(a, column);
        }
    }
}

/// `C` vectors of value columns from `column` on.
#[inline(always)]
unsafe fn value_columns<E: Stored, const RB: usize, const C: usize>(a: &DecodeValues, column: usize) {
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let mut sums = [[[_mm512_setzero_ps(); 2]; C]; RB];
        for r in 0..RB {
            let rescale = _mm512_set1_ps(*a.rescale.add(r));
            for c in 0..C {
                sums[r][c] =
                    load_apart(a.output.add(r * a.output_stride + column + c * ELEMENTS), ELEMENTS, rescale);
            }
        }
        for j in 0..a.keys {
            if column == 0 {
                a.ahead.fetch::<crate::avx512::Avx512>(j, 1);
            }
            let row = a.value.row(j).cast::<E>().add(column);
            for c in (0..C).step_by(E::VECTORS) {
                let values = E::load(row.add(c * ELEMENTS));
                for i in 0..E::VECTORS {
                    for r in 0..RB {
                        let weight = _mm512_set1_ps(*a.weights.add(r * DECODE_BLOCK + j));
                        sums[r][c + i] = add_apart(weight, values[i], sums[r][c + i]);
                    }
                }
            }
        }
        for r in 0..RB {
            for c in 0..C {
                store_together(
                    a.output.add(r * a.output_stride + column + c * ELEMENTS),
                    ELEMENTS,
                    sums[r][c],
                );
            }
        }
    }
}

/// The last value columns, fewer than are read at once.
#[inline(always)]
unsafe fn last_columns<E: Stored, const RB: usize>(a: &DecodeValues, column: usize) {
    let left = a.dim - column;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        for first in (0..left).step_by(ELEMENTS) {
            let mut sums = [[_mm512_setzero_ps(); 2]; RB];
            let output = |r: usize| a.output.add(r * a.output_stride + column + first);
            for r in 0..RB {
                sums[r] = load_apart(output(r), left - first, _mm512_set1_ps(*a.rescale.add(r)));
            }
            for j in 0..a.keys {
                let values = E::load_first(a.value.row(j).cast::<E>().add(column), left);
                for r in 0..RB {
                    let weight = _mm512_set1_ps(*a.weights.add(r * DECODE_BLOCK + j));
                    sums[r] = add_apart(weight, values[first / ELEMENTS], sums[r]);
                }
            }
            for r in 0..RB {
                store_together(output(r), left - first, sums[r]);
            }
        }
    }
}

/// Adds a vector of values, weighted, its even and its odd columns apart.
///
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn add_apart(weight: __m512, values: __m512i, [evens, odds]: [__m512; 2]) -> [__m512; 2] {
    // SAFETY: by contract.
    unsafe {
        let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(values));
        let odd = _mm512_castsi512_ps(_mm512_and_si512(values, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
        [_mm512_fmadd_ps(weight, even, evens), _mm512_fmadd_ps(weight, odd, odds)]
    }
}

/// Where the even columns of two vectors lie, the odd ones, and where those of each lie again after both were taken apart.
const EVEN: [u32; LANES] = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];
const ODD: [u32; LANES] = [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31];
const FIRST: [u32; LANES] = [0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23];
const SECOND: [u32; LANES] = [8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31];

/// The even and the odd ones of 32 floats, of which `left` rounded up to a whole vector are there, times a factor.
///
/// # Safety
/// AVX-512; `p` is valid for these.
#[inline(always)]
unsafe fn load_apart(p: *const f32, left: usize, factor: __m512) -> [__m512; 2] {
    // SAFETY: by contract.
    unsafe {
        let first = _mm512_loadu_ps(p);
        let second = if left > LANES { _mm512_loadu_ps(p.add(LANES)) } else { _mm512_setzero_ps() };
        let (even, odd) = (_mm512_loadu_si512(EVEN.as_ptr().cast()), _mm512_loadu_si512(ODD.as_ptr().cast()));
        [even, odd].map(|order| _mm512_mul_ps(_mm512_permutex2var_ps(first, order, second), factor))
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

#[cfg(test)]
mod tests {
    use super::*;

    use crate::isa::Isa;
    use evosdpa_core::Element;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi")]
    fn widened<E: Stored>(codes: &[E], count: usize) -> [bf16; 64] {
        let mut out = [bf16::ZERO; 64];
        // SAFETY: the features are enabled here; there are so many codes, and room for two vectors.
        unsafe {
            let whole = count == codes.len();
            let vectors = if whole { E::load(codes.as_ptr()) } else { E::load_first(codes.as_ptr(), count) };
            _mm512_storeu_si512(out.as_mut_ptr().cast(), vectors[0]);
            _mm512_storeu_si512(out.as_mut_ptr().add(ELEMENTS).cast(), vectors[1]);
        }
        out
    }

    /// Widens every code there is, and says of each what it became beside what it should.
    fn check<E: Stored + std::fmt::Debug>(code: fn(u8) -> E, value: fn(E) -> f32) {
        if !(Isa::Avx512Bf16.is_available() && is_x86_feature_detected!("avx512vbmi")) {
            eprintln!("UNAVAILABLE: this machine has no AVX512-BF16 with VBMI");
            return;
        }
        let codes: Vec<E> = (0..=u8::MAX).map(code).collect();
        for count in [64, 33, 32, 1] {
            for codes in codes.chunks_exact(64) {
                // SAFETY: the instruction set is available.
                let got = unsafe { widened(codes, count) };
                for (i, got) in got.into_iter().enumerate() {
                    let want = if i < count { value(codes[i]) } else { 0.0 };
                    let same = got.to_f32() == want && got.is_sign_negative() == want.is_sign_negative();
                    assert!(same || got.is_nan() && want.is_nan(), "{:?}: {got}, not {want}", codes[i]);
                }
            }
        }
    }

    #[test]
    fn every_code_is_widened_to_its_value() {
        check(E4M3Code, |code| (code.to_f64() / 256.0) as f32);
        check(|byte| I8Code(byte as i8), |code| f32::from(code.0));
        check(U8Code, |code| f32::from(code.0) - 128.0);
    }
}
