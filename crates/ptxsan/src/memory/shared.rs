//! Shared memory of one block.

use crate::hazard::read_log::SharedShadow;
use std::ops::Range;

/// Bytes, which of them were written, and who touched them.
pub(crate) struct SharedMemory {
    pub(crate) data: Vec<u8>,
    pub(crate) written: Vec<u8>,
    pub(crate) shadow: SharedShadow,
}

impl SharedMemory {
    /// `zeros`: what is there before the block starts.
    pub(crate) fn new(bytes: usize, zeros: &Range<usize>) -> Self {
        let mut written = vec![0; bytes];
        written[zeros.clone()].fill(1);
        SharedMemory { data: vec![0; bytes], written, shadow: SharedShadow::new(bytes) }
    }
}
