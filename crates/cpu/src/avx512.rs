//! AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers.

use crate::simd::{EXP2_UNDERFLOW, MAX_LANES, Simd};
use std::arch::x86_64::*;

/// Marker for AVX-512.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// SAFETY (every block below): the trait's contract gives the instruction set and valid pointers.
impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: trait contract.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            let signed = _mm_xor_si128(_mm_loadu_si128(p.cast()), _mm_set1_epi8(i8::MIN));
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(signed))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
            // Sign, exponent and mantissa where f16 has them: its bias makes values 2^8 too small, subnormal ones too.
            let bits = _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0xBF80_u16 as i16));
            let magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
            let nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
            _mm512_cvtph_ps(_mm256_mask_mov_epi16(bits, nan, _mm256_set1_epi16(0x7E00)))
        }
    }
    #[inline(always)]
    unsafe fn part_bf16(words: __m512, part: usize) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            let bits = _mm512_castps_si512(words);
            let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let wide = if part == 0 { _mm512_slli_epi32::<16>(bits) } else { _mm512_and_si512(bits, high) };
            _mm512_castsi512_ps(wide)
        }
    }
    #[inline(always)]
    unsafe fn part_f16(words: __m512, part: usize) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            let bits = _mm512_castps_si512(words);
            let low = if part == 0 { bits } else { _mm512_srli_epi32::<16>(bits) };
            _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low))
        }
    }
    #[inline(always)]
    unsafe fn select_bit(words: __m512, bit: usize, a: __m512, b: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            let bit = _mm512_set1_epi32((1u32 << bit) as i32);
            _mm512_mask_mov_ps(b, _mm512_test_epi32_mask(_mm512_castps_si512(words), bit), a)
        }
    }
    #[inline(always)]
    unsafe fn nonzero_bytes(p: *const u8) -> u64 {
        // SAFETY: trait contract.
        unsafe {
            let bytes = _mm512_loadu_si512(p.cast());
            _mm512_test_epi8_mask(bytes, bytes)
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m512) {
        // SAFETY: trait contract.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: __m512) {
        // SAFETY: trait contract.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let halves = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
            _mm256_storeu_si256(p.cast(), halves)
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn exp2_split(x: __m512) -> (__m512, __m512) {
        // SAFETY: trait contract.
        unsafe {
            // x - round(x) in one instruction; scalef takes the floor of its exponent, so it gets the rounded one.
            let f = _mm512_reduce_ps::<0>(x);
            (f, _mm512_sub_ps(x, f))
        }
    }
    #[inline(always)]
    unsafe fn exp2_join(x: __m512, power: __m512, rounded: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            // "Not less than" lets NaN through; scalef keeps it.
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(EXP2_UNDERFLOW));
            _mm512_maskz_scalef_ps(normal, power, rounded)
        }
    }
    #[inline(always)]
    unsafe fn abs(x: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_abs_ps(x) }
    }
    #[inline(always)]
    unsafe fn exceeds(x: __m512, limit: __m512) -> bool {
        // SAFETY: trait contract.
        unsafe { _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(x, limit) != 0 }
    }
    #[inline(always)]
    unsafe fn select_above(x: __m512, limit: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, limit), a) }
    }
    #[inline(always)]
    unsafe fn select_between(index: __m512, lo: f32, hi: f32, inside: __m512, outside: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            let above = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(index, _mm512_set1_ps(lo));
            let both = _mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(above, index, _mm512_set1_ps(hi));
            _mm512_mask_mov_ps(outside, both, inside)
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
            let mut a = [_mm512_setzero_ps(); 16];
            for i in 0..16 {
                a[i] = _mm512_loadu_ps(rows[i]);
            }
            // Within 128-bit lanes: 4×4 transposes of each group of four rows.
            let mut b = a;
            for g in 0..4 {
                let [r0, r1, r2, r3] = [a[4 * g], a[4 * g + 1], a[4 * g + 2], a[4 * g + 3]];
                let lo01 = _mm512_unpacklo_ps(r0, r1);
                let hi01 = _mm512_unpackhi_ps(r0, r1);
                let lo23 = _mm512_unpacklo_ps(r2, r3);
                let hi23 = _mm512_unpackhi_ps(r2, r3);
                b[4 * g] = _mm512_shuffle_ps::<0x44>(lo01, lo23);
                b[4 * g + 1] = _mm512_shuffle_ps::<0xee>(lo01, lo23);
                b[4 * g + 2] = _mm512_shuffle_ps::<0x44>(hi01, hi23);
                b[4 * g + 3] = _mm512_shuffle_ps::<0xee>(hi01, hi23);
            }
            // Then the 128-bit lanes themselves are transposed across the four groups.
            for i in 0..4 {
                let lo = _mm512_shuffle_f32x4::<0x88>(b[i], b[4 + i]);
                let hi = _mm512_shuffle_f32x4::<0xdd>(b[i], b[4 + i]);
                let lo2 = _mm512_shuffle_f32x4::<0x88>(b[8 + i], b[12 + i]);
                let hi2 = _mm512_shuffle_f32x4::<0xdd>(b[8 + i], b[12 + i]);
                _mm512_storeu_ps(dst.add(i * dst_stride), _mm512_shuffle_f32x4::<0x88>(lo, lo2));
                _mm512_storeu_ps(dst.add((4 + i) * dst_stride), _mm512_shuffle_f32x4::<0x88>(hi, hi2));
                _mm512_storeu_ps(dst.add((8 + i) * dst_stride), _mm512_shuffle_f32x4::<0xdd>(lo, lo2));
                _mm512_storeu_ps(dst.add((12 + i) * dst_stride), _mm512_shuffle_f32x4::<0xdd>(hi, hi2));
            }
        }
    }
}
