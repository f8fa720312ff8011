//! Mutation score: take each synchronisation out of a kernel, one at a time, and see whether its absence is noticed.
//!
//! A deletion is *noticed* if a run has a finding or another result. One that is not noticed must be shown to be
//! redundant, by what the remaining synchronisations do without it (see [`SyncWork`]): that shows it for the runs
//! made, so the runs must reach every way a kernel can go. What is neither noticed nor redundant is a *miss*.

use crate::error::Error;
use crate::machine::{Options, Schedule};
use crate::module::{Edit, Module, SyncPoint};
use crate::report::{Outcome, SyncWork};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Runs a module: the outcome, and the bytes of the result.
pub type Run<'a, E> = dyn Fn(&Module, &Options) -> Result<(Outcome, Vec<u8>), E> + 'a;

/// One way to run a module: a problem, say.
pub struct Scene<'a, E> {
    /// What it is called in a report.
    pub name: String,
    /// Runs a module.
    pub run: Box<Run<'a, E>>,
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

/// What every synchronisation did in one run, by instruction.
type Work = BTreeMap<u32, SyncWork>;

/// Deletes each synchronisation of an entry in turn and runs all scenes under all schedules until it is noticed.
pub fn score<E: From<Error>>(
    module: &Module,
    entry: &str,
    scenes: &[Scene<'_, E>],
    schedules: &[Schedule],
) -> Result<Score, E> {
    let mut score = Score { entry: entry.to_owned(), unmutated_findings: Vec::new(), deletions: Vec::new() };
    let points = module.sync_points(entry)?;
    let (mut results, mut work) = (Vec::new(), Vec::new());
    for (scene, schedule) in pairs(scenes, schedules) {
        // Where there is nothing to delete there is nothing to explain.
        let options = Options { schedule, explain: !points.is_empty(), ..Options::default() };
        let (outcome, result) = (scene.run)(module, &options)?;
        score.unmutated_findings.extend(outcome.failures().map(|f| f.to_string()));
        work.push(by_id(&outcome));
        results.push(result);
    }
    if !score.unmutated_findings.is_empty() {
        return Ok(score);
    }
    for point in points {
        let ran = |work: &Work| work.get(&point.id).is_some_and(|work| work.executed > 0);
        let fate = if !work.iter().any(ran) {
            Fate::NotReached
        } else {
            let mutant = module.with(&point)?;
            match noticed(&mutant, scenes, schedules, &results)? {
                Some(fate) => fate,
                None => explain(module, entry, &mutant, &point, &work, scenes, schedules)?,
            }
        };
        score.deletions.push(Deletion { point, fate });
    }
    Ok(score)
}

fn by_id(outcome: &Outcome) -> Work {
    outcome.sync_work.iter().map(|work| (work.id, *work)).collect()
}

fn pairs<'s, 'a, E>(
    scenes: &'s [Scene<'a, E>],
    schedules: &'s [Schedule],
) -> impl Iterator<Item = (&'s Scene<'a, E>, Schedule)> {
    scenes.iter().flat_map(move |scene| schedules.iter().map(move |schedule| (scene, *schedule)))
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
        if let Some(finding) = outcome.failures().next() {
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

/// Why nobody missed a synchronisation: it did nothing, or others do what it did. That they do in every run is what the
/// runs without it have shown; who they are is looked up in the first run in which it did something.
fn explain<E: From<Error>>(
    module: &Module,
    entry: &str,
    mutant: &Module,
    point: &SyncPoint,
    before: &[Work],
    scenes: &[Scene<'_, E>],
    schedules: &[Schedule],
) -> Result<Fate, E> {
    let is = |part: &str| point.opcode.contains(part);
    let counts_its_work = is("wgmma.fence") || is("mbarrier_init");
    let publishes = [
        "fence",
        "membar",
        "mbarrier.arrive",
        "wgmma.commit",
        "bulk.commit",
        "griddepcontrol",
        "cluster.arrive",
    ];
    let is_silent = publishes.iter().any(|part| is(part)) && !counts_its_work;
    if is_silent || point.edit != Edit::Delete {
        // What these release, or announce, is learnt elsewhere: their own work says nothing.
        return Ok(Fate::Missed);
    }
    let work_in = |work: &Work, id: u32| work.get(&id).map_or(0, |work| work.work);
    let mut worked = pairs(scenes, schedules).zip(before).filter(|(_, before)| work_in(before, point.id) > 0);
    let Some(((scene, schedule), before)) = worked.next() else {
        let reason = if is("wgmma.fence") {
            "no wgmma behind it uses a register that was touched since the fence before it"
        } else if is("mbarrier_init") {
            "no other block uses an mbarrier that it covers"
        } else if is("commit_group") {
            "every group that it closes is empty"
        } else if is("cp.async") {
            "all copies that it waits for have been waited for already"
        } else {
            "it orders no two conflicting accesses that were not ordered before"
        };
        return Ok(Fate::Redundant { reason: reason.to_owned() });
    };
    let options = Options { schedule, explain: true, ..Options::default() };
    let after = by_id(&(scene.run)(mutant, &options)?.0);
    let stands_in: Vec<String> = module
        .sync_points(entry)?
        .into_iter()
        .filter(|other| other.id != point.id && work_in(&after, other.id) > work_in(before, other.id))
        .map(|other| other.to_string())
        .collect();
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
            Some(source) => write!(f, "{} at {source} (PTX line {})", self.opcode, self.ptx_line)?,
            None => write!(f, "{} at PTX line {}", self.opcode, self.ptx_line)?,
        }
        match self.edit {
            Edit::Delete => Ok(()),
            Edit::MoreBytes => write!(f, ", 16 bytes more expected"),
            Edit::OtherParity => write!(f, ", other parity"),
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
