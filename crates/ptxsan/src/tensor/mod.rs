//! Warp-wide matrix instructions as pure functions.

/// One 32-bit register of all lanes of a warp.
pub type Lanes = [u32; 32];
