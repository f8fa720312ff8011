//! The vector operations a kernel is written in, and the exponential built from them.

/// Degree-6 minimax polynomial of 2^f on [-1/2, 1/2] with the constant term held at exactly 1, so that the
/// weight of the maximal score is exactly 1. Lowest degree first; relative error 2e-9, below one ulp in f32.
pub(crate) const EXP2_COEFFICIENTS: [f32; 7] = [
    1.0,
    // The fit gives this coefficient the f32 nearest to ln 2.
    std::f32::consts::LN_2,
    0.240_226_48,
    0.055_503_324,
    0.009_618_437,
    0.001_339_887_5,
    0.000_153_533_62,
];

/// Adding this to |x| < 2^22 leaves round(x) in the low mantissa bits: 1.5 · 2^23.
pub(crate) const ROUNDING_MAGIC: f32 = 12_582_912.0;

/// Below this exponent 2^x would be subnormal; it is taken as zero, which also spares the slow subnormal path.
pub(crate) const EXP2_UNDERFLOW: f32 = -126.0;

/// One instruction set's f32 vector and what kernels do with it.
///
/// # Safety
/// Every function requires that the instruction set is available on this machine, and that pointers are valid
/// for `LANES` elements (blocks: `LANES` rows of `LANES` elements). No alignment is required.
/// All are `inline(always)`: they only ever run inside a function compiled for the instruction set.
pub(crate) trait Simd: Copy + 'static {
    /// A vector of `LANES` f32.
    type V: Copy;
    /// Elements in a vector, at most [`MAX_LANES`].
    const LANES: usize;
    /// Vector registers.
    const REGISTERS: usize;

    /// How many elements of the inner dimension share a lane of the two GEMMs: 1, or 2 where operands are pairs of bfloat16 (the
    /// first in the low half) and [`Simd::dot`] adds both products.
    const PACKED: usize = 1;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Widens `LANES` half-precision values.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// Widens `LANES` bfloat16 values.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// `LANES` u8 codes less 128.
    unsafe fn load_u8(p: *const u8) -> Self::V;
    /// `LANES` i8 codes.
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// `LANES` e4m3 codes, their values divided by 256; NaN stays NaN.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    /// Widens the bfloat16 in the low (`part` 0) or high half of each lane's bits.
    unsafe fn part_bf16(words: Self::V, part: usize) -> Self::V;
    /// Widens the half-precision value in the low (`part` 0) or high half of each lane's bits.
    unsafe fn part_f16(words: Self::V, part: usize) -> Self::V;
    /// `a` where bit `bit` of a lane's bits is set, else `b`.
    unsafe fn select_bit(words: Self::V, bit: usize, a: Self::V, b: Self::V) -> Self::V;
    /// A bit for each of 64 bytes, the lowest for the first, set where the byte is not zero.
    #[inline(always)]
    unsafe fn nonzero_bytes(p: *const u8) -> u64 {
        // SAFETY: valid for 64 bytes by contract.
        (0..64).fold(0, |bits, i| bits | u64::from(unsafe { *p.add(i) } != 0) << i)
    }
    /// Rounds to nearest even; NaN stays NaN.
    unsafe fn store_f16(p: *mut u16, v: Self::V);
    /// Rounds to nearest even; NaN stays NaN.
    unsafe fn store_bf16(p: *mut u16, v: Self::V);

    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the instruction set fuses.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The multiply-add of the two GEMMs: adds to `c` the products of all `PACKED` elements of each lane.
    #[inline(always)]
    unsafe fn dot(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: same contract.
        unsafe { Self::fma(a, b, c) }
    }
    /// Rounds two rows to the pairs of one packed row. Only where `PACKED` is 2.
    #[inline(always)]
    unsafe fn round_pair(even: Self::V, _odd: Self::V) -> Self::V {
        even
    }
    /// What that rounding takes from two rows, as the pairs of another. Only where `PACKED` is 2.
    #[inline(always)]
    unsafe fn lost_pair(even: Self::V, _odd: Self::V) -> Self::V {
        even
    }
    /// The larger of two; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of two; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// What is left of x when it is rounded, between -1/2 and 1/2, and what [`Simd::exp2_join`] takes as the rounded one. Not for x above 127.
    unsafe fn exp2_split(x: Self::V) -> (Self::V, Self::V);
    /// 2^x from 2^f and the rest of what x was split into; 0 below 2^-126 (so for -inf), NaN for NaN.
    unsafe fn exp2_join(x: Self::V, power: Self::V, rounded: Self::V) -> Self::V;
    /// 2^x to within an ulp; 0 below 2^-126 (so for -inf), NaN for NaN. Not for x above 127.
    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        // SAFETY: same contract.
        unsafe { exp2_each::<Self, 1, 1>([[x]])[0][0] }
    }
    unsafe fn abs(x: Self::V) -> Self::V;
    /// Whether any lane of `x` is above that of `limit`, or one of them is NaN.
    unsafe fn exceeds(x: Self::V, limit: Self::V) -> bool;
    /// `a` where `x` is above `limit`, else `b`.
    unsafe fn select_above(x: Self::V, limit: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// `inside` where `lo <= index <= hi`, else `outside`.
    unsafe fn select_between(index: Self::V, lo: f32, hi: f32, inside: Self::V, outside: Self::V) -> Self::V;

    /// Asks for the cache line at `p`, which may be anywhere, to be brought into the L2.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
    /// The same for the first-level cache.
    #[inline(always)]
    unsafe fn prefetch_near(_p: *const u8) {}

    /// Transposes a `LANES`×`LANES` block; strides in elements.
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        let mut rows = [src; MAX_LANES];
        for (i, row) in rows.iter_mut().enumerate().take(Self::LANES) {
            *row = src.wrapping_add(i * src_stride);
        }
        // SAFETY: same contract.
        unsafe { Self::transpose_rows(&rows, dst, dst_stride) }
    }
    /// The same of rows anywhere, the first `LANES` of those named.
    unsafe fn transpose_rows(rows: &[*const f32; MAX_LANES], dst: *mut f32, dst_stride: usize);
}

