//! What a drawn problem reads besides Q, K and V.

use evosdpa_core::{DType, Layout, PageTable, Problem, ScaleViews, SideInputs, Tensor};

use super::{Source, arrangement::Places, noise};
use crate::{Scales, elements};

/// What a drawn problem reads besides Q, K, V and their scales; each is there when the problem asks for it.
#[derive(Clone, Debug, Default)]
pub struct Side {
    /// Where packed queries begin.
    pub cu_seqlens_q: Option<Vec<i32>>,
    /// Where packed keys begin.
    pub cu_seqlens_kv: Option<Vec<i32>>,
    /// How many keys of each sequence are filled.
    pub seqused_kv: Option<Vec<i32>>,
    /// How many queries of each sequence there are.
    pub seqused_q: Option<Vec<i32>>,
    /// How many of its filled keys come before each sequence's first.
    pub leftpad_kv: Option<Vec<i32>>,
    /// Which block of the cache, or row of the page table, is each sequence's.
    pub cache_batch_idx: Option<Vec<i32>>,
    /// The pages of each sequence, `[batch, pages of the longest]`.
    pub page_table: Option<Vec<i32>>,
    /// Entries in a row of the page table.
    pub page_row_stride: usize,
    /// ALiBi's slopes.
    pub alibi_slopes: Option<Vec<f32>>,
    /// The bias.
    pub bias: Option<Tensor>,
    /// The boolean mask.
    pub mask: Option<Tensor>,
    /// The block table.
    pub blocks: Option<Tensor>,
    /// The sink logits.
    pub sinks: Option<Vec<f32>>,
}

/// Every so many keys, one that the boolean mask hides from everybody.
const HIDDEN_KEYS: usize = 13;
/// Every so many queries, one that it hides everything from.
const BLIND_QUERIES: usize = 17;
/// The same of the blocks of keys and of queries that a block table has.
const HIDDEN_BLOCKS: usize = 5;
const BLIND_BLOCKS: usize = 4;

impl Side {
    pub(super) fn draw(problem: &Problem, source: &Source, places: &Places) -> Self {
        let (sizes, scores) = (problem.sizes(), problem.scores());
        let heads = sizes.heads_q;
        let bias = scores.bias.map(|broadcast| {
            let dtype = problem.compute_float().dtype();
            let mut bias = Tensor::zeros(broadcast.shape(sizes), dtype, Layout::Bhsd);
            elements::fill_rows(&mut bias, |at, out| noise::normals(source.hash_of(BIAS, at), out));
            bias
        });
        let mask = scores.mask.map(|broadcast| {
            let mut mask = Tensor::zeros(broadcast.shape(sizes), DType::U8, Layout::Bhsd);
            let [_, heads, queries, keys] = mask.view().shape();
            let mut coins = vec![0.0; keys];
            for (row, bytes) in mask.bytes_mut().chunks_mut(keys.max(1)).enumerate() {
                let at = [row / (heads * queries), row / queries % heads, row % queries];
                noise::uniforms(source.hash_of(MASK, at), &mut coins);
                let blind = broadcast.queries && at[2] % BLIND_QUERIES == 5;
                for (key, (byte, coin)) in bytes.iter_mut().zip(&coins).enumerate() {
                    *byte = u8::from(*coin < 0.5 && !blind && !is_hidden_by_mask(key));
                }
            }
            mask
        });
        let blocks = scores.blocks.map(|blocks| {
            let mut table = Tensor::zeros(blocks.shape(sizes), DType::U8, Layout::Bhsd);
            let [_, heads, rows, columns] = table.view().shape();
            let mut coins = vec![0.0; columns];
            for (row, bytes) in table.bytes_mut().chunks_mut(columns).enumerate() {
                let at = [row / (heads * rows), row / rows % heads, row % rows];
                noise::uniforms(source.hash_of(BLOCKS, at), &mut coins);
                let blind = at[2] % BLIND_BLOCKS == 2;
                for (column, (byte, coin)) in bytes.iter_mut().zip(&coins).enumerate() {
                    *byte = u8::from(*coin < 0.6 && !blind && !is_hidden_by_table(column));
                }
            }
            table
        });
        // Of the size of a row's sum of exponentials, so that a sink takes about half of the weight.
        let sink = |h: usize| {
            let mut normal = [0.0];
            noise::normals(source.hash_of(SINKS, [0, h, 0]), &mut normal);
            (sizes.seq_kv as f64).ln() + 0.5 * normal[0]
        };
        Self {
            cu_seqlens_q: places.cu_seqlens_q.clone(),
            cu_seqlens_kv: places.cu_seqlens_kv.clone(),
            seqused_kv: places.seqused_kv.clone(),
            seqused_q: places.seqused_q.clone(),
            leftpad_kv: places.leftpad_kv.clone(),
            cache_batch_idx: places.cache_batch_idx.clone(),
            page_table: places.page_table.clone(),
            page_row_stride: problem.pages_per_sequence(),
            // The slopes of the paper: a geometric row that ends at 2^-8 (Press, Smith and Lewis, 2021).
            alibi_slopes: scores.alibi.then(|| {
                (1..=heads).map(|h| f64::powf(2.0, -8.0 * h as f64 / heads as f64) as f32).collect()
            }),
            bias,
            mask,
            blocks,
            sinks: scores.sinks.then(|| (0..heads).map(|h| sink(h) as f32).collect()),
        }
    }

    /// The same to read from, with the scales of 8-bit tensors.
    pub fn views<'a>(&'a self, scales: Option<&'a Scales>) -> SideInputs<'a> {
        let of_codes = |scales: &'a [f32]| (!scales.is_empty()).then_some(scales);
        SideInputs {
            cu_seqlens_q: self.cu_seqlens_q.as_deref(),
            cu_seqlens_kv: self.cu_seqlens_kv.as_deref(),
            seqused_kv: self.seqused_kv.as_deref(),
            seqused_q: self.seqused_q.as_deref(),
            leftpad_kv: self.leftpad_kv.as_deref(),
            cache_batch_idx: self.cache_batch_idx.as_deref(),
            page_table: self
                .page_table
                .as_deref()
                .map(|entries| PageTable { entries, row_stride: self.page_row_stride }),
            alibi_slopes: self.alibi_slopes.as_deref(),
            bias: self.bias.as_ref().map(Tensor::view),
            mask: self.mask.as_ref().map(Tensor::view),
            blocks: self.blocks.as_ref().map(Tensor::view),
            sinks: self.sinks.as_deref(),
            scales: scales.map_or(ScaleViews::default(), |scales| ScaleViews {
                q: of_codes(&scales.q),
                k: of_codes(&scales.k),
                v: of_codes(&scales.v),
            }),
        }
    }
}

/// Whether every drawn boolean mask hides this key from every query.
pub(super) fn is_hidden_by_mask(key: usize) -> bool {
    key % HIDDEN_KEYS == 4
}

/// Whether every drawn block table hides this block of keys from every query.
pub(super) fn is_hidden_by_table(block: usize) -> bool {
    block % HIDDEN_BLOCKS == 3
}

/// Streams of random numbers beside those of Q, K and V.
const BIAS: u64 = 4;
const MASK: u64 = 5;
const SINKS: u64 = 6;
const BLOCKS: u64 = 7;
