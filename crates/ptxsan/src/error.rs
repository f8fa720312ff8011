//! The one error type of the crate: what was asked cannot be done. What a *kernel* does wrong is a finding, not an error.

use thiserror::Error;

/// Why a module could not be loaded or a launch could not be started.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not PTX this crate can read.
    #[error("line {line}: {message}")]
    Parse {
        /// 1-based line of the PTX text.
        line: u32,
        /// What was expected and what was there.
        message: String,
    },
    /// An instruction outside the supported set.
    #[error("{}: instruction `{instruction}` is not supported: {reason}", place(source_line.as_deref(), *line))]
    Unsupported {
        /// 1-based line of the PTX text.
        line: u32,
        /// The line of the CUDA source with its inline stack, when the module has line information.
        source_line: Option<String>,
        /// The opcode as written.
        instruction: String,
        /// Which part of it is not supported.
        reason: String,
    },
    /// No entry of that name in the module.
    #[error("no entry `{name}`; the module has: {available}")]
    NoSuchEntry {
        /// The name asked for.
        name: String,
        /// The entries there are.
        available: String,
    },
    /// Nothing that can be launched.
    #[error(
        "the module has no kernel: nothing in it is `__global__` (PTX: `.entry`); a template is compiled when it is named with its \
         arguments, such as --entry 'scale<float>'"
    )]
    NoEntries,
    /// Several entries, and none was named.
    #[error("there are several entries, and none was named (--entry); the module has: {available}")]
    EntryNeeded {
        /// The entries there are.
        available: String,
    },
    /// No variable of that name in the module.
    #[error(
        "no variable `{name}`; the module has: {available} (a compiler drops `__device__` and `__constant__` variables that no kernel uses)"
    )]
    NoSuchVariable {
        /// The name asked for.
        name: String,
        /// The variables there are.
        available: String,
    },
    /// A name that several entries or variables have.
    #[error("`{name}` is the name of several: {candidates}; write one of them out")]
    AmbiguousName {
        /// The name asked for.
        name: String,
        /// All that it may mean.
        candidates: String,
    },
    /// The CUDA compiler is not there, does not work, or was asked for what it does not have.
    #[error("{0}")]
    Compiler(String),
    /// The CUDA source does not compile.
    #[error("{file} does not compile for {target}:\n{log}\n{hint}")]
    Rejected {
        /// The source.
        file: String,
        /// What it was compiled for.
        target: String,
        /// What the compiler said.
        log: String,
        /// What may help.
        hint: String,
    },
    /// The launch breaks a limit or does not fit the entry's parameters.
    #[error("cannot launch `{entry}`: {reason}")]
    Launch {
        /// The entry's name.
        entry: String,
        /// The limit that is broken and how to keep it.
        reason: String,
    },
    /// A tensor map that breaks a rule of the driver.
    #[error("tensor map: {0}")]
    TensorMap(String),
    /// A host-side memory operation outside its buffer.
    #[error("device memory: {0}")]
    Memory(String),
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// `kernel.cu:7 (PTX line 30)`, or `line 30`.
fn place(source_line: Option<&str>, line: u32) -> String {
    match source_line {
        Some(source) => format!("{source} (PTX line {line})"),
        None => format!("line {line}"),
    }
}

impl Error {
    pub(crate) fn parse(line: u32, message: impl Into<String>) -> Self {
        Error::Parse { line, message: message.into() }
    }
}
