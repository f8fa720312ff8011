//! New keys and values for a cache in device memory, and rotary embedding on the way.
//!
//! ```no_run
//! use evosdpa::{DType, DeviceTensor, Layout, gpu::{self, CacheWrite, DeviceNewTokens, RawStream}};
//!
//! # fn main() -> Result<(), evosdpa::Error> {
//! # let (k, v, k_cache, v_cache, lengths, stream) = (0, 0, 0, 0, 0, 0);
//! // One new token for each of 4 sequences, with 8 heads of 128, in blocks with room for 4096.
//! let (new, room) = ([4, 8, 1, 128], [4, 8, 4096, 128]);
//! let tokens = DeviceNewTokens {
//!     new: [k, v].map(|address| DeviceTensor::packed(address, new, Layout::Bshd)),
//!     caches: [k_cache, v_cache].map(|address| DeviceTensor::packed(address, room, Layout::Bshd)),
//!     heads: 8,
//!     dims: [128, 128],
//!     tokens: 1,
//!     cu_seqlens: None,
//!     blocks: 4,
//!     room: 4096,
//!     table: None,
//!     cache_batch_idx: None,
//!     filled: None,
//! };
//! let write = CacheWrite { tokens: Some(tokens), ..CacheWrite::new(DType::BF16, 4, lengths) };
//! // SAFETY: the addresses are device memory of these sizes until the stream has come past the launch.
//! unsafe { gpu::shared(0)?.write_cache(RawStream(stream), &write) }?;
//! # Ok(())
//! # }
//! ```

use std::sync::{Arc, PoisonError};

use evosdpa_core::{DType, Error as Asked};
use evosdpa_cuda::{PreparedLaunch, RawStream, RelaxedCapture};
use evosdpa_kernels::cache::{self, CacheParams};

use super::{
    DeviceTensor, Gpu,
    tensors::{check_address, check_apart, check_strides},
};
use crate::Error;

/// What one launch writes: new tokens to a cache, turned queries, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheWrite {
    /// The type of all tensors but the angles.
    pub dtype: DType,
    /// Sequences.
    pub batch: usize,
    /// The device address of how many tokens each sequence holds (`i32`).
    pub lengths: u64,
    /// The device address of the position of each sequence's first new token (`i32`); `None`: behind those it holds.
    pub first: Option<u64>,
    /// New keys and values.
    pub tokens: Option<DeviceNewTokens>,
    /// Queries to be turned.
    pub queries: Option<DeviceQueries>,
    /// How keys and queries are turned.
    pub rotary: Option<DeviceRotary>,
}

/// New keys and values, and the cache they go to, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNewTokens {
    /// `[sequences, heads, tokens, dim]`, or packed `[1, heads, tokens, dim]`.
    pub new: [DeviceTensor; 2],
    /// `[blocks or pages, heads, room, dim]`.
    pub caches: [DeviceTensor; 2],
    /// Key/value heads.
    pub heads: usize,
    /// Head dimensions of keys and of values.
    pub dims: [usize; 2],
    /// New tokens of each sequence, or packed in all.
    pub tokens: usize,
    /// The device address of where each sequence's packed tokens begin, and where the last ones end (`i32`).
    pub cu_seqlens: Option<u64>,
    /// Blocks of the cache, or pages.
    pub blocks: usize,
    /// Tokens of a block, or of a page.
    pub room: usize,
    /// Which pages are a sequence's; `None` when each has one contiguous block.
    pub table: Option<DeviceTable>,
    /// The device address of each sequence's block of the cache, or row of the page table (`i32`).
    pub cache_batch_idx: Option<u64>,
    /// Where it goes how many tokens each sequence holds afterwards (`i32`).
    pub filled: Option<u64>,
}

/// A page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTable {
    /// Its device address (`i32`).
    pub address: u64,
    /// Entries from row to row.
    pub row_stride: i64,
    /// Rows.
    pub rows: usize,
    /// Entries of a row.
    pub columns: usize,
}

/// Queries to be turned: `[sequences, heads, tokens, dim]`, or packed `[1, heads, tokens, dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceQueries {
    /// The queries.
    pub q: DeviceTensor,
    /// Where they go.
    pub out: DeviceTensor,
    /// Query heads.
    pub heads: usize,
    /// Head dimension.
    pub dim: usize,
    /// Queries of each sequence, or packed in all.
    pub tokens: usize,
    /// The device address of where each sequence's packed queries begin, and where the last ones end (`i32`).
    pub cu_seqlens: Option<u64>,
    /// Whether each is one position further than the one before it; otherwise all are at the first.
    pub advance: bool,
}

/// Angles of rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRotary {
    /// The type of both.
    pub dtype: DType,
    /// Cosines: their address, and the elements from position to position.
    pub cos: (u64, i64),
    /// Sines.
    pub sin: (u64, i64),
    /// Positions that there are angles for.
    pub positions: usize,
    /// Angles of a position; twice as many elements of a row are turned.
    pub columns: usize,
    /// Whether pairs are neighbours, or half of what is turned apart.
    pub interleaved: bool,
}

