//! What is asked: an attention [`Problem`], how it is spelled, and the tensors it is asked of.
//!
//! Nothing here computes attention or knows of a device. What the right answer to a problem is, the crate
//! `evosdpa-oracle` says.

mod append;
mod code;
mod dtype;
pub mod error;
mod feature;
pub mod file;
mod float;
mod layout;
mod lengths;
pub mod mask;
mod problem;
mod scores;
mod sequences;
mod shape;
mod side;
mod spelling;
mod tensor;
mod types;

pub use append::{NewRow, NewTokens, Placement, check_position};
pub use code::{CODE_MAX, E4M3Code, I8Code, U8Code};
pub use dtype::{DType, Element};
pub use error::Error;
pub use feature::{Feature, Features};
pub use float::Float;
pub use layout::Layout;
pub use lengths::{Lengths, MAX_PAGE, PageSize};
pub use mask::{Alignment, Band, Mask};
pub use problem::Problem;
pub use scores::{Blocks, Broadcast, Chunk, Scores, Softcap};
pub use sequences::{KeyPlace, Sequences, check_cumulative};
pub use shape::{HEAD_DIMS, Kinds, MAX_HEAD_DIM, MAX_SEQUENCE, Shape, Sizes};
pub use side::{PageTable, ScaleViews, SideInputs};
pub use tensor::{Tensor, TensorView, TensorViewMut};
pub use types::{Granularity, Precision, Types};
