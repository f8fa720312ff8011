//! Streams.

use std::{marker::PhantomData, ptr, sync::Arc};

use cudarc::driver::sys;

use crate::{
    Entered, Result,
    device::Context,
    driver::{check, plain},
};

/// Someone else's stream, as the number that other libraries hand out: `torch.cuda.current_stream().cuda_stream`, or a
/// `CUstream`. 0 is the device's default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawStream(pub u64);

/// While it lives, this thread may load code and the like although a stream is being captured into a graph, by this
/// thread or another: what is loaded is no part of the graph.
#[derive(Debug)]
pub struct RelaxedCapture {
    before: sys::CUstreamCaptureMode,
    /// The mode belongs to one thread.
    _on_this_thread: PhantomData<*const ()>,
}

impl RelaxedCapture {
    /// From now on.
    pub fn begin(entered: &Entered<'_>) -> Result<Self> {
        // The proof is only there so that the driver is; the mode belongs to the thread.
        let _ = entered;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver reads the new mode and writes the old one.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        check("cuThreadExchangeStreamCaptureMode", code, plain)?;
        Ok(Self { before: mode, _on_this_thread: PhantomData })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: as above; this thread had this mode before.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}

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

    /// Its number, for whoever takes streams as such. It is valid as long as this stream lives.
    pub fn number(&self) -> RawStream {
        RawStream(self.raw as u64)
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
