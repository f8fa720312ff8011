//! What can be wrong with kernels and manifests.

use std::path::PathBuf;

use crate::{ExprError, Refusal, names::suggestion};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with kernels, manifests and the problems they are asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// What was to be read.
        path: PathBuf,
        /// Why it could not be.
        source: std::io::Error,
    },
    /// A manifest is not TOML, has a wrong value, or has a key that is not known.
    #[error("{file}:{line}:{column}: {problem}{}", suggestion(nearest))]
    Manifest {
        /// The manifest.
        file: String,
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1.
        column: usize,
        /// What is wrong, with the key and what is allowed.
        problem: String,
        /// The allowed name nearest to an unknown one.
        nearest: Option<String>,
    },
    /// A manifest is well-formed but says something impossible.
    #[error("{file}: `{key}`: {problem}")]
    ManifestValue {
        /// The manifest.
        file: String,
        /// The key whose value is wrong.
        key: String,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// An expression of a manifest is malformed or has no value.
    #[error("{file}: `{key}`: {source}")]
    Expression {
        /// The manifest.
        file: String,
        /// The key that holds the expression.
        key: String,
        /// What is wrong with it.
        source: ExprError,
    },
    /// A manifest names a source file that is not there.
    #[error("{file}: source `{wanted}` does not exist beside the manifest")]
    SourceMissing {
        /// The manifest.
        file: String,
        /// The file it names.
        wanted: String,
    },
    /// A source from outside reads what it may not.
    #[error("the source of {name} is refused: {why}")]
    ForeignSource {
        /// The kernel that it was to be.
        name: String,
        /// What it does.
        why: String,
    },
    /// Two kernels have the same name.
    #[error("kernel `{name}` is defined twice: in {first} and in {second}; rename one")]
    DuplicateKernel {
        /// The name.
        name: String,
        /// The manifest that was read first.
        first: String,
        /// The other one.
        second: String,
    },
    /// No kernel has this name.
    #[error("there is no kernel `{name}` (there are {known}){}", suggestion(nearest))]
    UnknownKernel {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
        /// The nearest of them.
        nearest: Option<String>,
    },
    /// No architecture has this name.
    #[error(
        "architecture `{name}` is not supported (there are sm_80, sm_86, sm_89, sm_90a){}",
        suggestion(nearest)
    )]
    UnknownArch {
        /// The name asked for.
        name: String,
        /// The nearest known one.
        nearest: Option<String>,
    },
    /// The kernel has no tunable of this name.
    #[error("kernel `{kernel}` has no tunable `{name}` (it has {known}){}", suggestion(nearest))]
    UnknownTunable {
        /// The kernel.
        kernel: String,
        /// The tunable asked for.
        name: String,
        /// The tunables it has.
        known: String,
        /// The nearest of them.
        nearest: Option<String>,
    },
    /// A tunable was given a value that its manifest does not list.
    #[error("kernel `{kernel}`: {name} = {value} is not one of its values {allowed:?}")]
    TunableValue {
        /// The kernel.
        kernel: String,
        /// The tunable.
        name: String,
        /// The value asked for.
        value: i64,
        /// The values its manifest lists.
        allowed: Vec<i64>,
    },
    /// Text that is not a kernel with tunables.
    #[error("cannot read `{text}` as a kernel with tunables; write it as sdpa_v2c[STAGES=3 BLOCK_N=64]")]
    VariantName {
        /// The text as given.
        text: String,
    },
    /// The tunables break a constraint of the kernel.
    #[error("kernel `{kernel}` with {assignment}: constraint `{expr}` does not hold ({why})")]
    Constraint {
        /// The kernel.
        kernel: String,
        /// The tunables as they were set.
        assignment: String,
        /// The constraint.
        expr: String,
        /// Why the kernel needs it.
        why: String,
    },
    /// No values of the tunables keep the kernel's constraints.
    #[error(
        "kernel `{kernel}`: no tunable values satisfy its constraints for {problem}; the last to fail was `{expr}` ({why})"
    )]
    NoAssignment {
        /// The kernel.
        kernel: String,
        /// The problem.
        problem: String,
        /// A constraint that failed.
        expr: String,
        /// Why the kernel needs it.
        why: String,
    },
    /// The kernel does not support the problem.
    #[error("{problem} is not supported by {refusal}")]
    Unsupported {
        /// The problem.
        problem: String,
        /// The kernel and why it does not.
        refusal: Refusal,
    },
    /// No kernel supports the problem.
    #[error("no kernel supports {problem} on {arch}; the closest is {closest}")]
    NoKernel {
        /// The problem.
        problem: String,
        /// The architecture.
        arch: crate::Arch,
        /// The kernel that comes closest and why it does not.
        closest: Refusal,
    },
    /// There are no kernels at all.
    #[error("the registry has no kernels; add a folder with `--kernel-path`")]
    Empty,
    /// A launch size computed from the manifest cannot be launched.
    #[error("kernel `{kernel}`: `{key}` = {value} for {problem}; it must be between {min} and {max}")]
    LaunchSize {
        /// The kernel.
        kernel: String,
        /// Which size.
        key: String,
        /// The problem.
        problem: String,
        /// The computed value.
        value: i64,
        /// The least that can be launched.
        min: i64,
        /// The most that can be launched.
        max: i64,
    },
    /// A core problem cannot be described to kernels.
    #[error("{field} = {value} is out of range for a kernel (at most {max})")]
    ProblemRange {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The largest value kernels take.
        max: u64,
    },
}
