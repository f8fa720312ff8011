//! Normal and uniform numbers, a row at a time.
//!
//! Only additions, multiplications, divisions, square roots and integer operations, never fused: each machine gives the same
//! bits, whatever the width of its vectors.

use crate::rng::mix;

/// N(0, 1) by Box and Muller's transform: `out[d]` is that of the hash `mix(state ^ d)`.
pub(super) fn normals(state: u64, out: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512dq")]
        fn avx512(state: u64, out: &mut [f64]) {
            normals_body(state, out);
        }
        #[target_feature(enable = "avx2")]
        fn avx2(state: u64, out: &mut [f64]) {
            normals_body(state, out);
        }
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: both features were just found on this machine.
            return unsafe { avx512(state, out) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: just found on this machine.
            return unsafe { avx2(state, out) };
        }
    }
    normals_body(state, out);
}

/// Uniform in [0, 1).
pub(super) fn uniforms(state: u64, out: &mut [f64]) {
    for (d, out) in out.iter_mut().enumerate() {
        *out = (mix(state ^ d as u64) >> 11) as f64 * f64::powi(2.0, -53);
    }
}

#[inline(always)]
fn normals_body(state: u64, out: &mut [f64]) {
    for (d, out) in out.iter_mut().enumerate() {
        let bits = mix(state ^ d as u64);
        // (0, 1], so that the logarithm is finite.
        let radius = (whole(bits >> 32) + 1.0) * TWO_POW_MINUS_32;
        let turn = whole(bits & 0xFFFF_FFFF) * TWO_POW_MINUS_32;
        *out = (-2.0 * ln(radius)).sqrt() * cos_of_turn(turn);
    }
}

const TWO_POW_MINUS_32: f64 = 1.0 / 4_294_967_296.0;

/// A number below 2^52 as f64, by way of the bits of 2^52.
#[inline(always)]
fn whole(x: u64) -> f64 {
    f64::from_bits(0x4330_0000_0000_0000 | x) - 4_503_599_627_370_496.0
}

/// The natural logarithm of a normal positive number, to 1e-15 of its size or of ln 2.
///
/// `x = m·2^e` with `m` between √½ and √2, and `ln m = 2·artanh s` with `s = (m − 1)/(m + 1)`, |s| < 0.172: nine terms of the
/// series leave 2·s·s^18/19 < 1e-15.
#[inline(always)]
fn ln(x: f64) -> f64 {
    /// The bits of √½.
    const HALF_ROOT: u64 = 0x3FE6_A09E_667F_3BCD;
    let shifted = x.to_bits().wrapping_sub(HALF_ROOT);
    let exponent = ((shifted as i64) >> 52) as u64;
    let m = f64::from_bits(x.to_bits().wrapping_sub(exponent << 52));
    // A small signed number as f64, by way of the bits of 1.5·2^52.
    let exponent = f64::from_bits(0x4338_0000_0000_0000_u64.wrapping_add(exponent)) - 6_755_399_441_055_744.0;
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut series = 1.0 / 17.0;
    for n in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        series = series * z + 1.0 / n;
    }
    exponent * std::f64::consts::LN_2 + 2.0 * s * series
}

/// cos(2π·a) for `a` in [0, 1), to 1e-15.
///
/// `cos 2πa = −sin(2π(¼ − |a − ½|))`, whose argument is within ±π/2, where eleven terms of the sine leave less than 1e-17.
#[inline(always)]
fn cos_of_turn(a: f64) -> f64 {
    let x = std::f64::consts::TAU * (0.25 - (a - 0.5).abs());
    let z = x * x;
    let mut series = 1.0;
    // 1/(2k·(2k + 1)) of each term to the one before it.
    for k in [10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0] {
        series = 1.0 - z * series * (1.0 / (2.0 * k * (2.0 * k + 1.0)));
    }
    -x * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_and_cosine_are_libms_to_the_last_digits() {
        for i in 0..200_000_u64 {
            let bits = mix(i) >> 32;
            let radius = (whole(bits) + 1.0) * TWO_POW_MINUS_32;
            let (got, want) = (ln(radius), libm::log(radius));
            assert!((got - want).abs() <= 2e-15 * want.abs().max(0.7), "ln {radius}: {got} is not {want}");
            let turn = whole(bits) * TWO_POW_MINUS_32;
            let (got, want) = (cos_of_turn(turn), libm::cos(std::f64::consts::TAU * turn));
            assert!((got - want).abs() <= 2e-15, "cos {turn}: {got} is not {want}");
        }
        assert_eq!(ln(1.0), 0.0);
    }

    /// The vectors' bits are the plain loop's.
    #[test]
    fn every_width_gives_the_same_bits() {
        let (mut wide, mut plain) = ([0.0; 67], [0.0; 67]);
        for state in 0..50 {
            normals(mix(state), &mut wide);
            normals_body(mix(state), &mut plain);
            assert_eq!(wide.map(f64::to_bits), plain.map(f64::to_bits));
        }
    }
}
