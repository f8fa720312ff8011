//! Shared memory of one block.

use crate::hazard::shadow::Shadow;

/// Bytes, which of them were written, and who touched them.
pub(crate) struct SharedMemory {
    pub(crate) data: Vec<u8>,
    pub(crate) written: Vec<u8>,
    pub(crate) shadow: Shadow,
}

impl SharedMemory {
    pub(crate) fn new(bytes: usize) -> Self {
        SharedMemory { data: vec![0; bytes], written: vec![0; bytes], shadow: Shadow::new(bytes) }
    }
}
