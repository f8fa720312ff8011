//! Memory of the simulated device: allocations with bounds, and each block's or grid's view of them.

mod device;
pub(crate) mod shared;
pub(crate) mod view;
pub(crate) mod window;

pub use device::Buffer;
pub(crate) use device::DeviceMemory;

/// Memory is looked up in pages; allocations start on page boundaries.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Says that bytes were written: the usual sizes without a loop.
#[inline(always)]
pub(crate) fn mark_written(flags: &mut [u8]) {
    if let Ok(flags) = <&mut [u8; 16]>::try_from(&mut *flags) {
        *flags = [1; 16];
    } else if let Ok(flags) = <&mut [u8; 4]>::try_from(&mut *flags) {
        *flags = [1; 4];
    } else {
        flags.fill(1);
    }
}