impl CacheWrite {
    /// Nothing yet, for so many sequences that hold tokens as the lengths say.
    pub fn new(dtype: DType, batch: usize, lengths: u64) -> Self {
        Self { dtype, batch, lengths, first: None, tokens: None, queries: None, rotary: None }
    }

    /// Refuses what the kernel could not take. What lengths and pages hold is not known here.
    fn check(&self) -> Result<(), Error> {
        check_count("batch", self.batch)?;
        check_address("lengths", self.lengths, 4)?;
        self.first.map_or(Ok(()), |first| check_address("rotary positions", first, 4))?;
        if let Some(tokens) = &self.tokens {
            tokens.check(self.dtype, self.batch)?;
        }
        if let Some(queries) = &self.queries {
            queries.check(self.dtype, self.batch)?;
        }
        let Some(rotary) = &self.rotary else { return Ok(()) };
        rotary.check(self.dtype)?;
        let keys = self.tokens.map(|tokens| tokens.dims[0]);
        let dims = keys.into_iter().chain(self.queries.map(|queries| queries.dim));
        match dims.into_iter().find(|dim| 2 * rotary.columns > *dim) {
            Some(dim) => Err(Asked::RotaryDim { columns: rotary.columns, dim }.into()),
            None => Ok(()),
        }
    }

    /// The parameters of a launch, or why there is none.
    pub fn params(&self) -> Result<CacheParams, Error> {
        self.check()?;
        // Every size is below 2^31 now.
        let mut params = CacheParams {
            lengths: self.lengths,
            first: self.first.unwrap_or(0),
            batch: self.batch as i32,
            ..CacheParams::default()
        };
        if let Some(tokens) = &self.tokens {
            let ([k, v], [k_cache, v_cache]) = (tokens.new, tokens.caches);
            (params.k, params.v) = (k.address, v.address);
            (params.k_stride, params.v_stride) = (k.strides, v.strides);
            (params.k_cache, params.v_cache) = (k_cache.address, v_cache.address);
            (params.k_cache_stride, params.v_cache_stride) = (k_cache.strides, v_cache.strides);
            (params.heads_kv, params.tokens_new) = (tokens.heads as i32, tokens.tokens as i32);
            (params.dim_k, params.dim_v) = (tokens.dims[0] as i32, tokens.dims[1] as i32);
            (params.blocks, params.room) = (tokens.blocks as i32, tokens.room as i32);
            params.cu_seqlens_new = tokens.cu_seqlens.unwrap_or(0);
            params.cache_batch_idx = tokens.cache_batch_idx.unwrap_or(0);
            params.filled = tokens.filled.unwrap_or(0);
            if let Some(table) = tokens.table {
                (params.page_table, params.page_table_stride) = (table.address, table.row_stride);
                (params.table_rows, params.columns_used) = (table.rows as i32, table.columns as i32);
            }
        }
        if let Some(queries) = &self.queries {
            (params.q, params.q_stride) = (queries.q.address, queries.q.strides);
            (params.q_out, params.q_out_stride) = (queries.out.address, queries.out.strides);
            (params.heads_q, params.tokens_q) = (queries.heads as i32, queries.tokens as i32);
            (params.dim_k, params.advance) = (queries.dim as i32, i32::from(queries.advance));
            params.cu_seqlens_q = queries.cu_seqlens.unwrap_or(0);
        }
        if let Some(rotary) = &self.rotary {
            ((params.cos, params.cos_stride), (params.sin, params.sin_stride)) = (rotary.cos, rotary.sin);
            (params.positions, params.columns) = (rotary.positions as i32, rotary.columns as i32);
            params.interleaved = i32::from(rotary.interleaved);
            params.angle_type = match rotary.dtype {
                DType::F16 => cache::ANGLE_F16,
                DType::BF16 => cache::ANGLE_BF16,
                _ => cache::ANGLE_F32,
            };
        }
        Ok(params)
    }
}

impl DeviceNewTokens {
    fn check(&self, dtype: DType, batch: usize) -> Result<(), Error> {
        let bytes = dtype.bytes() as u64;
        let rows = if self.cu_seqlens.is_some() { 1 } else { batch };
        for ((name, cache_name), at) in
            [("new keys", "key cache"), ("new values", "value cache")].into_iter().zip([0, 1])
        {
            let (new, cache) = (&self.new[at], &self.caches[at]);
            check_address(name, new.address, bytes)?;
            check_strides(name, &new.strides, &[rows, self.heads, self.tokens])?;
            check_address(cache_name, cache.address, bytes)?;
            let room = [self.blocks, self.heads, self.room];
            check_strides(cache_name, &cache.strides, &room)?;
            check_apart(cache_name, &cache.strides, &room, self.dims[at])?;
        }
        for (what, address) in [
            ("cumulative new lengths", self.cu_seqlens),
            ("cache batch indices", self.cache_batch_idx),
            ("filled lengths", self.filled),
            ("page table", self.table.map(|table| table.address)),
        ] {
            address.map_or(Ok(()), |address| check_address(what, address, 4))?;
        }
        if let Some(table) = &self.table {
            check_count("rows of the page table", table.rows)?;
            check_count("entries of the page table", table.columns)?;
            if table.row_stride < 0 {
                return Err(Error::NegativeStride { tensor: "page table", stride: table.row_stride });
            }
        } else if self.cache_batch_idx.is_none() && self.blocks < batch {
            return Err(Asked::Size {
                what: "blocks of the cache",
                value: self.blocks,
                allowed: "at least one a sequence",
            }
            .into());
        }
        let sizes =
            [("heads", self.heads), ("new tokens", self.tokens), ("blocks of the cache", self.blocks)];
        sizes
            .into_iter()
            .chain([("room of the cache", self.room)])
            .try_for_each(|(what, size)| check_count(what, size))?;
        check_dims(&self.dims)
    }
}

