//! The command line as typed.

use clap::{Args, Parser, Subcommand};
use ptxsan::{Schedule, Severity};
use std::path::PathBuf;

/// Warp instructions of a launch unless `--budget` says otherwise: enough for a kernel that somebody waits for.
const DEFAULT_BUDGET: u64 = 1 << 26;

const AFTER_HELP: &str = "\
Exit status: 0 nothing found that fails, 1 findings, 2 wrong use.
ptxsan run kernel.cu --grid 4 --block 128 --args zeros:2K f32:2.0
ptxsan run kernel.cu --entry fill --grid 4 --block 128 --args x=zeros:2K --then --entry sum --grid 1 --block 32 --args @x out:s.npy:f32:1";

#[derive(Parser)]
#[command(
    name = "ptxsan",
    version,
    about = "Runs CUDA kernels on a CPU and finds their races and memory errors",
    after_help = AFTER_HELP
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Print one JSON document instead of text, errors too.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Launch entries one after the other and report findings and counters. `--then` starts the next launch: it takes the options of
    /// a launch, and sees the memory that the ones before have left.
    Run(RunArgs),
    /// List the entries and variables of a file.
    Entries(InputArgs),
    /// Delete each barrier, wait, commit, fence and warp synchronisation in turn and see whether it is noticed.
    Mutate(RunArgs),
}

/// A file, and how it is compiled.
#[derive(Args, Clone)]
pub(crate) struct InputArgs {
    /// CUDA source, compiled with NVRTC, or PTX text as nvcc -ptx or NVRTC write it.
    pub(crate) file: PathBuf,
    /// What CUDA source is compiled for: sm_75 to sm_90a.
    #[arg(long, default_value = ptxsan::compile::DEFAULT_ARCH)]
    pub(crate) arch: String,
    /// A macro for CUDA source: NAME or NAME=VALUE.
    #[arg(short = 'D', long = "define", value_name = "NAME[=VALUE]")]
    pub(crate) defines: Vec<String>,
    /// A folder of headers for CUDA source; the file's own is one already.
    #[arg(short = 'I', long = "include", value_name = "FOLDER")]
    pub(crate) include: Vec<PathBuf>,
    /// An option for NVRTC, such as --nvrtc=-std=c++20.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    pub(crate) nvrtc: Vec<String>,
}

#[derive(Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) input: InputArgs,
    #[command(flatten)]
    pub(crate) launch: LaunchArgs,
    /// The order in which warps run: round-robin, random, producer-late, consumer-late, copies-early, copies-late, all.
    #[arg(long, default_value = "round-robin", value_parser = parse_schedules)]
    pub(crate) schedule: Schedules,
    /// Seed of the random schedule.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Warp instructions before a launch is stopped.
    #[arg(long, default_value_t = DEFAULT_BUDGET, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) budget: u64,
    /// Largest shared memory of a block, such as 227K.
    #[arg(long, value_parser = parse_shared)]
    pub(crate) max_shared: Option<u32>,
    /// Do not look for races.
    #[arg(long)]
    pub(crate) no_races: bool,
    /// Ask for a proxy fence where a bulk copy overwrites what threads have read, or reports to an mbarrier they initialised.
    #[arg(long)]
    pub(crate) strict_proxies: bool,
    /// Let shuffles and votes order memory between their lanes, as much code expects and CUDA does not promise.
    #[arg(long)]
    pub(crate) collectives_order_memory: bool,
    /// From which severity on a finding fails: info, warning, error, or never.
    #[arg(long, default_value = "warning", value_parser = parse_fail_on)]
    pub(crate) fail_on: FailOn,
    /// A file of findings that are known and accepted: lines of KIND WHERE, such as `race kernel.cu:12` or `* tile*`.
    #[arg(long, value_name = "FILE")]
    pub(crate) suppressions: Option<PathBuf>,
    /// Also write the findings to a file as SARIF 2.1.0, for annotations in CI.
    #[arg(long, value_name = "FILE")]
    pub(crate) sarif: Option<PathBuf>,
}

/// What follows `--then`.
#[derive(Parser)]
#[command(name = "ptxsan run … --then", no_binary_name = true, disable_help_flag = true)]
pub(crate) struct Next {
    #[command(flatten)]
    pub(crate) launch: LaunchArgs,
}

