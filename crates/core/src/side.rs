//! What a problem reads besides Q, K and V: lengths, pages, modifiers' data, scales.

use crate::{DType, Error, Granularity, KeyPlace, Problem, Sequences, TensorView};

/// Everything that a call reads besides Q, K and V. Each is there when the problem's kinds ask for it, and only then.
#[derive(Clone, Copy, Default)]
pub struct SideInputs<'a> {
    /// Where each sequence's queries begin among the packed ones, and where the last ones end: `batch + 1` values.
    pub cu_seqlens_q: Option<&'a [i32]>,
    /// The same for packed keys and values.
    pub cu_seqlens_kv: Option<&'a [i32]>,
    /// How many keys of each sequence are filled: `batch` values.
    pub seqused_kv: Option<&'a [i32]>,
    /// How many queries of each sequence there are: `batch` values.
    pub seqused_q: Option<&'a [i32]>,
    /// How many of the filled keys of each sequence come before its first: `batch` values.
    pub leftpad_kv: Option<&'a [i32]>,
    /// Which block of the cache, or row of the page table, is each sequence's: `batch` values.
    pub cache_batch_idx: Option<&'a [i32]>,
    /// Which pages are a sequence's.
    pub page_table: Option<PageTable<'a>>,
    /// ALiBi's slope of each query head.
    pub alibi_slopes: Option<&'a [f32]>,
    /// Added to the scores: f32, f16 or bf16, `[batch, query heads, queries, keys]` with size one where it is shared.
    pub bias: Option<TensorView<'a>>,
    /// Which keys may be seen: bytes (dtype u8) of the same form, 0 hides a key.
    pub mask: Option<TensorView<'a>>,
    /// Which blocks of keys each block of queries may see: bytes (dtype u8), 0 hides, `[batch or 1, query heads or 1, blocks of queries,
    /// blocks of keys]`.
    pub blocks: Option<TensorView<'a>>,
    /// The sink logit of each query head.
    pub sinks: Option<&'a [f32]>,
    /// Scales of 8-bit tensors.
    pub scales: ScaleViews<'a>,
}

/// The scales of those of Q, K and V that hold 8-bit codes; how many each has says the problem's [`Granularity`].
#[derive(Clone, Copy, Default)]
pub struct ScaleViews<'a> {
    /// Scales of Q.
    pub q: Option<&'a [f32]>,
    /// Scales of K.
    pub k: Option<&'a [f32]>,
    /// Scales of V.
    pub v: Option<&'a [f32]>,
}

/// The pages of each sequence: entry `i` of row `b` is the page that holds keys `i · page size ..` of sequence `b`. Entries
/// past a sequence's length may hold anything.
#[derive(Clone, Copy, Debug)]
pub struct PageTable<'a> {
    /// The rows.
    pub entries: &'a [i32],
    /// Entries between the beginnings of two rows.
    pub row_stride: usize,
}

impl PageTable<'_> {
    /// Which page holds the keys `index · page size ..` of a sequence.
    pub fn page(&self, sequence: usize, index: usize) -> Option<i32> {
        self.entries.get(sequence.checked_mul(self.row_stride)?.checked_add(index)?).copied()
    }

    /// How many rows there are, when each has so many entries.
    pub fn rows(&self, columns: usize) -> usize {
        match self.entries.len().checked_sub(columns) {
            None => 0,
            Some(before) => before.checked_div(self.row_stride).map_or(1, |rows| rows + 1),
        }
    }

    /// Where a position of a sequence is whose pages are in this row, in a cache of so many pages of so many tokens.
    pub(crate) fn place(
        &self,
        sequence: usize,
        row: usize,
        position: usize,
        tokens: usize,
        pages: usize,
    ) -> Result<KeyPlace, Error> {
        let index = position / tokens;
        let Some(page) = self.page(row, index) else {
            let (got, row_stride) = (self.entries.len(), self.row_stride);
            return Err(Error::PageTable { got, row_stride, sequence, index });
        };
        match usize::try_from(page) {
            Ok(batch) if batch < pages => Ok(KeyPlace { batch, row: position % tokens }),
            _ => Err(Error::Page { sequence, index, page, pages }),
        }
    }
}

impl Problem {
    /// Checks that what comes beside Q, K and V is what this problem asks for, and says where each sequence lies.
    pub fn check_side<'a>(
        &self,
        side: &SideInputs<'a>,
        q: &TensorView<'_>,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<Sequences<'a>, Error> {
        let sequences = Sequences::new(self, side, q.shape(), k.shape())?;
        self.check_modifiers(side)?;
        let (heads_q, heads_kv) = (self.sizes().heads_q, self.sizes().heads_kv);
        for (what, scales, tensor, heads) in [
            ("scales of Q", side.scales.q, q, heads_q),
            ("scales of K", side.scales.k, k, heads_kv),
            ("scales of V", side.scales.v, v, heads_kv),
        ] {
            let [first, second, third, _] = tensor.shape();
            let expected = match self.scale_granularity() {
                Granularity::Tensor => 1,
                Granularity::Head => self.sizes().batch * heads,
                Granularity::Token => first * second * third,
            };
            check_slice(what, scales.map(<[f32]>::len), tensor.dtype().is_eight_bit(), expected)?;
        }
        Ok(sequences)
    }

    /// The part of [`Problem::check_side`] that is about scores.
    pub fn check_modifiers(&self, side: &SideInputs<'_>) -> Result<(), Error> {
        let scores = self.scores();
        let heads = self.sizes().heads_q;
        check_slice("ALiBi slopes", side.alibi_slopes.map(<[f32]>::len), scores.alibi, heads)?;
        check_slice("sinks", side.sinks.map(<[f32]>::len), scores.sinks, heads)?;
        for (what, tensor, expected) in [
            ("bias", side.bias, scores.bias.map(|bias| bias.shape(self.sizes()))),
            ("mask", side.mask, scores.mask.map(|mask| mask.shape(self.sizes()))),
            ("block table", side.blocks, scores.blocks.map(|blocks| blocks.shape(self.sizes()))),
        ] {
            check_wanted(what, tensor.is_some(), expected.is_some())?;
            let (Some(tensor), Some(expected)) = (tensor, expected) else { continue };
            if tensor.shape() != expected {
                return Err(Error::SideShape { what, got: tensor.shape(), expected });
            }
            let (dtype, bytes) = (tensor.dtype(), what != "bias");
            let wrong = if bytes { dtype != DType::U8 } else { dtype.is_eight_bit() };
            if wrong {
                let allowed = if bytes { "bytes (u8), 0 to hide" } else { "f32, f16 or bf16" };
                return Err(Error::SideType { what, got: dtype, allowed });
            }
        }
        Ok(())
    }
}

pub(crate) fn check_wanted(what: &'static str, given: bool, wanted: bool) -> Result<(), Error> {
    match (given, wanted) {
        (false, true) => Err(Error::SideMissing { what }),
        (true, false) => Err(Error::SideNotWanted { what }),
        _ => Ok(()),
    }
}

pub(crate) fn check_slice(
    what: &'static str,
    given: Option<usize>,
    wanted: bool,
    expected: usize,
) -> Result<(), Error> {
    check_wanted(what, given.is_some(), wanted)?;
    match given {
        Some(got) if got != expected => Err(Error::SideLength { what, got, expected }),
        _ => Ok(()),
    }
}
