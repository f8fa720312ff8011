//! AVX2 with FMA and F16C: 8 lanes, 16 registers.

use crate::simd::{EXP2_UNDERFLOW, MAX_LANES, ROUNDING_MAGIC, Simd};
use std::arch::x86_64::*;

/// Marker for AVX2 + FMA + F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

// SAFETY (every block below): the trait's contract gives the instruction set and valid pointers.
impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        // SAFETY: trait contract.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        // SAFETY: trait contract.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m256 {
        // SAFETY: trait contract.
        unsafe {
            let signed = _mm_xor_si128(_mm_loadl_epi64(p.cast()), _mm_set1_epi8(i8::MIN));
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(signed))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        // SAFETY: trait contract.
        unsafe {
            let wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast()));
            // Sign, exponent and mantissa where f16 has them: its bias makes values 2^8 too small, subnormal ones too.
            let bits = _mm_and_si128(_mm_slli_epi16::<7>(wide), _mm_set1_epi16(0xBF80_u16 as i16));
            let magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7F));
            let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
            _mm256_cvtph_ps(_mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7E00))))
        }
    }
    #[inline(always)]
    unsafe fn part_bf16(words: __m256, part: usize) -> __m256 {
        // SAFETY: trait contract.
        unsafe {
            let bits = _mm256_castps_si256(words);
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let wide = if part == 0 { _mm256_slli_epi32::<16>(bits) } else { _mm256_and_si256(bits, high) };
            _mm256_castsi256_ps(wide)
        }
    }
    #[inline(always)]
    unsafe fn part_f16(words: __m256, part: usize) -> __m256 {
        // SAFETY: trait contract.
        unsafe {
            let bits = _mm256_castps_si256(words);
            let bits = if part == 0 { bits } else { _mm256_srli_epi32::<16>(bits) };
            let low = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
            let (first, second) = (_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
            _mm256_cvtph_ps(_mm_packus_epi32(first, second))
        }
    }
    #[inline(always)]
    unsafe fn select_bit(words: __m256, bit: usize, a: __m256, b: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe {
            let bit = _mm256_set1_epi32((1u32 << bit) as i32);
            let set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(words), bit), bit);
            _mm256_blendv_ps(b, a, _mm256_castsi256_ps(set))
        }
    }
    #[inline(always)]
    unsafe fn nonzero_bytes(p: *const u8) -> u64 {
        // SAFETY: trait contract.
        unsafe {
            let zeros = |p: *const u8| {
                let bytes = _mm256_loadu_si256(p.cast());
                _mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())) as u32
            };
            !(u64::from(zeros(p)) | u64::from(zeros(p.add(32))) << 32)
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m256) {
        // SAFETY: trait contract.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: __m256) {
        // SAFETY: trait contract.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
            let quiet = _mm256_or_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x40));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let words = _mm256_blendv_epi8(rounded, quiet, nan);
            let (lo, hi) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), _mm_packus_epi32(lo, hi))
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn exp2_split(x: __m256) -> (__m256, __m256) {
        // SAFETY: trait contract.
        unsafe {
            let magic = _mm256_set1_ps(ROUNDING_MAGIC);
            let shifted = _mm256_add_ps(x, magic);
            (_mm256_sub_ps(x, _mm256_sub_ps(shifted, magic)), shifted)
        }
    }
    #[inline(always)]
    unsafe fn exp2_join(x: __m256, power: __m256, shifted: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe {
            // "Not less than" lets NaN through; the multiplication keeps it.
            let normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(EXP2_UNDERFLOW));
            // The low bits of `shifted` hold the exponent; the rest is shifted out.
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
            let whole = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
            _mm256_and_ps(normal, _mm256_mul_ps(power, whole))
        }
    }
    #[inline(always)]
    unsafe fn abs(x: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), x) }
    }
    #[inline(always)]
    unsafe fn exceeds(x: __m256, limit: __m256) -> bool {
        // SAFETY: trait contract.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLE_UQ>(x, limit)) != 0 }
    }
    #[inline(always)]
    unsafe fn select_above(x: __m256, limit: __m256, a: __m256, b: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe { _mm256_blendv_ps(b, a, _mm256_cmp_ps::<_CMP_GT_OQ>(x, limit)) }
    }
    #[inline(always)]
    unsafe fn select_between(index: __m256, lo: f32, hi: f32, inside: __m256, outside: __m256) -> __m256 {
        // SAFETY: trait contract.
        unsafe {
            let above = _mm256_cmp_ps::<_CMP_GE_OQ>(index, _mm256_set1_ps(lo));
            let below = _mm256_cmp_ps::<_CMP_LE_OQ>(index, _mm256_set1_ps(hi));
            _mm256_blendv_ps(outside, inside, _mm256_and_ps(above, below))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_near(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn transpose_rows(rows: &[*const f32; MAX_LANES], dst: *mut f32, dst_stride: usize) {
        // SAFETY: trait contract.
        unsafe {
            let mut a = [_mm256_setzero_ps(); 8];
            for i in 0..8 {
                a[i] = _mm256_loadu_ps(rows[i]);
            }
            // 4×4 transposes within 128-bit lanes, then the lanes are exchanged.
            let mut b = a;
            for g in 0..2 {
                let [r0, r1, r2, r3] = [a[4 * g], a[4 * g + 1], a[4 * g + 2], a[4 * g + 3]];
                let lo01 = _mm256_unpacklo_ps(r0, r1);
                let hi01 = _mm256_unpackhi_ps(r0, r1);
                let lo23 = _mm256_unpacklo_ps(r2, r3);
                let hi23 = _mm256_unpackhi_ps(r2, r3);
                b[4 * g] = _mm256_shuffle_ps::<0x44>(lo01, lo23);
                b[4 * g + 1] = _mm256_shuffle_ps::<0xee>(lo01, lo23);
                b[4 * g + 2] = _mm256_shuffle_ps::<0x44>(hi01, hi23);
                b[4 * g + 3] = _mm256_shuffle_ps::<0xee>(hi01, hi23);
            }
            for i in 0..4 {
                let low = _mm256_permute2f128_ps::<0x20>(b[i], b[4 + i]);
                let high = _mm256_permute2f128_ps::<0x31>(b[i], b[4 + i]);
                _mm256_storeu_ps(dst.add(i * dst_stride), low);
                _mm256_storeu_ps(dst.add((4 + i) * dst_stride), high);
            }
        }
    }
}
