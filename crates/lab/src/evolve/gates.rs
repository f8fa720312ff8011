//! What a candidate goes through on the device: right on every problem, watched by audits, and faster than the default by
//! the rule of duels.

use std::{collections::BTreeMap, time::Duration};

use evosdpa_core::Problem;
use evosdpa_oracle::{
    Case,
    inputs::{Family, Inputs},
};
use serde::{Deserialize, Serialize};

use super::{
    log::{ShapeResult, Standing},
    span::{Span, timed},
};
use crate::{
    Error, ErrorKind,
    bench::{AUDIT, FLOOR},
    device::{TimedDevice, Timing},
    gate::{GateResult, correctness},
    machine,
    measure::{
        Calls, Reading,
        audit::Audited,
        compare::Outcome,
        duel::{Arm, Duel, Ended, Rule, duel},
        floor::Floor,
        roof::Roof,
        samples::median,
    },
};
use evosdpa_oracle::rng::Rng;

/// A candidate at least this much faster over all problems is promoted.
pub const PROMOTED_FROM: f64 = 1.03;
/// Slower on so many problems is out.
const SLOW_MAX: usize = 2;
/// How often a candidate is tried while the machine fails or shows it faster than possible, and the time between two tries.
const TRIES: usize = 3;
const PAUSE: Duration = Duration::from_millis(200);

/// A problem with everything that is drawn and solved for it.
pub struct Material {
    problem: Problem,
    cases: Vec<Case>,
    inputs: Vec<Inputs>,
    floor: Floor,
    roof: Option<Roof>,
}

impl Material {
    /// Draws inputs and solves the problem twice: for the gate, and for audits.
    pub fn draw(device: &dyn TimedDevice, problem: &Problem, sets: usize, seed: u64) -> Result<Self, Error> {
        machine::refuse_what_does_not_fit(problem, 2 * sets)?;
        let cases: Vec<Case> = [seed, seed ^ 0x5555_5555]
            .map(|seed| Case::in_bounded_time(*problem, Family::Normal, seed, None))
            .into();
        let inputs = (0..sets).map(|set| cases[set % cases.len()].inputs.clone()).collect();
        let floor = Floor::look(device, problem)?;
        Ok(Self { problem: *problem, cases, inputs, floor, roof: device.roof(problem) })
    }

    /// The share of the roof that a call of this length reaches.
    fn roofline(&self, time_us: f64) -> Option<f64> {
        self.roof.as_ref().map(|roof| rounded(roof.share(&self.problem, time_us)))
    }
}

/// A gate after the others, such as one on a profile, of a candidate by its name.
pub type LastGate<'a> = &'a dyn Fn(&str) -> GateResult;

/// Judges candidates against the default.
pub struct Judge<'a> {
    device: &'a dyn TimedDevice,
    places: Vec<Place<'a>>,
    rule: Rule,
    rng: Rng,
    default: String,
    last_gate: Option<LastGate<'a>>,
}

struct Place<'a> {
    material: &'a Material,
    name: String,
    default: Audited<'a>,
}

/// What came of a candidate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Judged {
    /// The gates it went through here.
    pub gates: Vec<GateResult>,
    /// By problem, as far as it came.
    pub shapes: BTreeMap<String, ShapeResult>,
    /// Geometric mean over all problems.
    pub fitness: Option<f64>,
    /// What becomes of it.
    pub status: Standing,
    /// What it took.
    pub spans: Vec<Span>,
    /// Whether the machine turned it away: another try may go well.
    pub machine_fault: bool,
}

impl Judged {
    /// What a gate turned away.
    pub fn rejected(gates: Vec<GateResult>, shapes: BTreeMap<String, ShapeResult>, spans: Vec<Span>) -> Self {
        Self { gates, shapes, fitness: None, status: Standing::Rejected, spans, machine_fault: false }
    }
}

impl Judged {
    /// Whether the floor turned it away, which a machine that was busy when it was measured may have raised.
    fn is_too_fast(&self) -> bool {
        self.gates.last().is_some_and(|gate| gate.gate == FLOOR && gate.verdict.is_fail())
    }
}

impl<'a> Judge<'a> {
    /// Loads the default on every problem. A problem that it cannot take is an error: nothing could be compared there.
    pub fn new(
        device: &'a dyn TimedDevice,
        default: &str,
        materials: &'a [Material],
        rule: Rule,
        seed: u64,
    ) -> Result<Self, Error> {
        let (label, mut places) = (default.to_owned(), Vec::new());
        for (i, material) in materials.iter().enumerate() {
            let problem = &material.problem;
            if let Some(why) = device.refuses(default, problem) {
                return Err(Error::Tune(format!("{default} cannot be tuned for {problem}: {why}")));
            }
            let result = correctness::check(device, default, &material.cases[0], None)?;
            if !result.verdict.is_pass() {
                return Err(Error::Tune(format!("{default} on {problem}: correctness {}", result.verdict)));
            }
            let mut default = Audited::load(
                device,
                default,
                problem,
                &material.inputs,
                &material.cases,
                seed.wrapping_add(i as u64),
            )?;
            default.loaded.set_timing(Timing::Graph)?;
            places.push(Place { material, name: problem.to_string(), default });
        }
        Ok(Self { device, places, rule, rng: Rng::new(seed), default: label, last_gate: None })
    }

