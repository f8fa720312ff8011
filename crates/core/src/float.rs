//! The floating-point formats that results come in, and how they round.

use crate::{DType, Element};

/// A floating-point format wide enough for results. The 8-bit types are not among them: their codes mean nothing
/// without a scale, so that rounding "to u8" is a question of quantising and not of a tolerance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
}

impl Float {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// The element type of a tensor of such numbers.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }

    /// Unit roundoff: the largest relative error of rounding to nearest, away from underflow.
    #[inline]
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Self::F32 => const { 1.0 / (1u64 << 24) as f64 },
            Self::F16 => const { 1.0 / (1u64 << 11) as f64 },
            Self::BF16 => const { 1.0 / (1u64 << 8) as f64 },
        }
    }

    /// The largest finite value.
    pub fn max_finite(self) -> f64 {
        match self {
            Self::F32 => f32::MAX as f64,
            Self::F16 => half::f16::MAX.to_f64(),
            Self::BF16 => half::bf16::MAX.to_f64(),
        }
    }

    /// The smallest positive normal value.
    #[inline]
    pub fn min_normal(self) -> f64 {
        match self {
            Self::F32 => f32::MIN_POSITIVE as f64,
            Self::F16 => const { half::f16::MIN_POSITIVE.to_f64_const() },
            Self::BF16 => const { half::bf16::MIN_POSITIVE.to_f64_const() },
        }
    }

    /// `x` rounded to this format (nearest, ties to even) and back. Overflow gives an infinity.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Self::F32 => x as f32 as f64,
            Self::F16 => <half::f16 as Element>::from_f64(x).to_f64(),
            Self::BF16 => <half::bf16 as Element>::from_f64(x).to_f64(),
        }
    }

    /// The largest error of rounding a value of magnitude `|x|` to this format: half a unit in its last place.
    #[inline]
    pub fn rounding_error(self, x: f64) -> f64 {
        binade(x.abs().max(self.min_normal())) * self.unit_roundoff()
    }
}

/// The power of two at or below a positive, normal `x`.
#[inline]
pub(crate) fn binade(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & (0x7FF << 52))
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    fn to_f64(self) -> f64 {
        self as f64
    }

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f64(x: f64) -> Self {
        x as f32
    }

    fn from_f32(x: f32) -> Self {
        x
    }
}

/// `x` rounded to the nearest multiple of the format's spacing at `x`. The conversions of `half` from f64 look at its
/// upper bits only and so miss ties; a value already rounded here converts exactly.
#[inline]
fn round_to_spacing(x: f64, float: Float) -> f64 {
    if !x.is_finite() {
        return x;
    }
    // So large that the spacing of f64 there is the format's here: the sum is rounded to it, ties to even.
    let large = 2.0 * float.rounding_error(x) * 6_755_399_441_055_744.0;
    ((x + large) - large).copysign(x)
}

macro_rules! half_element {
    ($ty:ty, $float:expr, $dtype:expr) => {
        impl Element for $ty {
            const DTYPE: DType = $dtype;

            #[inline]
            fn to_f64(self) -> f64 {
                f64::from(self.to_f32())
            }

            #[inline]
            fn to_f32(self) -> f32 {
                self.to_f32()
            }

            #[inline]
            fn from_f64(x: f64) -> Self {
                // Exact from here on.
                <$ty>::from_f32(round_to_spacing(x, $float) as f32)
            }

            fn from_f32(x: f32) -> Self {
                <$ty>::from_f32(x)
            }
        }
    };
}

half_element!(half::f16, Float::F16, DType::F16);
half_element!(half::bf16, Float::BF16, DType::BF16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_error_bounds_real_rounding() {
        for float in Float::ALL {
            for i in 1..4000 {
                let x = (i as f64 * 0.37).sin() * f64::powi(1.37, i % 40 - 20);
                let error = (float.round(x) - x).abs();
                assert!(error <= float.rounding_error(x), "{float:?} {x}: {error}");
                assert!(float.rounding_error(x) <= x.abs() * float.unit_roundoff() + float.min_normal());
            }
        }
    }
}
