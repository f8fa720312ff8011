//! ptxsan
pub mod error;
mod parse;
pub use error::{Error, Result};
