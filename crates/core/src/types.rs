//! Types that differ from the queries', scales, and how exact an answer must be.

use std::{fmt, str::FromStr};

use crate::{DType, Error, Float, error::nearest};

/// Types of their own for keys, values and output. The default: all as the queries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Types {
    /// Element type of K and V; that of Q when `None`.
    pub kv: Option<DType>,
    /// Type of the output; that of Q when `None`, or f16 when Q holds 8-bit codes.
    pub output: Option<Float>,
    /// How many scales 8-bit tensors have.
    pub scales: Granularity,
}

/// How far one scale of an 8-bit tensor reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// One scale for the whole tensor.
    Tensor,
    /// One for each (sequence, head): `[batch, heads]`.
    #[default]
    Head,
    /// One for each row of the tensor, whatever its layout: the tensor's shape without the head dimension.
    Token,
}

impl Granularity {
    /// Every granularity, the coarsest first.
    pub const ALL: [Self; 3] = [Self::Tensor, Self::Head, Self::Token];

    /// As it is spelled.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Head => "head",
            Self::Token => "token",
        }
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Granularity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|known| known.name() == text).ok_or_else(|| Error::UnknownName {
            kind: "granularity of scales",
            name: text.to_owned(),
            nearest: nearest(text, Self::ALL.map(Self::name)),
            allowed: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// How exact an f16 or bf16 answer must be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Precision {
    /// Weights may be rounded to the type of the inputs before they are multiplied with V, as FlashAttention and cuDNN do.
    #[default]
    Default,
    /// Every element within 1e-3 and the rounding of the output, for any data.
    High,
}
