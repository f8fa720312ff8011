//! What can be typed. What it means is decided by each command.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use evosdpa_core::{Control, DType, Shape};
use evosdpa_kernels::{Arch, InputType};
use evosdpa_lab::gate::sanitizer::Tool;

/// A laboratory for fused attention kernels: check them, time them, compare them.
#[derive(Parser)]
#[command(name = "evosdpa", version, max_term_width = 100, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str =
    "Exit status: 0 every gate passed, 1 a gate failed, 2 wrong use or environment, 130 stopped by Ctrl-C.";

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Check kernels, then time them side by side with PyTorch
    Bench(Bench),
    /// Put kernels through the acceptance set and the adversarial inputs
    Check(Check),
    /// Compile CUDA kernels and hold them against the resource limits of their manifests
    Build(Build),
    /// Run CUDA kernels under compute-sanitizer
    Sanitize(Sanitize),
    /// List kernels with their lineage
    Kernels(Kernels),
    /// List recorded runs
    Runs(Runs),
    /// Say row by row whether run B is faster or slower than run A
    Compare(Compare),
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
    pub(crate) device: String,
    /// Threads to use on the CPU [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) threads: Option<u32>,
    /// Instruction set to use on the CPU: portable, avx2 or avx512 [default: the best there is]
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<String>,
    /// A folder with CUDA kernels of your own, each a .cu and a .toml; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa bench
  evosdpa bench --shapes mission,long:causal --dtype bf16 --iters 50
  evosdpa bench --shapes b1h32/8s1/8192d128 --json > decode.json")]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Shapes, separated by commas: names (tiny, mission, small, long, long128) or sizes such as
    /// b2h32/8s1/8192d128, with suffixes :causal, :causal-br, :window=255/0
    #[arg(long, default_value = "mission,small,long", value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Kernels, separated by commas [default: all of the device]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// Element types, separated by commas: f32, f16, bf16 [default: f32 on a CPU, bf16 on a GPU]
    #[arg(long, value_delimiter = ',')]
    pub(crate) dtype: Vec<DType>,
    /// Timed calls of each kernel and peer [default: 100, or as many as 6 seconds a problem allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iters: Option<u32>,
    /// Untimed calls before
    #[arg(long, default_value_t = 20, value_name = "N")]
    pub(crate) warmup: u32,
    /// Seconds a problem may take; its rows then have fewer samples than asked for
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) budget: Option<f64>,
    /// Seed of the inputs
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub(crate) seed: u64,
    /// Python with PyTorch, to compare with
    #[arg(long, default_value = "python3", value_name = "PATH")]
    pub(crate) python: String,
    /// Seconds PyTorch may take to start, and to answer, before the run goes on without it
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) peer_timeout: f64,
    /// Do not look for PyTorch
    #[arg(long)]
    pub(crate) no_peers: bool,
    /// Folder for records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa check
  evosdpa check --quick --dtype bf16 --kernels cpu_flash
  evosdpa check --shapes b1h4/2s33/65d40:causal-br --seeds 3")]
pub(crate) struct Check {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Check these shapes with every input family, instead of the whole suite
    #[arg(long, value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Kernels, separated by commas [default: all of the device]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// Element types, separated by commas: f32, f16, bf16, and u8, e4m3 for CUDA kernels [default: f32,f16,bf16 on a CPU, f16,bf16 for CUDA kernels]
    #[arg(long, value_delimiter = ',')]
    pub(crate) dtype: Vec<DType>,
    /// Seeds of the acceptance set
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) seeds: u64,
    /// Leave out the long acceptance shapes, and use one seed
    #[arg(long, conflicts_with_all = ["shapes", "seeds"])]
    pub(crate) quick: bool,
    /// Check every variant of each kernel, up to this many
    #[arg(long, value_name = "MOST", num_args = 0..=1, default_missing_value = "4096")]
    pub(crate) all_variants: Option<usize>,
    /// Only run each case once and look at nothing: for tools that watch the program run
    #[arg(long, requires = "shapes")]
    pub(crate) once: bool,
    /// Put a wrong answer in place of every kernel's output, to see the gate fail: zeros, copy-of-v, mean-of-v,
    /// previous-output or another-mask
    #[arg(long, value_name = "CONTROL")]
    pub(crate) force: Option<Control>,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa build
  evosdpa build --kernels sdpa_v2b --arch sm_89 --all-variants
  evosdpa build --kernel-path my-kernels --set BLOCK_M=64
  evosdpa build --parse nvcc.log")]
