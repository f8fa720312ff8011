//! Element types of tensors.

use std::{fmt, str::FromStr};

use crate::{Error, error::nearest};

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision: 11 significant bits, largest finite value 65504.
    F16,
    /// bfloat16: the range of `F32` with 8 significant bits.
    BF16,
}

impl DType {
    /// Every element type, in the order they are documented.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// The name used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Unit roundoff: the largest relative error of rounding to nearest, away from underflow.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Self::F32 => f64::powi(2.0, -24),
            Self::F16 => f64::powi(2.0, -11),
            Self::BF16 => f64::powi(2.0, -8),
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
    pub fn min_normal(self) -> f64 {
        match self {
            Self::F32 => f32::MIN_POSITIVE as f64,
            Self::F16 => half::f16::MIN_POSITIVE.to_f64(),
            Self::BF16 => half::bf16::MIN_POSITIVE.to_f64(),
        }
    }

    /// `x` rounded to this type (nearest, ties to even) and back. Overflow gives an infinity.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Self::F32 => x as f32 as f64,
            Self::F16 => <half::f16 as Element>::from_f64(x).to_f64(),
            Self::BF16 => <half::bf16 as Element>::from_f64(x).to_f64(),
        }
    }

    /// The largest error of rounding a value of magnitude `|x|` to this type: half a unit in its last place.
    pub fn rounding_error(self, x: f64) -> f64 {
        binade(x.abs().max(self.min_normal())) * self.unit_roundoff()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| Error::UnknownName {
            kind: "dtype",
            name: text.to_owned(),
            nearest: nearest(text, Self::ALL.iter().map(|dtype| dtype.name())),
            allowed: "f32, f16, bf16".to_owned(),
        })
    }
}

impl serde::Serialize for DType {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for DType {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A Rust type that a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The tensor element type this is.
    const DTYPE: DType;
    /// Exact widening.
    fn to_f64(self) -> f64;
    /// Exact widening (every supported type fits).
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f64(x: f64) -> Self;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
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

/// The power of two at or below a positive, normal `x`.
fn binade(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & (0x7FF << 52))
}

/// `x` rounded to the nearest multiple of the type's spacing at `x`. The conversions of `half` from f64 look at its
/// upper bits only and so miss ties; a value already rounded here converts exactly.
fn round_to_spacing(x: f64, dtype: DType) -> f64 {
    if !x.is_finite() {
        return x;
    }
    let spacing = 2.0 * dtype.rounding_error(x);
    (x / spacing).round_ties_even() * spacing
}

macro_rules! half_element {
    ($ty:ty, $dtype:expr) => {
        impl Element for $ty {
            const DTYPE: DType = $dtype;

            fn to_f64(self) -> f64 {
                self.to_f64()
            }

            fn to_f32(self) -> f32 {
                self.to_f32()
            }

            fn from_f64(x: f64) -> Self {
                <$ty>::from_f64(round_to_spacing(x, $dtype))
            }

            fn from_f32(x: f32) -> Self {
                <$ty>::from_f32(x)
            }
        }
    };
}

half_element!(half::f16, DType::F16);
half_element!(half::bf16, DType::BF16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>().unwrap(), dtype);
        }
    }

    #[test]
    fn unknown_name_suggests_the_nearest() {
        let message = "fp16".parse::<DType>().unwrap_err().to_string();
        assert!(message.contains("fp16") && message.contains("did you mean `f16`"), "{message}");
    }

    #[test]
    fn rounding_error_bounds_real_rounding() {
        for dtype in DType::ALL {
            for i in 1..4000 {
                let x = (i as f64 * 0.37).sin() * f64::powi(1.37, i % 40 - 20);
                let error = (dtype.round(x) - x).abs();
                assert!(error <= dtype.rounding_error(x), "{dtype} {x}: {error}");
                assert!(dtype.rounding_error(x) <= x.abs() * dtype.unit_roundoff() + dtype.min_normal());
            }
        }
    }
}
