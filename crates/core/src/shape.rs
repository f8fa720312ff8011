//! The sizes of a problem, its mask, and of what kinds its lengths, scores and types are.

use crate::{Error, Feature, Features, Granularity, Lengths, Mask, Precision, Scores, Types};

/// The largest head dimension a problem may have.
pub const MAX_HEAD_DIM: usize = 512;
/// The same for people.
pub const HEAD_DIMS: &str = "from 1 to 512";
/// Sequence lengths stay below this, so that positions and their sums fit 32-bit arithmetic in kernels.
pub const MAX_SEQUENCE: usize = 1 << 30;

/// The sizes that have names: (name, batch, heads, sequence, head dimension).
pub(crate) const NAMED: [(&str, usize, usize, usize, usize); 5] = [
    ("tiny", 1, 1, 32, 64),
    ("mission", 1, 8, 512, 64),
    ("small", 2, 8, 512, 64),
    ("long", 2, 8, 2048, 64),
    ("long128", 2, 8, 2048, 128),
];

/// All of a problem but the type of its queries: what has a spelling. Always valid: it can only be made by [`Shape::new`]
/// or by parsing.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    name: Option<&'static str>,
    sizes: Sizes,
    mask: Mask,
    kinds: Kinds,
}

/// Of what kinds a problem's lengths, scores and types are. The default is the plain problem: equal lengths, no modifiers,
/// one type. The data that a kind needs travels beside the tensors ([`crate::SideInputs`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Kinds {
    /// Lengths and the cache.
    pub lengths: Lengths,
    /// Modifiers of the scores.
    pub scores: Scores,
    /// Types of keys, values and output.
    pub types: Types,
    /// How exact the answer must be.
    pub precision: Precision,
    /// Whether a sequence's answer must be the same bits whatever else is in the batch.
    pub batch_invariant: bool,
}

impl Kinds {
    /// What they ask for beyond the plain problem.
    pub fn features(&self) -> Features {
        let Self { lengths, scores, types, precision, batch_invariant } = self;
        Features::NONE
            .with(Feature::PackedQueries, lengths.packed_queries)
            .with(Feature::PackedKeys, lengths.packed_keys)
            .with(Feature::UsedLengths, lengths.used)
            .with(Feature::UsedQueries, lengths.used_queries)
            .with(Feature::LeftPadding, lengths.left_padded)
            .with(Feature::CacheIndices, lengths.indexed)
            .with(Feature::PagedCache, lengths.page.is_some())
            .with(Feature::KvType, types.kv.is_some())
            .with(Feature::OutputType, types.output.is_some())
            .with(Feature::TensorScales, types.scales == Granularity::Tensor)
            .with(Feature::TokenScales, types.scales == Granularity::Token)
            .with(Feature::Softcap, scores.softcap.is_some())
            .with(Feature::Alibi, scores.alibi)
            .with(Feature::Bias, scores.bias.is_some())
            .with(Feature::BooleanMask, scores.mask.is_some())
            .with(Feature::BlockMask, scores.blocks.is_some())
            .with(Feature::Chunks, scores.chunk.is_some())
            .with(Feature::Sinks, scores.sinks)
            .with(Feature::HighPrecision, *precision == Precision::High)
            .with(Feature::BatchInvariant, *batch_invariant)
    }
}

/// The sizes of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads; a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key/value heads.
    pub heads_kv: usize,
    /// Queries per sequence.
    pub seq_q: usize,
    /// Keys per sequence.
    pub seq_kv: usize,
    /// Head dimension of queries and keys.
    pub dim_qk: usize,
    /// Head dimension of values and output.
    pub dim_v: usize,
}

impl Sizes {
    /// Equal lengths, equal heads, equal head dimensions.
    pub fn square(batch: usize, heads: usize, seq: usize, dim: usize) -> Self {
        Self { batch, heads_q: heads, heads_kv: heads, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim }
    }
}

impl Shape {
    /// Checks every size.
    pub fn new(sizes: Sizes, mask: Mask) -> Result<Self, Error> {
        let Sizes { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = sizes;
        let counts = [
            ("batch", batch, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("number of query heads", heads_q, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("number of key/value heads", heads_kv, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("query length", seq_q, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("key length", seq_kv, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("head dimension", dim_qk, MAX_HEAD_DIM + 1, HEAD_DIMS),
            ("value head dimension", dim_v, MAX_HEAD_DIM + 1, HEAD_DIMS),
        ];
        for (what, value, limit, allowed) in counts {
            if value == 0 || value >= limit {
                return Err(Error::Size { what, value, allowed });
            }
        }
        if !heads_q.is_multiple_of(heads_kv) {
            return Err(Error::Heads { heads_q, heads_kv });
        }
        Ok(Self { name: None, sizes, mask, kinds: Kinds::default() })
    }

    /// The name it is written with, where it has one.
    pub(crate) fn name(&self) -> Option<&'static str> {
        self.name
    }

    /// The same under a name of [`NAMED`], which is how it will be written.
    pub(crate) fn named(self, name: &'static str) -> Self {
        Self { name: Some(name), ..self }
    }

    /// Parses a comma-separated list, such as `mission,long:causal`.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, Error> {
        text.split(',').map(|part| part.trim().parse()).collect()
    }

    /// The sizes.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// The mask.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// The kinds of lengths, scores and types.
    pub fn kinds(&self) -> Kinds {
        self.kinds
    }

    /// The same sizes and mask with other kinds.
    pub fn with_kinds(self, kinds: Kinds) -> Result<Self, Error> {
        if kinds.lengths.packed_keys && kinds.lengths.page.is_some() {
            return Err(Error::PackedPages);
        }
        if kinds.lengths.packed_keys && kinds.lengths.indexed {
            return Err(Error::PackedIndices);
        }
        Ok(Self { kinds, ..self })
    }

    /// The same for one head alone.
    pub(crate) fn of_one_head(self) -> Self {
        Self { sizes: Sizes { batch: 1, heads_q: 1, heads_kv: 1, ..self.sizes }, ..self }
    }

    /// The same sizes under another mask.
    pub fn with_mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// Names with a size of their own, smallest first.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMED.iter().map(|named| named.0)
    }
}

impl PartialEq for Shape {
    /// A name is a way of writing, not a part of what is asked.
    fn eq(&self, other: &Self) -> bool {
        (self.sizes, self.mask, self.kinds) == (other.sizes, other.mask, other.kinds)
    }
}

impl Eq for Shape {}
