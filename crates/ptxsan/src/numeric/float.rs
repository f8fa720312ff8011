//! `.f32` and `.f64` arithmetic: registers in, registers out.
//!
//! Operands and results are bit patterns, so that NaN codes and signed zeros
//! are what the machine would hold. `.f32` operations return the canonical NaN
//! `0x7fffffff`; `.f64` operations hand on their first NaN operand.

use super::exact;
use super::format::{F32, F64, Overflow, Round};
use super::odd;

/// The modifiers of a `.f32` instruction (`.f64` only uses `round`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FloatMode {
    /// `.rn`, `.rz`, `.rm` or `.rp`.
    pub round: Round,
    /// `.ftz`: subnormal inputs and results become zeros of their sign.
    pub ftz: bool,
    /// `.sat`: the result is clamped to `[0, 1]`, NaN to `+0`.
    pub sat: bool,
}

impl FloatMode {
    /// What an instruction without modifiers does.
    pub const DEFAULT: FloatMode = FloatMode { round: Round::NearestEven, ftz: false, sat: false };

    /// [`FloatMode::DEFAULT`] with another rounding mode.
    pub const fn rounded(round: Round) -> Self {
        FloatMode { round, ..Self::DEFAULT }
    }
}

const ONE_F32: u32 = 0x3f80_0000;

/// The input as the instruction sees it.
#[inline]
pub(crate) fn flush_f32(bits: u32, ftz: bool) -> u32 {
    if ftz && bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits }
}

/// `.sat`: clamped to `[+0, 1]`, NaN to `+0`.
#[inline]
pub(crate) fn saturate_f32(bits: u32) -> u32 {
    let value = f32::from_bits(bits);
    if value >= 1.0 {
        ONE_F32
    } else if value > 0.0 {
        bits
    } else {
        0
    }
}

/// The last step of every `.f32` instruction.
#[inline]
fn finish_f32(bits: u32, mode: FloatMode) -> u32 {
    let bits = if bits & 0x7fff_ffff > 0x7f80_0000 { F32.nan as u32 } else { flush_f32(bits, mode.ftz) };
    if mode.sat { saturate_f32(bits) } else { bits }
}

/// Rounds a round-to-odd intermediate.
#[inline]
fn narrow_f32(value: f64, round: Round) -> u32 {
    if round == Round::NearestEven {
        (value as f32).to_bits()
    } else {
        F32.narrow(value, round, Overflow::Ieee) as u32
    }
}

/// In `.rm` an exact zero sum is `-0`, unless both addends were `+0`.
#[inline]
fn with_zero_sign(sum: f64, round: Round, both_positive: bool) -> f64 {
    if sum == 0.0 && round == Round::Down && !both_positive { -0.0 } else { sum }
}

/// `add.f32`
#[inline]
pub fn add_f32(a: u32, b: u32, mode: FloatMode) -> u32 {
    let (a, b) = (f32::from_bits(flush_f32(a, mode.ftz)), f32::from_bits(flush_f32(b, mode.ftz)));
    if mode.round == Round::NearestEven {
        return finish_f32((a + b).to_bits(), mode);
    }
    let sum = odd::add(a as f64, b as f64);
    let both_positive = a.is_sign_positive() && b.is_sign_positive();
    finish_f32(narrow_f32(with_zero_sign(sum, mode.round, both_positive), mode.round), mode)
}

/// `sub.f32`
#[inline]
pub fn sub_f32(a: u32, b: u32, mode: FloatMode) -> u32 {
    // Negation of a NaN only changes a sign that the canonical NaN does not keep.
    add_f32(a, b ^ 0x8000_0000, mode)
}

/// `mul.f32`
#[inline]
pub fn mul_f32(a: u32, b: u32, mode: FloatMode) -> u32 {
    let (a, b) = (f32::from_bits(flush_f32(a, mode.ftz)), f32::from_bits(flush_f32(b, mode.ftz)));
    if mode.round == Round::NearestEven {
        return finish_f32((a * b).to_bits(), mode);
    }
    finish_f32(narrow_f32(a as f64 * b as f64, mode.round), mode)
}

/// `fma.f32` and `mad.f32`
#[inline]
pub fn fma_f32(a: u32, b: u32, c: u32, mode: FloatMode) -> u32 {
    let a = f32::from_bits(flush_f32(a, mode.ftz)) as f64;
    let b = f32::from_bits(flush_f32(b, mode.ftz)) as f64;
    let c = f32::from_bits(flush_f32(c, mode.ftz)) as f64;
    let sum = odd::fma(a, b, c);
    let product_positive = a.is_sign_positive() == b.is_sign_positive();
    let both_positive = product_positive && c.is_sign_positive();
    finish_f32(narrow_f32(with_zero_sign(sum, mode.round, both_positive), mode.round), mode)
}

