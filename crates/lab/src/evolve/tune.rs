//! The loop: propose, prepare ahead, judge, record.

use std::{
    collections::{HashSet, VecDeque},
    path::PathBuf,
    time::{Duration, Instant},
};

use evosdpa_core::Problem;

use super::{
    insight::{self, Diagnosis, Prior},
    log::{self, Confirmation, Evaluation, Header, Log, Standing},
    population::{self, EliteFile},
    proposer::{self, Proposer},
    resume, sources,
    space::{Point, Space, label},
    strategy::{self, Proposal, View},
    trial::trials,
    work::{Done, Job, Waited, Workplace, label_of},
};
use crate::{Error, device::DeviceId, profile::Insight};
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
    /// The device's name on the command line.
    pub device: DeviceId,
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
    /// What earlier tunes learned of insights.
    pub prior: Prior,
    /// Whether elites have to pass a profile gate.
    pub has_profile_gate: bool,
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
    place: &mut dyn Workplace,
    mut proposer: Option<Proposer>,
    request: &Request<'_>,
    mut watch: impl FnMut(&Evaluation) -> bool,
    interrupted: &dyn Fn() -> bool,
) -> Result<Finished, Error> {
    let start = Instant::now();
    let mut strategy = strategy::by_name(&request.strategy)?;
    let _held = resume::hold(&request.folder)?;
    let mut state = State::begin(request, place)?;
    let before = state.history.len();
    let ended = if state.open(place, &mut watch, interrupted)? {
        state.search(place, strategy.as_mut(), proposer.as_mut(), start, &mut watch, interrupted)?
    } else {
        Ended::Interrupted
    };
    if ended != Ended::Interrupted {
        state.confirm(place, interrupted)?;
    }
    let elites = state.write_elites()?;
    let new = state.history.len() - before;
    Ok(Finished { header: state.header, history: state.history, elites, ended, new })
}

/// How many evaluations were known when a number was proposed, with so many under way at once; the default always is.
fn seen_by(number: usize, depth: usize) -> usize {
    (number + 1).saturating_sub(depth).max(1)
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

/// A candidate that was begun.
struct Underway {
    candidate: Candidate,
    job: Job,
}

struct State<'a> {
    log: Log,
    request: &'a Request<'a>,
    header: Header,
    history: Vec<Evaluation>,
    taken: HashSet<Point>,
    diagnoses: Vec<Diagnosis>,
    confirmation: Option<Confirmation>,
}

/// Evaluations that a proposer sees of the past.
const SEEN_BY_PROPOSERS: usize = 20;

