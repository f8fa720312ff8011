//! What went wrong, once per pair of code locations, with counts.

use serde::Serialize;
use std::collections::HashMap;

/// Distinct findings kept; beyond it only the count grows.
const MAX_FINDINGS: usize = 1000;

/// What kind of mistake was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// Two accesses to the same bytes, one a write, that nothing orders.
    Race,
    /// An access that is not ordered with an asynchronous copy.
    AsyncRace,
    /// Accesses through the generic and the async proxy that no proxy fence orders.
    ProxyRace,
    /// A register of a `wgmma` in flight, or one that no `wgmma.fence` covers; warps of a warpgroup apart.
    Wgmma,
    /// An mbarrier that is not there, with a wrong count of arrivals or bytes, or used against its rules.
    Mbarrier,
    /// A bulk copy with a wrong address, size or tensor map.
    BulkCopy,
    /// Shared memory of a block of the cluster that may not have started, or has exited.
    ClusterLifetime,
    /// `setmaxnreg` against its rules.
    Registers,
    /// Global memory before `griddepcontrol.wait`: the launch before may still use it.
    LaunchOrder,
    /// An access outside every allocation.
    OutOfBounds,
    /// An access to memory that was freed.
    UseAfterFree,
    /// An address that is not a multiple of the access size.
    Misaligned,
    /// Memory read that nothing wrote.
    UninitialisedMemory,
    /// A register read that nothing wrote.
    UninitialisedRegister,
    /// A write to read-only memory.
    ReadOnlyWrite,
    /// A matrix instruction on memory it cannot reach, such as a local array.
    WrongSpace,
    /// A barrier that not all lanes of a warp reached together.
    BarrierDivergence,
    /// A barrier used with different thread counts at once.
    BarrierCount,
    /// A barrier number or count outside the limits.
    BarrierMisuse,
    /// A `.sync` instruction whose mask misses an executing lane, or names a lane that does not come.
    SyncMask,
    /// A shuffle that reads a lane outside the ones taking part.
    ShuffleInactive,
    /// Nobody can go on.
    Deadlock,
    /// The instruction budget is spent.
    Budget,
    /// A device-side assertion failed.
    Assertion,
    /// A trap was executed.
    Trap,
}

impl Kind {
    /// A short name for people.
    pub fn title(self) -> &'static str {
        match self {
            Kind::Race => "data race",
            Kind::AsyncRace => "race with an asynchronous copy",
            Kind::ProxyRace => "race between proxies",
            Kind::Wgmma => "wgmma hazard",
            Kind::Mbarrier => "mbarrier misuse",
            Kind::BulkCopy => "bulk copy misuse",
            Kind::ClusterLifetime => "shared memory of a block that may not be there",
            Kind::Registers => "register reallocation",
            Kind::LaunchOrder => "race with the launch before",
            Kind::OutOfBounds => "out-of-bounds access",
            Kind::UseAfterFree => "use of freed memory",
            Kind::Misaligned => "misaligned access",
            Kind::UninitialisedMemory => "read of memory never written",
            Kind::UninitialisedRegister => "read of a register never written",
            Kind::ReadOnlyWrite => "write to read-only memory",
            Kind::WrongSpace => "matrix instruction on the wrong kind of memory",
            Kind::BarrierDivergence => "barrier in divergent code",
            Kind::BarrierCount => "barrier with mismatched counts",
            Kind::BarrierMisuse => "barrier misuse",
            Kind::SyncMask => "warp synchronisation mask",
            Kind::ShuffleInactive => "shuffle from an inactive lane",
            Kind::Deadlock => "deadlock",
            Kind::Budget => "instruction budget spent",
            Kind::Assertion => "assertion failed",
            Kind::Trap => "trap",
        }
    }
}

/// A finding in machine terms; made readable when the launch ends.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) pc: u32,
    pub(crate) other: Option<Other>,
    pub(crate) block: u64,
    pub(crate) thread: u32,
    pub(crate) detail: String,
    pub(crate) count: u64,
}

/// The other access of a race.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) pc: u32,
    pub(crate) block: u64,
    pub(crate) thread: u32,
}

/// Findings, deduplicated.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    index: HashMap<(Kind, u32, Option<u32>), usize>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) dropped: u64,
}

impl Log {
    /// Adds one occurrence; `detail` is only made for the first.
    pub(crate) fn add(
        &mut self,
        kind: Kind,
        pc: u32,
        other: Option<Other>,
        (block, thread): (u32, u32),
        detail: impl FnOnce() -> String,
    ) {
        self.add_at(kind, pc, other, (u64::from(block), thread), detail);
    }

    /// As [`Log::add`], the block counted from the start of the grid.
    pub(crate) fn add_at(
        &mut self,
        kind: Kind,
        pc: u32,
        other: Option<Other>,
        (block, thread): (u64, u32),
        detail: impl FnOnce() -> String,
    ) {
        let key = (kind, pc, other.map(|o| o.pc));
        if let Some(&i) = self.index.get(&key) {
            self.entries[i].count += 1;
        } else if self.entries.len() >= MAX_FINDINGS {
            self.dropped += 1;
        } else {
            self.index.insert(key, self.entries.len());
            self.entries.push(Entry { kind, pc, other, block, thread, detail: detail(), count: 1 });
        }
    }

    /// Takes over another log's findings, whose blocks are counted from `first_block`.
    pub(crate) fn absorb(&mut self, other: Log, first_block: u64) {
        for mut entry in other.entries {
            entry.block += first_block;
            if let Some(o) = &mut entry.other {
                o.block += first_block;
            }
            let key = (entry.kind, entry.pc, entry.other.map(|o| o.pc));
            if let Some(&i) = self.index.get(&key) {
                self.entries[i].count += entry.count;
            } else if self.entries.len() >= MAX_FINDINGS {
                self.dropped += entry.count;
            } else {
                self.index.insert(key, self.entries.len());
                self.entries.push(entry);
            }
        }
        self.dropped += other.dropped;
    }
}
