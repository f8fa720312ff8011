//! What a report is made of: everything that was found in the runs it was asked for.

use std::collections::BTreeMap;

use super::evolution::Evolution;
use crate::{
    gate::{GateResult, Verdict},
    machine::Environment,
    profile::ProfileRow,
    record::Row,
};

/// Everything a report shows.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// What was read.
    pub sources: Vec<Source>,
    /// Kernels and baselines on problems, with all samples that were kept.
    pub rows: Vec<Row>,
    /// Verdicts in plain words.
    pub words: Vec<String>,
    /// Every gate that ran, alike ones together.
    pub gates: Vec<GateLine>,
    /// What compiled kernels use.
    pub resources: Vec<Resource>,
    /// Profiles.
    pub profiles: Vec<ProfileRow>,
    /// Tunes.
    pub evolutions: Vec<Evolution>,
}

/// A run or a file that was read.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its name.
    pub name: String,
    /// What was asked of the lab.
    pub command: String,
    /// How far it came.
    pub status: String,
    /// Where it ran.
    pub environment: Option<Environment>,
    /// An environment that is not one of ours, as names and values.
    pub notes: BTreeMap<String, String>,
}

/// Gates of one kernel that gave the same word.
#[derive(Clone, Debug, PartialEq)]
pub struct GateLine {
    /// The kernel.
    pub kernel: String,
    /// The problems, each once.
    pub problems: Vec<String>,
    /// Which gate.
    pub gate: String,
    /// Its word, and why.
    pub verdict: Verdict,
    /// The evidence of the first.
    pub detail: String,
    /// How many gave it.
    pub count: usize,
}

impl GateLine {
    /// The problem, or how many.
    pub fn problem(&self) -> String {
        match self.problems.as_slice() {
            [only] => only.clone(),
            many => format!("{} problems", many.len()),
        }
    }
}

/// What a compiled kernel uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// The kernel.
    pub kernel: String,
    /// What it was compiled for.
    pub arch: String,
    /// Its inputs' type.
    pub dtype: String,
    /// Registers per thread.
    pub registers: u64,
    /// Shared memory of a block.
    pub smem_bytes: u64,
    /// Stack of a thread.
    pub stack_bytes: u64,
    /// Spill stores and loads.
    pub spill_bytes: u64,
    /// Blocks of an SM.
    pub blocks_per_sm: Option<u64>,
    /// Warps of what is possible, in percent.
    pub occupancy_percent: Option<f64>,
    /// What keeps another block from fitting.
    pub limited_by: String,
}

/// Rows of one problem on one device.
pub(super) struct Problem<'a> {
    pub(super) name: String,
    pub(super) rows: Vec<&'a Row>,
}

impl Document {
    /// Adds a gate; one that says the same of the same kernel is counted instead.
    pub(super) fn add_gate(&mut self, kernel: &str, problem: &str, gate: &GateResult) {
        let same = |line: &&mut GateLine| {
            line.kernel == kernel && line.gate == gate.gate && line.verdict.word() == gate.verdict.word()
        };
        // Failures are never folded: each has its own reason.
        let known = if gate.verdict.is_fail() { None } else { self.gates.iter_mut().find(same) };
        match known {
            Some(line) => {
                line.count += 1;
                if !line.problems.iter().any(|known| known == problem) {
                    line.problems.push(problem.to_owned());
                }
            }
            None => self.gates.push(GateLine {
                kernel: kernel.to_owned(),
                problems: vec![problem.to_owned()],
                gate: gate.gate.clone(),
                verdict: gate.verdict.clone(),
                detail: gate.detail.clone(),
                count: 1,
            }),
        }
    }

    /// Measured rows by problem, in the order they were first seen.
    pub(super) fn problems(&self) -> Vec<Problem<'_>> {
        let mut problems: Vec<Problem<'_>> = Vec::new();
        for row in self.rows.iter().filter(|row| row.p50_us.is_some()) {
            let name = format!("{} · {}", row.problem, row.device);
            match problems.iter_mut().find(|problem| problem.name == name) {
                Some(problem) => problem.rows.push(row),
                None => problems.push(Problem { name, rows: vec![row] }),
            }
        }
        problems
    }

    /// Gates that passed, failed and could not run.
    pub fn counts(&self) -> [usize; 3] {
        let of = |word: &str| {
            self.gates.iter().filter(|line| line.verdict.word() == word).map(|line| line.count).sum()
        };
        [of("PASS"), of("FAIL"), of("UNAVAILABLE")]
    }

    /// The verdict: FAIL if a gate failed, UNAVAILABLE if none passed, else PASS, with the counts; of tunes alone, what became of
    /// their winners.
    pub fn verdict(&self) -> (&'static str, String) {
        let [passed, failed, unavailable] = self.counts();
        let not_run = if unavailable > 0 { format!(", {unavailable} could not run") } else { String::new() };
        match (passed, failed) {
            (_, 1..) => ("FAIL", format!("{failed} of {} gates failed{not_run}", passed + failed)),
            // Candidates' own gates are in their evaluations; what counts of a tune is its winner.
            (0, 0) if !self.evolutions.is_empty() && unavailable == 0 => {
                let are_confirmed = self.evolutions.iter().all(Evolution::is_confirmed);
                let said = self.evolutions.iter().map(Evolution::verdict);
                let said = said.map(|said| {
                    said.unwrap_or_else(|| "no evaluation of the tune passed its gates".to_owned())
                });
                (if are_confirmed { "PASS" } else { "UNAVAILABLE" }, said.collect::<Vec<_>>().join("; "))
            }
            (0, 0) => ("UNAVAILABLE", format!("no gate ran{not_run}")),
            (_, 0) => ("PASS", format!("all {passed} gates passed{not_run}")),
        }
    }

    /// For each problem, the fastest kernel against the fastest baseline or, without one, against the first kernel; else what the runs
    /// said themselves.
    pub fn headlines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for problem in self.problems() {
            let time = |row: &&&Row| row.p50_us.unwrap_or(f64::INFINITY);
            let ours =
                problem.rows.iter().filter(|row| !row.baseline).min_by(|a, b| time(a).total_cmp(&time(b)));
            if let Some((row, (baseline, comparison))) = ours
                .and_then(|row| Some((row, row.fastest_baseline().or_else(|| row.speedup.iter().next())?)))
            {
                lines.push(format!("{}: {}", problem.name, comparison.sentence(&row.kernel, baseline)));
            }
        }
        if lines.is_empty() { self.words.clone() } else { lines }
    }
}
