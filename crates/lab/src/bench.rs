//! One problem through the gates and then the clock: every kernel and peer side by side.

use std::{cell::RefCell, time::Duration};

use evosdpa_core::{
    Case, Problem,
    inputs::{Family, Inputs},
};

use crate::{
    Error,
    device::{Device, Loaded},
    gate::{GateResult, Verdict, correctness},
    machine,
    measure::{
        compare::{Comparison, MARGIN, Word},
        interleave::{Contestant, Plan, Times, interleave},
    },
    peer::torch::{self, Torch},
    record::Row,
};

/// What is measured of every problem.
#[derive(Clone, Debug)]
pub struct Request {
    /// Kernels to measure, the baseline first.
    pub kernels: Vec<String>,
    /// Timed calls per contestant.
    pub iters: usize,
    /// Untimed calls before.
    pub warmup: usize,
    /// Seed of the inputs.
    pub seed: u64,
    /// Time for one problem.
    pub budget: Option<Duration>,
    /// Measured peak, to compare with.
    pub peak_gflops: Option<f64>,
}

/// What a problem gave.
pub struct Outcome {
    /// A row per kernel and peer.
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
    /// A kernel is being checked.
    Checking(&'a str),
    /// Contestants are being timed; how much is done, from 0 to 1.
    Timing(f64),
}

/// Takes every kernel and peer through the gates and times those that pass. `torch` is PyTorch or the reason it is not
/// there. `proceed` is told of each step and stops the measurement by answering no.
pub fn measure(
    device: &dyn Device,
    problem: &Problem,
    request: &Request,
    torch: Result<&RefCell<Torch>, &str>,
    mut proceed: impl FnMut(Step<'_>) -> bool,
) -> Result<Outcome, Error> {
    let sets = device.input_sets(problem);
    machine::refuse_what_does_not_fit(problem, sets)?;
    let mut interrupted = !proceed(Step::Solving);
    let case = Case::new(*problem, Family::Normal, request.seed, None);
    let mut inputs = vec![case.inputs.clone()];
    inputs.extend((1..sets).map(|i| Inputs::generate(problem, Family::Normal, request.seed + i as u64)));

    let mut entries = Vec::new();
    for kernel in &request.kernels {
        interrupted = interrupted || !proceed(Step::Checking(kernel));
        let mut row = Row::new(kernel, false, &device.name(), &problem.to_string());
        row.gates.push(correctness_gate(device, kernel, &case)?);
        let contestant = match row.gates[0].verdict {
            Verdict::Pass => Some(Timed::Kernel(device.load(kernel, problem, &inputs)?)),
            _ => None,
        };
        entries.push(Entry { row, contestant });
    }
    entries.extend(peers(device, &case, &inputs, torch));

    let plan = Plan { iters: request.iters, warmup: request.warmup, sets, budget: request.budget };
    let times = if interrupted {
        Vec::new()
    } else {
        time_all(&mut entries, &plan, |done| {
            interrupted |= !proceed(Step::Timing(done));
            !interrupted
        })
    };
    let mut rows = collect(entries, times, problem, request, &case)?;
    compare(&mut rows);
    let words = rows.iter().filter(|row| !row.peer).flat_map(words).collect();
    Ok(Outcome { rows, words, interrupted })
}

/// A row and, while it is in the race, what runs for it.
struct Entry<'a> {
    row: Row,
    contestant: Option<Timed<'a>>,
}

enum Timed<'a> {
    Kernel(Box<dyn Loaded + 'a>),
    Peer(torch::Timed<'a>),
}

impl Contestant for Timed<'_> {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        match self {
            Self::Kernel(loaded) => loaded.time_us(set),
            Self::Peer(peer) => peer.time_us(set),
        }
    }
}

