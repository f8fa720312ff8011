//! Appending new tokens to a cache on a GPU, and rotary embedding of queries.

use evosdpa::{
    DType,
    gpu::{self, CacheWrite, DeviceNewTokens, DeviceQueries, DeviceRotary, DeviceTable, RawStream},
};
use evosdpa_core::Error as Asked;

use crate::{Angles, Append, Error, List, Rotate, Table, call};

impl Append {
    /// # Safety
    /// As [`Append::run`].
    pub(crate) unsafe fn queue_on_gpu(
        &self,
        shapes: [[usize; 4]; 2],
        ordinal: usize,
        stream: u64,
    ) -> Result<(), Error> {
        let Some(write) = self.on_device(shapes, None)? else { return Ok(()) };
        // SAFETY: by this function's contract.
        Ok(unsafe { gpu::shared(ordinal)?.write_cache(RawStream(stream), &write) }?)
    }

    /// What a GPU is asked to write, or `None` when there is nothing; `filled` is where the new lengths go.
    pub(crate) fn on_device(
        &self,
        [k_cache, v_cache]: [[usize; 4]; 2],
        filled: Option<u64>,
    ) -> Result<Option<CacheWrite>, Error> {
        let (dtype, batch) = (call::dtype(self.dtype)?, self.lengths.len);
        let [k, v] = [call::sizes("k", self.new[0].shape)?, call::sizes("v", self.new[1].shape)?];
        let blocks = if self.cu_seqlens.is_some() { 1 } else { batch };
        for (tensor, got, expected) in [
            ("k", k, [blocks, k_cache[1], k[2], k_cache[3]]),
            ("v", v, [blocks, k_cache[1], k[2], v_cache[3]]),
            ("v_cache", v_cache, [k_cache[0], k_cache[1], k_cache[2], v_cache[3]]),
        ] {
            if got != expected {
                return refused(Asked::TensorShape { tensor, got, expected });
            }
        }
        count("cumulative new lengths", self.cu_seqlens, batch + 1)?;
        count("cache batch indices", self.cache_batch_idx, batch)?;
        count("rotary positions", self.rotary_first, batch)?;
        if batch == 0 || k[2] == 0 {
            return Ok(None);
        }
        let tokens = DeviceNewTokens {
            new: [self.new[0].on_device("k", dtype, k)?, self.new[1].on_device("v", dtype, v)?],
            caches: [
                self.caches[0].on_device("k_cache", dtype, k_cache)?,
                self.caches[1].on_device("v_cache", dtype, v_cache)?,
            ],
            heads: k_cache[1],
            dims: [k_cache[3], v_cache[3]],
            tokens: k[2],
            cu_seqlens: address(self.cu_seqlens),
            blocks: k_cache[0],
            room: k_cache[2],
            table: self.page_table.map(|table| self.table(table, batch)).transpose()?,
            cache_batch_idx: address(self.cache_batch_idx),
            filled,
        };
        Ok(Some(CacheWrite {
            first: address(self.rotary_first),
            tokens: Some(tokens),
            rotary: self.rotary.map(|angles| angles.on_device()).transpose()?,
            ..CacheWrite::new(dtype, batch, self.lengths.address as u64)
        }))
    }

    fn table(&self, table: Table, batch: usize) -> Result<DeviceTable, Error> {
        let [rows, columns] = table.shape.map(|size| usize::try_from(size).unwrap_or(0));
        if rows != batch && self.cache_batch_idx.is_none() {
            return Err(Error::TableRows { rows, batch });
        }
        Ok(DeviceTable { address: table.address as u64, row_stride: table.row_stride, rows, columns })
    }
}

impl Rotate {
    /// # Safety
    /// As [`Rotate::run`].
    pub(crate) unsafe fn queue_on_gpu(&self, ordinal: usize, stream: u64) -> Result<(), Error> {
        let Some(queries) = self.on_device()? else { return Ok(()) };
        let write = CacheWrite {
            queries: Some(queries),
            rotary: Some(self.rotary.on_device()?),
            ..CacheWrite::new(call::dtype(self.dtype)?, self.first.len, self.first.address as u64)
        };
        // SAFETY: by this function's contract.
        Ok(unsafe { gpu::shared(ordinal)?.write_cache(RawStream(stream), &write) }?)
    }

    /// The queries of a write, or `None` when there are none.
    pub(crate) fn on_device(&self) -> Result<Option<DeviceQueries>, Error> {
        let (dtype, batch) = (call::dtype(self.dtype)?, self.first.len);
        let shape = call::sizes("q", self.x.shape)?;
        let blocks = if self.cu_seqlens.is_some() { 1 } else { shape[0] };
        if self.cu_seqlens.is_none() && batch != shape[0] {
            return refused(Asked::RotaryFirst { got: batch, expected: shape[0] });
        }
        count("cumulative lengths", self.cu_seqlens, batch + 1)?;
        if blocks * shape[2] == 0 || batch == 0 {
            return Ok(None);
        }
        Ok(Some(DeviceQueries {
            q: self.x.on_device("q", dtype, shape)?,
            out: self.out.on_device("q", dtype, shape)?,
            heads: shape[1],
            dim: shape[3],
            tokens: shape[2],
            cu_seqlens: address(self.cu_seqlens),
            advance: self.advance,
        }))
    }
}

impl Angles {
    pub(crate) fn on_device(&self) -> Result<DeviceRotary, Error> {
        let (dtype, given): (DType, DType) = (call::dtype(self.cos.0)?, call::dtype(self.sin.0)?);
        let [cos, sin] =
            [call::sizes("rotary_cos", self.cos.1.shape)?, call::sizes("rotary_sin", self.sin.1.shape)?];
        if sin != cos {
            return refused(Asked::TensorShape { tensor: "rotary sines", got: sin, expected: cos });
        }
        if given != dtype {
            return refused(Asked::TensorDType { tensor: "rotary sines", got: given, expected: dtype });
        }
        let [cos_at, sin_at] = [
            self.cos.1.on_device("rotary_cos", dtype, cos)?,
            self.sin.1.on_device("rotary_sin", dtype, sin)?,
        ];
        Ok(DeviceRotary {
            dtype,
            cos: (cos_at.address, cos_at.strides[2]),
            sin: (sin_at.address, sin_at.strides[2]),
            positions: cos[2],
            columns: cos[3],
            interleaved: self.interleaved,
        })
    }
}

fn address(list: Option<List>) -> Option<u64> {
    list.map(|list| list.address as u64)
}

fn refused<T>(asked: Asked) -> Result<T, Error> {
    Err(evosdpa::Error::from(asked).into())
}

/// Refuses a list of another length.
fn count(what: &'static str, list: Option<List>, expected: usize) -> Result<(), Error> {
    match list {
        Some(List { len: got, .. }) if got != expected => refused(Asked::SideLength { what, got, expected }),
        _ => Ok(()),
    }
}
