//! What can go wrong in the lab itself, as opposed to in a kernel.

use std::path::PathBuf;

pub use evosdpa_cuda::ErrorKind;

/// Why the lab could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A problem or a name is not right.
    #[error(transparent)]
    Problem(#[from] evosdpa_core::Error),
    /// The library refused a call.
    #[error(transparent)]
    Library(#[from] evosdpa::Error),
    /// CUDA, its compiler or the device said no.
    #[error(transparent)]
    Cuda(#[from] evosdpa_cuda::Error),
    /// A kernel's manifest, or a choice of tunables, is not right.
    #[error(transparent)]
    Kernel(#[from] evosdpa_kernels::Error),
    /// The simulator could not run a kernel.
    #[error("ptxsan: {0}")]
    Sim(#[from] ptxsan::Error),
    /// The simulator saw a kernel do something wrong.
    #[error("{kernel}: {} findings; {}", findings.len(), findings.join("; "))]
    Findings {
        /// The variant.
        kernel: String,
        /// What it did, and where.
        findings: Vec<String>,
    },
    /// Problems of one mutation score were compiled to different code.
    #[error("{kernel} is other code at {shape}: one score needs problems that compile to the same")]
    OtherCode {
        /// The variant.
        kernel: String,
        /// The problem that differs from the first.
        shape: String,
    },
    /// A mutation score was asked for without a problem to run.
    #[error("no problem was given to run the kernel on")]
    NoProblem,
    /// Text after a kernel's name that is not a choice of tunables.
    #[error("`{text}`: {why}")]
    Tunables {
        /// The text as given.
        text: String,
        /// What is wrong with them.
        why: String,
    },
    /// A CUDA kernel was asked for on a CPU.
    #[error(
        "{kernel} is a CUDA kernel, which needs a GPU: `evosdpa doctor` says what is missing. On a CPU, `check`, `sanitize` and \
         `profile` run it with --device sim, which has no clock; cpu_naive and cpu_flash can be timed and tuned"
    )]
    NeedsGpu {
        /// The kernel.
        kernel: String,
    },
    /// An audit caught a kernel.
    #[error("{kernel} does not do its work under the clock: {finding}")]
    Caught {
        /// The kernel.
        kernel: String,
        /// At what.
        finding: crate::measure::audit::Finding,
    },
    /// A gate met a fault of the machine and could not say anything.
    #[error("{0}")]
    MachineFault(String),
    /// A proposer gave up.
    #[error("the proposer gave up: {0}; what was evaluated is kept, and --resume goes on with it")]
    Proposer(String),
    /// A tune could not begin or go on.
    #[error("{0}")]
    Tune(String),
    /// A file or folder could not be read or written.
    #[error("cannot {doing} {}: {source}; {hint}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On which path.
        path: PathBuf,
        /// What to do about it.
        hint: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A run's files are not what the lab writes.
    #[error("{} is not a run of this lab: {why}; `evosdpa runs` lists the ones that are", path.display())]
    NotARun {
        /// The path given.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Two runs have nothing in common.
    #[error("runs {a} and {b} share no row (kernel and problem), so there is nothing to compare")]
    NothingInCommon {
        /// The first run.
        a: String,
        /// The second run.
        b: String,
    },
    /// A profiler's capture cannot be read.
    #[error(
        "{source_name} is not a capture of ncu that can be read: {why}. Expected what `ncu --csv --page raw` prints"
    )]
    Capture {
        /// The file.
        source_name: String,
        /// What is wrong with it.
        why: String,
    },
    /// A capture lacks metrics that the diagnosis needs.
    #[error(
        "the capture of {kernel} lacks {} of the metrics that {arch} needs: {}. Capture again with `evosdpa profile`, or export \
         all with `ncu --import FILE.ncu-rep --csv --page raw`",
        missing.len(),
        missing.join(", ")
    )]
    MetricsMissing {
        /// The launch.
        kernel: String,
        /// Whose metrics were looked for.
        arch: evosdpa_kernels::Arch,
        /// Names, with `(n/a)` where there is a column without a value.
        missing: Vec<String>,
    },
    /// A report cannot be made.
    #[error("cannot make the report: {why}")]
    Report {
        /// What is wrong.
        why: String,
    },
    /// A CPU was asked for times that only a GPU has.
    #[error(
        "timing `between` needs a GPU, where a foreign kernel goes before every launch; on a CPU: graph, warm, single, cold"
    )]
    BetweenOnCpu,
    /// A file that is no answer to a task of a tool.
    #[error("{path}: not a submission of {tool}: {why}", path = path.display())]
    Handed {
        /// The tool.
        tool: &'static str,
        /// The file.
        path: std::path::PathBuf,
        /// Why not.
        why: String,
    },
    /// A submission does not do what was asked of it.
    #[error("the submission: {0}")]
    Submission(String),
    /// A baseline program did not do its part.
    #[error("{baseline}: {why}")]
    Baseline {
        /// Which baseline.
        baseline: &'static str,
        /// What happened.
        why: String,
    },
}

impl Error {
    /// Whose matter it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Cuda(error) => error.kind(),
            Self::Library(evosdpa::Error::Cuda(error)) => error.kind(),
            Self::Findings { .. } | Self::Caught { .. } | Self::Submission(_) => ErrorKind::Kernel,
            Self::Sim(ptxsan::Error::NoSuchEntry { .. }) => ErrorKind::Kernel,
            // The simulator has less memory than a GPU, and what it was given may fit another time.
            Self::Sim(ptxsan::Error::Memory(_)) => ErrorKind::Machine,
            // What the simulator does not know, or would not launch, is no fault of the kernel.
            Self::Sim(_) => ErrorKind::Refused,
            Self::MachineFault(_) | Self::Problem(evosdpa_core::Error::Memory { .. }) => ErrorKind::Machine,
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::OutOfMemory => ErrorKind::Machine,
            _ => ErrorKind::Caller,
        }
    }
}

/// Adds what was being done to an input/output error.
pub(crate) trait IoContext<T> {
    fn doing(self, doing: &'static str, path: &std::path::Path, hint: &'static str) -> Result<T, Error>;
}

impl<T> IoContext<T> for std::io::Result<T> {
    fn doing(self, doing: &'static str, path: &std::path::Path, hint: &'static str) -> Result<T, Error> {
        self.map_err(|source| Error::Io { doing, path: path.to_owned(), hint, source })
    }
}
