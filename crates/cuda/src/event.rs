//! Events: points in a stream, with their time.

use std::{
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use crate::{
    Error, Result, Stream,
    device::Context,
    driver::{SUCCESS, check, plain},
    error::is_sticky,
};

/// A point in a stream, with its time.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver serialises what needs it.
unsafe impl Sync for Event {}

impl Event {
    /// An event that knows its time.
    pub fn new(stream: &Stream) -> Result<Self> {
        stream.context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: the context is current; the event is destroyed when this is dropped.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) }, plain)?;
        Ok(Self { context: Arc::clone(&stream.context), raw })
    }

    /// Marks the point the stream has now been given work up to.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both are alive and of one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw()) }, plain)
    }

    /// Whether the point has been reached; `what` is named in the error of a kernel that failed.
    pub fn is_reached(&self, what: &str) -> Result<bool> {
        self.context.bind()?;
        self.query(what)
    }

    fn query(&self, what: &str) -> Result<bool> {
        // SAFETY: the event is alive, and its context was current when this thread last used it.
        match unsafe { sys::cuEventQuery(self.raw) } {
            SUCCESS => Ok(true),
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => {
                // Whatever comes next on the context would be told the same, and be blamed for it.
                if is_sticky(code as u32) {
                    self.context.give_up();
                }
                check("cuEventQuery", code, || what.to_owned()).map(|()| true)
            }
        }
    }

    /// Waits until the point is reached, at most this long.
    ///
    /// Past the limit the device is given up: every later use of it is [`Error::DeviceLost`], and nothing made from it
    /// is released, because each of those calls would wait for the kernel that hangs.
    pub fn wait(&self, limit: Duration, what: &str) -> Result<()> {
        let start = Instant::now();
        while !self.is_reached(what)? {
            let waited = start.elapsed();
            if waited > limit {
                self.context.give_up();
                return Err(Error::Hang { what: what.to_owned(), limit });
            }
            // Short waits decide measurements, long ones should leave the processor to others.
            if waited > Duration::from_millis(2) {
                thread::sleep(Duration::from_micros(200));
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    /// After [`Error::Hang`]: if the kernel has ended after all, the device can be used again.
    pub fn recover(&self, what: &str) -> Result<bool> {
        let reached = self.query(what)?;
        if reached {
            self.context.take_back();
        }
        Ok(reached)
    }

    /// Microseconds from `start` to this one; both must have been reached.
    pub fn elapsed_us(&self, start: &Self) -> Result<f64> {
        self.context.bind()?;
        let mut time_ms = 0.0_f32;
        // SAFETY: both events are alive; the driver writes one float.
        let code = unsafe { sys::cuEventElapsedTime_v2(&mut time_ms, start.raw, self.raw) };
        check("cuEventElapsedTime", code, plain)?;
        Ok(f64::from(time_ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by us and not used again.
        self.context.release(|| unsafe { sys::cuEventDestroy_v2(self.raw) });
    }
}
