//! Totals of a launch, and where its shared-memory conflicts are.

use super::Class;
use super::counters::Tally;
use crate::decode::Kernel;
use crate::module::Module;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Exact, deterministic counts of a launch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Counters {
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
    /// Passes over shared memory.
    pub shared_wavefronts: u64,
    /// Passes beyond those the access sizes need.
    pub shared_conflicts: u64,
    /// Times a warp waited at a CTA barrier.
    pub barrier_waits: u64,
    /// Source lines with bank conflicts, most first.
    pub conflict_lines: Vec<LineConflicts>,
}

/// Shared-memory passes of one source line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LineConflicts {
    /// `file:line`, or the PTX line.
    pub source: String,
    /// Passes taken.
    pub wavefronts: u64,
    /// Passes beyond those needed.
    pub conflicts: u64,
}

impl Counters {
    pub(crate) fn new(module: &Module, kernel: &Kernel, tallies: &[Tally]) -> Self {
        let mut out = Counters::default();
        let mut lines: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for (tally, info) in tallies.iter().zip(&kernel.info) {
            if !info.is_step {
                *out.warp_instructions.entry(info.class).or_default() += tally.executed;
                out.lane_instructions += tally.lanes;
            }
            out.flops += tally.lanes * u64::from(info.lane_flops) * u64::from(!info.is_step);
            out.tensor_ops += tally.executed * info.tensor_ops;
            out.barrier_waits += tally.waits;
            if tally.sectors > 0 {
                out.global_sectors += tally.sectors;
                out.global_bytes += tally.bytes;
            }
            if tally.wavefronts > 0 {
                out.shared_wavefronts += tally.wavefronts;
                out.shared_conflicts += tally.wavefronts - tally.ideal_wavefronts;
                let source =
                    module.describe(info.location).unwrap_or_else(|| format!("PTX line {}", info.line));
                let line = lines.entry(source).or_default();
                line.0 += tally.wavefronts;
                line.1 += tally.wavefronts - tally.ideal_wavefronts;
            }
        }
        out.warp_instructions.retain(|_, n| *n > 0);
        out.conflict_lines = lines
            .into_iter()
            .filter(|(_, (_, conflicts))| *conflicts > 0)
            .map(|(source, (wavefronts, conflicts))| LineConflicts { source, wavefronts, conflicts })
            .collect();
        out.conflict_lines.sort_by_key(|l| std::cmp::Reverse(l.conflicts));
        out
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total: u64 = self.warp_instructions.values().sum();
        writeln!(f, "  {total} warp instructions, {} lane instructions", self.lane_instructions)?;
        writeln!(f, "  {} flops, {} tensor operations", self.flops, self.tensor_ops)?;
        writeln!(f, "  global memory: {} bytes in {} sectors", self.global_bytes, self.global_sectors)?;
        writeln!(
            f,
            "  shared memory: {} wavefronts, {} of them bank conflicts",
            self.shared_wavefronts, self.shared_conflicts
        )?;
        for line in self.conflict_lines.iter().take(8) {
            writeln!(f, "    {}: {} of {} wavefronts", line.source, line.conflicts, line.wavefronts)?;
        }
        writeln!(f, "  {} barrier waits", self.barrier_waits)
    }
}
