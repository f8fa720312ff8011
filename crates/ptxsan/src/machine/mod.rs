//! The machine: a device with memory and modules, and launches on it.

mod access;
mod advice;
mod asynchronous;
mod barrier;
mod bounds;
mod builtin;
mod collective;
mod copies;
mod device;
mod fold;
mod launch;
mod matrix;
mod order;
mod places;
mod print;
mod race;
mod run;
mod runs;
mod spin;
mod sync_trace;
mod validity;
mod validity_memory;
mod warp;
mod world;

pub use asynchronous::tensor_map::{TensorElement, TensorMap};
pub use device::{Device, ModuleId};
pub(crate) use launch::Shape;
pub use launch::{Arg, Launch, Options, Schedule};
