//! Workspaces: device memory in which the blocks of one launch exchange partial results.
//!
//! Launches on one stream run one after the other and share a workspace; launches that may run beside each other never do.

use std::{
    collections::HashMap,
    ptr,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, ThreadId},
};

use cudarc::driver::sys;
use evosdpa_kernels::WORKSPACE_COUNTER_BYTES;

use crate::{
    DeviceBuffer, Error, RawStream, RelaxedCapture, Result, Stream,
    device::Context,
    driver::{check, plain},
};

/// The most that workspaces of captured launches may take together: a graph keeps its own for ever.
const CAPTURED_BYTES_MAX: usize = 1 << 30;

/// Workspaces of one device, each made when a stream first needs it, or needs a larger one.
///
/// A stream is known by its handle: one that is destroyed while its launches are still under way must not be followed by a new
/// one under the same handle before they are over.
///
/// What is captured into a graph has a workspace for each stream of each capture, because the graph may be replayed at any
/// time beside other launches. A graph does not run beside itself; one that is instantiated twice, or is part of two
/// others, has the same workspaces in both, so those must not run at the same time.
#[derive(Debug)]
pub(crate) struct Workspaces {
    context: Arc<Context>,
    made: Mutex<Made>,
}

#[derive(Debug, Default)]
struct Made {
    in_order: HashMap<Order, DeviceBuffer>,
    /// Outgrown, but launches under way or graphs may still use them.
    outgrown: Vec<DeviceBuffer>,
    /// For captures to come: made beforehand, or of graphs that are gone.
    spare: Vec<DeviceBuffer>,
    captured_bytes: usize,
}

/// The driver's number for it.
const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

/// Launches with the same of this run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Order {
    /// Its handle: a stream that is being captured does not tell its number.
    stream: u64,
    /// Of the default stream that every thread has of its own, under one handle.
    thread: Option<ThreadId>,
    capture: Option<u64>,
}

/// The handle of a thread's own default stream (`CU_STREAM_PER_THREAD`).
const PER_THREAD: u64 = 2;

impl Workspaces {
    pub(crate) fn of(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), made: Mutex::default() }
    }

    /// Makes sure that the first capture of such a launch finds a workspace. The caller's thread may be capturing a graph.
    pub(crate) fn prepare(&self, bytes: u64) -> Result<()> {
        let bytes = (bytes as usize).next_power_of_two();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.spare.iter().all(|spare| spare.bytes() < bytes) {
            match self.make(bytes) {
                // A launch does without, then.
                Err(Error::Driver { code: OUT_OF_MEMORY, .. }) => {}
                buffer => made.spare.push(buffer?),
            }
        }
        Ok(())
    }

    /// The address of a workspace for the next launch on this stream, which must be one of the current context; 0 when there
    /// is no memory left for it.
    pub(crate) fn next(&self, stream: RawStream, bytes: u64) -> Result<u64> {
        let order = Order::of(stream)?;
        let bytes = bytes as usize;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        match made.in_order.get(&order) {
            Some(buffer) if buffer.bytes() >= bytes => Ok(buffer.address()),
            _ => self.grow(&mut made, order, bytes),
        }
    }

    #[cold]
    fn grow(&self, made: &mut Made, order: Order, bytes: usize) -> Result<u64> {
        let bytes = bytes.next_power_of_two();
        if let (Some(_), Some(at)) =
            (order.capture, made.spare.iter().position(|spare| spare.bytes() >= bytes))
        {
            let spare = made.spare.swap_remove(at);
            return Ok(made.place(order, spare));
        }
        if order.capture.is_some() && made.captured_bytes + bytes > CAPTURED_BYTES_MAX {
            return Ok(0);
        }
        let buffer = match self.make(bytes) {
            Err(Error::Driver { code: OUT_OF_MEMORY, .. }) => return Ok(0),
            made => made?,
        };
        if order.capture.is_some() {
            made.captured_bytes += bytes;
        }
        Ok(made.place(order, buffer))
    }

    /// The caller's thread may be capturing a graph.
    fn make(&self, bytes: usize) -> Result<DeviceBuffer> {
        let entered = self.context.enter()?;
        let _relaxed = RelaxedCapture::begin(&entered)?;
        let buffer = DeviceBuffer::alloc(&self.context, bytes)?;
        // A stream of its own: the default stream would wait for streams that are being captured, which breaks them.
        let stream = Stream::create(&self.context)?;
        buffer.fill(0, &stream)?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Gives the workspaces of captured launches out again, when no graph that captured one is left.
    pub(crate) fn reuse_captured(&self) {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let (captured, kept): (HashMap<_, _>, _) =
            made.in_order.drain().partition(|(order, _)| order.capture.is_some());
        made.in_order = kept;
        made.spare.extend(captured.into_values());
    }

    /// How many words are not 0 of those that kernels must leave at 0. Ask when no launch is under way.
    pub(crate) fn left(&self) -> Result<usize> {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let mut words = vec![0_u32; WORKSPACE_COUNTER_BYTES as usize / 4];
        let mut left = 0;
        for buffer in made.in_order.values().chain(&made.spare) {
            buffer.read_at(0, bytemuck::cast_slice_mut(&mut words))?;
            left += words.iter().filter(|word| **word != 0).count();
        }
        Ok(left)
    }
}

impl Made {
    fn place(&mut self, order: Order, buffer: DeviceBuffer) -> u64 {
        let address = buffer.address();
        self.outgrown.extend(self.in_order.insert(order, buffer));
        address
    }
}

impl Order {
    fn of(stream: RawStream) -> Result<Self> {
        let thread = (stream.0 == PER_THREAD).then(|| thread::current().id());
        Ok(Self { stream: stream.0, thread, capture: capture_of(stream.0 as sys::CUstream)? })
    }
}

/// The capture that a stream takes part in.
fn capture_of(stream: sys::CUstream) -> Result<Option<u64>> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut capture, mut count) = (0, 0);
    let (mut graph, mut nodes, mut edges) = (ptr::null_mut(), ptr::null(), ptr::null());
    // SAFETY: the stream is alive; the driver writes each of the values, which point into the graph and are not followed.
    let code = unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            &mut capture,
            &mut graph,
            &mut nodes,
            &mut edges,
            &mut count,
        )
    };
    check("cuStreamGetCaptureInfo", code, plain)?;
    let active = status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    Ok(active.then_some(capture))
}
