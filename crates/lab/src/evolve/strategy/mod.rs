//! Strategies: what to try next. Each is a function of what has been seen, so that a tune can stop and go on at any point.

mod evo;
mod grid;
mod hill_climb;
mod random;

use std::collections::HashSet;

pub use evo::Evo;
pub use grid::Grid;
pub use hill_climb::HillClimb;
pub use random::Random;

use super::{
    insight::Prior,
    log::Evaluation,
    space::{Point, Space},
};
use crate::{Error, profile::Insight};
use evosdpa_oracle::rng::Rng;

/// What a strategy sees.
pub struct View<'a> {
    /// The space.
    pub space: &'a Space,
    /// Whether a point keeps the constraints.
    pub keeps: &'a dyn Fn(&Point) -> bool,
    /// What has been evaluated.
    pub history: &'a [Evaluation],
    /// What has been evaluated or is about to be.
    pub taken: &'a HashSet<Point>,
    /// Advice on the best.
    pub insights: &'a [Insight],
    /// What such advice was worth.
    pub prior: &'a Prior,
    /// Evaluations in all.
    pub budget: usize,
    /// Elites that candidates are made from.
    pub top: usize,
}

impl View<'_> {
    /// Whether a point can be proposed.
    pub fn is_free(&self, point: &Point) -> bool {
        !self.taken.contains(point) && (self.keeps)(point)
    }
}

/// What to try next, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// The tunables.
    pub point: Point,
    /// The operator that made it.
    pub operator: &'static str,
    /// Evaluations it was made from.
    pub parents: Vec<u64>,
    /// The insight that led to it.
    pub insight: Option<String>,
}

impl Proposal {
    fn new(point: Point, operator: &'static str, parents: Vec<u64>) -> Self {
        Self { point, operator, parents, insight: None }
    }
}

/// A way to search.
pub trait Strategy {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// The next point; `None` when nothing is left. The rng belong to this proposal alone.
    fn propose(&mut self, view: &View<'_>, rng: &mut Rng) -> Option<Proposal>;

    /// Whether it goes on from the best: what it proposed before there was a new best is then proposed anew.
    fn heeds_the_best(&self) -> bool {
        false
    }
}

/// The names of all strategies, the one of the lab first.
pub const NAMES: [&str; 4] = ["evo", "random", "grid", "hill-climb"];

/// A strategy by its name.
pub fn by_name(name: &str) -> Result<Box<dyn Strategy>, Error> {
    match name {
        "evo" => Ok(Box::new(Evo)),
        "random" => Ok(Box::new(Random)),
        "grid" => Ok(Box::new(Grid::default())),
        "hill-climb" => Ok(Box::new(HillClimb)),
        _ => Err(Error::Problem(evosdpa_core::Error::UnknownName {
            kind: "strategy",
            name: name.to_owned(),
            nearest: evosdpa_core::error::nearest(name, NAMES),
            allowed: NAMES.join(", "),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evolve::{
        insight::{InsightSource, StaticView},
        log::tests::evaluation,
        population,
        space::{Layer, tests::space},
    };

    /// A hill with one summit and a ridge: fitness falls with the distance from it.
    fn fitness(point: &Point) -> f64 {
        let distance: i64 = point.values().map(|value| (value - 4).abs()).sum();
        2.0 / (1.0 + 0.1 * distance as f64)
    }

    /// Runs a strategy and says how good it became, checking on the way that it never repeats itself.
    fn search(name: &str, budget: usize, seed: u64) -> f64 {
        let space = space(&[
            ("A", Layer::Macro, 6),
            ("B", Layer::Macro, 6),
            ("STAGES", Layer::Micro, 6),
            ("d", Layer::Micro, 6),
        ]);
        let keeps = |point: &Point| point["A"] != 2;
        let mut strategy = by_name(name).unwrap();
        let (mut history, mut taken) = (Vec::new(), HashSet::new());
        for number in 0..budget as u64 {
            let insights = population::anchors(&history, 1)
                .first()
                .map(|best| StaticView.look(best, &space).insights)
                .unwrap_or_default();
            let prior = Prior::default().with(&history);
            let view = View {
                space: &space,
                keeps: &keeps,
                history: &history,
                taken: &taken,
                insights: &insights,
                prior: &prior,
                budget,
                top: population::TOP,
            };
            let proposal = strategy.propose(&view, &mut Rng::of_series(seed, number)).unwrap();
            assert!(
                view.is_free(&proposal.point) && space.refuses(&proposal.point).is_none(),
                "{name}: {proposal:?}"
            );
            taken.insert(proposal.point.clone());
            let mut evaluation = evaluation(number, 0, fitness(&proposal.point));
            evaluation.point = proposal.point;
            history.push(evaluation);
        }
        history.iter().filter_map(|evaluation| evaluation.fitness).fold(0.0, f64::max)
    }

    #[test]
    fn evo_and_climbing_beat_chance_on_a_hill() {
        let mean = |name: &str| (0..20).map(|seed| search(name, 60, seed)).sum::<f64>() / 20.0;
        let [evo, random, climb] = ["evo", "random", "hill-climb"].map(mean);
        assert!(evo > random + 0.05 && climb > random, "evo {evo}, random {random}, hill-climb {climb}");
    }

    /// `--top` is how many elites a search goes on from.
    #[test]
    fn evo_makes_candidates_of_as_many_elites_as_asked() {
        let space = space(&[("A", Layer::Macro, 9), ("B", Layer::Macro, 9), ("d", Layer::Micro, 9)]);
        let history: Vec<Evaluation> = (0..30)
            .map(|number| {
                let point = space.at(7 * number as u128);
                Evaluation { point, ..evaluation(number, 0, 1.0 + 0.01 * number as f64) }
            })
            .collect();
        let taken = history.iter().map(|evaluation| evaluation.point.clone()).collect();
        for top in [1, 5] {
            let view = View {
                space: &space,
                keeps: &|_| true,
                history: &history,
                taken: &taken,
                insights: &[],
                prior: &Prior::default(),
                budget: 60,
                top,
            };
            let mut parents = HashSet::new();
            for number in 0..400 {
                let proposal =
                    by_name("evo").unwrap().propose(&view, &mut Rng::of_series(3, number)).unwrap();
                parents.extend(proposal.parents);
            }
            let expected: HashSet<u64> = (30 - top as u64..30).collect();
            assert_eq!(parents, expected, "top {top}");
        }
    }

    #[test]
    fn every_strategy_ends_when_nothing_is_left() {
        let space = space(&[("A", Layer::Macro, 3), ("b", Layer::Micro, 2)]);
        for name in NAMES {
            let mut strategy = by_name(name).unwrap();
            let (mut history, mut taken) = (Vec::new(), HashSet::new());
            for number in 0..10 {
                let view = View {
                    space: &space,
                    keeps: &|_| true,
                    history: &history,
                    taken: &taken,
                    insights: &[],
                    prior: &Prior::default(),
                    budget: 10,
                    top: population::TOP,
                };
                let Some(proposal) = strategy.propose(&view, &mut Rng::of_series(1, number)) else { break };
                taken.insert(proposal.point.clone());
                let mut evaluation = evaluation(number, 0, 1.0);
                evaluation.point = proposal.point;
                history.push(evaluation);
            }
            assert_eq!(history.len(), 6, "{name} finds every point of a small space");
        }
        assert!(by_name("evoo").err().unwrap().to_string().contains("did you mean `evo`"));
    }
}
