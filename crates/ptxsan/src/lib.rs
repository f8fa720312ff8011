//! ptxsan
pub mod error;
pub mod numeric;
mod parse;
pub mod tensor;
pub use error::{Error, Result};
