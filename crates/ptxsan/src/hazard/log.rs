//! What went wrong, once per pair of code locations, with counts.

use crate::finding::{Kind, Severity, Variable};
use std::collections::HashMap;

/// Distinct findings kept; beyond it only the count grows.
const MAX_FINDINGS: usize = 1000;

/// A finding in machine terms; made readable when the launch ends.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) severity: Severity,
    pub(crate) pc: u32,
    pub(crate) other: Option<Other>,
    pub(crate) block: u64,
    pub(crate) thread: u32,
    pub(crate) words: Words,
    pub(crate) count: u64,
}

impl Entry {
    pub(crate) fn reach(&self) -> u32 {
        reach(self.kind, self.other, self.block, self.thread)
    }
}

/// How far apart the threads of a race are: lanes, warps, blocks. The furthest are told, since what orders them orders the others too;
/// who is told of two lanes mends a barrier of the block with a __syncwarp().
fn reach(kind: Kind, other: Option<Other>, block: u64, thread: u32) -> u32 {
    match other.filter(|_| kind == Kind::Race) {
        Some(other) if other.block != block => 2,
        Some(other) if other.thread / 32 != thread / 32 => 1,
        _ => 0,
    }
}

/// What is said of a finding beside its places.
#[derive(Debug, Clone, Default)]
pub(crate) struct Words {
    pub(crate) detail: String,
    pub(crate) advice: Option<String>,
    pub(crate) variable: Option<Variable>,
}

impl From<String> for Words {
    fn from(detail: String) -> Self {
        Words { detail, ..Words::default() }
    }
}

/// The other access of a race.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) pc: u32,
    pub(crate) block: u64,
    pub(crate) thread: u32,
}

/// What makes two occurrences the same entry.
type Key = (Kind, Severity, u32, Option<u32>);

/// Findings, deduplicated.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    index: HashMap<Key, usize>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) dropped: u64,
}

impl Log {
    /// Adds one occurrence; what is said of it is only made for the first.
    pub(crate) fn add<W: Into<Words>>(
        &mut self,
        kind: Kind,
        pc: u32,
        other: Option<Other>,
        (block, thread): (u32, u32),
        words: impl FnOnce() -> W,
    ) {
        self.add_at(kind, kind.severity(), pc, other, (u64::from(block), thread), words);
    }

    /// As [`Log::add`], with a severity of its own, the block counted from the start of the grid.
    pub(crate) fn add_at<W: Into<Words>>(
        &mut self,
        kind: Kind,
        severity: Severity,
        pc: u32,
        other: Option<Other>,
        (block, thread): (u64, u32),
        words: impl FnOnce() -> W,
    ) {
        let key = (kind, severity, pc, other.map(|o| o.pc));
        if let Some(&i) = self.index.get(&key) {
            let entry = &mut self.entries[i];
            entry.count += 1;
            if reach(kind, other, block, thread) > entry.reach() {
                (entry.other, entry.block, entry.thread, entry.words) =
                    (other, block, thread, words().into());
            }
        } else if self.entries.len() >= MAX_FINDINGS {
            self.dropped += 1;
        } else {
            self.index.insert(key, self.entries.len());
            let words = words().into();
            self.entries.push(Entry { kind, severity, pc, other, block, thread, words, count: 1 });
        }
    }

    /// Bytes of an output that nothing wrote: of the launch as a whole, each output for itself.
    pub(crate) fn add_unwritten(&mut self, variable: Variable, count: u64) {
        let kind = Kind::UnwrittenOutput;
        let Variable { name, offset_bytes, size_bytes, .. } = &variable;
        let detail = format!(
            "{count} of {size_bytes} bytes of `{name}` are as unwritten as before the launch, the first at offset {offset_bytes}"
        );
        let words = Words { detail, advice: None, variable: Some(variable) };
        let severity = kind.severity();
        self.entries.push(Entry { kind, severity, pc: 0, other: None, block: 0, thread: 0, words, count: 1 });
    }

    /// Takes over another log's findings, whose blocks are counted from `first_block`.
    pub(crate) fn absorb(&mut self, other: Log, first_block: u64) {
        for mut entry in other.entries {
            entry.block += first_block;
            if let Some(o) = &mut entry.other {
                o.block += first_block;
            }
            let key = (entry.kind, entry.severity, entry.pc, entry.other.map(|o| o.pc));
            if let Some(&i) = self.index.get(&key) {
                let known = &mut self.entries[i];
                entry.count += known.count;
                if entry.reach() > known.reach() {
                    *known = entry;
                } else {
                    known.count = entry.count;
                }
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