/// [`Simd::exp2`] of several rows of vectors, step by step: each is a chain of a dozen instructions that wait for one another, so that one chain behind
/// the other leaves the processor looking for work.
///
/// # Safety
/// The instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn exp2_each<S: Simd, const N: usize, const ROWS: usize>(
    x: [[S::V; N]; ROWS],
) -> [[S::V; N]; ROWS] {
    // SAFETY: by contract.
    unsafe {
        let (mut f, mut rounded, mut p) = (x, x, x);
        for r in 0..ROWS {
            for i in 0..N {
                (f[r][i], rounded[r][i]) = S::exp2_split(x[r][i]);
                p[r][i] = S::splat(EXP2_COEFFICIENTS[6]);
            }
        }
        for degree in (0..6).rev() {
            for r in 0..ROWS {
                for i in 0..N {
                    p[r][i] = S::fma(p[r][i], f[r][i], S::splat(EXP2_COEFFICIENTS[degree]));
                }
            }
        }
        for r in 0..ROWS {
            for i in 0..N {
                p[r][i] = S::exp2_join(x[r][i], p[r][i], rounded[r][i]);
            }
        }
        p
    }
}

/// Those functions of [`Simd`] that are the same for pairs of bfloat16 as for f32, whose vectors they have: `$of`'s.
macro_rules! simd_of {
    ($of:ty) => {
        $crate::simd::simd_of! { $of;
            splat(x: f32) -> Self::V;
            load(p: *const f32) -> Self::V;
            store(p: *mut f32, v: Self::V);
            load_f16(p: *const u16) -> Self::V;
            load_bf16(p: *const u16) -> Self::V;
            load_u8(p: *const u8) -> Self::V;
            load_i8(p: *const i8) -> Self::V;
            load_e4m3(p: *const u8) -> Self::V;
            part_bf16(words: Self::V, part: usize) -> Self::V;
            part_f16(words: Self::V, part: usize) -> Self::V;
            select_bit(words: Self::V, bit: usize, a: Self::V, b: Self::V) -> Self::V;
            nonzero_bytes(p: *const u8) -> u64;
            store_f16(p: *mut u16, v: Self::V);
            store_bf16(p: *mut u16, v: Self::V);
            add(a: Self::V, b: Self::V) -> Self::V;
            sub(a: Self::V, b: Self::V) -> Self::V;
            mul(a: Self::V, b: Self::V) -> Self::V;
            div(a: Self::V, b: Self::V) -> Self::V;
            fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
            max(a: Self::V, b: Self::V) -> Self::V;
            min(a: Self::V, b: Self::V) -> Self::V;
            exp2_split(x: Self::V) -> (Self::V, Self::V);
            exp2_join(x: Self::V, power: Self::V, rounded: Self::V) -> Self::V;
            abs(x: Self::V) -> Self::V;
            exceeds(x: Self::V, limit: Self::V) -> bool;
            select_above(x: Self::V, limit: Self::V, a: Self::V, b: Self::V) -> Self::V;
            select_between(index: Self::V, lo: f32, hi: f32, inside: Self::V, outside: Self::V) -> Self::V;
            prefetch(p: *const u8);
            prefetch_near(p: *const u8);
            transpose_rows(rows: &[*const f32; $crate::simd::MAX_LANES], dst: *mut f32, dst_stride: usize);
        }
    };
    ($of:ty; $($name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)?;)*) => {
        $(
            #[inline(always)]
            unsafe fn $name($($argument: $kind),*) $(-> $result)? {
                // SAFETY: trait contract.
                unsafe { <$of as Simd>::$name($($argument),*) }
            }
        )*
    };
}
pub(crate) use simd_of;

