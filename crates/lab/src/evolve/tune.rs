//! The loop: propose, prepare ahead, judge, record.

use std::{
    collections::{HashSet, VecDeque},
    path::PathBuf,
    time::{Duration, Instant},
};

use evosdpa_core::Problem;

use super::{
    ahead::{Ahead, Prepared},
    gates::{DeviceLock, Judge, Judged, LastGate, Material},
    insight::{self, Diagnosis, InsightSource, Prior},
    log::{self, Confirmation, Evaluation, Header, Log, Standing},
    population::{self, EliteFile},
    proposer::{self, Proposer},
    resume, sources,
    space::{Point, Space, label},
    span::Begun,
    strategy::{self, Proposal, View},
    trial::trials,
};
use crate::{
    Error,
    device::TimedDevice,
    gate::GateResult,
    measure::{compare::Outcome, duel::Rule},
    profile::Insight,
};
use evosdpa_oracle::rng::Rng;

/// What is to be tuned, and for how long.
pub struct Request<'a> {
    /// The tune's folder.
    pub folder: PathBuf,
    /// The problems.
    pub problems: Vec<Problem>,
    /// The space.
    pub space: Space,
    /// Why a point breaks a constraint, if it does.
    pub breaks: &'a dyn Fn(&Point) -> Option<String>,
    /// The device's own name.
    pub device_name: String,
    /// What its kernels are compiled for.
    pub arch: String,
    /// The strategy's name.
    pub strategy: String,
    /// Seed of everything that chance decides.
    pub seed: u64,
    /// Evaluations in all, those before a resume included.
    pub evaluations: usize,
    /// Time, counted from now.
    pub limit: Option<Duration>,
    /// Elites to keep.
    pub top: usize,
    /// Whether to go on with what is in the folder.
    pub resume: bool,
    /// Candidates prepared ahead.
    pub ahead: usize,
    /// The rule of duels.
    pub rule: Rule,
    /// What earlier tunes learned of insights.
    pub prior: Prior,
    /// Sets of inputs to rotate through; the device's own number when `None`.
    pub sets: Option<usize>,
    /// What candidates that would be elites pass last: the profile gate.
    pub last_gate: Option<LastGate<'a>>,
}

/// What a tune ended with.
pub struct Finished {
    /// What the log holds.
    pub header: Header,
    /// All evaluations.
    pub history: Vec<Evaluation>,
    /// What `elite.json` holds.
    pub elites: EliteFile,
    /// Why it ended.
    pub ended: Ended,
    /// Evaluations of this run, the rest were there before.
    pub new: usize,
}

/// Why a tune ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was stopped.
    Interrupted,
    /// There was nothing more to do, for this reason.
    Done(String),
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Interrupted => f.write_str("interrupted"),
            Self::Done(why) => f.write_str(why),
        }
    }
}

