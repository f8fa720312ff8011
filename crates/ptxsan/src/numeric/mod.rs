//! What PTX's scalar instructions compute, bit for bit, as pure functions.
//!
//! Registers go in and come out as bit patterns. Semantics follow the PTX ISA,
//! chapter 9.7 ("Instructions"); where it leaves a choice, the text beside the
//! function says which one was made. No function here panics, whatever the
//! operands.

pub mod approx;
pub mod bits;
pub mod compare;
pub mod convert;
mod exact;
pub mod float;
pub mod format;
pub mod half;
pub mod integer;
mod odd;

#[cfg(test)]
mod tests;

pub use compare::{Compare, Extreme, ExtremeMode, Property};
pub use convert::{ConvertMode, Fp8, Scalar};
pub use float::FloatMode;
pub use format::{Format, Overflow, Round};
pub use half::{Half, HalfMode};
