//! What a launch did and what it did wrong, for people and for programs.

use crate::count::Counters;
use crate::count::counters::Tally;
use crate::decode::Kernel;
use crate::finding::{self, Finding, Kind, Severity, Site, one_line};
use crate::hazard::log::{Entry, Log};
use crate::machine::{Launch, Shape};
use crate::module::{Module, is_sync};
use serde::Serialize;
use std::collections::HashSet;
use std::fmt;

/// Everything a launch leaves behind beside memory.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Outcome {
    /// The entry launched.
    pub entry: String,
    /// Mistakes, one for each pair of source lines: the worst first, else in the order they showed.
    pub findings: Vec<Finding>,
    /// Occurrences that are in no finding, because there were too many of different places.
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
            let stack = module.stack(info.location);
            Site {
                source: one_line(&stack),
                stack,
                ptx_line: info.line,
                opcode: info.opcode.to_string(),
                block: Shape::coordinates(shape.grid, shape.in_grid(block)),
                thread: Shape::coordinates(shape.block, u64::from(thread)),
            }
        };
        let finding = |e: Entry| Finding {
            reach: e.reach(),
            kind: e.kind,
            severity: e.severity,
            site: site(e.pc, e.block, e.thread),
            other: e.other.map(|o| site(o.pc, o.block, o.thread)),
            variable: e.words.variable,
            detail: e.words.detail,
            advice: e.words.advice,
            count: e.count,
            schedules: vec![launch.options.schedule],
        };
        let mut findings = Vec::new();
        let entries = without_consequences(log.entries);
        finding::merge(&mut findings, entries.into_iter().map(finding));
        Outcome {
            entry: launch.entry.clone(),
            dropped: log.dropped,
            findings,
            counters: Counters::new(module, kernel, tallies),
            output,
            warp_instructions,
            sync_work: if launch.options.explain { sync_work(kernel, tallies) } else { Vec::new() },
        }
    }

    /// Whether nothing was found that is worse than benign, and nothing was left out.
    pub fn is_clean(&self) -> bool {
        self.failures().next().is_none() && self.dropped == 0
    }

    /// Findings that are worse than benign.
    pub fn failures(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity > Severity::Info)
    }

    /// The severity of the worst finding.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }

    /// Findings of one kind.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |f| f.kind == kind)
    }
}

/// A read that races with the first write may find memory that nothing wrote yet: that is the race, and told as such.
fn without_consequences(entries: Vec<Entry>) -> Vec<Entry> {
    let races = [
        Kind::Race,
        Kind::AsyncRace,
        Kind::ProxyRace,
        Kind::WarpSynchronous,
        Kind::VolatileRace,
        Kind::UnfencedMessage,
    ];
    let racing: HashSet<u32> = entries
        .iter()
        .filter(|entry| races.contains(&entry.kind) && entry.severity > Severity::Info)
        .flat_map(|entry| [Some(entry.pc), entry.other.map(|other| other.pc)])
        .flatten()
        .collect();
    let source = |entry: &Entry| entry.other.map_or(entry.pc, |other| other.pc);
    let is_told = |entry: &Entry| entry.kind == Kind::UninitialisedMemory && racing.contains(&source(entry));
    entries.into_iter().filter(|entry| !is_told(entry)).collect()
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
        writeln!(f, "{}: {}", self.entry, tally(&self.findings, self.dropped))?;
        write!(f, "{}", self.counters)
    }
}

/// How many findings there are: `3 findings (1 error, 2 info)`.
pub fn tally(findings: &[Finding], dropped: u64) -> String {
    let mut text = match findings.len() {
        0 => "no findings".to_owned(),
        1 => "1 finding".to_owned(),
        n => format!("{n} findings"),
    };
    let counted = Severity::ALL.into_iter().rev().filter_map(|severity| {
        let count = findings.iter().filter(|finding| finding.severity == severity).count();
        (count > 0).then(|| format!("{count} {severity}"))
    });
    let counted: Vec<String> = counted.collect();
    if !counted.is_empty() {
        text += &format!(" ({})", counted.join(", "));
    }
    if dropped > 0 {
        text += &format!("; {dropped} more occurrences at further places, too many to list");
    }
    text
}
