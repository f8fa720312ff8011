//! Element types of tensors.

use std::{fmt, str::FromStr};

use crate::{CODE_MAX, Error, Float, error::nearest};

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision: 11 significant bits, largest finite value 65504.
    F16,
    /// bfloat16: the range of `F32` with 8 significant bits.
    BF16,
    /// 8-bit codes, linear and symmetric around 128, with a scale per head ([`crate::U8Code`]).
    U8,
    /// 8-bit floating point, 4 exponent and 3 mantissa bits, with a scale per head ([`crate::E4M3Code`]).
    E4M3,
    /// 8-bit integers with a scale per head: a value is the integer times the scale ([`crate::I8Code`]).
    I8,
}

impl DType {
    /// Every type.
    pub const ALL: [Self; 6] = [Self::F32, Self::F16, Self::BF16, Self::U8, Self::E4M3, Self::I8];

    /// The floating-point types: what every backend is asked for by default.
    pub const FLOATS: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// The types whose elements are codes with a scale per head; results come as f16.
    pub const EIGHT_BIT: [Self; 3] = [Self::U8, Self::E4M3, Self::I8];

    /// The name used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::U8 => "u8",
            Self::E4M3 => "e4m3",
            Self::I8 => "i8",
        }
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 | Self::E4M3 | Self::I8 => 1,
        }
    }

    /// Whether elements are 8-bit codes that need a scale.
    pub fn is_eight_bit(self) -> bool {
        self.float().is_none()
    }

    /// The floating-point format this is; `None` for the 8-bit types.
    pub fn float(self) -> Option<Float> {
        match self {
            Self::F32 => Some(Float::F32),
            Self::F16 => Some(Float::F16),
            Self::BF16 => Some(Float::BF16),
            Self::U8 | Self::E4M3 | Self::I8 => None,
        }
    }

    /// The largest value of a code at scale one, which a scale puts the largest element at; `None` for floating-point types.
    pub fn code_max(self) -> Option<f64> {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => None,
            Self::U8 | Self::E4M3 => Some(CODE_MAX),
            Self::I8 => Some(f64::from(i8::MAX)),
        }
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
            allowed: Self::ALL.map(Self::name).join(", "),
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

/// A Rust type that a tensor can hold. An 8-bit code stands for its value at scale one.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The tensor element type this is.
    const DTYPE: DType;
    /// Widening: exact but for [`crate::U8Code`], whose steps of 448/127 are rounded.
    fn to_f64(self) -> f64;
    /// Widening: exact but for [`crate::U8Code`], whose steps of 448/127 are rounded.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f64(x: f64) -> Self;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (dtype, name) in DType::ALL.into_iter().zip(["f32", "f16", "bf16", "u8", "e4m3", "i8"]) {
            assert_eq!((dtype.name(), name.parse::<DType>().unwrap()), (name, dtype));
        }
    }

    #[test]
    fn every_type_is_a_float_or_an_eight_bit_one() {
        for dtype in DType::ALL {
            assert_eq!(DType::FLOATS.contains(&dtype), dtype.float().is_some());
            assert_eq!(DType::EIGHT_BIT.contains(&dtype), dtype.is_eight_bit());
            assert_eq!(dtype.code_max().is_some(), dtype.is_eight_bit());
            assert_eq!(dtype.float().map_or(dtype, Float::dtype), dtype);
        }
    }

    #[test]
    fn unknown_name_suggests_the_nearest() {
        let message = "fp16".parse::<DType>().unwrap_err().to_string();
        assert!(message.contains("fp16") && message.contains("did you mean `f16`"), "{message}");
        assert!("e5m2".parse::<DType>().unwrap_err().to_string().contains("u8, e4m3, i8"));
    }
}
