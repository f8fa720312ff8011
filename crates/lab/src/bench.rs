//! One problem through the gates and then the clock: every kernel and baseline side by side.

use std::{
    cell::RefCell,
    time::{Duration, Instant},
};

use evosdpa_core::Problem;
use evosdpa_oracle::{
    Case,
    inputs::{Inputs, LengthFamily},
};

use crate::{
    Error, ErrorKind,
    baseline::torch::{self, Torch},
    device::{Device, DeviceId, DeviceLock, TimedDevice, Timing},
    gate::{GateResult, Verdict, correctness},
    machine,
    measure::{
        Calls, Reading,
        audit::Audited,
        compare::Comparison,
        duel::{Arm, Rule, duel},
        floor::{Floor, unless_the_machine_failed},
        interleave::{Contestant, Plan, SETTLE, Times, interleave},
        samples::median,
        work::Work,
    },
    record::Row,
};
use evosdpa_oracle::rng::Rng;

/// What is measured of every problem.
#[derive(Clone, Debug)]
pub struct Request {
    /// Kernels to measure, the one that others are compared with first.
    pub kernels: Vec<String>,
    /// Baselines to measure beside them.
    pub baselines: Vec<torch::Mode>,
    /// Timed calls per contestant.
    pub iters: usize,
    /// Untimed calls before.
    pub warmup: usize,
    /// Seed of the inputs.
    pub seed: u64,
    /// How long sequences are, where their lengths are data.
    pub lengths: LengthFamily,
    /// Time for one problem.
    pub budget: Option<Duration>,
    /// How calls are timed.
    pub timing: Timing,
    /// Differences below this share do not matter.
    pub margin: f64,
    /// What the moments of samples are counted from: when the run began.
    pub epoch: Instant,
}

impl Request {
    /// What rows call a problem: its lengths are named where they are not all the longest.
    fn named(&self, problem: &Problem) -> String {
        match self.lengths {
            LengthFamily::Equal => problem.to_string(),
            lengths => format!("{problem}, {lengths} lengths"),
        }
    }
}

/// What a problem gave.
pub struct Measured {
    /// A row per kernel and baseline.
    pub rows: Vec<Row>,
    /// The verdict in plain words.
    pub words: Vec<String>,
    /// Whether measuring was cut short by `proceed`.
    pub interrupted: bool,
}

/// A step that `proceed` hears of.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// Inputs are drawn and the oracle is at work.
    Solving,
    /// Another process measures on the device.
    Waiting,
    /// A kernel is being checked.
    Checking(&'a str),
    /// Contestants are being timed; how much is done, from 0 to 1.
    Timing(f64),
}

/// The gate that timed calls pass.
pub const AUDIT: &str = "audit";
/// The gate that holds times against what is possible.
pub const FLOOR: &str = "floor";

/// The gate that a baseline passes by being installed.
pub const AVAILABLE: &str = "available";

/// The gate that a row passes by being timed between foreign kernels.
const BETWEEN: &str = "between";

/// Problems that take less are also timed between foreign kernels: there the launch shows.
const BETWEEN_BELOW_US: f64 = 100.0;

/// The gate that a kernel passes by being timed.
const PERFORMANCE: &str = "performance";

