//! Flags of the commands that measure, and that read what was measured.

use std::path::PathBuf;

use clap::Args;
use evosdpa_core::{DType, Shape};
use evosdpa_kernels::Arch;
use evosdpa_lab::{
    device::{DeviceId, Timing},
    report::Format,
};
use evosdpa_oracle::inputs::LengthFamily;

use super::{
    Common,
    value::{margin, positive_seconds},
};

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa bench
  evosdpa bench --shapes mission,long:causal --dtype bf16 --iters 50
  evosdpa bench --shapes b1h32/8s1/8192d128 --json > decode.json
  evosdpa bench --shapes mission --timing cold --no-baselines
  evosdpa bench --shapes tiny --baselines torch
  evosdpa bench --shapes b16h32/8s1024d128:causal-br:varlen --lengths skewed
  evosdpa bench --shapes b62h32/8s2048d128:causal-br:varlen --lengths 2x2048,60x1
  evosdpa bench --shapes mission --repeat 5
  evosdpa bench --shapes tiny --kernels cpu_flash --self-test 200")]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Shapes, separated by commas: names (tiny, mission, small, long, long128) or sizes such as
    /// b2h32/8s1/8192d128, with suffixes such as :causal, :causal-br, :window=255/0 (docs/problems.md has them all)
    #[arg(long, default_value = "mission,small,long", value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Kernels to time beside `auto`, which is what the library would run; separated by commas, or `all` [default: those
    /// of --kernel-path]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// Element types, separated by commas: f32, f16, bf16, u8, e4m3, i8 [default: f32 on a CPU, bf16 on a GPU]
    #[arg(long, value_delimiter = ',')]
    pub(crate) dtype: Vec<DType>,
    /// Timed calls of each kernel and baseline [default: 100, or as many as 4 seconds a problem allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    pub(crate) iters: Option<u32>,
    /// Untimed calls before
    #[arg(long, default_value_t = 20, value_name = "N", allow_negative_numbers = true)]
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
    #[arg(long, value_name = "DUELS", value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    pub(crate) self_test: Option<u32>,
    /// Make a set of this many runs, one after the other and each in a process of its own, for `evosdpa compare`
    #[arg(long, value_name = "RUNS", value_parser = clap::value_parser!(u32).range(1..=10_000), conflicts_with = "self_test", allow_negative_numbers = true)]
    pub(crate) repeat: Option<u32>,
    /// Make the run, or those of --repeat, part of this set: so two programs can be measured in turns
    #[arg(long, value_name = "NAME", conflicts_with = "self_test")]
    pub(crate) set: Option<String>,
    /// How long sequences are, where lengths are data (:varlen, :used, :used-q): equal (all the longest), skewed (each half as long
    /// as the one before it), zeros (some without keys or queries), one-token (all but the last), or a list, one for each sequence:
    /// 2x2048,60x1, or 16384,63x100-534 with 63 from 100 to 534. Once for all shapes, or as often as there are shapes
    #[arg(long, default_value = "equal", value_name = "LENGTHS", conflicts_with = "self_test")]
    pub(crate) lengths: Vec<LengthFamily>,
    /// Seed of the inputs
    #[arg(long, default_value_t = 0, value_name = "SEED", allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Python with PyTorch, to compare with
    #[arg(long, default_value = "python3", value_name = "PATH")]
    pub(crate) python: String,
    /// Seconds PyTorch may take to start, and to answer, before the run goes on without it
    #[arg(long, alias = "peer-timeout", default_value_t = 60.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) baseline_timeout: f64,
    /// What to compare with, by name: PyTorch's backends flash, cudnn, efficient, math, eager (packed and paged: looped, nested, flex), and flash-attn-3,
    /// flash-attn-2, flashinfer, xformers where installed, on a GPU; torch (looped) on a CPU [default: all]
    #[arg(
        long,
        alias = "peers",
        value_name = "NAMES",
        value_delimiter = ',',
        conflicts_with = "no_baselines"
    )]
    pub(crate) baselines: Vec<String>,
    /// Compare with nothing: neither PyTorch nor other baselines
    #[arg(long, alias = "no-peers")]
    pub(crate) no_baselines: bool,
    /// Folder for records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
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
    /// Kernels, separated by commas [default: those of --kernel-path]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) kernels: Vec<String>,
    /// Tunables of the kernel, such as 'STAGES=3 BLOCK_N=64'
    #[arg(long, value_name = "TUNABLES")]
    pub(crate) variant: Option<String>,
    /// Input type [default: bf16, or the first the kernel reads]
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<DType>,
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
  evosdpa report latest --format md
  evosdpa report tunes/llm tunes/other --format strategies --out -")]
pub(crate) struct Report {
    /// Runs: a folder, a name or the end of one, latest, a --json document, or a tune's folder
    #[arg(required = true, value_name = "RUN")]
    pub(crate) inputs: Vec<String>,
    /// Where to write it, or - for standard output [default: report.html, report.md, report.csv, t4.json, trace.json or
    /// strategies.md in the first run's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// html, md, csv, t4 (Kernel Tuner's results), perfetto (a timeline for ui.perfetto.dev) or strategies (what each way
    /// of proposing came to in tunes, and whether insights help)
    #[arg(long, default_value = "html", value_name = "FORMAT")]
    pub(crate) format: Format,
    /// Folder of the records
    #[arg(long, default_value = "runs", value_name = "FOLDER")]
    pub(crate) runs: PathBuf,
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
    #[arg(long, value_name = "RUNS", num_args = 0..=1, default_missing_value = "5", conflicts_with = "b", value_parser = clap::value_parser!(u32).range(2..=1000), allow_negative_numbers = true)]
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
