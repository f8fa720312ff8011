//! Binary floating-point formats, and the one rounding step that every
//! operation of this crate ends with.
//!
//! A value is taken apart into sign, integer significand and exponent, and put
//! together again by [`Format::pack`], which rounds exactly once.

/// Where a result that is not representable goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Round {
    /// `.rn`: to nearest, ties to even.
    NearestEven,
    /// `.rna`: to nearest, ties away from zero.
    NearestAway,
    /// `.rz`: toward zero.
    TowardZero,
    /// `.rm`: toward negative infinity.
    Down,
    /// `.rp`: toward positive infinity.
    Up,
}

impl Round {
    /// The four modes that arithmetic instructions accept.
    pub const ARITHMETIC: [Round; 4] = [Round::NearestEven, Round::TowardZero, Round::Down, Round::Up];

    /// Whether a magnitude with this remainder goes to the next larger magnitude.
    #[inline]
    const fn goes_up(
        self,
        negative: bool,
        odd: bool,
        above_half: bool,
        is_half: bool,
        inexact: bool,
    ) -> bool {
        match self {
            Round::NearestEven => above_half || (is_half && odd),
            Round::NearestAway => above_half || is_half,
            Round::TowardZero => false,
            Round::Down => inexact && negative,
            Round::Up => inexact && !negative,
        }
    }
}

/// What a magnitude beyond the largest finite value becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// Infinity or the largest finite value, as the rounding mode says.
    Ieee,
    /// `.satfinite`: always the largest finite value of that sign.
    Finite,
}

/// A binary interchange format: a sign bit, `exp_bits`, `man_bits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Format {
    /// Width of the exponent field.
    pub exp_bits: u32,
    /// Width of the stored significand.
    pub man_bits: u32,
    /// Whether the all-ones exponent means infinity and NaN. Only `e4m3` uses
    /// those codes for numbers, all but the very last.
    pub has_inf: bool,
    /// The bit pattern of a freshly made NaN.
    pub nan: u64,
}

/// `.f16`
pub const F16: Format = Format { exp_bits: 5, man_bits: 10, has_inf: true, nan: 0x7fff };
/// `.bf16`
pub const BF16: Format = Format { exp_bits: 8, man_bits: 7, has_inf: true, nan: 0x7fff };
/// `.f32`
pub const F32: Format = Format { exp_bits: 8, man_bits: 23, has_inf: true, nan: 0x7fff_ffff };
/// `.f64`
pub const F64: Format = Format { exp_bits: 11, man_bits: 52, has_inf: true, nan: 0xfff8_0000_0000_0000 };
/// `.tf32`, as the 19 bits that matter; in a register they lie 13 bits higher.
pub const TF32: Format = Format { exp_bits: 8, man_bits: 10, has_inf: true, nan: 0x3_ffff };
/// `.e4m3`: no infinity, one NaN code per sign, largest value 448.
pub const E4M3: Format = Format { exp_bits: 4, man_bits: 3, has_inf: false, nan: 0x7f };
/// `.e5m2`
pub const E5M2: Format = Format { exp_bits: 5, man_bits: 2, has_inf: true, nan: 0x7f };

/// A value taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpacked {
    /// Not a number.
    Nan,
    /// An infinity; `true` is negative.
    Infinite(bool),
    /// `(-1)^negative · mant · 2^exp`; zero has `mant == 0`.
    Finite {
        /// Sign bit.
        negative: bool,
        /// Exponent of the least significant bit of `mant`.
        exp: i32,
        /// Integer significand.
        mant: u64,
    },
}

impl Format {
    /// Bits in all.
    #[inline]
    pub const fn width(&self) -> u32 {
        1 + self.exp_bits + self.man_bits
    }

    /// The exponent bias.
    #[inline]
    pub const fn bias(&self) -> i32 {
        (1 << (self.exp_bits - 1)) - 1
    }

    /// The mask of the sign bit.
    #[inline]
    pub const fn sign_mask(&self) -> u64 {
        1 << (self.exp_bits + self.man_bits)
    }

    /// The code of the largest finite magnitude.
    #[inline]
    pub const fn max_finite(&self) -> u64 {
        if self.has_inf { self.infinity() - 1 } else { self.sign_mask() - 2 }
    }

    /// The code of positive infinity (for `e4m3`, which has none, the exponent mask).
    #[inline]
    pub const fn infinity(&self) -> u64 {
        ((1 << self.exp_bits) - 1) << self.man_bits
    }

    /// Whether `bits` is a NaN.
    #[inline]
    pub const fn is_nan(&self, bits: u64) -> bool {
        let magnitude = bits & (self.sign_mask() - 1);
        if self.has_inf { magnitude > self.infinity() } else { magnitude == self.sign_mask() - 1 }
    }

    /// Whether `bits` is subnormal (zero is not).
    #[inline]
    pub const fn is_subnormal(&self, bits: u64) -> bool {
        bits & self.infinity() == 0 && bits & (self.sign_mask() - 1) != 0
    }

    /// `.ftz`: a subnormal becomes the zero of its sign.
    #[inline]
    pub const fn flush(&self, bits: u64) -> u64 {
        if bits & self.infinity() == 0 { bits & self.sign_mask() } else { bits }
    }