/// Takes every kernel and baseline through the gates and times those that pass. `torch` is PyTorch or the reason it is not
/// there. `proceed` is told of each step and stops the measurement by answering no.
pub fn measure(
    device: &dyn TimedDevice,
    problem: &Problem,
    request: &Request,
    torch: Result<&RefCell<Torch>, &str>,
    mut proceed: impl FnMut(Step<'_>) -> bool,
) -> Result<Measured, Error> {
    let sets = device.input_sets(problem);
    machine::refuse_what_does_not_fit(problem, 2 * sets)?;
    let mut interrupted = !proceed(Step::Solving);
    // The second is for the audits, and is not known beforehand.
    let audit_seed = Rng::entropy();
    let cases = [request.seed, audit_seed].map(|seed| Case::timed(*problem, seed, request.lengths));
    let work = Work::with_lengths(problem, request.lengths);
    let hard = Case::adversarial(*problem, request.seed);
    let inputs: Vec<Inputs> = (0..sets).map(|set| cases[set % cases.len()].inputs.clone()).collect();
    // From here on the device is busy: others may draw and solve meanwhile.
    let Some(_lock) = DeviceLock::wait(device, || proceed(Step::Waiting))? else {
        return Ok(Measured { rows: Vec::new(), words: Vec::new(), interrupted: true });
    };

    let mut entries = Vec::new();
    for kernel in &request.kernels {
        interrupted = interrupted || !proceed(Step::Checking(kernel));
        let mut row = Row::new(kernel, false, device.id(), &request.named(problem));
        row.timing = request.timing.to_string();
        row.gates.push(correctness_gate(device, kernel, &cases[0])?);
        if let (Verdict::Pass, Some(hard)) = (&row.gates[0].verdict, &hard) {
            let mut gate = correctness_gate(device, kernel, hard)?;
            if !gate.verdict.is_pass() {
                gate.detail = format!("on {} inputs: {}", hard.family, gate.detail);
                row.gates[0] = gate;
            }
        }
        let contestant = match row.gates[0].verdict {
            Verdict::Pass => {
                let seed = Rng::of_series(audit_seed, entries.len() as u64).below(usize::MAX >> 1) as u64;
                let loaded = Audited::load(device, kernel, problem, &inputs, &cases, seed)
                    .and_then(|mut audited| audited.loaded.set_timing(request.timing).map(|()| audited));
                match loaded {
                    Ok(audited) => {
                        row.variant = audited.loaded.variant();
                        Some(Timed::Kernel(Box::new(audited)))
                    }
                    Err(error) => {
                        row.gates.push(performance_gate(error)?);
                        None
                    }
                }
            }
            _ => None,
        };
        entries.push(Entry { row, contestant });
    }
    let torch = if matches!(request.timing, Timing::Graph | Timing::Between) {
        torch
    } else {
        Err("baselines are timed by graph replay over rotated inputs only: use --timing graph or between")
    };
    entries.extend(baselines(device, &cases[0], &inputs, request, torch));

    let plan = Plan {
        iters: request.iters,
        warmup: request.warmup,
        sets,
        budget: request.budget,
        seed: audit_seed.rotate_left(17),
        epoch: request.epoch,
    };
    let times = if interrupted {
        Vec::new()
    } else {
        time_all(&mut entries, &plan, |done| {
            interrupted |= !proceed(Step::Timing(done * 0.7));
            !interrupted
        })
    };
    let floor = Floor::look(device, problem)?;
    take_in(&mut entries, times, (problem, work), (device, &floor))?;
    let overhead_us = unless_the_machine_failed(device.clock_overhead_us())?;
    for entry in entries.iter_mut().filter(|entry| !entry.row.baseline) {
        entry.row.clock_overhead_us = overhead_us;
    }
    let mut duels = 0.0;
    compare(device, &mut entries, request, audit_seed, || {
        duels += 1.0;
        interrupted |= !proceed(Step::Timing(1.0 - 0.3 / duels));
        !interrupted
    });
    if request.timing == Timing::Graph && device.id() != DeviceId::Cpu {
        time_between(&mut entries, &plan, || {
            interrupted |= !proceed(Step::Timing(1.0));
            !interrupted
        });
    }
    let rows: Vec<Row> = entries.into_iter().map(|entry| entry.row).collect();
    let words = rows.iter().filter(|row| !row.baseline).flat_map(words).collect();
    Ok(Measured { rows, words, interrupted })
}

/// What an error while a kernel is made ready for timing comes to. A caller's error stays one.
fn performance_gate(error: Error) -> Result<GateResult, Error> {
    match error.kind() {
        ErrorKind::Kernel => Ok(GateResult::fail(PERFORMANCE, error.to_string())),
        ErrorKind::Refused | ErrorKind::Machine => {
            Ok(GateResult::unavailable(PERFORMANCE, error.to_string()))
        }
        ErrorKind::Caller => Err(error),
    }
}

/// A row and, while it is in the race, what runs for it.
struct Entry<'a> {
    row: Row,
    contestant: Option<Timed<'a>>,
}

