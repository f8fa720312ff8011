//! `.f16`, `.bf16` and their packed pairs.

use super::compare::{Compare, Extreme, ExtremeMode, extreme};
use super::format::{BF16, F16, Format, Overflow, Round};
use super::odd;

/// A 16-bit format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// `.f16`
    F16,
    /// `.bf16`
    Bf16,
}

/// The modifiers of a half-precision instruction; rounding is always to nearest even.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HalfMode {
    /// `.ftz`
    pub ftz: bool,
    /// `.sat`: clamped to `[0, 1]`, NaN to `+0`.
    pub sat: bool,
    /// `.relu`: negative results become `+0`, NaN stays (canonical).
    pub relu: bool,
}

impl Half {
    /// The format behind the name.
    #[inline]
    pub const fn format(self) -> &'static Format {
        match self {
            Half::F16 => &F16,
            Half::Bf16 => &BF16,
        }
    }

    /// The value of a code.
    #[inline]
    pub fn widen(self, bits: u16) -> f32 {
        match self {
            Half::F16 => f16_to_f32(bits),
            Half::Bf16 => f32::from_bits((bits as u32) << 16),
        }
    }

    /// Rounds to nearest even, once.
    #[inline]
    pub fn narrow(self, value: f64) -> u16 {
        self.format().narrow(value, Round::NearestEven, Overflow::Ieee) as u16
    }

    #[inline]
    fn operand(self, bits: u16, mode: HalfMode) -> f64 {
        let bits = if mode.ftz { self.format().flush(bits as u64) as u16 } else { bits };
        self.widen(bits) as f64
    }

    #[inline]
    fn finish(self, value: f64, mode: HalfMode) -> u16 {
        let bits = self.narrow(value);
        let bits = if mode.ftz { self.format().flush(bits as u64) as u16 } else { bits };
        let value = self.widen(bits);
        if mode.sat {
            let clamped = if value >= 1.0 { 1.0 } else { value };
            // Also takes NaN and -0 to +0.
            return if clamped > 0.0 { self.narrow(clamped as f64) } else { 0 };
        }
        if mode.relu && value <= 0.0 { 0 } else { bits }
    }

    /// `add`
    #[inline]
    pub fn add(self, a: u16, b: u16, mode: HalfMode) -> u16 {
        self.finish(odd::add(self.operand(a, mode), self.operand(b, mode)), mode)
    }

    /// `sub`
    #[inline]
    pub fn sub(self, a: u16, b: u16, mode: HalfMode) -> u16 {
        self.add(a, b ^ 0x8000, mode)
    }

    /// `mul`
    #[inline]
    pub fn mul(self, a: u16, b: u16, mode: HalfMode) -> u16 {
        self.finish(self.operand(a, mode) * self.operand(b, mode), mode)
    }

    /// `fma`
    #[inline]
    pub fn fma(self, a: u16, b: u16, c: u16, mode: HalfMode) -> u16 {
        self.finish(odd::fma(self.operand(a, mode), self.operand(b, mode), self.operand(c, mode)), mode)
    }

    /// `neg`
    #[inline]
    pub fn neg(self, a: u16, ftz: bool) -> u16 {
        (if ftz { self.format().flush(a as u64) as u16 } else { a }) ^ 0x8000
    }

    /// `abs`
    #[inline]
    pub fn abs(self, a: u16, ftz: bool) -> u16 {
        (if ftz { self.format().flush(a as u64) as u16 } else { a }) & 0x7fff
    }

    /// `min` and `max`
    #[inline]
    pub fn extreme(self, which: Extreme, a: u16, b: u16, mode: ExtremeMode) -> u16 {
        extreme(self.format(), which, a as u64, b as u64, mode) as u16
    }

    /// `setp` and `set`
    #[inline]
    pub fn compare(self, op: Compare, a: u16, b: u16, ftz: bool) -> bool {
        op.holds_for(self.format(), a as u64, b as u64, ftz)
    }
}

/// Without branches, so that a loop over many becomes vector code: the fraction and exponent moved to
/// the places of `f32`, scaled by the difference of the biases, which also normalises subnormals.
#[inline]
fn f16_to_f32(bits: u16) -> f32 {
    const SCALE: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = f32::from_bits((bits as u32 & 0x7fff) << 13) * SCALE;
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | (bits as u32 & 0x8000) << 16)
}

/// Both halves of a packed pair, low half first.
#[inline]
pub const fn unpack2(pair: u32) -> [u16; 2] {
    [pair as u16, (pair >> 16) as u16]
}

/// Two halves as a packed pair, low half first.
#[inline]
pub const fn pack2(halves: [u16; 2]) -> u32 {
    halves[0] as u32 | (halves[1] as u32) << 16
}

/// Applies a one-operand instruction to each half.
#[inline]
pub fn each1(a: u32, op: impl Fn(u16) -> u16) -> u32 {
    pack2(unpack2(a).map(op))
}

/// Applies a two-operand instruction to each half.
#[inline]
pub fn each2(a: u32, b: u32, op: impl Fn(u16, u16) -> u16) -> u32 {
    let ([a0, a1], [b0, b1]) = (unpack2(a), unpack2(b));
    pack2([op(a0, b0), op(a1, b1)])
}

/// Applies a three-operand instruction to each half.
#[inline]
pub fn each3(a: u32, b: u32, c: u32, op: impl Fn(u16, u16, u16) -> u16) -> u32 {
    let ([a0, a1], [b0, b1], [c0, c1]) = (unpack2(a), unpack2(b), unpack2(c));
    pack2([op(a0, b0, c0), op(a1, b1, c1)])
}
