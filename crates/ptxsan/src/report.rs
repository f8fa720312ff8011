//! What a launch did and what it did wrong, for people and for programs.

use crate::count::Counters;
use crate::count::counters::Tally;
use crate::decode::Kernel;
use crate::hazard::log::{Entry, Kind, Log};
use crate::machine::{Launch, Shape};
use crate::module::{Module, is_sync};
use serde::Serialize;
use std::fmt;

/// A place in the code, and who was there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Site {
    /// `file:line` in the CUDA source, when the module has line information.
    pub source: Option<String>,
    /// Line in the PTX text.
    pub ptx_line: u32,
    /// The instruction, without operands.
    pub opcode: String,
    /// Block indices x, y, z.
    pub block: [u64; 3],
    /// Thread indices x, y, z.
    pub thread: [u64; 3],
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [bx, by, bz] = self.block;
        let [tx, ty, tz] = self.thread;
        match &self.source {
            Some(source) => write!(f, "{source}")?,
            None => write!(f, "PTX")?,
        }
        write!(
            f,
            " (PTX line {}, {}) by block ({bx},{by},{bz}) thread ({tx},{ty},{tz})",
            self.ptx_line, self.opcode
        )
    }
}

/// One mistake, reported once per pair of code locations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// What kind of mistake.
    pub kind: Kind,
    /// The access or instruction at which it showed.
    pub site: Site,
    /// The other access of a race.
    pub other: Option<Site>,
    /// Addresses, sizes, and what is missing.
    pub detail: String,
    /// How often it was seen.
    pub count: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.kind.title(), self.detail)?;
        write!(f, "    at {}", self.site)?;
        if let Some(other) = &self.other {
            write!(f, "\n   and {other}")?;
        }
        if self.count > 1 {
            write!(f, "\n  seen {} times", self.count)?;
        }
        Ok(())
    }
}

/// Everything a launch leaves behind beside memory.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Outcome {
    /// The entry launched.
    pub entry: String,
    /// Mistakes, in the order they showed.
    pub findings: Vec<Finding>,
    /// Occurrences beyond the distinct findings that are kept.
    pub dropped: u64,
    /// What was executed.
    pub counters: Counters,
    /// What the kernel printed.
    pub output: String,
    /// Warp instructions executed.
    pub warp_instructions: u64,
    /// What each synchronisation did, if [`Options::explain`](crate::Options::explain) asked for it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sync_work: Vec<SyncWork>,
}

/// What one synchronisation instruction did in a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SyncWork {
    /// The instruction, as in [`SyncPoint::id`](crate::SyncPoint::id).
    pub id: u32,
    /// Times a warp executed it.
    pub executed: u64,
    /// For a barrier, warp synchronisation or fence: conflicting accesses that it was the first to order. For a wait:
    /// copies that it was the first to wait for. For a commit: copies that it put into a group.
    pub work: u64,
}

impl Outcome {
    pub(crate) fn new(
        module: &Module,
        kernel: &Kernel,
        shape: &Shape,
        launch: &Launch,
        log: Log,
        tallies: &[Tally],
        output: String,
        warp_instructions: u64,
    ) -> Self {
        let site = |pc: u32, block: u64, thread: u32| {
            let info = &kernel.info[(pc as usize).min(kernel.info.len() - 1)];
            Site {
                source: module.describe(info.location),
                ptx_line: info.line,
                opcode: info.opcode.to_string(),
                block: Shape::coordinates(shape.grid, shape.in_grid(block)),
                thread: Shape::coordinates(shape.block, u64::from(thread)),
            }
        };
        let finding = |e: Entry| Finding {
            kind: e.kind,
            site: site(e.pc, e.block, e.thread),
            other: e.other.map(|o| site(o.pc, o.block, o.thread)),
            detail: e.detail,
            count: e.count,
        };
        Outcome {
            entry: launch.entry.clone(),
            dropped: log.dropped,
            findings: log.entries.into_iter().map(finding).collect(),
            counters: Counters::new(module, kernel, tallies),
            output,
            warp_instructions,
            sync_work: if launch.options.explain { sync_work(kernel, tallies) } else { Vec::new() },
        }
    }

    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Findings of one kind.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |f| f.kind == kind)
    }
}

fn sync_work(kernel: &Kernel, tallies: &[Tally]) -> Vec<SyncWork> {
    let mut all: Vec<SyncWork> = Vec::new();
    for (info, tally) in kernel.info.iter().zip(tallies).filter(|(info, _)| is_sync(&info.opcode)) {
        // A function that is called from two places is decoded once, a step belongs to its instruction.
        match all.iter_mut().find(|work| work.id == info.id) {
            Some(work) => work.work += tally.work,
            None => all.push(SyncWork { id: info.id, executed: tally.executed, work: tally.work }),
        }
    }
    all
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}\n")?;
        }
        match self.findings.len() {
            0 => writeln!(f, "{}: no findings", self.entry)?,
            1 => writeln!(f, "{}: 1 finding", self.entry)?,
            n => writeln!(f, "{}: {n} findings", self.entry)?,
        }
        write!(f, "{}", self.counters)
    }
}
