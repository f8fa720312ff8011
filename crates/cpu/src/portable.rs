//! Plain Rust vectors: what any compiler turns into its target's baseline SIMD.

use crate::simd::{EXP2_UNDERFLOW, MAX_LANES, ROUNDING_MAGIC, Simd};
use half::{bf16, f16};

/// Marker for vectors of so many lanes.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<const N: usize>;

/// The portable path: four lanes are a register nearly everywhere.
pub(crate) type Portable = Lanes<4>;

/// Whether `f32::mul_add` is one instruction here rather than a call into the math library.
const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// 2^x as the vector paths compute it; see [`Simd::exp2`].
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    // SAFETY: needs no instruction set.
    unsafe { Lanes::<1>::exp2([x])[0] }
}

/// Every e4m3 code's value over 256. Shifted to where f32 has its exponent and mantissa, a code is 2^120 times too small, and
/// 2^112 of that is undone: exactly, as subnormal numbers are multiplied like others.
pub(crate) const E4M3_OVER_256: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let magnitude = code as u32 & 0x7F;
        let size = f32::from_bits(magnitude << 20) * f32::from_bits((127 + 112) << 23);
        let size = if magnitude == 0x7F { f32::NAN } else { size };
        table[code] = if code < 128 { size } else { -size };
        code += 1;
    }
    table
};

static E4M3_TABLE: [f32; 256] = E4M3_OVER_256;

impl<const N: usize> Simd for Lanes<N> {
    type V = [f32; N];
    const LANES: usize = N;
    const REGISTERS: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; N] {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; N] {
        // SAFETY: trait contract.
        unsafe { p.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [f32; N]) {
        // SAFETY: trait contract.
        unsafe { p.cast::<[f32; N]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> [f32; N] {
        // SAFETY: trait contract.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> [f32; N] {
        // SAFETY: trait contract.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f32::from_bits(u32::from(b) << 16))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> [f32; N] {
        // SAFETY: trait contract.
        let codes = unsafe { p.cast::<[u8; N]>().read_unaligned() };
        codes.map(|code| f32::from(code) - 128.0)
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> [f32; N] {
        // SAFETY: trait contract.
        let codes = unsafe { p.cast::<[i8; N]>().read_unaligned() };
        codes.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> [f32; N] {
        // SAFETY: trait contract.
        let codes = unsafe { p.cast::<[u8; N]>().read_unaligned() };
        codes.map(|code| E4M3_TABLE[usize::from(code)])
    }
    #[inline(always)]
    unsafe fn part_bf16(words: [f32; N], part: usize) -> [f32; N] {
        words.map(|word| bf16::from_bits((word.to_bits() >> (16 * part)) as u16).to_f32())
    }
    #[inline(always)]
    unsafe fn part_f16(words: [f32; N], part: usize) -> [f32; N] {
        words.map(|word| f16::from_bits((word.to_bits() >> (16 * part)) as u16).to_f32())
    }
    #[inline(always)]
    unsafe fn select_bit(words: [f32; N], bit: usize, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if words[i].to_bits() >> bit & 1 == 0 { b[i] } else { a[i] })
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: [f32; N]) {
        let bits = v.map(|x| f16::from_f32(x).to_bits());
        // SAFETY: trait contract.
        unsafe { p.cast::<[u16; N]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: [f32; N]) {
        let bits = v.map(|x| bf16::from_f32(x).to_bits());
        // SAFETY: trait contract.
        unsafe { p.cast::<[u16; N]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| multiply_add(a[i], b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn max(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn exp2_split(x: [f32; N]) -> ([f32; N], [f32; N]) {
        let shifted = x.map(|x| x + ROUNDING_MAGIC);
        (std::array::from_fn(|i| x[i] - (shifted[i] - ROUNDING_MAGIC)), shifted)
    }
    #[inline(always)]
    unsafe fn exp2_join(x: [f32; N], power: [f32; N], shifted: [f32; N]) -> [f32; N] {
        let whole = shifted.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23)));
        std::array::from_fn(|i| if x[i] < EXP2_UNDERFLOW { 0.0 } else { power[i] * whole[i] })
    }
    #[inline(always)]
    unsafe fn abs(x: [f32; N]) -> [f32; N] {
        x.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn exceeds(x: [f32; N], limit: [f32; N]) -> bool {
        !x.iter().zip(limit).all(|(x, limit)| *x <= limit)
    }
    #[inline(always)]
    unsafe fn select_above(x: [f32; N], limit: [f32; N], a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if x[i] > limit[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn select_between(
        index: [f32; N],
        lo: f32,
        hi: f32,
        inside: [f32; N],
        outside: [f32; N],
    ) -> [f32; N] {
        std::array::from_fn(|i| if index[i] >= lo && index[i] <= hi { inside[i] } else { outside[i] })
    }
    #[inline(always)]
    unsafe fn transpose_rows(rows: &[*const f32; MAX_LANES], dst: *mut f32, dst_stride: usize) {
        for row in 0..N {
            for column in 0..N {
                // SAFETY: trait contract: both are N×N blocks, anywhere.
                unsafe { *dst.add(column * dst_stride + row) = rows[row].add(column).read_unaligned() };
            }
        }
    }
}