impl DeviceQueries {
    fn check(&self, dtype: DType, batch: usize) -> Result<(), Error> {
        let rows = [if self.cu_seqlens.is_some() { 1 } else { batch }, self.heads, self.tokens];
        for (name, tensor) in [("queries", &self.q), ("turned queries", &self.out)] {
            check_address(name, tensor.address, dtype.bytes() as u64)?;
            check_strides(name, &tensor.strides, &rows)?;
        }
        check_apart("turned queries", &self.out.strides, &rows, self.dim)?;
        self.cu_seqlens.map_or(Ok(()), |cu| check_address("cumulative query lengths", cu, 4))?;
        check_count("heads", self.heads)?;
        check_count("queries", self.tokens)?;
        check_dims(&[self.dim])
    }
}

impl DeviceRotary {
    fn check(&self, dtype: DType) -> Result<(), Error> {
        for given in [dtype, self.dtype] {
            if given.is_eight_bit() {
                return Err(Asked::RotaryType { given }.into());
            }
        }
        for (name, (address, stride)) in [("rotary cosines", self.cos), ("rotary sines", self.sin)] {
            check_address(name, address, self.dtype.bytes() as u64)?;
            check_strides(name, &[stride], &[self.positions])?;
        }
        if self.columns == 0 {
            return Err(Asked::RotaryDim { columns: 0, dim: 2 }.into());
        }
        check_count("rotary positions", self.positions)
    }
}

/// The kernel counts in 32 bits.
fn check_count(what: &'static str, value: usize) -> Result<(), Error> {
    match i32::try_from(value) {
        Ok(1..) => Ok(()),
        _ => Err(Asked::Size { what, value, allowed: "from 1 to 2^31 - 1" }.into()),
    }
}

fn check_dims(dims: &[usize]) -> Result<(), Error> {
    let max = evosdpa_core::MAX_HEAD_DIM;
    match dims.iter().find(|dim| !(1..=max).contains(*dim)) {
        Some(dim) => {
            Err(Asked::Size { what: "head dimension", value: *dim, allowed: evosdpa_core::HEAD_DIMS }.into())
        }
        None => Ok(()),
    }
}

impl Gpu {
    /// Queues a write to a cache, or of turned queries, on the caller's stream. Returns when it is queued: after the first
    /// call for a type nothing is allocated, nothing waited for, and calls may be captured into CUDA graphs.
    ///
    /// Lengths, pages and indices are read on the device. Whatever they hold, nothing outside the caches is written: a token
    /// without a place there, or without angles, is left out. A query without angles becomes NaN.
    ///
    /// # Safety
    /// Every address must be memory of this device that is valid for the given sizes and strides, and stay so until the
    /// stream has come past the launch; what is written must not overlap what is read. The stream must be a live one of the
    /// device's primary context, or 0.
    pub unsafe fn write_cache(&self, stream: RawStream, write: &CacheWrite) -> Result<(), Error> {
        let params = write.params()?;
        let Some(blocks) = params.blocks_needed() else {
            let (what, value) = ("tokens", usize::MAX);
            return Err(Asked::Size { what, value, allowed: "up to 2^31 - 1 in all" }.into());
        };
        if blocks == 0 {
            return Ok(());
        }
        let prepared = self.cache_kernel(write.dtype)?;
        let entered = self.device().enter()?;
        // SAFETY: the parameters describe the caller's memory and stream, which this function's contract covers; they are what
        // this kernel takes.
        Ok(unsafe { prepared.launch_own(&entered, stream, blocks, &params) }?)
    }

    fn cache_kernel(&self, dtype: DType) -> Result<Arc<PreparedLaunch>, Error> {
        if let Some(known) =
            self.cache_kernels.read().unwrap_or_else(PoisonError::into_inner).get(&dtype).cloned()
        {
            return Ok(known);
        }
        let entered = self.device().enter()?;
        // The first call may come while its caller captures a graph.
        let _relaxed = RelaxedCapture::begin(&entered)?;
        let variant = cache::variant(self.target().arch, dtype);
        let mut kernels = self.cache_kernels.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been faster.
        if let Some(known) = kernels.get(&dtype) {
            return Ok(Arc::clone(known));
        }
        let prepared = Arc::new(PreparedLaunch::new(&self.loaded(&variant)?, variant.launch)?);
        kernels.insert(dtype, Arc::clone(&prepared));
        Ok(prepared)
    }
}
