//! Mutation score: take each synchronisation out of a kernel, one at a time, and see whether its absence is noticed.
//!
//! A deletion is *noticed* if a run has a finding or another result. One that is not noticed must be shown to be
//! redundant, by what the remaining synchronisations do without it (see [`SyncWork`]): that shows it for the runs
//! made, so the runs must reach every way a kernel can go. What is neither noticed nor redundant is a *miss*.

use crate::error::Error;
use crate::machine::{Options, Schedule};
use crate::module::{Module, SyncPoint};
use crate::report::{Outcome, SyncWork};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// One way to run a module: a problem, say. Gives the outcome and the bytes of the result.
pub struct Scene<'a, E> {
    /// What it is called in a report.
    pub name: String,
    /// Runs a module.
    pub run: Box<dyn Fn(&Module, &Options) -> Result<(Outcome, Vec<u8>), E> + 'a>,
}

/// What became of one deletion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
#[non_exhaustive]
pub enum Fate {
    /// A run had a finding.
    Noticed {
        /// Where.
        scene: String,
        /// Under which schedule.
        schedule: Schedule,
        /// The finding in a line.
        finding: String,
    },
    /// No finding, but another result.
    WrongResult {
        /// Where.
        scene: String,
        /// Under which schedule.
        schedule: Schedule,
    },
    /// It did nothing that the rest does not do.
    Redundant {
        /// Why.
        reason: String,
    },
    /// No run executed it, so nothing is known.
    NotReached,
    /// It did something, and its absence was not noticed.
    Missed,
}

/// A synchronisation and what became of its deletion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Deletion {
    /// The instruction.
    pub point: SyncPoint,
    /// What became of it.
    #[serde(flatten)]
    pub fate: Fate,
}

/// All deletions of one entry.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Score {
    /// The entry.
    pub entry: String,
    /// Findings of the kernel as it stands, which make the rest meaningless.
    pub unmutated_findings: Vec<String>,
    /// Every deletion, in order of the text.
    pub deletions: Vec<Deletion>,
}

impl Score {
    /// Deletions that were noticed, and deletions that matter: all that are not redundant.
    pub fn counts(&self) -> (usize, usize) {
        let redundant = self.of(|fate| matches!(fate, Fate::Redundant { .. }));
        let noticed = self.of(|fate| matches!(fate, Fate::Noticed { .. } | Fate::WrongResult { .. }));
        (noticed, self.deletions.len() - redundant)
    }

    /// The share of deletions that matter which were noticed; one where none matters.
    pub fn share(&self) -> f64 {
        let (noticed, matter) = self.counts();
        if matter == 0 { 1.0 } else { noticed as f64 / matter as f64 }
    }

    fn of(&self, which: impl Fn(&Fate) -> bool) -> usize {
        self.deletions.iter().filter(|deletion| which(&deletion.fate)).count()
    }
}

/// What every synchronisation did over all runs, by instruction.
type Work = BTreeMap<u32, (u64, u64)>;

/// Deletes each synchronisation of an entry in turn and runs all scenes under all schedules until it is noticed.
pub fn score<E: From<Error>>(
    module: &Module,
    entry: &str,
    scenes: &[Scene<'_, E>],
    schedules: &[Schedule],
) -> Result<Score, E> {
    let mut score = Score { entry: entry.to_owned(), unmutated_findings: Vec::new(), deletions: Vec::new() };
    let mut results = Vec::new();
    let mut work = Work::new();
    for (scene, schedule) in pairs(scenes, schedules) {
        let (outcome, result) = (scene.run)(module, &explained(schedule))?;
        score.unmutated_findings.extend(outcome.findings.iter().map(|f| f.to_string()));
        add(&mut work, &outcome.sync_work);
        results.push(result);
    }
    if !score.unmutated_findings.is_empty() {
        return Ok(score);
    }
    for point in module.sync_points(entry)? {
        let (executed, done) = work.get(&point.id).copied().unwrap_or_default();
        let fate = if executed == 0 {
            Fate::NotReached
        } else {
            let mutant = module.without(point.id)?;
            match noticed(&mutant, scenes, schedules, &results)? {
                Some(fate) => fate,
                None => explain(module, entry, &mutant, &point, done, &work, scenes, schedules)?,
            }
        };
        score.deletions.push(Deletion { point, fate });
    }
    Ok(score)
}

fn pairs<'s, 'a, E>(
    scenes: &'s [Scene<'a, E>],
    schedules: &'s [Schedule],
) -> impl Iterator<Item = (&'s Scene<'a, E>, Schedule)> {
    scenes.iter().flat_map(move |scene| schedules.iter().map(move |schedule| (scene, *schedule)))
}