/// One launch.
#[derive(Args, Clone)]
pub(crate) struct LaunchArgs {
    /// The kernel: its name, with template arguments and parameters where the name alone is not enough, or its symbol. May be left out
    /// when there is only one.
    #[arg(long)]
    pub(crate) entry: Option<String>,
    /// Blocks, as X or XxY or XxYxZ: 32x8.
    #[arg(long, value_parser = parse_extent)]
    pub(crate) grid: [u32; 3],
    /// Threads of a block, as X or XxY or XxYxZ.
    #[arg(long, value_parser = parse_extent)]
    pub(crate) block: [u32; 3],
    /// Blocks of a cluster, as X or XxY or XxYxZ.
    #[arg(long, value_parser = parse_extent, default_value = "1")]
    pub(crate) cluster: [u32; 3],
    /// Launch cooperatively: all blocks at once, which may synchronise as a grid.
    #[arg(long)]
    pub(crate) cooperative: bool,
    /// The launch before may still run: global memory before griddepcontrol.wait is a finding.
    #[arg(long)]
    pub(crate) programmatic: bool,
    /// Dynamic shared memory in bytes, or as 64K.
    #[arg(long, default_value = "0", value_parser = parse_shared)]
    pub(crate) shared: u32,
    /// Arguments in order: in:FILE.npy, out:FILE.npy:TYPE:2x3, inout:FROM.npy:TO.npy, zeros:64K, fresh:64K (never written), i32:5, u32:,
    /// i64:, u64:, f32:, f64:, i8:, u8: (a bool is one), i16:, u16:, f16:, bf16:, bytes:HEX, or struct:A+B+… of those. x=zeros:64K names a buffer, @x is that buffer again, also in
    /// later launches. map:ARGUMENT:TYPE:SIZES:STRIDES:BOX[:SWIZZLE] is a tensor map of another argument or of @NAME, such as
    /// map:1:f16:64x128:128:64x8:128 (innermost first, strides and swizzle in bytes). ptr:VALUE is a pointer to a value, a structure or a
    /// map.
    #[arg(long, num_args = 0..)]
    pub(crate) args: Vec<String>,
    /// A buffer that is no argument, such as what a tensor map is of: NAME=in:FILE.npy, NAME=out:FILE.npy:TYPE:2x3, NAME=zeros:64K …, then
    /// map:@NAME:… in --args.
    #[arg(long, value_name = "NAME=KIND:VALUE")]
    pub(crate) buffer: Vec<String>,
    /// Set a __device__ or __constant__ variable before the launch: NAME=f32:1.5, NAME=i32:1,2,3, NAME=in:FILE.npy, NAME=bytes:HEX.
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    /// Show a __device__ or __constant__ variable after the launch, or write it to a file: NAME:f32 or NAME:f32:FILE.npy.
    #[arg(long, value_name = "NAME:TYPE[:FILE.npy]")]
    pub(crate) read: Vec<String>,
}

/// The mildest severity that fails; none: nothing does.
#[derive(Clone, Copy)]
pub(crate) struct FailOn(pub(crate) Option<Severity>);

fn parse_fail_on(text: &str) -> Result<FailOn, String> {
    match text {
        "never" => Ok(FailOn(None)),
        _ => {
            text.parse().map(|severity| FailOn(Some(severity))).map_err(|error| format!("{error}, and never"))
        }
    }
}

#[derive(Clone)]
pub(crate) struct Schedules(pub(crate) Vec<Schedule>);

fn parse_schedules(text: &str) -> Result<Schedules, String> {
    Schedule::named(text).map(Schedules).ok_or_else(|| {
        let names: Vec<&str> = Schedule::ALL.into_iter().map(Schedule::name).collect();
        format!("no such schedule; there are {} and all", names.join(", "))
    })
}

/// `X`, `XxY` or `XxYxZ`; commas do as well.
fn parse_extent(text: &str) -> Result<[u32; 3], String> {
    const FORM: &str = "write one to three whole numbers from 1 on, such as 32, 32x8 or 32x8x2";
    let mut out = [1; 3];
    let parts: Vec<&str> = text.split(['x', ',']).collect();
    if parts.len() > 3 {
        return Err(format!("{} numbers; {FORM}", parts.len()));
    }
    for (slot, part) in out.iter_mut().zip(parts) {
        *slot = match part.trim().parse() {
            Ok(0) => return Err(format!("0 is none; {FORM}")),
            Ok(number) => number,
            Err(_) => return Err(format!("`{part}` is no whole number up to {}; {FORM}", u32::MAX)),
        };
    }
    Ok(out)
}

/// A number of bytes: `512`, `64K`, `1.5M` is not one.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    const FORM: &str = "write a whole number of bytes, such as 512, 64K or 16M";
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        other => return Err(format!("`{text}`: no unit `{other}`; {FORM}")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("`{text}` is no size; {FORM}"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is more than 64 bits can count; {FORM}"))
}

fn parse_shared(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    u32::try_from(bytes).map_err(|_| {
        format!("{bytes} bytes of shared memory; a block has at most 227K (232448 bytes) on any GPU")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_have_crosses_or_commas() {
        assert_eq!(parse_extent("32x8"), Ok([32, 8, 1]));
        assert_eq!(parse_extent("1,2,3"), Ok([1, 2, 3]));
        assert_eq!(parse_extent("7"), Ok([7, 1, 1]));
        for text in ["", "0", "1x0", "NaN", "-1", "1x2x3x4", "4294967296", "8x", "1.5"] {
            assert!(parse_extent(text).unwrap_err().contains("32x8x2"), "{text}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in
            [("0", 0), ("512", 512), ("64K", 65536), ("2KiB", 2048), ("16M", 16 << 20), ("1G", 1 << 30)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in
            ["", "K", "NaN", "-1", "1.5M", "10T", "99999999999999999999", "17179869184G", "64Kelvin", "é"]
        {
            assert!(parse_size(text).unwrap_err().contains("64K"), "{text}");
        }
        assert!(parse_shared("8G").unwrap_err().contains("232448"));
    }
}
