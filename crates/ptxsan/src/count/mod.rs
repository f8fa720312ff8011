//! What a launch executed: exact counts that do not depend on the machine they were made on.

mod class;
pub(crate) mod counters;
mod summary;

pub use class::Class;
pub(crate) use class::tensor_ops;
pub use summary::{Counters, Counts, LineCounts};
