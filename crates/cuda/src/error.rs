//! What can go wrong between a kernel's source and its result.

use std::{path::PathBuf, time::Duration};

use crate::nvrtc;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A source that did not compile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{label} does not compile for {target}:\n{log}")]
pub struct CompileError {
    /// The variant.
    pub label: String,
    /// The compiler's name of the target: `sm_90a`.
    pub target: String,
    /// The compiler's log, with file and line.
    pub log: String,
}

/// What can go wrong with CUDA, each with what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no CUDA driver.
    #[error(
        "no CUDA driver: none of {tried} could be opened; install an NVIDIA driver (`nvidia-smi` must work)"
    )]
    NoDriver {
        /// The library names that were tried.
        tried: String,
    },
    /// The driver is older than this program needs.
    #[error(
        "the CUDA driver supports CUDA {}.{}, CUDA {}.{} is needed{}; update the NVIDIA driver",
        have / 1000, have % 1000 / 10, need / 1000, need % 1000 / 10,
        missing.map_or(String::new(), |symbol| format!(" (it has no {symbol})"))
    )]
    DriverTooOld {
        /// The CUDA version the driver supports, 1000·major + 10·minor.
        have: i32,
        /// The version needed.
        need: i32,
        /// A function the driver does not have.
        missing: Option<&'static str>,
    },
    /// The driver library is there but does not work.
    #[error("the CUDA driver does not start: {name} (code {code}); {hint}")]
    DriverBroken {
        /// The driver's name of the error.
        name: String,
        /// Its number.
        code: u32,
        /// What may help.
        hint: &'static str,
    },
    /// The driver works but there is no GPU.
    #[error("the CUDA driver sees no device; check `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// There is no GPU of this number.
    #[error("there is no device cuda:{ordinal}; there are {count}, counted from 0")]
    NoSuchDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The GPU's architecture is not one that kernels are built for.
    #[error("{device} has compute capability {major}.{minor}; kernels are built for 8.0, 8.6, 8.9 and 9.0")]
    UnsupportedDevice {
        /// The GPU's name.
        device: String,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
    /// NVRTC is not there, or does not work.
    #[error(transparent)]
    Nvrtc(#[from] nvrtc::Error),
    /// The source does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The compiler took too long.
    #[error("compiling {label} took longer than {} s and was stopped", limit.as_secs_f64())]
    CompileTimeout {
        /// The variant.
        label: String,
        /// The limit.
        limit: Duration,
    },
    /// A compile worker ended without an answer.
    #[error("the compile worker died while compiling {label}: {problem}")]
    WorkerDied {
        /// The variant.
        label: String,
        /// What is known.
        problem: String,
    },
    /// The compiler's report could not be understood.
    #[error("{label}: {problem}")]
    Report {
        /// The variant or file.
        label: String,
        /// What is wrong.
        problem: String,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The folder of compiled kernels belongs to somebody else, who could put anything there.
    #[error("the cache {} belongs to user {owner}: remove it, or set XDG_CACHE_HOME to a folder of your own", path.display())]
    ForeignCache {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// There is no folder of precompiled kernels where one was named.
    #[error(
        "there is no folder {}: name one that `evosdpa precompile FOLDER` has filled, or unset EVOSDPA_PRECOMPILED",
        path.display()
    )]
    NotPrecompiled {
        /// What was named.
        path: PathBuf,
    },
    /// A driver call failed.
    #[error("{operation} failed: {name} (code {code}){}", describe(context))]
    Driver {
        /// The driver function.
        operation: &'static str,
        /// The driver's name of the error.
        name: String,
        /// Its number.
        code: u32,
        /// The kernel and launch, or whatever it was for; may be empty.
        context: String,
    },
    /// A launch asks for more shared memory than the device has for one block.
    #[error(
        "{kernel} needs {wanted_bytes} bytes of shared memory per block ({static_bytes} static and \
         {dynamic_bytes} dynamic), the device allows {limit_bytes}; not launched ({launch})"
    )]
    SharedMemory {
        /// The kernel.
        kernel: String,
        /// The launch's geometry.
        launch: String,
        /// Static and dynamic together.
        wanted_bytes: u64,
        /// What the kernel declares.
        static_bytes: u64,
        /// What the launch asks for.
        dynamic_bytes: u64,
        /// What the device allows.
        limit_bytes: u64,
    },
    /// A launch asks for something else the kernel or device cannot do.
    #[error("{kernel} cannot be launched ({launch}): {problem}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// The launch's geometry.
        launch: String,
        /// What is wrong.
        problem: String,
    },
    /// A kernel did not finish in time.
    #[error("{what} did not finish within {} ms; the device is given up, this process goes on", limit.as_millis())]
    Hang {
        /// The kernel and its launch.
        what: String,
        /// The limit.
        limit: Duration,
    },
    /// The device was given up after a kernel hung or broke its context.
    #[error("the device was given up after a kernel hung or crashed; start a new process to use it again")]
    DeviceLost,
    /// Something wrote outside an output.
    #[error("{buffer}: {count} bytes written outside it, the first {distance_bytes} bytes {side} it")]
    StrayWrite {
        /// The buffer.
        buffer: String,
        /// `before` or `after`.
        side: &'static str,
        /// How far from the buffer the first changed byte is.
        distance_bytes: usize,
        /// How many bytes changed.
        count: usize,
    },
    /// A kernel did not put its work counters back.
    #[error("{kernel} left {count} of its work counters at other values than 0")]
    CountersLeft {
        /// The kernel.
        kernel: String,
        /// How many.
        count: usize,
    },
    /// A copy's sizes do not match.
    #[error("{buffer}: {given_bytes} bytes given, it has {bytes}")]
    CopySize {
        /// The buffer.
        buffer: &'static str,
        /// The size of the host's side.
        given_bytes: usize,
        /// The size of the device's side.
        bytes: usize,
    },
    /// A tensor map cannot describe the tensor.
    #[error("no tensor map for {tensor}: {problem}")]
    TensorMap {
        /// Which tensor.
        tensor: String,
        /// Which rule it breaks.
        problem: String,
    },
    /// A kernel or manifest is wrong.
    #[error(transparent)]
    Kernels(#[from] evosdpa_kernels::Error),
}

