//! compute-sanitizer as a gate: no invalid access, no race, nothing uninitialised, no wrong barrier.
//!
//! Silence is not a pass. The gate wants exactly one summary line that says 0, and the checked program's own word that
//! the kernel ran: a tool that died, or a program that ended before its first launch, finds nothing either.
//! Formats: <https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/index.html>.

mod log;
mod run;
#[cfg(test)]
mod tests;

pub use log::{Incident, Log};
pub use run::Checked;

use std::{fmt, str::FromStr};

use evosdpa_core::error::nearest;
use serde::Serialize;

/// The tools of compute-sanitizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tool {
    /// Accesses out of bounds or misaligned, and API errors.
    Memcheck,
    /// Races in shared memory.
    Racecheck,
    /// Reads of global memory that nothing has written.
    Initcheck,
    /// Barriers that not all threads reach.
    Synccheck,
}

impl Tool {
    /// Every tool.
    pub const ALL: [Self; 4] = [Self::Memcheck, Self::Racecheck, Self::Initcheck, Self::Synccheck];

    /// The name on compute-sanitizer's command line; also the gate's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memcheck => "memcheck",
            Self::Racecheck => "racecheck",
            Self::Initcheck => "initcheck",
            Self::Synccheck => "synccheck",
        }
    }
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Tool {
    type Err = evosdpa_core::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|tool| tool.name() == text).ok_or_else(|| {
            evosdpa_core::Error::UnknownName {
                kind: "tool",
                name: text.to_owned(),
                nearest: nearest(text, Self::ALL.map(Self::name)),
                allowed: Self::ALL.map(Self::name).join(", "),
            }
        })
    }
}

/// What the checked program, `evosdpa check`, said of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ran {
    /// The kernel ran, and nobody who looked at its answer found it wrong.
    Yes,
    /// The kernel ran and its answer was wrong.
    Wrong(String),
    /// The kernel did not run, for this reason.
    No(String),
}
