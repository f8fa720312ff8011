//! Fused scaled-dot-product attention: `O = softmax(Q·Kᵀ·scale + mask)·V`.
//!
//! Say what you ask as a [`Problem`], plan it once as an [`Attention`] for a [`Device`], and run it as often as you like:
//!
//! ```
//! # #[cfg(feature = "cpu")]
//! # fn main() -> Result<(), evosdpa::Error> {
//! use evosdpa::{Attention, DType, Device, Layout, Problem, TensorView, TensorViewMut};
//!
//! // One batch, two heads, four queries and keys, head dimension eight, causal.
//! let problem = Problem::new("b1h2s4d8:causal".parse()?, DType::F32)?;
//! let attention = Attention::plan(problem, Device::Cpu)?;
//!
//! let (q, k, v) = (vec![0.1f32; 64], vec![0.2f32; 64], vec![3.0f32; 64]);
//! let mut o = vec![0f32; 64];
//! let shape = problem.q_shape();
//! attention.run(
//!     TensorView::from_slice(&q, shape, Layout::Bhsd)?,
//!     TensorView::from_slice(&k, shape, Layout::Bhsd)?,
//!     TensorView::from_slice(&v, shape, Layout::Bhsd)?,
//!     TensorViewMut::from_slice(&mut o, shape, Layout::Bhsd)?,
//!     None,
//! )?;
//! assert!(o.iter().all(|&x| (x - 3.0).abs() < 1e-6));
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "cpu"))]
//! # fn main() {}
//! ```
//!
//! On an NVIDIA GPU the words are the same: `Attention::plan(problem, Device::Cuda(0))`, then
//! [`Attention::run_on`](Attention::run_on) with device addresses and a stream of yours. See [`gpu`].
//!
//! # Features
//!
//! | feature | gives | leaves out, when off |
//! |---|---|---|
//! | `cpu` (default) | [`Device::Cpu`], [`Attention::run`] | the CPU kernels |
//! | `cuda` (default) | [`Device::Cuda`], [`Attention::run_on`], [`gpu`], [`choose`], [`tuned`] | cudarc, the CUDA sources, the loader |
//!
//! Neither needs CUDA to build: the driver and the compiler library are opened at run time.

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
compile_error!("evosdpa needs a device to run on: enable the feature `cpu`, `cuda` or both");

mod attention;
#[cfg(feature = "cpu")]
pub mod cache;
#[cfg(feature = "cuda")]
pub mod choose;
mod error;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod tuned;

pub use attention::{Attention, Device, Options};
pub use error::Error;
pub use evosdpa_core::{
    Alignment, Blocks, Broadcast, Chunk, DType, Element, Feature, Features, Granularity, Kinds, Layout,
    Lengths, Mask, NewTokens, PageSize, PageTable, Placement, Precision, Problem, ScaleViews, Scores, Shape,
    SideInputs, Sizes, Softcap, Tensor, TensorView, TensorViewMut, Types,
};
#[cfg(feature = "cpu")]
pub use evosdpa_cpu::{CpuKernel, FlashTiles, Isa, Positions, Rotary};
#[cfg(feature = "cuda")]
pub use evosdpa_kernels::VariantId;
#[cfg(feature = "cuda")]
pub use gpu::{
    DeviceDense, DeviceIndices, DeviceLse, DevicePages, DeviceScales, DeviceSide, DeviceTensor,
    DeviceTensors, DeviceTokens,
};
