//! `evosdpa tune`: search a kernel's tunables.

mod llm;

use std::{fmt::Write, path::PathBuf, time::Duration};

use anyhow::Context;
use evosdpa::choose;
use evosdpa_core::{DType, Problem};
use evosdpa_cuda::worker::CompilePool;
use evosdpa_kernels::{ProblemFacts, Registry, Target};
use evosdpa_lab::{
    device::{Cpu, Device, DeviceId, TimedDevice},
    evolve::{
        Evaluation, Point, Space, Standing,
        ahead::{Ahead, Compiling, Nothing},
        gates,
        insight::{InsightSource, Prior, StaticView},
        log,
        profiler::Profiler,
        proposer::Proposer,
        simulate::{self, Replay},
        space::label,
        strategy,
        tune::{self, Finished, Request},
    },
    gate::GateResult,
    machine::Environment,
    measure::duel::Rule,
    profile::{self, Ncu, Session},
};
use serde::Serialize;

use crate::{
    Status, agent,
    args::{Place, Tune},
    interrupt, output, progress,
};

/// Seconds one compilation may take.
const COMPILE_LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn run(args: &Tune) -> anyhow::Result<Status> {
    if args.simulate.is_some() {
        return replay(args);
    }
    let subject = Subject::find(args)?;
    let Subject { device, no_gpu, space, problems, mut ahead, constraints, device_name, arch } = subject;
    let mut environment = Environment::look(args.common.thread_count());
    environment.accelerator = device.accelerator();
    environment.no_accelerator = no_gpu;
    let on_cpu = device.id() == DeviceId::Cpu;
    if on_cpu {
        environment.measure_peaks(args.common.forced_isa()?);
    }
    let prior = args.prior.as_deref().map(Prior::read).transpose()?.unwrap_or_default();
    let folder = args.out.clone().unwrap_or_else(|| PathBuf::from("tunes").join(&space.kernel));
    let breaks = |point: &Point| constraints.as_ref().and_then(|constraints| constraints.broken(point));
    let bar = progress::bar(u64::from(args.evaluations));
    let without_counters = |why: &str| progress::say(&bar, format!("no counters: {why}"));
    let profiler = match constraints.as_ref().filter(|_| !args.no_profile) {
        Some(constraints) => {
            let session = constraints.session(args)?;
            Some(Profiler::new(session, problems[0], folder.clone(), &without_counters))
        }
        None => None,
    };
    let source: &dyn InsightSource = profiler.as_ref().map_or(&StaticView, |profiler| profiler);
    let gate = |label: &str| profiler.as_ref().map_or(not_profiled(), |profiler| profiler.gate(label));
    let request = Request {
        folder: folder.clone(),
        problems,
        space,
        breaks: &breaks,
        device_name,
        arch,
        strategy: args.strategy.clone().unwrap_or_else(|| strategy::NAMES[0].to_owned()),
        seed: args.seed,
        evaluations: args.evaluations as usize,
        limit: args.minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes)),
        top: args.top as usize,
        resume: args.resume,
        ahead: if on_cpu { 1 } else { 2 * workers(args) },
        rule: Rule { most_blocks: args.blocks as usize, ..gates::rule(None) },
        prior,
        sets: args.sets.map(|sets| sets as usize),
        last_gate: (!on_cpu).then_some(&gate),
    };
    let proposer = proposer(args, &folder)?;
    interrupt::listen();
    let watch = |evaluation: &Evaluation| {
        bar.set_position(evaluation.number + 1);
        progress::say(&bar, format!("{} {:?}", shown(&request.space.kernel, evaluation), evaluation.status));
        !interrupt::asked()
    };
    let goes_on = folder.display().to_string();
    interrupt::on_end(move || {
        anstream::eprintln!("stopped; all that was evaluated is in {goes_on}, and --resume goes on with it");
    });
    let outcome =
        tune::tune(device.as_ref(), ahead.as_mut(), source, proposer, &request, watch, &interrupt::asked)?;
    let _ending = interrupt::ending();
    bar.finish_and_clear();
    if args.common.json {
        output::print_json("tune", &environment, &[Summary::of(&outcome, &folder)])?;
    } else {
        let mut page = page(&outcome, &folder);
        if let Some(why) = &environment.no_accelerator {
            page += &format!("\n{}\n", output::no_gpu(why));
        }
        output::print(&page)?;
    }
    Ok(if outcome.ended == tune::Ended::Interrupted { Status::Interrupted } else { Status::Passed })
}

