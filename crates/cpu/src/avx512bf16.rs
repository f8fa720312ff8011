//! AVX-512 with multiply-adds of bfloat16 pairs: everything of [`Avx512`], and `vdpbf16ps` for QKᵀ and PV.
//!
//! The instruction multiplies two bfloat16 exactly, adds to an f32 with rounding to nearest even, the second element of a pair first, and takes
//! subnormal inputs and results as zero: below 2^-126, far under what any output type shows.

use crate::avx512::Avx512;
use crate::decode::{DecodeScores, DecodeValues};
use crate::decode_bf16;
use crate::element::Element;
use crate::kernels::{Kernels, kernels_of};
use crate::pack::Rows;
use crate::pairs::{copy_rows, load_row, pair_rows, pair_tiles, transpose_pairs};
use crate::simd::{Simd, simd_of};
use crate::tile::{self, Gemm, TileStep, Weighed};
use evosdpa_core::{DType, E4M3Code, I8Code, U8Code};
use half::bf16;
use std::arch::x86_64::*;
use std::mem::transmute;

/// Marker for AVX-512 with AVX512-BF16, for queries of bfloat16, and keys and values that are too or are 8-bit codes.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16;

impl Simd for Avx512Bf16 {
    type V = __m512;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const PACKED: usize = 2;

    simd_of!(Avx512);

    #[inline(always)]
    unsafe fn dot(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: trait contract; lanes of pairs are bits, whatever their type says.
        unsafe { _mm512_dpbf16_ps(c, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b)) }
    }
    #[inline(always)]
    unsafe fn round_pair(even: __m512, odd: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe { pair(even, odd) }
    }
    #[inline(always)]
    unsafe fn lost_pair(even: __m512, odd: __m512) -> __m512 {
        // SAFETY: trait contract.
        unsafe {
            let pairs = pair(even, odd);
            let (first, second) = (Self::part_bf16(pairs, 0), Self::part_bf16(pairs, 1));
            pair(_mm512_sub_ps(even, first), _mm512_sub_ps(odd, second))
        }
    }
}

/// Two vectors rounded to nearest even, the first in the low halves.
///
/// # Safety
/// AVX512-BF16.
#[inline(always)]
unsafe fn pair(even: __m512, odd: __m512) -> __m512 {
    // SAFETY: by contract. The conversion lays one vector behind the other.
    unsafe {
        let apart = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
        let order = _mm512_loadu_si512(INTERLEAVED.as_ptr().cast());
        _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, apart))
    }
}

/// Each element of the first half before its partner in the second.
const INTERLEAVED: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[i] = (i / 2 + i % 2 * 16) as u16;
        i += 1;
    }
    order
};

impl Gemm for Avx512Bf16 {}

impl Kernels for Avx512Bf16 {
    type Few = Self;
    const LANES: usize = <Avx512 as Kernels>::LANES;
    const STEP: usize = <Avx512 as Kernels>::STEP;
    const VECTORS: usize = <Avx512 as Kernels>::VECTORS;
    const PACKED: usize = <Self as Simd>::PACKED;

    pair_tiles!(transpose_pairs::<Self>, #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]);

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn pack_rows(dtype: DType, a: &Rows) {
        // SAFETY: trait contract.
        unsafe {
            match dtype {
                DType::E4M3 => round_rows::<E4M3Code>(a),
                DType::I8 => round_rows::<I8Code>(a),
                DType::U8 => round_rows::<U8Code>(a),
                _ => copy_rows::<Self>(a),
            }
        }
    }
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn pack_values(dtype: DType, checked: bool, a: &Rows) -> bool {
        // SAFETY: trait contract.
        unsafe {
            match dtype {
                DType::E4M3 => pair_rows::<Self, E4M3Code>(checked, a),
                DType::I8 => pair_rows::<Self, I8Code>(checked, a),
                DType::U8 => pair_rows::<Self, U8Code>(checked, a),
                _ => pair_rows::<Self, bf16>(checked, a),
            }
        }
    }
    unsafe fn decode_scores(dtype: DType, rows: usize, a: &DecodeScores) {
        // SAFETY: trait contract; codes come only where VBMI is.
        unsafe {
            match dtype {
                DType::E4M3 => e4m3_scores(rows, a),
                DType::I8 => i8_scores(rows, a),
                DType::U8 => u8_scores(rows, a),
                _ => bf16_scores(rows, a),
            }
        }
    }
    unsafe fn decode_values(dtype: DType, rows: usize, a: &DecodeValues) {
        // SAFETY: trait contract; codes come only where VBMI is.
        unsafe {
            match dtype {
                DType::E4M3 => e4m3_values(rows, a),
                DType::I8 => i8_values(rows, a),
                DType::U8 => u8_values(rows, a),
                _ => bf16_values(rows, a),
            }
        }
    }

    kernels_of!(Avx512);
}

/// The decode kernels for what keys and values are stored as, compiled with a lookup's instruction set where it needs one.
macro_rules! decode_kernels {
    ($features:literal, $element:ty, $scores:ident, $values:ident) => {
        #[target_feature(enable = $features)]
        unsafe fn $scores(rows: usize, a: &DecodeScores) {
            // SAFETY: contract of `Kernels`.
            unsafe {
                match rows {
                    1 => decode_bf16::scores::<$element, 1>(a),
                    2 => decode_bf16::scores::<$element, 2>(a),
                    _ => decode_bf16::scores::<$element, 4>(a),
                }
            }
        }
        #[target_feature(enable = $features)]
        unsafe fn $values(rows: usize, a: &DecodeValues) {
            // SAFETY: contract of `Kernels`.
            unsafe {
                match rows {
                    1 => decode_bf16::values::<$element, 1>(a),
                    2 => decode_bf16::values::<$element, 2>(a),
                    _ => decode_bf16::values::<$element, 4>(a),
                }
            }
        }
    };
}

decode_kernels!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16",
    bf16,
    bf16_scores,
    bf16_values
);
decode_kernels!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi",
    I8Code,
    i8_scores,
    i8_values
);
decode_kernels!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi",
    U8Code,
    u8_scores,
    u8_values
);
decode_kernels!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi",
    E4M3Code,
    e4m3_scores,
    e4m3_values
);

