//! Exact `f64` arithmetic in integers, rounded once in any mode.
//!
//! The host's own arithmetic only rounds to nearest; this is the path for the
//! other modes of `.f64`, where no wider format is at hand.

use super::format::{F64, Overflow, Round, Unpacked};

/// A finite magnitude with up to 128 bits and what was shifted out of them.
#[derive(Clone, Copy)]
struct Wide {
    negative: bool,
    exp: i32,
    mant: u128,
    sticky: bool,
}

impl Wide {
    fn new(negative: bool, exp: i32, mant: u128) -> Self {
        Wide { negative, exp, mant, sticky: false }
    }

    /// The same value with its leading bit at bit 125, so that a sum cannot overflow.
    fn normalised(self) -> Self {
        let up = self.mant.leading_zeros() as i32 - 2;
        // Products have at most 106 bits, so the shift is always to the left.
        Wide { exp: self.exp - up, mant: self.mant << up, ..self }
    }

    /// Rounds to `f64`. `mant` must not be zero unless the value is.
    fn round(self, round: Round) -> u64 {
        let excess = 64 - self.mant.leading_zeros() as i32;
        if excess <= 0 {
            return F64.pack(self.negative, self.exp, self.mant as u64, self.sticky, round, Overflow::Ieee);
        }
        let lost = self.mant & ((1u128 << excess) - 1);
        let sticky = self.sticky || lost != 0;
        F64.pack(
            self.negative,
            self.exp + excess,
            (self.mant >> excess) as u64,
            sticky,
            round,
            Overflow::Ieee,
        )
    }
}

/// The sum of two finite values, not both zero.
fn sum(x: Wide, y: Wide) -> Option<Wide> {
    if x.mant == 0 {
        return (y.mant != 0).then_some(y);
    }
    if y.mant == 0 {
        return Some(x);
    }
    let (x, y) = (x.normalised(), y.normalised());
    let (big, small) = if (x.exp, x.mant) >= (y.exp, y.mant) { (x, y) } else { (y, x) };
    let distance = (big.exp - small.exp) as u32;
    let (aligned, sticky) = if distance >= 128 {
        (0, true)
    } else {
        (small.mant >> distance, small.mant & ((1u128 << distance) - 1) != 0)
    };
    let mant = if big.negative == small.negative {
        big.mant + aligned
    } else {
        // What was shifted out makes the true difference a little smaller: borrow one and stay sticky.
        big.mant - aligned - sticky as u128
    };
    (mant != 0).then_some(Wide { negative: big.negative, exp: big.exp, mant, sticky })
}

/// The NaN an `f64` operation returns: its first NaN operand made quiet, else the default one.
pub(crate) fn nan_of(operands: &[u64]) -> u64 {
    operands.iter().find(|&&bits| F64.is_nan(bits)).map_or(F64.nan, |bits| bits | 1 << 51)
}

/// The sign of an exact zero sum.
fn zero_sum(x_negative: bool, y_negative: bool, round: Round) -> u64 {
    let negative = if x_negative == y_negative { x_negative } else { round == Round::Down };
    if negative { F64.sign_mask() } else { 0 }
}

/// `a·b + c`, rounded once.
pub(crate) fn fma(a: u64, b: u64, c: u64, round: Round) -> u64 {
    use Unpacked::{Finite, Infinite, Nan};
    let inf = |negative: bool| if negative { F64.sign_mask() | F64.infinity() } else { F64.infinity() };
    let is_negative = |bits: u64| bits & F64.sign_mask() != 0;
    let product_negative = is_negative(a) != is_negative(b);
    match (F64.unpack(a), F64.unpack(b), F64.unpack(c)) {
        (Nan, _, _) | (_, Nan, _) | (_, _, Nan) => nan_of(&[a, b, c]),
        (Infinite(_), Finite { mant: 0, .. }, _) | (Finite { mant: 0, .. }, Infinite(_), _) => F64.nan,
        (Infinite(_), _, Infinite(c_negative)) | (_, Infinite(_), Infinite(c_negative)) => {
            if product_negative == c_negative { c } else { F64.nan }
        }
        (Infinite(_), _, _) | (_, Infinite(_), _) => inf(product_negative),
        (_, _, Infinite(_)) => c,
        (
            Finite { exp: ea, mant: ma, .. },
            Finite { exp: eb, mant: mb, .. },
            Finite { negative, exp, mant },
        ) => {
            let product = Wide::new(product_negative, ea + eb, ma as u128 * mb as u128);
            match sum(product, Wide::new(negative, exp, mant as u128)) {
                Some(total) => total.round(round),
                None => zero_sum(product_negative, negative, round),
            }
        }
    }
}

/// `a + b`, rounded once.
pub(crate) fn add(a: u64, b: u64, round: Round) -> u64 {
    fma(a, 1f64.to_bits(), b, round)
}

/// `a·b`, rounded once.
pub(crate) fn mul(a: u64, b: u64, round: Round) -> u64 {
    // A zero of the product's own sign leaves signed zeros alone in every mode.
    fma(a, b, (a ^ b) & F64.sign_mask(), round)
}

/// `a / b`, rounded once.
pub(crate) fn div(a: u64, b: u64, round: Round) -> u64 {
    use Unpacked::{Finite, Infinite, Nan};
    let sign = (a ^ b) & F64.sign_mask();
    match (F64.unpack(a), F64.unpack(b)) {
        (Nan, _) | (_, Nan) => nan_of(&[a, b]),
        (Infinite(_), Infinite(_)) | (Finite { mant: 0, .. }, Finite { mant: 0, .. }) => F64.nan,
        (Infinite(_), _) | (_, Finite { mant: 0, .. }) => sign | F64.infinity(),
        (_, Infinite(_)) | (Finite { mant: 0, .. }, _) => sign,
        (Finite { exp: ea, mant: ma, .. }, Finite { exp: eb, mant: mb, .. }) => {
            let up = ma.leading_zeros() as i32;
            let numerator = (ma as u128) << (up + 64);
            let quotient = numerator / mb as u128;
            let sticky = !numerator.is_multiple_of(mb as u128);
            let exp = ea - up - 64 - eb;
            Wide { negative: sign != 0, exp, mant: quotient, sticky }.round(round)
        }
    }
}

/// `√a`, rounded once.
pub(crate) fn sqrt(a: u64, round: Round) -> u64 {
    match F64.unpack(a) {
        Unpacked::Nan => nan_of(&[a]),
        Unpacked::Infinite(true) => F64.nan,
        Unpacked::Infinite(false) | Unpacked::Finite { mant: 0, .. } => a,
        Unpacked::Finite { negative: true, .. } => F64.nan,
        Unpacked::Finite { exp, mant, .. } => {
            // An even exponent and 120-odd bits give a root of 60-odd bits.
            let up = mant.leading_zeros() as i32 + 62;
            let up = up - ((exp - up) & 1);
            let radicand = (mant as u128) << up;
            let root = radicand.isqrt();
            Wide { negative: false, exp: (exp - up) / 2, mant: root, sticky: root * root != radicand }
                .round(round)
        }
    }
}