/// Seconds for a program, and for a language model.
const PROPOSER_LIMITS_S: [f64; 2] = [60.0, 600.0];

fn proposer(args: &Tune, folder: &std::path::Path) -> anyhow::Result<Option<Proposer>> {
    let [of_program, of_model] = PROPOSER_LIMITS_S.map(|default| args.proposer_timeout.unwrap_or(default));
    if args.llm.is_asked_for() {
        let command = agent::proposer(args.llm.arguments(folder, of_model))?;
        return Ok(Some(Proposer::program(command, Duration::from_secs_f64(of_model))));
    }
    let limit = Duration::from_secs_f64(of_program);
    Ok(args.proposer.as_deref().map(|command| Proposer::new(command, limit)))
}

/// The last gate where profiles are not wanted.
fn not_profiled() -> GateResult {
    GateResult::unavailable(profile::GATE, "--no-profile")
}

fn workers(args: &Tune) -> usize {
    let cores = || std::thread::available_parallelism().map_or(2, |n| n.get());
    args.workers.map_or_else(cores, |workers| workers as usize)
}

/// What is tuned.
struct Subject {
    device: Box<dyn TimedDevice>,
    /// Why it is not a GPU, where the choice was left open.
    no_gpu: Option<String>,
    space: Space,
    problems: Vec<Problem>,
    ahead: Box<dyn Ahead>,
    constraints: Option<Constraints>,
    device_name: String,
    arch: String,
}

/// A CUDA kernel's constraints on every problem.
struct Constraints {
    registry: Registry,
    kernel: String,
    target: Target,
    facts: Vec<ProblemFacts>,
}

impl Constraints {
    fn broken(&self, point: &Point) -> Option<String> {
        let kernel = self.registry.kernel(&self.kernel).ok()?;
        let chosen = point.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        let broken = |facts| {
            choose::variant(kernel, facts, &self.target, &chosen).err().map(|error| error.to_string())
        };
        self.facts.iter().find_map(broken)
    }

    /// What the same kernels are profiled with.
    fn session(&self, args: &Tune) -> anyhow::Result<Session> {
        let device = match args.common.device {
            Place::On(device) => device,
            Place::Auto | Place::None => DeviceId::Cuda(0),
        };
        let limit = Duration::from_secs_f64(args.profile_timeout);
        let ncu = Ncu::find(args.ncu.as_deref());
        let session = Session::open(self.registry.clone(), self.target, device, ncu, limit)?;
        Ok(session.with_kernel_path(&args.common.kernel_path))
    }
}