/// `div.rnd.f32`
pub fn div_f32(a: u32, b: u32, mode: FloatMode) -> u32 {
    let (a, b) = (f32::from_bits(flush_f32(a, mode.ftz)), f32::from_bits(flush_f32(b, mode.ftz)));
    if mode.round == Round::NearestEven {
        return finish_f32((a / b).to_bits(), mode);
    }
    finish_f32(narrow_f32(odd::div(a as f64, b as f64), mode.round), mode)
}

/// `rcp.rnd.f32`
pub fn rcp_f32(a: u32, mode: FloatMode) -> u32 {
    div_f32(ONE_F32, a, mode)
}

/// `sqrt.rnd.f32`
pub fn sqrt_f32(a: u32, mode: FloatMode) -> u32 {
    let a = f32::from_bits(flush_f32(a, mode.ftz));
    if mode.round == Round::NearestEven {
        return finish_f32(a.sqrt().to_bits(), mode);
    }
    finish_f32(narrow_f32(odd::sqrt(a as f64), mode.round), mode)
}

/// `neg.f32`
#[inline]
pub fn neg_f32(a: u32, ftz: bool) -> u32 {
    flush_f32(a, ftz) ^ 0x8000_0000
}

/// `abs.f32`
#[inline]
pub fn abs_f32(a: u32, ftz: bool) -> u32 {
    flush_f32(a, ftz) & 0x7fff_ffff
}

/// `copysign.f32`: the magnitude of `b` with the sign of `a`.
#[inline]
pub fn copysign_f32(a: u32, b: u32) -> u32 {
    (b & 0x7fff_ffff) | (a & 0x8000_0000)
}

/// A host result, with the NaN the machine would return.
#[inline]
fn finish_f64(value: f64, operands: &[u64]) -> u64 {
    if value.is_nan() { exact::nan_of(operands) } else { value.to_bits() }
}

/// `add.f64`
#[inline]
pub fn add_f64(a: u64, b: u64, round: Round) -> u64 {
    if round == Round::NearestEven {
        return finish_f64(f64::from_bits(a) + f64::from_bits(b), &[a, b]);
    }
    exact::add(a, b, round)
}

/// `sub.f64`
#[inline]
pub fn sub_f64(a: u64, b: u64, round: Round) -> u64 {
    if F64.is_nan(b) && !F64.is_nan(a) {
        // Handed on with its own sign, not the negated one.
        return exact::nan_of(&[b]);
    }
    add_f64(a, b ^ F64.sign_mask(), round)
}

/// `mul.f64`
#[inline]
pub fn mul_f64(a: u64, b: u64, round: Round) -> u64 {
    if round == Round::NearestEven {
        return finish_f64(f64::from_bits(a) * f64::from_bits(b), &[a, b]);
    }
    exact::mul(a, b, round)
}

/// `fma.f64` and `mad.f64`
#[inline]
pub fn fma_f64(a: u64, b: u64, c: u64, round: Round) -> u64 {
    if round == Round::NearestEven {
        let value = f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c));
        return finish_f64(value, &[a, b, c]);
    }
    exact::fma(a, b, c, round)
}

/// `div.rnd.f64`
pub fn div_f64(a: u64, b: u64, round: Round) -> u64 {
    if round == Round::NearestEven {
        return finish_f64(f64::from_bits(a) / f64::from_bits(b), &[a, b]);
    }
    exact::div(a, b, round)
}

/// `rcp.rnd.f64`
pub fn rcp_f64(a: u64, round: Round) -> u64 {
    if F64.is_nan(a) { exact::nan_of(&[a]) } else { div_f64(1f64.to_bits(), a, round) }
}

/// `sqrt.rnd.f64`
pub fn sqrt_f64(a: u64, round: Round) -> u64 {
    if round == Round::NearestEven {
        return finish_f64(f64::from_bits(a).sqrt(), &[a]);
    }
    exact::sqrt(a, round)
}

/// `neg.f64`
#[inline]
pub fn neg_f64(a: u64) -> u64 {
    a ^ F64.sign_mask()
}

/// `abs.f64`
#[inline]
pub fn abs_f64(a: u64) -> u64 {
    a & !F64.sign_mask()
}

/// `copysign.f64`: the magnitude of `b` with the sign of `a`.
#[inline]
pub fn copysign_f64(a: u64, b: u64) -> u64 {
    abs_f64(b) | (a & F64.sign_mask())
}
