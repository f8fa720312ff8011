//! What a problem asks for beyond equal lengths, one dtype and a mask.

use std::fmt;

/// Something that a kernel has to know about to answer a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Feature {
    /// `:varlen`, `:varlen=q`
    PackedQueries,
    /// `:varlen`, `:varlen=kv`
    PackedKeys,
    /// `:used`
    UsedLengths,
    /// `:used-q`
    UsedQueries,
    /// `:leftpad`
    LeftPadding,
    /// `:indexed`
    CacheIndices,
    /// `:paged=16`
    PagedCache,
    /// `:kv=e4m3`
    KvType,
    /// `:o=f32`
    OutputType,
    /// `:scales=tensor`
    TensorScales,
    /// `:scales=token`
    TokenScales,
    /// `:softcap=30`
    Softcap,
    /// `:alibi`
    Alibi,
    /// `:bias`
    Bias,
    /// `:mask`
    BooleanMask,
    /// `:blocks=128`
    BlockMask,
    /// `:chunk=8192`
    Chunks,
    /// `:sinks`
    Sinks,
    /// `:precise`
    HighPrecision,
    /// `:invariant`
    BatchInvariant,
}

impl Feature {
    /// Every feature.
    pub const ALL: [Self; 20] = [
        Self::PackedQueries,
        Self::PackedKeys,
        Self::UsedLengths,
        Self::UsedQueries,
        Self::LeftPadding,
        Self::CacheIndices,
        Self::PagedCache,
        Self::KvType,
        Self::OutputType,
        Self::TensorScales,
        Self::TokenScales,
        Self::Softcap,
        Self::Alibi,
        Self::Bias,
        Self::BooleanMask,
        Self::BlockMask,
        Self::Chunks,
        Self::Sinks,
        Self::HighPrecision,
        Self::BatchInvariant,
    ];

    /// What a refusal calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::PackedQueries => "packed queries",
            Self::PackedKeys => "packed keys",
            Self::UsedLengths => "used lengths",
            Self::UsedQueries => "used queries",
            Self::LeftPadding => "left padding",
            Self::CacheIndices => "cache batch indices",
            Self::PagedCache => "a paged cache",
            Self::KvType => "a type of its own for keys and values",
            Self::OutputType => "a type of its own for the output",
            Self::TensorScales => "one scale per tensor",
            Self::TokenScales => "scales per token",
            Self::Softcap => "softcap",
            Self::Alibi => "ALiBi",
            Self::Bias => "a bias",
            Self::BooleanMask => "a boolean mask",
            Self::BlockMask => "a block mask",
            Self::Chunks => "attention chunks",
            Self::Sinks => "sinks",
            Self::HighPrecision => "high precision",
            Self::BatchInvariant => "batch-invariant results",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of features: small, and a key of caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features(u32);

impl Features {
    /// No feature: what every kernel takes.
    pub const NONE: Self = Self(0);

    /// This set with a feature, where `asked`.
    pub const fn with(self, feature: Feature, asked: bool) -> Self {
        if asked { Self(self.0 | 1 << feature as u8) } else { self }
    }

    /// This set less another.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether this is one of them.
    pub const fn contains(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u8 != 0
    }

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |feature| self.contains(*feature))
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Self {
        features.into_iter().fold(Self::NONE, |set, feature| set.with(feature, true))
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(Feature::name).collect();
        f.write_str(&names.join(", "))
    }
}
