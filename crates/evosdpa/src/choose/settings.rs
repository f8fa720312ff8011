//! Settings of a kernel family's tunables, each with its reason.

use evosdpa_kernels::Assignment;

/// One decision: a few tunables or kinds that belong together, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason {
    /// What was decided: `tile`, `schedule`, …
    pub concern: &'static str,
    /// Why so.
    pub why: &'static str,
    /// The first of the settings it decided.
    start: usize,
    /// How many.
    count: usize,
}

/// Tunables and kinds with the reasons for their values.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    values: Vec<(&'static str, i64)>,
    reasons: Vec<Reason>,
}

impl Settings {
    /// A decision.
    pub(super) fn decide(
        &mut self,
        concern: &'static str,
        values: &[(&'static str, i64)],
        why: &'static str,
    ) -> &mut Self {
        let (start, count) = (self.values.len(), values.len());
        self.values.extend_from_slice(values);
        self.reasons.push(Reason { concern, why, start, count });
        self
    }

    /// What was decided for a name. The last word counts.
    pub(super) fn value(&self, name: &str) -> Option<i64> {
        self.values.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// Every name with its value, in the order of the decisions.
    pub fn iter(&self) -> impl Iterator<Item = (&str, i64)> {
        self.values.iter().copied()
    }

    /// Every decision with the values it set.
    pub fn reasons(&self) -> impl Iterator<Item = (&Reason, &[(&'static str, i64)])> {
        self.reasons.iter().map(|reason| (reason, &self.values[reason.start..][..reason.count]))
    }

    /// Takes the user's values in place of what was decided.
    pub(super) fn overridden_by(&mut self, set: &Assignment) {
        for (name, value) in &mut self.values {
            if let Some(given) = set.value(name) {
                *value = given;
            }
        }
    }
}
