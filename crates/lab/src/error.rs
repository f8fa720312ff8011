//! What can go wrong in the lab itself, as opposed to in a kernel.

use std::path::PathBuf;

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
    /// The simulator was asked for a time.
    #[error("the simulator has no clock: use --device cuda or cpu to measure")]
    NoClock,
    /// Text after a kernel's name that is not a choice of tunables.
    #[error("cannot read `{text}` as a kernel with tunables; write it as sdpa_v2c[STAGES=3 BLOCK_N=64]")]
    Tunables {
        /// The text as given.
        text: String,
    },
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
    /// A peer program did not do its part.
    #[error("{peer}: {why}")]
    Peer {
        /// Which peer.
        peer: &'static str,
        /// What happened.
        why: String,
    },
}

impl Error {
    /// Whether a kernel did this while it ran.
    pub fn is_the_kernels_fault(&self) -> bool {
        match self {
            Self::Cuda(error) => error.is_the_kernels_fault(),
            Self::Findings { .. } => true,
            _ => false,
        }
    }

    /// Whether a kernel was refused before anything ran, because tensors or device do not suit it.
    pub fn is_a_refusal(&self) -> bool {
        matches!(self, Self::Cuda(error) if error.is_a_refusal())
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
