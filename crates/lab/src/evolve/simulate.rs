//! Replaying a finished log: strategies compared on the same candidates, without a device.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use super::{
    insight::{Diagnosis, InsightSource, Prior, Recorded},
    log::{Contents, Evaluation, Standing},
    population,
    space::Point,
    strategy::{self, Proposal, View},
    trial::trials,
};
use crate::{Error, measure::samples::median};
use evosdpa_oracle::rng::Rng;

/// What a strategy did over several replays.
#[derive(Clone, Debug, Serialize)]
pub struct Replay {
    /// The strategy.
    pub strategy: String,
    /// Evaluations each replay was allowed.
    pub budget: usize,
    /// Replays.
    pub replays: usize,
    /// Best fitness so far after each evaluation, median over the replays.
    pub best_so_far: Vec<f64>,
    /// Best fitness at the end: least, median and most over the replays.
    pub at_the_end: [f64; 3],
    /// Evaluations until within 1 % of the best of the log, median; `None` where most replays never got there.
    pub to_within_1_percent: Option<f64>,
    /// Share of replays that got there.
    pub reached: f64,
    /// Best fitness of the log.
    pub best_of_log: f64,
}

/// Lets a strategy search among what a log has evaluated.
pub fn replay(
    contents: &Contents,
    name: &str,
    budget: usize,
    replays: usize,
    seed: u64,
) -> Result<Replay, Error> {
    let space = &contents.header.space;
    let known: HashMap<&Point, &Evaluation> =
        contents.evaluations.iter().filter(|e| e.kernel.is_none()).map(|e| (&e.point, e)).collect();
    if known.len() < 2 {
        return Err(Error::Tune(format!(
            "the log has {} evaluations: there is nothing to search among",
            known.len()
        )));
    }
    let source = Recorded::new(&contents.evaluations, &contents.diagnoses);
    let budget = budget.min(known.len());
    let best_of_log = contents.evaluations.iter().filter_map(alive).fold(0.0, f64::max);
    let mut curves: Vec<Vec<f64>> = Vec::new();
    let mut reached: Vec<f64> = Vec::new();
    for run in 0..replays.max(1) as u64 {
        let mut strategy = strategy::by_name(name)?;
        let (mut history, mut taken): (Vec<Evaluation>, HashSet<Point>) = (Vec::new(), HashSet::new());
        let keeps = |point: &Point| known.contains_key(point);
        let (mut curve, mut best, mut within) = (Vec::new(), 0.0_f64, None);
        let mut diagnoses: Vec<Diagnosis> = Vec::new();
        for number in 0..budget as u64 {
            let default = space.default_point();
            let proposal = if number == 0 && known.contains_key(&default) {
                Proposal { point: default, operator: population::DEFAULT, parents: vec![], insight: None }
            } else {
                if let Some(best) = population::anchors(&history, 1).first()
                    && diagnoses.last().is_none_or(|last| last.number != best.number)
                {
                    diagnoses.push(source.look(best, space));
                }
                let prior = Prior::default().with(&history);
                let view = View {
                    space,
                    keeps: &keeps,
                    history: &history,
                    taken: &taken,
                    insights: diagnoses.last().map_or(&[], |last| last.insights.as_slice()),
                    prior: &prior,
                    budget,
                    top: population::TOP,
                };
                let mut rng = Rng::of_series(seed.wrapping_add(run.wrapping_mul(0x51_7C_C1)), number);
                match strategy.propose(&view, &mut rng) {
                    Some(proposal) => proposal,
                    None => break,
                }
            };
            // Only points of the log are kept by `keeps`.
            let Some(seen) = known.get(&proposal.point) else { break };
            taken.insert(proposal.point);
            // What it was made from, and which insights it puts to the test, is this replay's own.
            let mut evaluation = Evaluation {
                number,
                operator: proposal.operator.to_owned(),
                parents: proposal.parents,
                insight: proposal.insight,
                helped: None,
                trials: vec![],
                ..(*seen).clone()
            };
            evaluation.trials = trials(&evaluation, &history, &diagnoses);
            history.push(evaluation);
            best = best.max(alive(seen).unwrap_or(0.0));
            if within.is_none() && best >= 0.99 * best_of_log {
                within = Some(number as f64 + 1.0);
            }
            curve.push(best);
        }
        curves.push(curve);
        reached.extend(within);
    }
    let longest = curves.iter().map(Vec::len).max().unwrap_or(0);
    let at = |curve: &Vec<f64>, i: usize| curve.get(i).or(curve.last()).copied().unwrap_or(0.0);
    let best_so_far =
        (0..longest).map(|i| median(&curves.iter().map(|curve| at(curve, i)).collect::<Vec<_>>())).collect();
    let ends: Vec<f64> = curves.iter().map(|curve| curve.last().copied().unwrap_or(0.0)).collect();
    let fold = |f: fn(f64, f64) -> f64, start: f64| ends.iter().copied().fold(start, f);
    Ok(Replay {
        strategy: name.to_owned(),
        budget,
        replays: curves.len(),
        best_so_far,
        at_the_end: [fold(f64::min, f64::INFINITY), median(&ends), fold(f64::max, 0.0)],
        to_within_1_percent: (2 * reached.len() > curves.len()).then(|| median(&reached)),
        reached: reached.len() as f64 / curves.len() as f64,
        best_of_log,
    })
}

fn alive(evaluation: &Evaluation) -> Option<f64> {
    evaluation.fitness.filter(|_| evaluation.status >= Standing::Kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evolve::log::{
        Log,
        tests::{evaluation, header},
    };

    #[test]
    fn a_replay_searches_only_what_the_log_has_and_finds_its_best() {
        let folder = tempfile::tempdir().unwrap();
        let header = header();
        let mut log = Log::create(folder.path(), &header).unwrap();
        for index in 0..header.space.size() {
            let point = header.space.at(index);
            let mut line = evaluation(index as u64, 0, 1.0 + 0.1 * (point["A"] * 4 + point["b"]) as f64);
            line.point = point;
            log.add(&line).unwrap();
        }
        let (_, contents) = Log::open(folder.path()).unwrap();
        for name in strategy::NAMES {
            let replay = replay(&contents, name, 100, 9, 3).unwrap();
            assert_eq!((replay.budget, replay.replays, replay.reached), (12, 9, 1.0), "{name}");
            assert!((replay.best_of_log - 2.1).abs() < 1e-9 && (replay.at_the_end[1] - 2.1).abs() < 1e-9);
            assert!(replay.best_so_far.is_sorted() && replay.to_within_1_percent.unwrap() <= 12.0);
        }
        assert!(replay(&contents, "guessing", 5, 1, 0).is_err());
    }
}
