//! Happens-before: who knows what of whom, who touched what, and what was not ordered.

pub(crate) mod accessor;
pub(crate) mod chunk;
pub(crate) mod clock;
pub(crate) mod history;
pub(crate) mod log;
pub(crate) mod read_log;
pub(crate) mod shadow;
pub(crate) mod sync;
