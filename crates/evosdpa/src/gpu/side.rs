//! What a call reads besides Q, K and V: lengths, pages and what modifies scores, in device memory.

use evosdpa_core::{Alignment, Blocks, Broadcast, DType, Error as Asked, Mask, Problem};
use evosdpa_kernels::{SdpaParams, params};

use super::tensors::{check_address, check_strides};
use crate::Error;

/// Where each sequence's packed tokens begin, and where the last ones end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTokens {
    /// The device address of `batch + 1` cumulative lengths (`i32`).
    pub cu_seqlens: u64,
    /// Tokens that the packed tensors have room for: the third dimension of `[1, heads, tokens, dim]`.
    pub tokens: usize,
}

/// Which pages of a cache are a sequence's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePages {
    /// The device address of the page table (`i32`), one row a sequence.
    pub table: u64,
    /// Entries from row to row; at least as many as the longest sequence has pages.
    pub row_stride: i64,
    /// Pages that the cache has: the first dimension of `[pages, heads, page size, dim]`.
    pub pages: usize,
}

/// Which block of a cache, or row of a page table, is each sequence's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceIndices {
    /// The device address of one `i32` a sequence.
    pub address: u64,
    /// Blocks that the cache has, or rows of the page table.
    pub rows: usize,
}

/// A bias or a boolean mask: `[batch, query heads, queries, keys]`, its keys contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceDense {
    /// The device address of its first element.
    pub address: u64,
    /// Its element type: f32, f16 or bf16 of a bias, u8 of a mask.
    pub dtype: DType,
    /// Strides in elements: batch, head, query. Where the problem says that it is shared, a stride has no meaning.
    pub strides: [i64; 3],
}

/// What a call reads besides Q, K, V and their scales. Each is there when the problem asks for it, and only then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSide {
    /// Packed queries.
    pub queries: Option<DeviceTokens>,
    /// Packed keys and values.
    pub keys: Option<DeviceTokens>,
    /// The device address of how many keys of each sequence are filled: `batch` values (`i32`).
    pub seqused_kv: Option<u64>,
    /// The device address of how many queries of each sequence there are: `batch` values (`i32`).
    pub seqused_q: Option<u64>,
    /// The device address of how many of each sequence's filled keys come before its first: `batch` values (`i32`).
    pub leftpad_kv: Option<u64>,
    /// Blocks of the cache, or rows of the page table, in an order of their own.
    pub indices: Option<DeviceIndices>,
    /// A cache in pages.
    pub pages: Option<DevicePages>,
    /// The device address of ALiBi's slopes: one `f32` a query head.
    pub alibi_slopes: Option<u64>,
    /// What is added to the scores.
    pub bias: Option<DeviceDense>,
    /// Which keys may be seen: bytes, 0 hides one.
    pub mask: Option<DeviceDense>,
    /// The device address of a block table: bytes, `[batch or 1, query heads or 1, blocks of queries, blocks of keys]`, contiguous.
    pub blocks: Option<u64>,
    /// The device address of the sink logits: one `f32` a query head.
    pub sinks: Option<u64>,
}

impl DeviceSide {
    /// What the problem asks for, at addresses and with strides that suit every kernel.
    pub(crate) fn assumed(problem: &Problem, address: u64) -> Self {
        let (lengths, scores, sizes) = (problem.lengths(), problem.scores(), problem.sizes());
        let dense = |broadcast: Option<Broadcast>, dtype| {
            broadcast.map(|broadcast| {
                let [_, heads, queries, keys] = broadcast.shape(sizes).map(|size| size as i64);
                DeviceDense { address, dtype, strides: [heads * queries * keys, queries * keys, keys] }
            })
        };
        let tokens = |packed: bool, tokens| packed.then_some(DeviceTokens { cu_seqlens: address, tokens });
        Self {
            queries: tokens(lengths.packed_queries, problem.q_shape()[2]),
            keys: tokens(lengths.packed_keys, problem.k_shape()[2]),
            seqused_kv: lengths.used.then_some(address),
            seqused_q: lengths.used_queries.then_some(address),
            leftpad_kv: lengths.left_padded.then_some(address),
            indices: lengths.indexed.then_some(DeviceIndices { address, rows: sizes.batch }),
            pages: lengths.page.map(|_| DevicePages {
                table: address,
                row_stride: problem.pages_per_sequence() as i64,
                pages: problem.k_shape()[0],
            }),
            alibi_slopes: scores.alibi.then_some(address),
            bias: dense(scores.bias, problem.compute_float().dtype()),
            mask: dense(scores.mask, DType::U8),
            blocks: scores.blocks.map(|_| address),
            sinks: scores.sinks.then_some(address),
        }
    }

