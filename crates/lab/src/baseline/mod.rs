//! Baselines: what users would pick instead, timed by the same rules on the same inputs.

pub(crate) mod python;
pub mod torch;
