//! Measuring: samples, honest comparisons, the order in which things are timed, and the audits that timed calls must pass.
//!
//! `docs/measuring.md` has the rules in full.

pub mod audit;
pub mod compare;
pub mod duel;
pub mod floor;
pub mod interleave;
mod novelty;
pub mod roof;
pub mod runs;
pub mod samples;
pub mod sequence;
pub mod work;

use evosdpa_oracle::rng::Rng;
use serde::{Deserialize, Serialize};

use crate::Error;

/// One sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// How long one call took.
    pub time_us: f64,
    /// Cycles per nanosecond of the SMs while it ran, where the device can tell.
    pub clock_ghz: Option<f64>,
}

impl Reading {
    /// Cycles that one call took, in thousands.
    pub fn kilocycles(&self) -> Option<f64> {
        self.clock_ghz.map(|ghz| self.time_us * ghz)
    }
}

/// How a reading of a duel is taken of something that can say how long a call takes: as a turn of a benchmark is, so that the
/// two agree. A few calls in a row, the first of them untimed, because the other side has had the caches and the thread pool
/// is asleep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Calls {
    timed: usize,
    untimed: bool,
    next: usize,
}

/// A reading lasts about this long, and is of at most so many calls.
const READING_US: f64 = 200.0;
const READING_CALLS_MAX: usize = 32;

/// A call that lasts longer than this is not the slower for caches that another has had.
pub(crate) const CACHES_MATTER_US: f64 = 100_000.0;

impl Calls {
    /// For calls that take so long.
    pub(crate) fn lasting(once_us: f64) -> Self {
        let timed = ((READING_US / once_us.max(0.1)) as usize).clamp(1, READING_CALLS_MAX);
        Self { timed, untimed: once_us < CACHES_MATTER_US, next: 0 }
    }

    /// One sample of a GPU already is of many launches.
    pub(crate) fn of_a_gpu() -> Self {
        Self { timed: 1, untimed: false, next: 0 }
    }

    /// The median of the calls, each on the next of `sets` sets of inputs, with the clock of the last.
    pub(crate) fn read(
        &mut self,
        sets: usize,
        mut call: impl FnMut(usize) -> Result<Reading, Error>,
    ) -> Result<Reading, Error> {
        if self.untimed {
            call(self.next)?;
        }
        let mut readings = Vec::with_capacity(self.timed);
        for _ in 0..self.timed {
            self.next = (self.next + 1) % sets;
            readings.push(call(self.next)?);
        }
        let times: Vec<f64> = readings.iter().map(|reading| reading.time_us).collect();
        let clock_ghz = readings.last().and_then(|reading| reading.clock_ghz);
        Ok(Reading { time_us: samples::median(&times), clock_ghz })
    }
}

/// A small deterministic generator for resampling: the same samples always give the same interval.
pub(crate) struct Resampler(Rng);

impl Resampler {
    pub(crate) fn new() -> Self {
        Self(Rng::new(0x2545_F491_4F6C_DD1D))
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }
}