    /// Adds a gate that candidates pass last, if they would be elites: it may be expensive.
    pub fn with_last_gate(mut self, gate: Option<LastGate<'a>>) -> Self {
        self.last_gate = gate;
        self
    }

    /// The default itself: what everything is compared with. To be an elite it too must pass the last gate.
    pub fn default_result(&mut self) -> Result<Judged, Error> {
        let (mut shapes, mut spans) = (BTreeMap::new(), Vec::new());
        for place in &mut self.places {
            let mut arm = KernelArm::new(&mut place.default)?;
            let times = timed("measure", &mut spans, || {
                (0..9).map(|_| Ok(arm.read()?.time_us)).collect::<Result<Vec<f64>, Error>>()
            })?;
            let p50_us = median(&times);
            let shape = ShapeResult {
                speedup: 1.0,
                interval: [1.0; 2],
                sequence: [1.0; 2],
                cycles: None,
                verdict: Outcome::Same,
                p50_us,
                default_p50_us: p50_us,
                blocks: 0,
                discarded: 0,
                roofline: place.material.roofline(p50_us),
            };
            shapes.insert(place.name.clone(), shape);
        }
        let mut gates = vec![GateResult::pass("correctness", "the default, on every problem")];
        let status = self.after_last_gate(&self.default, Standing::Kept, &mut gates, &mut spans);
        Ok(Judged { gates, shapes, fitness: Some(1.0), status, spans, machine_fault: false })
    }

    /// What becomes of a candidate that would be an elite.
    fn after_last_gate(
        &self,
        label: &str,
        status: Standing,
        gates: &mut Vec<GateResult>,
        spans: &mut Vec<Span>,
    ) -> Standing {
        let Some(gate) = self.last_gate else { return status };
        let result = timed("profile", spans, || gate(label));
        let failed = result.verdict.is_fail();
        gates.push(result);
        if failed { Standing::Rejected } else { status }
    }

    /// Takes a candidate through correctness, audits, floor and duels, problem by problem, and through the last gate if it
    /// is fitter than `elite_above`. An error is about the device; what is wrong with the candidate is in the result. What
    /// the machine did wrong is tried again, a few times.
    pub fn judge(
        &mut self,
        label: &str,
        elite_above: f64,
        mut proceed: impl FnMut() -> bool,
    ) -> Result<Judged, Error> {
        let mut judged = self.judge_once(label, elite_above, &mut proceed)?;
        for _ in 1..TRIES {
            if !(judged.machine_fault || judged.is_too_fast()) || !proceed() {
                break;
            }
            std::thread::sleep(PAUSE);
            judged = self.judge_once(label, elite_above, &mut proceed)?;
        }
        Ok(judged)
    }

    fn judge_once(
        &mut self,
        label: &str,
        elite_above: f64,
        mut proceed: &mut impl FnMut() -> bool,
    ) -> Result<Judged, Error> {
        let (mut gates, mut shapes, mut spans) = (Vec::new(), BTreeMap::new(), Vec::new());
        let (mut slow, mut fast, mut hopeless) = (0, 0, false);
        let slow_max = SLOW_MAX.min(self.places.len());
        for index in 0..self.places.len() {
            let outcome = self.on_problem(index, label, &mut gates, &mut spans, &mut proceed);
            let duel = match outcome {
                Ok(Some(duel)) => duel,
                Ok(None) => return Ok(Judged::rejected(gates, shapes, spans)),
                // What a candidate is caught at is in its gates: this is the default, and nothing can be compared with it.
                Err(error @ Error::Caught { .. }) => return Err(error),
                Err(error) => {
                    // Does the device still work? If not, going on would blame every other candidate.
                    if self.places[index].default.loaded.time_us(0).is_err() {
                        return Err(error);
                    }
                    let machine_fault = error.kind() == ErrorKind::Machine;
                    let gate = if machine_fault { GateResult::unavailable } else { GateResult::fail };
                    gates.push(gate("performance", error.to_string()));
                    return Ok(Judged { machine_fault, ..Judged::rejected(gates, shapes, spans) });
                }
            };
            slow += usize::from(duel.verdict == Outcome::Slow);
            fast += usize::from(duel.verdict == Outcome::Fast);
            hopeless |= duel.ended == Ended::Hopeless;
            let place = &self.places[index];
            shapes.insert(place.name.clone(), shape_result(&duel, place.material));
            if slow >= slow_max || hopeless {
                break;
            }
        }
        let whole = shapes.len() == self.places.len();
        let logs: f64 = shapes.values().map(|shape: &ShapeResult| shape.speedup.ln()).sum();
        let fitness = whole.then(|| (logs / self.places.len().max(1) as f64).exp());
        let status = match fitness {
            _ if slow >= slow_max || hopeless => Standing::Out,
            Some(fitness) if fast > 0 && fitness >= PROMOTED_FROM => Standing::Promoted,
            Some(fitness) if fast > 0 && fitness > 1.0 => Standing::Accepted,
            _ => Standing::Kept,
        };
        gates.push(GateResult::pass(
            "performance",
            format!("{fast} FAST, {slow} SLOW of {} measured", shapes.len()),
        ));
        // Also one that is not shown to be faster: it becomes an elite as long as there are few.
        let would_be_elite = status >= Standing::Kept && fitness.is_some_and(|fitness| fitness > elite_above);
        let status =
            if would_be_elite { self.after_last_gate(label, status, &mut gates, &mut spans) } else { status };
        Ok(Judged { gates, shapes, fitness, status, spans, machine_fault: false })
    }

