//! When something happened and how long it took: a tune's timeline.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// A part of the work on a candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// What was done: compile, sim, correctness, measure, profile.
    pub what: String,
    /// When it began, in microseconds since 1970 (UTC).
    pub began_us: u64,
    /// How long it took.
    pub seconds: f64,
}

/// Something that has begun.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    /// When, in microseconds since 1970 (UTC).
    pub began_us: u64,
    since: Instant,
}

impl Begun {
    /// Now.
    pub fn now() -> Self {
        // A machine whose clock is set before 1970 has no use for the moment.
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { began_us: began.as_micros() as u64, since: Instant::now() }
    }

    /// Until now.
    pub fn seconds(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }
}

/// Does something and adds how long it took.
pub fn timed<T>(what: &str, spans: &mut Vec<Span>, work: impl FnOnce() -> T) -> T {
    let begun = Begun::now();
    let done = work();
    spans.push(Span { what: what.to_owned(), began_us: begun.began_us, seconds: begun.seconds() });
    done
}
