//! The kernel that writes to caches: its parameters and its variants. It answers no attention problem, so that the registry does not
//! know it; there is one code for each type of element.

use std::mem::{offset_of, size_of};

use evosdpa_core::DType;

use crate::{Arch, Header, LaunchGeometry, Limits, Variant, VariantId};

const SOURCE: &str = include_str!("../cuda/cache/cache_write.cu");
const HEADERS: [(&str, &str); 3] = [
    ("cache_params.h", include_str!("../cuda/cache/cache_params.h")),
    ("place.cuh", include_str!("../cuda/cache/place.cuh")),
    ("rotary.cuh", include_str!("../cuda/cache/rotary.cuh")),
];

/// Parameters of one launch of `cache_write`. The C side is `cuda/cache/cache_params.h`; device addresses are plain integers, 0 where
/// there is nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct CacheParams {
    /// New keys, `[sequences, heads, tokens, dim]` or packed `[1, heads, tokens, dim]`.
    pub k: u64,
    /// New values.
    pub v: u64,
    /// The cache of keys, `[blocks or pages, heads, room, dim]`.
    pub k_cache: u64,
    /// The cache of values.
    pub v_cache: u64,
    /// Queries.
    pub q: u64,
    /// Where they go when turned.
    pub q_out: u64,
    /// Cosines, `[positions, columns]`.
    pub cos: u64,
    /// Sines.
    pub sin: u64,
    /// Strides in elements: block, head, token.
    pub k_stride: [i64; 3],
    /// The same of the new values.
    pub v_stride: [i64; 3],
    /// The same of the cache of keys.
    pub k_cache_stride: [i64; 3],
    /// The same of the cache of values.
    pub v_cache_stride: [i64; 3],
    /// The same of the queries.
    pub q_stride: [i64; 3],
    /// The same of the turned queries.
    pub q_out_stride: [i64; 3],
    /// Elements from position to position.
    pub cos_stride: i64,
    /// The same of the sines.
    pub sin_stride: i64,
    /// Tokens that each sequence holds.
    pub lengths: u64,
    /// The position of each sequence's first new token; 0: its length.
    pub first: u64,
    /// Where each sequence's packed new tokens begin, and the last ones end.
    pub cu_seqlens_new: u64,
    /// The same of packed queries.
    pub cu_seqlens_q: u64,
    /// Each sequence's block of the cache, or row of the page table.
    pub cache_batch_idx: u64,
    /// The page table.
    pub page_table: u64,
    /// Entries from row to row.
    pub page_table_stride: i64,
    /// Where it goes how many tokens each sequence holds afterwards.
    pub filled: u64,
    /// Sequences.
    pub batch: i32,
    /// Key/value heads.
    pub heads_kv: i32,
    /// Query heads.
    pub heads_q: i32,
    /// New tokens of each sequence, or packed in all.
    pub tokens_new: i32,
    /// Queries of each sequence, or packed in all.
    pub tokens_q: i32,
    /// Head dimension of keys and queries.
    pub dim_k: i32,
    /// Head dimension of values.
    pub dim_v: i32,
    /// Blocks of the cache, or pages.
    pub blocks: i32,
    /// Tokens of a block, or of a page.
    pub room: i32,
    /// Rows of the page table.
    pub table_rows: i32,
    /// Entries of one of them.
    pub columns_used: i32,
    /// Positions that there are angles for.
    pub positions: i32,
    /// Angles of a position.
    pub columns: i32,
    /// One of [`ANGLE_F32`], [`ANGLE_F16`] and [`ANGLE_BF16`].
    pub angle_type: i32,
    /// Not 0: pairs are neighbours; otherwise `columns` apart.
    pub interleaved: i32,
    /// Not 0: each query is one position further than the one before it.
    pub advance: i32,
}

/// Angles of single precision.
pub const ANGLE_F32: i32 = 0;
/// Angles of half precision.
pub const ANGLE_F16: i32 = 1;
/// Angles of bfloat16.
pub const ANGLE_BF16: i32 = 2;

