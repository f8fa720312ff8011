//! Ctrl-C, or being asked to end by another program (SIGTERM, SIGHUP): finish cleanly what is being written, and keep what is
//! finished.

use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C and its like only ask to stop; a second one ends the program at once.
pub(crate) fn listen() {
    // Without a handler Ctrl-C ends the program at once, which loses only the row in progress.
    let _ = ctrlc::set_handler(|| {
        if ASKED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
}

/// Whether the user asked to stop.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}
