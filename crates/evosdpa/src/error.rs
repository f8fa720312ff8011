//! What can go wrong in a call.

#[cfg(feature = "cuda")]
use std::path::PathBuf;

#[cfg(feature = "cuda")]
use evosdpa_core::DType;

#[cfg(feature = "cuda")]
use crate::Device;

/// Why attention was not computed. Nothing has been written then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem or its tensors are not right.
    #[error(transparent)]
    Problem(#[from] evosdpa_core::Error),
    /// The CPU backend refused.
    #[cfg(feature = "cpu")]
    #[error(transparent)]
    Cpu(#[from] evosdpa_cpu::Error),
    /// The driver, the compiler or a launch failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] evosdpa_cuda::Error),
    /// No kernel takes the problem, or a kernel was asked for something it does not have.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Kernels(#[from] evosdpa_kernels::Error),
    /// A kernel of the user's that asks for too many tensor maps.
    #[cfg(feature = "cuda")]
    #[error(
        "kernel `{kernel}` takes {count} tensor maps, at most {} are possible",
        evosdpa_cuda::PreparedLaunch::TENSOR_MAPS_MAX
    )]
    TensorMapCount {
        /// The kernel.
        kernel: String,
        /// How many it takes.
        count: usize,
    },
    /// A softmax scale that no GPU kernel takes.
    #[cfg(feature = "cuda")]
    #[error("the softmax scale {scale} is negative, which no GPU kernel takes; negate the queries and give {}", -scale)]
    NegativeScale {
        /// The scale.
        scale: f32,
    },
    /// A manifest asks for rules that there are not.
    #[error(
        "kernel `{kernel}`: there is no family `{family}` whose rules could choose its tunables (there are {known})"
    )]
    UnknownFamily {
        /// The kernel.
        kernel: String,
        /// What its manifest names.
        family: String,
        /// The families there are.
        known: String,
    },
    /// A tensor has no address.
    #[cfg(feature = "cuda")]
    #[error("{tensor} has no memory: its address is 0")]
    NullPointer {
        /// Which tensor.
        tensor: &'static str,
    },
    /// An address inside an element.
    #[cfg(feature = "cuda")]
    #[error("{tensor}: the address {address:#x} is no multiple of its elements' {element_bytes} bytes")]
    Misaligned {
        /// Which tensor.
        tensor: &'static str,
        /// Its address.
        address: u64,
        /// The size of an element.
        element_bytes: u64,
    },
    /// A stride that runs backwards.
    #[cfg(feature = "cuda")]
    #[error("{tensor}: the stride {stride} is negative; make it contiguous first")]
    NegativeStride {
        /// Which tensor.
        tensor: &'static str,
        /// The stride.
        stride: i64,
    },
    /// An output in which elements share memory.
    #[cfg(feature = "cuda")]
    #[error(
        "{tensor}: the stride {stride} is smaller than the {extent} elements it must step over; an output's elements \
         must not share memory"
    )]
    Overlap {
        /// Which tensor.
        tensor: &'static str,
        /// The stride.
        stride: i64,
        /// What lies inside one step.
        extent: u64,
    },
    /// A page table whose rows are too short.
    #[cfg(feature = "cuda")]
    #[error("page table: rows of {row_stride} entries; the longest sequence has {entries} pages")]
    PageRows {
        /// Entries from row to row.
        row_stride: i64,
        /// Pages of the longest sequence.
        entries: i64,
    },
    /// 8-bit inputs without scales.
    #[cfg(feature = "cuda")]
    #[error("{dtype} inputs need scales, one for each batch and head of Q, K and V")]
    ScalesMissing {
        /// The inputs' type.
        dtype: DType,
    },
    /// Scales for inputs that have none.
    #[cfg(feature = "cuda")]
    #[error("{dtype} inputs have no scales; only 8-bit ones do")]
    ScalesNotWanted {
        /// The inputs' type.
        dtype: DType,
    },
    /// A tuned table says something impossible.
    #[cfg(feature = "cuda")]
    #[error("{file}: {problem}")]
    Table {
        /// The table.
        file: String,
        /// What is wrong, and where.
        problem: String,
    },
    /// A tuned table could not be read or written.
    #[cfg(feature = "cuda")]
    #[error("cannot {doing} the tuned table {}: {source}; EVOSDPA_TUNED names another", path.display())]
    TableFile {
        /// What was tried.
        doing: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Winners of a tune that cannot become rows of a table.
    #[cfg(feature = "cuda")]
    #[error("{file}: {problem}")]
    Elites {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// Kernels take the problem, but none takes these tensors.
    #[cfg(feature = "cuda")]
    #[error("no kernel takes these tensors of {problem}: {reasons}")]
    Unreachable {
        /// The problem.
        problem: String,
        /// Each kernel with its reason.
        reasons: String,
    },
    /// A cache in this process's memory for a GPU.
    #[cfg(feature = "cuda")]
    #[error("{what}: {device} takes tensors in its own memory; call `Gpu::write_cache`, or name Device::Cpu")]
    CacheOnHost {
        /// What was asked for.
        what: &'static str,
        /// Where.
        device: Device,
    },
    /// Host tensors for a plan on a GPU.
    #[cfg(feature = "cuda")]
    #[error(
        "the plan is for {device}, which takes tensors in its own memory: call `run_on`, or plan for Device::Cpu"
    )]
    PlannedForGpu {
        /// The plan's device.
        device: Device,
    },
    /// Device tensors for a plan on a CPU.
    #[cfg(feature = "cuda")]
    #[error(
        "the plan is for the CPU, which cannot read device memory: call `run`, or plan for Device::Cuda(n)"
    )]
    PlannedForCpu,
}