impl Subject {
    fn find(args: &Tune) -> anyhow::Result<Self> {
        let mut no_gpu = None;
        let cuda = match args.common.device {
            Place::On(DeviceId::Cpu) => None,
            Place::On(DeviceId::Sim) => {
                anyhow::bail!("the simulator has no clock: use --device cuda or cpu to tune")
            }
            // A CPU kernel is tuned on the CPU, GPU or not.
            Place::Auto if args.kernel.as_deref() == Some("cpu_flash") => None,
            Place::Auto => args.common.open_cuda(0).map_err(|why| no_gpu = Some(format!("{why:#}"))).ok(),
            Place::On(DeviceId::Cuda(ordinal)) => Some(args.common.open_cuda(ordinal)?),
            Place::None => {
                return Err(super::refused_device(args.common.device, &["auto", "cpu", "cuda", "cuda:N"]));
            }
        };
        let problems = |dtype: DType| {
            let of = |shape| Problem::new(shape, args.dtype.unwrap_or(dtype));
            args.shapes.iter().map(|shape| of(*shape)).collect::<Result<Vec<_>, _>>().context("--shapes")
        };
        let Some(cuda) = cuda else {
            let name = args.kernel.as_deref().unwrap_or("cpu_flash");
            let isa = args.common.forced_isa()?;
            let cpu = Cpu { threads: args.common.thread_count(), isa };
            evosdpa_lab::find_kernel(&cpu, name)?;
            anyhow::ensure!(name == "cpu_flash", "{name} has nothing to tune on a CPU; cpu_flash has");
            let environment = Environment::look(args.common.thread_count());
            let problems = problems(DType::F32)?;
            return Ok(Self {
                space: Space::of_cpu(&problems[0], environment.threads)?,
                device: Box::new(cpu),
                no_gpu,
                problems,
                ahead: Box::new(Nothing),
                constraints: None,
                device_name: environment.cpu,
                arch: isa.unwrap_or_else(evosdpa::Isa::best).name().to_owned(),
            });
        };
        let Some(name) = &args.kernel else {
            let names: Vec<String> = cuda.kernels().into_iter().map(|kernel| kernel.name).collect();
            anyhow::bail!("name the kernel to tune with --kernel: {}", names.join(", "));
        };
        let registry = cuda.registry();
        let kernel = registry.kernel(name)?;
        let first = kernel.manifest.dtypes.first().copied();
        let problems = problems(first.unwrap_or(DType::BF16))?;
        let target = *cuda.target();
        let space = Space::of_kernel(kernel, &problems[0], &target)?;
        let pool = CompilePool::new(workers(args), COMPILE_LIMIT)?;
        let ahead = Compiling::new(registry.clone(), target, &problems, pool, !args.no_sim)?;
        let facts = problems.iter().map(ProblemFacts::try_from).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            space,
            problems,
            ahead: Box::new(ahead),
            constraints: Some(Constraints {
                registry: registry.clone(),
                kernel: name.clone(),
                target,
                facts,
            }),
            device_name: cuda.handle().info().name.clone(),
            arch: target.arch.name().to_owned(),
            device: Box::new(cuda),
            no_gpu: None,
        })
    }
}

/// What `--json` prints of a tune; the log has the rest.
#[derive(Serialize)]
struct Summary {
    folder: String,
    kernel: String,
    problems: Vec<String>,
    evaluations: usize,
    new: usize,
    ended: String,
    rejected: usize,
    elites: evosdpa_lab::evolve::population::EliteFile,
}

impl Summary {
    fn of(outcome: &Finished, folder: &std::path::Path) -> Self {
        Self {
            folder: folder.display().to_string(),
            kernel: outcome.header.space.kernel.clone(),
            problems: outcome.header.problems.clone(),
            evaluations: outcome.history.len(),
            new: outcome.new,
            ended: outcome.ended.to_string(),
            rejected: outcome.history.iter().filter(|e| e.status == Standing::Rejected).count(),
            elites: outcome.elites.clone(),
        }
    }
}

fn shown(kernel: &str, evaluation: &Evaluation) -> String {
    label(evaluation.kernel.as_deref().unwrap_or(kernel), &evaluation.point)
}

fn page(outcome: &Finished, folder: &std::path::Path) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut text, outcome, folder);
    text
}

