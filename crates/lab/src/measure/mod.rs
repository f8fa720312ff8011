//! Measuring: samples, honest comparisons, the order in which things are timed, and the audits that timed calls must pass.
//!
//! `docs/measuring.md` has the rules in full.

pub mod audit;
pub mod compare;
pub mod duel;
pub mod floor;
pub mod interleave;
pub mod rng;
pub mod samples;
pub mod sequence;

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

    /// The median of a few calls, with the clock of the last.
    pub(crate) fn median_of(
        calls: usize,
        mut read: impl FnMut() -> Result<Self, Error>,
    ) -> Result<Self, Error> {
        let readings = (0..calls).map(|_| read()).collect::<Result<Vec<Self>, Error>>()?;
        let times: Vec<f64> = readings.iter().map(|reading| reading.time_us).collect();
        let clock_ghz = readings.last().and_then(|reading| reading.clock_ghz);
        Ok(Self { time_us: samples::median(&times), clock_ghz })
    }
}

/// A small deterministic generator for resampling: the same samples always give the same interval.
pub(crate) struct Resampler(rng::Rng);

impl Resampler {
    pub(crate) fn new() -> Self {
        Self(rng::Rng::new(0x2545_F491_4F6C_DD1D))
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }
}
