//! `evosdpa bench`: gates, then times, side by side.

mod page;

use std::{
    cell::RefCell,
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
    measure::duel::Rule,
    record::{Row, Run, RunStatus},
    self_test::{self, SelfTest},
};
use evosdpa_oracle::inputs::LengthFamily;
use indicatif::ProgressBar;

use crate::{
    Status,
    args::Bench,
    command::{Opened, chosen_cuda_kernels, chosen_kernels, lengths, own_arguments, registry},
    interrupt, output, progress,
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
    let with_submission = submission.map(|submission| start_submission(&args, device, submission));
    let with_submission = with_submission.transpose()?;
    let (device, kernels) = match &with_submission {
        Some(with) => (with as &dyn TimedDevice, vec![AUTO.to_owned(), SUBMISSION.to_owned()]),
        None => (device, contestants(device, &args.kernels, &args.common.kernel_path)?),
    };
    let on_cpu = device.id() == DeviceId::Cpu;
    let request = request(&args, device.id(), kernels)?;
    let asked = asked(&args, on_cpu)?;
    interrupt::listen();

    let bar = progress::bar(asked.iter().map(|of_shape| of_shape.problems.len() as u64 * 100).sum());
    progress::say(&bar, "looking at this machine");
    let mut environment = Environment::look(args.common.thread_count());
    environment.accelerator = device.accelerator();
    environment.no_accelerator = no_gpu;
    if on_cpu {
        environment.measure_peaks(args.common.forced_isa()?);
    }
    if let Some(duels) = args.self_test {
        bar.finish_and_clear();
        return self_test(&args, device, &request.kernels, &asked, &environment, duels as usize);
    }
    progress::say(&bar, "starting PyTorch");
    let torch = start_torch(&args, environment.threads);
    environment.torch = torch.as_ref().ok().map(|torch| torch.version().to_owned());
    let mut record = Run::create(&args.out, &own_arguments(), &environment)?;
    if let Some(set) = &args.set {
        record.join(set)?;
    }
    let no_torch = torch.as_ref().err().cloned();
    let mut told = Told { json: args.common.json, environment, rows: Vec::new(), record, no_torch };
    let status = measure(device, &asked, request, torch.map(RefCell::new), &mut told, &bar)?;
    let _ending = interrupt::ending();
    told.record.finish(status)?;
    bar.finish_and_clear();
    told.print()?;
    Ok(told.status(status))
}

fn start_submission<'a>(
    args: &Bench,
    device: &'a dyn TimedDevice,
    submission: Submission,
) -> anyhow::Result<WithSubmission<'a>> {
    let threads = Environment::look(args.common.thread_count()).threads;
    let limit = Duration::from_secs_f64(args.baseline_timeout);
    WithSubmission::start(device, submission, &args.python, threads, limit).map_err(|error| match error {
        error if error.to_string().contains("torch not importable") => anyhow::anyhow!(
            "{error}. An answer is called on tensors of torch's: `{} -m pip install torch`, or --python PATH",
            args.python
        ),
        error => error.into(),
    })
}

/// What is asked of every problem.
fn request(args: &Bench, device: DeviceId, kernels: Vec<String>) -> anyhow::Result<Request> {
    let baselines = match args.baselines.as_slice() {
        [] => torch::modes(device).to_vec(),
        names => torch::modes_called(device, names).context("--baselines")?,
    };
    if device == DeviceId::Cpu && args.timing == Timing::Between {
        return Err(evosdpa_lab::Error::BetweenOnCpu).context("--timing");
    }
    let budget = match (args.budget, args.iters) {
        (Some(seconds), _) => Some(Duration::from_secs_f64(seconds)),
        (None, Some(_)) => None,
        (None, None) => Some(DEFAULT_BUDGET),
    };
    Ok(Request {
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
    })
}

/// A shape's problems, one for each type.
struct OfShape {
    problems: Vec<Problem>,
    lengths: LengthFamily,
}

fn asked(args: &Bench, on_cpu: bool) -> anyhow::Result<Vec<OfShape>> {
    let dtypes = match args.dtype.as_slice() {
        [] if on_cpu => vec![DType::F32],
        [] => vec![DType::BF16],
        given => given.to_vec(),
    };
    let of_shape = |(at, shape): (usize, &Shape)| {
        let problems = dtypes.iter().map(|&dtype| Problem::new(*shape, dtype));
        let problems = problems.collect::<Result<Vec<_>, _>>().context("--shapes")?;
        let lengths = lengths::of_shape(&args.lengths, at, args.shapes.len())?;
        let fitted = problems.iter().map(|problem| lengths::fitted(problem, lengths));
        let problems = fitted.collect::<anyhow::Result<Vec<_>>>()?;
        Ok(OfShape { problems, lengths: lengths.unwrap_or(LengthFamily::Equal) })
    };
    let asked = args.shapes.iter().enumerate().map(of_shape).collect::<anyhow::Result<Vec<_>>>()?;
    for problem in asked.iter().flat_map(|of_shape| &of_shape.problems) {
        evosdpa_lab::machine::refuse_what_does_not_fit(problem, 2)?;
    }
    Ok(asked)
}