/// [`pairs::copy_rows`] for elements whose values bfloat16 holds exactly.
///
/// # Safety
/// As [`Kernels::pack_rows`].
#[inline(always)]
unsafe fn round_rows<E: Element>(a: &Rows) {
    let tensor = a.src.cast::<E>();
    let lanes = <Avx512Bf16 as Simd>::LANES;
    for row in 0..a.rows {
        // SAFETY: as `pairs::copy_rows`.
        unsafe {
            let (src, dst) = (tensor.add(row * a.src_stride), a.dst.add(row * a.dst_stride));
            for column in (0..a.columns).step_by(2 * lanes) {
                let first = load_row::<Avx512Bf16, E>(src, column, a.columns);
                let second = load_row::<Avx512Bf16, E>(src, column + lanes, a.columns);
                let rounded = transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first));
                Avx512Bf16::store(dst.add(column / 2), rounded);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// One lane as the instruction is documented: the second element first, each sum rounded to nearest even, subnormal numbers as zero.
    fn model(a: [bf16; 2], b: [bf16; 2], c: f32) -> f32 {
        let flush = |x: f32| if x.is_subnormal() { 0.0f32.copysign(x) } else { x };
        let term = |i: usize| (flush(a[i].to_f32()), flush(b[i].to_f32()));
        [1, 0].into_iter().fold(flush(c), |sum, i| flush(term(i).0.mul_add(term(i).1, sum)))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn dot_of(a: &[u32; 16], b: &[u32; 16], c: &mut [f32; 16]) {
        // SAFETY: the features are enabled here; arrays hold a vector.
        unsafe {
            let (x, y) = (Avx512Bf16::load(a.as_ptr().cast()), Avx512Bf16::load(b.as_ptr().cast()));
            Avx512Bf16::store(c.as_mut_ptr(), Avx512Bf16::dot(x, y, Avx512Bf16::load(c.as_ptr())));
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn packed(even: &[f32; 16], odd: &[f32; 16]) -> [[u32; 16]; 2] {
        let mut out = [[0u32; 16]; 2];
        // SAFETY: the features are enabled here; arrays hold a vector.
        unsafe {
            let (even, odd) = (Avx512Bf16::load(even.as_ptr()), Avx512Bf16::load(odd.as_ptr()));
            Avx512Bf16::store(out[0].as_mut_ptr().cast(), Avx512Bf16::round_pair(even, odd));
            Avx512Bf16::store(out[1].as_mut_ptr().cast(), Avx512Bf16::lost_pair(even, odd));
        }
        out
    }

    /// A sequence of bit patterns that visits all exponents.
    fn patterns(seed: u64) -> impl FnMut() -> u32 {
        let mut rng = evosdpa_oracle::rng::Rng::new(seed);
        move || rng.below(1 << 32) as u32
    }

    fn split(pairs: u32) -> [bf16; 2] {
        [bf16::from_bits(pairs as u16), bf16::from_bits((pairs >> 16) as u16)]
    }

    #[test]
    fn dots_of_pairs_are_bit_for_bit_those_of_the_model() {
        if !Isa::Avx512Bf16.is_available() {
            eprintln!("UNAVAILABLE: this machine has no AVX512-BF16");
            return;
        }
        let mut next = patterns(7);
        for round in 0..20_000 {
            // Half of the rounds at sizes where sums cancel, half anywhere at all.
            let near = |bits: u32| if round % 2 == 0 { (bits & 0x83ff_83ff) | 0x3c00_3c00 } else { bits };
            let (a, b) = ([(); 16].map(|()| near(next())), [(); 16].map(|()| near(next())));
            let c = [(); 16].map(|()| f32::from_bits(near(next())));
            let mut sum = c;
            // SAFETY: the instruction set is available.
            unsafe { dot_of(&a, &b, &mut sum) };
            for lane in 0..16 {
                let want = model(split(a[lane]), split(b[lane]), c[lane]);
                let got = sum[lane];
                let same = want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan();
                assert!(
                    same,
                    "{:x} · {:x} + {:x}: {got:e}, not {want:e}",
                    a[lane],
                    b[lane],
                    c[lane].to_bits()
                );
            }
        }
    }

    #[test]
    fn weights_in_pairs_and_what_rounding_took_add_up() {
        if !Isa::Avx512Bf16.is_available() {
            eprintln!("UNAVAILABLE: this machine has no AVX512-BF16");
            return;
        }
        let mut next = patterns(3);
        for _ in 0..2_000 {
            let mut weights = || [(); 16].map(|()| f32::from_bits(0x3300_0000 + next() % 0x0c80_0000));
            let (even, odd) = (weights(), weights());
            // SAFETY: the instruction set is available.
            let [pairs, rest] = unsafe { packed(&even, &odd) };
            for lane in 0..16 {
                for (part, weight) in [even[lane], odd[lane]].into_iter().enumerate() {
                    let rounded = split(pairs[lane])[part];
                    assert_eq!(rounded, bf16::from_f32(weight));
                    let sum = rounded.to_f32() + split(rest[lane])[part].to_f32();
                    assert!((sum - weight).abs() <= weight * 2f32.powi(-16), "{weight:e}, {sum:e}");
                }
            }
        }
    }
}
