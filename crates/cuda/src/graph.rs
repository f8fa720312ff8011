//! CUDA graphs: a sequence of launches recorded once and replayed without the host's cost of each.

use std::{ptr, sync::Arc};

use cudarc::driver::sys;

use crate::{
    Error, Result, Stream,
    device::Context,
    driver::{check, plain},
};

/// A recorded sequence of launches.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: a graph may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` does on the stream, without running it. `work` must not allocate or wait.
    pub fn capture<E: From<Error>>(
        stream: &Stream,
        work: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        let context = &stream.context;
        context.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive; the capture ends below whatever `work` returns.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) }, plain)?;
        let worked = work();
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is capturing, because it was just told to.
        let code = unsafe { sys::cuStreamEndCapture(stream.raw(), &mut graph) };
        // The work's own error says more than the broken capture that follows from it.
        let captured = Captured { context: Arc::clone(context), graph };
        worked?;
        check("cuStreamEndCapture", code, plain)?;
        let mut executable = ptr::null_mut();
        // SAFETY: the graph is alive; no flags.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        check("cuGraphInstantiate", code, plain)?;
        // From here on `Graph` owns it.
        std::mem::forget(captured);
        let graph = Self { context: Arc::clone(context), graph, executable };
        // SAFETY: both are alive and of one context.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(graph.executable, stream.raw()) }, plain)?;
        Ok(graph)
    }

    /// Replays it on the stream.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both are alive and of one context.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.executable, stream.raw()) }, plain)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created by us and not used again.
        self.context.release(|| unsafe { sys::cuGraphExecDestroy(self.executable) });
        // SAFETY: as above.
        self.context.release(|| unsafe { sys::cuGraphDestroy(self.graph) });
    }
}

/// A graph that has not become a [`Graph`] yet.
struct Captured {
    context: Arc<Context>,
    graph: sys::CUgraph,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: made by the capture and not used again.
            self.context.release(|| unsafe { sys::cuGraphDestroy(self.graph) });
        }
    }
}
