//! Runs compiled CUDA kernels (PTX text) on a CPU and reports their races and memory errors.
//!
//! ```
//! use ptxsan::{Arg, Device, Launch, Module};
//!
//! let ptx = r#"
//!     .version 7.0
//!     .target sm_80
//!     .address_size 64
//!     .visible .entry twice(.param .u64 data)
//!     {
//!         .reg .b32 %r<3>;
//!         .reg .b64 %rd<4>;
//!         ld.param.u64 %rd1, [data];
//!         mov.u32 %r1, %tid.x;
//!         mul.wide.u32 %rd2, %r1, 4;
//!         add.s64 %rd3, %rd1, %rd2;
//!         ld.global.u32 %r2, [%rd3];
//!         shl.b32 %r2, %r2, 1;
//!         st.global.u32 [%rd3], %r2;
//!         ret;
//!     }"#;
//! let module = Module::parse(ptx)?;
//! let mut device = Device::new();
//! let id = device.load(&module)?;
//! let data = device.upload("data", &[1, 0, 0, 0, 2, 0, 0, 0])?;
//!
//! let launch = Launch::new("twice", [1, 1, 1], [2, 1, 1], 0, vec![Arg::Buffer(data)]);
//! let outcome = device.launch(id, &launch)?;
//! assert!(outcome.is_clean());
//! assert_eq!(device.read(data)?, [2, 0, 0, 0, 4, 0, 0, 0]);
//!
//! // Three threads, but only room for two.
//! let launch = Launch::new("twice", [1, 1, 1], [3, 1, 1], 0, vec![Arg::Buffer(data)]);
//! let outcome = device.launch(id, &launch)?;
//! assert!(outcome.findings[0].to_string().contains("past the end of `data`"));
//! # Ok::<(), ptxsan::Error>(())
//! ```
//!
//! A [`Module`] is text that was read and decoded whole: an entry with an instruction outside the supported set is refused
//! by name, and the others can be launched. A [`Device`] holds memory; [`Device::launch`] runs a [`Launch`] to its end and gives an
//! [`Outcome`]: findings, exact counters, and what the kernel printed. What a *kernel* does wrong is a
//! [`Finding`]; an [`Error`] means that the launch itself made no sense.
//!
//! # The model
//!
//! Lanes of a warp are threads of their own. They run together while they are converged and meet again at the
//! immediate post-dominator of a branch, but what one lane does is ordered before what another does only by
//! `bar.warp.sync`, a CTA barrier, or a release–acquire pattern through memory (a fence, a strong store or
//! atomic; a strong load or atomic, a fence). Shuffles and votes exchange values but do not order memory, as CUDA documents.
//! Each asynchronous copy runs on its own from issue until its group is waited for; after the wait it is known
//! to its own thread, and to others by the barrier that follows. Blocks are unordered unless they synchronise
//! through global memory.

#[cfg(feature = "source")]
pub mod compile;
pub mod count;
mod decode;
pub mod error;
pub mod finding;
mod hazard;
mod host;
mod machine;
mod memory;
mod module;
pub mod mutate;
#[cfg(feature = "source")]
pub mod names;
#[cfg(not(feature = "source"))]
mod names {
    /// The symbol itself: C++ names are readable with the feature `source`.
    pub(crate) fn demangled(symbol: &str) -> String {
        symbol.to_owned()
    }
}
pub mod numeric;
#[cfg(feature = "source")]
pub mod nvrtc;
mod parse;
mod random;
pub mod report;
pub mod sarif;
pub mod tensor;

pub use error::{Error, Result};
pub use finding::{Finding, Frame, Kind, Severity, Site, Suppressions, Variable};
pub use machine::{Arg, Device, Launch, ModuleId, Options, Schedule, TensorElement, TensorMap};
pub use memory::Buffer;
pub use module::{Edit, Module, SyncPoint};
pub use report::{Outcome, SyncWork};
