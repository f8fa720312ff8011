//! AVX-512 with products of bfloat16 pairs: everything of [`Avx512`], and `vdpbf16ps` for QKᵀ and PV.
//!
//! The instruction multiplies two bfloat16 exactly, adds to an f32 with rounding to nearest even, the second element of a pair first, and takes
//! subnormal inputs and results as zero: below 2^-126, far under what any output type shows.

use crate::avx512::Avx512;
use crate::decode::{DecodeScores, DecodeValues};
use crate::decode_bf16;
use crate::dense::{DenseRows, Shown};
use crate::element::Element;
use crate::hook::{RowHook, TileHook};
use crate::kernels::Kernels;
use crate::pack::Rows;
use crate::simd::{MAX_LANES, Simd};
use crate::tile::{self, TileStep, Weighed};
use evosdpa_core::{DType, E4M3Code, Float};
use half::bf16;
use std::arch::x86_64::*;
use std::mem::transmute;

/// Marker for AVX-512 with AVX512-BF16, for queries of bfloat16, and keys and values that are too or are e4m3 codes.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16;

/// Functions that are those of [`Avx512`].
macro_rules! as_avx512 {
    ($($name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)?;)*) => {
        $(
            #[inline(always)]
            unsafe fn $name($($argument: $kind),*) $(-> $result)? {
                // SAFETY: trait contract.
                unsafe { <Avx512 as Simd>::$name($($argument),*) }
            }
        )*
    };
}

impl Simd for Avx512Bf16 {
    type V = __m512;
    const LANES: usize = 16;
    const PACKED: usize = 2;

    as_avx512! {
        splat(x: f32) -> __m512;
        load(p: *const f32) -> __m512;
        store(p: *mut f32, v: __m512);
        load_f16(p: *const u16) -> __m512;
        load_bf16(p: *const u16) -> __m512;
        load_u8(p: *const u8) -> __m512;
        load_e4m3(p: *const u8) -> __m512;
        part_bf16(words: __m512, part: usize) -> __m512;
        part_f16(words: __m512, part: usize) -> __m512;
        select_byte(words: __m512, part: usize, a: __m512, b: __m512) -> __m512;
        store_f16(p: *mut u16, v: __m512);
        store_bf16(p: *mut u16, v: __m512);
        add(a: __m512, b: __m512) -> __m512;
        sub(a: __m512, b: __m512) -> __m512;
        mul(a: __m512, b: __m512) -> __m512;
        div(a: __m512, b: __m512) -> __m512;
        fma(a: __m512, b: __m512, c: __m512) -> __m512;
        max(a: __m512, b: __m512) -> __m512;
        min(a: __m512, b: __m512) -> __m512;
        exp2(x: __m512) -> __m512;
        abs(x: __m512) -> __m512;
        exceeds(x: __m512, limit: __m512) -> bool;
        select_above(x: __m512, limit: __m512, a: __m512, b: __m512) -> __m512;
        select_between(index: __m512, lo: f32, hi: f32, inside: __m512, outside: __m512) -> __m512;
        prefetch(p: *const u8);
        prefetch_near(p: *const u8);
        transpose_rows(rows: &[*const f32; MAX_LANES], dst: *mut f32, dst_stride: usize);
    }

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
            let [first, second] = Self::halves(pair(even, odd));
            let first = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(first)));
            pair(_mm512_sub_ps(even, first), _mm512_sub_ps(odd, second))
        }
    }
    #[inline(always)]
    unsafe fn halves(pairs: __m512) -> [__m512; 2] {
        // SAFETY: trait contract.
        unsafe {
            let bits = _mm512_castps_si512(pairs);
            let half =
                |mask: u32| _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(mask as i32)));
            [half(0x0000_ffff), half(0xffff_0000)]
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

