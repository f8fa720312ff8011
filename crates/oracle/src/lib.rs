#![doc = include_str!("../README.md")]

pub mod case;
mod control;
mod control_output;
pub mod elements;
pub mod inputs;
pub mod quantize;
mod reference;
pub mod rng;
pub mod tolerance;

pub use case::Case;
pub use control::Control;
pub use quantize::Scales;
pub use reference::{
    Question, Reference, RowScores, Sample, solve, solve_in_dtype, solve_output, solve_rows,
};
