//! Trials of insights: which advice a candidate put to the test, whichever operator made it, and what came of it.

use serde::{Deserialize, Serialize};

use super::{
    insight::{self, Diagnosis},
    log::{Evaluation, Standing},
    population,
};

/// A candidate that went the way an insight points.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The insight's id.
    pub insight: String,
    /// The evaluation whose diagnosis it is from.
    pub of: u64,
    /// How many times as fast as its parent; absent where one of them was not measured on every problem.
    pub speedup: Option<f64>,
    /// Whether it was accepted or promoted.
    pub accepted: bool,
    /// Whether it is alive and more than half a per cent fitter than its parent.
    pub helped: bool,
}

/// What a candidate put to the test: each insight, of its parent's diagnosis or of that of the best so far, that points from
/// the parent to the candidate. `history` is what came before it.
pub fn trials(candidate: &Evaluation, history: &[Evaluation], diagnoses: &[Diagnosis]) -> Vec<Trial> {
    let evaluated = |number: u64| history.iter().find(|evaluation| evaluation.number == number);
    let parent = candidate.parents.first().and_then(|number| evaluated(*number));
    // With another source it differs in more than its tunables.
    let Some(parent) = parent.filter(|parent| parent.kernel == candidate.kernel) else { return Vec::new() };
    let best = population::anchors(history, 1).first().map(|best| best.number);
    let mut trials: Vec<Trial> = Vec::new();
    for number in [Some(parent.number), best].into_iter().flatten() {
        for insight in diagnoses.iter().filter(|d| d.number == number).flat_map(|d| &d.insights) {
            let known = trials.iter().any(|trial| trial.insight == insight.id);
            if known || !insight::points(insight, &parent.point, &candidate.point) {
                continue;
            }
            trials.push(Trial {
                insight: insight.id.clone(),
                of: number,
                speedup: candidate.fitness.zip(parent.fitness).map(|(own, parent)| own / parent),
                accepted: candidate.status >= Standing::Accepted,
                helped: insight::helped(candidate, parent),
            });
        }
    }
    trials
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        evolve::{
            insight::{Prior, Record, Seen, tests::insight},
            log::tests::evaluation,
        },
        profile::Direction,
    };

    fn diagnosis(number: u64, id: &str, tunable: &str, direction: Direction) -> Diagnosis {
        let insights = vec![insight(id, 0.5, &[(tunable, direction)])];
        Diagnosis { number, view: Seen::Counters, without_counters: None, insights }
    }

    /// A neighbour of evaluation 0, whose tunables are A = 1 and b = 0.
    fn neighbour(a: i64, b: i64, fitness: f64) -> Evaluation {
        let mut made = evaluation(2, a, fitness);
        made.point.insert("b".to_owned(), b);
        Evaluation { operator: "neighbour".to_owned(), parents: vec![0], ..made }
    }

    #[test]
    fn whoever_goes_the_way_of_an_insight_tries_it() {
        let history = [evaluation(0, 1, 1.0), evaluation(1, 2, 1.02)];
        let diagnoses =
            [diagnosis(0, "more-a", "A", Direction::Up), diagnosis(1, "more-b", "b", Direction::Up)];
        let better = trials(&neighbour(2, 0, 1.06), &history, &diagnoses);
        let expected =
            Trial { insight: "more-a".into(), of: 0, speedup: Some(1.06), accepted: true, helped: true };
        assert_eq!(better, [expected]);
        // Advice on the best counts for children of others, too.
        let slower = trials(&neighbour(1, 3, 0.9), &history, &diagnoses);
        assert_eq!(slower.len(), 1);
        assert_eq!((slower[0].insight.as_str(), slower[0].of, slower[0].helped), ("more-b", 1, false));
        assert!(trials(&neighbour(0, 0, 1.1), &history, &diagnoses).is_empty(), "the other way");

        let mut without_parent = neighbour(2, 0, 1.06);
        without_parent.parents.clear();
        assert!(trials(&without_parent, &history, &diagnoses).is_empty());
        let other_source = Evaluation { kernel: Some("x_p2".into()), ..neighbour(2, 0, 1.06) };
        assert!(trials(&other_source, &history, &diagnoses).is_empty());
    }

    #[test]
    fn trials_are_counted_and_what_is_older_still_counts() {
        let history = [evaluation(0, 1, 1.0)];
        let diagnoses = [diagnosis(0, "more-a", "A", Direction::Up)];
        let tried = |fitness| {
            let candidate = neighbour(2, 0, fitness);
            Evaluation { trials: trials(&candidate, &history, &diagnoses), ..candidate }
        };
        // A log from before trials were kept says only what an insight led to.
        let older = Evaluation { insight: Some("more-a".into()), helped: Some(true), ..neighbour(2, 0, 1.2) };
        let prior = Prior::default().with(&[tried(1.06), tried(0.7), older]);
        let expected = Record { tried: 3, helped: 2, accepted: 1, best_speedup: Some(1.06) };
        assert_eq!(prior.insights["more-a"], expected);
        let record: Record = serde_json::from_str(r#"{"tried":4,"helped":1}"#).unwrap();
        assert_eq!(record, Record { tried: 4, helped: 1, ..Record::default() });
    }
}