const _: () = {
    assert!(size_of::<CacheParams>() == 352);
    assert!(offset_of!(CacheParams, k) == 0);
    assert!(offset_of!(CacheParams, v) == 8);
    assert!(offset_of!(CacheParams, k_cache) == 16);
    assert!(offset_of!(CacheParams, v_cache) == 24);
    assert!(offset_of!(CacheParams, q) == 32);
    assert!(offset_of!(CacheParams, q_out) == 40);
    assert!(offset_of!(CacheParams, cos) == 48);
    assert!(offset_of!(CacheParams, sin) == 56);
    assert!(offset_of!(CacheParams, k_stride) == 64);
    assert!(offset_of!(CacheParams, v_stride) == 88);
    assert!(offset_of!(CacheParams, k_cache_stride) == 112);
    assert!(offset_of!(CacheParams, v_cache_stride) == 136);
    assert!(offset_of!(CacheParams, q_stride) == 160);
    assert!(offset_of!(CacheParams, q_out_stride) == 184);
    assert!(offset_of!(CacheParams, cos_stride) == 208);
    assert!(offset_of!(CacheParams, sin_stride) == 216);
    assert!(offset_of!(CacheParams, lengths) == 224);
    assert!(offset_of!(CacheParams, first) == 232);
    assert!(offset_of!(CacheParams, cu_seqlens_new) == 240);
    assert!(offset_of!(CacheParams, cu_seqlens_q) == 248);
    assert!(offset_of!(CacheParams, cache_batch_idx) == 256);
    assert!(offset_of!(CacheParams, page_table) == 264);
    assert!(offset_of!(CacheParams, page_table_stride) == 272);
    assert!(offset_of!(CacheParams, filled) == 280);
    assert!(offset_of!(CacheParams, batch) == 288);
    assert!(offset_of!(CacheParams, heads_kv) == 292);
    assert!(offset_of!(CacheParams, heads_q) == 296);
    assert!(offset_of!(CacheParams, tokens_new) == 300);
    assert!(offset_of!(CacheParams, tokens_q) == 304);
    assert!(offset_of!(CacheParams, dim_k) == 308);
    assert!(offset_of!(CacheParams, dim_v) == 312);
    assert!(offset_of!(CacheParams, blocks) == 316);
    assert!(offset_of!(CacheParams, room) == 320);
    assert!(offset_of!(CacheParams, table_rows) == 324);
    assert!(offset_of!(CacheParams, columns_used) == 328);
    assert!(offset_of!(CacheParams, positions) == 332);
    assert!(offset_of!(CacheParams, columns) == 336);
    assert!(offset_of!(CacheParams, angle_type) == 340);
    assert!(offset_of!(CacheParams, interleaved) == 344);
    assert!(offset_of!(CacheParams, advance) == 348);
};

/// Threads of one block, which moves one token.
const THREADS: u32 = 128;

/// The kernel for elements of this type. Its grid is for the launch to say: [`CacheParams::blocks_needed`].
pub fn variant(arch: Arch, element: DType) -> Variant {
    let header = |(name, text): (&str, &str)| Header { name: name.to_owned(), text: text.to_owned() };
    let code = match element {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::U8 | DType::E4M3 | DType::I8 => 3,
    };
    Variant {
        id: VariantId::new("cache_write", [("ELEMENT", code)]),
        arch,
        source_file: "cache/cache_write.cu".to_owned(),
        source: SOURCE.into(),
        headers: HEADERS.map(header).into(),
        entry: "cache_write".to_owned(),
        defines: [("ELEMENT".to_owned(), code)].into(),
        options: Vec::new(),
        launch: LaunchGeometry {
            grid: [1; 3],
            block: [THREADS, 1, 1],
            cluster: [1; 3],
            dynamic_smem_bytes: 0,
            programmatic: false,
            counter: false,
            workspace_bytes: 0,
        },
        tensor_maps: Vec::new(),
        parameter_bytes: size_of::<CacheParams>() as u32,
        limits: Limits {
            registers: Some(64),
            smem_bytes: Some(0),
            stack_bytes: Some(0),
            spill_bytes: Some(0),
        },
    }
}

impl CacheParams {
    /// The blocks of a launch: one for each token, and enough for all lengths.
    pub fn blocks_needed(&self) -> Option<u32> {
        let count = |address: u64, packed: u64, tokens: i32| match (address, packed) {
            (0, _) => 0,
            (_, 0) => i64::from(self.batch) * i64::from(tokens),
            _ => i64::from(tokens),
        };
        let tokens = count(self.k, self.cu_seqlens_new, self.tokens_new)
            + count(self.q, self.cu_seqlens_q, self.tokens_q);
        let lengths = if self.filled == 0 { 0 } else { i64::from(self.batch) / i64::from(THREADS) + 1 };
        // CUDA's limit for the first dimension of a grid.
        i32::try_from(tokens.max(lengths)).ok().and_then(|blocks| u32::try_from(blocks).ok())
    }
}
