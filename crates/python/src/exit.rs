//! Interpreter exit: threads that are still inside evosdpa.
//!
//! Python ends a daemon thread where it next takes the interpreter's lock. Inside a native function that is in the middle of
//! Rust's stack, which cannot be unwound so: the process would abort. Once the interpreter says that it ends, a thread that
//! has done its work stays where it is instead, as Python itself does from 3.14 on.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use pyo3::{marker::Ungil, prelude::*};

static ENDING: AtomicBool = AtomicBool::new(false);
/// Threads on their way from work to the lock.
static RETURNING: AtomicUsize = AtomicUsize::new(0);
thread_local! {
    /// The thread that ends the interpreter still needs its answers.
    static ENDS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Works without the interpreter's lock.
pub(crate) fn detached<T: Ungil + Send>(py: Python<'_>, work: impl Ungil + Send + FnOnce() -> T) -> T {
    let done = py.detach(|| {
        let done = work();
        RETURNING.fetch_add(1, SeqCst);
        if ENDING.load(SeqCst) && !ENDS.get() {
            RETURNING.fetch_sub(1, SeqCst);
            loop {
                thread::park();
            }
        }
        done
    });
    RETURNING.fetch_sub(1, SeqCst);
    done
}

/// Called when the interpreter is about to end: lets those on their way come through, and nobody after them.
#[pyfunction]
pub(crate) fn ending(py: Python<'_>) {
    ENDS.set(true);
    ENDING.store(true, SeqCst);
    // One that does not come through in a second hangs elsewhere.
    let until = Instant::now() + Duration::from_secs(1);
    py.detach(|| {
        while RETURNING.load(SeqCst) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    });
}
