//! `ptxsan`: run a PTX file on the CPU and report what it does wrong.
//!
//! Exit status: 0 nothing found that fails (see `--fail-on`), 1 findings, 2 wrong use.

mod arguments;

use anyhow::{Context, Result, bail};
use arguments::{Bound, parse_extent};
use clap::{Args, Parser, Subcommand};
use ptxsan::mutate::Scene;
use ptxsan::{Device, Launch, Module, Options, Outcome, Schedule, Severity, Suppressions, finding, report};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "ptxsan",
    version,
    about = "Runs compiled CUDA kernels on a CPU and finds their races and memory errors"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Launch an entry and report findings and counters.
    Run(RunArgs),
    /// List the entries of a file with their parameters.
    Entries {
        /// PTX text.
        file: PathBuf,
    },
    /// Delete each barrier, wait, commit, fence and warp synchronisation in turn and see whether it is noticed.
    Mutate(RunArgs),
}

#[derive(Args)]
struct RunArgs {
    /// PTX text, as nvcc -ptx or NVRTC write it.
    file: PathBuf,
    /// The entry; may be left out when there is only one.
    #[arg(long)]
    entry: Option<String>,
    /// Blocks, as X or X,Y or X,Y,Z.
    #[arg(long, value_parser = parse_extent)]
    grid: [u32; 3],
    /// Threads of a block, as X or X,Y or X,Y,Z.
    #[arg(long, value_parser = parse_extent)]
    block: [u32; 3],
    /// Blocks of a cluster, as X or X,Y or X,Y,Z.
    #[arg(long, value_parser = parse_extent, default_value = "1")]
    cluster: [u32; 3],
    /// Launch cooperatively: all blocks at once, which may synchronise as a grid.
    #[arg(long)]
    cooperative: bool,
    /// Dynamic shared memory in bytes.
    #[arg(long, default_value_t = 0)]
    shared: u32,
    /// Arguments in order: in:FILE.npy, out:FILE.npy:TYPE:2x3, inout:FROM.npy:TO.npy, zeros:BYTES, fresh:BYTES,
    /// i32:5, u32:, i64:, u64:, f32:, f64:, bytes:HEX, or struct:A+B+… of those; map:ARGUMENT:TYPE:SIZES:STRIDES:BOX[:SWIZZLE], a tensor
    /// map of another argument, such as map:1:f16:64x128:128:64x8:128 (innermost first, strides and swizzle in bytes).
    #[arg(long, num_args = 0.., allow_hyphen_values = true)]
    args: Vec<String>,
    /// The order in which warps run: round-robin, random, producer-late, consumer-late, copies-early, copies-late, all.
    #[arg(long, default_value = "round-robin", value_parser = parse_schedules)]
    schedule: Schedules,
    /// Seed of the random schedule.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Warp instructions before the launch is stopped.
    #[arg(long)]
    budget: Option<u64>,
    /// Largest shared memory of a block in bytes.
    #[arg(long)]
    max_shared: Option<u32>,
    /// Do not look for races.
    #[arg(long)]
    no_races: bool,
    /// The launch before may still run: global memory before griddepcontrol.wait is a finding.
    #[arg(long)]
    programmatic: bool,
    /// Ask for a proxy fence where a bulk copy overwrites what threads have read.
    #[arg(long)]
    strict_proxies: bool,
    /// From which severity on a finding fails: info, warning, error, or never.
    #[arg(long, default_value = "warning", value_parser = parse_fail_on)]
    fail_on: FailOn,
    /// A file of findings that are known and accepted: lines of KIND WHERE, such as `race kernel.cu:12` or `* tile*`.
    #[arg(long, value_name = "FILE")]
    suppressions: Option<PathBuf>,
    /// Print one JSON document instead of text.
    #[arg(long)]
    json: bool,
}

/// The mildest severity that fails; none: nothing does.
#[derive(Clone, Copy)]
struct FailOn(Option<Severity>);

fn parse_fail_on(text: &str) -> std::result::Result<FailOn, String> {
    match text {
        "never" => Ok(FailOn(None)),
        _ => {
            text.parse().map(|severity| FailOn(Some(severity))).map_err(|error| format!("{error}, and never"))
        }
    }
}

#[derive(Clone)]
struct Schedules(Vec<Schedule>);

