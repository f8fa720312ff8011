//! What a caller may choose.

use crate::error::Error;
use crate::isa::Isa;
use evosdpa_core::Problem;
use std::sync::OnceLock;

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
    /// Threads to use; `None` for as many as this process may use, asked once. The result does not depend on it.
    pub threads: Option<usize>,
    /// Instruction set to use; `None` for the best this machine has. The naive kernel is always portable.
    pub isa: Option<Isa>,
    /// Tile sizes of the flash kernel; `None` for what instruction set and head dimensions ask for.
    pub tiles: Option<FlashTiles>,
}

impl CpuOptions {
    /// Refuses what this machine or these head dimensions cannot meet. Costs a few dozen nanoseconds.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        self.tiles_for(problem)?;
        self.thread_count().map(drop)
    }

    /// The number of threads to use.
    pub(crate) fn thread_count(&self) -> Result<usize, Error> {
        const MOST: usize = 4096;
        match self.threads {
            None => Ok(machine_threads()),
            Some(count) if (1..=MOST).contains(&count) => Ok(count),
            Some(count) => Err(Error::ThreadCount { count, most: MOST }),
        }
    }

    /// The tile sizes that a problem is computed with.
    ///
    /// # Errors
    /// When this machine cannot meet what was chosen.
    pub fn tiles_for(&self, problem: &Problem) -> Result<FlashTiles, Error> {
        let (sizes, isa) = (problem.sizes(), Isa::resolve(self.isa)?.for_problem(problem));
        self.tile_sizes(isa, sizes.dim_qk, sizes.dim_v)
    }

    /// The tile sizes to use with an instruction set for these head dimensions.
    pub(crate) fn tile_sizes(&self, isa: Isa, dim_qk: usize, dim_v: usize) -> Result<FlashTiles, Error> {
        self.tiles.unwrap_or_else(|| FlashTiles::for_isa(isa, dim_qk, dim_v)).checked()
    }
}

/// Threads that this process may use. The answer lies in files (cgroup limits), which cost tens of microseconds to read.
fn machine_threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
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
    /// L2, and a score tile inside the first level.
    fn for_dims(dim_qk: usize, dim_v: usize) -> FlashTiles {
        match dim_qk.max(dim_v) {
            0..=192 => FlashTiles { block_q: 384, block_kv: 64 },
            193..=320 => FlashTiles { block_q: 192, block_kv: 64 },
            _ => FlashTiles { block_q: 96, block_kv: 48 },
        }
    }

    /// The same with an instruction set. More keys a block mean that queries and sums are loaded less often; 128 are two of the words that masks are looked through in.
    /// ARM's quads take 4 % fewer instructions so, as counted; sizes were not timed there.
    /// Matrix tiles multiply so fast that moving keys between caches counts too, and their processors have an L2 of 2 MiB: more queries for each time keys are packed.
    fn for_isa(isa: Isa, dim_qk: usize, dim_v: usize) -> FlashTiles {
        match (isa, dim_qk.max(dim_v)) {
            (Isa::Amx | Isa::AmxModel, 0..=128) => FlashTiles { block_q: 768, block_kv: 128 },
            (Isa::Amx | Isa::AmxModel, 129..=256)
            | (Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16, 0..=192)
            | (Isa::NeonMmla, 0..=128) => FlashTiles { block_q: 384, block_kv: 128 },
            _ => FlashTiles::for_dims(dim_qk, dim_v),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// Asking the system takes 28 µs and more, a call at `tiny` less than 10.
    #[test]
    fn the_number_of_threads_is_asked_for_once() {
        let options = CpuOptions::default();
        let first = options.thread_count().unwrap();
        let fastest_us = (0..20).map(|_| {
            let start = Instant::now();
            for _ in 0..50 {
                assert_eq!(options.thread_count().unwrap(), first);
            }
            start.elapsed().as_secs_f64() * 1e6 / 50.0
        });
        let fastest_us = fastest_us.fold(f64::INFINITY, f64::min);
        assert!(fastest_us < 2.0, "{fastest_us} µs");
    }
}
