//! `evosdpa bench`: gates, then times, side by side.

use std::{
    cell::RefCell,
    fmt::Write,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context;
use evosdpa_core::{DType, Problem, Shape};
use evosdpa_lab::{
    baseline::torch::{self, Torch},
    bench::{self, Request, Step},
    device::{AUTO, DeviceId, DeviceLock, SUBMISSION, TimedDevice, Timing, WithSubmission},
    exchange::Submission,
    machine::Environment,
    measure::{compare::Comparison, duel::Rule, interleave},
    record::{Row, Run, RunStatus},
    self_test::{self, SelfTest},
};
use evosdpa_oracle::inputs::LengthFamily;

use crate::{
    Status,
    args::Bench,
    command::{Opened, chosen_cuda_kernels, chosen_kernels, lengths, own_arguments, registry},
    interrupt,
    output::{self, time},
    progress,
};

/// What a row may take when the user says neither how many calls nor how long.
const DEFAULT_BUDGET: Duration = Duration::from_secs(4);
const DEFAULT_ITERS: u32 = 100;

/// Measures; a submission instead of kernels, beside what the library would run, where there is one.
pub(crate) fn run(args: Bench, submission: Option<Submission>) -> anyhow::Result<Status> {
    let Opened { device, no_gpu } = args.common.open()?;
    let Some(device) = device.timed() else {
        anyhow::bail!("--device {} has no clock: use --device cuda or cpu to measure", device.id());
    };
    let with_submission = submission.map(|submission| {
        let threads = Environment::look(args.common.thread_count()).threads;
        let limit = Duration::from_secs_f64(args.baseline_timeout);
        WithSubmission::start(device, submission, &args.python, threads, limit).map_err(|error| match error {
            error if error.to_string().contains("torch not importable") => anyhow::anyhow!(
                "{error}. An answer is called on tensors of torch's: `{} -m pip install torch`, or --python PATH",
                args.python
            ),
            error => error.into(),
        })
    });
    let with_submission = with_submission.transpose()?;
    let (device, kernels) = match &with_submission {
        Some(with) => (with as &dyn TimedDevice, vec![AUTO.to_owned(), SUBMISSION.to_owned()]),
        None => (device, contestants(device, &args.kernels, &args.common.kernel_path)?),
    };
    let baselines = match args.baselines.as_slice() {
        [] => torch::modes(device.id()).to_vec(),
        names => torch::modes_called(device.id(), names).context("--baselines")?,
    };
    let on_cpu = device.id() == DeviceId::Cpu;
    if on_cpu && args.timing == Timing::Between {
        return Err(evosdpa_lab::Error::BetweenOnCpu).context("--timing");
    }
    let dtypes = match args.dtype.as_slice() {
        [] if on_cpu => vec![DType::F32],
        [] => vec![DType::BF16],
        given => given.to_vec(),
    };
    let mut problems = problems(&args.shapes, &dtypes)?;
    let mut lengths = Vec::new();
    for (at, of_shape) in problems.iter_mut().enumerate() {
        let asked = lengths::of_shape(&args.lengths, at, args.shapes.len())?;
        for problem in of_shape {
            *problem = lengths::fitted(problem, asked)?;
        }
        lengths.push(asked.unwrap_or(LengthFamily::Equal));
    }
    for problem in problems.iter().flatten() {
        evosdpa_lab::machine::refuse_what_does_not_fit(problem, 2)?;
    }
    interrupt::listen();

    let mut environment = Environment::look(args.common.thread_count());
    environment.accelerator = device.accelerator();
    environment.no_accelerator = no_gpu;
    if on_cpu {
        environment.measure_peaks(args.common.forced_isa()?);
    }
    if let Some(duels) = args.self_test {
        return self_test(&args, device, &kernels, &problems, &environment, duels as usize);
    }
    let torch = start_torch(&args, environment.threads);
    environment.torch = torch.as_ref().ok().map(|torch| torch.version().to_owned());
    let torch = torch.map(RefCell::new);
    let mut record = Run::create(&args.out, &own_arguments(), &environment)?;
    if let Some(set) = &args.set {
        record.join(set)?;
    }

    let budget = match (args.budget, args.iters) {
        (Some(seconds), _) => Some(Duration::from_secs_f64(seconds)),
        (None, Some(_)) => None,
        (None, None) => Some(DEFAULT_BUDGET),
    };
    let mut request = Request {
        kernels,
        baselines,
        iters: args.iters.unwrap_or(DEFAULT_ITERS) as usize,
        warmup: args.warmup as usize,
        seed: args.seed,
        lengths: LengthFamily::Equal,
        budget,
        timing: args.timing,
        margin: args.margin,
        epoch: Instant::now(),
    };
    let steps = problems.iter().flatten().count() as u64;
    let bar = progress::bar(steps * 100);
    let mut rows: Vec<Row> = Vec::new();
    let mut status = RunStatus::Complete;
    let mut done = 0;
    let no_torch = torch.as_ref().err().cloned();
    let json = args.common.json;
    let last_words = |rows: &[Row], record: &Run| {
        let (rows, mut record) = (rows.to_vec(), record.clone());
        let (environment, no_torch) = (environment.clone(), no_torch.clone());
        move || {
            // There is nobody left to tell of a failure.
            let _ = record.finish(RunStatus::Interrupted);
            let _ = print(json, &environment, &rows, &record, no_torch.as_ref());
        }
    };
    interrupt::on_end(last_words(&rows, &record));
    'shapes: for (of_shape, lengths) in problems.iter().zip(lengths) {
        request.lengths = lengths;
        let mut shape_rows = Vec::new();
        let mut shape_words = Vec::new();
        for problem in of_shape {
            let proceed = |step: Step<'_>| {
                match step {
                    Step::Solving => progress::say(&bar, format!("{problem}: solving in f64")),
                    Step::Waiting => progress::say(
                        &bar,
                        format!("{problem}: waiting for another program that measures on this GPU"),
                    ),
                    Step::Checking(kernel) => progress::say(&bar, format!("{problem}: checking {kernel}")),
                    Step::Timing(share) => {
                        bar.set_position(done * 100 + (share * 100.0) as u64);
                        progress::say(&bar, format!("{problem}: timing"));
                    }
                }
                !interrupt::asked()
            };
            let torch = torch.as_ref().map_err(String::as_str);
            let outcome = bench::measure(device, problem, &request, torch, proceed)?;
            if outcome.interrupted {
                status = RunStatus::Interrupted;
                break 'shapes;
            }
            shape_rows.extend(outcome.rows);
            shape_words.extend(outcome.words);
            done += 1;
        }
        let shape = of_shape[0].shape().to_string();
        let recorded = record.add(&shape, &shape_rows, &shape_words);
        rows.extend(shape_rows);
        if let Err(error) = recorded {
            // What was measured is told, where it cannot be kept.
            bar.finish_and_clear();
            print(json, &environment, &rows, &record, no_torch.as_ref())?;
            return Err(error.into());
        }
        interrupt::on_end(last_words(&rows, &record));
    }
    let _ending = interrupt::ending();
    record.finish(status)?;
    bar.finish_and_clear();
    print(json, &environment, &rows, &record, no_torch.as_ref())?;
    let own = rows.iter().filter(|row| !row.baseline);
    Ok(match status {
        RunStatus::Interrupted => Status::Interrupted,
        _ if own.clone().any(Row::failed) => Status::Failed,
        _ if own.clone().any(|row| !row.samples_us.is_empty()) => Status::Passed,
        _ => {
            let reason = |row: &Row| Some((row.kernel.clone(), row.first_problem()?.detail.clone()));
            output::nothing_done("measured", own.filter_map(reason))
        }
    })
}

