//! Why a call was refused.

use crate::isa::Isa;
use thiserror::Error;

/// Why a call was refused. Nothing has been written to the output then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The tensors are not what the problem asks for.
    #[error(transparent)]
    Problem(#[from] evosdpa_core::Error),
    /// The instruction set asked for is not on this machine.
    #[error(
        "instruction set {wanted} is not available on this machine; use one of {available:?} or none to let it choose"
    )]
    IsaUnavailable {
        /// What was asked for.
        wanted: Isa,
        /// What there is.
        available: Vec<Isa>,
    },
    /// No such instruction set.
    #[error("unknown instruction set {given:?}; known are portable, avx2, avx512")]
    UnknownIsa {
        /// What was given.
        given: String,
    },
    /// A number of threads that cannot be.
    #[error("{count} threads; give 1 to {most}, or none to use every core")]
    ThreadCount {
        /// What was given.
        count: usize,
        /// The most accepted.
        most: usize,
    },
    /// Tile sizes that the kernel cannot use.
    #[error(
        "tile sizes {block_q}×{block_kv}: block_q must be 1 to {most}, block_kv a multiple of 16 up to {most}"
    )]
    TileSizes {
        /// Query rows per block.
        block_q: usize,
        /// Keys per block.
        block_kv: usize,
        /// The most accepted.
        most: usize,
    },
}
