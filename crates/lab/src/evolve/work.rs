//! Where candidates are evaluated: here, on this process's device, or by evaluators elsewhere. A tune asks, and writes the log;
//! whoever is asked measures.

use std::cell::OnceCell;

use evosdpa_core::Problem;
use serde::{Deserialize, Serialize};

use super::{
    ahead::{Ahead, Prepared},
    gates::{Judge, Judged, LastGate, Material},
    insight::{Diagnosis, InsightSource},
    log::{Evaluation, Standing},
    space::{Space, label},
    span::Begun,
};
use crate::{
    Error,
    device::{DeviceLock, TimedDevice},
    gate::GateResult,
    measure::{compare::Outcome, duel::Rule},
};
use evosdpa_oracle::rng::Rng;

/// A candidate to be evaluated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The variant, with its tunables.
    pub label: String,
    /// What its fitness must be above to be among the elites, when there are as many as are kept.
    pub elite_above: Option<f64>,
}

/// What came of a candidate, and how long it took.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Done {
    /// Before it ran.
    pub prepared: Prepared,
    /// On the device.
    pub judged: Judged,
    /// When the work on the device began, in microseconds since 1970 (UTC).
    pub began_us: u64,
    /// How long it took from then on.
    pub seconds: f64,
    /// Who did it, where it was not this process.
    #[serde(default)]
    pub by: Option<String>,
}

impl Done {
    /// What came of work that has just ended.
    pub fn now(prepared: Prepared, judged: Judged, begun: Begun) -> Self {
        Self { prepared, judged, began_us: begun.began_us, seconds: begun.seconds(), by: None }
    }

    /// A candidate that is turned away before anything is done with it.
    pub fn refused(gate: &str, why: &str) -> Self {
        Self::now(Prepared::default(), rejected(gate, why), Begun::now())
    }
}

fn rejected(gate: &str, why: &str) -> Judged {
    Judged::rejected(vec![GateResult::fail(gate, why)], [].into(), vec![])
}

/// What waiting for a candidate came to.
pub enum Waited {
    /// It is evaluated.
    Done(Done),
    /// It is no longer wanted.
    Stopped,
    /// It is evaluated, and with it the device was lost: nothing more can be.
    Lost(Done, Error),
}

/// What a second measurement said.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Again {
    /// The duels.
    pub judged: Judged,
    /// Whether it is still shown to be faster.
    pub confirmed: bool,
}

/// Whoever evaluates.
pub trait Workplace {
    /// Candidates that are proposed before the first of them is waited for.
    fn depth(&self) -> usize;

    /// Whether a candidate that was begun can be taken back at no cost. Where it cannot, number `k` is always proposed from what
    /// was known when number `k - depth` was recorded: however the work is shared and interrupted, the same is proposed.
    fn takes_back(&self) -> bool;

    /// The default, which everything is compared with; `None` when stopped.
    fn evaluate_default(&mut self, stopped: &dyn Fn() -> bool) -> Result<Option<Done>, Error>;

    /// Begins a candidate.
    fn start(&mut self, job: &Job);

    /// A candidate that was begun is not wanted, as far as is known now.
    fn forget(&mut self, job: &Job);

    /// Waits until a candidate that was begun is evaluated.
    fn wait(&mut self, job: &Job, stopped: &dyn Fn() -> bool) -> Result<Waited, Error>;

    /// Looks at the best for advice.
    fn look(&mut self, best: &Evaluation, stopped: &dyn Fn() -> bool) -> Result<Option<Diagnosis>, Error>;

    /// Measures a winner again, on inputs and in blocks that did not choose it; `None` when stopped.
    fn confirm(&mut self, label: &str, stopped: &dyn Fn() -> bool) -> Result<Option<Again>, Error>;

    /// Takes in another source for a kernel, under a name of its own.
    fn register_source(&mut self, of: &str, name: &str, source: &str) -> Result<(), Error>;

    /// A kernel's source, where it has one.
    fn source(&self, kernel: &str) -> Option<String>;

    /// The files that make a kernel: name and text.
    fn files(&self, kernel: &str) -> Vec<(String, String)>;
}

/// What is measured, and how.
#[derive(Clone)]
pub struct Terms<'a> {
    /// The space.
    pub space: Space,
    /// The problems.
    pub problems: Vec<Problem>,
    /// Seed of the inputs.
    pub seed: u64,
    /// The rule of duels.
    pub rule: Rule,
    /// Sets of inputs to rotate through; the device's own number when `None`.
    pub sets: Option<usize>,
    /// What candidates that would be elites pass last: the profile gate.
    pub last_gate: Option<LastGate<'a>>,
    /// Candidates prepared ahead.
    pub ahead: usize,
}

/// The device of this process.
pub struct Here<'a> {
    device: &'a dyn TimedDevice,
    ahead: &'a mut dyn Ahead,
    insights: &'a dyn InsightSource,
    terms: Terms<'a>,
    materials: &'a OnceCell<Vec<Material>>,
    /// Made when it is first needed: drawing and solving the problems takes a while.
    judge: Option<Judge<'a>>,
    takes_back: bool,
}

impl<'a> Here<'a> {
    /// A device with everything around it; `materials` is where the drawn problems are kept. A default that cannot take a problem
    /// is refused.
    pub fn new(
        device: &'a dyn TimedDevice,
        ahead: &'a mut dyn Ahead,
        insights: &'a dyn InsightSource,
        terms: Terms<'a>,
        materials: &'a OnceCell<Vec<Material>>,
    ) -> Result<Self, Error> {
        let default = terms.space.label(&terms.space.default_point());
        for problem in &terms.problems {
            if let Some(why) = device.refuses(&default, problem) {
                return Err(Error::Tune(format!(
                    "{} cannot be tuned for {problem}: {why}",
                    terms.space.kernel
                )));
            }
        }
        Ok(Self { device, ahead, insights, terms, materials, judge: None, takes_back: true })
    }

