//! Fused scaled-dot-product attention: `O = softmax(Q·Kᵀ·scale + mask)·V`.
//!
//! Say what you ask as a [`Problem`], plan it once as an [`Attention`], and run it as often as you like:
//!
//! ```
//! use evosdpa::{Attention, DType, Layout, Problem, TensorView, TensorViewMut};
//!
//! # fn main() -> Result<(), evosdpa::Error> {
//! // One batch, two heads, four queries and keys, head dimension eight, causal.
//! let problem = Problem::new("b1h2s4d8:causal".parse()?, DType::F32)?;
//! let attention = Attention::plan(problem)?;
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
//! ```
//!
//! On an NVIDIA GPU the tensors are addresses and strides, and the call goes on your own stream: see [`gpu`].

mod attention;
mod error;
pub mod gpu;
pub mod planner;
pub mod tuned;

pub use attention::{Attention, Options};
pub use error::Error;
pub use evosdpa_core::{
    Alignment, DType, Element, Layout, Mask, Problem, Shape, Sizes, Tensor, TensorView, TensorViewMut,
};
pub use evosdpa_cpu::{CpuKernel, FlashTiles, Isa};
pub use gpu::{DeviceLse, DeviceScales, DeviceTensor, DeviceTensors};
