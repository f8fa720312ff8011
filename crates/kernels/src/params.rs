//! The parameter struct that every kernel takes by value as its first argument.
//!
//! The C side is `cuda/common/params.h`; both sides assert size and offsets, so a change on one side cannot go
//! unnoticed.

use std::mem::{offset_of, size_of};

/// `band_lo` at or below this means: no limit on that side.
pub const BAND_UNBOUNDED_LO: i32 = -(1 << 30);
/// `band_hi` at or above this means: no limit on that side.
pub const BAND_UNBOUNDED_HI: i32 = 1 << 30;

/// Parameters of one attention launch. Device addresses are plain integers: this crate knows no GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SdpaParams {
    /// Device address of Q.
    pub q: u64,
    /// Device address of K.
    pub k: u64,
    /// Device address of V.
    pub v: u64,
    /// Device address of O.
    pub o: u64,
    /// Device address of the log-sum-exp rows (fp32, natural log); 0 when not wanted.
    pub lse: u64,
    /// Scales of 8-bit Q, one per (batch, head), contiguous; 0 for 16-bit inputs.
    pub q_scale: u64,
    /// Scales of 8-bit K.
    pub k_scale: u64,
    /// Scales of 8-bit V.
    pub v_scale: u64,
    /// Strides of Q in elements: batch, head, sequence. The innermost dimension is contiguous.
    pub q_stride: [i64; 3],
    /// Strides of K in elements.
    pub k_stride: [i64; 3],
    /// Strides of V in elements.
    pub v_stride: [i64; 3],
    /// Strides of O in elements.
    pub o_stride: [i64; 3],
    /// Strides of the log-sum-exp in elements: batch, head. The sequence is contiguous.
    pub lse_stride: [i64; 2],
    /// Batch size.
    pub batch: i32,
    /// Query heads.
    pub heads_q: i32,
    /// Key/value heads.
    pub heads_kv: i32,
    /// Query length.
    pub seq_q: i32,
    /// Key/value length.
    pub seq_kv: i32,
    /// Head dimension of Q and K.
    pub dim_qk: i32,
    /// Head dimension of V and O.
    pub dim_v: i32,
    /// Key `j` is visible to query `i` iff `i + band_lo <= j <= i + band_hi`.
    pub band_lo: i32,
    /// See `band_lo`.
    pub band_hi: i32,
    /// Softmax scale.
    pub scale: f32,
    /// `scale · log2(e)`.
    pub scale_log2: f32,
    /// A scaled score `s` becomes `softcap · tanh(s / softcap)`; 0 where there is no softcap.
    pub softcap: f32,
    /// Device address of a 32-bit word that hands out work: 0 before the launch, left at 0 by the kernel. 0: there is none,
    /// and the kernel divides its work up beforehand.
    pub counter: u64,
    /// Device address of ALiBi's slope of each query head.
    pub alibi_slopes: u64,
    /// Device address of the sink logit of each query head.
    pub sinks: u64,
    /// Device address of the bias.
    pub bias: u64,
    /// Device address of the boolean mask, bytes of which 0 hides a key.
    pub mask: u64,
    /// Strides of the bias in elements: batch, head, query; 0 where it is shared. Keys are contiguous.
    pub bias_stride: [i64; 3],
    /// Strides of the boolean mask in bytes, likewise.
    pub mask_stride: [i64; 3],
    /// One of [`BIAS_F32`], [`BIAS_F16`] and [`BIAS_BF16`].
    pub bias_type: i32,
    /// Query `i` stands at `i + position` among the keys: what ALiBi and chunks count from.
    pub position: i32,
    /// Keys of one attention chunk.
    pub chunk: i32,
    /// Not 0: each sequence's last query is aligned with its last key; band and position count from there.
    pub bottom_right: i32,
    /// Device address of where each sequence's packed queries begin, and the last ones end; 0 when they are not packed. The
    /// batch stride of a packed tensor is 0.
    pub cu_seqlens_q: u64,
    /// The same of packed keys and values.
    pub cu_seqlens_kv: u64,
    /// Device address of how many keys of each sequence are filled; 0: all.
    pub seqused_kv: u64,
    /// Packed queries that there is room for.
    pub tokens_q: i32,
    /// Packed keys that there is room for.
    pub tokens_kv: i32,
    /// Device address of the page table: entry `i` of a sequence's row is the page of its keys `i · page_size ..`. The page
    /// takes the place of the batch in the strides of K and V.
    pub page_table: u64,
    /// Entries from row to row of the page table.
    pub page_table_stride: i64,
    /// Tokens of a page.
    pub page_size: i32,
    /// Pages of the cache.
    pub pages: i32,
    /// Device address of how many queries of each sequence there are; 0: all.
    pub seqused_q: u64,
    /// Device address of how many of each sequence's filled keys come before its first; 0: none.
    pub leftpad_kv: u64,
    /// Device address of which block of the cache, or row of the page table, is each sequence's; 0: that of its own number.
    pub cache_batch_idx: u64,
    /// Blocks, or rows of the page table, that there are.
    pub cache_rows: i64,
    /// Device address of memory between the CTAs of a launch ([`LaunchGeometry::workspace_bytes`](crate::LaunchGeometry)); 0:
    /// there is none, and the kernel does without.
    pub workspace: u64,
    /// Device address of a block mask: a byte for each block of `block_q` queries and of `block_kv` keys, of which 0 hides one from the
    /// other. Tables of `[ceil(seq_q / block_q)][ceil(seq_kv / block_kv)]` lie one behind the other.
    pub blocks: u64,
    /// Queries of a block.
    pub block_q: i32,
    /// Keys of a block.
    pub block_kv: i32,
    /// Tables from one sequence to the next; 0 where they share them.
    pub block_batch_tables: i32,
    /// Tables from one query head to the next; 0 where they share one.
    pub block_head_tables: i32,
}

