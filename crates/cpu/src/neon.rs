//! NEON (ARMv8): 4 lanes, 32 registers.

use crate::simd::{EXP2_UNDERFLOW, MAX_LANES, ROUNDING_MAGIC, Simd};
use std::arch::aarch64::*;
use std::arch::asm;

/// Marker for NEON.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

// SAFETY (every block below): the trait's contract gives the instruction set and valid pointers.
impl Simd for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    const REGISTERS: usize = 32;

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: float32x4_t) {
        // SAFETY: trait contract.
        unsafe { vst1q_f32(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { widen_f16(vld1_u16(p)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p))) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vcvtq_f32_s32(vmovl_s16(veor_s16(widen_i8(p), vdup_n_s16(!0x7f)))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vcvtq_f32_s32(vmovl_s16(widen_i8(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe {
            let wide = vreinterpret_u16_s16(widen_i8(p));
            // Sign, exponent and mantissa where f16 has them: its bias makes values 2^8 too small, subnormal ones too.
            let bits = vand_u16(vshl_n_u16::<7>(wide), vdup_n_u16(0xBF80));
            let nan = vceq_u16(vand_u16(wide, vdup_n_u16(0x7F)), vdup_n_u16(0x7F));
            widen_f16(vorr_u16(bits, vand_u16(nan, vdup_n_u16(0x7E00))))
        }
    }
    #[inline(always)]
    unsafe fn part_bf16(words: float32x4_t, part: usize) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe {
            let bits = vreinterpretq_u32_f32(words);
            let high = vdupq_n_u32(0xffff_0000);
            vreinterpretq_f32_u32(if part == 0 { vshlq_n_u32::<16>(bits) } else { vandq_u32(bits, high) })
        }
    }
    #[inline(always)]
    unsafe fn part_f16(words: float32x4_t, part: usize) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe {
            let bits = vreinterpretq_u32_f32(words);
            widen_f16(vmovn_u32(if part == 0 { bits } else { vshrq_n_u32::<16>(bits) }))
        }
    }
    #[inline(always)]
    unsafe fn select_bit(words: float32x4_t, bit: usize, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vbslq_f32(vtstq_u32(vreinterpretq_u32_f32(words), vdupq_n_u32(1 << bit)), a, b) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: float32x4_t) {
        // SAFETY: trait contract. The rounding mode is the default one, to nearest even.
        unsafe {
            let half: uint16x4_t;
            asm!("fcvtn {half:v}.4h, {wide:v}.4s", half = lateout(vreg) half, wide = in(vreg) v,
                options(pure, nomem, nostack, preserves_flags));
            vst1_u16(p, half);
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: float32x4_t) {
        // SAFETY: trait contract.
        unsafe {
            let bits = vreinterpretq_u32_f32(v);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let words = vbslq_u32(vceqq_f32(v, v), rounded, quiet);
            vst1_u16(p, vshrn_n_u32::<16>(words));
        }
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract. Not `fmax`: with NaN in `a`, `b` is wanted.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract. Not `fmin`: with NaN in `a`, `b` is wanted.
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn exp2_split(x: float32x4_t) -> (float32x4_t, float32x4_t) {
        // SAFETY: trait contract.
        unsafe {
            let magic = vdupq_n_f32(ROUNDING_MAGIC);
            let shifted = vaddq_f32(x, magic);
            (vsubq_f32(x, vsubq_f32(shifted, magic)), shifted)
        }
    }
    #[inline(always)]
    unsafe fn exp2_join(x: float32x4_t, power: float32x4_t, shifted: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe {
            let underflow = vcltq_f32(x, vdupq_n_f32(EXP2_UNDERFLOW));
            // The low bits of `shifted` hold the exponent; the rest is shifted out.
            let exponent = vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted));
            let whole = vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(127 << 23)));
            let value = vreinterpretq_u32_f32(vmulq_f32(power, whole));
            vreinterpretq_f32_u32(vbicq_u32(value, underflow))
        }
    }
    #[inline(always)]
    unsafe fn abs(x: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vabsq_f32(x) }
    }
    #[inline(always)]
    unsafe fn exceeds(x: float32x4_t, limit: float32x4_t) -> bool {
        // SAFETY: trait contract.
        unsafe { vminvq_u32(vcleq_f32(x, limit)) == 0 }
    }
    #[inline(always)]
    unsafe fn select_above(
        x: float32x4_t,
        limit: float32x4_t,
        a: float32x4_t,
        b: float32x4_t,
    ) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vbslq_f32(vcgtq_f32(x, limit), a, b) }
    }
    #[inline(always)]
    unsafe fn select_between(
        index: float32x4_t,
        lo: f32,
        hi: f32,
        inside: float32x4_t,
        outside: float32x4_t,
    ) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe {
            let above = vcgeq_f32(index, vdupq_n_f32(lo));
            let below = vcleq_f32(index, vdupq_n_f32(hi));
            vbslq_f32(vandq_u32(above, below), inside, outside)
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn prefetch_near(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn transpose_rows(rows: &[*const f32; MAX_LANES], dst: *mut f32, dst_stride: usize) {
        // SAFETY: trait contract.
        unsafe {
            let row = |i: usize| vld1q_f32(rows[i]);
            let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
            // Pairs of rows interleaved, then pairs of pairs.
            let wide = |v: float32x4_t| vreinterpretq_f64_f32(v);
            let (even01, odd01) = (wide(vtrn1q_f32(r0, r1)), wide(vtrn2q_f32(r0, r1)));
            let (even23, odd23) = (wide(vtrn1q_f32(r2, r3)), wide(vtrn2q_f32(r2, r3)));
            let columns = [
                vtrn1q_f64(even01, even23),
                vtrn1q_f64(odd01, odd23),
                vtrn2q_f64(even01, even23),
                vtrn2q_f64(odd01, odd23),
            ];
            for (c, column) in columns.into_iter().enumerate() {
                vst1q_f32(dst.add(c * dst_stride), vreinterpretq_f32_f64(column));
            }
        }
    }
}

/// Four bytes, sign-extended.
///
/// # Safety
/// NEON; four bytes are valid at `p`.
#[inline(always)]
unsafe fn widen_i8(p: *const u8) -> int16x4_t {
    // SAFETY: by contract.
    unsafe {
        let bytes = u64::from(p.cast::<u32>().read_unaligned());
        vget_low_s16(vmovl_s8(vcreate_s8(bytes)))
    }
}

/// Four half-precision values as f32. The intrinsic for it is not stable; the instruction is in every ARMv8 processor.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn widen_f16(half: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: registers only.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = lateout(vreg) wide, half = in(vreg) half,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}
