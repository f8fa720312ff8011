//! Memory of the simulated device: allocations with bounds, and each block's or grid's view of them.

mod device;
pub(crate) mod shared;
pub(crate) mod view;
pub(crate) mod window;

pub use device::Buffer;
pub(crate) use device::DeviceMemory;

/// Memory is looked up in pages; allocations start on page boundaries.
pub(crate) const PAGE_BYTES: usize = 4096;
