//! What happens to a score between QKᵀ and the softmax.
//!
//! The order: `scale → softcap → bias and ALiBi → masks → sinks`, the last in the denominator alone.

use std::num::NonZeroUsize;

use crate::{Error, TensorView, shape::MAX_SEQUENCE};

/// The modifiers of a problem's scores. The default: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scores {
    /// A scaled score `s` becomes `cap · tanh(s / cap)`.
    pub softcap: Option<Softcap>,
    /// Each head takes its slope times the distance between query and key off the score.
    pub alibi: bool,
    /// A dense tensor is added to the scores.
    pub bias: Option<Broadcast>,
    /// A dense tensor of booleans says which keys may be seen, besides the mask.
    pub mask: Option<Broadcast>,
    /// A table says which blocks of queries may see which blocks of keys, besides the mask.
    pub blocks: Option<Blocks>,
    /// A query sees keys of its own chunk only: positions that agree when divided by so many.
    pub chunk: Option<Chunk>,
    /// Each head has a logit in the denominator that belongs to no key.
    pub sinks: bool,
}

/// The cap of a softcap: finite and positive.
#[derive(Clone, Copy, Debug)]
pub struct Softcap(f32);

impl Softcap {
    /// Checks the value.
    pub fn new(cap: f32) -> Result<Self, Error> {
        if cap.is_finite() && cap > 0.0 { Ok(Self(cap)) } else { Err(Error::Softcap(cap)) }
    }

    /// The cap.
    pub fn value(self) -> f32 {
        self.0
    }
}

impl PartialEq for Softcap {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

// Never NaN.
impl Eq for Softcap {}

impl std::hash::Hash for Softcap {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        // Never zero, so equal values have equal bits.
        self.0.to_bits().hash(state);
    }
}

/// Keys in an attention chunk, from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunk(NonZeroUsize);

impl Chunk {
    /// Checks the range.
    pub fn new(keys: usize) -> Result<Self, Error> {
        match NonZeroUsize::new(keys) {
            Some(size) if keys < MAX_SEQUENCE => Ok(Self(size)),
            _ => Err(Error::Size { what: "attention chunk", value: keys, allowed: "from 1 to 2^30 - 1" }),
        }
    }

    /// How many keys a chunk has.
    pub fn keys(self) -> usize {
        self.0.get()
    }
}

/// A block mask: queries and keys are cut into blocks, and a table has a byte for each pair of blocks, of which 0 hides all keys of the
/// one from all queries of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    queries: NonZeroUsize,
    keys: NonZeroUsize,
    /// Each sequence has a table of its own.
    pub batch: bool,
    /// Each query head has a table of its own.
    pub heads: bool,
}

impl Blocks {
    /// Sizes of blocks are multiples of this: no kernel has smaller tiles.
    pub const STEP: usize = 64;

    /// Checks the sizes of the blocks.
    pub fn new(queries: usize, keys: usize, batch: bool, heads: bool) -> Result<Self, Error> {
        let size = |what, value: usize| match NonZeroUsize::new(value) {
            Some(size) if value.is_multiple_of(Self::STEP) && value < MAX_SEQUENCE => Ok(size),
            _ => Err(Error::Size { what, value, allowed: "a multiple of 64 below 2^30" }),
        };
        Ok(Self { queries: size("query block", queries)?, keys: size("key block", keys)?, batch, heads })
    }

    /// Queries of a block.
    pub fn queries(self) -> usize {
        self.queries.get()
    }

    /// Keys of a block.
    pub fn keys(self) -> usize {
        self.keys.get()
    }

    /// The shape of the table for these sizes: `[batch or 1, query heads or 1, blocks of queries, blocks of keys]`.
    pub fn shape(self, sizes: crate::Sizes) -> [usize; 4] {
        let size = |own: bool, n: usize| if own { n } else { 1 };
        [
            size(self.batch, sizes.batch),
            size(self.heads, sizes.heads_q),
            sizes.seq_q.div_ceil(self.queries()),
            sizes.seq_kv.div_ceil(self.keys()),
        ]
    }

    /// A query's row of a table that was checked, one byte for each block of keys. Queries count in their sequence.
    pub fn row<'a>(self, table: &TensorView<'a>, sequence: usize, head: usize, query: usize) -> &'a [u8] {
        let at = |own: bool, i: usize| if own { i } else { 0 };
        let [batch_stride, head_stride, row_stride, _] = table.strides();
        let row = query / self.queries();
        let first =
            at(self.batch, sequence) * batch_stride + at(self.heads, head) * head_stride + row * row_stride;
        &table.bytes()[first..][..table.shape()[3]]
    }
}

/// Which dimensions of a `[batch, query heads, queries, keys]` tensor are written out; the others have size one and are
/// shared. Keys always are written out: what is the same for all keys of a row does not change a softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Broadcast {
    /// Each sequence has its own.
    pub batch: bool,
    /// Each query head has its own.
    pub heads: bool,
    /// Each query has its own.
    pub queries: bool,
}

impl Broadcast {
    /// One `[queries, keys]` matrix for every sequence and head.
    pub const SHARED: Self = Self { batch: false, heads: false, queries: true };

    /// The tensor's shape for these sizes.
    pub fn shape(self, sizes: crate::Sizes) -> [usize; 4] {
        let size = |own: bool, n: usize| if own { n } else { 1 };
        [
            size(self.batch, sizes.batch),
            size(self.heads, sizes.heads_q),
            size(self.queries, sizes.seq_q),
            sizes.seq_kv,
        ]
    }

    /// The element of such a tensor that stands for this query head, query and key.
    pub fn index(self, [batch, head, query, key]: [usize; 4]) -> [usize; 4] {
        let at = |own: bool, i: usize| if own { i } else { 0 };
        [at(self.batch, batch), at(self.heads, head), at(self.queries, query), key]
    }

    /// As it is spelled behind `:bias=`: `h`, `bk`; empty for [`Broadcast::SHARED`].
    pub(crate) fn letters(self) -> String {
        let letter = |own: bool, letter: &'static str| if own { letter } else { "" };
        let keys = if self.queries { "" } else { "k" };
        [letter(self.batch, "b"), letter(self.heads, "h"), keys].concat()
    }

    /// Reads what [`Broadcast::letters`] writes, and the longer form with `qk` at the end.
    pub(crate) fn from_letters(text: &str) -> Option<Self> {
        let (batch, rest) = text.strip_prefix('b').map_or((false, text), |rest| (true, rest));
        let (heads, rest) = rest.strip_prefix('h').map_or((false, rest), |rest| (true, rest));
        let queries = match rest {
            "" | "qk" => true,
            "k" => false,
            _ => return None,
        };
        (!text.is_empty()).then_some(Self { batch, heads, queries })
    }
}
