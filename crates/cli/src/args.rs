//! What can be typed. What it means is decided by each command.

mod llm;

use std::{fmt, path::PathBuf, str::FromStr};

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use evosdpa_core::{DType, Shape};
use evosdpa_kernels::{Arch, InputType};
use evosdpa_lab::{
    device::{self, DeviceId, Timing},
    gate::{hazards::Severity, sanitizer::Tool},
    report::Format,
};
use evosdpa_oracle::Control;
use llm::Llm;

/// A laboratory for fused attention kernels: check them, time them, compare them.
#[derive(Parser)]
#[command(name = "evosdpa", version, max_term_width = 100, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "Exit status: 0 every gate that ran passed, 1 a gate failed, 2 wrong use or environment or nothing to run, 130 stopped by\nCtrl-C.";

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
    /// List kernels with their lineage
    Kernels(Kernels),
    /// Say which kernel the library takes for a problem, and why
    Plan(Plan),
    /// Put the winners of a tune into your tuned table, which the library plans with
    Apply(Apply),
    /// List recorded runs
    Runs(Runs),
    /// Say row by row whether the runs of B are faster or slower than those of A
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
    pub(crate) device: Place,
    /// Threads to use on the CPU [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) threads: Option<u32>,
    /// Instruction set to use on the CPU: portable, neon, avx2, avx512 or avx512bf16 [default: the best there is]
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

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa bench
  evosdpa bench --shapes mission,long:causal --dtype bf16 --iters 50
  evosdpa bench --shapes b1h32/8s1/8192d128 --json > decode.json
  evosdpa bench --shapes mission --timing cold --no-baselines
  evosdpa bench --shapes tiny --baselines torch
  evosdpa bench --shapes mission --repeat 5
  evosdpa bench --shapes tiny --kernels cpu_flash --self-test 200")]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Shapes, separated by commas: names (tiny, mission, small, long, long128) or sizes such as
    /// b2h32/8s1/8192d128, with suffixes :causal, :causal-br, :window=255/0
    #[arg(long, default_value = "mission,small,long", value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Kernels to time beside `auto`, which is what the library would run; separated by commas, or `all` [default: those
    /// of --kernel-path]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// Element types, separated by commas: f32, f16, bf16 [default: f32 on a CPU, bf16 on a GPU]
    #[arg(long, value_delimiter = ',')]
    pub(crate) dtype: Vec<DType>,
    /// Timed calls of each kernel and baseline [default: 100, or as many as 4 seconds a problem allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iters: Option<u32>,
    /// Untimed calls before
    #[arg(long, default_value_t = 20, value_name = "N")]
    pub(crate) warmup: u32,
    /// Seconds a problem may take; its rows then have fewer samples than asked for
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) budget: Option<f64>,
    /// How calls are timed: graph (replay over rotated inputs), warm (one set of inputs), single (launch by launch), cold
    /// (launch by launch, inputs driven out of the caches) or between (replay with a foreign kernel before every launch, its
    /// own time subtracted; GPU only)
    #[arg(long, default_value = "graph", value_name = "WAY")]
    pub(crate) timing: Timing,
    /// Differences below this share do not matter: FAST and SLOW are shown to be beyond it
    #[arg(long, default_value_t = evosdpa_lab::measure::duel::MARGIN, value_name = "SHARE", value_parser = margin)]
    pub(crate) margin: f64,
    /// Instead of comparing: let each kernel run against itself this many times, and count how often the rule sees a
    /// difference that is not there
    #[arg(long, value_name = "DUELS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) self_test: Option<u32>,
    /// Make a set of this many runs, one after the other and each in a process of its own, for `evosdpa compare`
    #[arg(long, value_name = "RUNS", value_parser = clap::value_parser!(u32).range(1..=10_000), conflicts_with = "self_test")]
    pub(crate) repeat: Option<u32>,
    /// Make the run, or those of --repeat, part of this set: so two programs can be measured in turns
    #[arg(long, value_name = "NAME", conflicts_with = "self_test")]
    pub(crate) set: Option<String>,
    /// Seed of the inputs
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub(crate) seed: u64,
    /// Python with PyTorch, to compare with
    #[arg(long, default_value = "python3", value_name = "PATH")]
    pub(crate) python: String,
    /// Seconds PyTorch may take to start, and to answer, before the run goes on without it
    #[arg(long, alias = "peer-timeout", default_value_t = 60.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) baseline_timeout: f64,
    /// What to compare with, by name: PyTorch's backends flash, cudnn, efficient, math, eager, and flash-attn-3,
    /// flash-attn-2, flashinfer, xformers where installed, on a GPU; torch on a CPU [default: all]
    #[arg(
        long,
        alias = "peers",
        value_name = "NAMES",
        value_delimiter = ',',
        conflicts_with = "no_baselines"
    )]
    pub(crate) baselines: Vec<String>,
    /// Do not look for PyTorch
    #[arg(long, alias = "no-peers")]
    pub(crate) no_baselines: bool,
    /// Folder for records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa check
  evosdpa check --quick --dtype bf16 --kernels cpu_flash
  evosdpa check --shapes b1h4/2s33/65d40:causal-br --seeds 3
  evosdpa check --device cuda --kernels sdpa_fp8_stage_c --all-variants")]
