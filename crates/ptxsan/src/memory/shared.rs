//! Shared memory of one block.

use crate::hazard::read_log::SharedShadow;

/// Bytes, which of them were written, and who touched them.
pub(crate) struct SharedMemory {
    pub(crate) data: Vec<u8>,
    pub(crate) written: Vec<u8>,
    pub(crate) shadow: SharedShadow,
}

impl SharedMemory {
    pub(crate) fn new(bytes: usize) -> Self {
        SharedMemory { data: vec![0; bytes], written: vec![0; bytes], shadow: SharedShadow::new(bytes) }
    }
}