enum Timed<'a> {
    Kernel(Box<Audited<'a>>),
    Baseline(torch::Timed<'a>),
}

impl Contestant for Timed<'_> {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        match self {
            Self::Kernel(kernel) => kernel.loaded.time_us(set),
            Self::Baseline(baseline) => baseline.time_us(set),
        }
    }

    fn audit(&mut self) -> Result<(), Error> {
        match self {
            Self::Kernel(kernel) => kernel.audit(),
            Self::Baseline(_) => Ok(()),
        }
    }

    fn final_audit(&mut self) -> Result<(), Error> {
        match self {
            Self::Kernel(kernel) => kernel.final_audit(),
            Self::Baseline(_) => Ok(()),
        }
    }
}

impl Timed<'_> {
    /// Chooses how calls are timed from now on; answers whether they can be timed so.
    fn set_timing(&mut self, timing: Timing) -> Result<bool, Error> {
        match self {
            Self::Kernel(kernel) => kernel.loaded.set_timing(timing).map(|()| true),
            Self::Baseline(baseline) => {
                baseline.set_timing(timing);
                Ok(baseline.has_graphs())
            }
        }
    }
}

/// A contestant in a duel.
struct InDuel<'a, 'b> {
    timed: &'a mut Timed<'b>,
    calls: Calls,
    sets: usize,
}

impl<'a, 'b> InDuel<'a, 'b> {
    fn new(timed: &'a mut Timed<'b>, p50_us: f64, sets: usize, on_cpu: bool) -> Self {
        let calls = if on_cpu { Calls::lasting(p50_us) } else { Calls::of_a_gpu() };
        Self { timed, calls, sets }
    }
}

impl Arm for InDuel<'_, '_> {
    fn read(&mut self) -> Result<Reading, Error> {
        let Self { timed, calls, sets } = self;
        calls.read(*sets, |set| match timed {
            Timed::Kernel(kernel) => kernel.loaded.read(set),
            Timed::Baseline(baseline) => Ok(Reading { time_us: baseline.time_us(set)?, clock_ghz: None }),
        })
    }

    fn relocate(&mut self) -> Result<(), Error> {
        match &mut self.timed {
            Timed::Kernel(kernel) => kernel.loaded.relocate(),
            Timed::Baseline(_) => Ok(()),
        }
    }

    fn audit(&mut self) -> Result<(), Error> {
        Contestant::audit(self.timed)
    }
}

/// The baselines, each with a gate of its own: they compute the same question and are held to what they promise.
fn baselines<'a>(
    device: &dyn TimedDevice,
    case: &Case,
    inputs: &[Inputs],
    request: &Request,
    torch: Result<&'a RefCell<Torch>, &str>,
) -> Vec<Entry<'a>> {
    let id = device.id();
    let load = |torch: &'a RefCell<Torch>| {
        torch.borrow_mut().load(id, &case.problem, inputs).map(|()| torch).map_err(|error| error.to_string())
    };
    let loaded = torch.map_err(str::to_owned).and_then(load);
    let entry = |mode: &torch::Mode| {
        let mut row = Row::new(mode.name, true, id, &request.named(&case.problem));
        let gate = match &loaded {
            Ok(torch) => baseline_gate(&mut torch.borrow_mut(), *mode, case),
            Err(why) => GateResult::unavailable(AVAILABLE, why.as_str()),
        };
        let in_the_race = gate.verdict.is_pass();
        row.gates.push(gate);
        let timed = loaded.as_ref().ok().filter(|_| in_the_race).map(|torch| {
            row.timing = request.timing.to_string();
            torch::Timed::new(torch, *mode, request.timing)
        });
        if timed.as_ref().is_some_and(|timed| request.timing == Timing::Between && !timed.has_graphs()) {
            row.gates
                .push(GateResult::unavailable(PERFORMANCE, "it is not timed by graphs: use --timing graph"));
            return Entry { row, contestant: None };
        }
        Entry { row, contestant: timed.map(Timed::Baseline) }
    };
    // Those for problems of another kind say so only where nothing else is asked for.
    let any_suits = request.baselines.iter().any(|mode| mode.suits(&case.problem));
    request.baselines.iter().filter(|mode| !any_suits || mode.suits(&case.problem)).map(entry).collect()
}

