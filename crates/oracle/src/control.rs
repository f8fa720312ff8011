//! Negative controls: wrong answers that every gate must refuse.

use std::{fmt, str::FromStr};

use evosdpa_core::{Error, Problem, error::nearest};

/// A wrong answer that looks like one: if a gate lets it pass, the gate is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// Nothing was computed.
    Zeros,
    /// V was copied to the output.
    CopyOfV,
    /// Every row is the mean of V: a softmax that ignores its scores.
    MeanOfV,
    /// What a call before this one left in the buffer: the answer to other inputs of the same family. With several heads it
    /// is the answer of each one's neighbour.
    PreviousOutput,
    /// In the first head the right answer to the question with another mask; in the others nothing is wrong.
    AnotherMask,
    /// Packed queries: where sequences meet, one query was given to the next sequence.
    ShiftedQueries,
    /// Each sequence lost its last key.
    OneKeyLess,
    /// Each sequence with room for it has one key more.
    OneKeyMore,
    /// Each sequence lost its last query.
    OneQueryLess,
    /// Each sequence begins one key before its left padding ends.
    ShiftedPadding,
    /// Each sequence took the block of its own number.
    NoIndices,
    /// Two pages, of two sequences where there are two, were taken for each other.
    SwappedPages,
    /// The pages of each sequence were read from the last to the first.
    ReversedPages,
    /// The softcap was left out.
    NoSoftcap,
    /// ALiBi was left out.
    NoAlibi,
    /// The bias was left out.
    NoBias,
    /// The boolean mask was left out.
    NoMask,
    /// The block table was left out.
    NoBlocks,
    /// Each block of queries was given the next one's row of the block table; the only one, a row moved by one block of keys.
    ShiftedBlocks,
    /// Chunks were left out.
    NoChunks,
    /// The sinks were left out.
    NoSinks,
    /// 8-bit codes were read without their scales.
    NoScales,
}

impl Control {
    /// Every control.
    pub const ALL: [Self; 22] = [
        Self::Zeros,
        Self::CopyOfV,
        Self::MeanOfV,
        Self::PreviousOutput,
        Self::AnotherMask,
        Self::ShiftedQueries,
        Self::OneKeyLess,
        Self::OneKeyMore,
        Self::OneQueryLess,
        Self::ShiftedPadding,
        Self::NoIndices,
        Self::SwappedPages,
        Self::ReversedPages,
        Self::NoSoftcap,
        Self::NoAlibi,
        Self::NoBias,
        Self::NoMask,
        Self::NoBlocks,
        Self::ShiftedBlocks,
        Self::NoChunks,
        Self::NoSinks,
        Self::NoScales,
    ];

    /// The controls that a problem has: a modifier can be left out only where there is one.
    pub fn of(problem: &Problem) -> impl Iterator<Item = Self> {
        let problem = *problem;
        Self::ALL.into_iter().filter(move |control| control.applies(&problem))
    }

    /// Whether a problem has this control.
    pub fn applies(self, problem: &Problem) -> bool {
        let (lengths, scores) = (problem.lengths(), problem.scores());
        match self {
            Self::Zeros | Self::CopyOfV | Self::MeanOfV | Self::PreviousOutput | Self::AnotherMask => true,
            Self::ShiftedQueries => lengths.packed_queries,
            Self::OneKeyLess | Self::OneKeyMore => lengths.packed_keys || lengths.used,
            Self::OneQueryLess => lengths.used_queries,
            Self::ShiftedPadding => lengths.left_padded,
            Self::NoIndices => lengths.indexed && problem.sizes().batch > 1,
            Self::SwappedPages | Self::ReversedPages => lengths.page.is_some(),
            Self::NoSoftcap => scores.softcap.is_some(),
            Self::NoAlibi => scores.alibi,
            Self::NoBias => scores.bias.is_some(),
            Self::NoMask => scores.mask.is_some(),
            Self::NoBlocks | Self::ShiftedBlocks => scores.blocks.is_some(),
            Self::NoChunks => scores.chunk.is_some(),
            Self::NoSinks => scores.sinks,
            Self::NoScales => problem.has_codes(),
        }
    }

    /// The name used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::CopyOfV => "copy-of-v",
            Self::MeanOfV => "mean-of-v",
            Self::PreviousOutput => "previous-output",
            Self::AnotherMask => "another-mask",
            Self::ShiftedQueries => "shifted-queries",
            Self::OneKeyLess => "one-key-less",
            Self::OneKeyMore => "one-key-more",
            Self::OneQueryLess => "one-query-less",
            Self::ShiftedPadding => "shifted-padding",
            Self::NoIndices => "no-indices",
            Self::SwappedPages => "swapped-pages",
            Self::ReversedPages => "reversed-pages",
            Self::NoSoftcap => "no-softcap",
            Self::NoAlibi => "no-alibi",
            Self::NoBias => "no-bias",
            Self::NoMask => "no-mask",
            Self::NoBlocks => "no-blocks",
            Self::ShiftedBlocks => "shifted-blocks",
            Self::NoChunks => "no-chunks",
            Self::NoSinks => "no-sinks",
            Self::NoScales => "no-scales",
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Control {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|control| control.name() == text).ok_or_else(|| Error::UnknownName {
            kind: "negative control",
            name: text.to_owned(),
            nearest: nearest(text, Self::ALL.iter().map(|control| control.name())),
            allowed: Self::ALL.map(Self::name).join(", "),
        })
    }
}
