//! The hazard gate on the simulator: what ptxsan finds in a kernel under every schedule, and from which severity on it fails.

use evosdpa_core::Problem;
use evosdpa_oracle::inputs::Inputs;
use ptxsan::{Finding, Options, Schedule, finding::merge, report::tally};
pub use ptxsan::{Severity, Suppressions};

use super::correctness::CaseResult;
use crate::{
    Error,
    device::{Device, Sim},
    gate::Verdict,
};

/// What of the findings fails.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The mildest severity that fails; none: nothing does.
    pub fail_on: Option<Severity>,
    /// Findings that are known and accepted.
    pub suppressions: Suppressions,
}

impl Default for Policy {
    fn default() -> Self {
        Self { fail_on: Some(Severity::Warning), suppressions: Suppressions::default() }
    }
}

impl Policy {
    fn fails(&self, severity: Severity) -> bool {
        self.fail_on.is_some_and(|least| severity >= least)
    }
}

/// Runs a kernel under every schedule, and brings together what is found. Nobody looks at the answer.
pub fn run(
    sim: &Sim,
    kernel: &str,
    problem: &Problem,
    inputs: &Inputs,
    policy: &mut Policy,
) -> Result<CaseResult, Error> {
    if let Some(why) = sim.refuses(kernel, problem) {
        return Ok(CaseResult::unavailable(why));
    }
    let mut findings = Vec::new();
    let (mut dropped, mut suppressed) = (0, 0);
    let simulated = sim.simulation(kernel, problem).and_then(|simulation| {
        for schedule in Schedule::ALL {
            let (_, mut outcome) = simulation.run(inputs, &Options { schedule, ..Options::default() })?;
            suppressed += policy.suppressions.apply(&outcome.entry, &mut outcome.findings);
            dropped += outcome.dropped;
            merge(&mut findings, outcome.findings);
        }
        Ok(())
    });
    if let Err(error) = simulated {
        return CaseResult::of_error(error);
    }
    let mut detail = format!("{} under {} schedules", tally(&findings, dropped), Schedule::ALL.len());
    if suppressed > 0 {
        detail += &format!("; {suppressed} suppressed");
    }
    let is_failing = |finding: &&Finding| policy.fails(finding.severity);
    let failing: Vec<String> = findings.iter().filter(is_failing).map(ToString::to_string).collect();
    if failing.is_empty() && !(dropped > 0 && policy.fails(Severity::Error)) {
        return Ok(CaseResult::without_output(Verdict::Pass, detail));
    }
    let why = format!("{}; {}", tally(&findings, dropped), failing.join(";\n"));
    Ok(CaseResult::without_output(Verdict::Fail(why), detail))
}
