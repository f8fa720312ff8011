//! A launch's metrics, typed.

use std::collections::BTreeMap;

use super::{
    capture::Launch,
    metric::{Entry, Metric, Need, Registry, Stall},
};
use crate::Error;

/// The metrics of a launch that a registry asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    values: BTreeMap<Metric, Value>,
}

#[derive(Clone, Debug, PartialEq)]
struct Value {
    name: String,
    unit: &'static str,
    number: f64,
}

impl Values {
    /// Picks a launch's metrics. A required one that is not there, or has no value, is an error that names it: zero would
    /// be a lie.
    pub fn of(launch: &Launch, registry: &Registry) -> Result<Self, Error> {
        let mut values = BTreeMap::new();
        let mut missing = Vec::new();
        for entry in registry.entries() {
            match find(entry, launch) {
                Some((name, number)) => {
                    values.insert(entry.metric, Value { name, unit: entry.unit.symbol(), number });
                }
                None if entry.need == Need::Required => missing.push(describe_missing(entry, launch)),
                None => {}
            }
        }
        if missing.is_empty() {
            return Ok(Self { values });
        }
        Err(Error::MetricsMissing { kernel: launch.kernel.clone(), arch: registry.arch(), missing })
    }

    /// A metric, where the capture has it. Required ones are always there.
    pub fn value(&self, metric: Metric) -> Option<f64> {
        self.values.get(&metric).map(|value| value.number)
    }

    /// A metric that the registry requires; 0 only for one that it does not.
    pub(super) fn required(&self, metric: Metric) -> f64 {
        debug_assert!(self.values.contains_key(&metric), "{metric:?} is not required by the registry");
        self.value(metric).unwrap_or_default()
    }

    /// The name in the capture and the unit of a metric that is there.
    pub(super) fn named(&self, metric: Metric) -> Option<(&str, &'static str, f64)> {
        self.values.get(&metric).map(|value| (value.name.as_str(), value.unit, value.number))
    }

    /// Reasons to wait with their share of all waiting, most first. A warp that was merely not chosen does not wait.
    pub fn stall_shares(&self) -> Vec<(Stall, f64)> {
        let counted = Stall::ALL.iter().copied().filter(|stall| *stall != Stall::NotSelected);
        let stalls: Vec<(Stall, f64)> =
            counted.filter_map(|stall| Some((stall, self.value(Metric::Stall(stall))?))).collect();
        let total: f64 = stalls.iter().map(|(_, warps)| warps).sum();
        let share = |warps: f64| if total > 0.0 { warps / total } else { 0.0 };
        let mut shares: Vec<_> = stalls.into_iter().map(|(stall, warps)| (stall, share(warps))).collect();
        shares.sort_by(|a, b| b.1.total_cmp(&a.1));
        shares
    }

    /// Of the passes over shared memory, the share that bank conflicts added.
    pub fn conflict_share(&self) -> f64 {
        let (conflicts, wavefronts) =
            (self.required(Metric::SharedConflicts), self.required(Metric::SharedWavefronts));
        if wavefronts > 0.0 { (conflicts / wavefronts).min(1.0) } else { 0.0 }
    }

    /// Mean over busiest: how evenly the SMs were used.
    pub fn balance(&self) -> f64 {
        let (mean, most) = (self.required(Metric::SmActiveMean), self.required(Metric::SmActiveMost));
        if most > 0.0 { (mean / most).min(1.0) } else { 1.0 }
    }

    /// Everything, by the names the capture has.
    pub fn by_name(&self) -> BTreeMap<String, f64> {
        self.values.values().map(|value| (value.name.clone(), value.number)).collect()
    }
}

fn find(entry: &Entry, launch: &Launch) -> Option<(String, f64)> {
    let names = entry.names.iter().copied().chain(entry.label);
    names.into_iter().find_map(|name| Some((name.to_owned(), *launch.metrics.get(name)?)))
}

fn describe_missing(entry: &Entry, launch: &Launch) -> String {
    let name = entry.names[0];
    let empty = launch.without_value.iter().any(|known| entry.names.contains(&known.as_str()));
    if empty { format!("{name} (n/a)") } else { name.to_owned() }
}
