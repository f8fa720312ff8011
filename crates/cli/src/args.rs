//! What can be typed. What it means is decided by each command.

mod choose;
mod llm;
mod measure;
#[cfg(test)]
mod pages;
mod prove;
mod value;

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

pub(crate) use choose::{Apply, Export, Import, Kernels, Plan, Precompile, Tune};
pub(crate) use measure::{Bench, Compare, Profile, Report, Runs};
pub(crate) use prove::{Build, Check, Sanitize};
pub(crate) use value::Place;

/// A laboratory for fused attention kernels: check them, time them, compare them.
#[derive(Parser)]
#[command(name = "evosdpa", version, max_term_width = 100, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "Exit status: 0 every gate that ran passed, 1 a gate failed, 2 wrong use or environment or nothing to run, \
                          130 stopped by Ctrl-C.";

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Check kernels, then time them side by side with PyTorch
    Bench(Bench),
    /// Put kernels through the acceptance set and the adversarial inputs
    Check(Check),
    /// Compile CUDA kernels and hold them against the resource limits of their manifests
    Build(Build),
    /// Run CUDA kernels under compute-sanitizer, or under ptxsan on this machine's processor
    Sanitize(Sanitize),
    /// Say what holds a kernel back, from Nsight Compute's counters or the simulator's
    Profile(Profile),
    /// Make a page, or another tool's file, of recorded runs
    Report(Report),
    /// Search a kernel's tunables for the fastest variant that passes every gate
    Tune(Box<Tune>),
    /// Measure for a tune, which speaks over standard input and output
    #[command(hide = true)]
    Evaluator(Box<Tune>),
    /// List kernels with their lineage
    Kernels(Kernels),
    /// Say which kernel the library takes for a problem, and why
    Plan(Plan),
    /// Compile what the library would run into a folder, for machines without a CUDA compiler
    Precompile(Precompile),
    /// Put the winners of a tune into your tuned table, which the library plans with
    Apply(Apply),
    /// Write a problem as files that another tool takes: KernelBench, GPU MODE or OpenEvolve
    Export(Export),
    /// Evaluate an answer to an exported task by the same gates, or make a kernel of it
    Import(Import),
    /// List recorded runs
    Runs(Runs),
    /// Say row by row whether the runs of B are faster or slower than those of A
    Compare(Compare),
    /// Evaluate kernels for agents, over HTTP (needs evosdpa-agent; docs/agents.md)
    #[command(disable_help_flag = true)]
    Serve(PassedOn),
    /// Evaluate kernels for agents, as tools of the Model Context Protocol (needs evosdpa-agent; docs/agents.md)
    #[command(disable_help_flag = true)]
    Mcp(PassedOn),
    /// List or clear the cache of compiled CUDA kernels
    Cache(Cache),
    /// Show what this machine can do, and how to fix what it cannot
    Doctor(Doctor),
    /// Print a completion script for a shell
    Completions(Completions),
}

/// What nearly every command takes.
#[derive(Args)]
pub(crate) struct Common {
    /// Where kernels run: auto (a GPU if there is one), cpu, cuda, cuda:N, or sim (CUDA kernels on the CPU)
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: Place,
    /// Threads to use on the CPU [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096), allow_negative_numbers = true)]
    pub(crate) threads: Option<u32>,
    /// Instruction set to use on the CPU: portable, neon, neonbf16, neonmmla, avx2, avx512, avx512bf16 or amx [default: the best there is]
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<String>,
    /// A folder with CUDA kernels of your own, each a .cu and a .toml; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which CUDA kernels.
#[derive(Args)]
pub(crate) struct CudaKernels {
    /// Kernels, separated by commas [default: those of --kernel-path, else all CUDA kernels]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// A folder with kernels of your own, each a .cu and a .toml; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
}

/// What another program reads.
#[derive(Args)]
pub(crate) struct PassedOn {
    /// Options; --help lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<OsString>,
}

#[derive(Args)]
pub(crate) struct Cache {
    /// Remove every entry
    #[arg(long)]
    pub(crate) clear: bool,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct Doctor {
    /// Python to look for PyTorch in
    #[arg(long, default_value = "python3", value_name = "PATH")]
    pub(crate) python: String,
    /// Install what is missing and can be installed: the CUDA compiler, into a folder of its own
    #[arg(long)]
    pub(crate) fix: bool,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: Shell,
}
