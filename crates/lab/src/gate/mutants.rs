//! The gates tried on kernels that are known to be wrong.
//!
//! Each mutant is tried twice: with its mistake, which some gate must stop, and with the mistake repaired, which none may.

use evosdpa_core::{DType, Problem};
use evosdpa_cuda::Builder;
use evosdpa_kernels::{Gate, Kernel, Mutant, ProblemFacts, Target};
use evosdpa_oracle::inputs::Family;
use serde::Serialize;

use super::{
    GateResult, Verdict, correctness, resources,
    suite::{CaseSpec, Group},
};
use crate::{Error, device::Sim, variants::Job};

/// The tunable of every mutant that switches its mistake on (1) or off (0).
pub const SWITCH: &str = "MISTAKE";

/// What came of trying the gates on one mutant.
#[derive(Clone, Debug, Serialize)]
pub struct MutantRow {
    /// The mutant.
    pub mutant: String,
    /// The kernel it is a relative of.
    pub of: String,
    /// What is wrong with it.
    pub breaks: String,
    /// The problem it was tried on.
    pub problem: String,
    /// The first gate that its manifest says must stop it.
    pub expected: &'static str,
    /// The gates that stopped it, cheapest first.
    pub caught_by: Vec<String>,
    /// What every gate said of the mistake.
    pub mistake: Vec<GateResult>,
    /// What every gate said of the repair.
    pub repair: Vec<GateResult>,
    /// The verdict on the gates.
    pub gates: Vec<GateResult>,
}

impl MutantRow {
    /// Weighs what the gates said, each list cheapest gate first.
    pub fn new(kernel: &Kernel, about: &Mutant, mistake: Vec<GateResult>, repair: Vec<GateResult>) -> Self {
        let expected = name(about.caught_by);
        let caught_by: Vec<String> =
            mistake.iter().filter(|gate| gate.verdict.is_fail()).map(|gate| gate.gate.clone()).collect();
        let flagged: Vec<String> = repair
            .iter()
            .filter(|gate| gate.verdict.is_fail())
            .map(|gate| format!("{}: {}", gate.gate, gate.detail))
            .collect();
        // A repair that never ran proves nothing.
        let idle = repair.iter().find_map(|gate| match &gate.verdict {
            Verdict::Unavailable(why) => Some(format!("{}: {why}", gate.gate)),
            Verdict::Pass | Verdict::Fail(_) => None,
        });
        const NAME: &str = "mutant";
        let gate = match (caught_by.first(), flagged.is_empty(), idle) {
            (None, ..) => GateResult::fail(NAME, "no gate has stopped it"),
            (Some(first), ..) if first != expected => {
                GateResult::fail(NAME, format!("stopped by {first}, but {expected} was to be the first"))
            }
            (Some(_), false, _) => {
                GateResult::fail(NAME, format!("its repair was stopped too; {}", flagged.join("; ")))
            }
            (Some(_), true, Some(why)) => {
                GateResult::unavailable(NAME, format!("its repair could not be tried; {why}"))
            }
            (Some(first), true, None) => GateResult::pass(NAME, format!("stopped by {first}")),
        };
        Self {
            mutant: kernel.name().to_owned(),
            of: about.of.clone(),
            breaks: about.breaks.clone(),
            problem: about.shape.to_string(),
            expected,
            caught_by,
            mistake,
            repair,
            gates: vec![gate],
        }
    }

    /// What the first gate that stopped the mistake said.
    pub fn evidence(&self) -> Option<&str> {
        self.mistake.iter().find(|gate| gate.verdict.is_fail()).map(|gate| gate.detail.as_str())
    }
}

/// `racing_rows[MISTAKE=1]`.
pub fn variant_name(kernel: &Kernel, mistake: bool) -> String {
    format!("{}[{SWITCH}={}]", kernel.name(), u8::from(mistake))
}

/// The compiler's and the resource gate's word; the first that fails is the last.
pub fn built(
    kernel: &Kernel,
    about: &Mutant,
    mistake: bool,
    target: Target,
) -> Result<Vec<GateResult>, Error> {
    let problem = ProblemFacts::try_from(&problem(about)?)?;
    let variant = kernel.variant(&problem, &target, [(SWITCH, i64::from(mistake))])?;
    let artifact = Builder::new()?.build(&variant);
    let job = Job { dtype: DType::F16, problem, target, variant };
    Ok(resources::check(&job, artifact, None)?.gates)
}