/// Runs a tune to its end. `watch` sees every evaluation as it is recorded and ends the tune by answering no.
pub fn tune(
    device: &dyn TimedDevice,
    ahead: &mut dyn Ahead,
    source: &dyn InsightSource,
    mut proposer: Option<Proposer>,
    request: &Request<'_>,
    mut watch: impl FnMut(&Evaluation) -> bool,
    interrupted: &dyn Fn() -> bool,
) -> Result<Finished, Error> {
    let start = Instant::now();
    let mut strategy = strategy::by_name(&request.strategy)?;
    // One that no draw and no step finds would be noticed only after everything was solved.
    let keeps = |point: &Point| (request.breaks)(point).is_none();
    let default = request.space.default_point();
    if !keeps(&default) && request.space.draw(&mut Rng::new(request.seed), &keeps).is_none() {
        return Err(Error::Tune(format!(
            "no point of {}'s space keeps its constraints",
            request.space.kernel
        )));
    }
    let header = Header {
        schema: log::SCHEMA.to_owned(),
        space: request.space.clone(),
        device: device.id(),
        device_name: request.device_name.clone(),
        arch: request.arch.clone(),
        problems: request.problems.iter().map(ToString::to_string).collect(),
        strategy: request.strategy.clone(),
        seed: request.seed,
    };
    let default_label = request.space.label(&default);
    for problem in &request.problems {
        if let Some(why) = device.refuses(&default_label, problem) {
            return Err(Error::Tune(format!(
                "{} cannot be tuned for {problem}: {why}",
                request.space.kernel
            )));
        }
    }
    let _held = resume::hold(&request.folder)?;
    let (log, contents) = resume::begin(&request.folder, &header, request.resume)?;
    let header = contents.header;
    let mut state = State {
        // What the machine, or its noise, kept from being evaluated may be proposed again.
        taken: contents
            .evaluations
            .iter()
            .filter(|e| e.kernel.is_none() && !e.may_be_tried_again(&contents.evaluations))
            .map(|e| e.point.clone())
            .collect(),
        history: contents.evaluations,
        confirmation: contents.confirmations.into_iter().next_back(),
        log,
        request,
        header,
        diagnoses: contents.diagnoses,
        looked_at: None,
        insights: Vec::new(),
    };
    sources::register_again(&request.folder, &request.space.kernel, &state.history, ahead, device)?;
    state.look(source)?;

    let materials = state.materials(device, request.seed)?;
    let mut judge = Judge::new(device, &default_label, &materials, request.rule, Rng::entropy())?
        .with_last_gate(request.last_gate);
    let before = state.history.len();
    if state.history.is_empty() {
        let begun = Begun::now();
        let judged = {
            let _lock = DeviceLock::wait(device.id())?;
            judge.default_result()?
        };
        let proposal = Candidate::of(Proposal {
            point: default,
            operator: population::DEFAULT,
            parents: vec![],
            insight: None,
        });
        let evaluation = state.record(proposal, Prepared::default(), judged, begun)?;
        watch(&evaluation);
        state.look(source)?;
    }

    let mut queue: VecDeque<Candidate> = VecDeque::new();
    let depth = if proposer.is_some() { 1 } else { request.ahead.max(1) };
    let done = |why: &str| Ended::Done(why.to_owned());
    let ended = 'evaluations: loop {
        let evaluated = state.history.len();
        match () {
            () if evaluated >= request.evaluations => break done("the budget of evaluations is spent"),
            () if request.limit.is_some_and(|limit| start.elapsed() > limit) => {
                break done("the time is spent");
            }
            () if interrupted() => break Ended::Interrupted,
            () => {}
        }
        while queue.len() < depth && evaluated + queue.len() < request.evaluations {
            let number = (evaluated + queue.len()) as u64;
            let candidate = match &mut proposer {
                Some(proposer) => match state.ask(proposer, ahead, device, number, interrupted)? {
                    Asked::Candidate(candidate) => Some(candidate),
                    Asked::End(why) => break 'evaluations Ended::Done(why),
                },
                None => state.propose(strategy.as_mut(), number),
            };
            let Some(candidate) = candidate else { break };
            if candidate.refused.is_none() {
                if candidate.kernel.is_none() {
                    state.taken.insert(candidate.point.clone());
                }
                ahead.start(&candidate.label(&request.space.kernel));
            }
            queue.push_back(candidate);
        }
        if interrupted() {
            break Ended::Interrupted;
        }
        let Some(candidate) = queue.pop_front() else { break done("every point has been evaluated") };
        let name = candidate.label(&request.space.kernel);
        let (prepared, judged, begun) = match &candidate.refused {
            Some(why) => (Prepared::default(), rejected("proposal", why), Begun::now()),
            None => {
                let prepared = match ahead.wait(&name) {
                    Ok(prepared) => prepared,
                    Err(error @ Error::Kernel(_)) => Prepared {
                        gates: vec![GateResult::fail("constraints", error.to_string())],
                        ..Prepared::default()
                    },
                    Err(error) => return Err(error),
                };
                let begun = Begun::now();
                let judged = if prepared.stopped() {
                    Judged::rejected(vec![], [].into(), vec![])
                } else {
                    let _lock = DeviceLock::wait(device.id())?;
                    let elite_above = population::elite_above(&state.history, request.top);
                    let judged = judge.judge(&name, elite_above, || !interrupted());
                    match judged {
                        Ok(_) if interrupted() => break Ended::Interrupted,
                        Ok(judged) => judged,
                        // Recorded, so that a resume does not meet it again; then the tune ends, because the device
                        // no longer answers.
                        Err(error) => {
                            let judged = rejected("performance", &error.to_string());
                            state.record(candidate, prepared, judged, begun)?;
                            return Err(error);
                        }
                    }
                };
                (prepared, judged, begun)
            }
        };
        let evaluation = state.record(candidate, prepared, judged, begun)?;
        if !watch(&evaluation) {
            break Ended::Interrupted;
        }
        if state.look(source)? && strategy.heeds_the_best() {
            // What is on its way was proposed without knowing of the new best and what is said of it.
            for outdated in queue.drain(..) {
                state.taken.remove(&outdated.point);
                ahead.forget(&outdated.label(&request.space.kernel));
            }
        }
    };
    drop(judge);
    if ended != Ended::Interrupted {
        state.confirm(device, &default_label, interrupted)?;
    }
    let elites = state.write_elites()?;
    let new = state.history.len() - before;
    Ok(Finished { header: state.header, history: state.history, elites, ended, new })
}

