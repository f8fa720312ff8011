//! The `.approx` functions: computed in `f64`, then rounded to the destination.
//!
//! PTX fixes special values and a largest error, not the bits. A program that
//! is right must be right for every result within that error, so a
//! [`Perturb`] can move each result as far as the documentation allows.

use super::compare::{Property, test_property};
use super::float::flush_f32;
use super::format::{BF16, F16, F32, Format, Overflow, Round, pow2};
use super::half::Half;
use crate::random::mix;

/// An approximate function of one `.f32` argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Function {
    /// `ex2`: `2^x`
    Ex2,
    /// `lg2`: `log2 x`
    Lg2,
    /// `rcp`: `1/x`
    Rcp,
    /// `rsqrt`: `1/√x`
    Rsqrt,
    /// `sqrt`: `√x`
    Sqrt,
    /// `sin`
    Sin,
    /// `cos`
    Cos,
    /// `tanh`
    Tanh,
}

impl Function {
    /// Every function.
    pub const ALL: [Function; 8] = [
        Function::Ex2,
        Function::Lg2,
        Function::Rcp,
        Function::Rsqrt,
        Function::Sqrt,
        Function::Sin,
        Function::Cos,
        Function::Tanh,
    ];

    /// The true value, to double precision.
    pub fn exact(self, x: f64) -> f64 {
        match self {
            Function::Ex2 => x.exp2(),
            Function::Lg2 => {
                if x == 0.0 {
                    f64::NEG_INFINITY
                } else {
                    x.log2()
                }
            }
            Function::Rcp => 1.0 / x,
            Function::Rsqrt => {
                if x == 0.0 {
                    f64::INFINITY.copysign(x)
                } else {
                    1.0 / x.sqrt()
                }
            }
            Function::Sqrt => x.sqrt(),
            Function::Sin => x.sin(),
            Function::Cos => x.cos(),
            Function::Tanh => x.tanh(),
        }
    }

    /// The largest error the PTX ISA documents for `.f32` at `x`; `None` where it promises nothing.
    pub fn error_f32(self, x: f64) -> Option<ErrorBound> {
        use std::f64::consts::PI;
        match self {
            Function::Ex2 => Some(ErrorBound::Ulps(2.0)),
            Function::Lg2 if x > 0.5 && x < 2.0 => Some(ErrorBound::Absolute(pow2(-22))),
            Function::Lg2 => Some(ErrorBound::Relative(pow2(-22))),
            Function::Rcp => Some(ErrorBound::Ulps(1.0)),
            Function::Rsqrt => Some(ErrorBound::Relative((-22.9f64).exp2())),
            Function::Sqrt => Some(ErrorBound::Relative(pow2(-23))),
            Function::Sin | Function::Cos if x.abs() <= 2.0 * PI => {
                Some(ErrorBound::Absolute((-20.5f64).exp2()))
            }
            Function::Sin | Function::Cos if x.abs() <= 100.0 * PI => {
                Some(ErrorBound::Absolute((-14.7f64).exp2()))
            }
            Function::Sin | Function::Cos => None,
            Function::Tanh => Some(ErrorBound::Relative(pow2(-11))),
        }
    }

    /// The largest error documented for `.f16` and `.bf16`, which have `ex2` and `tanh` only.
    pub fn error_half(self, half: Half) -> Option<ErrorBound> {
        match (self, half) {
            (Function::Ex2, Half::F16) => Some(ErrorBound::Relative((-9.9f64).exp2())),
            (Function::Ex2, Half::Bf16) => Some(ErrorBound::Relative(pow2(-7))),
            (Function::Tanh, Half::F16) => Some(ErrorBound::Absolute((-10.987f64).exp2())),
            (Function::Tanh, Half::Bf16) => Some(ErrorBound::Absolute(pow2(-8))),
            _ => None,
        }
    }

    /// Whether the documentation fixes the result at `x`.
    fn is_special(self, x: f64) -> bool {
        x == 0.0 || !x.is_finite() || self.exact(x).is_nan()
    }
}

/// How a largest error is stated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ErrorBound {
    /// In units in the last place of the result.
    Ulps(f64),
    /// As a fraction of the true value.
    Relative(f64),
    /// As it is.
    Absolute(f64),
}

impl ErrorBound {
    /// The bound around the true value `y`, for results of `format`.
    pub fn magnitude(self, y: f64, format: &Format) -> f64 {
        match self {
            ErrorBound::Ulps(ulps) => ulps * format.ulp(y),
            ErrorBound::Relative(fraction) => fraction * y.abs(),
            ErrorBound::Absolute(bound) => bound,
        }
    }
}

/// Which of the permitted results is returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Perturb {
    /// The nearest representable value.
    #[default]
    None,
    /// The largest permitted value.
    Up,
    /// The smallest permitted value.
    Down,
    /// The largest or the smallest, by a hash of the seed and the argument.
    Seeded(u64),
}