    /// The addresses of everything that is a list of 32-bit words, in one order.
    pub(super) fn lists(&self) -> [Option<u64>; 9] {
        [
            self.queries.map(|queries| queries.cu_seqlens),
            self.keys.map(|keys| keys.cu_seqlens),
            self.seqused_kv,
            self.seqused_q,
            self.leftpad_kv,
            self.indices.map(|indices| indices.address),
            self.pages.map(|pages| pages.table),
            self.alibi_slopes,
            self.sinks,
        ]
    }

    /// Whether it differs from another, which has no block table, in nothing but where things lie.
    pub(super) fn has_form_of(&self, other: &Self) -> bool {
        let there = |side: &Self| side.lists().map(|list| list.is_some());
        let tokens = |tokens: Option<DeviceTokens>| tokens.map(|tokens| tokens.tokens);
        let pages = |pages: Option<DevicePages>| pages.map(|pages| (pages.row_stride, pages.pages));
        let dense = |dense: Option<DeviceDense>| dense.map(|dense| (dense.dtype, dense.strides));
        there(self) == there(other)
            && tokens(self.queries) == tokens(other.queries)
            && tokens(self.keys) == tokens(other.keys)
            && self.indices.map(|indices| indices.rows) == other.indices.map(|indices| indices.rows)
            && pages(self.pages) == pages(other.pages)
            && dense(self.bias) == dense(other.bias)
            && dense(self.mask) == dense(other.mask)
            && self.blocks.is_none()
    }

    /// Tells kernels where the lists, the bias and the mask are.
    pub(super) fn place(&self, params: &mut SdpaParams) {
        let places = [
            &mut params.cu_seqlens_q,
            &mut params.cu_seqlens_kv,
            &mut params.seqused_kv,
            &mut params.seqused_q,
            &mut params.leftpad_kv,
            &mut params.cache_batch_idx,
            &mut params.page_table,
            &mut params.alibi_slopes,
            &mut params.sinks,
        ];
        for (place, list) in places.into_iter().zip(self.lists()) {
            *place = list.unwrap_or(0);
        }
        let address = |dense: Option<DeviceDense>| dense.map_or(0, |dense| dense.address);
        (params.bias, params.mask) = (address(self.bias), address(self.mask));
    }

    /// Refuses what is missing, not asked for, or cannot be read.
    pub(super) fn check(&self, problem: &Problem) -> Result<(), Error> {
        let (lengths, scores) = (problem.lengths(), problem.scores());
        let words = [
            ("cumulative query lengths", self.queries.map(|q| q.cu_seqlens), lengths.packed_queries),
            ("cumulative key lengths", self.keys.map(|k| k.cu_seqlens), lengths.packed_keys),
            ("used key lengths", self.seqused_kv, lengths.used),
            ("used query lengths", self.seqused_q, lengths.used_queries),
            ("left paddings", self.leftpad_kv, lengths.left_padded),
            ("cache batch indices", self.indices.map(|indices| indices.address), lengths.indexed),
            ("page table", self.pages.map(|pages| pages.table), lengths.page.is_some()),
            ("ALiBi slopes", self.alibi_slopes, scores.alibi),
            ("sinks", self.sinks, scores.sinks),
        ];
        for (what, address, wanted) in words {
            if check_wanted(what, address.is_some(), wanted)? {
                check_address(what, address.unwrap_or(0), 4)?;
            }
        }
        if let Some(pages) = &self.pages {
            let entries = problem.pages_per_sequence() as i64;
            if pages.row_stride < entries && problem.sizes().batch > 1 {
                return Err(Error::PageRows { row_stride: pages.row_stride, entries });
            }
            check_count("pages of the cache", pages.pages)?;
        }
        if let Some(indices) = &self.indices {
            check_count("blocks of the cache", indices.rows)?;
        }
        for (what, tokens) in [("packed queries", self.queries), ("packed keys", self.keys)] {
            tokens.map_or(Ok(()), |tokens| check_count(what, tokens.tokens))?;
        }
        if check_wanted("block table", self.blocks.is_some(), scores.blocks.is_some())? {
            check_address("block table", self.blocks.unwrap_or(0), 1)?;
        }
        if let Some(blocks) = scores.blocks {
            check_count("block table", blocks.shape(problem.sizes())[..3].iter().product())?;
        }
        self.check_dense(problem, "bias", self.bias, scores.bias)?;
        self.check_dense(problem, "mask", self.mask, scores.mask)
    }

