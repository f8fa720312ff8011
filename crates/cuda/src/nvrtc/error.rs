//! What can go wrong between this process and the CUDA compiler library.

use std::path::PathBuf;

/// Why NVRTC could not be found, opened, installed or called. A source that it rejects is no error of this kind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The CUDA compiler library is not installed where anybody would look.
    #[error("NVRTC, the CUDA compiler library, was not found; looked in:\n{}\n{hint}", list(searched))]
    Missing {
        /// Where it was looked for, and what was missing there.
        searched: Vec<String>,
        /// How to get it.
        hint: String,
    },
    /// The compiler library is there and does not work.
    #[error("NVRTC at {} cannot be opened: {problem}", path.display())]
    Broken {
        /// The library.
        path: PathBuf,
        /// What the loader said.
        problem: String,
    },
    /// The compiler failed for another reason than the source.
    #[error("NVRTC: {operation} failed for {label}: {problem}")]
    Call {
        /// The call.
        operation: &'static str,
        /// What was to be compiled.
        label: String,
        /// What the compiler said.
        problem: String,
    },
    /// The private copy could not be made.
    #[error("the CUDA compiler could not be installed: {problem}\n{hint}")]
    Install {
        /// What failed.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// A folder of the private copy that cannot be made or moved.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Shorthand for results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn list(items: &[String]) -> String {
    items.iter().map(|item| format!("  - {item}")).collect::<Vec<_>>().join("\n")
}