    /// Takes a code apart.
    #[inline]
    pub const fn unpack(&self, bits: u64) -> Unpacked {
        let negative = bits & self.sign_mask() != 0;
        let magnitude = bits & (self.sign_mask() - 1);
        if self.is_nan(bits) {
            return Unpacked::Nan;
        }
        if self.has_inf && magnitude == self.infinity() {
            return Unpacked::Infinite(negative);
        }
        let field = (magnitude >> self.man_bits) as i32;
        let fraction = magnitude & ((1 << self.man_bits) - 1);
        let (exp, mant) = if field == 0 {
            (1 - self.bias() - self.man_bits as i32, fraction)
        } else {
            (field - self.bias() - self.man_bits as i32, fraction | (1 << self.man_bits))
        };
        Unpacked::Finite { negative, exp, mant }
    }

    /// Rounds `(-1)^negative · (mant + s) · 2^exp` to this format, where `s` is
    /// zero, or with `sticky` something strictly between 0 and 1.
    ///
    /// With `sticky` the significand must hold at least two bits more than the
    /// format keeps, or be zero.
    #[inline]
    pub const fn pack(
        &self,
        negative: bool,
        exp: i32,
        mant: u64,
        sticky: bool,
        round: Round,
        overflow: Overflow,
    ) -> u64 {
        let sign = if negative { self.sign_mask() } else { 0 };
        if mant == 0 && !sticky {
            return sign;
        }
        let leading = if mant == 0 { exp } else { exp + 63 - mant.leading_zeros() as i32 };
        let min_exp = 1 - self.bias();
        let max_exp = self.bias() + !self.has_inf as i32;
        if leading > max_exp {
            return sign | self.overflowed(negative, round, overflow);
        }
        let scale = if leading > min_exp { leading } else { min_exp };
        let shift = scale - self.man_bits as i32 - exp;
        let (kept, above_half, is_half, inexact) = if shift <= 0 {
            (mant << -shift, false, false, sticky)
        } else if shift > 64 {
            (0, false, false, true)
        } else {
            let kept = if shift == 64 { 0 } else { mant >> shift };
            let half = 1u64 << (shift - 1);
            let rest = if shift == 64 { mant } else { mant & ((1u64 << shift) - 1) };
            (kept, rest > half || (rest == half && sticky), rest == half && !sticky, rest != 0 || sticky)
        };
        let odd = kept & 1 == 1;
        let up = round.goes_up(negative, odd, above_half, is_half, inexact);
        // The hidden bit, or a carry out of the fraction, moves into the exponent field by itself.
        let code = (((scale - min_exp) as u64) << self.man_bits) + kept + up as u64;
        if code > self.max_finite() {
            return sign | self.overflowed(negative, round, overflow);
        }
        sign | code
    }

    /// The magnitude code of a result too large for the format.
    const fn overflowed(&self, negative: bool, round: Round, overflow: Overflow) -> u64 {
        let stays_finite = match (overflow, round) {
            (Overflow::Finite, _) => true,
            (_, Round::NearestEven | Round::NearestAway) => false,
            (_, Round::TowardZero) => true,
            (_, Round::Down) => !negative,
            (_, Round::Up) => negative,
        };
        if stays_finite {
            self.max_finite()
        } else if self.has_inf {
            self.infinity()
        } else {
            self.sign_mask() - 1
        }
    }

    /// The value of a code, exact: every format here fits into `f64`.
    #[inline]
    pub const fn widen(&self, bits: u64) -> f64 {
        match self.unpack(bits) {
            Unpacked::Nan => f64::NAN,
            Unpacked::Infinite(negative) => {
                if negative {
                    f64::NEG_INFINITY
                } else {
                    f64::INFINITY
                }
            }
            Unpacked::Finite { negative, exp, mant } => {
                f64::from_bits(F64.pack(negative, exp, mant, false, Round::NearestEven, Overflow::Ieee))
            }
        }
    }

    /// Rounds a double to this format. NaN becomes the format's own NaN.
    #[inline]
    pub fn narrow(&self, value: f64, round: Round, overflow: Overflow) -> u64 {
        match F64.unpack(value.to_bits()) {
            Unpacked::Nan => self.nan,
            Unpacked::Infinite(negative) => {
                let sign = if negative { self.sign_mask() } else { 0 };
                sign | match overflow {
                    Overflow::Finite => self.max_finite(),
                    Overflow::Ieee if self.has_inf => self.infinity(),
                    Overflow::Ieee => self.sign_mask() - 1,
                }
            }
            Unpacked::Finite { negative, exp, mant } => {
                self.pack(negative, exp, mant, false, round, overflow)
            }
        }
    }

    /// The spacing of the format's values around `value`.
    pub fn ulp(&self, value: f64) -> f64 {
        let min_exp = 1 - self.bias();
        let magnitude = value.abs();
        if magnitude == 0.0 || !magnitude.is_finite() {
            return pow2(min_exp - self.man_bits as i32);
        }
        let exp = match F64.unpack(magnitude.to_bits()) {
            Unpacked::Finite { exp, mant, .. } => exp + 63 - mant.leading_zeros() as i32,
            _ => min_exp,
        };
        pow2(exp.clamp(min_exp, self.bias()) - self.man_bits as i32)
    }
}

/// `2^exp` as a double, subnormals included; 0 below them.
pub(crate) fn pow2(exp: i32) -> f64 {
    f64::from_bits(F64.pack(false, exp, 1, false, Round::NearestEven, Overflow::Ieee))
}