    fn check_dense(
        &self,
        problem: &Problem,
        what: &'static str,
        given: Option<DeviceDense>,
        asked: Option<Broadcast>,
    ) -> Result<(), Error> {
        check_wanted(what, given.is_some(), asked.is_some())?;
        let (Some(given), Some(asked)) = (given, asked) else { return Ok(()) };
        let bytes = what == "mask";
        if if bytes { given.dtype != DType::U8 } else { given.dtype.is_eight_bit() } {
            let allowed = if bytes { "bytes (u8), 0 to hide" } else { "f32, f16 or bf16" };
            return Err(Asked::SideType { what, got: given.dtype, allowed }.into());
        }
        check_address(what, given.address, given.dtype.bytes() as u64)?;
        check_strides(what, &given.strides, &asked.shape(problem.sizes())[..3])
    }

    /// Fills in what kernels are told of all this.
    pub(super) fn fill(&self, problem: &Problem, params: &mut SdpaParams) {
        let (lengths, scores, sizes) = (problem.lengths(), problem.scores(), problem.sizes());
        // What kernels read for each sequence before they look at its rows.
        let own_lengths = lengths.packed_queries || lengths.packed_keys || lengths.used;
        let own_places = lengths.used_queries || lengths.left_padded || lengths.indexed;
        if own_lengths || own_places {
            // Counted from each sequence's own diagonal.
            let band = problem.mask().band(0, 0);
            let bottom_right = alignment(problem.mask()) == Alignment::BottomRight;
            (params.band_lo, params.band_hi) = (band.lo as i32, band.hi as i32);
            (params.position, params.bottom_right) = (0, i32::from(bottom_right));
        } else {
            params.position = problem.position(0, sizes.seq_q, sizes.seq_kv) as i32;
        }
        self.place(params);
        if let Some(queries) = self.queries {
            params.tokens_q = queries.tokens as i32;
            (params.q_stride[0], params.o_stride[0], params.lse_stride[0]) = (0, 0, 0);
        }
        if let Some(keys) = self.keys {
            params.tokens_kv = keys.tokens as i32;
            (params.k_stride[0], params.v_stride[0]) = (0, 0);
        }
        if let Some(indices) = self.indices {
            params.cache_rows = indices.rows as i64;
        }
        if let (Some(pages), Some(size)) = (self.pages, lengths.page) {
            params.page_table_stride = pages.row_stride;
            (params.page_size, params.pages) = (size.tokens() as i32, pages.pages as i32);
        }
        params.softcap = scores.softcap.map_or(0.0, |cap| cap.value());
        params.chunk = scores.chunk.map_or(0, |chunk| chunk.keys() as i32);
        if let (Some(bias), Some(asked)) = (self.bias, scores.bias) {
            params.bias_stride = strides(bias, asked);
            params.bias_type = match bias.dtype {
                DType::F16 => params::BIAS_F16,
                DType::BF16 => params::BIAS_BF16,
                _ => params::BIAS_F32,
            };
        }
        if let (Some(mask), Some(asked)) = (self.mask, scores.mask) {
            params.mask_stride = strides(mask, asked);
        }
        if let (Some(address), Some(asked)) = (self.blocks, scores.blocks) {
            fill_blocks(address, asked, problem.sizes().heads_q, params);
        }
    }
}

fn fill_blocks(address: u64, asked: Blocks, heads: usize, params: &mut SdpaParams) {
    params.blocks = address;
    (params.block_q, params.block_kv) = (asked.queries() as i32, asked.keys() as i32);
    params.block_head_tables = i32::from(asked.heads);
    params.block_batch_tables = match (asked.batch, asked.heads) {
        (false, _) => 0,
        (true, false) => 1,
        (true, true) => heads as i32,
    };
}

/// Where a mask's diagonal lies; without one positions count as if it ended at the last key.
fn alignment(mask: Mask) -> Alignment {
    match mask {
        Mask::Full => Alignment::BottomRight,
        Mask::Causal(alignment) | Mask::Window { alignment, .. } => alignment,
    }
}

fn strides(dense: DeviceDense, asked: Broadcast) -> [i64; 3] {
    let [batch, head, query] = dense.strides;
    let own = |own: bool, stride: i64| if own { stride } else { 0 };
    [own(asked.batch, batch), own(asked.heads, head), own(asked.queries, query)]
}

/// Whether it is there, as it should be.
fn check_wanted(what: &'static str, given: bool, wanted: bool) -> Result<bool, Error> {
    match (given, wanted) {
        (false, true) => Err(Asked::SideMissing { what }.into()),
        (true, false) => Err(Asked::SideNotWanted { what }.into()),
        _ => Ok(given),
    }
}