fn print(
    json: bool,
    environment: &Environment,
    rows: &[Row],
    record: &Run,
    no_torch: Option<&String>,
) -> anyhow::Result<()> {
    if json {
        return output::print_json("bench", environment, &rows);
    }
    output::print(&page(environment, rows, record, no_torch))
}

/// The kernels that were asked for (`all` is all of them, folders of the user's are theirs) and what the library would run.
fn contestants(
    device: &dyn TimedDevice,
    asked: &[String],
    kernel_path: &[PathBuf],
) -> anyhow::Result<Vec<String>> {
    let mut kernels = match asked {
        [] if kernel_path.is_empty() => Vec::new(),
        [] => {
            let registry = registry(kernel_path)?;
            let theirs: Vec<String> = chosen_cuda_kernels(&registry, &[])?
                .into_iter()
                .map(|kernel| kernel.name().to_owned())
                .collect();
            if let (DeviceId::Cpu, Some(kernel)) = (device.id(), theirs.first().cloned()) {
                return Err(evosdpa_lab::Error::NeedsGpu { kernel }.into());
            }
            theirs
        }
        [all] if all == "all" => chosen_kernels(device, &[], kernel_path)?,
        asked => chosen_kernels(device, asked, kernel_path)?,
    };
    if !kernels.iter().any(|kernel| kernel == AUTO) {
        kernels.push(AUTO.to_owned());
    }
    Ok(kernels)
}

