//! CUDA at run time: find the compiler and the driver, compile a kernel variant, hold it against its limits, load it
//! and launch it. Nothing of CUDA is needed to build this crate, and nothing here panics when CUDA is missing.
//!
//! The way of a kernel: [`evosdpa_kernels::Variant`] → [`Builder::build`] → [`Artifact`] →
//! [`resources::gate`](crate::resources::gate()) → [`Device::load`] → [`PreparedLaunch`].
//!
//! Only [`loader`] may touch the driver first; everything else gets at it through a [`Device`], which exists only when
//! the loader has found a working driver.

mod artifact;
mod buffer;
mod builder;
mod cache;
mod clock;
mod compiler;
mod counters;
pub mod cubin;
mod device;
mod driver;
mod entry;
mod error;
mod event;
mod foreign;
mod graph;
mod guarded;
mod launch;
pub mod loader;
mod module;
pub mod nvrtc;
mod occupancy;
pub mod precompiled;
mod program;
pub mod ptxas;
pub mod resources;
mod stream;
mod tensor_map;
mod timing;
pub mod worker;
mod workspace;

pub use artifact::{Artifact, ArtifactKind, Origin};
pub use buffer::DeviceBuffer;
pub use builder::Builder;
pub use cache::{Cache, CacheEntry};
pub use clock::ClockProbe;
pub use compiler::{CompileRequest, Compiled, Compiler};
pub use counters::Counters;
pub use device::{Device, DeviceInfo, Entered};
pub use error::{CompileError, Error, ErrorKind, Result};
pub use event::Event;
pub use foreign::ForeignKernel;
pub use graph::Graph;
pub use guarded::GuardedBuffer;
pub use launch::PreparedLaunch;
pub use module::{Function, FunctionAttributes, Module};
pub use nvrtc::{toolchain, toolkit};
pub use occupancy::{Limiter, Occupancy, occupancy};
pub use precompiled::Precompiled;
pub use program::Program;
pub use resources::{Finding, ResourceReport};
pub use stream::{RawStream, RelaxedCapture, Stream};
pub use tensor_map::{TensorMap, TensorMapRequest};
pub use timing::{L2Flush, copies_to_exceed_l2, copy_gbps, event_overhead_us, time_each_us, time_graph_us};
