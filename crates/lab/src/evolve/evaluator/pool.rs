//! The tune's side: evaluators are started, given work, and watched. One that is lost or slow gives its work back, and its place
//! is filled anew.

use std::{
    collections::{HashMap, VecDeque},
    ffi::OsString,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use evosdpa_kernels::{Registry, VariantId};

use super::{
    Answer, NewSource, Order, Ready, SCHEMA, Task, Word,
    remote::{Event, Remote, What},
};
use crate::{
    Error,
    evolve::{
        insight::{Diagnosis, InsightSource, StaticView},
        log::Evaluation,
        work::{Again, Done, Job, Waited, Workplace, label_of},
    },
};

/// Who is to work, and how patient to be.
#[derive(Clone, Debug)]
pub struct Staff {
    /// What starts an evaluator: a program and its arguments.
    pub command: Vec<OsString>,
    /// How many.
    pub count: usize,
    /// Tasks that each has at once: while one is measured the others are compiled.
    pub ahead: usize,
    /// Longer than this no task takes.
    pub slow_after: Duration,
    /// After so much silence an evaluator counts as lost; they say once a second that they are there.
    pub lost_after: Duration,
}

/// A task that so many evaluators were lost with is given up.
const LOSSES_MAX: usize = 3;
/// A place that was filled so often in a row without one answer is given up.
const STARTS_MAX: usize = 3;
/// Rest before a place is filled again, doubled each time.
const REST: Duration = Duration::from_millis(500);
/// How often one looks around while nothing is heard.
const PATIENCE: Duration = Duration::from_millis(50);

/// All evaluators of a tune.
pub struct Pool<'a> {
    staff: Staff,
    seats: Vec<Seat>,
    events: Receiver<Event>,
    sender: Sender<Event>,
    /// Tasks not given to an evaluator yet.
    queue: VecDeque<u64>,
    /// Tasks without an answer.
    tasks: HashMap<u64, Pending>,
    answers: HashMap<u64, Answer>,
    /// Candidates that were begun.
    begun: HashMap<String, u64>,
    next_id: u64,
    first: Option<Ready>,
    registry: Option<Registry>,
    /// Proposed sources by name, and what they are sources of.
    sources: HashMap<String, String>,
    fatal: Option<String>,
    /// Who is being ended.
    leaving: Vec<JoinHandle<()>>,
    say: &'a dyn Fn(&str),
}

struct Pending {
    order: Order,
    losses: usize,
}

struct Seat {
    /// How often it was filled.
    starts: usize,
    /// How often in a row without an answer.
    failures: usize,
    state: State,
}

enum State {
    Resting { until: Instant },
    Running(Box<Running>),
    GivenUp(String),
}

struct Running {
    remote: Remote,
    /// Its host, once it is ready.
    host: Option<String>,
    /// Its tasks, the one in hand first.
    holds: VecDeque<u64>,
    /// When it began with the first.
    since: Instant,
    /// When it was heard last; a scheduler may let one wait for long before its first word.
    heard: Option<Instant>,
}

