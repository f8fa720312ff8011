//! Totals of a launch, and the same counts line by line of the source.

use super::Class;
use super::counters::Tally;
use crate::decode::{Info, Kernel};
use crate::module::Module;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::{AddAssign, Deref};

/// Exact, deterministic counts of a launch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Counters {
    /// The whole launch.
    #[serde(flatten)]
    pub total: Counts,
    /// Every source line that was executed, in order of file and line.
    pub lines: Vec<LineCounts>,
}

/// Counts of a launch or of one source line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Counts {
    /// Warp instructions by class.
    pub warp_instructions: BTreeMap<Class, u64>,
    /// Lane instructions: active lanes over all warp instructions.
    pub lane_instructions: u64,
    /// Floating-point operations outside the tensor cores; a fused multiply-add is two.
    pub flops: u64,
    /// Operations of the tensor cores, multiplications and additions counted apart.
    pub tensor_ops: u64,
    /// 32-byte sectors of global memory asked for.
    pub global_sectors: u64,
    /// Bytes of global memory asked for by lanes.
    pub global_bytes: u64,
    /// Bytes of shared memory asked for by lanes.
    pub shared_bytes: u64,
    /// Passes over shared memory.
    pub shared_wavefronts: u64,
    /// Passes beyond those the access sizes need: bank conflicts.
    pub shared_conflicts: u64,
    /// Times a warp waited at a CTA barrier.
    pub barrier_waits: u64,
}

/// Counts of one source line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LineCounts {
    /// `file:line`, or the PTX line where the module has no line information.
    pub source: String,
    /// Its counts.
    #[serde(flatten)]
    pub counts: Counts,
}

impl Counts {
    fn of(tally: &Tally, info: &Info) -> Self {
        let mut out = Counts::default();
        // A helper step of an instruction is counted with the instruction.
        if !info.is_step && tally.executed > 0 {
            out.warp_instructions.insert(info.class, tally.executed);
            out.lane_instructions = tally.lanes;
            out.flops = tally.lanes * u64::from(info.lane_flops);
        }
        out.tensor_ops = tally.executed * info.tensor_ops;
        out.barrier_waits = tally.waits;
        out.global_sectors = tally.sectors;
        out.global_bytes = tally.global_bytes;
        out.shared_bytes = tally.shared_bytes;
        out.shared_wavefronts = tally.wavefronts;
        out.shared_conflicts = tally.wavefronts - tally.ideal_wavefronts;
        out
    }

    /// Warp instructions of all classes.
    pub fn instructions(&self) -> u64 {
        self.warp_instructions.values().sum()
    }
}

impl AddAssign<&Counts> for Counts {
    fn add_assign(&mut self, other: &Counts) {
        for (class, n) in &other.warp_instructions {
            *self.warp_instructions.entry(*class).or_default() += n;
        }
        self.lane_instructions += other.lane_instructions;
        self.flops += other.flops;
        self.tensor_ops += other.tensor_ops;
        self.global_sectors += other.global_sectors;
        self.global_bytes += other.global_bytes;
        self.shared_bytes += other.shared_bytes;
        self.shared_wavefronts += other.shared_wavefronts;
        self.shared_conflicts += other.shared_conflicts;
        self.barrier_waits += other.barrier_waits;
    }
}

impl Counters {
    pub(crate) fn new(module: &Module, kernel: &Kernel, tallies: &[Tally]) -> Self {
        let mut total = Counts::default();
        // By location first: words for a place are found once for all its instructions.
        let mut locations: HashMap<(Option<u32>, u32), (&Info, Counts)> = HashMap::new();
        for (tally, info) in tallies.iter().zip(&kernel.info) {
            if tally.executed > 0 {
                let counts = Counts::of(tally, info);
                total += &counts;
                let line = if info.location.is_some() { 0 } else { info.line };
                let entry = locations.entry((info.location, line));
                entry.or_insert_with(|| (info, Counts::default())).1 += &counts;
            }
        }
        let mut lines: BTreeMap<(String, u64, String), Counts> = BTreeMap::new();
        for (info, counts) in locations.values() {
            *lines.entry(module.place(info)).or_default() += counts;
        }
        let named = |((_, _, source), counts)| LineCounts { source, counts };
        Counters { total, lines: lines.into_iter().map(named).collect() }
    }

    /// Source lines with bank conflicts, most first.
    pub fn conflict_lines(&self) -> Vec<&LineCounts> {
        let mut lines: Vec<_> = self.lines.iter().filter(|l| l.counts.shared_conflicts > 0).collect();
        lines.sort_by_key(|l| std::cmp::Reverse(l.counts.shared_conflicts));
        lines
    }
}

/// The totals are what most readers want.
impl Deref for Counters {
    type Target = Counts;

    fn deref(&self) -> &Counts {
        &self.total
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = &self.total;
        writeln!(f, "  {} warp instructions, {} lane instructions", t.instructions(), t.lane_instructions)?;
        writeln!(f, "  {} flops, {} tensor operations", t.flops, t.tensor_ops)?;
        writeln!(f, "  global memory: {} bytes in {} sectors", t.global_bytes, t.global_sectors)?;
        let (wavefronts, conflicts) = (t.shared_wavefronts, t.shared_conflicts);
        writeln!(f, "  shared memory: {wavefronts} wavefronts, {conflicts} of them bank conflicts")?;
        for line in self.conflict_lines().into_iter().take(8) {
            let Counts { shared_conflicts, shared_wavefronts, .. } = line.counts;
            writeln!(f, "    {}: {shared_conflicts} of {shared_wavefronts} wavefronts", line.source)?;
        }
        writeln!(f, "  {} barrier waits", t.barrier_waits)
    }
}
