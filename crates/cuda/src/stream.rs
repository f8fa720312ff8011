//! Streams.

use std::{ptr, sync::Arc};

use cudarc::driver::sys;

use crate::{
    Result,
    device::Context,
    driver::{check, plain},
};

/// An order of work on a device.
#[derive(Debug)]
pub struct Stream {
    pub(crate) context: Arc<Context>,
    raw: sys::CUstream,
    owned: bool,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver serialises what needs it.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn create(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the stream is destroyed when this is dropped.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) }, plain)?;
        Ok(Self { context: Arc::clone(context), raw, owned: true })
    }

    pub(crate) fn borrow(context: &Arc<Context>, raw: sys::CUstream) -> Self {
        Self { context: Arc::clone(context), raw, owned: false }
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits for everything on the stream. Use [`crate::Event::wait`] where a kernel might hang.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) }, plain)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: created by us and not used again.
            self.context.release(|| unsafe { sys::cuStreamDestroy_v2(self.raw) });
        }
    }
}
