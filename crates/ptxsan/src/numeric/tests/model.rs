//! A slow model of rounding: fixed-point integers of 5120 bits, and a search
//! among the codes of a format. It shares nothing with the code under test.

use std::cmp::Ordering;

use crate::numeric::{Format, Round};

const LIMBS: usize = 80;
/// The exponent of the lowest bit: below the square of the smallest double.
const LOWEST: i32 = -2400;

/// A non-negative number `Σ limb[i]·2^(64i + LOWEST)`.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Fixed([u64; LIMBS]);

impl Fixed {
    pub(super) fn new(mant: u128, exp: i32) -> Self {
        let mut limbs = [0; LIMBS];
        let shift = (exp - LOWEST) as usize;
        let (limb, bit) = (shift / 64, shift % 64);
        let low = mant as u64;
        let high = (mant >> 64) as u64;
        limbs[limb] = low << bit;
        limbs[limb + 1] = high << bit;
        if bit > 0 {
            limbs[limb + 1] |= low >> (64 - bit);
            limbs[limb + 2] = high >> (64 - bit);
        }
        Fixed(limbs)
    }

    pub(super) fn is_zero(&self) -> bool {
        self.0.iter().all(|&limb| limb == 0)
    }

    pub(super) fn plus(&self, other: &Fixed) -> Fixed {
        let mut limbs = [0; LIMBS];
        let mut carry = 0u128;
        for i in 0..LIMBS {
            carry += self.0[i] as u128 + other.0[i] as u128;
            limbs[i] = carry as u64;
            carry >>= 64;
        }
        Fixed(limbs)
    }

    /// `self - other`, for `self >= other`.
    pub(super) fn minus(&self, other: &Fixed) -> Fixed {
        let mut limbs = [0; LIMBS];
        let mut borrow = 0i128;
        for i in 0..LIMBS {
            let difference = self.0[i] as i128 - other.0[i] as i128 + borrow;
            limbs[i] = difference as u64;
            borrow = difference >> 64;
        }
        Fixed(limbs)
    }
}

impl PartialOrd for Fixed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Fixed {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.iter().rev().cmp(other.0.iter().rev())
    }
}

/// Significand and exponent of a magnitude code, read off the definition of the format.
pub(super) fn magnitude(format: &Format, code: u64) -> (u128, i32) {
    let field = code >> format.man_bits;
    let fraction = (code % (1 << format.man_bits)) as u128;
    let bias = (1 << (format.exp_bits - 1)) - 1;
    let lowest = 1 - bias - format.man_bits as i32;
    if field == 0 {
        (fraction, lowest)
    } else {
        (fraction + (1 << format.man_bits), lowest + field as i32 - 1)
    }
}

/// A signed exact value.
pub(super) struct Exact {
    pub(super) negative: bool,
    pub(super) magnitude: Fixed,
}

impl Exact {
    /// The value of a finite code.
    pub(super) fn of(format: &Format, code: u64) -> Exact {
        let (mant, exp) = magnitude(format, code & (format.sign_mask() - 1));
        Exact { negative: code & format.sign_mask() != 0, magnitude: Fixed::new(mant, exp) }
    }

    pub(super) fn product(format: &Format, a: u64, b: u64) -> Exact {
        let mask = format.sign_mask() - 1;
        let ((ma, ea), (mb, eb)) = (magnitude(format, a & mask), magnitude(format, b & mask));
        Exact { negative: (a ^ b) & format.sign_mask() != 0, magnitude: Fixed::new(ma * mb, ea + eb) }
    }

    pub(super) fn plus(&self, other: &Exact) -> Exact {
        let (x, y) = (&self.magnitude, &other.magnitude);
        if self.negative == other.negative {
            Exact { negative: self.negative, magnitude: x.plus(y) }
        } else if x >= y {
            Exact { negative: self.negative, magnitude: x.minus(y) }
        } else {
            Exact { negative: other.negative, magnitude: y.minus(x) }
        }
    }

    /// Rounded to `format`; the sign of an exact zero sum is the caller's business.
    pub(super) fn round(&self, format: &Format, round: Round) -> u64 {
        search(format, self.negative, round, |mant, exp| Fixed::new(mant, exp).cmp(&self.magnitude))
    }
}

/// Finds the rounded code when `compare` tells how `mant·2^exp` lies to the true magnitude.
pub(super) fn search(
    format: &Format,
    negative: bool,
    round: Round,
    compare: impl Fn(u128, i32) -> Ordering,
) -> u64 {
    let largest = format.max_finite();
    let (mut below, mut above) = (0, largest + 1);
    while above - below > 1 {
        let middle = (above + below) / 2;
        let (mant, exp) = magnitude(format, middle);
        if compare(mant, exp) == Ordering::Greater { above = middle } else { below = middle }
    }
    let (mant, exp) = magnitude(format, below);
    let sign = if negative { format.sign_mask() } else { 0 };
    if compare(mant, exp) == Ordering::Equal {
        return sign | below;
    }
    let halfway = compare(2 * mant + 1, exp - 1);
    let up = match round {
        Round::NearestEven => halfway == Ordering::Less || (halfway == Ordering::Equal && below % 2 == 1),
        Round::NearestAway => halfway != Ordering::Greater,
        Round::TowardZero => false,
        Round::Down => negative,
        Round::Up => !negative,
    };
    sign | (below + up as u64)
}
