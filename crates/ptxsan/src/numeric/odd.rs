//! Round-to-odd in `f64`: the intermediate step for every format up to `f32`.
//!
//! A double that is exact, or else has an odd last bit, can be rounded to any
//! format with at most 51 significant bits in any mode without the error of
//! rounding twice (Boldo and Melquiond, "Emulation of a FMA and correctly
//! rounded sums", 2008). The operands come from `f32` or narrower, so products
//! are exact in `f64` and nothing here over- or underflows.

/// Moves `value`, which is off by something of the sign of `error`, to odd.
#[inline]
fn made_odd(value: f64, error: f64) -> f64 {
    let bits = value.to_bits();
    if error == 0.0 || bits & 1 == 1 || !value.is_finite() {
        return value;
    }
    // A nonzero error means `value` is not zero: sums of doubles do not underflow to zero.
    let outward = (error > 0.0) == (value > 0.0);
    f64::from_bits(if outward { bits + 1 } else { bits - 1 })
}

/// `a + b`, to odd.
#[inline]
pub(crate) fn add(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let b_seen = sum - a;
    let error = (a - (sum - b_seen)) + (b - b_seen);
    if error.is_nan() { sum } else { made_odd(sum, error) }
}

/// `a·b + c` for operands of at most 24 significant bits, to odd.
#[inline]
pub(crate) fn fma(a: f64, b: f64, c: f64) -> f64 {
    add(a * b, c)
}

/// `a / b` for operands of at most 24 significant bits, to odd.
pub(crate) fn div(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    if !quotient.is_finite() || quotient == 0.0 || !b.is_finite() {
        return quotient;
    }
    let remainder = (-quotient).mul_add(b, a);
    made_odd(quotient, if b > 0.0 { remainder } else { -remainder })
}

/// `√a` for an operand of at most 24 significant bits, to odd.
pub(crate) fn sqrt(a: f64) -> f64 {
    let root = a.sqrt();
    if !root.is_finite() || root == 0.0 {
        return root;
    }
    made_odd(root, (-root).mul_add(root, a))
}