/// Whose matter an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The kernel's: it does not compile, hung, wrote where it must not, or made the driver stop it.
    Kernel,
    /// Nobody's: tensors, device and kernel do not suit each other, and nothing ran.
    Refused,
    /// The machine's: memory that ran out or broke, a device that was lost, a process that died or took too long. Another
    /// try may go well.
    Machine,
    /// The caller's: a name, a size or a file that is not right, or a driver or compiler that is not there.
    Caller,
}

impl Error {
    /// Whose matter it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Compile(_) | Self::Report { .. } => ErrorKind::Kernel,
            Self::Hang { .. } | Self::StrayWrite { .. } | Self::CountersLeft { .. } => ErrorKind::Kernel,
            Self::Driver { code, .. } if is_a_machine_fault(*code) => ErrorKind::Machine,
            Self::Driver { .. } => ErrorKind::Kernel,
            Self::SharedMemory { .. } | Self::TensorMap { .. } | Self::Launch { .. } => ErrorKind::Refused,
            Self::DeviceLost | Self::CompileTimeout { .. } | Self::WorkerDied { .. } => ErrorKind::Machine,
            _ => ErrorKind::Caller,
        }
    }
}

/// Driver errors that no kernel can cause; every other one, unknown ones too, is put down to the kernel that was running.
/// Numbers of `CUresult`, as the driver's documentation gives them.
fn is_a_machine_fault(code: u32) -> bool {
    matches!(
        code,
        2 // out of memory
        | 3 | 4 // not initialised, shutting down
        | 46 // the device is busy or cannot be had
        | 100 | 101 // no device
        | 201 // its context is gone
        | 214 // ECC error that could not be corrected
        | 220 | 226 // NVLink error, contained hardware error
        | 304 // the operating system failed
        | 802
            ..=811 // system not ready, driver mismatch, the services between processes
        | 911 // a device outside this GPU failed
    )
}

/// Whether the driver answers every later call on the context with the same error.
pub(crate) fn is_sticky(code: u32) -> bool {
    matches!(code, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719)
}

fn describe(context: &str) -> String {
    if context.is_empty() { String::new() } else { format!(", {context}") }
}
