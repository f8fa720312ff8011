//! NEON with multiply-adds of bfloat16 pairs (ARMv8.6's BF16): everything of [`Neon`], and `bfdot` for QKᵀ and PV.
//!
//! The instruction adds the products of a pair, exact each, and their sum to an f32, and rounds both times to odd: inexact results have an odd last bit. Subnormal
//! inputs and results are zero. Its intrinsics are not stable in Rust 1.95, so the instructions are written as assembly.

use crate::kernels::{Kernels, kernels_of};
use crate::neon::Neon;
use crate::pack::Rows;
use crate::pairs::{copy_rows, pair_rows, pair_tiles, transpose_pairs};
use crate::simd::{Simd, simd_of};
use crate::tile::{self, Gemm, TileStep, Weighed};
use evosdpa_core::DType;
use half::bf16;
use std::arch::aarch64::*;
use std::arch::asm;

/// Marker for NEON with BF16, for queries, keys and values of bfloat16.
#[derive(Clone, Copy)]
pub(crate) struct NeonBf16;

impl Simd for NeonBf16 {
    type V = float32x4_t;
    const LANES: usize = 4;
    const REGISTERS: usize = 32;
    const PACKED: usize = 2;

    simd_of!(Neon);

    #[inline(always)]
    unsafe fn dot(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        let mut sum = c;
        // SAFETY: registers only; the trait's contract gives the instruction set.
        unsafe {
            asm!("bfdot {sum:v}.4s, {a:v}.8h, {b:v}.8h", sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
                options(pure, nomem, nostack, preserves_flags));
        }
        sum
    }
    #[inline(always)]
    unsafe fn round_pair(even: float32x4_t, odd: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe { vreinterpretq_f32_u16(vzip1q_u16(round(even), round(odd))) }
    }
    #[inline(always)]
    unsafe fn lost_pair(even: float32x4_t, odd: float32x4_t) -> float32x4_t {
        // SAFETY: trait contract.
        unsafe {
            let pairs = Self::round_pair(even, odd);
            let (first, second) = (Self::part_bf16(pairs, 0), Self::part_bf16(pairs, 1));
            Self::round_pair(vsubq_f32(even, first), vsubq_f32(odd, second))
        }
    }
}

