//! The evaluator's side: read tasks, work, answer, and say now and then that one is still there.

use std::{
    collections::HashSet,
    io::{BufRead, Write},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

use super::{Answer, Order, Ready, Task, Word};
use crate::{
    Error,
    evolve::work::{Here, Waited, Workplace},
};

/// How often an evaluator says that it is still there.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// Works until the input ends, which ends the work in hand too. `abandoned` is called when it has ended, from another thread: what
/// is being done may take long, or hang.
pub fn serve(
    place: &mut Here<'_>,
    ready: Ready,
    input: impl BufRead + Send + 'static,
    output: impl Write + Send + 'static,
    abandoned: impl FnOnce() + Send + 'static,
) -> Result<(), Error> {
    let speaker = Speaker(Arc::new(Mutex::new(output)));
    let closed = Arc::new(AtomicBool::new(false));
    let orders = {
        let (sender, orders) = channel();
        let closed = Arc::clone(&closed);
        std::thread::spawn(move || {
            for line in input.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
            closed.store(true, Ordering::Relaxed);
            drop(sender);
            abandoned();
        });
        orders
    };
    {
        let (speaker, closed) = (speaker.clone(), Arc::clone(&closed));
        std::thread::spawn(move || {
            while !closed.load(Ordering::Relaxed) && speaker.say(&Word::Alive) {
                std::thread::sleep(ALIVE_EVERY);
            }
        });
    }
    place.ready()?;
    speaker.say(&Word::Ready(Box::new(ready)));
    work(place, &orders, &speaker, &|| closed.load(Ordering::Relaxed))
}

/// Tells the tune that this evaluator cannot work, and why.
pub fn give_up(output: impl Write, why: &str) {
    Speaker(Arc::new(Mutex::new(output))).say(&Word::GivesUp(why.to_owned()));
}

fn work(
    place: &mut Here<'_>,
    orders: &Receiver<String>,
    speaker: &Speaker<impl Write>,
    stopped: &dyn Fn() -> bool,
) -> Result<(), Error> {
    let mut queue = std::collections::VecDeque::new();
    let mut sources = HashSet::new();
    loop {
        // Whatever has come meanwhile is begun, so that it is compiled while another is measured.
        while let Ok(line) = orders.try_recv() {
            queue.push_back(begin(place, &line, &mut sources)?);
        }
        let Some(order) = queue.pop_front() else {
            let Ok(line) = orders.recv() else { return Ok(()) };
            queue.push_back(begin(place, &line, &mut sources)?);
            continue;
        };
        let answer = match &order.task {
            Task::Default => place.evaluate_default(stopped)?.map(|done| Answer::Done(Box::new(done))),
            Task::Candidate(job) => match place.wait(job, stopped)? {
                Waited::Done(done) => Some(Answer::Done(Box::new(done))),
                Waited::Stopped => None,
                // Whether it was the candidate's doing shows when another evaluator meets it.
                Waited::Lost(_, error) => return Err(error),
            },
            Task::Look(best) => place.look(best, stopped)?.map(|said| Answer::Diagnosis(Box::new(said))),
            Task::Confirm(label) => {
                place.confirm(label, stopped)?.map(|again| Answer::Again(Box::new(again)))
            }
        };
        let Some(answer) = answer else { return Ok(()) };
        if !speaker.say(&Word::Answer { id: order.id, answer }) {
            return Ok(());
        }
    }
}

fn begin(place: &mut Here<'_>, line: &str, sources: &mut HashSet<String>) -> Result<Order, Error> {
    let order: Order = serde_json::from_str(line)
        .map_err(|error| Error::Tune(format!("an evaluator was sent what is no task: {error}")))?;
    if let Some(source) = &order.source
        && sources.insert(source.name.clone())
    {
        place.register_source(&source.of, &source.name, &source.text)?;
    }
    if let Task::Candidate(job) = &order.task {
        place.start(job);
    }
    Ok(order)
}

/// The standard output, which two threads write to, a line at a time.
struct Speaker<W>(Arc<Mutex<W>>);

impl<W> Clone for Speaker<W> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<W: Write> Speaker<W> {
    /// False when the tune no longer listens.
    fn say(&self, word: &Word) -> bool {
        // Plain data always serialises.
        let mut line = serde_json::to_vec(word).expect("words are plain data");
        line.push(b'\n');
        let mut output = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        output.write_all(&line).and_then(|()| output.flush()).is_ok()
    }
}