    /// `None` when a gate turned it away.
    fn on_problem(
        &mut self,
        index: usize,
        label: &str,
        gates: &mut Vec<GateResult>,
        spans: &mut Vec<Span>,
        proceed: &mut impl FnMut() -> bool,
    ) -> Result<Option<Duel>, Error> {
        let Material { problem, cases, .. } = self.places[index].material;
        let check = || correctness::check(self.device, label, &cases[0], None);
        let result = timed("correctness", spans, check)?;
        if result.machine_fault {
            return Err(Error::MachineFault(format!("{problem}: {}", result.detail)));
        }
        let passed = result.verdict.is_pass();
        if !passed || index == 0 {
            let detail = format!("{problem}: {}", result.detail);
            gates.push(GateResult { gate: "correctness".to_owned(), verdict: result.verdict, detail });
        }
        if !passed {
            return Ok(None);
        }
        timed("measure", spans, || self.measured(index, label, gates, proceed))
    }

    /// The duel with the default, under the eyes of the audits; `None` when a gate turned it away.
    fn measured(
        &mut self,
        index: usize,
        label: &str,
        gates: &mut Vec<GateResult>,
        proceed: &mut impl FnMut() -> bool,
    ) -> Result<Option<Duel>, Error> {
        let place = &mut self.places[index];
        let Material { problem, cases, inputs, floor, .. } = place.material;
        let seed = self.rng.below(usize::MAX >> 1) as u64;
        let mut candidate = Audited::load(self.device, label, problem, inputs, cases, seed)?;
        let outcome = {
            let mut arm = KernelArm::new(&mut candidate)?;
            let mut other = KernelArm::new(&mut place.default)?;
            duel(&mut arm, &mut other, &self.rule, seed, proceed)
        };
        let is_the_default = |kernel: &str| kernel != label;
        let finding = match outcome {
            Ok(Some(duel)) => {
                if let Some(finding) =
                    floor.refuses(self.device, problem, problem.into(), duel.candidate_p50_us())?
                {
                    gates.push(GateResult::fail(FLOOR, finding.to_string()));
                    return Ok(None);
                }
                // What is slower has no reason to cheat.
                let audited = if duel.verdict == Outcome::Slow { Ok(()) } else { candidate.final_audit() };
                match audited {
                    Ok(()) => return Ok(Some(duel)),
                    Err(error @ Error::Caught { .. }) => error,
                    Err(error) => return Err(error),
                }
            }
            Ok(None) => {
                return Err(Error::Tune(format!("{label} on {problem}: not one block could be read")));
            }
            Err(Error::Caught { kernel, finding }) if is_the_default(&kernel) => {
                return Err(Error::Caught { kernel, finding });
            }
            Err(error @ Error::Caught { .. }) => error,
            Err(error) => return Err(error),
        };
        gates.push(GateResult::fail(AUDIT, finding.to_string()));
        Ok(None)
    }
}

fn shape_result(duel: &Duel, material: &Material) -> ShapeResult {
    ShapeResult {
        roofline: material.roofline(duel.candidate_p50_us()),
        speedup: rounded(duel.time.ratio),
        interval: duel.time.bootstrap.map(rounded),
        sequence: duel.time.sequence.map(rounded),
        cycles: duel.cycles.map(|cycles| cycles.bootstrap.map(rounded)),
        verdict: duel.verdict,
        p50_us: rounded(duel.candidate_p50_us()),
        default_p50_us: rounded(duel.other_p50_us()),
        blocks: duel.blocks.len(),
        discarded: duel.throttled + duel.unsteady,
    }
}