/// Rounded to nearest even, in the lower half of the vector.
///
/// # Safety
/// NEON with BF16.
#[inline(always)]
unsafe fn round(wide: float32x4_t) -> uint16x8_t {
    let halves: uint16x8_t;
    // SAFETY: registers only. The rounding mode is the default one.
    unsafe {
        asm!("bfcvtn {halves:v}.4h, {wide:v}.4s", halves = lateout(vreg) halves, wide = in(vreg) wide,
            options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

impl Gemm for NeonBf16 {}

impl Kernels for NeonBf16 {
    // Few queries are bound by memory: keys are widened as they are read.
    type Few = Neon;
    const LANES: usize = <Neon as Kernels>::LANES;
    const STEP: usize = <Neon as Kernels>::STEP;
    const VECTORS: usize = <Neon as Kernels>::VECTORS;
    const PACKED: usize = 2;

    pair_tiles!(transpose_pairs::<Self>, #[target_feature(enable = "neon,bf16")]);
    kernels_of!(Neon);

    #[target_feature(enable = "neon,bf16")]
    unsafe fn pack_rows(_dtype: DType, a: &Rows) {
        // SAFETY: trait contract; problems of other types take `Neon`.
        unsafe { copy_rows::<Self>(a) }
    }
    #[target_feature(enable = "neon,bf16")]
    unsafe fn pack_values(_dtype: DType, checked: bool, a: &Rows) -> bool {
        // SAFETY: as above.
        unsafe { pair_rows::<Self, bf16>(checked, a) }
    }
    unsafe fn decode_scores(dtype: DType, rows: usize, a: &crate::decode::DecodeScores) {
        // SAFETY: trait contract.
        unsafe { <Neon as Kernels>::decode_scores(dtype, rows, a) }
    }
    unsafe fn decode_values(dtype: DType, rows: usize, a: &crate::decode::DecodeValues) {
        // SAFETY: trait contract.
        unsafe { <Neon as Kernels>::decode_values(dtype, rows, a) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::isa::Isa;
    use evosdpa_oracle::rng::Rng;

    /// One lane of `bfdot` as it is documented: both products, their sum and the sum with `c` are rounded each for itself.
    pub(crate) fn bfdot(a: u32, b: u32, c: f32) -> f32 {
        let [even, odd] = [0, 1].map(|part| {
            let [x, y] = [a, b].map(|pair| f64::from(flush(split(pair)[part])));
            to_odd(x * y)
        });
        add(c, add(even, odd))
    }

    fn add(x: f32, y: f32) -> f32 {
        let (x, y) = (f64::from(flush(x)), f64::from(flush(y)));
        let sum = x + y;
        // What f64 has no room for, by Knuth; it makes the last bit odd, too.
        let of_y = sum - x;
        let rest = (x - (sum - of_y)) + (y - of_y);
        if rest == 0.0 || !rest.is_finite() {
            return to_odd(sum);
        }
        let too_far = (rest < 0.0) == (sum > 0.0);
        to_odd(f64::from_bits((sum.to_bits() - u64::from(too_far)) | 1))
    }

    /// Rounded to f32 toward zero, with an odd last bit where that took something; zero below the normal numbers and infinite above all.
    fn to_odd(exact: f64) -> f32 {
        if exact.abs() < f64::from(f32::MIN_POSITIVE) {
            return 0.0f32.copysign(exact as f32);
        }
        if exact.is_nan() || exact.abs() >= 2f64.powi(128) {
            return exact as f32;
        }
        let near = exact as f32;
        let toward_zero =
            if f64::from(near).abs() > exact.abs() { f32::from_bits(near.to_bits() - 1) } else { near };
        let inexact = f64::from(toward_zero) != exact;
        f32::from_bits(toward_zero.to_bits() | u32::from(inexact))
    }

    fn flush(x: f32) -> f32 {
        if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
    }

    /// Pairs and sums at sizes where sums cancel in even rounds, and of any bits at all in odd ones.
    pub(crate) fn some_bits(rng: &mut Rng, round: usize) -> u32 {
        let bits = rng.below(1 << 32) as u32;
        if round.is_multiple_of(2) { (bits & 0x83ff_83ff) | 0x3c00_3c00 } else { bits }
    }

    /// The same bits, or both NaN.
    pub(crate) fn is_same(x: f32, y: f32) -> bool {
        x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan()
    }

    #[target_feature(enable = "neon,bf16")]
    unsafe fn dot_of(a: &[u32; 4], b: &[u32; 4], c: &mut [f32; 4]) {
        // SAFETY: the features are enabled here; arrays hold a vector.
        unsafe {
            let (x, y) = (NeonBf16::load(a.as_ptr().cast()), NeonBf16::load(b.as_ptr().cast()));
            NeonBf16::store(c.as_mut_ptr(), NeonBf16::dot(x, y, NeonBf16::load(c.as_ptr())));
        }
    }

    #[target_feature(enable = "neon,bf16")]
    unsafe fn packed(even: &[f32; 4], odd: &[f32; 4]) -> [[u32; 4]; 2] {
        let mut out = [[0u32; 4]; 2];
        // SAFETY: the features are enabled here; arrays hold a vector.
        unsafe {
            let (even, odd) = (NeonBf16::load(even.as_ptr()), NeonBf16::load(odd.as_ptr()));
            NeonBf16::store(out[0].as_mut_ptr().cast(), NeonBf16::round_pair(even, odd));
            NeonBf16::store(out[1].as_mut_ptr().cast(), NeonBf16::lost_pair(even, odd));
        }
        out
    }

    fn split(pair: u32) -> [f32; 2] {
        [pair << 16, pair & 0xffff_0000].map(f32::from_bits)
    }

    #[test]
    fn dots_of_pairs_are_bit_for_bit_those_of_the_model() {
        if let Some(lacks) = Isa::NeonBf16.lacks() {
            eprintln!("UNAVAILABLE: products of bfloat16 pairs; this machine lacks {lacks}");
            return;
        }
        let mut rng = Rng::new(7);
        for round in 0..10_000 {
            let mut next = || [(); 4].map(|()| some_bits(&mut rng, round));
            let (a, b, c) = (next(), next(), next().map(f32::from_bits));
            let mut sum = c;
            // SAFETY: the instruction set is available.
            unsafe { dot_of(&a, &b, &mut sum) };
            for lane in 0..4 {
                let (got, want) = (sum[lane], bfdot(a[lane], b[lane], c[lane]));
                assert!(
                    is_same(got, want),
                    "{:x} · {:x} + {:e}: {got:e}, not {want:e}",
                    a[lane],
                    b[lane],
                    c[lane]
                );
            }
        }
    }

    #[test]
    fn weights_in_pairs_and_what_rounding_took_add_up() {
        if let Some(lacks) = Isa::NeonBf16.lacks() {
            eprintln!("UNAVAILABLE: products of bfloat16 pairs; this machine lacks {lacks}");
            return;
        }
        let mut rng = Rng::new(3);
        for _ in 0..2_000 {
            let mut weights =
                || [(); 4].map(|()| f32::from_bits(0x3300_0000 + rng.below(0x0c80_0000) as u32));
            let (even, odd) = (weights(), weights());
            // SAFETY: the instruction set is available.
            let [pairs, rest] = unsafe { packed(&even, &odd) };
            for lane in 0..4 {
                for (part, weight) in [even[lane], odd[lane]].into_iter().enumerate() {
                    let rounded = split(pairs[lane])[part];
                    assert_eq!(rounded, bf16::from_f32(weight).to_f32());
                    let sum = rounded + split(rest[lane])[part];
                    assert!((sum - weight).abs() <= weight * 2f32.powi(-16), "{weight:e}, {sum:e}");
                }
            }
        }
    }
}