/// Kernels count in 32 bits.
fn check_count(what: &'static str, value: usize) -> Result<(), Error> {
    match i32::try_from(value) {
        Ok(1..) => Ok(()),
        _ => Err(Asked::Size { what, value, allowed: "from 1 to 2^31 - 1" }.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceTensors, choose::assumed_tensors};

    fn problem(text: &str) -> Problem {
        Problem::new(text.parse().unwrap(), DType::BF16).unwrap()
    }

    #[test]
    fn what_is_missing_or_not_asked_for_is_refused_by_name() {
        let everything = "b3h4/2s9/33d16:varlen=q:used:used-q:leftpad:indexed:paged=16:softcap=30:alibi:bias=h:mask=b:blocks=h64:chunk=8:sinks";
        let good = assumed_tensors(&problem(everything));
        let refusal = |tensors: &DeviceTensors, text: &str| {
            tensors.check(&problem(text)).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(refusal(&good, everything), "");
        type Change = fn(&mut DeviceSide);
        let cases: [(Change, &str); 18] = [
            (|s| s.queries = None, "cumulative query lengths"),
            (|s| s.keys = s.queries, "cumulative key lengths"),
            (|s| s.seqused_kv = None, "used key lengths"),
            (|s| s.seqused_kv = Some(2), "used key lengths: the address 0x2"),
            (|s| s.seqused_q = None, "used query lengths"),
            (|s| s.leftpad_kv = Some(6), "left paddings: the address 0x6"),
            (|s| s.indices = None, "cache batch indices"),
            (|s| s.indices.as_mut().unwrap().rows = 0, "blocks of the cache"),
            (|s| s.pages = None, "page table"),
            (|s| s.pages.as_mut().unwrap().row_stride = 2, "page table: rows of 2 entries"),
            (|s| s.pages.as_mut().unwrap().pages = 0, "pages of the cache"),
            (|s| s.alibi_slopes = Some(0), "ALiBi slopes has no memory"),
            (|s| s.blocks = None, "block table"),
            (|s| s.blocks = Some(0), "block table has no memory"),
            (|s| s.sinks = None, "sinks"),
            (|s| s.bias.as_mut().unwrap().dtype = DType::U8, "bias"),
            (|s| s.bias.as_mut().unwrap().strides[1] = -1, "bias: the stride -1"),
            (|s| s.mask.as_mut().unwrap().dtype = DType::F32, "mask"),
        ];
        for (change, expected) in cases {
            let mut changed = good;
            change(&mut changed.side);
            let message = refusal(&changed, everything);
            assert!(message.contains(expected), "{expected}: {message}");
        }
        assert!(refusal(&good, "b3h4/2s9/33d16").contains("cumulative query lengths"));
    }

    #[test]
    fn bands_of_own_lengths_count_from_the_diagonal() {
        let params = |text: &str| assumed_tensors(&problem(text)).params(&problem(text));
        let plain = params("b2h4s9/33d16:causal-br");
        assert_eq!((plain.band_hi, plain.position, plain.bottom_right), (24, 24, 0));
        let own = params("b2h4s9/33d16:causal-br:used");
        assert_eq!((own.band_hi, own.position, own.bottom_right), (0, 0, 1));
        let left = params("b2h4s9/33d16:window-tl=3/1:used");
        assert_eq!((left.band_lo, left.band_hi, left.bottom_right), (-3, 1, 0));
        for own in ["used-q", "leftpad", "indexed"] {
            let own = params(&format!("b2h4s9/33d16:causal-br:{own}"));
            assert_eq!((own.band_hi, own.position, own.bottom_right), (0, 0, 1));
        }
        let full = params("b2h4s9/33d16:alibi:varlen");
        assert_eq!((full.band_hi, full.bottom_right, full.q_stride[0]), (1 << 30, 1, 0));
    }

    #[test]
    fn shared_dimensions_have_no_stride() {
        let text = "b2h4s9/33d16:bias=h:mask=bk";
        let params = assumed_tensors(&problem(text)).params(&problem(text));
        assert_eq!(params.bias_stride, [0, 9 * 33, 33]);
        assert_eq!((params.mask_stride, params.bias_type), ([33, 0, 0], params::BIAS_BF16));
        for (own, batch, head) in [("", 0, 0), ("b", 1, 0), ("h", 0, 1), ("bh", 4, 1)] {
            let text = format!("b2h4s9/33d16:blocks={own}128/64");
            let params = assumed_tensors(&problem(&text)).params(&problem(&text));
            assert_eq!((params.block_batch_tables, params.block_head_tables), (batch, head), "{text}");
            assert_eq!((params.block_q, params.block_kv), (128, 64));
        }
    }
}
