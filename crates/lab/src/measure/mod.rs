//! Measuring: samples, honest comparisons, the order in which things are timed, and the audits that timed calls must pass.
//!
//! `docs/measuring.md` has the rules in full.

pub mod audit;
pub mod compare;
pub mod dice;
pub mod duel;
pub mod floor;
pub mod interleave;
pub mod samples;
pub mod sequence;

use serde::{Deserialize, Serialize};

/// One sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// How long one call took.
    pub time_us: f64,
    /// Cycles per nanosecond of the multiprocessors while it ran, where the device can tell.
    pub clock_ghz: Option<f64>,
}

impl Reading {
    /// Cycles that one call took, in thousands.
    pub fn kilocycles(&self) -> Option<f64> {
        self.clock_ghz.map(|ghz| self.time_us * ghz)
    }
}

/// A small deterministic generator for resampling: the same samples always give the same interval.
pub(crate) struct Resampler(dice::Dice);

impl Resampler {
    pub(crate) fn new() -> Self {
        Self(dice::Dice::new(0x2545_F491_4F6C_DD1D))
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }
}
