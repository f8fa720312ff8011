//! evosdpa for Python.
//!
//! Python describes tensors by plain numbers (address, shape, strides), and what comes beside them as a [`Side`]; [`Call`] turns them into a problem and hands it
//! to the library. The Python module around it is compiled with the feature `extension-module` only, which maturin
//! turns on: without it this crate needs no Python.

#[cfg(feature = "extension-module")]
mod arrays;
mod cache;
mod cache_gpu;
mod call;
mod error;
#[cfg(feature = "extension-module")]
mod exchange;
#[cfg(feature = "extension-module")]
mod exit;
mod gpu;
#[cfg(feature = "extension-module")]
mod known;
#[cfg(feature = "extension-module")]
mod library;
#[cfg(feature = "extension-module")]
mod module;
#[cfg(feature = "extension-module")]
mod sanitizer;
#[cfg(feature = "extension-module")]
mod scores;
#[cfg(feature = "extension-module")]
mod serving;
mod side;
#[cfg(feature = "extension-module")]
mod straight;
#[cfg(feature = "extension-module")]
mod torch;

pub use cache::{Angles, Append, Rotate};
pub use call::{Call, Operand, Place, Visible, set_batch_invariant, set_batch_invariant_here};
pub use error::Error;
pub use side::{List, Side, Table};
