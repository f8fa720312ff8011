//! What is asked: an attention [`Problem`], how it is spelled, and the tensors it is asked of.
//!
//! Nothing here computes attention or knows of a device. What the right answer to a problem is, the crate
//! `evosdpa-oracle` says.

mod code;
mod dtype;
pub mod error;
mod float;
mod layout;
pub mod mask;
mod problem;
mod shape;
mod tensor;

pub use code::{CODE_MAX, E4M3Code, U8Code};
pub use dtype::{DType, Element};
pub use error::Error;
pub use float::Float;
pub use layout::Layout;
pub use mask::{Alignment, Band, Mask};
pub use problem::Problem;
pub use shape::{MAX_HEAD_DIM, MAX_SEQUENCE, Shape, Sizes};
pub use tensor::{Tensor, TensorView, TensorViewMut};
