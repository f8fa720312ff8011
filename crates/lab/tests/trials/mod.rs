//! Kernels on the simulator: every result held against the oracle, every access watched, rows of nobody zeros.

// Not every test program uses all of it.
#![allow(dead_code)]

use evosdpa_core::DType;
use evosdpa_kernels::Registry;
use evosdpa_lab::{device::Sim, gate::suite::CaseSpec, sweep::case_spec};
use evosdpa_oracle::{Case, inputs::Family};
use ptxsan::{Options, Schedule};

pub(crate) const F16: DType = DType::F16;
pub(crate) const BF16: DType = DType::BF16;
pub(crate) const F32: DType = DType::F32;

pub(crate) struct Trial {
    pub(crate) kernel: &'static str,
    pub(crate) shape: &'static str,
    pub(crate) dtype: DType,
    pub(crate) family: Family,
    /// Which lengths and pages are drawn.
    pub(crate) seed: u64,
    /// At most so many CTAs: on fewer, each has several Q tiles.
    pub(crate) blocks: u32,
}

pub(crate) const fn trial(kernel: &'static str, shape: &'static str, dtype: DType) -> Trial {
    Trial { kernel, shape, dtype, family: Family::Normal, seed: 1, blocks: u32::MAX }
}

pub(crate) fn case_of(trial: &Trial) -> (CaseSpec, Case) {
    let mut spec = case_spec(trial.shape.parse().unwrap(), trial.dtype).unwrap();
    (spec.family, spec.seed) = (trial.family, trial.seed);
    (spec, spec.build())
}

/// Runs a trial under two schedules, others from trial to trial; returns what went wrong.
pub(crate) fn run(sim: &Sim, number: usize, trial: &Trial) -> Vec<String> {
    let (spec, case) = case_of(trial);
    let mut wrong = Vec::new();
    if !case.broken_controls().is_empty() {
        wrong.push(format!("{}: the gate accepts {:?}", spec.label(), case.broken_controls()));
    }
    let simulation = sim.simulation(trial.kernel, &spec.problem).unwrap().on_blocks(trial.blocks);
    let mut first: Option<Vec<u8>> = None;
    for turn in [2 * number, 2 * number + 1] {
        let schedule = Schedule::ALL[turn % Schedule::ALL.len()];
        let options = Options { schedule, ..Options::default() };
        let label = format!("{} on {} under {}", simulation.label(), spec.label(), schedule.name());
        let (output, outcome) = match simulation.run(&case.inputs, &options) {
            Ok(result) => result,
            Err(error) => return vec![format!("{label}: {error}")],
        };
        let judgement = case.judge(&output.o.view(), output.lse.as_deref());
        if let Some(finding) = outcome.findings.first() {
            wrong.push(format!("{label}: {} findings, {finding}", outcome.findings.len()));
        } else if !judgement.passed() {
            wrong.push(format!("{label}: {}", judgement.summary()));
        }
        if let Some(row) = case.first_uncleared_row(&output.o.view(), output.lse.as_deref()) {
            wrong.push(format!("{label}: row {row:?} of nobody is not zeros with an LSE of -inf"));
        }
        let bytes = output.o.bytes().to_vec();
        if *first.get_or_insert_with(|| bytes.clone()) != bytes {
            wrong.push(format!("{label}: another result than under the schedule before"));
        }
    }
    wrong
}

pub(crate) fn run_all(trials: &[Trial]) {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let wrong: Vec<String> =
        trials.iter().enumerate().flat_map(|(number, trial)| run(&sim, number, trial)).collect();
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