/// What is known of a run, kept and told however it ends.
#[derive(Clone)]
struct Told {
    json: bool,
    environment: Environment,
    rows: Vec<Row>,
    record: Run,
    no_torch: Option<String>,
}

impl Told {
    fn print(&self) -> anyhow::Result<()> {
        if self.json {
            return output::print_json("bench", &self.environment, &self.rows);
        }
        output::print(&page::page(&self.environment, &self.rows, &self.record, self.no_torch.as_ref()))
    }

    /// For a program that has to end in the middle of what comes next.
    fn last_words(&self) -> impl FnOnce() + Send + 'static {
        let mut told = self.clone();
        move || {
            // There is nobody left to tell of a failure.
            let _ = told.record.finish(RunStatus::Interrupted);
            let _ = told.print();
        }
    }

    fn status(&self, status: RunStatus) -> Status {
        let own = self.rows.iter().filter(|row| !row.baseline);
        match status {
            RunStatus::Interrupted => Status::Interrupted,
            _ if own.clone().any(Row::failed) => Status::Failed,
            _ if own.clone().any(|row| !row.samples_us.is_empty()) => Status::Passed,
            _ => {
                let reason = |row: &Row| Some((row.kernel.clone(), row.first_problem()?.detail.clone()));
                output::nothing_done("measured", own.filter_map(reason))
            }
        }
    }
}

/// Measures shape by shape. Each is recorded before the next begins.
fn measure(
    device: &dyn TimedDevice,
    asked: &[OfShape],
    mut request: Request,
    torch: Result<RefCell<Torch>, String>,
    told: &mut Told,
    bar: &ProgressBar,
) -> anyhow::Result<RunStatus> {
    let mut done = 0;
    interrupt::on_end(told.last_words());
    for OfShape { problems, lengths } in asked {
        request.lengths = *lengths;
        let (mut rows, mut words) = (Vec::new(), Vec::new());
        for problem in problems {
            let proceed = |step: Step<'_>| {
                if let Step::Timing(share) = step {
                    bar.set_position(done * 100 + (share * 100.0) as u64);
                }
                progress::say(bar, format!("{problem}: {}", doing(&step)));
                !interrupt::asked()
            };
            let torch = torch.as_ref().map_err(String::as_str);
            let outcome = bench::measure(device, problem, &request, torch, proceed)?;
            if outcome.interrupted {
                return Ok(RunStatus::Interrupted);
            }
            rows.extend(outcome.rows);
            words.extend(outcome.words);
            done += 1;
        }
        let recorded = told.record.add(&problems[0].shape().to_string(), &rows, &words);
        told.rows.extend(rows);
        if let Err(error) = recorded {
            // What was measured is told, where it cannot be kept.
            bar.finish_and_clear();
            told.print()?;
            return Err(error.into());
        }
        interrupt::on_end(told.last_words());
    }
    Ok(RunStatus::Complete)
}

fn doing(step: &Step<'_>) -> String {
    match step {
        Step::Solving => "solving in f64".to_owned(),
        Step::Waiting => "waiting for another program that measures on this GPU".to_owned(),
        Step::Checking(kernel) => format!("checking {kernel}"),
        Step::Timing(_) => "timing".to_owned(),
    }
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

/// Each kernel against itself, on every problem it takes.
fn self_test(
    args: &Bench,
    device: &dyn TimedDevice,
    kernels: &[String],
    asked: &[OfShape],
    environment: &Environment,
    duels: usize,
) -> anyhow::Result<Status> {
    let rule =
        Rule { most_blocks: args.iters.unwrap_or(40) as usize, margin: args.margin, ..Rule::default() };
    let mut rows: Vec<SelfTest> = Vec::new();
    let mut refused = Vec::new();
    let problems: Vec<&Problem> = asked.iter().flat_map(|of_shape| &of_shape.problems).collect();
    let bar = progress::bar((problems.len() * kernels.len() * duels) as u64);
    for problem in problems {
        for kernel in kernels {
            progress::say(&bar, format!("{problem}: {kernel} against itself"));
            if let Some(why) = device.refuses(kernel, problem) {
                refused.push((kernel.clone(), why));
                continue;
            }
            let proceed = |_| {
                bar.inc(1);
                !interrupt::asked()
            };
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
    bar.finish_and_clear();
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
