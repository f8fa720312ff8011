//! `evosdpa tune`: search a kernel's tunables.

mod cluster;
mod llm;
mod subject;

use std::{
    cell::OnceCell,
    ffi::OsString,
    fmt::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use evosdpa_core::Problem;
use evosdpa_lab::{
    device::{DeviceId, TimedDevice},
    evolve::{
        Evaluation, Point, Space, Standing, gates,
        insight::{InsightSource, Prior, StaticView},
        log,
        population::{Elite, EliteShape},
        profiler::Profiler,
        proposer::Proposer,
        simulate::{self, Replay},
        space::label,
        strategy,
        tune::{self, Finished, Request},
        work::{Here, Terms, Workplace},
    },
    gate::GateResult,
    machine::Environment,
    measure::duel::Rule,
    profile,
};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::{Status, agent, args::Tune, interrupt, output, progress};
use subject::{Constraints, Subject, workers};

pub(crate) use cluster::serve;

pub(crate) fn run(args: &Tune, own: &[OsString]) -> anyhow::Result<Status> {
    match args.evaluators {
        _ if args.simulate.is_some() => replay(args),
        Some(count) => cluster::run(args, own, count as usize),
        None => alone(args),
    }
}

/// A tune on the device of this process.
fn alone(args: &Tune) -> anyhow::Result<Status> {
    let subject = Subject::find(args, 0)?;
    let mut environment = Environment::look(args.common.thread_count());
    environment.accelerator = subject.device.accelerator();
    environment.no_accelerator.clone_from(&subject.no_gpu);
    let on_cpu = subject.device.id() == DeviceId::Cpu;
    if on_cpu {
        environment.measure_peaks(args.common.forced_isa()?);
    }
    let about = About {
        space: subject.space.clone(),
        problems: subject.problems.clone(),
        device: subject.device.id(),
        device_name: subject.device_name.clone(),
        arch: subject.arch.clone(),
    };
    let folder = folder(args, &about.space);
    let bar = progress::bar(u64::from(args.evaluations));
    let say = |why: &str| progress::say(&bar, why.to_owned());
    let ahead = if on_cpu { 1 } else { 2 * workers(args) };
    interrupt::listen();
    at_the_device(args, subject, ahead, &say, |here, constraints| {
        let breaks = |point: &Point| constraints.and_then(|constraints| constraints.broken(point));
        evolve(args, here, about, &breaks, &folder, &bar, &environment)
    })
}

/// The tune's folder.
fn folder(args: &Tune, space: &Space) -> PathBuf {
    args.out.clone().unwrap_or_else(|| PathBuf::from("tunes").join(&space.kernel))
}

/// Sets up a device to work for a tune, and lets it.
fn at_the_device<T>(
    args: &Tune,
    subject: Subject,
    ahead: usize,
    say: &dyn Fn(&str),
    work: impl FnOnce(&mut Here<'_>, Option<&Constraints>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let Subject { device, space, problems, ahead: mut preparing, constraints, .. } = subject;
    let device: &dyn TimedDevice = device.as_ref();
    let without_counters = |why: &str| say(&format!("no counters: {why}"));
    let profiler = match constraints.as_ref().filter(|_| !args.no_profile) {
        Some(constraints) => {
            let session = constraints.session(device.id(), args)?;
            Some(Profiler::new(session, problems[0], folder(args, &space), &without_counters))
        }
        None => None,
    };
    let source: &dyn InsightSource = profiler.as_ref().map_or(&StaticView, |profiler| profiler);
    let gate = |label: &str| profiler.as_ref().map_or(not_profiled(), |profiler| profiler.gate(label));
    let terms = Terms {
        space,
        problems,
        seed: args.seed,
        rule: Rule { most_blocks: args.blocks as usize, ..gates::rule(None) },
        sets: args.sets.map(|sets| sets as usize),
        last_gate: (device.id() != DeviceId::Cpu).then_some(&gate),
        ahead,
    };
    let materials = OnceCell::new();
    let mut here = Here::new(device, preparing.as_mut(), source, terms, &materials)?;
    work(&mut here, constraints.as_ref())
}

/// What a tune is about.
struct About {
    space: Space,
    problems: Vec<Problem>,
    device: DeviceId,
    device_name: String,
    arch: String,
}

/// Runs a tune wherever its candidates are evaluated, and prints what it found.
fn evolve(
    args: &Tune,
    place: &mut dyn Workplace,
    about: About,
    breaks: &dyn Fn(&Point) -> Option<String>,
    folder: &Path,
    bar: &ProgressBar,
    environment: &Environment,
) -> anyhow::Result<Status> {
    let request = Request {
        folder: folder.to_owned(),
        problems: about.problems,
        space: about.space,
        breaks,
        device: about.device,
        device_name: about.device_name,
        arch: about.arch,
        strategy: args.strategy.clone().unwrap_or_else(|| strategy::NAMES[0].to_owned()),
        seed: args.seed,
        evaluations: args.evaluations as usize,
        limit: args.minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes)),
        top: args.top as usize,
        resume: args.resume,
        prior: args.prior.as_deref().map(Prior::read).transpose()?.unwrap_or_default(),
        has_profile_gate: about.device != DeviceId::Cpu,
    };
    let proposer = proposer(args, folder)?;
    let watch = |evaluation: &Evaluation| {
        bar.set_position(evaluation.number + 1);
        progress::say(bar, format!("{} {:?}", shown(&request.space.kernel, evaluation), evaluation.status));
        !interrupt::asked()
    };
    let goes_on = folder.display().to_string();
    interrupt::on_end(move || {
        output::tell(&format!(
            "stopped; all that was evaluated is in {goes_on}, and --resume goes on with it"
        ));
    });
    let outcome = tune::tune(place, proposer, &request, watch, &interrupt::asked)?;
    let _ending = interrupt::ending();
    bar.finish_and_clear();
    if args.common.json {
        output::print_json("tune", environment, &[Summary::of(&outcome, folder)])?;
    } else {
        let mut page = page(&outcome, folder);
        if let Some(why) = &environment.no_accelerator {
            page += &format!("\n{}\n", output::no_gpu(why));
        }
        output::print(&page)?;
    }
    Ok(if outcome.ended == tune::Ended::Interrupted { Status::Interrupted } else { Status::Passed })
}