fn parse_schedules(text: &str) -> std::result::Result<Schedules, String> {
    Schedule::named(text).map(Schedules).ok_or_else(|| {
        let names: Vec<&str> = Schedule::ALL.into_iter().map(Schedule::name).collect();
        format!("no such schedule; there are {} and all", names.join(", "))
    })
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(args) => run(&args),
        Command::Entries { file } => entries(&file),
        Command::Mutate(args) => mutate(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        // Nobody reads any more, as in `ptxsan run … | head -1`: that is no mistake of the user's.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ptxsan: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}

fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

fn load(file: &PathBuf) -> Result<Module> {
    let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    Module::parse(&text).with_context(|| file.display().to_string())
}

fn entries(file: &PathBuf) -> Result<bool> {
    let module = load(file)?;
    let mut text = format!("target {}, PTX {}\n", module.target(), module.version());
    for entry in module.entries() {
        let sizes: Vec<String> = module.parameters(entry)?.iter().map(|b| format!("{b} bytes")).collect();
        let (sizes, shared) = (sizes.join(", "), module.static_shared_bytes(entry)?);
        text += &format!("{entry}({sizes}), {shared} bytes of shared memory\n");
    }
    for (entry, why) in module.refused() {
        text += &format!("{entry}: cannot be run: {why}\n");
    }
    say(&text)?;
    Ok(true)
}

impl RunArgs {
    fn entry(&self, module: &Module) -> Result<String> {
        match &self.entry {
            Some(entry) => Ok(entry.clone()),
            None => {
                let all: Vec<&str> = module.entries().collect();
                match all[..] {
                    [only] => Ok(only.to_owned()),
                    _ => bail!("--entry is needed; the file has: {}", all.join(", ")),
                }
            }
        }
    }

    /// One launch on a device of its own.
    fn launch(&self, module: &Module, options: &Options, writes_files: bool) -> Result<(Outcome, Vec<u8>)> {
        let mut device = Device::new();
        let id = device.load(module)?;
        let mut bound = Bound::default();
        for (i, text) in self.args.iter().enumerate() {
            bound.add(&mut device, text, i).with_context(|| format!("argument {i} (`{text}`)"))?;
        }
        bound.resolve_maps()?;
        let entry = self.entry(module)?;
        let mut launch = Launch::new(&entry, self.grid, self.block, self.shared, bound.args.clone());
        launch.cluster = self.cluster;
        launch.cooperative = self.cooperative;
        launch.options = options.clone();
        launch.options.seed = self.seed;
        launch.options.programmatic = self.programmatic;
        launch.options.strict_proxies = self.strict_proxies;
        launch.options.check_races = !self.no_races;
        launch.options.instruction_budget = self.budget.unwrap_or(launch.options.instruction_budget);
        launch.options.max_shared_bytes = self.max_shared.unwrap_or(launch.options.max_shared_bytes);
        let outcome = device.launch(id, &launch)?;
        if writes_files {
            bound.save(&mut device)?;
        }
        Ok((outcome, bound.contents(&mut device)?))
    }
}

impl RunArgs {
    fn suppressions(&self) -> Result<Suppressions> {
        let Some(path) = &self.suppressions else { return Ok(Suppressions::default()) };
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        Suppressions::parse(&text).with_context(|| path.display().to_string())
    }
}

fn run(args: &RunArgs) -> Result<bool> {
    let module = load(&args.file)?;
    let entry = args.entry(&module)?;
    let mut suppressions = args.suppressions()?;
    let (mut rows, mut findings) = (Vec::new(), Vec::new());
    let (mut dropped, mut suppressed) = (0, 0);
    let mut counters = String::new();
    for &schedule in &args.schedule.0 {
        let options = Options { schedule, ..Options::default() };
        let (mut outcome, _) = args.launch(&module, &options, true)?;
        suppressed += suppressions.apply(&entry, &mut outcome.findings);
        finding::merge(&mut findings, outcome.findings.iter().cloned());
        dropped += outcome.dropped;
        if args.json {
            let mut row = serde_json::to_value(&outcome)?;
            row["schedule"] = serde_json::to_value(schedule)?;
            row["seed"] = args.seed.into();
            rows.push(row);
        } else {
            let name = schedule.name();
            say(&outcome.output)?;
            counters += &format!("{}  schedule {name}, seed {}\n", outcome.counters, args.seed);
        }
    }
    let unused: Vec<String> =
        suppressions.unused().map(|(line, rule)| format!("line {line}: {rule}")).collect();
    if args.json {
        let document = serde_json::json!({
            "schema": "ptxsan.run/2",
            "entry": entry,
            "findings": findings,
            "suppressed": suppressed,
            "unused_suppressions": unused,
            "rows": rows,
        });
        say(&format!("{document}\n"))?;
    } else {
        for finding in &findings {
            say(&format!("{finding}\n\n"))?;
        }
        say(&format!("{entry}: {}\n", report::tally(&findings, dropped)))?;
        if suppressed > 0 {
            say(&format!("  {suppressed} suppressed\n"))?;
        }
        for rule in unused {
            say(&format!("  suppression not used: {rule}\n"))?;
        }
        say(&counters)?;
    }
    // What could not be listed may be of any severity.
    let fails = |severity: Severity| args.fail_on.0.is_some_and(|least| severity >= least);
    Ok(!(findings.iter().any(|finding| fails(finding.severity)) || dropped > 0 && fails(Severity::Error)))
}

fn mutate(args: &RunArgs) -> Result<bool> {
    let module = load(&args.file)?;
    let entry = args.entry(&module)?;
    let run = |module: &Module, options: &Options| args.launch(module, options, false);
    let scenes = [Scene { name: args.file.display().to_string(), run: Box::new(run) }];
    let score = ptxsan::mutate::score(&module, &entry, &scenes, &args.schedule.0)?;
    let (noticed, matter) = score.counts();
    if args.json {
        let document = serde_json::json!({
            "schema": "ptxsan.mutate/2",
            "noticed": noticed,
            "matter": matter,
            "unmutated_findings": score.unmutated_findings,
            "rows": score.deletions,
        });
        say(&format!("{document}\n"))?;
    } else {
        say(&format!("{score}\n"))?;
    }
    // A kernel with findings as it stands says nothing of its deletions.
    Ok(score.unmutated_findings.is_empty() && noticed == matter)
}
