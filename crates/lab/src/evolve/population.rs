//! Selection: the elites over all problems, and the best on each.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    log::{Confirmation, Evaluation, Header, ShapeResult, Standing},
    sources,
};
use crate::{Error, gate::GateResult, profile, record::atomic};

/// Elites kept, unless the caller says otherwise.
pub const TOP: usize = 3;

/// The operator of the evaluation that is the default.
pub const DEFAULT: &str = "default";

/// The elites: evaluations that passed every gate and are not out, best geometric mean first.
pub fn elites(history: &[Evaluation], top: usize) -> Vec<&Evaluation> {
    let mut alive: Vec<&Evaluation> = history
        .iter()
        .filter(|evaluation| evaluation.status >= Standing::Kept && evaluation.fitness.is_some())
        .collect();
    // Equal fitness: the older one, which has been an elite for longer.
    alive.sort_by(|a, b| {
        b.fitness.unwrap_or(0.0).total_cmp(&a.fitness.unwrap_or(0.0)).then(a.number.cmp(&b.number))
    });
    alive.truncate(top);
    alive
}

/// What a search goes on from: the elites, or the default while there are none.
pub fn anchors(history: &[Evaluation], top: usize) -> Vec<&Evaluation> {
    let elites = elites(history, top);
    if elites.is_empty() {
        return history.iter().filter(|evaluation| evaluation.operator == DEFAULT).take(1).collect();
    }
    elites
}

/// What a candidate's fitness must be above to be among the elites, when there are as many as are kept.
pub fn elite_above(history: &[Evaluation], top: usize) -> Option<f64> {
    let elites = elites(history, top);
    elites.last().filter(|_| elites.len() >= top).and_then(|worst| worst.fitness)
}

/// Evaluations that no other beats on every problem: for each there is a mix of problems on which it is the best.
pub fn pareto(history: &[Evaluation]) -> Vec<&Evaluation> {
    let whole: Vec<&Evaluation> =
        history.iter().filter(|e| e.fitness.is_some() && e.status != Standing::Rejected).collect();
    let at_least = |a: &Evaluation, b: &Evaluation| {
        b.shapes
            .iter()
            .all(|(problem, own)| a.shapes.get(problem).is_some_and(|other| other.speedup >= own.speedup))
    };
    let beaten = |b: &&&Evaluation| {
        whole.iter().any(|a| {
            let strictly = !at_least(b, a);
            at_least(a, b) && strictly
        })
    };
    whole.iter().filter(|b| !beaten(b)).copied().collect()
}

/// The best on each problem.
pub fn best_by_problem(history: &[Evaluation]) -> BTreeMap<&str, &Evaluation> {
    let mut best: BTreeMap<&str, &Evaluation> = BTreeMap::new();
    for evaluation in history.iter().filter(|evaluation| evaluation.status != Standing::Rejected) {
        for (problem, shape) in &evaluation.shapes {
            let faster = |incumbent: &&Evaluation| shape.speedup > incumbent.shapes[problem].speedup;
            if best.get(problem.as_str()).is_none_or(faster) {
                best.insert(problem, evaluation);
            }
        }
    }
    best
}

/// The schema of `elite.json`.
pub const ELITE_SCHEMA: &str = "evosdpa.elite/1";

/// `elite.json`: what `evosdpa apply` reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EliteFile {
    /// [`ELITE_SCHEMA`].
    pub schema: String,
    /// Where it was measured.
    pub device: EliteDevice,
    /// Best first.
    pub elites: Vec<Elite>,
    /// The best on each problem.
    pub pareto: BTreeMap<String, Elite>,
    /// What a fresh measurement said of the first elite.
    #[serde(default)]
    pub confirmation: Option<Confirmation>,
}

/// Where elites were measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EliteDevice {
    /// The device's own name.
    pub name: String,
    /// What kernels are compiled for.
    pub arch: String,
}

/// One elite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Elite {
    /// The kernel.
    pub kernel: String,
    /// Its folder from that of the tune, for `--kernel-path`, where it is a proposed source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Its tunables.
    pub tunables: BTreeMap<String, i64>,
    /// Geometric mean of the speed-ups.
    pub fitness: f64,
    /// By shape.
    pub shapes: BTreeMap<String, EliteShape>,
    /// Which evaluation of the log it is.
    pub evaluation: u64,
    /// The profile gate's verdict, on a device that has one. UNAVAILABLE is no PASS: its counters were not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<GateResult>,
}

/// An elite on one shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EliteShape {
    /// How many times as fast as the default.
    pub speedup: f64,
    /// Its median time.
    pub p50_us: f64,
    /// The element type.
    pub dtype: String,
    /// The share of the roof over the problem, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roofline: Option<f64>,
}