/// Seconds for a program, and for a language model.
const PROPOSER_LIMITS_S: [f64; 2] = [60.0, 600.0];

fn proposer(args: &Tune, folder: &Path) -> anyhow::Result<Option<Proposer>> {
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
    fn of(outcome: &Finished, folder: &Path) -> Self {
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

fn page(outcome: &Finished, folder: &Path) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut text, outcome, folder);
    text
}

fn write_page(out: &mut String, outcome: &Finished, folder: &Path) -> std::fmt::Result {
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
    out.push_str(&elites_table(&outcome.elites.elites));
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
    if let Some(insights) = insights_table(history) {
        write!(out, "\n{insights}")?;
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

fn elites_table(elites: &[Elite]) -> String {
    let shape = |(shape, result): (&String, &EliteShape)| {
        let roof = result
            .roofline
            .map_or(String::new(), |share| format!(", {} % of the roofline", output::percent(share)));
        format!("{shape} {:.3}× ({}{roof})", result.speedup, output::time(result.p50_us))
    };
    let row = |elite: &Elite| {
        let tunables: Vec<String> =
            elite.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let source = elite.source.as_ref().map_or(String::new(), |source| format!("{source}\n"));
        vec![
            format!("#{}", elite.evaluation),
            format!("{:.3}×", elite.fitness),
            elite.profile.as_ref().map_or("–", |gate| gate.verdict.word()).to_owned(),
            format!("{source}{}", tunables.join(" ")),
            elite.shapes.iter().map(shape).collect::<Vec<_>>().join("\n"),
        ]
    };
    let header = ["elite", "fitness", "profile", "tunables", "speed-up over the default"];
    output::table(&header, 9, elites.iter().map(row).collect())
}

/// Which advice was tried, if any was.
fn insights_table(history: &[Evaluation]) -> Option<String> {
    let insights = Prior::default().with(history).insights;
    let rows: Vec<Vec<String>> = insights
        .into_iter()
        .map(|(id, record)| {
            let best = record.best_speedup.map_or("–".to_owned(), |speedup| format!("{speedup:.3}×"));
            let [tried, helped, accepted] =
                [record.tried, record.helped, record.accepted].map(|count| count.to_string());
            vec![id, tried, helped, accepted, best]
        })
        .collect();
    let header = ["insight", "tried", "helped", "accepted", "best over its parent"];
    (!rows.is_empty()).then(|| output::table(&header, 1, rows))
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
    let bar = progress::bar(names.len() as u64);
    let replays: Vec<Replay> = names
        .into_iter()
        .map(|name| {
            progress::say(&bar, name.to_owned());
            let (budget, replays) = (args.evaluations as usize, args.replays as usize);
            let replayed = simulate::replay(&contents, name, budget, replays, args.seed);
            bar.inc(1);
            replayed
        })
        .collect::<Result<_, _>>()?;
    bar.finish_and_clear();
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