impl<'a> Pool<'a> {
    /// Starts the evaluators and waits for the first that can work; `None` when stopped. `say` hears what happens to them.
    pub fn open(
        staff: Staff,
        registry: Option<Registry>,
        say: &'a dyn Fn(&str),
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Self>, Error> {
        let (sender, events) = channel();
        let now = Instant::now();
        let empty = || Seat { starts: 0, failures: 0, state: State::Resting { until: now } };
        let mut pool = Self {
            seats: (0..staff.count).map(|_| empty()).collect(),
            staff,
            events,
            sender,
            queue: VecDeque::new(),
            tasks: HashMap::new(),
            answers: HashMap::new(),
            begun: HashMap::new(),
            next_id: 0,
            first: None,
            registry,
            sources: HashMap::new(),
            fatal: None,
            leaving: Vec::new(),
            say,
        };
        while pool.first.is_none() {
            if stopped() {
                return Ok(None);
            }
            pool.look_around()?;
        }
        Ok(Some(pool))
    }

    /// What the first evaluator is, and so every other.
    pub fn ready(&self) -> Option<&Ready> {
        self.first.as_ref()
    }

    /// Does what is due, and hears one evaluator, if one has something to say.
    fn look_around(&mut self) -> Result<(), Error> {
        self.fill_seats();
        self.end_the_lost_and_the_slow();
        self.hand_out();
        if let Some(why) = self.fatal.take() {
            return Err(Error::Tune(why));
        }
        let given_up = |seat: &Seat| match &seat.state {
            State::GivenUp(why) => Some(why.clone()),
            State::Resting { .. } | State::Running(_) => None,
        };
        if let Some(reasons) = self.seats.iter().map(given_up).collect::<Option<Vec<_>>>() {
            let shown: Vec<String> =
                reasons.iter().enumerate().map(|(place, why)| format!("evaluator {place}: {why}")).collect();
            return Err(Error::Tune(format!(
                "no evaluator is left; {}. What was evaluated is kept, and --resume goes on with it",
                shown.join("; ")
            )));
        }
        match self.events.recv_timeout(PATIENCE) {
            Ok(event) => self.hear(event),
            // This end keeps a sender of its own.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        Ok(())
    }

    fn fill_seats(&mut self) {
        for place in 0..self.seats.len() {
            let seat = &mut self.seats[place];
            if !matches!(seat.state, State::Resting { until } if until <= Instant::now()) {
                continue;
            }
            seat.starts += 1;
            match Remote::start(&self.staff.command, place, seat.starts, self.sender.clone()) {
                Ok(remote) => {
                    let (holds, since) = (VecDeque::new(), Instant::now());
                    let running = Running { remote, host: None, holds, since, heard: None };
                    seat.state = State::Running(Box::new(running));
                }
                Err(why) => seat.state = State::GivenUp(why),
            }
        }
    }

    fn end_the_lost_and_the_slow(&mut self) {
        for place in 0..self.seats.len() {
            let State::Running(running) = &self.seats[place].state else { continue };
            let silent = running.heard.is_some_and(|heard| heard.elapsed() > self.staff.lost_after);
            let slow = !running.holds.is_empty() && running.since.elapsed() > self.staff.slow_after;
            if silent {
                self.lose(
                    place,
                    &format!("nothing was heard of it for {} s", self.staff.lost_after.as_secs_f64()),
                );
            } else if slow {
                self.lose(
                    place,
                    &format!("a task took it more than {} s", self.staff.slow_after.as_secs_f64()),
                );
            }
        }
    }

    fn hand_out(&mut self) {
        while let Some(&id) = self.queue.front() {
            let free = self.seats.iter_mut().filter_map(|seat| match &mut seat.state {
                State::Running(running) if running.host.is_some() => Some(running),
                _ => None,
            });
            let idlest = free.min_by_key(|running| running.holds.len());
            let Some(running) = idlest.filter(|running| running.holds.len() < self.staff.ahead) else {
                break;
            };
            self.queue.pop_front();
            let Some(task) = self.tasks.get(&id) else { continue };
            if running.holds.is_empty() {
                running.since = Instant::now();
            }
            running.holds.push_back(id);
            running.remote.send(&task.order);
        }
    }

    fn hear(&mut self, Event { place, start, what }: Event) {
        if self.seats[place].starts != start {
            return;
        }
        let State::Running(running) = &mut self.seats[place].state else { return };
        running.heard = Some(Instant::now());
        match what {
            What::Said(Word::Alive) => {}
            What::Said(Word::Ready(ready)) => match misfit(&ready, self.first.as_ref()) {
                None => {
                    running.host = Some(ready.host.clone());
                    (self.say)(&format!("evaluator {place} is ready on {}", ready.host));
                    self.first.get_or_insert(*ready);
                }
                Some(why) => self.give_up(place, why),
            },
            What::Said(Word::Answer { id, answer }) => {
                let Some(at) = running.holds.iter().position(|held| *held == id) else { return };
                running.holds.remove(at);
                running.since = Instant::now();
                let by = running.host.as_ref().map(|host| format!("{host}#{place}"));
                self.seats[place].failures = 0;
                self.tasks.remove(&id);
                let answer = match answer {
                    Answer::Done(done) => Answer::Done(Box::new(Done { by, ..*done })),
                    other => other,
                };
                self.answers.insert(id, answer);
            }
            // Before it could work at all, another try would say the same.
            What::Said(Word::GivesUp(why)) if running.host.is_none() => self.give_up(place, why),
            What::Said(Word::GivesUp(why)) => self.lose(place, &why),
            What::Ended(why) => {
                let words = running.remote.last_words();
                let why = if words.is_empty() { why } else { format!("{why}: {words}") };
                self.lose(place, &why);
            }
        }
    }

    /// An evaluator is no more. Its work goes back to the front; the task it had in hand remembers.
    fn lose(&mut self, place: usize, why: &str) {
        let seat = &mut self.seats[place];
        seat.failures += 1;
        let next = if seat.failures >= STARTS_MAX {
            State::GivenUp(why.to_owned())
        } else {
            State::Resting { until: Instant::now() + REST * (1 << seat.failures) }
        };
        let State::Running(running) = std::mem::replace(&mut seat.state, next) else { return };
        let count = running.holds.len();
        (self.say)(&format!("evaluator {place} is lost ({why}); {count} of its tasks go to others"));
        running.holds.iter().rev().for_each(|id| self.queue.push_front(*id));
        let Running { remote, holds, .. } = *running;
        self.leaving.push(std::thread::spawn(|| remote.end()));
        let Some(id) = holds.front() else { return };
        let Some(task) = self.tasks.get_mut(id) else { return };
        task.losses += 1;
        if task.losses >= LOSSES_MAX {
            self.abandon(*id, why);
        }
    }

    fn give_up(&mut self, place: usize, why: String) {
        (self.say)(&format!("evaluator {place} is given up: {why}"));
        if let State::Running(running) = std::mem::replace(&mut self.seats[place].state, State::GivenUp(why))
        {
            self.leaving.push(std::thread::spawn(|| running.remote.end()));
        }
    }

    /// Answers a task that evaluators are lost with.
    fn abandon(&mut self, id: u64, why: &str) {
        self.queue.retain(|queued| *queued != id);
        let Some(Pending { order, losses }) = self.tasks.remove(&id) else { return };
        let why = format!("{losses} evaluators in turn were lost with it; the last: {why}");
        match order.task {
            Task::Candidate(_) => {
                self.answers.insert(id, Answer::Done(Box::new(Done::refused("evaluator", &why))));
            }
            Task::Look(best) => {
                if let Some(first) = &self.first {
                    let said = StaticView.look(&best, &first.space);
                    let said = Diagnosis { without_counters: Some(why), ..said };
                    self.answers.insert(id, Answer::Diagnosis(Box::new(said)));
                }
            }
            Task::Default | Task::Confirm(_) => {
                self.fatal = Some(format!("{} could not be measured: {why}", order.task.kind()));
            }
        }
    }

    fn order(&mut self, label: Option<&str>, task: Task, is_urgent: bool) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let source = label.and_then(|label| {
            let name = VariantId::kernel_of(label).to_owned();
            let of = self.sources.get(&name)?.clone();
            Some(NewSource { of, text: self.source(&name)?, name })
        });
        self.tasks.insert(id, Pending { order: Order { id, source, task }, losses: 0 });
        if is_urgent {
            self.queue.push_front(id);
        } else {
            self.queue.push_back(id);
        }
        id
    }

    /// `None` when stopped.
    fn answer(&mut self, id: u64, stopped: &dyn Fn() -> bool) -> Result<Option<Answer>, Error> {
        loop {
            if let Some(answer) = self.answers.remove(&id) {
                return Ok(Some(answer));
            }
            if stopped() {
                return Ok(None);
            }
            self.look_around()?;
        }
    }
}

impl Drop for Pool<'_> {
    /// All are asked to end at once, and waited for.
    fn drop(&mut self) {
        for seat in self.seats.drain(..) {
            if let State::Running(running) = seat.state {
                self.leaving.push(std::thread::spawn(|| running.remote.end()));
            }
        }
        for thread in self.leaving.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Why an evaluator cannot work for this tune.
fn misfit(ready: &Ready, first: Option<&Ready>) -> Option<String> {
    let own = env!("CARGO_PKG_VERSION");
    if ready.schema != SCHEMA || ready.version != own {
        return Some(format!(
            "{} has evosdpa {} ({}), the tune {own} ({SCHEMA}): install the same on both",
            ready.host, ready.version, ready.schema
        ));
    }
    first.and_then(|first| ready.difference(first))
}

fn beside_the_point(task: &str) -> Error {
    Error::Tune(format!("an evaluator's answer to {task} is an answer to something else"))
}

impl Workplace for Pool<'_> {
    fn depth(&self) -> usize {
        self.staff.count * self.staff.ahead
    }

    fn takes_back(&self) -> bool {
        false
    }

    fn evaluate_default(&mut self, stopped: &dyn Fn() -> bool) -> Result<Option<Done>, Error> {
        let id = self.order(None, Task::Default, true);
        match self.answer(id, stopped)? {
            Some(Answer::Done(done)) => Ok(Some(*done)),
            Some(_) => Err(beside_the_point("the default")),
            None => Ok(None),
        }
    }

    fn start(&mut self, job: &Job) {
        let id = self.order(Some(&job.label), Task::Candidate(job.clone()), false);
        self.begun.insert(job.label.clone(), id);
    }

    fn forget(&mut self, job: &Job) {
        if let Some(id) = self.begun.remove(&job.label) {
            self.queue.retain(|queued| *queued != id);
        }
    }

    fn wait(&mut self, job: &Job, stopped: &dyn Fn() -> bool) -> Result<Waited, Error> {
        let Some(id) = self.begun.remove(&job.label) else {
            return Err(Error::Tune(format!("{} was never begun", job.label)));
        };
        match self.answer(id, stopped)? {
            Some(Answer::Done(done)) => Ok(Waited::Done(*done)),
            Some(_) => Err(beside_the_point(&job.label)),
            None => Ok(Waited::Stopped),
        }
    }

    fn look(&mut self, best: &Evaluation, stopped: &dyn Fn() -> bool) -> Result<Option<Diagnosis>, Error> {
        let label = self.first.as_ref().map(|first| label_of(best, &first.space));
        let id = self.order(label.as_deref(), Task::Look(Box::new(best.clone())), true);
        match self.answer(id, stopped)? {
            Some(Answer::Diagnosis(said)) => Ok(Some(*said)),
            Some(_) => Err(beside_the_point("a look at the best")),
            None => Ok(None),
        }
    }

    fn confirm(&mut self, label: &str, stopped: &dyn Fn() -> bool) -> Result<Option<Again>, Error> {
        let id = self.order(Some(label), Task::Confirm(label.to_owned()), true);
        match self.answer(id, stopped)? {
            Some(Answer::Again(again)) => Ok(Some(*again)),
            Some(_) => Err(beside_the_point("the confirmation")),
            None => Ok(None),
        }
    }

    fn register_source(&mut self, of: &str, name: &str, source: &str) -> Result<(), Error> {
        let Some(registry) = &mut self.registry else {
            return Err(Error::Tune(format!(
                "{of} is part of the program: only CUDA kernels can be given another source"
            )));
        };
        registry.register_source(of, name, source)?;
        self.sources.insert(name.to_owned(), of.to_owned());
        Ok(())
    }

    fn source(&self, kernel: &str) -> Option<String> {
        let kernel = self.registry.as_ref()?.kernel(kernel).ok()?;
        Some(kernel.source.to_string())
    }

    fn files(&self, kernel: &str) -> Vec<(String, String)> {
        let own = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
        let kernel = self.registry.as_ref().and_then(|registry| registry.kernel(kernel).ok());
        kernel.map(|kernel| kernel.files().into_iter().map(own).collect()).unwrap_or_default()
    }
}