fn rejected(gate: &str, why: &str) -> Judged {
    Judged::rejected(vec![GateResult::fail(gate, why)], [].into(), vec![])
}

/// What a proposer was asked for.
enum Asked {
    Candidate(Candidate),
    /// There will be no more, for this reason.
    End(String),
}

/// A candidate on its way.
struct Candidate {
    kernel: Option<String>,
    point: Point,
    operator: String,
    parents: Vec<u64>,
    insight: Option<String>,
    rationale: Option<String>,
    /// Why it will not even be prepared.
    refused: Option<String>,
}

impl Candidate {
    fn of(proposal: Proposal) -> Self {
        let Proposal { point, operator, parents, insight } = proposal;
        let operator = operator.to_owned();
        Self { kernel: None, point, operator, parents, insight, rationale: None, refused: None }
    }

    fn label(&self, kernel: &str) -> String {
        label(self.kernel.as_deref().unwrap_or(kernel), &self.point)
    }
}

struct State<'a> {
    log: Log,
    request: &'a Request<'a>,
    header: Header,
    history: Vec<Evaluation>,
    taken: HashSet<Point>,
    diagnoses: Vec<Diagnosis>,
    /// The evaluation that `insights` are about.
    looked_at: Option<u64>,
    insights: Vec<Insight>,
    confirmation: Option<Confirmation>,
}

/// Evaluations that a proposer sees of the past.
const SEEN_BY_PROPOSERS: usize = 20;