/// The widest vector of any instruction set here.
pub(crate) const MAX_LANES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portable::Portable;

    /// Calls `S::exp2` on many values; compiled for the instruction set through inlining into the callers below.
    #[inline(always)]
    unsafe fn exp2_all<S: Simd>(xs: &mut [f32]) {
        for chunk in xs.chunks_exact_mut(S::LANES) {
            // SAFETY: a chunk holds a vector; the caller has the instruction set.
            unsafe { S::store(chunk.as_mut_ptr(), S::exp2(S::load(chunk.as_ptr()))) };
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn exp2_avx2(xs: &mut [f32]) {
        // SAFETY: the features are enabled here.
        unsafe { exp2_all::<crate::avx2::Avx2>(xs) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn exp2_avx512(xs: &mut [f32]) {
        // SAFETY: the features are enabled here.
        unsafe { exp2_all::<crate::avx512::Avx512>(xs) }
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    unsafe fn exp2_neon(xs: &mut [f32]) {
        // SAFETY: the features are enabled here.
        unsafe { exp2_all::<crate::neon::Neon>(xs) }
    }

    fn exp2_of(isa: crate::Isa, xs: &[f32]) -> Vec<f32> {
        let mut ys = xs.to_vec();
        ys.resize(xs.len().next_multiple_of(MAX_LANES), 0.0);
        // SAFETY: only instruction sets of this machine are asked for.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                crate::Isa::Avx512 | crate::Isa::Avx512Bf16 | crate::Isa::Amx => exp2_avx512(&mut ys),
                #[cfg(target_arch = "x86_64")]
                crate::Isa::Avx2 => exp2_avx2(&mut ys),
                #[cfg(target_arch = "aarch64")]
                crate::Isa::Neon | crate::Isa::NeonBf16 | crate::Isa::NeonMmla => exp2_neon(&mut ys),
                _ => exp2_all::<Portable>(&mut ys),
            }
        }
        ys.truncate(xs.len());
        ys
    }

    #[test]
    fn exp2_is_within_two_ulp_and_right_at_the_ends() {
        let xs: Vec<f32> = (0..400_000).map(|i| -(i as f32) * 126.0 / 400_000.0).collect();
        for isa in crate::Isa::available() {
            let mut worst = 0.0f64;
            for (x, y) in xs.iter().zip(exp2_of(isa, &xs)) {
                let want = f64::from(*x).exp2();
                let ulp = f64::from(f32::EPSILON) * f64::from(*x).floor().exp2();
                worst = worst.max((f64::from(y) - want).abs() / ulp);
            }
            assert!(worst <= 2.0, "{isa}: {worst} ulp");
            let ends =
                exp2_of(isa, &[0.0, -1.0, -126.0, -126.5, -1e30, f32::MIN, f32::NEG_INFINITY, f32::NAN]);
            assert_eq!(ends[..7], [1.0, 0.5, f32::MIN_POSITIVE, 0.0, 0.0, 0.0, 0.0], "{isa}");
            assert!(ends[7].is_nan(), "{isa}");
        }
    }
}
