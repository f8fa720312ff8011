//! Happens-before race detection: vector clocks, shadow memory, and accesses that nothing orders.

pub(crate) mod accessor;
pub(crate) mod chunk;
pub(crate) mod clock;
pub(crate) mod history;
pub(crate) mod log;
pub(crate) mod read_log;
pub(crate) mod shadow;
pub(crate) mod sync;