fn write_page(out: &mut String, outcome: &Finished, folder: &std::path::Path) -> std::fmt::Result {
    let history = &outcome.history;
    let count = |status: Standing| history.iter().filter(|evaluation| evaluation.status == status).count();
    writeln!(
        out,
        "{} on {}: {} evaluations ({} of them now), {} rejected, {} out, {} kept, {} accepted, {} promoted; {}\n",
        outcome.header.space.kernel,
        outcome.header.problems.join(", "),
        history.len(),
        outcome.new,
        count(Standing::Rejected),
        count(Standing::Out),
        count(Standing::Kept),
        count(Standing::Accepted),
        count(Standing::Promoted),
        outcome.ended,
    )?;
    let rows = outcome
        .elites
        .elites
        .iter()
        .map(|elite| {
            let shapes: Vec<String> = elite
                .shapes
                .iter()
                .map(|(shape, result)| {
                    format!("{shape} {:.3}× ({})", result.speedup, output::time(result.p50_us))
                })
                .collect();
            let tunables: Vec<String> =
                elite.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let source = elite.source.as_ref().map_or(String::new(), |source| format!("{source}\n"));
            vec![
                format!("#{}", elite.evaluation),
                format!("{:.3}×", elite.fitness),
                elite.profile.as_ref().map_or("–", |gate| gate.verdict.word()).to_owned(),
                format!("{source}{}", tunables.join(" ")),
                shapes.join("\n"),
            ]
        })
        .collect();
    let header = ["elite", "fitness", "profile", "tunables", "speed-up over the default"];
    out.push_str(&output::table(&header, 9, rows));
    let profiles = outcome.elites.elites.iter().filter_map(|elite| elite.profile.as_ref());
    if let Some(gate) = profiles.into_iter().find(|gate| gate.verdict.is_unavailable()) {
        writeln!(out, "\nthe profile gate is {}", gate.verdict)?;
    }
    if let Some(confirmation) = &outcome.elites.confirmation {
        let word = if confirmation.confirmed { "confirmed" } else { "NOT confirmed" };
        writeln!(
            out,
            "\n#{} measured again on other inputs: {:.3}×, {word}",
            confirmation.number, confirmation.fitness
        )?;
    }
    let insights = Prior::default().with(history).insights;
    if !insights.is_empty() {
        let rows = insights
            .into_iter()
            .map(|(id, record)| {
                let best = record.best_speedup.map_or("–".to_owned(), |speedup| format!("{speedup:.3}×"));
                let [tried, helped, accepted] =
                    [record.tried, record.helped, record.accepted].map(|count| count.to_string());
                vec![id, tried, helped, accepted, best]
            })
            .collect();
        let header = ["insight", "tried", "helped", "accepted", "best over its parent"];
        write!(out, "\n{}", output::table(&header, 1, rows))?;
    }
    if let Some(operators) = llm::table(history) {
        write!(out, "\n{operators}")?;
    }
    if let Some(spent) = llm::spent(folder) {
        writeln!(out, "\n{spent}")?;
    }
    for evaluation in history.iter().filter(|evaluation| evaluation.status == Standing::Rejected).take(5) {
        let failed = evaluation.gates.iter().find(|gate| gate.verdict.is_fail());
        let why: String = failed.map_or(String::new(), |gate| format!("{} {}", gate.gate, gate.verdict));
        let first = why.lines().next().unwrap_or_default();
        writeln!(out, "\n#{} rejected: {first}", evaluation.number)?;
    }
    writeln!(out, "\nelite.json, log.jsonl and insights.json are in {}", folder.display())
}

/// `--simulate`.
fn replay(args: &Tune) -> anyhow::Result<Status> {
    // Only called with a log.
    let Some(path) = &args.simulate else { return Ok(Status::Passed) };
    let contents = log::read(path)?;
    let names: Vec<&str> = match &args.strategy {
        Some(name) => vec![name.as_str()],
        None => strategy::NAMES.to_vec(),
    };
    let replays: Vec<Replay> = names
        .into_iter()
        .map(|name| {
            simulate::replay(&contents, name, args.evaluations as usize, args.replays as usize, args.seed)
        })
        .collect::<Result<_, _>>()?;
    if args.common.json {
        output::print_json("tune-simulate", &Environment::look(None), &replays)?;
        return Ok(Status::Passed);
    }
    let rows = replays
        .iter()
        .map(|replay| {
            let [least, middle, most] = replay.at_the_end;
            vec![
                replay.strategy.clone(),
                replay.budget.to_string(),
                format!("{middle:.3}×"),
                format!("{least:.3}–{most:.3}"),
                replay.to_within_1_percent.map_or("–".to_owned(), |count| format!("{count:.0}")),
                format!("{:.0} %", 100.0 * replay.reached),
            ]
        })
        .collect();
    let mut text = format!(
        "{} evaluations of {}, the best {:.3}×; {} replays of each strategy\n\n",
        contents.evaluations.len(),
        contents.header.space.kernel,
        replays.first().map_or(1.0, |replay| replay.best_of_log),
        replays.first().map_or(0, |replay| replay.replays),
    );
    let header = ["strategy", "budget", "best (median)", "best (range)", "to within 1 %", "got there"];
    text.push_str(&output::table(&header, 1, rows));
    output::print(&text)?;
    Ok(Status::Passed)
}