/// The peers, each with a gate of its own: they compute the same question and are held to what they promise.
fn peers<'a>(
    device: &dyn Device,
    case: &Case,
    inputs: &[Inputs],
    torch: Result<&'a RefCell<Torch>, &str>,
) -> Vec<Entry<'a>> {
    let name = device.name();
    let load = |torch: &'a RefCell<Torch>| {
        torch
            .borrow_mut()
            .load(&name, &case.problem, inputs)
            .map(|()| torch)
            .map_err(|error| error.to_string())
    };
    let loaded = torch.map_err(str::to_owned).and_then(load);
    let entry = |mode: &torch::Mode| {
        let mut row = Row::new(mode.name, true, &name, &case.problem.to_string());
        let gate = match &loaded {
            Ok(torch) => peer_gate(&mut torch.borrow_mut(), *mode, case),
            Err(why) => GateResult::unavailable("available", why.as_str()),
        };
        let in_the_race = gate.verdict.is_pass();
        row.gates.push(gate);
        let contestant = loaded.as_ref().ok().filter(|_| in_the_race);
        Entry { row, contestant: contestant.map(|torch| Timed::Peer(torch::Timed(torch, *mode))) }
    };
    torch::modes(&name).iter().map(entry).collect()
}

fn peer_gate(torch: &mut Torch, mode: torch::Mode, case: &Case) -> GateResult {
    match torch.output(mode, &case.problem).map(|output| case.judge(&output.view(), None)) {
        Err(error) => GateResult::unavailable("correctness", error.to_string()),
        // The summary still names the rules of ours that a peer does not keep.
        Ok(judgement) if judgement.passed_as_a_peer() => GateResult::pass("correctness", judgement.summary()),
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

/// Puts the times into their rows, and looks once more at what the timed calls computed.
fn collect(
    entries: Vec<Entry<'_>>,
    times: Vec<Result<Times, Error>>,
    problem: &Problem,
    request: &Request,
    case: &Case,
) -> Result<Vec<Row>, Error> {
    let mut times = times.into_iter();
    let mut rows = Vec::new();
    for Entry { mut row, contestant } in entries {
        if let Some(contestant) = contestant {
            match times.next() {
                Some(Ok(times)) => {
                    row.measured(&times.rounds, problem.flops(), problem.bytes(), request.peak_gflops);
                }
                Some(Err(error)) => row.gates.push(GateResult::unavailable("performance", error.to_string())),
                None => {}
            }
            if let (Timed::Kernel(mut loaded), false) = (contestant, row.samples_us.is_empty()) {
                let output = loaded.timed_output(0)?;
                let judgement = case.judge(&output.o.view(), output.lse.as_deref());
                row.gates.push(if judgement.passed() {
                    GateResult::pass("timed output", "the timed calls computed the same answer")
                } else {
                    GateResult::fail("timed output", judgement.summary())
                });
                if row.failed() {
                    row.forget_times();
                }
            }
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Each kernel against every peer, and against the first kernel as the baseline.
fn compare(rows: &mut [Row]) {
    let rounds: Vec<Vec<Vec<f64>>> = rows.iter().map(by_round).collect();
    for i in 0..rows.len() {
        if rows[i].peer {
            continue;
        }
        for j in 0..rows.len() {
            let is_reference = rows[j].peer || (j == 0 && i != 0);
            if !is_reference {
                continue;
            }
            if let Some(comparison) = Comparison::paired(&rounds[i], &rounds[j], MARGIN) {
                let name = rows[j].kernel.clone();
                rows[i].speedup.insert(name, comparison);
            }
        }
    }
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

/// A kernel's result in plain words: what stopped it, or how it compares with the fastest peer and with the baseline.
fn words(row: &Row) -> Vec<String> {
    if let Some(gate) = row.first_problem() {
        return vec![format!("{} on {}: {} {}", row.kernel, row.problem, gate.gate, gate.verdict)];
    }
    let fastest_peer = row.fastest_peer();
    let baseline = row.speedup.iter().find(|(name, _)| !torch::is_peer(name));
    let sentence = |(name, comparison): (&String, &Comparison)| {
        format!("{}: {}", row.problem, comparison.sentence(&row.kernel, name))
    };
    fastest_peer.into_iter().chain(baseline).map(sentence).collect()
}

/// Whether a comparison is a regression.
pub fn is_regression(comparison: &Comparison) -> bool {
    comparison.verdict == Word::Slow
}
