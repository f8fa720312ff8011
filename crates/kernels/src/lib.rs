//! The CUDA kernels' sources and manifests, and the registry that reads them.
//!
//! Nothing here runs on a GPU or calls a compiler: this crate turns *manifest + source + problem* into a plain
//! [`Variant`] that says what to compile, how to launch it and which limits it must keep.

mod arch;
pub mod cache;
mod embedded;
mod error;
mod expr;
mod facts;
mod foreign;
mod id;
mod include;
mod manifest;
mod names;
pub mod params;
mod reads;
mod registry;
mod support;
mod tunables;
mod variant;

pub use arch::{Arch, Target};
pub use error::{Error, Result};
pub use expr::{Expr, ExprError};
pub use facts::ProblemFacts;
pub use id::VariantId;
pub use include::Header;
pub use manifest::{
    Constraint, Gate, HEAD_DIM_MAX, Kind, Launch, Layer, LimitRules, Limits, Manifest, MaskKind, Mutant,
    Range, Swizzle, TensorMapSpec, TensorName, Tolerance, Tunable, ValueDim,
};
pub use params::SdpaParams;
pub use registry::{Kernel, LineageEntry, Origin, Registry};
pub use support::{Reason, Refusal};
pub use tunables::{Assignment, SpaceSize, TunableSpace};
pub use variant::{LaunchGeometry, TensorMapUse, Variant, WORKSPACE_COUNTER_BYTES};