impl<'a> State<'a> {
    /// Begins, or goes on with what is in the folder.
    fn begin(request: &'a Request<'a>, place: &mut dyn Workplace) -> Result<Self, Error> {
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
            device: request.device,
            device_name: request.device_name.clone(),
            arch: request.arch.clone(),
            problems: request.problems.iter().map(ToString::to_string).collect(),
            strategy: request.strategy.clone(),
            seed: request.seed,
        };
        let (log, contents) = resume::begin(&request.folder, &header, request.resume)?;
        let state = Self {
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
            header: contents.header,
            diagnoses: contents.diagnoses,
        };
        sources::register_again(&request.folder, &request.space.kernel, &state.history, place)?;
        Ok(state)
    }

    /// Evaluates the default, if that is still to be done; says no when stopped.
    fn open(
        &mut self,
        place: &mut dyn Workplace,
        watch: &mut impl FnMut(&Evaluation) -> bool,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool, Error> {
        if self.history.is_empty() {
            let Some(done) = place.evaluate_default(interrupted)? else { return Ok(false) };
            let default = Candidate::of(Proposal {
                point: self.request.space.default_point(),
                operator: population::DEFAULT,
                parents: vec![],
                insight: None,
            });
            let evaluation = self.record(default, done)?;
            watch(&evaluation);
        }
        self.look(place, interrupted)?;
        Ok(true)
    }

    /// Proposes, waits and records until there is nothing more to do.
    fn search(
        &mut self,
        place: &mut dyn Workplace,
        strategy: &mut dyn strategy::Strategy,
        mut proposer: Option<&mut Proposer>,
        start: Instant,
        watch: &mut impl FnMut(&Evaluation) -> bool,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Ended, Error> {
        let request = self.request;
        let mut queue: VecDeque<Underway> = VecDeque::new();
        // A proposer that sees what became of its last answer, where nothing is gained by asking ahead.
        let depth = if proposer.is_some() && place.takes_back() { 1 } else { place.depth() };
        let done = |why: &str| Ok(Ended::Done(why.to_owned()));
        loop {
            let evaluated = self.history.len();
            match () {
                () if evaluated >= request.evaluations => return done("the budget of evaluations is spent"),
                () if request.limit.is_some_and(|limit| start.elapsed() > limit) => {
                    return done("the time is spent");
                }
                () if interrupted() => return Ok(Ended::Interrupted),
                () => {}
            }
            while queue.len() < depth && evaluated + queue.len() < request.evaluations {
                let number = evaluated + queue.len();
                let seen = if place.takes_back() { evaluated } else { evaluated.min(seen_by(number, depth)) };
                let candidate = match &mut proposer {
                    Some(proposer) => match self.ask(proposer, place, &queue, number as u64, interrupted)? {
                        Asked::Candidate(candidate) => Some(candidate),
                        Asked::End(why) => return Ok(Ended::Done(why)),
                    },
                    None => self.propose(strategy, &queue, number as u64, seen),
                };
                let Some(candidate) = candidate else { break };
                let elite_above = population::elite_above(&self.history[..seen], request.top);
                let job = Job { label: candidate.label(&request.space.kernel), elite_above };
                if candidate.refused.is_none() {
                    place.start(&job);
                }
                queue.push_back(Underway { candidate, job });
            }
            if interrupted() {
                return Ok(Ended::Interrupted);
            }
            let Some(Underway { candidate, job }) = queue.pop_front() else {
                return done("every point has been evaluated");
            };
            let waited = match &candidate.refused {
                Some(why) => Waited::Done(Done::refused("proposal", why)),
                None => place.wait(&job, interrupted)?,
            };
            let evaluation = match waited {
                Waited::Done(done) => self.record(candidate, done)?,
                Waited::Stopped => return Ok(Ended::Interrupted),
                // Recorded, so that a resume does not meet it again; then the tune ends, because the device no longer answers.
                Waited::Lost(done, error) => {
                    self.record(candidate, done)?;
                    return Err(error);
                }
            };
            if !watch(&evaluation) {
                return Ok(Ended::Interrupted);
            }
            if self.look(place, interrupted)? && strategy.heeds_the_best() && place.takes_back() {
                // What is on its way was proposed without knowing of the new best and what is said of it.
                queue.drain(..).for_each(|outdated| place.forget(&outdated.job));
            }
        }
    }

    /// Looks at a new best for advice, and says whether there is one. What was said of it before a resume is not asked for
    /// again.
    fn look(&mut self, place: &mut dyn Workplace, interrupted: &dyn Fn() -> bool) -> Result<bool, Error> {
        let anchors = population::anchors(&self.history, 1);
        let known = |number: u64| self.diagnoses.iter().any(|known| known.number == number);
        let Some(best) = anchors.first().filter(|best| !known(best.number)) else { return Ok(false) };
        let Some(diagnosis) = place.look(best, interrupted)? else { return Ok(false) };
        self.log.diagnose(&diagnosis)?;
        self.diagnoses.push(diagnosis);
        Ok(true)
    }

    /// Advice on the best of an earlier time.
    fn insights(&self, history: &[Evaluation]) -> &[Insight] {
        let best = population::anchors(history, 1).first().map(|best| best.number);
        let diagnosis = self.diagnoses.iter().find(|known| Some(known.number) == best);
        diagnosis.map_or(&[], |diagnosis| diagnosis.insights.as_slice())
    }

    /// A candidate, from what was known when `seen` evaluations were.
    fn propose(
        &self,
        strategy: &mut dyn strategy::Strategy,
        queue: &VecDeque<Underway>,
        number: u64,
        seen: usize,
    ) -> Option<Candidate> {
        let (history, later) = self.history.split_at(seen);
        let underway = queue.iter().map(|underway| &underway.candidate);
        let others =
            later.iter().map(|e| (&e.kernel, &e.point)).chain(underway.map(|c| (&c.kernel, &c.point)));
        let mut taken = self.taken.clone();
        taken.extend(others.filter(|(kernel, _)| kernel.is_none()).map(|(_, point)| point.clone()));
        let prior = self.request.prior.with(history);
        let keeps = |point: &Point| (self.request.breaks)(point).is_none();
        let view = View {
            space: &self.request.space,
            keeps: &keeps,
            history,
            taken: &taken,
            insights: self.insights(history),
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
        place: &mut dyn Workplace,
        queue: &VecDeque<Underway>,
        number: u64,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Asked, Error> {
        let kernel = &self.request.space.kernel;
        let source = place.source(kernel);
        let files = place.files(kernel);
        let others = files.iter().filter(|(_, text)| Some(text) != source.as_ref());
        let elites = population::anchors(&self.history, self.request.top);
        let sources: Vec<Option<String>> = elites
            .iter()
            .map(|elite| elite.kernel.as_ref().and_then(|kernel| place.source(kernel)))
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
            insights: self.insights(&self.history),
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
            candidate.refused = sources::register(&self.request.folder, kernel, &name, &source, place)?.err();
            candidate.kernel = Some(name);
        }
        let space = &self.request.space;
        let again = || {
            let same = |e: &&Evaluation| e.kernel == candidate.kernel && e.point == candidate.point;
            let underway = |other: &Underway| {
                other.candidate.kernel == candidate.kernel && other.candidate.point == candidate.point
            };
            let before = self.history.iter().find(same);
            before
                .map(|e| format!("it was already evaluated as number {}", e.number))
                .or_else(|| queue.iter().any(underway).then(|| "it is being evaluated already".to_owned()))
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
    fn record(&mut self, candidate: Candidate, done: Done) -> Result<Evaluation, Error> {
        let Done { prepared, judged, began_us, seconds, by } = done;
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
            began_us: Some(began_us),
            seconds,
            spans,
            by,
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
        let Request { top, has_profile_gate, .. } = self.request;
        let confirmation = self.confirmation.as_ref();
        let file = population::elite_file(&self.header, &self.history, confirmation, *top, *has_profile_gate);
        population::write_elites(&self.request.folder, &file)?;
        Ok(file)
    }

    /// Measures the winner once more, on inputs and in blocks that did not choose it.
    fn confirm(&mut self, place: &mut dyn Workplace, interrupted: &dyn Fn() -> bool) -> Result<(), Error> {
        let Some(&best) = population::elites(&self.history, 1).first() else { return Ok(()) };
        let known = self.confirmation.as_ref().is_some_and(|known| known.number == best.number);
        if known || best.number == 0 || best.status < Standing::Accepted {
            return Ok(());
        }
        let number = best.number;
        let Some(again) = place.confirm(&label_of(best, &self.request.space), interrupted)? else {
            return Ok(());
        };
        let confirmation = Confirmation {
            number,
            shapes: again.judged.shapes,
            fitness: again.judged.fitness.unwrap_or(0.0),
            confirmed: again.confirmed,
        };
        self.log.confirm(&confirmation)?;
        self.confirmation = Some(confirmation);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
