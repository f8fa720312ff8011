//! Evolution: searching a kernel's tunables for the fastest variant that passes every gate.
//!
//! The method is *EvoEngineer-Full* as this lab reads it: a population of elites, a traverse in two layers (structure first,
//! then details inside the best structures), operators that make new candidates from old ones, and insights that bias what
//! is tried next and are themselves held to whether they helped. `docs/tuning.md` tells it in full.
//!
//! Everything that happened is in one append-only log; strategies are functions of that log, so a tune that was killed goes
//! on as if nothing had happened, and a finished one can be replayed to compare strategies.

pub mod ahead;
#[cfg(test)]
pub(crate) mod altered;
pub mod evaluator;
pub mod gates;
pub mod insight;
pub mod log;
pub mod operators;
pub mod population;
pub mod profiler;
pub mod proposer;
pub mod resume;
pub mod simulate;
pub mod sources;
pub mod space;
pub mod span;
pub mod strategy;
pub mod trial;
pub mod tune;
pub mod work;

pub use log::{Evaluation, Header, ShapeResult, Standing};
pub use space::{Dimension, Layer, Point, Space};
