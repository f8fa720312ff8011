//! Flags of the commands about which kernel and which variant: what there is, what is taken, what would be faster.

use std::path::PathBuf;

use clap::Args;
use evosdpa_core::{DType, Shape};
use evosdpa_kernels::Arch;
use evosdpa_lab::exchange::Tool;

use super::{
    Common,
    llm::Llm,
    value::{Place, positive_seconds},
};

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
    /// Shapes to be fast at, separated by commas; the first decides early which candidates are hopeless
    #[arg(long, default_value = "mission,small", value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Element type [default: f32 on a CPU, the first of the kernel's manifest on a GPU]
    #[arg(long)]
    pub(crate) dtype: Option<DType>,
    /// Evaluations at most, those before a --resume included
    #[arg(long, default_value_t = 45, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000), allow_negative_numbers = true)]
    pub(crate) evaluations: u32,
    /// Minutes at most, counted from now
    #[arg(long, value_name = "MINUTES", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) minutes: Option<f64>,
    /// How to search: evo, random, grid or hill-climb [default: evo; with --simulate, all of them]
    #[arg(long, value_name = "NAME")]
    pub(crate) strategy: Option<String>,
    /// Elites to keep
    #[arg(long, default_value_t = 3, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=100), allow_negative_numbers = true)]
    pub(crate) top: u32,
    /// Seed of what chance decides
    #[arg(long, default_value_t = 0, value_name = "SEED", allow_negative_numbers = true)]
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
    #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000), allow_negative_numbers = true)]
    pub(crate) blocks: u32,
    /// Sets of inputs to rotate through [default: as many as the device needs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), allow_negative_numbers = true)]
    pub(crate) sets: Option<u32>,
    /// Compilations at once, each in a process of its own [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), allow_negative_numbers = true)]
    pub(crate) workers: Option<u32>,
    /// Evaluators to measure with: processes of this program, each with a device of its own (docs/clusters.md)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), conflicts_with = "simulate", allow_negative_numbers = true)]
    pub(crate) evaluators: Option<u32>,
    /// What starts an evaluator, such as 'srun -N1 -n1 --gpus=1 --exact' [default: a process on this machine, number N on GPU N]
    #[arg(long, value_name = "COMMAND", requires = "evaluators")]
    pub(crate) launcher: Option<String>,
    /// Seconds an evaluator may take for one candidate; then it is ended and another does it
    #[arg(long, default_value_t = 600.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) evaluator_timeout: f64,
    /// Seconds of silence after which an evaluator counts as lost; it gives a sign of life every second
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) evaluator_silence: f64,
    /// Leave out the simulator's look at each CUDA candidate
    #[arg(long)]
    pub(crate) no_sim: bool,
    /// Do not profile CUDA candidates, neither for insights on a new best nor as the last gate
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
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000), allow_negative_numbers = true)]
    pub(crate) replays: u32,
    #[command(flatten)]
    pub(crate) llm: Llm,
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
    /// The element type: f32, f16, bf16, u8, e4m3, i8 [default: f32 on a CPU, bf16 on a GPU]
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
  evosdpa precompile kernels --arch sm_90a
  evosdpa precompile kernels --arch sm_90a --shapes b64h32/8s1/8192d128:used:paged=16 --dtype bf16
  EVOSDPA_PRECOMPILED=kernels evosdpa bench --device cuda --shapes mission")]
pub(crate) struct Precompile {
    /// The folder for the compiled kernels; what it has already stays
    pub(crate) folder: PathBuf,
    /// Architectures, separated by commas: sm_80, sm_86, sm_89, sm_90a
    #[arg(long, required = true, value_delimiter = ',', value_name = "ARCHS")]
    pub(crate) arch: Vec<Arch>,
    /// Shapes, separated by commas [default: prompts, packed prompts and decoding of head dimensions 64 and 128]
    #[arg(long, value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Element types of the shapes, separated by commas: f32, f16, bf16, u8, e4m3, i8 [default: f16 and bf16]
    #[arg(long, value_delimiter = ',', value_name = "TYPES", requires = "shapes")]
    pub(crate) dtype: Vec<DType>,
    /// Compilations at once, each in a process of its own
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), allow_negative_numbers = true)]
    pub(crate) workers: u32,
    /// Seconds one compilation may take
    #[arg(long, default_value_t = 120.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) compile_timeout: f64,
    /// A folder with CUDA kernels of your own; a row of your table may name them
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa apply tunes/small/elite.json --dry-run
  evosdpa apply tunes/small/elite.json")]
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
#[command(after_help = "Examples:
  evosdpa export kernelbench --shape b8h16s1024d64:causal --out tasks/kernelbench
  evosdpa export openevolve --shape mission --dtype f16 --kernel sdpa_v2c --out tasks/openevolve")]
pub(crate) struct Export {
    /// The tool: kernelbench, gpumode or openevolve
    pub(crate) tool: Tool,
    /// The shape
    #[arg(long)]
    pub(crate) shape: Shape,
    /// The element type: f32, f16 or bf16
    #[arg(long, default_value = "bf16")]
    pub(crate) dtype: DType,
    /// With openevolve: the CUDA kernel that is to evolve
    #[arg(long, value_name = "NAME")]
    pub(crate) kernel: Option<String>,
    /// The folder for the files
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// A folder with CUDA kernels of your own; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub(crate) kernel_path: Vec<PathBuf>,
    /// Print one JSON document instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  evosdpa import kernelbench tasks/kernelbench/solution.py
  evosdpa import gpumode submission.py --shape b8h16s1024d64:causal --dtype bf16
  evosdpa import openevolve best.cu --kernel sdpa_v2c --shape mission --name sdpa_v2c_best --out mine")]
pub(crate) struct Import {
    /// The tool: kernelbench, gpumode or openevolve
    pub(crate) tool: Tool,
    /// The answer: a Python file with ModelNew or custom_kernel, or with openevolve a CUDA source. Python files run with your rights
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) common: Common,
    /// The shape [default: that of the task beside the file]
    #[arg(long)]
    pub(crate) shape: Option<Shape>,
    /// The element type [default: that of the task beside the file, else bf16]
    #[arg(long)]
    pub(crate) dtype: Option<DType>,
    /// With openevolve: the kernel whose contract the source keeps [default: that of the task beside the file]
    #[arg(long, value_name = "NAME")]
    pub(crate) kernel: Option<String>,
    /// With openevolve: what the kernel is to be called
    #[arg(long, default_value = "imported", value_name = "NAME")]
    pub(crate) name: String,
    /// With openevolve: the folder for the kernel, which --kernel-path takes; otherwise for records
    /// [default: kernels/NAME, runs]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: Option<PathBuf>,
    /// Python with PyTorch, to call the submission
    #[arg(long, default_value = "python3", value_name = "PATH")]
    pub(crate) python: String,
    /// Seconds the submission may take for an answer, building its extensions included
    #[arg(long, default_value_t = 300.0, value_name = "SECONDS", value_parser = positive_seconds, allow_negative_numbers = true)]
    pub(crate) timeout: f64,
    /// Timed calls [default: 100, or as many as 4 seconds allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    pub(crate) iters: Option<u32>,
}
