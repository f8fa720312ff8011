//! Attention on a CPU.
//!
//! One function, [`attention`], runs one of two kernels: `cpu_naive`, the plain baseline, and `cpu_flash`, which streams
//! over blocks of keys with register-tiled, vectorised inner kernels for AVX-512, AVX2, NEON and any other machine, and matrix tiles (AMX) or blocks (`bfmmla`).
//!
//! ```text
//! attention ── checks ──▶ job ──▶ plan (units of work) ──▶ pool (threads) ──▶ flash | few ──▶ kernels (per ISA)
//!                                                                             tiles   decode   tile, hook, pack, decode
//! ```

mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
mod cache;
mod decode;
#[cfg(target_arch = "x86_64")]
mod decode_bf16;
mod dense;
mod dispatch;
mod element;
mod error;
mod few;
mod flash;
mod hook;
mod isa;
mod job;
mod kernels;
mod modifiers;
mod naive;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_bf16;
#[cfg(target_arch = "aarch64")]
mod neon_mmla;
mod options;
mod pack;
mod pairs;
mod partial;
mod peak;
mod plan;
mod pool;
mod portable;
mod query_tile;
mod shown;
mod simd;
mod span;
mod tile;
mod workspace;

pub use attention::{attention, workspace_bytes};
pub use cache::{Positions, Rotary, append, check_append, rotate};
pub use error::Error;
pub use isa::Isa;
pub use options::{CpuKernel, CpuOptions, FlashTiles};
pub use peak::{fma_ceiling_gflops, fma_peak_gflops, memory_bandwidth_gbps};
