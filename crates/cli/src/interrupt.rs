//! Ctrl-C, or being asked to end by another program (SIGTERM, SIGHUP): finish cleanly what is being written, and keep what is
//! finished.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

/// When the program was asked to stop.
static ASKED: OnceLock<Instant> = OnceLock::new();

/// What comes so soon after the first request is part of it: `timeout` signals the program and then its process group, so that the
/// program hears it twice.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// From now on Ctrl-C and its like only ask to stop; a second one ends the program at once.
pub(crate) fn listen() {
    // Without a handler Ctrl-C ends the program at once, which loses only the row in progress.
    let _ = ctrlc::set_handler(|| {
        if ASKED.get_or_init(Instant::now).elapsed() > SAME_REQUEST {
            std::process::exit(130);
        }
    });
}

/// Whether the user asked to stop.
pub(crate) fn asked() -> bool {
    ASKED.get().is_some()
}
