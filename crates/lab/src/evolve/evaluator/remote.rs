//! An evaluator as a tune sees it: a process, what it says, and what it wrote to its standard error.

use std::{
    ffi::OsString,
    io::{BufReader, Read, Write},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Sender, SyncSender, sync_channel},
    },
    time::{Duration, Instant},
};

use super::{NUMBER_VARIABLE, Order, Word};
use crate::process::{Group, next_line};

/// As much of the standard error is kept.
const WORDS_KEPT: usize = 600;
/// Time to end in, for a launcher that has to end something elsewhere.
const FAREWELL: Duration = Duration::from_secs(2);
/// Tasks that may be written before the first is read.
const ORDERS_MAX: usize = 64;

/// Something that happened to an evaluator: which one, and how often that place had been filled before.
pub(super) struct Event {
    pub(super) place: usize,
    pub(super) start: usize,
    pub(super) what: What,
}

pub(super) enum What {
    Said(Word),
    /// It said what no evaluator says, or nothing will come any more.
    Ended(String),
}

/// A process that is or was an evaluator.
pub(super) struct Remote {
    orders: SyncSender<String>,
    words: Arc<Mutex<String>>,
    group: Group,
}

impl Remote {
    pub(super) fn start(
        command: &[OsString],
        place: usize,
        start: usize,
        events: Sender<Event>,
    ) -> Result<Self, String> {
        let (program, arguments) = command.split_first().ok_or("there is no command to start")?;
        let mut command = Command::new(program);
        command.args(arguments).env(NUMBER_VARIABLE, place.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = Group::spawn(&mut command)
            .map_err(|error| format!("{} cannot be started: {error}", program.to_string_lossy()))?;
        let child = &mut group.child;
        let (Some(mut input), Some(output), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err("it has no standard input or output".to_owned());
        };
        let (orders, to_write) = sync_channel::<String>(ORDERS_MAX);
        std::thread::spawn(move || {
            for line in to_write {
                if writeln!(input, "{line}").and_then(|()| input.flush()).is_err() {
                    break;
                }
            }
        });
        let words = Arc::new(Mutex::new(String::new()));
        let listener = {
            let words = Arc::clone(&words);
            std::thread::spawn(move || keep_the_last(errors, &words))
        };
        std::thread::spawn(move || {
            let why =
                listen(output, |word| events.send(Event { place, start, what: What::Said(word) }).is_ok());
            // What it wrote last explains it, and comes through another pipe.
            let patience = Instant::now() + Duration::from_millis(200);
            while !listener.is_finished() && Instant::now() < patience {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = events.send(Event { place, start, what: What::Ended(why) });
        });
        Ok(Self { orders, words, group })
    }

    /// Hands over a task. One that is gone, or does not read, shows itself by its silence.
    pub(super) fn send(&self, order: &Order) {
        // Plain data always serialises.
        let line = serde_json::to_string(order).expect("orders are plain data");
        let _ = self.orders.try_send(line);
    }

    /// The end of what it wrote to its standard error.
    pub(super) fn last_words(&self) -> String {
        self.words.lock().unwrap_or_else(PoisonError::into_inner).trim().to_owned()
    }

    /// Ends it: its input is closed, which asks it to end; a launcher then has some time to end what it has started elsewhere.
    pub(super) fn end(self) {
        drop(self.orders);
        self.group.end_within(FAREWELL);
    }
}

/// Hears every word until there is none, and says why there is none. Before its first word, a launcher may say what it likes.
fn listen(output: impl Read, mut hear: impl FnMut(Word) -> bool) -> String {
    let mut output = BufReader::new(output);
    let mut has_spoken = false;
    loop {
        let line = match next_line(&mut output) {
            Ok(None) => return "it ended".to_owned(),
            Ok(Some(line)) if !line.ends_with('\n') => return "it ended in the middle of a line".to_owned(),
            Ok(Some(line)) => line,
            Err(error) => return format!("its output cannot be read: {error}"),
        };
        match serde_json::from_str::<Word>(&line) {
            Ok(word) => {
                has_spoken = true;
                if !hear(word) {
                    return "nobody listens".to_owned();
                }
            }
            Err(_) if !has_spoken => {}
            Err(error) => {
                let shown: String = line.chars().take(80).collect();
                return format!("it said `{}`, which is no answer: {error}", shown.trim().escape_debug());
            }
        }
    }
}

fn keep_the_last(mut errors: impl Read, words: &Mutex<String>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = errors.read(&mut buffer) {
        let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
        words.push_str(&String::from_utf8_lossy(&buffer[..count]));
        let surplus = words.len().saturating_sub(WORDS_KEPT);
        let cut = (surplus..=words.len()).find(|at| words.is_char_boundary(*at)).unwrap_or(0);
        words.drain(..cut);
    }
}
