//! How a `[batch, heads, sequence, head dimension]` tensor lies in memory.

use std::{fmt, str::FromStr};

use crate::{Error, error::nearest};

/// The order of dimensions in memory, outermost first. Tensors are always *indexed* as
/// `[batch, heads, sequence, head dimension]`; the layout only sets the strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// Batch, heads, sequence, head dimension: PyTorch's order.
    #[default]
    Bhsd,
    /// Batch, sequence, heads, head dimension: FlashAttention's order.
    Bshd,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Self; 2] = [Self::Bhsd, Self::Bshd];

    /// The name used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bhsd => "bhsd",
            Self::Bshd => "bshd",
        }
    }

    /// Strides in elements of a packed tensor of this shape.
    pub fn strides(self, [_, heads, seq, dim]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::Bhsd => [heads * seq * dim, seq * dim, dim, 1],
            Self::Bshd => [seq * heads * dim, dim, heads * dim, 1],
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|layout| layout.name() == text).ok_or_else(|| Error::UnknownName {
            kind: "layout",
            name: text.to_owned(),
            nearest: nearest(text, Self::ALL.iter().map(|layout| layout.name())),
            allowed: "bhsd, bshd".to_owned(),
        })
    }
}