/// The problems, grouped by shape.
fn problems(shapes: &[Shape], dtypes: &[DType]) -> anyhow::Result<Vec<Vec<Problem>>> {
    let of_shape = |shape: &Shape| {
        dtypes.iter().map(|&dtype| Problem::new(*shape, dtype)).collect::<Result<Vec<_>, _>>()
    };
    shapes.iter().map(of_shape).collect::<Result<Vec<_>, _>>().context("--shapes")
}

/// Each kernel against itself, on every problem it takes.
fn self_test(
    args: &Bench,
    device: &dyn TimedDevice,
    kernels: &[String],
    problems: &[Vec<Problem>],
    environment: &Environment,
    duels: usize,
) -> anyhow::Result<Status> {
    let rule =
        Rule { most_blocks: args.iters.unwrap_or(40) as usize, margin: args.margin, ..Rule::default() };
    let mut rows: Vec<SelfTest> = Vec::new();
    let mut refused = Vec::new();
    for problem in problems.iter().flatten() {
        for kernel in kernels {
            if let Some(why) = device.refuses(kernel, problem) {
                refused.push((kernel.clone(), why));
                continue;
            }
            let proceed = |_| !interrupt::asked();
            let Some(_lock) = DeviceLock::wait(device, || !interrupt::asked())? else { break };
            rows.push(self_test::against_itself(
                device,
                kernel,
                problem,
                args.timing,
                duels,
                &rule,
                proceed,
            )?);
        }
    }
    if args.common.json {
        output::print_json("self-test", environment, &rows)?;
    } else {
        let shown = |test: &SelfTest| {
            let counts = [test.duels, test.fast, test.slow, test.same, test.ambiguous].map(|n| n.to_string());
            let mut row = vec![test.problem.clone(), test.kernel.clone()];
            row.extend(counts);
            row.push(format!("{:.2} %", 100.0 * test.false_positives()));
            row.push(format!("{} of {}", test.throttled + test.unsteady, test.blocks));
            row
        };
        let header =
            ["problem", "kernel", "duels", "FAST", "SLOW", "SAME", "AMBIGUOUS", "false", "blocks set aside"];
        output::print(&output::table(&header, 2, rows.iter().map(shown).collect()))?;
    }
    let kept = rows.iter().all(|test| test.false_positives() <= test.alpha);
    Ok(match () {
        () if interrupt::asked() => Status::Interrupted,
        () if rows.is_empty() => output::nothing_done("measured", refused),
        () if kept => Status::Passed,
        () => Status::Failed,
    })
}

/// Torch, or why it is not there and how to get it.
fn start_torch(args: &Bench, threads: usize) -> Result<Torch, String> {
    if args.no_baselines {
        return Err("not asked for (--no-baselines)".to_owned());
    }
    Torch::start(&args.python, threads, Duration::from_secs_f64(args.baseline_timeout)).map_err(|error| {
        format!("{error}. To compare with PyTorch: `{} -m pip install torch`, or --python PATH", args.python)
    })
}

fn page(environment: &Environment, rows: &[Row], record: &Run, no_torch: Option<&String>) -> String {
    let mut text = String::new();
    let _ = write_page(&mut text, environment, rows, record, no_torch);
    text
}