pub(crate) struct Check {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Check these shapes with every input family, instead of the whole suite
    #[arg(long, value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Kernels, separated by commas [default: all of the device]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// Element types, separated by commas: f32, f16, bf16, and u8, e4m3 for CUDA kernels [default: those that each
    /// kernel takes]
    #[arg(long, value_delimiter = ',')]
    pub(crate) dtype: Vec<DType>,
    /// Seeds of the acceptance set
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) seeds: u64,
    /// Runs of each case, whose outputs must be the same bits
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) runs: u32,
    /// Leave out the long acceptance shapes, and use one seed
    #[arg(long, conflicts_with_all = ["shapes", "seeds"])]
    pub(crate) quick: bool,
    /// Check every variant of each kernel, up to this many, on a few cases made for that
    #[arg(long, value_name = "MOST", num_args = 0..=1, default_missing_value = "4096")]
    pub(crate) all_variants: Option<usize>,
    /// Only run each case once and look at nothing: for tools that watch the program run
    #[arg(long, requires = "shapes")]
    pub(crate) once: bool,
    /// Seconds one launch on a GPU may take before the kernel counts as hung [default: 20]
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) time_limit: Option<f64>,
    /// Compilations at once, each in a process of its own [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
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
    /// A GPU to compare with the driver's numbers: auto (if there is one), none, cuda or cuda:N (build for it alone), or
    /// sim (build for the simulator, and see that it understands every instruction)
    #[arg(long, default_value = "auto", value_name = "DEVICE", value_parser = compared_with)]
    pub(crate) device: Place,
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

/// The mildest severity that fails; none: nothing does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailOn(pub(crate) Option<Severity>);