/// A bias of single precision.
pub const BIAS_F32: i32 = 0;
/// A bias of half precision.
pub const BIAS_F16: i32 = 1;
/// A bias of bfloat16.
pub const BIAS_BF16: i32 = 2;

const _: () = {
    assert!(size_of::<SdpaParams>() == 448);
    assert!(offset_of!(SdpaParams, q) == 0);
    assert!(offset_of!(SdpaParams, k) == 8);
    assert!(offset_of!(SdpaParams, v) == 16);
    assert!(offset_of!(SdpaParams, o) == 24);
    assert!(offset_of!(SdpaParams, lse) == 32);
    assert!(offset_of!(SdpaParams, q_scale) == 40);
    assert!(offset_of!(SdpaParams, k_scale) == 48);
    assert!(offset_of!(SdpaParams, v_scale) == 56);
    assert!(offset_of!(SdpaParams, q_stride) == 64);
    assert!(offset_of!(SdpaParams, k_stride) == 88);
    assert!(offset_of!(SdpaParams, v_stride) == 112);
    assert!(offset_of!(SdpaParams, o_stride) == 136);
    assert!(offset_of!(SdpaParams, lse_stride) == 160);
    assert!(offset_of!(SdpaParams, batch) == 176);
    assert!(offset_of!(SdpaParams, heads_q) == 180);
    assert!(offset_of!(SdpaParams, heads_kv) == 184);
    assert!(offset_of!(SdpaParams, seq_q) == 188);
    assert!(offset_of!(SdpaParams, seq_kv) == 192);
    assert!(offset_of!(SdpaParams, dim_qk) == 196);
    assert!(offset_of!(SdpaParams, dim_v) == 200);
    assert!(offset_of!(SdpaParams, band_lo) == 204);
    assert!(offset_of!(SdpaParams, band_hi) == 208);
    assert!(offset_of!(SdpaParams, scale) == 212);
    assert!(offset_of!(SdpaParams, scale_log2) == 216);
    assert!(offset_of!(SdpaParams, softcap) == 220);
    assert!(offset_of!(SdpaParams, counter) == 224);
    assert!(offset_of!(SdpaParams, alibi_slopes) == 232);
    assert!(offset_of!(SdpaParams, sinks) == 240);
    assert!(offset_of!(SdpaParams, bias) == 248);
    assert!(offset_of!(SdpaParams, mask) == 256);
    assert!(offset_of!(SdpaParams, bias_stride) == 264);
    assert!(offset_of!(SdpaParams, mask_stride) == 288);
    assert!(offset_of!(SdpaParams, bias_type) == 312);
    assert!(offset_of!(SdpaParams, position) == 316);
    assert!(offset_of!(SdpaParams, chunk) == 320);
    assert!(offset_of!(SdpaParams, bottom_right) == 324);
    assert!(offset_of!(SdpaParams, cu_seqlens_q) == 328);
    assert!(offset_of!(SdpaParams, cu_seqlens_kv) == 336);
    assert!(offset_of!(SdpaParams, seqused_kv) == 344);
    assert!(offset_of!(SdpaParams, tokens_q) == 352);
    assert!(offset_of!(SdpaParams, tokens_kv) == 356);
    assert!(offset_of!(SdpaParams, page_table) == 360);
    assert!(offset_of!(SdpaParams, page_table_stride) == 368);
    assert!(offset_of!(SdpaParams, page_size) == 376);
    assert!(offset_of!(SdpaParams, pages) == 380);
    assert!(offset_of!(SdpaParams, seqused_q) == 384);
    assert!(offset_of!(SdpaParams, leftpad_kv) == 392);
    assert!(offset_of!(SdpaParams, cache_batch_idx) == 400);
    assert!(offset_of!(SdpaParams, cache_rows) == 408);
    assert!(offset_of!(SdpaParams, workspace) == 416);
    assert!(offset_of!(SdpaParams, blocks) == 424);
    assert!(offset_of!(SdpaParams, block_q) == 432);
    assert!(offset_of!(SdpaParams, block_kv) == 436);
    assert!(offset_of!(SdpaParams, block_batch_tables) == 440);
    assert!(offset_of!(SdpaParams, block_head_tables) == 444);
};
