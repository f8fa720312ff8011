//! Comparisons, `min`/`max` and `testp`, for every floating-point format.

use super::format::Format;

/// A comparison of two floating-point values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compare {
    /// Equal, both numbers.
    Eq,
    /// Different, both numbers.
    Ne,
    /// Less, both numbers.
    Lt,
    /// Less or equal, both numbers.
    Le,
    /// Greater, both numbers.
    Gt,
    /// Greater or equal, both numbers.
    Ge,
    /// Equal, or one is NaN.
    Equ,
    /// Different, or one is NaN.
    Neu,
    /// Less, or one is NaN.
    Ltu,
    /// Less or equal, or one is NaN.
    Leu,
    /// Greater, or one is NaN.
    Gtu,
    /// Greater or equal, or one is NaN.
    Geu,
    /// Both are numbers.
    Num,
    /// One is NaN.
    Nan,
}

impl Compare {
    /// Compares two values; every format widens to `f64` without change.
    #[inline]
    pub fn holds(self, a: f64, b: f64) -> bool {
        let unordered = a.is_nan() || b.is_nan();
        match self {
            Compare::Eq => a == b,
            Compare::Ne => a != b && !unordered,
            Compare::Lt => a < b,
            Compare::Le => a <= b,
            Compare::Gt => a > b,
            Compare::Ge => a >= b,
            Compare::Equ => a == b || unordered,
            Compare::Neu => a != b,
            Compare::Ltu => a < b || unordered,
            Compare::Leu => a <= b || unordered,
            Compare::Gtu => a > b || unordered,
            Compare::Geu => a >= b || unordered,
            Compare::Num => !unordered,
            Compare::Nan => unordered,
        }
    }

    /// Compares two codes of `format`, subnormals flushed first with `ftz`.
    #[inline]
    pub fn holds_for(self, format: &Format, a: u64, b: u64, ftz: bool) -> bool {
        let flushed = |bits| if ftz { format.flush(bits) } else { bits };
        self.holds(format.widen(flushed(a)), format.widen(flushed(b)))
    }
}

/// Which of two values `min`/`max` keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extreme {
    /// `min`
    Min,
    /// `max`
    Max,
}

/// The modifiers of a floating-point `min` or `max`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ExtremeMode {
    /// `.ftz`
    pub ftz: bool,
    /// `.NaN`: a NaN operand makes a NaN result, instead of giving way to the other.
    pub nan: bool,
    /// `.xorsign.abs`: compare magnitudes; the sign is the xor of the signs.
    pub xorsign_abs: bool,
}

/// `min` or `max` of two codes of `format`, with `-0 < +0`.
#[inline]
pub fn extreme(format: &Format, which: Extreme, a: u64, b: u64, mode: ExtremeMode) -> u64 {
    let flushed = |bits| if mode.ftz { format.flush(bits) } else { bits };
    let (mut a, mut b) = (flushed(a), flushed(b));
    let sign = (a ^ b) & format.sign_mask();
    let magnitude = format.sign_mask() - 1;
    if mode.xorsign_abs {
        (a, b) = (a & magnitude, b & magnitude);
    }
    let kept = match (format.is_nan(a), format.is_nan(b)) {
        (true, true) => return format.nan,
        (true, false) | (false, true) if mode.nan => return format.nan,
        (true, false) => b,
        (false, true) => a,
        (false, false) => {
            let less = ordered(format, a) < ordered(format, b);
            if less == (which == Extreme::Min) { a } else { b }
        }
    };
    if mode.xorsign_abs { (kept & magnitude) | sign } else { kept }
}

/// A code of a number as an integer of the same order, `-0` just below `+0`.
#[inline]
fn ordered(format: &Format, bits: u64) -> i64 {
    let magnitude = (bits & (format.sign_mask() - 1)) as i64;
    if bits & format.sign_mask() != 0 { -1 - magnitude } else { magnitude }
}

/// A property that `testp` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Property {
    /// Neither infinite nor NaN.
    Finite,
    /// An infinity.
    Infinite,
    /// Not NaN.
    Number,
    /// NaN.
    NotANumber,
    /// A normal number or a zero.
    Normal,
    /// A subnormal number.
    Subnormal,
}

/// `testp`
pub fn test_property(format: &Format, property: Property, bits: u64) -> bool {
    let value = format.widen(bits);
    match property {
        Property::Finite => value.is_finite(),
        Property::Infinite => value.is_infinite(),
        Property::Number => !value.is_nan(),
        Property::NotANumber => value.is_nan(),
        Property::Normal => value.is_finite() && !format.is_subnormal(bits),
        Property::Subnormal => format.is_subnormal(bits),
    }
}
