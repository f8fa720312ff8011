//! Device memory that cannot outlive its context.

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys;

use crate::{
    Error, Result, Stream,
    device::Context,
    driver::{check, plain},
};

/// Device memory.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    pub(crate) fn alloc(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        let mut address = 0;
        // SAFETY: the context is current; the driver refuses 0 bytes, so ask for at least one.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
        check("cuMemAlloc", code, || {
            let total = context.info().memory_bytes;
            format!("{bytes} bytes wanted, {} has {total}", context.info().name)
        })?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// Its device address, aligned to 256 bytes.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets every byte, in the stream's order.
    pub fn fill(&self, byte: u8, stream: &Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the memory is ours and as long as the length says.
        let code = unsafe { sys::cuMemsetD8Async(self.address, byte, self.bytes, stream.raw()) };
        check("cuMemsetD8Async", code, plain)
    }

    /// Copies another buffer of the same size here, in the stream's order.
    pub fn copy_within_device(&self, from: &Self, stream: &Stream) -> Result<()> {
        self.check_size(from.bytes)?;
        self.context.bind()?;
        // SAFETY: both are ours, alive and of one size; the caller keeps them until the stream has got there, because
        // freeing waits for the device.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(self.address, from.address, self.bytes, stream.raw()) };
        check("cuMemcpyDtoDAsync", code, plain)
    }

    /// Copies the whole buffer from the host and waits for it.
    pub fn copy_from<T: Pod>(&mut self, host: &[T]) -> Result<()> {
        let host: &[u8] = bytemuck::cast_slice(host);
        self.check_size(host.len())?;
        self.write_at(0, host)
    }

    /// Copies the whole buffer to the host and waits for it.
    pub fn copy_to<T: Pod>(&self, host: &mut [T]) -> Result<()> {
        let host: &mut [u8] = bytemuck::cast_slice_mut(host);
        self.check_size(host.len())?;
        self.read_at(0, host)
    }

    /// Copies from the host to this byte on and waits for it.
    pub fn copy_part_from(&mut self, to_byte: usize, host: &[u8]) -> Result<()> {
        if host.is_empty() {
            return Ok(());
        }
        self.write_at(to_byte, host)
    }

    /// Copies from this byte on to the host and waits for it.
    pub fn copy_part_to(&self, from_byte: usize, host: &mut [u8]) -> Result<()> {
        self.read_at(from_byte, host)
    }

    /// Sets bytes from this one on, before anything that is copied here later.
    pub(crate) fn fill_at(&mut self, offset: usize, byte: u8, bytes: usize) -> Result<()> {
        self.check_range(offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the range was just checked. Copies from pageable memory wait for the default stream, where this is.
        let code =
            unsafe { sys::cuMemsetD8Async(self.address + offset as u64, byte, bytes, std::ptr::null_mut()) };
        check("cuMemsetD8Async", code, plain)
    }

    fn check_size(&self, given_bytes: usize) -> Result<()> {
        if given_bytes == self.bytes {
            return Ok(());
        }
        Err(Error::CopySize { buffer: "device buffer", given_bytes, bytes: self.bytes })
    }

    pub(crate) fn write_at(&mut self, offset: usize, host: &[u8]) -> Result<()> {
        self.check_range(offset, host.len())?;
        self.context.bind()?;
        // SAFETY: both sides are as long as the length says: just checked.
        let code =
            unsafe { sys::cuMemcpyHtoD_v2(self.address + offset as u64, host.as_ptr().cast(), host.len()) };
        check("cuMemcpyHtoD", code, plain)
    }

    pub(crate) fn read_at(&self, offset: usize, host: &mut [u8]) -> Result<()> {
        self.check_range(offset, host.len())?;
        self.context.bind()?;
        // SAFETY: both sides are as long as the length says: just checked.
        let code = unsafe {
            sys::cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), self.address + offset as u64, host.len())
        };
        check("cuMemcpyDtoH", code, plain)
    }

    fn check_range(&self, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::CopySize { buffer: "device buffer", given_bytes: bytes, bytes: self.bytes }),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by us and not used again.
        self.context.release(|| unsafe { sys::cuMemFree_v2(self.address) });
    }
}
