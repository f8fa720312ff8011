//! What a profile says and what to do about it: the insights (I3) of an evolution.

use serde::{Deserialize, Serialize};

use super::knob::Hint;

/// What holds a kernel back: a leaf of the decision tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bottleneck {
    /// Registers are spilled, or the compiler had to serialise: before anything else.
    Resources,
    /// As fast as the machine allows.
    Roofline,
    /// Device memory.
    Dram,
    /// L2.
    L2,
    /// Shared memory: its bandwidth, or the way it is laid out.
    SharedMemory,
    /// Tensor cores.
    Math,
    /// Exponentials and the arithmetic around them.
    Softmax,
    /// MMAs are waited for instead of overlapped.
    Overlap,
    /// Consumers wait for tiles that have not arrived.
    Producer,
    /// Loads are waited for.
    Latency,
    /// The queue of shared-memory and special-function instructions.
    SharedQueue,
    /// Instructions depend on each other, or schedulers are busy.
    Issue,
    /// Instructions are not in their cache.
    InstructionCache,
    /// Warps wait for each other.
    Synchronisation,
    /// Too few blocks, or unequal ones.
    Grid,
    /// Starting the work costs as much as the work.
    Overhead,
    /// What was loaded or packed is used too few times.
    Reuse,
}

impl Bottleneck {
    /// The name used in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Resources => "resources",
            Self::Roofline => "roofline",
            Self::Dram => "dram",
            Self::L2 => "l2",
            Self::SharedMemory => "shared-memory",
            Self::Math => "math",
            Self::Softmax => "softmax",
            Self::Overlap => "overlap",
            Self::Producer => "producer",
            Self::Latency => "latency",
            Self::SharedQueue => "shared-queue",
            Self::Issue => "issue",
            Self::InstructionCache => "instruction-cache",
            Self::Synchronisation => "synchronisation",
            Self::Grid => "grid",
            Self::Overhead => "overhead",
            Self::Reuse => "reuse",
        }
    }
}

impl std::fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Evidence {
    /// A number that was derived rather than read from a profiler.
    pub(crate) fn derived(metric: &str, value: f64, unit: &str, says: &str) -> Self {
        Self { metric: metric.to_owned(), value, unit: unit.to_owned(), says: says.to_owned() }
    }
}

/// A number that an insight rests on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// The metric, as the profiler names it, or what was derived.
    pub metric: String,
    /// Its value.
    pub value: f64,
    /// Its unit.
    pub unit: String,
    /// What it says, in words.
    pub says: String,
}

/// One thing that a profile says, with what to try.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Insight {
    /// The leaf of the decision tree, stable across versions: `4-grid`.
    pub id: String,
    /// What holds the kernel back.
    pub bottleneck: Bottleneck,
    /// How much of the evidence speaks for it, from 0 to 1: for a threshold how far past it the value is, for a stall its
    /// share of all waiting.
    pub confidence: f64,
    /// The numbers it rests on.
    pub evidence: Vec<Evidence>,
    /// What to change.
    pub suggestion: String,
    /// Tunables of the kernel that point there.
    pub tunables: Vec<Hint>,
}

impl Insight {
    /// The tunables to try, with the way to turn them: `STAGES↑ BLOCK_N↓`.
    pub fn hints(&self) -> String {
        let hints: Vec<String> = self.tunables.iter().map(ToString::to_string).collect();
        hints.join(" ")
    }
}
