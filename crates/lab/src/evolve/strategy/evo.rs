//! EvoEngineer-Full: structures first, then details inside the best structures, by mutation, crossover, local steps and
//! insights, around a small set of elites.

use super::{Proposal, Random, Strategy, View};
use crate::{
    evolve::{
        insight,
        log::Evaluation,
        operators, population,
        space::{Layer, Point},
    },
    profile::Insight,
};
use evosdpa_oracle::rng::Rng;

/// The lab's own strategy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Evo;

/// Share of the budget for the first layer: structures with default details.
const MACRO_SHARE: f64 = 0.3;
/// Of every twenty proposals of the second layer, so many by each operator; the rest are fresh samples.
const LOCAL: usize = 6;
const MUTATION: usize = 5;
const CROSSOVER: usize = 3;
const INSIGHT: usize = 4;
/// Insights of a diagnosis that are followed at once, the most confident ones.
const FOLLOWED: usize = 3;
/// Advice that is less likely to help is left to chance: none of three trials did.
const FOLLOWED_FROM: f64 = 0.25;
/// Attempts of an operator before chance takes over.
const TRIES: usize = 24;

impl Strategy for Evo {
    fn name(&self) -> &'static str {
        "evo"
    }

    fn propose(&mut self, view: &View<'_>, rng: &mut Rng) -> Option<Proposal> {
        let anchors = population::anchors(view.history, view.top);
        let made = anchors.first().and_then(|best| {
            follow(view, best, rng).or_else(|| {
                (0..TRIES).find_map(|_| match self.in_first_layer(view) {
                    true => structure(view, rng),
                    false => second_layer(view, &anchors, rng),
                })
            })
        });
        made.or_else(|| Random.propose(view, rng))
    }

    fn heeds_the_best(&self) -> bool {
        true
    }
}

impl Evo {
    fn in_first_layer(&self, view: &View<'_>) -> bool {
        let structures: u128 = view
            .space
            .dimensions
            .iter()
            .filter(|dimension| dimension.layer == Layer::Macro)
            .map(|dimension| dimension.values.len() as u128)
            .fold(1, u128::saturating_mul);
        let share = (view.budget as f64 * MACRO_SHARE) as u128;
        (view.taken.len() as u128) < share.min(structures)
    }
}

/// A structure that was not tried, with default details.
fn structure(view: &View<'_>, rng: &mut Rng) -> Option<Proposal> {
    let point = operators::restructured(view.space, &view.space.default_point(), rng);
    view.is_free(&point).then(|| Proposal::new(point, "sample", Vec::new()))
}

/// An insight on the best that nothing has put to the test yet. In either layer: a look at the best costs more than a
/// candidate, and what it says is of use as long as the best is the best.
fn follow(view: &View<'_>, best: &Evaluation, rng: &mut Rng) -> Option<Proposal> {
    let mut insights: Vec<&Insight> = view.insights.iter().collect();
    insights.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
    let untried = insights
        .into_iter()
        .filter(|insight| view.prior.chance(&insight.id) >= FOLLOWED_FROM)
        .map(|insight| (insight, insight::moves(insight, view.space, &best.point)))
        .filter(|(_, moves)| moves.iter().any(view.keeps))
        .take(FOLLOWED)
        .filter(|(_, moves)| !moves.iter().any(|point| view.taken.contains(point)));
    let weight = |insight: &Insight| insight::weight(insight, view.prior);
    let (insight, moves) = untried.max_by(|(a, _), (b, _)| weight(a).total_cmp(&weight(b)))?;
    following(view, best, insight, moves, rng)
}

/// One of the moves that an insight on the best asks for.
fn following(
    view: &View<'_>,
    best: &Evaluation,
    insight: &Insight,
    mut moves: Vec<Point>,
    rng: &mut Rng,
) -> Option<Proposal> {
    moves.retain(|point| view.is_free(point));
    let point = rng.pick(&moves)?.clone();
    Some(Proposal { insight: Some(insight.id.clone()), ..Proposal::new(point, "insight", vec![best.number]) })
}

fn second_layer(view: &View<'_>, anchors: &[&Evaluation], rng: &mut Rng) -> Option<Proposal> {
    // The best of two drawn: better parents are likelier, none is certain.
    let parent = *anchors.get(rng.below(anchors.len()).min(rng.below(anchors.len())))?;
    let mut throw = rng.below(20);
    let mut falls_in = |share: usize| {
        let hit = throw < share;
        throw = throw.wrapping_sub(share);
        hit
    };
    let proposal = if falls_in(LOCAL) {
        let free: Vec<_> =
            view.space.neighbours(&parent.point).into_iter().filter(|point| view.is_free(point)).collect();
        Proposal::new(rng.pick(&free)?.clone(), "neighbour", vec![parent.number])
    } else if falls_in(MUTATION) {
        Proposal::new(operators::mutated(view.space, &parent.point, rng), "mutation", vec![parent.number])
    } else if falls_in(CROSSOVER) {
        let other = *rng.pick(anchors)?;
        let child = operators::crossed(&parent.point, &other.point, rng);
        Proposal::new(child, "crossover", vec![parent.number, other.number])
    } else if falls_in(INSIGHT) {
        // Insights are about the best.
        let best = *anchors.first()?;
        let with_moves = |insight| {
            let moves = insight::moves(insight, view.space, &best.point);
            moves.iter().any(|point| view.is_free(point)).then_some((insight, moves))
        };
        let possible: Vec<(&Insight, Vec<Point>)> = view.insights.iter().filter_map(with_moves).collect();
        let (insight, moves) =
            insight::draw(possible, |(insight, _)| insight::weight(insight, view.prior), rng)?;
        following(view, best, insight, moves, rng)?
    } else {
        Proposal::new(operators::redetailed(view.space, &parent.point, rng), "details", vec![parent.number])
    };
    view.is_free(&proposal.point).then_some(proposal)
}