fn explained(schedule: Schedule) -> Options {
    Options { schedule, explain: true, ..Options::default() }
}

fn add(work: &mut Work, more: &[SyncWork]) {
    for one in more {
        let entry = work.entry(one.id).or_default();
        entry.0 += one.executed;
        entry.1 += one.work;
    }
}

fn noticed<E>(
    mutant: &Module,
    scenes: &[Scene<'_, E>],
    schedules: &[Schedule],
    results: &[Vec<u8>],
) -> Result<Option<Fate>, E> {
    for ((scene, schedule), right) in pairs(scenes, schedules).zip(results) {
        let (outcome, result) = (scene.run)(mutant, &Options { schedule, ..Options::default() })?;
        let scene = scene.name.clone();
        if let Some(finding) = outcome.findings.first() {
            let text = finding.to_string();
            let finding = text.lines().map(str::trim).collect::<Vec<_>>().join("; ");
            return Ok(Some(Fate::Noticed { scene, schedule, finding }));
        }
        if result != *right {
            return Ok(Some(Fate::WrongResult { scene, schedule }));
        }
    }
    Ok(None)
}

/// Why nobody missed a synchronisation: it did nothing, or others do what it did.
fn explain<E>(
    module: &Module,
    entry: &str,
    mutant: &Module,
    point: &SyncPoint,
    done: u64,
    before: &Work,
    scenes: &[Scene<'_, E>],
    schedules: &[Schedule],
) -> Result<Fate, E>
where
    E: From<Error>,
{
    let is = |part: &str| point.opcode.contains(part);
    if is("fence") || is("membar") {
        // What a fence releases is learnt elsewhere: its own work says nothing.
        return Ok(Fate::Missed);
    }
    if done == 0 {
        let reason = if is("commit_group") {
            "every group that it closes is empty"
        } else if is("cp.async") {
            "all copies that it waits for have been waited for already"
        } else {
            "it orders no two conflicting accesses that were not ordered before"
        };
        return Ok(Fate::Redundant { reason: reason.to_owned() });
    }
    let mut after = Work::new();
    for (scene, schedule) in pairs(scenes, schedules) {
        add(&mut after, &(scene.run)(mutant, &explained(schedule))?.0.sync_work);
    }
    let mut stands_in: Vec<String> = Vec::new();
    for other in module.sync_points(entry)? {
        let work = |all: &Work| all.get(&other.id).map_or(0, |(_, work)| *work);
        if other.id != point.id && work(&after) > work(before) {
            stands_in.push(other.to_string());
        }
    }
    if stands_in.is_empty() {
        return Ok(Fate::Missed);
    }
    let what = if is("cp.async") { "copies" } else { "conflicting accesses" };
    let reason = format!("the {what} that it takes care of are taken care of by {}", stands_in.join(" and "));
    Ok(Fate::Redundant { reason })
}

impl fmt::Display for SyncPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{} at {source} (PTX line {})", self.opcode, self.ptx_line),
            None => write!(f, "{} at PTX line {}", self.opcode, self.ptx_line),
        }
    }
}

impl fmt::Display for Deletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let point = &self.point;
        match &self.fate {
            Fate::Noticed { scene, schedule, finding } => {
                write!(f, "noticed    {point}: {finding} [{scene}, {}]", schedule.name())
            }
            Fate::WrongResult { scene, schedule } => {
                write!(f, "noticed    {point}: another result [{scene}, {}]", schedule.name())
            }
            Fate::Redundant { reason } => write!(f, "redundant  {point}: {reason}"),
            Fate::NotReached => write!(f, "NOT REACHED {point}"),
            Fate::Missed => write!(f, "MISSED     {point}"),
        }
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.unmutated_findings {
            writeln!(f, "{finding}")?;
        }
        if !self.unmutated_findings.is_empty() {
            return write!(f, "{}: has findings as it stands, so deletions say nothing", self.entry);
        }
        for deletion in &self.deletions {
            writeln!(f, "{deletion}")?;
        }
        let (noticed, matter) = self.counts();
        let (all, share) = (self.deletions.len(), 100.0 * self.share());
        let redundant = all - matter;
        write!(
            f,
            "{}: {noticed} of {matter} deletions that matter noticed ({share:.0} %); {redundant} of {all} redundant",
            self.entry
        )
    }
}
