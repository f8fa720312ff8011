//! Ctrl-C, or being asked to end by another program (SIGTERM, SIGHUP): finish cleanly what is being written, and keep what is
//! finished.
//!
//! Commands look for the request between their steps. A step may be long: solving `long` in f64, a simulated mutant. So a
//! program that has not ended soon after it was asked to says its last words, ends what it has started, and exits. Whatever is on
//! the disk is whole at every moment.

use std::{
    process::exit,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// When the program was asked to stop.
static ASKED: OnceLock<Instant> = OnceLock::new();

/// What is still to be said, unless the command gets to its own end.
static LAST_WORDS: Mutex<Option<LastWords>> = Mutex::new(None);

type LastWords = Box<dyn FnOnce() + Send>;

/// What comes so soon after the first request is part of it: `timeout` signals the program and then its process group, so that the
/// program hears it twice.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Time for a command to come to its own end.
const GRACE: Duration = Duration::from_millis(1200);

/// As a shell reports a program ended by Ctrl-C.
const INTERRUPTED: i32 = 130;

/// From now on Ctrl-C and its like ask to stop, and end the program a moment later if it has not stopped by itself; a second
/// one ends it at once.
pub(crate) fn listen() {
    // Without a handler Ctrl-C ends the program at once, which loses only the row in progress.
    let _ = ctrlc::set_handler(|| {
        let is_first = ASKED.get().is_none();
        if ASKED.get_or_init(Instant::now).elapsed() > SAME_REQUEST {
            evosdpa_lab::process::end_all();
            exit(INTERRUPTED);
        }
        if is_first {
            thread::spawn(|| {
                thread::sleep(GRACE);
                // Held to the end: a command that has begun to end is waited for, and one that has not no longer can.
                let mut words = last_words();
                if let Some(say) = words.take() {
                    say();
                }
                evosdpa_lab::process::end_all();
                exit(INTERRUPTED);
            });
        }
    });
}

/// Whether the user asked to stop.
pub(crate) fn asked() -> bool {
    ASKED.get().is_some()
}

/// What to do if the program has to end in the middle of what comes next.
pub(crate) fn on_end(words: impl FnOnce() + Send + 'static) {
    *last_words() = Some(Box::new(words));
}

/// The command ends by itself: from now on nobody else ends it, as long as this is kept.
pub(crate) fn ending() -> MutexGuard<'static, Option<LastWords>> {
    last_words()
}

fn last_words() -> MutexGuard<'static, Option<LastWords>> {
    LAST_WORDS.lock().unwrap_or_else(PoisonError::into_inner)
}