/// Functions that are those of [`Avx512`].
macro_rules! kernels_of_avx512 {
    ($($name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        $(
            unsafe fn $name($($argument: $kind),*) $(-> $result)? {
                // SAFETY: trait contract.
                unsafe { <Avx512 as Kernels>::$name($($argument),*) }
            }
        )*
    };
}

impl Kernels for Avx512Bf16 {
    const LANES: usize = <Avx512 as Kernels>::LANES;
    const STEP: usize = <Avx512 as Kernels>::STEP;
    const VECTORS: usize = <Avx512 as Kernels>::VECTORS;
    const PACKED: usize = <Self as Simd>::PACKED;

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn scores(vectors: usize, t: &TileStep) {
        // SAFETY: trait contract.
        unsafe {
            match vectors {
                1 => tile::scores::<Self, 8, 8, 1>(t),
                2 => tile::scores::<Self, 8, 8, 2>(t),
                _ => tile::scores::<Self, 8, 8, 3>(t),
            }
        }
    }
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn softmax(vectors: usize, t: &TileStep) -> Weighed {
        // SAFETY: trait contract.
        unsafe {
            match vectors {
                1 => tile::softmax::<Self, 1>(t),
                2 => tile::softmax::<Self, 2>(t),
                _ => tile::softmax::<Self, 3>(t),
            }
        }
    }
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn values(vectors: usize, exact: bool, t: &TileStep) {
        // SAFETY: trait contract.
        unsafe {
            match (vectors, exact) {
                (1, false) => tile::values::<Self, 8, 8, 1, false>(t),
                (2, false) => tile::values::<Self, 8, 8, 2, false>(t),
                (_, false) => tile::values::<Self, 8, 8, 3, false>(t),
                (1, true) => tile::values::<Self, 8, 8, 1, true>(t),
                (2, true) => tile::values::<Self, 8, 8, 2, true>(t),
                (_, true) => tile::values::<Self, 8, 8, 3, true>(t),
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn pack_rows(dtype: DType, a: &Rows) {
        // SAFETY: trait contract.
        unsafe { if dtype == DType::BF16 { copy_rows(a) } else { round_rows::<E4M3Code>(a) } }
    }
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn pack_values(dtype: DType, checked: bool, a: &Rows) -> bool {
        // SAFETY: trait contract.
        unsafe {
            if dtype == DType::BF16 {
                pair_rows::<bf16>(checked, a)
            } else {
                pair_rows::<E4M3Code>(checked, a)
            }
        }
    }
    /// Pairs are only moved: the scale is left for the scores.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn transpose_queries(
        rows: *const f32,
        row_stride: usize,
        columns: usize,
        _scale: f32,
        tile: *mut f32,
        tile_stride: usize,
    ) {
        for column in (0..columns.div_ceil(<Self as Simd>::PACKED)).step_by(<Self as Simd>::LANES) {
            // SAFETY: trait contract.
            unsafe {
                Self::transpose(rows.add(column), row_stride, tile.add(column * tile_stride), tile_stride)
            };
        }
    }

    unsafe fn decode_scores(dtype: DType, rows: usize, a: &DecodeScores) {
        // SAFETY: trait contract; codes come only where [`reads_codes`].
        unsafe { if dtype == DType::BF16 { bf16_scores(rows, a) } else { e4m3_scores(rows, a) } }
    }
    unsafe fn decode_values(dtype: DType, rows: usize, a: &DecodeValues) {
        // SAFETY: trait contract; codes come only where [`reads_codes`].
        unsafe { if dtype == DType::BF16 { bf16_values(rows, a) } else { e4m3_values(rows, a) } }
    }

    kernels_of_avx512! {
        modify(vectors: usize, t: &TileStep, hook: &TileHook);
        start_alibi(vectors: usize, t: &TileStep, hook: &TileHook);
        start_bias(dtype: DType, vectors: usize, t: &TileStep, a: &DenseRows);
        start_limits(vectors: usize, t: &TileStep, a: &DenseRows);
        add_bias(dtype: DType, vectors: usize, t: &TileStep, a: &DenseRows);
        hide(vectors: usize, t: &TileStep, a: &DenseRows);
        mark_hidden(vectors: usize, t: &TileStep, hidden: *mut f32, mask: &DenseRows);
        scan(rows: *const *const u8, lanes: usize, first: usize, keys: usize) -> Shown;
        modify_row(scores: *mut f32, keys: usize, hook: &RowHook);
        widen_rows(dtype: DType, a: &Rows);
        widen_rows_checked(dtype: DType, a: &Rows) -> bool;
        scale_rows(data: *mut f32, stride: usize, rows: usize, columns: usize, scales: *const f32) -> bool;
        narrow_row(float: Float, src: *const f32, dst: *mut u8, columns: usize);
        transpose_outputs(
            tile: *mut f32,
            tile_stride: usize,
            columns: usize,
            factors: *const f32,
            rows: *mut f32,
            row_stride: usize,
        );
        decode_softmax(scores: *mut f32, keys: usize, old_max: f32) -> (f32, f32, f32);
    }
}

/// Whether keys and values of this machine can be e4m3 codes: their lookup needs VBMI.
pub(crate) fn reads_codes() -> bool {
    is_x86_feature_detected!("avx512vbmi")
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
    E4M3Code,
    e4m3_scores,
    e4m3_values
);

/// Rows of bfloat16 are rows of pairs; they are filled with zeros up to a whole vector.
///
/// # Safety
/// As [`Kernels::pack_rows`].
unsafe fn copy_rows(a: &Rows) {
    let filled = a.columns.next_multiple_of(2 * <Avx512Bf16 as Simd>::LANES);
    for row in 0..a.rows {
        // SAFETY: a source row has `columns` elements; as many f32 rounded up to a vector hold `filled` of half the size.
        unsafe {
            let src = a.src.cast::<u16>().add(row * a.src_stride);
            let dst = a.dst.add(row * a.dst_stride).cast::<u16>();
            src.copy_to_nonoverlapping(dst, a.columns);
            dst.add(a.columns).write_bytes(0, filled - a.columns);
        }
    }
}

/// The same for elements whose values bfloat16 holds exactly.
///
/// # Safety
/// As [`Kernels::pack_rows`].
#[inline(always)]
unsafe fn round_rows<E: Element>(a: &Rows) {
    let tensor = a.src.cast::<E>();
    let lanes = <Avx512Bf16 as Simd>::LANES;
    for row in 0..a.rows {
        // SAFETY: as `copy_rows`.
        unsafe {
            let (src, dst) = (tensor.add(row * a.src_stride), a.dst.add(row * a.dst_stride));
            for column in (0..a.columns).step_by(2 * lanes) {
                let first = load_row(src, column, a.columns);
                let second = load_row(src, column + lanes, a.columns);
                let rounded = transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first));
                Avx512Bf16::store(dst.add(column / 2), rounded);
            }
        }
    }
}

/// Rows of neighbouring keys become rows of pairs. Says whether all are finite, when `checked`.
///
/// # Safety
/// As [`Kernels::pack_values`].
#[inline(always)]
unsafe fn pair_rows<E: Element>(checked: bool, a: &Rows) -> bool {
    let tensor = a.src.cast::<E>();
    // SAFETY: by contract; the last of an odd number of rows is paired with zeros.
    unsafe {
        let zero = Avx512Bf16::splat(0.0);
        let mut taint = zero;
        for first in (0..a.rows).step_by(2) {
            let dst = a.dst.add(first / 2 * a.dst_stride);
            for column in (0..a.columns).step_by(<Avx512Bf16 as Simd>::LANES) {
                let even = load_row(tensor.add(first * a.src_stride), column, a.columns);
                let mut odd = zero;
                if first + 1 < a.rows {
                    odd = load_row(tensor.add((first + 1) * a.src_stride), column, a.columns);
                }
                Avx512Bf16::store(dst.add(column), pair(even, odd));
                if checked {
                    // 0·x is NaN exactly when x is not finite.
                    taint = Avx512Bf16::fma(odd, zero, Avx512Bf16::fma(even, zero, taint));
                }
            }
        }
        let mut lanes = [0.0f32; MAX_LANES];
        Avx512Bf16::store(lanes.as_mut_ptr(), taint);
        lanes.iter().all(|x| *x == 0.0)
    }
}

/// A vector of a row from `column` on, zero beyond its `columns`.
///
/// # Safety
/// AVX-512; the row has `columns` elements.
#[inline(always)]
unsafe fn load_row<E: Element>(row: *const E, column: usize, columns: usize) -> __m512 {
    let left = columns.saturating_sub(column);
    // SAFETY: by contract.
    unsafe {
        if left >= <Avx512Bf16 as Simd>::LANES {
            E::load::<Avx512Bf16>(row.add(column))
        } else if left > 0 {
            E::load_first::<Avx512Bf16>(row.add(column), left)
        } else {
            Avx512Bf16::splat(0.0)
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
