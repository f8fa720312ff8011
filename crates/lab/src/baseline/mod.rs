//! Baselines: what users would pick instead, timed by the same rules on the same inputs.

pub mod torch;