/// What the history says is to be kept; `has_profile_gate` where elites have to pass one.
pub fn elite_file(
    header: &Header,
    history: &[Evaluation],
    confirmation: Option<&Confirmation>,
    top: usize,
    has_profile_gate: bool,
) -> EliteFile {
    let profile = |evaluation: &Evaluation| {
        let known = evaluation.gates.iter().find(|gate| gate.gate == profile::GATE).cloned();
        // One that would not have been an elite at its time, or of an older log.
        let never = || GateResult::unavailable(profile::GATE, "it was not profiled when it was evaluated");
        known.or_else(|| has_profile_gate.then(never))
    };
    let elite = |evaluation: &Evaluation| Elite {
        kernel: evaluation.kernel.clone().unwrap_or_else(|| header.space.kernel.clone()),
        source: evaluation.kernel.as_deref().map(sources::relative),
        tunables: evaluation.point.clone(),
        fitness: evaluation.fitness.unwrap_or(f64::NAN),
        shapes: evaluation
            .shapes
            .iter()
            .map(|(problem, shape)| {
                let (name, dtype) = problem.split_once(' ').unwrap_or((problem, ""));
                let dtype = dtype.to_owned();
                let ShapeResult { speedup, p50_us, roofline, .. } = *shape;
                (name.to_owned(), EliteShape { speedup, p50_us, dtype, roofline })
            })
            .collect(),
        evaluation: evaluation.number,
        profile: profile(evaluation),
    };
    EliteFile {
        schema: ELITE_SCHEMA.to_owned(),
        device: EliteDevice { name: header.device_name.clone(), arch: header.arch.clone() },
        elites: elites(history, top).into_iter().map(elite).collect(),
        pareto: best_by_problem(history)
            .into_iter()
            .filter(|(_, evaluation)| evaluation.fitness.is_some())
            .map(|(problem, evaluation)| {
                (problem.split(' ').next().unwrap_or(problem).to_owned(), elite(evaluation))
            })
            .collect(),
        confirmation: confirmation.cloned(),
    }
}

/// Writes `elite.json`: the old one or the new one is there at every moment, whatever crashes.
pub fn write_elites(folder: &Path, file: &EliteFile) -> Result<(), Error> {
    // Plain data always serialises.
    let mut text = serde_json::to_vec_pretty(file).expect("records are plain data");
    text.push(b'\n');
    atomic::write(&folder.join("elite.json"), &text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evolve::log::tests::{evaluation, header};

    #[test]
    fn elites_are_the_best_that_are_alive() {
        let mut history: Vec<Evaluation> = [1.0, 1.2, 0.9, 1.4, 1.1]
            .iter()
            .enumerate()
            .map(|(i, f)| evaluation(i as u64, i as i64, *f))
            .collect();
        history[3].status = Standing::Rejected;
        let numbers = |elites: &[&Evaluation]| elites.iter().map(|e| e.number).collect::<Vec<_>>();
        assert_eq!(numbers(&elites(&history, 3)), [1, 4, 0]);
        assert_eq!(numbers(&pareto(&history)), [1]);
        let file = elite_file(&header(), &history, None, 3, false);
        assert_eq!((file.elites.len(), file.elites[0].fitness), (3, 1.2));
        assert_eq!(file.pareto["tiny"].evaluation, 1);
        let folder = tempfile::tempdir().unwrap();
        write_elites(folder.path(), &file).unwrap();
        let text = std::fs::read_to_string(folder.path().join("elite.json")).unwrap();
        assert_eq!(serde_json::from_str::<EliteFile>(&text).unwrap(), file);
        assert!(text.contains("\"evosdpa.elite/1\"") && text.contains("\"tunables\""), "{text}");
        assert!(file.elites.iter().all(|elite| elite.profile.is_none()));

        // What was not profiled is not said to have passed.
        history[1].gates.push(GateResult::pass(profile::GATE, "tensor pipe 61 %"));
        let file = elite_file(&header(), &history, None, 3, true);
        let words: Vec<&str> =
            file.elites.iter().map(|e| e.profile.as_ref().unwrap().verdict.word()).collect();
        assert_eq!(words, ["PASS", "UNAVAILABLE", "UNAVAILABLE"]);
    }

    #[test]
    fn a_search_goes_on_from_a_default_that_is_no_elite() {
        let mut default = evaluation(0, 1, 1.0);
        default.operator = DEFAULT.to_owned();
        default.status = Standing::Rejected;
        let mut history = vec![default, evaluation(1, 2, 0.99)];
        assert_eq!(anchors(&history, 3)[0].number, 1);
        history[1].status = Standing::Rejected;
        assert!(elites(&history, 3).is_empty());
        assert_eq!(anchors(&history, 3)[0].number, 0);
    }

    #[test]
    fn a_specialist_is_on_the_front() {
        let mut history = vec![evaluation(0, 0, 1.0), evaluation(1, 1, 1.1)];
        for (evaluation, other) in history.iter_mut().zip([2.0, 0.5]) {
            let mut shape = evaluation.shapes["tiny f32"].clone();
            shape.speedup = other;
            evaluation.shapes.insert("long f32".into(), shape);
        }
        assert_eq!(pareto(&history).len(), 2);
        assert_eq!(best_by_problem(&history)["long f32"].number, 0);
    }
}
