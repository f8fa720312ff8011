#![doc = include_str!("../README.md")]

pub mod case;
pub mod elements;
pub mod inputs;
pub mod quantize;
mod reference;
pub mod tolerance;

pub use case::{Case, Control};
pub use quantize::Scales;
pub use reference::{Reference, RowScores, Sample, solve, solve_in_dtype, solve_output, solve_rows};