    /// The same, which takes nothing back that it has begun, as evaluators do not.
    #[cfg(test)]
    pub(crate) fn that_takes_nothing_back(mut self) -> Self {
        self.takes_back = false;
        self
    }

    /// Draws and solves the problems and loads the default, if that is still to be done.
    pub fn ready(&mut self) -> Result<(), Error> {
        self.judge().map(|_| ())
    }

    fn judge(&mut self) -> Result<&mut Judge<'a>, Error> {
        if self.judge.is_none() {
            if self.materials.get().is_none() {
                let drawn = self.draw(self.terms.seed)?;
                // Nobody else sets it: `self` is borrowed.
                let _ = self.materials.set(drawn);
            }
            let materials = self.materials.get().map_or(&[][..], Vec::as_slice);
            let judge =
                Judge::new(self.device, &self.default_label(), materials, self.terms.rule, Rng::entropy())?;
            self.judge = Some(judge.with_last_gate(self.terms.last_gate));
        }
        // Put there above.
        self.judge.as_mut().ok_or_else(|| Error::Tune("there is nobody to judge".to_owned()))
    }

    fn default_label(&self) -> String {
        self.terms.space.label(&self.terms.space.default_point())
    }

    fn draw(&self, seed: u64) -> Result<Vec<Material>, Error> {
        let draw = |problem: &Problem| {
            let sets = self.terms.sets.unwrap_or_else(|| self.device.input_sets(problem));
            Material::draw(self.device, problem, sets, seed)
        };
        self.terms.problems.iter().map(draw).collect()
    }
}

impl Workplace for Here<'_> {
    fn depth(&self) -> usize {
        self.terms.ahead.max(1)
    }

    fn takes_back(&self) -> bool {
        self.takes_back
    }

    fn evaluate_default(&mut self, _stopped: &dyn Fn() -> bool) -> Result<Option<Done>, Error> {
        self.judge()?;
        let begun = Begun::now();
        let judged = {
            let _lock = DeviceLock::wait(self.device, || true)?;
            self.judge()?.default_result()?
        };
        Ok(Some(Done::now(Prepared::default(), judged, begun)))
    }

    fn start(&mut self, job: &Job) {
        self.ahead.start(&job.label);
    }

    fn forget(&mut self, job: &Job) {
        self.ahead.forget(&job.label);
    }

    fn wait(&mut self, job: &Job, stopped: &dyn Fn() -> bool) -> Result<Waited, Error> {
        self.judge()?;
        let prepared = match self.ahead.wait(&job.label) {
            Ok(prepared) => prepared,
            Err(error @ Error::Kernel(_)) => Prepared {
                gates: vec![GateResult::fail("constraints", error.to_string())],
                ..Prepared::default()
            },
            Err(error) => return Err(error),
        };
        let begun = Begun::now();
        if prepared.stopped() {
            let judged = Judged::rejected(vec![], [].into(), vec![]);
            return Ok(Waited::Done(Done::now(prepared, judged, begun)));
        }
        let judged = {
            let _lock = DeviceLock::wait(self.device, || true)?;
            let elite_above = job.elite_above.unwrap_or(f64::NEG_INFINITY);
            self.judge()?.judge(&job.label, elite_above, || !stopped())
        };
        match judged {
            Ok(_) if stopped() => Ok(Waited::Stopped),
            Ok(judged) => Ok(Waited::Done(Done::now(prepared, judged, begun))),
            Err(error) => {
                let judged = rejected("performance", &error.to_string());
                Ok(Waited::Lost(Done::now(prepared, judged, begun), error))
            }
        }
    }

    fn look(&mut self, best: &Evaluation, _stopped: &dyn Fn() -> bool) -> Result<Option<Diagnosis>, Error> {
        let _lock = DeviceLock::wait(self.device, || true)?;
        Ok(Some(self.insights.look(best, &self.terms.space)))
    }

    fn confirm(&mut self, label: &str, stopped: &dyn Fn() -> bool) -> Result<Option<Again>, Error> {
        // Makes room on the device for what is drawn anew.
        self.judge = None;
        let seed = Rng::entropy();
        let materials = self.draw(seed)?;
        // Nothing to save by giving up early, and a winner deserves more blocks.
        let rule =
            Rule { hopeless_below: 0.0, most_blocks: 2 * self.terms.rule.most_blocks, ..self.terms.rule };
        let judged = {
            let _lock = DeviceLock::wait(self.device, || true)?;
            Judge::new(self.device, &self.default_label(), &materials, rule, seed)?.judge(
                label,
                f64::INFINITY,
                || !stopped(),
            )?
        };
        if stopped() {
            return Ok(None);
        }
        let confirmed = judged.status >= Standing::Accepted
            && judged.shapes.values().any(|shape| shape.verdict == Outcome::Fast && shape.sequence[0] > 1.0);
        Ok(Some(Again { judged, confirmed }))
    }

    fn register_source(&mut self, of: &str, name: &str, source: &str) -> Result<(), Error> {
        self.ahead.register_source(of, name, source)?;
        self.device.register_source(of, name, source)
    }

    fn source(&self, kernel: &str) -> Option<String> {
        self.ahead.source(kernel)
    }

    fn files(&self, kernel: &str) -> Vec<(String, String)> {
        self.ahead.files(kernel)
    }
}

/// The variant that an evaluation is of.
pub fn label_of(evaluation: &Evaluation, space: &Space) -> String {
    label(evaluation.kernel.as_deref().unwrap_or(&space.kernel), &evaluation.point)
}
