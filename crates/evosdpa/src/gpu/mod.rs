//! Attention on an NVIDIA GPU: device pointers and a stream in, a launch out.
//!
//! The first call for a problem plans it: it chooses a kernel, compiles it or takes it from the cache on disk, loads it
//! and raises its limits. Every later call fills in the parameters, encodes the tensor maps for its pointers and launches:
//! no allocation, no synchronisation, a few microseconds of the host's time. Calls may come from any thread and may be
//! captured into CUDA graphs.

mod plan;
mod tensors;

pub use evosdpa_cuda::RawStream;
pub use plan::{Gpu, Planned, load};
pub use tensors::{DeviceLse, DeviceScales, DeviceTensor, DeviceTensors};

use std::sync::{Mutex, PoisonError, RwLock};

use evosdpa_core::Problem;

use crate::Error;

/// The GPUs that [`forward`] uses, by number. They are kept for the life of the process: other users of the device may
/// still be at work when the process ends, and must find their context as they left it.
static SHARED: RwLock<Vec<Option<&'static Gpu>>> = RwLock::new(Vec::new());

/// Only one thread opens a GPU.
static OPENING: Mutex<()> = Mutex::new(());

/// The GPU `cuda:N`, opened by the first call and shared by the whole process.
pub fn shared(ordinal: usize) -> Result<&'static Gpu, Error> {
    let find = || {
        let shared = SHARED.read().unwrap_or_else(PoisonError::into_inner);
        shared.get(ordinal).copied().flatten()
    };
    if let Some(gpu) = find() {
        return Ok(gpu);
    }
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(gpu) = find() {
        return Ok(gpu);
    }
    let gpu: &'static Gpu = Box::leak(Box::new(Gpu::open(ordinal)?));
    let mut shared = SHARED.write().unwrap_or_else(PoisonError::into_inner);
    if shared.len() <= ordinal {
        shared.resize(ordinal + 1, None);
    }
    shared[ordinal] = Some(gpu);
    Ok(gpu)
}

/// Computes attention on `cuda:N`, on the caller's stream: [`shared`] and [`Gpu::forward`].
///
/// # Safety
/// As for [`Gpu::forward`].
pub unsafe fn forward(
    ordinal: usize,
    problem: &Problem,
    tensors: &DeviceTensors,
    stream: RawStream,
) -> Result<(), Error> {
    let gpu = shared(ordinal)?;
    // SAFETY: this function's contract is the same.
    unsafe { gpu.forward(problem, tensors, stream) }
}