impl State<'_> {
    fn materials(&self, device: &dyn TimedDevice, seed: u64) -> Result<Vec<Material>, Error> {
        let draw = |problem: &Problem| {
            let sets = self.request.sets.unwrap_or_else(|| device.input_sets(problem));
            Material::draw(device, problem, sets, seed)
        };
        self.request.problems.iter().map(draw).collect()
    }

    /// Looks at a new best for advice, and says whether there is one. What was said of it before a resume is not asked for
    /// again.
    fn look(&mut self, source: &dyn InsightSource) -> Result<bool, Error> {
        let anchors = population::anchors(&self.history, 1);
        let Some(&best) = anchors.first().filter(|best| self.looked_at != Some(best.number)) else {
            return Ok(false);
        };
        self.looked_at = Some(best.number);
        if let Some(known) = self.diagnoses.iter().find(|known| known.number == best.number) {
            self.insights.clone_from(&known.insights);
            return Ok(true);
        }
        let diagnosis = {
            let _lock = DeviceLock::wait(self.header.device)?;
            source.look(best, &self.request.space)
        };
        self.log.diagnose(&diagnosis)?;
        self.insights.clone_from(&diagnosis.insights);
        self.diagnoses.push(diagnosis);
        Ok(true)
    }

    fn propose(&self, strategy: &mut dyn strategy::Strategy, number: u64) -> Option<Candidate> {
        let prior = self.request.prior.with(&self.history);
        let keeps = |point: &Point| (self.request.breaks)(point).is_none();
        let view = View {
            space: &self.request.space,
            keeps: &keeps,
            history: &self.history,
            taken: &self.taken,
            insights: &self.insights,
            prior: &prior,
            budget: self.request.evaluations,
            top: self.request.top,
        };
        strategy.propose(&view, &mut Rng::of_series(self.header.seed, number)).map(Candidate::of)
    }

    /// Asks a proposer. Whatever it does wrong is recorded as one rejected evaluation; an error is about the disk, or what it
    /// gave up for.
    fn ask(
        &self,
        proposer: &mut Proposer,
        ahead: &mut dyn Ahead,
        device: &dyn TimedDevice,
        number: u64,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Asked, Error> {
        let kernel = &self.request.space.kernel;
        let source = ahead.source(kernel);
        let files = ahead.files(kernel);
        let others = files.iter().filter(|(_, text)| Some(text) != source.as_ref());
        let elites = population::anchors(&self.history, self.request.top);
        let sources: Vec<Option<String>> = elites
            .iter()
            .map(|elite| elite.kernel.as_ref().and_then(|kernel| ahead.source(kernel)))
            .collect();
        let seen = self.history.len().saturating_sub(SEEN_BY_PROPOSERS);
        let request = proposer::Request {
            schema: proposer::SCHEMA,
            task: &self.header,
            number,
            left: (self.request.evaluations as u64).saturating_sub(number),
            source: source.as_deref(),
            files: others.map(|(name, text)| (name.as_str(), text.as_str())).collect(),
            elites: elites
                .iter()
                .zip(&sources)
                .map(|(evaluation, source)| proposer::EliteView { evaluation, source: source.as_deref() })
                .collect(),
            insights: &self.insights,
            history: &self.history[seen..],
        };
        let asked = proposer.ask(&request, stopped);
        let parents = elites.first().map(|best| best.number).into_iter().collect();
        let mut candidate =
            Candidate::of(Proposal { point: Point::new(), operator: "proposer", parents, insight: None });
        let answer = match asked {
            Ok(answer) => answer,
            Err(why) => {
                candidate.refused = Some(why);
                return Ok(Asked::Candidate(candidate));
            }
        };
        if let Some(why) = answer.error {
            return Err(Error::Proposer(why));
        }
        if let Some(why) = answer.end {
            return Ok(Asked::End(why));
        }
        candidate.operator = answer.operator.unwrap_or(candidate.operator);
        candidate.parents = answer.parents.unwrap_or(candidate.parents);
        candidate.rationale = answer.rationale;
        if answer.none.is_some() {
            candidate.refused = answer.none;
            return Ok(Asked::Candidate(candidate));
        }
        candidate.point = self.request.space.default_point();
        candidate.point.extend(answer.tunables);
        if let Some(source) = answer.source {
            let name = sources::name(kernel, number);
            candidate.refused =
                sources::register(&self.request.folder, kernel, &name, &source, ahead, device)?.err();
            candidate.kernel = Some(name);
        }
        let space = &self.request.space;
        let again = || {
            let same = |e: &&Evaluation| e.kernel == candidate.kernel && e.point == candidate.point;
            self.history.iter().find(same).map(|e| format!("it was already evaluated as number {}", e.number))
        };
        candidate.refused = candidate
            .refused
            .take()
            .or_else(|| space.refuses(&candidate.point))
            .or_else(|| (self.request.breaks)(&candidate.point))
            .or_else(again);
        Ok(Asked::Candidate(candidate))
    }

    /// Puts an evaluation on the disk, then everything that follows from it.
    fn record(
        &mut self,
        candidate: Candidate,
        prepared: Prepared,
        judged: Judged,
        begun: Begun,
    ) -> Result<Evaluation, Error> {
        let seconds = begun.seconds();
        let Candidate { kernel, point, operator, parents, insight, rationale, refused } = candidate;
        let (mut gates, mut spans) = (prepared.gates, prepared.spans);
        gates.extend(judged.gates);
        spans.extend(judged.spans);
        let mut evaluation = Evaluation {
            number: self.history.len() as u64,
            kernel,
            point,
            operator,
            parents,
            insight,
            helped: None,
            trials: vec![],
            rationale,
            gates,
            resources: prepared.resources,
            shapes: judged.shapes,
            fitness: judged.fitness,
            status: judged.status,
            began_us: Some(begun.began_us),
            seconds,
            spans,
        };
        if evaluation.insight.is_some() {
            let parent = evaluation.parents.first().and_then(|number| self.history.get(*number as usize));
            evaluation.helped = Some(parent.is_some_and(|parent| insight::helped(&evaluation, parent)));
        }
        if refused.is_none() {
            evaluation.trials = trials(&evaluation, &self.history, &self.diagnoses);
        }
        self.log.add(&evaluation)?;
        self.history.push(evaluation.clone());
        if evaluation.kernel.is_none() {
            if evaluation.may_be_tried_again(&self.history) {
                self.taken.remove(&evaluation.point);
            } else {
                self.taken.insert(evaluation.point.clone());
            }
        }
        self.write_elites()?;
        self.request.prior.with(&self.history).write(&self.request.folder)?;
        Ok(evaluation)
    }

    fn write_elites(&self) -> Result<EliteFile, Error> {
        let Request { top, last_gate, .. } = self.request;
        let confirmation = self.confirmation.as_ref();
        let file =
            population::elite_file(&self.header, &self.history, confirmation, *top, last_gate.is_some());
        population::write_elites(&self.request.folder, &file)?;
        Ok(file)
    }

    /// Measures the winner once more, on inputs and in blocks that did not choose it.
    fn confirm(
        &mut self,
        device: &dyn TimedDevice,
        default: &str,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let Some(best) = population::elites(&self.history, 1).first().map(|best| (*best).clone()) else {
            return Ok(());
        };
        let known = self.confirmation.as_ref().is_some_and(|known| known.number == best.number);
        if known || best.number == 0 || best.status < Standing::Accepted {
            return Ok(());
        }
        let seed = Rng::entropy();
        let materials = self.materials(device, seed)?;
        // Nothing to save by giving up early, and a winner deserves more blocks.
        let rule =
            Rule { hopeless_below: 0.0, most_blocks: 2 * self.request.rule.most_blocks, ..self.request.rule };
        let name = label(best.kernel.as_deref().unwrap_or(&self.request.space.kernel), &best.point);
        let judged = {
            let _lock = DeviceLock::wait(device.id())?;
            Judge::new(device, default, &materials, rule, seed)?
                .judge(&name, f64::NEG_INFINITY, || !interrupted())?
        };
        if interrupted() {
            return Ok(());
        }
        let confirmed = judged.status >= Standing::Accepted
            && judged.shapes.values().any(|shape| shape.verdict == Outcome::Fast && shape.sequence[0] > 1.0);
        let confirmation = Confirmation {
            number: best.number,
            shapes: judged.shapes,
            fitness: judged.fitness.unwrap_or(0.0),
            confirmed,
        };
        self.log.confirm(&confirmation)?;
        self.confirmation = Some(confirmation);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