fn write_page(
    out: &mut String,
    env: &Environment,
    rows: &[Row],
    record: &Run,
    no_torch: Option<&String>,
) -> std::fmt::Result {
    let mut peak = env.fma_peak_gflops.map_or(String::new(), |peak| format!(", peak {peak:.0} GFLOP/s"));
    if let Some(of_bf16) = env.bf16_peak_gflops {
        let _ = write!(peak, " ({of_bf16:.0} in bf16)");
    }
    let memory = env.memory_gbps.map_or(String::new(), |gbps| format!(", memory {gbps:.0} GB/s"));
    let machine = env.accelerator.clone().unwrap_or_else(|| format!("{} · {} threads", env.cpu, env.threads));
    writeln!(out, "{machine}{peak}{memory}")?;
    if let Some(why) = &env.no_accelerator {
        writeln!(out, "{}", output::no_gpu(why))?;
    }
    writeln!(out)?;
    let columns: Vec<Column> = COLUMNS.into_iter().filter(|column| (column.wanted)(rows)).collect();
    let header: Vec<&str> = columns.iter().map(|column| column.header).collect();
    let shown = rows
        .iter()
        .filter(|row| not_installed(row).is_none())
        .map(|row| columns.iter().map(|column| (column.cell)(row)).collect())
        .collect();
    out.push_str(&output::table(&header, 3, shown));
    if let Some(why) = no_torch {
        let why = why.strip_prefix("torch: ").unwrap_or(why);
        writeln!(out, "\n{}", output::wrapped(&format!("torch: UNAVAILABLE: {why}"), 2))?;
    } else {
        write_not_installed(out, rows)?;
    }
    let words = &record.summary().words;
    if !words.is_empty() {
        writeln!(out, "\n{}", words.join("\n"))?;
    }
    if rows.iter().any(|row| !row.samples_us.is_empty() && row.samples_us.len() < interleave::ROUNDS) {
        writeln!(
            out,
            "\nFewer samples than rounds on some rows: give them more time with --budget or --iters."
        )?;
    }
    writeln!(out, "\nrecorded in {}", record.folder().display())
}

fn rate(gflops: f64) -> String {
    if gflops >= 1e4 { format!("{:.1} T", gflops / 1e3) } else { format!("{gflops:.1} G") }
}

/// A column of the table, and whether a run has anything to say in it: dashes would only take the room that long names need.
struct Column {
    header: &'static str,
    wanted: fn(&[Row]) -> bool,
    cell: fn(&Row) -> String,
}

const COLUMNS: [Column; 11] = [
    Column { header: "problem", wanted: always, cell: |row| row.problem.clone() },
    Column { header: "kernel", wanted: always, cell: Row::shown },
    Column { header: "gates", wanted: always, cell: gates },
    Column { header: "p50", wanted: always, cell: |row| number(row.p50_us, time) },
    Column { header: "between", wanted: has_between, cell: |row| number(row.between_p50_us, time) },
    Column { header: "p90", wanted: always, cell: |row| number(row.p90_us, time) },
    Column { header: "p99", wanted: |rows| !has_between(rows), cell: |row| number(row.p99_us, time) },
    Column { header: "FLOP/s", wanted: always, cell: |row| number(row.gflops, rate) },
    Column {
        header: "% roof",
        wanted: |rows| rows.iter().any(|row| row.roofline.is_some()),
        cell: |row| number(row.roofline, output::percent),
    },
    Column { header: "n", wanted: always, cell: |row| row.samples_us.len().to_string() },
    Column {
        header: "vs baseline",
        wanted: |rows| rows.iter().any(|row| row.fastest_baseline().is_some()),
        cell: |row| row.fastest_baseline().map_or("–".to_owned(), |(_, comparison)| ratio(comparison)),
    },
];

/// Where the medians beside it say something else, both are there to be seen.
fn ratio(comparison: &Comparison) -> String {
    match comparison.medians_apart() {
        None => format!("{:.2}×", comparison.ratio),
        Some(of_medians) => format!("{:.2}× (p50 {of_medians:.2}×)", comparison.ratio),
    }
}

fn always(_: &[Row]) -> bool {
    true
}

fn has_between(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.between_p50_us.is_some())
}

fn number(x: Option<f64>, show: fn(f64) -> String) -> String {
    x.map_or("–".to_owned(), show)
}

fn gates(row: &Row) -> String {
    row.first_problem().map_or("PASS".to_owned(), |gate| gate.verdict.word().to_owned())
}

/// Why a baseline is not there at all, if it is not.
fn not_installed(row: &Row) -> Option<&str> {
    let gate = row.gates.first().filter(|gate| row.baseline && gate.gate == bench::AVAILABLE)?;
    (!gate.verdict.is_pass()).then_some(gate.detail.as_str())
}

/// A line for each baseline that is not there, whatever the number of problems.
fn write_not_installed(out: &mut String, rows: &[Row]) -> std::fmt::Result {
    let mut said = Vec::new();
    for (row, why) in rows.iter().filter_map(|row| Some((row, not_installed(row)?))) {
        let why = why.strip_prefix("torch: ").unwrap_or(why);
        let line = output::wrapped(&format!("{}: UNAVAILABLE: {why}", row.kernel), 2);
        if !said.contains(&line) {
            let gap = if said.is_empty() { "\n" } else { "" };
            writeln!(out, "{gap}{line}")?;
            said.push(line);
        }
    }
    Ok(())
}