/// Tries a mutant without a GPU.
pub fn on_sim(sim: &Sim, kernel: &Kernel, about: &Mutant) -> Result<MutantRow, Error> {
    let tried = |mistake: bool| without_gpu(sim, kernel, about, mistake);
    Ok(MutantRow::new(kernel, about, tried(true)?, tried(false)?))
}

/// What the gates that need no GPU say: the compiler, the resource gate, the simulator, and of its answer there the
/// correctness gate. The first that fails is the last.
pub fn without_gpu(
    sim: &Sim,
    kernel: &Kernel,
    about: &Mutant,
    mistake: bool,
) -> Result<Vec<GateResult>, Error> {
    let mut gates = built(kernel, about, mistake, sim.target(kernel.name()))?;
    if gates.iter().any(|gate| gate.verdict.is_fail()) {
        return Ok(gates);
    }
    let name = variant_name(kernel, mistake);
    let problem = problem(about)?;
    let spec = CaseSpec {
        group: Group::Simulated,
        problem,
        family: Family::Normal,
        seed: 1,
        row_gap: Some(8),
        lengths: None,
    };
    // Twice, in the two fair orders: under the others a warp that spins on a flag may never let its partner run.
    let watched = correctness::launch(sim, &name, &problem, &[spec.inputs()], 2)?;
    let stopped = watched.verdict.is_fail();
    gates.push(watched.gate("sim"));
    if !stopped {
        gates.push(correctness::check(sim, &name, &spec.build(), None)?.gate("correctness"));
    }
    Ok(gates)
}

fn problem(about: &Mutant) -> Result<Problem, Error> {
    Ok(Problem::new(about.shape, DType::F16)?.with_lse(true))
}

fn name(gate: Gate) -> &'static str {
    match gate {
        Gate::Compile => "compile",
        Gate::Resources => "resources",
        Gate::Sim => "sim",
        Gate::Correctness => "correctness",
        Gate::Sanitize => "sanitize",
    }
}

#[cfg(test)]
mod tests {
    use evosdpa_kernels::Registry;

    use super::*;

    #[test]
    fn an_escape_and_a_stopped_repair_are_failures() {
        let registry = Registry::embedded().unwrap();
        let mutant = registry.mutants().find(|mutant| mutant.name() == "racing_rows").unwrap();
        let weigh = |mistake: Vec<GateResult>, repair: Vec<GateResult>| {
            MutantRow::new(mutant, mutant.manifest.mutant.as_ref().unwrap(), mistake, repair)
        };
        let pass = || GateResult::pass("compile", "");
        let stop = || GateResult::fail("sim", "data race");
        let idle = || GateResult::unavailable("sim", "no compiler");

        let caught = weigh(vec![pass(), stop()], vec![pass(), GateResult::pass("sim", "")]);
        assert!(caught.gates[0].verdict.is_pass());
        assert_eq!((caught.expected, &caught.caught_by[..]), ("sim", &["sim".to_owned()][..]));
        assert_eq!(caught.evidence(), Some("data race"));
        let escaped = weigh(vec![pass()], vec![pass()]);
        assert!(escaped.gates[0].verdict.is_fail() && escaped.evidence().is_none());
        let both = weigh(vec![pass(), stop()], vec![pass(), stop()]);
        assert!(both.gates[0].detail.contains("repair was stopped too; sim: data race"), "{both:?}");
        let late = vec![GateResult::fail("resources", "spills"), stop()];
        let wrong_gate = weigh(late, vec![pass()]);
        assert!(wrong_gate.gates[0].detail.contains("sim was to be the first"), "{wrong_gate:?}");
        let on_gpu = weigh(vec![pass(), stop(), GateResult::fail("racecheck", "hazard")], vec![pass()]);
        assert_eq!(on_gpu.caught_by, ["sim", "racecheck"]);
        let untried = weigh(vec![stop()], vec![pass(), idle()]);
        assert!(matches!(untried.gates[0].verdict, Verdict::Unavailable(_)), "{untried:?}");
    }
}
