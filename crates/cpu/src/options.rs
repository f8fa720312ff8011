//! What a caller may choose.

use crate::error::Error;
use crate::isa::Isa;

/// The kernels of this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CpuKernel {
    /// Materialises the scores of a few rows at a time, plain loops: the baseline.
    Naive,
    /// Streaming softmax over blocks of keys, register-tiled and vectorised.
    Flash,
}

impl CpuKernel {
    /// Its name in the registry.
    pub fn name(self) -> &'static str {
        match self {
            CpuKernel::Naive => "cpu_naive",
            CpuKernel::Flash => "cpu_flash",
        }
    }
}

/// How a kernel runs. The default uses every core and the best instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// Threads to use; `None` for as many as the machine has. The result does not depend on it.
    pub threads: Option<usize>,
    /// Instruction set to use; `None` for the best this machine has. The naive kernel is always portable.
    pub isa: Option<Isa>,
    /// Tile sizes of the flash kernel; `None` for [`FlashTiles::for_dims`].
    pub tiles: Option<FlashTiles>,
}

impl CpuOptions {
    /// The number of threads to use.
    pub(crate) fn thread_count(&self) -> Result<usize, Error> {
        const MOST: usize = 4096;
        match self.threads {
            None => Ok(std::thread::available_parallelism().map_or(1, |n| n.get())),
            Some(count) if (1..=MOST).contains(&count) => Ok(count),
            Some(count) => Err(Error::ThreadCount { count, most: MOST }),
        }
    }

    /// The tile sizes to use for these head dimensions.
    pub(crate) fn tile_sizes(&self, dim_qk: usize, dim_v: usize) -> Result<FlashTiles, Error> {
        self.tiles.unwrap_or_else(|| FlashTiles::for_dims(dim_qk, dim_v)).checked()
    }
}

/// Tile sizes of the flash kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlashTiles {
    /// Query rows that share one packed block of keys and values. Rounded up to whole register tiles.
    pub block_q: usize,
    /// Keys per block: how many scores per query exist at a time. A multiple of 16.
    pub block_kv: usize,
}

impl FlashTiles {
    /// Largest tile size accepted, either way.
    pub const MAX: usize = 4096;

    /// Sizes for given head dimensions: packed queries, outputs, keys and values together stay well inside a 1 MiB
    /// second-level cache, and a score tile inside the first level.
    pub fn for_dims(dim_qk: usize, dim_v: usize) -> FlashTiles {
        match dim_qk.max(dim_v) {
            0..=192 => FlashTiles { block_q: 384, block_kv: 64 },
            193..=320 => FlashTiles { block_q: 192, block_kv: 64 },
            _ => FlashTiles { block_q: 96, block_kv: 48 },
        }
    }

    fn checked(self) -> Result<FlashTiles, Error> {
        let FlashTiles { block_q, block_kv } = self;
        let fine = (1..=Self::MAX).contains(&block_q)
            && (16..=Self::MAX).contains(&block_kv)
            && block_kv.is_multiple_of(16);
        if fine { Ok(self) } else { Err(Error::TileSizes { block_q, block_kv, most: Self::MAX }) }
    }
}