fn baseline_gate(torch: &mut Torch, mode: torch::Mode, case: &Case) -> GateResult {
    if let Err(error) = torch.find(mode) {
        return GateResult::unavailable(AVAILABLE, error.to_string());
    }
    match torch.output(mode, &case.problem).map(|output| case.judge(&output.view(), None)) {
        Err(error) => GateResult::unavailable("correctness", error.to_string()),
        // The summary still names the rules of ours that a baseline does not keep.
        Ok(judgement) if judgement.passed_as_a_baseline() => {
            GateResult::pass("correctness", judgement.summary())
        }
        Ok(judgement) => GateResult::fail("correctness", judgement.summary()),
    }
}

fn correctness_gate(device: &dyn Device, kernel: &str, case: &Case) -> Result<GateResult, Error> {
    let result = correctness::check(device, kernel, case, None)?;
    Ok(GateResult { gate: "correctness".to_owned(), verdict: result.verdict, detail: result.detail })
}

/// Times what is in the race, in the order of `entries`.
fn time_all(
    entries: &mut [Entry<'_>],
    plan: &Plan,
    proceed: impl FnMut(f64) -> bool,
) -> Vec<Result<Times, Error>> {
    let mut contestants: Vec<&mut dyn Contestant> = entries
        .iter_mut()
        .filter_map(|entry| entry.contestant.as_mut().map(|timed| timed as &mut dyn Contestant))
        .collect();
    interleave(&mut contestants, plan, proceed)
}

/// Times short problems between foreign kernels as well, in turns as before. An audit that fails takes all times away; other
/// failures cost this figure alone.
fn time_between(entries: &mut [Entry<'_>], plan: &Plan, mut proceed: impl FnMut() -> bool) {
    let mut raced = Vec::new();
    for (i, Entry { row, contestant }) in entries.iter_mut().enumerate() {
        let Some(timed) = contestant.as_mut().filter(|_| row.p50_us.is_some_and(|us| us < BETWEEN_BELOW_US))
        else {
            continue;
        };
        match timed.set_timing(Timing::Between) {
            Ok(true) => raced.push(i),
            Ok(false) => *contestant = None,
            Err(error) => row.gates.push(GateResult::unavailable(BETWEEN, error.to_string())),
        }
    }
    for i in 0..entries.len() {
        if !raced.contains(&i) {
            entries[i].contestant = None;
        }
    }
    for (i, times) in raced.into_iter().zip(time_all(entries, plan, |_| proceed())) {
        let row = &mut entries[i].row;
        match times {
            Ok(times) => row.measured_between(&times.all()),
            Err(error @ Error::Caught { .. }) => {
                row.gates.push(GateResult::fail(AUDIT, error.to_string()));
                row.forget_times();
            }
            Err(error) => row.gates.push(GateResult::unavailable(BETWEEN, error.to_string())),
        }
    }
}

/// Puts the times into their rows. What an audit caught, or what is faster than possible, is out of the race.
fn take_in(
    entries: &mut [Entry<'_>],
    times: Vec<Result<Times, Error>>,
    (problem, work): (&Problem, Work),
    (device, floor): (&dyn TimedDevice, &Floor),
) -> Result<(), Error> {
    let mut times = times.into_iter();
    let roof = device.roof(problem);
    for Entry { row, contestant } in entries {
        let Some(timed) = contestant else { continue };
        let audits = match timed {
            Timed::Kernel(kernel) => Some(kernel.auditor.audits()),
            Timed::Baseline(_) => None,
        };
        match times.next() {
            Some(Ok(times)) => {
                row.measured(&times, work, roof.as_ref());
                if let Some(audits) = audits.filter(|_| !row.samples_us.is_empty()) {
                    let detail = format!("{audits} audits between timed calls found nothing");
                    row.gates.push(GateResult::pass(AUDIT, detail));
                    let gate = floor_gate(row, (problem, work), device, floor)?;
                    row.gates.extend(gate);
                }
            }
            Some(Err(error @ Error::Caught { .. })) => {
                row.gates.push(GateResult::fail(AUDIT, error.to_string()))
            }
            Some(Err(error)) if error.kind() == ErrorKind::Kernel => {
                row.gates.push(GateResult::fail(PERFORMANCE, error.to_string()))
            }
            Some(Err(error)) => row.gates.push(GateResult::unavailable(PERFORMANCE, error.to_string())),
            None => {}
        }
        if row.failed() || row.samples_us.is_empty() {
            row.forget_times();
            *contestant = None;
        }
    }
    Ok(())
}

/// No sample may be shorter than what bytes and operations take at the device's best.
fn floor_gate(
    row: &mut Row,
    (problem, work): (&Problem, Work),
    device: &dyn TimedDevice,
    floor: &Floor,
) -> Result<Option<GateResult>, Error> {
    let least_us = row.samples_us.iter().copied().fold(f64::INFINITY, f64::min);
    let finding = floor.refuses(device, problem, work, least_us)?;
    row.floor_us = floor.time_us(work);
    let (Some(floor_us), source) = (row.floor_us, floor.source()) else { return Ok(None) };
    Ok(Some(match finding {
        None => GateResult::pass(
            FLOOR,
            format!("at least {least_us:.3} µs; possible are {floor_us:.3} µs ({source})"),
        ),
        Some(finding) => GateResult::fail(FLOOR, format!("{finding} ({source})")),
    }))
}

/// Each kernel against the fastest baseline and against the first kernel, in duels.
fn compare(
    device: &dyn TimedDevice,
    entries: &mut [Entry<'_>],
    request: &Request,
    seed: u64,
    mut proceed: impl FnMut() -> bool,
) {
    let p50 = |entry: &Entry<'_>| entry.contestant.as_ref().and(entry.row.p50_us);
    let fastest_baseline =
        (0..entries.len()).filter(|&i| entries[i].row.baseline && p50(&entries[i]).is_some()).min_by(
            |&a, &b| p50(&entries[a]).unwrap_or(f64::MAX).total_cmp(&p50(&entries[b]).unwrap_or(f64::MAX)),
        );
    let mut pairs = Vec::new();
    for i in 0..entries.len() {
        let others = [fastest_baseline, Some(0).filter(|_| i != 0)].into_iter().flatten();
        pairs.extend(others.filter(|_| !entries[i].row.baseline).map(|j| (i, j)));
    }
    // The other baselines are compared by the rounds that all were timed in.
    for i in 0..entries.len() {
        for j in 0..entries.len() {
            if !entries[j].row.baseline || Some(j) == fastest_baseline {
                continue;
            }
            let rounds = [i, j].map(|entry| by_round(&entries[entry].row));
            let compared = Comparison::paired(&rounds[0], &rounds[1], request.margin)
                .filter(|_| !entries[i].row.baseline);
            if let Some(comparison) = compared {
                let name = entries[j].row.kernel.clone();
                entries[i].row.speedup.insert(name, comparison);
            }
        }
    }
    let on_cpu = device.id() == DeviceId::Cpu;
    let share = request.budget.map(|budget| budget / (2 * pairs.len().max(1)) as u32);
    for (number, (i, j)) in pairs.into_iter().enumerate() {
        let (Some(own_us), Some(other_us)) = (p50(&entries[i]), p50(&entries[j])) else { continue };
        let sets = if let Timed::Kernel(kernel) =
            entries[i].contestant.as_ref().unwrap_or_else(|| unreachable!("p50 asked"))
        {
            kernel.auditor.sets()
        } else {
            1
        };
        let rule = Rule {
            most_blocks: request.iters.clamp(4, 120),
            margin: request.margin,
            limit: share,
            settle: if entries[j].row.baseline && on_cpu { SETTLE } else { Duration::ZERO },
            ..Rule::default()
        };
        let seed = Rng::of_series(seed, number as u64).below(usize::MAX >> 1) as u64;
        let Some((candidate, other)) = two(entries, i, j) else { continue };
        let outcome = {
            let mut candidate = InDuel::new(candidate, own_us, sets, on_cpu);
            let mut other = InDuel::new(other, other_us, sets, on_cpu);
            duel(&mut candidate, &mut other, &rule, seed, &mut proceed)
        };
        match outcome {
            Ok(Some(duel)) => {
                let clocks: Vec<f64> = duel
                    .blocks
                    .iter()
                    .flat_map(|block| block.readings.iter().filter_map(|r| r.clock_ghz))
                    .collect();
                let name = entries[j].row.kernel.clone();
                let row = &mut entries[i].row;
                if !clocks.is_empty() {
                    row.clock_ghz = Some(median(&clocks));
                }
                row.speedup.insert(name, duel.comparison().beside_medians(other_us / own_us));
            }
            Ok(None) => {}
            Err(error @ Error::Caught { .. }) => {
                let caught = if is_about(&error, &entries[j].row.kernel) { j } else { i };
                let Entry { row, contestant } = &mut entries[caught];
                row.gates.push(GateResult::fail(AUDIT, error.to_string()));
                row.forget_times();
                *contestant = None;
            }
            Err(error) => {
                entries[i].row.gates.push(GateResult::unavailable("comparison", error.to_string()));
            }
        }
    }
}

/// Whether it was this kernel that was caught.
fn is_about(error: &Error, name: &str) -> bool {
    matches!(error, Error::Caught { kernel, .. } if kernel == name)
}

fn by_round(row: &Row) -> Vec<Vec<f64>> {
    let mut rest = row.samples_us.as_slice();
    row.samples_per_round
        .iter()
        .map(|&count| {
            let (round, after) = rest.split_at(count.min(rest.len()));
            rest = after;
            round.to_vec()
        })
        .collect()
}

/// Two different contestants that are both in the race.
fn two<'a, 'b>(
    entries: &'a mut [Entry<'b>],
    i: usize,
    j: usize,
) -> Option<(&'a mut Timed<'b>, &'a mut Timed<'b>)> {
    let [a, b] = entries.get_disjoint_mut([i, j]).ok()?;
    Some((a.contestant.as_mut()?, b.contestant.as_mut()?))
}

/// A kernel's result in plain words: what stopped it, or how it compares with the fastest baseline and with the first kernel.
fn words(row: &Row) -> Vec<String> {
    if let Some(gate) = row.first_problem() {
        return vec![format!("{} on {}: {} {}", row.shown(), row.problem, gate.gate, gate.verdict)];
    }
    let fastest_baseline = row.fastest_baseline();
    let first = row.speedup.iter().find(|(name, _)| !torch::is_baseline(name));
    let sentence = |(name, comparison): (&String, &Comparison)| {
        format!("{}: {}", row.problem, comparison.sentence(&row.shown(), name))
    };
    fastest_baseline.into_iter().chain(first).map(sentence).collect()
}
