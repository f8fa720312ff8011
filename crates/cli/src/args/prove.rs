//! Flags of the commands that say whether a kernel is right.

use std::path::PathBuf;

use clap::Args;
use evosdpa_core::{DType, Shape};
use evosdpa_kernels::Arch;
use evosdpa_lab::{device::DeviceId, gate::sanitizer::Tool};
use evosdpa_oracle::{
    Control,
    inputs::{Family, LengthFamily},
};

use super::{
    Common, CudaKernels,
    value::{FailOn, Place, compared_with, fail_on, positive_seconds, tunable},
};

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa check
  evosdpa check --quick --dtype bf16 --kernels cpu_flash
  evosdpa check --shapes b1h4/2s33/65d40:causal-br --seeds 3
  evosdpa check --shapes b4h4/2s300d64:causal-br:varlen --lengths 300,3x1-40
  evosdpa check --shapes small:causal --families normal,large-logits --seeds 1 --runs 100
  evosdpa check --device cuda --kernels sdpa_fp8_stage_c --all-variants")]
pub(crate) struct Check {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Check these shapes with every input family, instead of the whole suite
    #[arg(long, value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Input families for the shapes, separated by commas, such as normal,large-logits [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAMES", requires = "shapes")]
    pub(crate) families: Vec<Family>,
    /// How long sequences are, where lengths are data, as `bench --lengths` has them [default: drawn, other ones for each input
    /// family and seed]
    #[arg(long, value_name = "LENGTHS", requires = "shapes")]
    pub(crate) lengths: Vec<LengthFamily>,
    /// Kernels, separated by commas [default: all of the device]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// Element types, separated by commas: f32, f16, bf16, u8, e4m3, i8 [default: those that each kernel takes]
    #[arg(long, value_delimiter = ',')]
    pub(crate) dtype: Vec<DType>,
    /// Seeds of the acceptance set
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000), allow_negative_numbers = true)]
    pub(crate) seeds: u64,
    /// Runs of each case, whose outputs must be the same bits
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    pub(crate) runs: u32,
    /// Leave out the long acceptance shapes, and use one seed
    #[arg(long, conflicts_with_all = ["shapes", "seeds"])]
    pub(crate) quick: bool,
    /// Check every variant of each kernel, up to this many, on a few cases made for that
    #[arg(long, value_name = "MOST", num_args = 0..=1, default_missing_value = "4096")]
    pub(crate) all_variants: Option<usize>,
    /// Run each case once and judge nothing: for tools that watch the program, such as a profiler
    #[arg(long, requires = "shapes")]
    pub(crate) once: bool,
    /// Seconds one launch on a GPU may take before the kernel counts as hung [default: 20]
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) time_limit: Option<f64>,
    /// Compilations at once, each in a process of its own [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), allow_negative_numbers = true)]
    pub(crate) workers: Option<u32>,
    /// Let known-bad kernels be chosen too: `sanitize --mutants` does
    #[arg(long, hide = true)]
    pub(crate) mutants: bool,
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
    #[command(flatten)]
    pub(crate) cuda: CudaKernels,
    /// Architectures, separated by commas: sm_80, sm_86, sm_89, sm_90a [default: those of each kernel's manifest]
    #[arg(long, value_delimiter = ',', value_name = "ARCHS")]
    pub(crate) arch: Vec<Arch>,
    /// The problem to build for [default: mission, or the nearest that a kernel supports]
    #[arg(long, value_name = "SHAPE")]
    pub(crate) problem: Option<Shape>,
    /// Input types, separated by commas: f16, bf16, f32, u8, e4m3 [default: those of each kernel's manifest]
    #[arg(long, value_delimiter = ',', value_name = "TYPES")]
    pub(crate) dtype: Vec<DType>,
    /// Set a tunable; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = tunable)]
    pub(crate) set: Vec<(String, i64)>,
    /// Build every combination of tunables that keeps the constraints
    #[arg(long)]
    pub(crate) all_variants: bool,
    /// With --all-variants: build at most this many of each kernel, architecture and type
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub(crate) max_variants: u32,
    /// Where to look up the driver's numbers too: auto (a GPU if there is one), none, cuda or cuda:N (build for it alone), or
    /// sim (build for the simulator, and see that it understands every instruction)
    #[arg(long, default_value = "auto", value_name = "DEVICE", value_parser = compared_with)]
    pub(crate) device: Place,
    /// Compilations at once, each in a process of its own
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), allow_negative_numbers = true)]
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
  evosdpa sanitize --kernels sdpa_v2b --shapes b1h4/2s33/65d64:causal --tools racecheck,synccheck
  evosdpa sanitize --device sim
  evosdpa sanitize --device sim --all-variants --kernels sdpa_v2c
  evosdpa sanitize --device sim --mutation-score
  evosdpa sanitize --mutants --device sim")]
pub(crate) struct Sanitize {
    #[command(flatten)]
    pub(crate) cuda: CudaKernels,
    /// Shapes, separated by commas [default: small, ragged, and the one length that some kernels are made for]
    #[arg(long, value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Input types, separated by commas [default: the first of each kernel's manifest; with --all-variants, all of it]
    #[arg(long, value_delimiter = ',', value_name = "TYPES")]
    pub(crate) dtype: Vec<DType>,
    /// Tools of compute-sanitizer, separated by commas
    #[arg(long, default_value = "memcheck,racecheck,initcheck,synccheck", value_delimiter = ',')]
    pub(crate) tools: Vec<Tool>,
    /// On the simulator: run every variant of each kernel under every schedule; of more than MOST variants, a choice in
    /// which every two settings meet
    #[arg(long, value_name = "MOST", num_args = 0..=1, default_missing_value = "1024", conflicts_with_all = ["tools", "sanitizer", "mutants", "mutation_score"])]
    pub(crate) all_variants: Option<usize>,
    /// On the simulator: delete each barrier, wait, fence and warp synchronisation of the kernels in turn, and say which
    /// deletions are noticed and why the others are redundant
    #[arg(long, conflicts_with_all = ["shapes", "dtype", "tools", "sanitizer", "mutants"])]
    pub(crate) mutation_score: bool,
    /// Try the gates on the known-bad kernels instead, each with its mistake and with the mistake repaired
    #[arg(long, conflicts_with_all = ["kernels", "kernel_path", "shapes", "dtype"])]
    pub(crate) mutants: bool,
    /// Runs at once
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), allow_negative_numbers = true)]
    pub(crate) workers: u32,
    /// On the simulator: from which severity on a finding fails: info, warning, error, or never
    #[arg(long, default_value = "warning", value_name = "SEVERITY", value_parser = fail_on)]
    pub(crate) fail_on: FailOn,
    /// On the simulator: a file of findings that are known and accepted, lines of KIND WHERE such as `race my_sdpa.cu:12`
    #[arg(long, value_name = "FILE")]
    pub(crate) suppressions: Option<PathBuf>,
    /// Where kernels run: cuda or cuda:N under compute-sanitizer, or sim under ptxsan [default: cuda; sim with --all-variants
    /// and --mutation-score, which nothing else can do]
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceId>,
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
