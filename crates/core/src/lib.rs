//! What is asked and what is right.
//!
//! A [`Problem`] says what attention is to be computed, [`inputs`] makes data for it, the [`oracle`] knows the answer,
//! and [`tolerance`] decides whether another answer is good enough. Nothing here is fast except by accident; nothing
//! here knows of a device.

pub mod case;
mod code;
mod dtype;
pub mod error;
mod float;
pub mod inputs;
mod layout;
pub mod mask;
pub mod oracle;
mod problem;
pub mod quantize;
mod shape;
mod tensor;
pub mod tolerance;

pub use case::{Case, Control};
pub use code::{CODE_MAX, E4M3Code, U8Code};
pub use dtype::{DType, Element};
pub use error::Error;
pub use float::Float;
pub use layout::Layout;
pub use mask::{Alignment, Band, Mask};
pub use problem::Problem;
pub use quantize::Scales;
pub use shape::{MAX_HEAD_DIM, MAX_SEQUENCE, Shape, Sizes};
pub use tensor::{Tensor, TensorView, TensorViewMut};