impl Perturb {
    /// `Some(true)`: up.
    fn direction(self, argument: u64) -> Option<bool> {
        match self {
            Perturb::None => None,
            Perturb::Up => Some(true),
            Perturb::Down => Some(false),
            Perturb::Seeded(seed) => Some(mix(seed ^ mix(argument)) & 1 == 1),
        }
    }
}

/// Rounds the true value `y`, or moves it to the edge of its permitted interval.
fn settle(y: f64, bound: Option<ErrorBound>, direction: Option<bool>, format: &Format) -> u64 {
    let nearest = format.narrow(y, Round::NearestEven, Overflow::Ieee);
    let (Some(bound), Some(up)) = (bound, direction) else { return nearest };
    let error = bound.magnitude(y, format);
    // Inward, so that the representable result stays within the bound; a result
    // at the edge of the range stays finite.
    let (edge, inward) = if up { (y + error, Round::Down) } else { (y - error, Round::Up) };
    let moved = format.narrow(edge, inward, Overflow::Ieee);
    let value = format.widen(moved);
    let changes_kind = !value.is_finite() || (y > 0.0 && value < 0.0) || (y < 0.0 && value > 0.0);
    if changes_kind || (value - y).abs() > error { nearest } else { moved }
}

/// `function.approx{.ftz}.f32`
pub fn approx_f32(function: Function, a: u32, ftz: bool, perturb: Perturb) -> u32 {
    let a = flush_f32(a, ftz);
    let x = f32::from_bits(a) as f64;
    let y = function.exact(x);
    if y.is_nan() {
        return F32.nan as u32;
    }
    // `tanh` hands subnormals through.
    let passes = function == Function::Tanh && test_property(&F32, Property::Subnormal, a as u64);
    let (bound, direction) = if function.is_special(x) || passes {
        (None, None)
    } else {
        (function.error_f32(x), perturb.direction(a as u64))
    };
    flush_f32(settle(y, bound, direction, &F32) as u32, ftz)
}

/// `ex2.approx` and `tanh.approx` of `.f16` and `.bf16`. The `ex2` of `.bf16` has `.ftz` built in.
pub fn approx_half(function: Function, half: Half, a: u16, perturb: Perturb) -> u16 {
    let format = match half {
        Half::F16 => &F16,
        Half::Bf16 => &BF16,
    };
    let ftz = half == Half::Bf16 && function == Function::Ex2;
    let a = if ftz { format.flush(a as u64) } else { a as u64 };
    let x = format.widen(a);
    let y = function.exact(x);
    if y.is_nan() {
        return format.nan as u16;
    }
    let direction = if function.is_special(x) { None } else { perturb.direction(a) };
    let bits = settle(y, function.error_half(half), direction, format);
    (if ftz { format.flush(bits) } else { bits }) as u16
}

/// `div.approx{.ftz}.f32`, which goes through a reciprocal and loses divisors above `2^126`.
pub fn div_approx_f32(a: u32, b: u32, ftz: bool, perturb: Perturb) -> u32 {
    let (a, b) = (flush_f32(a, ftz), flush_f32(b, ftz));
    let divisor = f32::from_bits(b).abs();
    if divisor > pow2(126) as f32 && divisor.is_finite() {
        let sign = (a ^ b) & 0x8000_0000;
        let dividend = f32::from_bits(a);
        return if dividend.is_finite() { sign } else { F32.nan as u32 };
    }
    div_full_f32(a, b, ftz, perturb)
}

/// `div.full{.ftz}.f32`
pub fn div_full_f32(a: u32, b: u32, ftz: bool, perturb: Perturb) -> u32 {
    let (a, b) = (flush_f32(a, ftz), flush_f32(b, ftz));
    let (x, y) = (f32::from_bits(a) as f64, f32::from_bits(b) as f64);
    let quotient = x / y;
    if quotient.is_nan() {
        return F32.nan as u32;
    }
    let special = quotient == 0.0 || !quotient.is_finite();
    let direction = if special { None } else { perturb.direction((a as u64) << 32 | b as u64) };
    flush_f32(settle(quotient, Some(ErrorBound::Ulps(2.0)), direction, &F32) as u32, ftz)
}

/// The NaN of the `.approx.ftz.f64` functions, as documented.
const GROSS_NAN: u64 = 0x7fff_ffff_0000_0000;

/// `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64`: the upper word in, the upper word out.
pub fn gross_f64(function: Function, a: u64) -> u64 {
    let upper = super::format::F64.flush(a & 0xffff_ffff_0000_0000);
    let y = function.exact(f64::from_bits(upper));
    if y.is_nan() {
        return GROSS_NAN;
    }
    super::format::F64.flush(y.to_bits() & 0xffff_ffff_0000_0000)
}

/// `rsqrt.approx.f64`, for which no error is documented.
pub fn rsqrt_f64(a: u64) -> u64 {
    let y = Function::Rsqrt.exact(f64::from_bits(a));
    if y.is_nan() { super::exact::nan_of(&[a]) } else { y.to_bits() }
}
