//! The profile as a source of insights and as the last gate of a tune: each candidate is profiled at most once, and a profile
//! that fails costs advice, never the tune.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    path::PathBuf,
};

use evosdpa_core::Problem;
use evosdpa_kernels::VariantId;

use super::{
    insight::{Diagnosis, InsightSource, Seen, StaticView},
    log::Evaluation,
    sources,
    space::{Space, label},
};
use crate::{
    gate::GateResult,
    profile::{GATE, ProfileRow, Session},
};

/// Profiles in a row that may fail before no more are asked for: each costs time of the device.
const FAILURES_MAX: usize = 2;

/// Profiles candidates of a tune on its first problem.
pub struct Profiler<'a> {
    session: RefCell<Session>,
    problem: Problem,
    folder: PathBuf,
    /// By the candidate's label.
    rows: RefCell<BTreeMap<String, ProfileRow>>,
    failures: Cell<usize>,
    said: Cell<bool>,
    say: &'a dyn Fn(&str),
}

impl<'a> Profiler<'a> {
    /// For the tune in a folder. `say` hears once why there are no counters, if there are none.
    pub fn new(session: Session, problem: Problem, folder: PathBuf, say: &'a dyn Fn(&str)) -> Self {
        Self {
            session: RefCell::new(session),
            problem,
            folder,
            rows: RefCell::default(),
            failures: Cell::new(0),
            said: Cell::new(false),
            say,
        }
    }

    /// The profile gate's word on a candidate. Called while the device is held.
    pub fn gate(&self, label: &str) -> GateResult {
        if let Some(why) = self.session.borrow().without_counters() {
            self.say_once(why);
            return GateResult::unavailable(GATE, why);
        }
        match self.row(label) {
            Ok(row) => row
                .gates
                .into_iter()
                .next()
                .unwrap_or_else(|| GateResult::unavailable(GATE, "the profile says nothing")),
            Err(why) => GateResult::unavailable(GATE, why),
        }
    }

    fn row(&self, label: &str) -> Result<ProfileRow, String> {
        if let Some(known) = self.rows.borrow().get(label) {
            return Ok(known.clone());
        }
        let row = self.profile(label);
        let without = match &row {
            Ok(row) => {
                row.gates.iter().find(|gate| gate.verdict.is_unavailable()).map(|gate| gate.detail.clone())
            }
            Err(why) => Some(why.clone()),
        };
        match without {
            Some(why) => {
                self.say_once(&why);
                self.failures.set(self.failures.get() + 1);
                if self.failures.get() >= FAILURES_MAX {
                    self.session.borrow_mut().give_up_counters(&why);
                }
            }
            None => self.failures.set(0),
        }
        if let Ok(row) = &row {
            self.rows.borrow_mut().insert(label.to_owned(), row.clone());
        }
        row
    }

    fn profile(&self, label: &str) -> Result<ProfileRow, String> {
        let kernel = VariantId::kernel_of(label);
        let mut session = self.session.borrow_mut();
        if !session.knows(kernel) {
            // A proposed source: its files are in the tune's folder.
            session.add_folder(&sources::folder(&self.folder, kernel)).map_err(|error| error.to_string())?;
        }
        session
            .profile(label, &self.problem, &self.folder.join("profiles"))
            .map_err(|error| error.to_string())
    }

    fn say_once(&self, why: &str) {
        if !self.said.replace(true) {
            (self.say)(why);
        }
    }
}

impl InsightSource for Profiler<'_> {
    fn look(&self, best: &Evaluation, space: &Space) -> Diagnosis {
        let name = label(best.kernel.as_deref().unwrap_or(&space.kernel), &best.point);
        let row = match self.row(&name) {
            Ok(row) => row,
            Err(why) => return Diagnosis { without_counters: Some(why), ..StaticView.look(best, space) },
        };
        let unavailable = row.gates.iter().find(|gate| gate.verdict.is_unavailable());
        let view = match () {
            () if unavailable.is_none() => Seen::Counters,
            () if row.simulated.is_some() => Seen::Simulated,
            () => Seen::Static,
        };
        // Advice that no tunable answers is for people and proposers; it stays, and nothing is drawn from it.
        Diagnosis {
            number: best.number,
            view,
            without_counters: unavailable.map(|gate| gate.detail.clone()),
            insights: row.insights,
        }
    }
}