pub(crate) struct Build {
    /// Kernels, separated by commas [default: those of --kernel-path, else all]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// A folder with kernels of your own, each a .cu and a .toml; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Architectures, separated by commas: sm_80, sm_86, sm_89, sm_90a [default: those of each kernel's manifest]
    #[arg(long, value_delimiter = ',', value_name = "ARCHS")]
    pub(crate) arch: Vec<Arch>,
    /// The problem to build for [default: mission, or the nearest that a kernel supports]
    #[arg(long, value_name = "SHAPE")]
    pub(crate) problem: Option<Shape>,
    /// Input types, separated by commas: f16, bf16, f32, u8, e4m3 [default: those of each kernel's manifest]
    #[arg(long, value_delimiter = ',', value_name = "TYPES")]
    pub(crate) dtype: Vec<InputType>,
    /// Set a tunable; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = tunable)]
    pub(crate) set: Vec<(String, i64)>,
    /// Build every combination of tunables that keeps the constraints
    #[arg(long)]
    pub(crate) all_variants: bool,
    /// With --all-variants: build at most this many of each kernel, architecture and type
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_variants: u32,
    /// A GPU to compare with the driver's numbers: auto (if there is one), none, cuda or cuda:N (build for it alone)
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: String,
    /// Compilations at once, each in a process of its own
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) workers: u32,
    /// Seconds one compilation may take
    #[arg(long, default_value_t = 120.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) compile_timeout: f64,
    /// Read what `ptxas -v` of CUDA 11, 12 or 13 has printed, instead of compiling
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kernels", "arch", "problem", "dtype", "set", "all_variants"])]
    pub(crate) parse: Option<PathBuf>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa sanitize
  evosdpa sanitize --kernels sdpa_v2b --shapes b1h4/2s33/65d64:causal --tools racecheck,synccheck")]
pub(crate) struct Sanitize {
    /// Kernels, separated by commas [default: those of --kernel-path, else all CUDA kernels]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// A folder with kernels of your own, each a .cu and a .toml; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Shapes, separated by commas
    #[arg(long, default_value = "tiny,b1h4s77d64:causal", value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Input types, separated by commas [default: the first of each kernel's manifest]
    #[arg(long, value_delimiter = ',', value_name = "TYPES")]
    pub(crate) dtype: Vec<InputType>,
    /// Tools, separated by commas
    #[arg(long, default_value = "memcheck,racecheck,initcheck,synccheck", value_delimiter = ',')]
    pub(crate) tools: Vec<Tool>,
    /// On the simulator: delete each barrier, wait, fence and warp synchronisation of the kernels in turn, and say which
    /// deletions are noticed and why the others are redundant
    #[arg(long, conflicts_with_all = ["shapes", "dtype", "tools", "sanitizer"])]
    pub(crate) mutation_score: bool,
    /// The GPU to run on: cuda or cuda:N
    #[arg(long, default_value = "cuda", value_name = "DEVICE")]
    pub(crate) device: String,
    /// compute-sanitizer [default: the one on PATH or in a CUDA toolkit]
    #[arg(long, value_name = "PATH")]
    pub(crate) sanitizer: Option<PathBuf>,
    /// Seconds one kernel on one shape may take under one tool
    #[arg(long, default_value_t = 300.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) timeout: f64,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub(crate) json: bool,
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
pub(crate) struct Kernels {
    /// Whose kernels: auto (all), cpu or cuda
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: String,
    /// A folder with kernels of your own, each a .cu and a .toml; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct Runs {
    /// Folder of the records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa compare 3f9a1c latest
  evosdpa compare runs/20261115T101500Z-3f9a1c latest --fail-on-regression")]
pub(crate) struct Compare {
    /// The run to compare with: a folder, a name or the end of one, or latest
    pub(crate) a: String,
    /// The run in question
    pub(crate) b: String,
    /// Folder of the records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// A difference below this share does not matter
    #[arg(long, default_value_t = evosdpa_lab::measure::compare::MARGIN, value_name = "SHARE", value_parser = margin)]
    pub(crate) margin: f64,
    /// Exit with status 1 if a row is SLOW
    #[arg(long)]
    pub(crate) fail_on_regression: bool,
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

fn positive_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if seconds > 0.0 && seconds <= 1e6 {
        Ok(seconds)
    } else {
        Err("must be above 0 and at most 1000000".into())
    }
}

fn margin(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("`{text}` is not a number"))?;
    if (0.0..1.0).contains(&share) {
        Ok(share)
    } else {
        Err("must be at least 0 and below 1, such as 0.02".into())
    }
}

fn tunable(text: &str) -> Result<(String, i64), String> {
    let refuse = || format!("`{text}` is not NAME=VALUE with a whole number, such as BLOCK_M=64");
    let (name, value) = text.split_once('=').ok_or_else(refuse)?;
    let value = value.trim().parse().map_err(|_| refuse())?;
    Ok((name.trim().to_owned(), value))
}