fn fail_on(text: &str) -> Result<FailOn, String> {
    match text {
        "never" => Ok(FailOn(None)),
        _ => {
            text.parse().map(|severity| FailOn(Some(severity))).map_err(|error| format!("{error}, and never"))
        }
    }
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
    pub(crate) dtype: Vec<InputType>,
    /// Tools of compute-sanitizer, separated by commas
    #[arg(long, default_value = "memcheck,racecheck,initcheck,synccheck", value_delimiter = ',')]
    pub(crate) tools: Vec<Tool>,
    /// On the simulator: every variant of each kernel, or of more than MOST a choice that shows every pair of settings,
    /// right and without findings under every schedule
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
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
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

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa profile --shape mission --kernels sdpa_v2c
  evosdpa profile --shape long --kernels sdpa_fp8_stage_c --variant 'STAGES=3 USE_KV_LUT=1'
  evosdpa profile --shape tiny --kernels sdpa_v2b --device sim
  evosdpa profile --import launch.csv --shape mission")]
pub(crate) struct Profile {
    /// Shapes, separated by commas [default: mission]; with --import, the problem of the capture
    #[arg(long, alias = "shapes", value_delimiter = ',', value_name = "SHAPE")]
    pub(crate) shape: Vec<Shape>,
    /// Kernels, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// Tunables of the kernel, such as 'STAGES=3 BLOCK_N=64'
    #[arg(long, value_name = "TUNABLES")]
    pub(crate) variant: Option<String>,
    /// Input type [default: bf16, or the first the kernel reads]
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<InputType>,
    /// Where it runs: cuda or cuda:N, or sim to count without a GPU
    #[arg(long, default_value = "cuda", value_name = "DEVICE")]
    pub(crate) device: DeviceId,
    /// Read a saved CSV of ncu, or its .ncu-rep, instead of profiling
    #[arg(long, value_name = "FILE")]
    pub(crate) import: Option<PathBuf>,
    /// The architecture of an imported capture that does not say [default: what the capture says]
    #[arg(long, value_name = "ARCH")]
    pub(crate) arch: Option<Arch>,
    /// A folder with CUDA kernels of your own, each a .cu and a .toml; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Nsight Compute [default: the one on PATH or in a CUDA toolkit]
    #[arg(long, value_name = "PATH")]
    pub(crate) ncu: Option<PathBuf>,
    /// Seconds one kernel on one shape may take under the profiler
    #[arg(long, default_value_t = 120.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) timeout: f64,
    /// Folder for records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// Only launch each kernel once: what the profiler runs
    #[arg(long, hide = true)]
    pub(crate) launch: bool,
    /// Print one JSON document instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa report latest
  evosdpa report 3f9a1c results/h200/bench-named-shapes.json --out report.html
  evosdpa report latest --format md")]
pub(crate) struct Report {
    /// Runs: a folder, a name or the end of one, latest, a --json document, or a tune's folder
    #[arg(required = true, value_name = "RUN")]
    pub(crate) inputs: Vec<String>,
    /// Where to write , or - for standard output [default: report.html, report.md, report.csv, t4.json or trace.json in the first run's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// html, md, csv, t4 (Kernel Tuner's results) or perfetto (a timeline for ui.perfetto.dev)
    #[arg(long, default_value = "html", value_name = "FORMAT")]
    pub(crate) format: Format,
    /// Folder of the records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) runs: PathBuf,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa tune --device cpu --shapes tiny,b1h2s64d64 --evaluations 20 --out tunes/small
  evosdpa tune --device cpu --shapes tiny,b1h2s64d64 --evaluations 40 --out tunes/small --resume
  evosdpa tune --kernel sdpa_fp8_stage_c --dtype u8 --shapes mission,mission:causal --minutes 10
  evosdpa tune --simulate tunes/small/log.jsonl --evaluations 15")]
pub(crate) struct Tune {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The kernel [default: cpu_flash on a CPU]
    #[arg(long, value_name = "NAME")]
    pub(crate) kernel: Option<String>,
    /// Shapes to be fast at, separated by commas; the first decides early who is hopeless
    #[arg(long, default_value = "mission,small", value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Element type [default: f32 on a CPU, the first of the kernel's manifest on a GPU]
    #[arg(long)]
    pub(crate) dtype: Option<DType>,
    /// Evaluations at most, those before a --resume included
    #[arg(long, default_value_t = 45, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) evaluations: u32,
    /// Minutes at most, counted from now
    #[arg(long, value_name = "MINUTES", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) minutes: Option<f64>,
    /// How to search: evo, random, grid or hill-climb [default: evo; with --simulate, all of them]
    #[arg(long, value_name = "NAME")]
    pub(crate) strategy: Option<String>,
    /// Elites to keep
    #[arg(long, default_value_t = 3, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) top: u32,
    /// Seed of what chance decides
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub(crate) seed: u64,
    /// The tune's folder [default: tunes/KERNEL]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: Option<PathBuf>,
    /// Go on with the tune in the folder
    #[arg(long)]
    pub(crate) resume: bool,
    /// A program that proposes candidates: reads and writes lines of JSON (see docs/tuning.md)
    #[arg(long, value_name = "COMMAND")]
    pub(crate) proposer: Option<String>,
    /// Seconds the proposer may take for an answer [default: 60, with --llm 600]
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) proposer_timeout: Option<f64>,
    /// The insights.json of an earlier tune: what has helped before is tried more often
    #[arg(long, value_name = "FILE")]
    pub(crate) prior: Option<PathBuf>,
    /// Blocks of four readings at most, for one candidate on one shape
    #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) blocks: u32,
    /// Sets of inputs to rotate through [default: as many as the device needs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) sets: Option<u32>,
    /// Compilations at once, each in a process of its own [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) workers: Option<u32>,
    /// Leave out the simulator's look at each CUDA candidate
    #[arg(long)]
    pub(crate) no_sim: bool,
    /// Do not profile CUDA candidates: neither for insights on a new best nor as the last gate of one to be
    #[arg(long)]
    pub(crate) no_profile: bool,
    /// Nsight Compute [default: the one on PATH or in a CUDA toolkit]
    #[arg(long, value_name = "PATH")]
    pub(crate) ncu: Option<PathBuf>,
    /// Seconds one profile may take
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) profile_timeout: f64,
    /// Replay the log of a finished tune to compare strategies; needs no device
    #[arg(long, value_name = "LOG", conflicts_with_all = ["kernel", "shapes", "dtype", "minutes", "out", "resume", "proposer", "prior"])]
    pub(crate) simulate: Option<PathBuf>,
    /// With --simulate: replays of each strategy
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) replays: u32,
    #[command(flatten)]
    pub(crate) llm: Llm,
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
    pub(crate) device: Place,
    /// A folder with kernels of your own, each a .cu and a .toml; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa plan mission,long:causal
  evosdpa plan --explain b2h32/8s4096d128:causal --arch sm_90a")]
pub(crate) struct Plan {
    /// Shapes, separated by commas
    #[arg(required = true, value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Show the evidence, the launch, and every other candidate with why it was not taken
    #[arg(long)]
    pub(crate) explain: bool,
    /// Where it is to run: auto (a GPU if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: Place,
    /// Plan for an architecture instead, GPU or not: sm_80, sm_86, sm_89, sm_90a
    #[arg(long, value_name = "ARCH", conflicts_with = "device")]
    pub(crate) arch: Option<Arch>,
    /// The element type: f32, f16, bf16, u8, e4m3 [default: f32 on a CPU, bf16 on a GPU]
    #[arg(long)]
    pub(crate) dtype: Option<DType>,
    /// The log-sum-exp is wanted too
    #[arg(long)]
    pub(crate) lse: bool,
    /// A folder with CUDA kernels of your own; a row of your table may name them
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Print one JSON document instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa apply runs/tune-20261115/elite.json
  evosdpa apply elite.json --dry-run")]
pub(crate) struct Apply {
    /// The winners: elite.json of a tune
    pub(crate) elite: PathBuf,
    /// The table to change [default: $EVOSDPA_TUNED, else evosdpa/tuned.toml in the config folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) table: Option<PathBuf>,
    /// Say what would change, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Take winners, too, that a second measurement did not confirm
    #[arg(long)]
    pub(crate) force: bool,
    /// A folder with CUDA kernels of your own, if a winner is one
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Print one JSON document instead of text
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
  evosdpa compare set-3f9a1c latest
  evosdpa compare set-3f9a1c set-07d2e4 --fail-on-regression
  evosdpa compare set-3f9a1c --self-test")]
pub(crate) struct Compare {
    /// The runs to compare with: a set that `bench --repeat` made, by its name or that of one of its runs; a folder; a name
    /// or the end of one; latest; or several separated by commas
    pub(crate) a: String,
    /// The runs in question
    #[arg(required_unless_present = "self_test")]
    pub(crate) b: Option<String>,
    /// Instead of comparing: cut the runs of A, which must all be of one program, into sets of this many neighbours, compare
    /// them with each other, and count how often a difference is seen that is not there
    #[arg(long, value_name = "RUNS", num_args = 0..=1, default_missing_value = "5", conflicts_with = "b", value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub(crate) self_test: Option<u32>,
    /// Folder of the records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// A difference below this share does not matter
    #[arg(long, default_value_t = evosdpa_lab::measure::compare::MARGIN, value_name = "SHARE", value_parser = margin)]
    pub(crate) margin: f64,
    /// Exit with status 1 if a row is SLOW, and with 2 if there are too few runs to know
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

/// Where to run, as far as that was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A GPU if there is one, else the CPU.
    Auto,
    /// No GPU, where one would only be compared with.
    None,
    /// Here.
    On(DeviceId),
}

impl FromStr for Place {
    type Err = evosdpa_lab::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            other => other.parse().map(Self::On).map_err(|_| {
                let allowed: Vec<&str> = ["auto"].into_iter().chain(DeviceId::ALLOWED).collect();
                device::id::unknown(other, &allowed)
            }),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::On(device) => device.fmt(f),
        }
    }
}

/// What a build can be for, or compared with: no CPU, which is not compiled for.
fn compared_with(text: &str) -> Result<Place, evosdpa_lab::Error> {
    match text.parse() {
        Err(_) | Ok(Place::On(DeviceId::Cpu)) => {
            Err(device::id::unknown(text, &["auto", "none", "cuda", "cuda:N", "sim"]))
        }
        Ok(place) => Ok(place),
    }
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
