//! One problem through the gates and then the clock: every kernel and peer side by side.

use std::time::Duration;

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

/// Inputs below this size are rotated, so that no call finds the last one's data in the caches by accident.
const ROTATE_BELOW_BYTES: u64 = 32 << 20;

/// What is measured of every problem.
#[derive(Clone, Debug)]
pub struct Request {
    /// Kernels to measure, the baseline first.
    pub kernels: Vec<&'static str>,
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
pub enum Step {
    /// Inputs are drawn and the oracle is at work.
    Solving,
    /// A kernel is being checked.
    Checking(&'static str),
    /// Contestants are being timed; how much is done, from 0 to 1.
    Timing(f64),
}

/// Takes every kernel and peer through the gates and times those that pass. `peer` is torch or the reason it is not there.
/// `proceed` is told of each step and stops the measurement by answering no.
pub fn measure(
    device: &dyn Device,
    problem: &Problem,
    request: &Request,
    mut peer: Result<&mut Torch, &str>,
    mut proceed: impl FnMut(Step) -> bool,
) -> Result<Outcome, Error> {
    let sets = if problem.bytes() < ROTATE_BELOW_BYTES { 2 } else { 1 };
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
        let loaded = match row.gates[0].verdict {
            Verdict::Pass => Some(device.load(kernel, problem, &inputs)?),
            _ => None,
        };
        entries.push((row, loaded));
    }
    let mut peer_row = Row::new(torch::NAME, true, &device.name(), &problem.to_string());
    peer_row.gates.push(match &mut peer {
        Ok(torch) => torch_gate(torch, &case, &inputs),
        Err(why) => GateResult::unavailable("available", *why),
    });
    let timed_peer = peer.ok().filter(|_| peer_row.gates[0].verdict.is_pass());

    let plan = Plan { iters: request.iters, warmup: request.warmup, sets, budget: request.budget };
    let times = if interrupted {
        Vec::new()
    } else {
        time_all(&mut entries, timed_peer, &plan, |done| {
            interrupted |= !proceed(Step::Timing(done));
            !interrupted
        })
    };
    let mut rows = collect(entries, peer_row, times, problem, request, &case)?;
    compare(&mut rows);
    let words = rows.iter().filter(|row| !row.peer).flat_map(words).collect();
    Ok(Outcome { rows, words, interrupted })
}

fn correctness_gate(device: &dyn Device, kernel: &str, case: &Case) -> Result<GateResult, Error> {
    let result = correctness::check(device, kernel, case, None)?;
    Ok(GateResult { gate: "correctness".to_owned(), verdict: result.verdict, detail: result.detail })
}

/// The peer computes the same question; its answer is held to the same rules.
fn torch_gate(torch: &mut Torch, case: &Case, inputs: &[Inputs]) -> GateResult {
    let judged = torch.load(&case.problem, inputs).and_then(|()| {
        torch.time_us(0)?;
        let output = torch.output(&case.problem)?;
        Ok(case.judge(&output.view(), None))
    });
    match judged {
        Err(error) => GateResult::unavailable("correctness", error.to_string()),
        Ok(judgement) if judgement.passed() => GateResult::pass("correctness", judgement.summary()),
        Ok(judgement) => GateResult::fail("correctness", judgement.summary()),
    }
}

type Entry<'a> = (Row, Option<Box<dyn Loaded + 'a>>);

struct Kernel<'e, 'a>(&'e mut Box<dyn Loaded + 'a>);

impl Contestant for Kernel<'_, '_> {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        self.0.time_us(set)
    }
}

/// Times what is loaded, in the order of `entries`, the peer last.
fn time_all(
    entries: &mut [Entry<'_>],
    peer: Option<&mut Torch>,
    plan: &Plan,
    proceed: impl FnMut(f64) -> bool,
) -> Vec<Result<Times, Error>> {
    let mut kernels: Vec<Kernel<'_, '_>> =
        entries.iter_mut().filter_map(|(_, l)| l.as_mut().map(Kernel)).collect();
    let mut contestants: Vec<&mut dyn Contestant> =
        kernels.iter_mut().map(|kernel| kernel as &mut dyn Contestant).collect();
    contestants.extend(peer.map(|torch| torch as &mut dyn Contestant));
    interleave(&mut contestants, plan, proceed)
}

/// Puts the times into their rows, and looks once more at what the timed calls computed.
fn collect(
    entries: Vec<Entry<'_>>,
    mut peer_row: Row,
    times: Vec<Result<Times, Error>>,
    problem: &Problem,
    request: &Request,
    case: &Case,
) -> Result<Vec<Row>, Error> {
    let mut times = times.into_iter();
    let mut rows = Vec::new();
    let fill = |row: &mut Row, times: Option<Result<Times, Error>>| match times {
        Some(Ok(times)) => row.measured(&times.rounds, problem.flops(), problem.bytes(), request.peak_gflops),
        Some(Err(error)) => row.gates.push(GateResult::unavailable("performance", error.to_string())),
        None => {}
    };
    for (mut row, loaded) in entries {
        if let Some(mut loaded) = loaded {
            fill(&mut row, times.next());
            if !row.samples_us.is_empty() {
                let output = loaded.timed_output(0)?;
                let judgement = case.judge(&output.o.view(), Some(&output.lse));
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
    if peer_row.gates.iter().all(|gate| gate.verdict.is_pass()) {
        fill(&mut peer_row, times.next());
    }
    rows.push(peer_row);
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

fn words(row: &Row) -> Vec<String> {
    if let Some(gate) = row.first_problem() {
        return vec![format!("{} on {}: {} {}", row.kernel, row.problem, gate.gate, gate.verdict)];
    }
    let sentence = |(name, comparison): (&String, &Comparison)| {
        format!("{}: {}", row.problem, comparison.sentence(&row.kernel, name))
    };
    row.speedup.iter().map(sentence).collect()
}

/// Whether a comparison is a regression.
pub fn is_regression(comparison: &Comparison) -> bool {
    comparison.verdict == Word::Slow
}