/// Six digits are more than any measurement here has, and a log has thousands of them.
fn rounded(x: f64) -> f64 {
    format!("{x:.5e}").parse().unwrap_or(x)
}

/// A kernel as one side of a duel.
pub struct KernelArm<'a, 'b> {
    kernel: &'a mut Audited<'b>,
    calls: Calls,
}

impl<'a, 'b> KernelArm<'a, 'b> {
    /// Finds out how many calls make a reading.
    pub fn new(kernel: &'a mut Audited<'b>) -> Result<Self, Error> {
        kernel.loaded.time_us(0)?;
        let once_us = kernel.loaded.time_us(0)?;
        let has_clock = kernel.loaded.read(0)?.clock_ghz.is_some();
        Ok(Self { kernel, calls: if has_clock { Calls::of_a_gpu() } else { Calls::lasting(once_us) } })
    }
}

impl Arm for KernelArm<'_, '_> {
    fn read(&mut self) -> Result<Reading, Error> {
        let Audited { loaded, auditor, .. } = &mut *self.kernel;
        self.calls.read(auditor.sets(), |set| loaded.read(set))
    }

    fn relocate(&mut self) -> Result<(), Error> {
        self.kernel.loaded.relocate()
    }

    fn audit(&mut self) -> Result<(), Error> {
        self.kernel.audit()
    }
}

/// The rule of a tune's duels.
pub fn rule(limit: Option<Duration>) -> Rule {
    Rule { most_blocks: 60, limit, hopeless_below: 0.85, ..Rule::default() }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use evosdpa_core::DType;

    use super::*;
    use crate::{
        device::TimedKernel,
        evolve::altered::{Alteration, Altered, CPU},
        measure::floor::Ceilings,
    };

    const CANDIDATE: &str = "cpu_flash[BLOCK_KV=32 BLOCK_Q=32]";

    /// A CPU that runs out of memory when it is asked for the candidate, so many times, and one whose ceilings are those of a
    /// busy machine as often as it is asked for them.
    struct Short {
        faults_left: Cell<usize>,
        busy_left: Cell<usize>,
    }

    impl Alteration for Short {
        fn ceilings(&self, problem: &Problem) -> Result<Option<Ceilings>, Error> {
            let left = self.busy_left.get();
            self.busy_left.set(left.saturating_sub(1));
            // Nothing real is as slow as that.
            let busy = Ceilings { gflops: Some(1e-4), gbps: None, source: "a busy machine".to_owned() };
            if left > 0 { Ok(Some(busy)) } else { CPU.ceilings(problem) }
        }

        fn load<'a>(
            &'a self,
            kernel: &str,
            problem: &Problem,
            inputs: &'a [Inputs],
        ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
            let left = self.faults_left.get();
            if kernel == CANDIDATE && left > 0 {
                self.faults_left.set(left - 1);
                return Err(Error::Sim(ptxsan::Error::Memory("out of memory".to_owned())));
            }
            CPU.load_timed(kernel, problem, inputs)
        }
    }

    fn judged(faults: usize, busy: usize) -> Judged {
        let device = Altered(Short { faults_left: Cell::new(faults), busy_left: Cell::new(busy) });
        let problem = Problem::new("tiny".parse().unwrap(), DType::F32).unwrap();
        let materials = [Material::draw(&device, &problem, 1, 1).unwrap()];
        let rule = Rule { most_blocks: 4, ..rule(None) };
        let mut judge = Judge::new(&device, "cpu_flash", &materials, rule, 1).unwrap();
        judge.judge(CANDIDATE, f64::INFINITY, || true).unwrap()
    }

    #[test]
    fn what_the_machine_did_wrong_is_tried_again_and_never_held_against_a_candidate() {
        let once = judged(1, 0);
        assert!(once.fitness.is_some() && !once.machine_fault, "{once:?}");
        let always = judged(usize::MAX, 0);
        assert!(always.machine_fault && always.status == Standing::Rejected, "{always:?}");
        assert!(always.gates.iter().all(|gate| !gate.verdict.is_fail()), "{always:?}");
        let last = always.gates.last().unwrap();
        assert!(last.verdict.is_unavailable() && last.detail.contains("out of memory"), "{last:?}");
    }

    /// The ceilings were measured while the machine was busy: they are measured again, and the candidate is not lost.
    #[test]
    fn an_honest_candidate_is_never_too_fast() {
        let honest = judged(0, 20);
        assert!(honest.fitness.is_some() && !honest.is_too_fast(), "{honest:?}");
        // What the device never showed to be possible is no result.
        let impossible = judged(0, usize::MAX);
        assert!(impossible.is_too_fast() && impossible.status == Standing::Rejected, "{impossible:?}");
    }
}
