//! EvoEngineer-Full: structures first, then details inside the best structures, by mutation, crossover, local steps and
//! insights, around a small set of elites.

use super::{Proposal, Random, Strategy, View};
use crate::{
    evolve::{
        insight, operators,
        population::{self, TOP},
        space::Layer,
    },
    measure::dice::Dice,
};

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
/// Attempts of an operator before chance takes over.
const TRIES: usize = 24;

impl Strategy for Evo {
    fn name(&self) -> &'static str {
        "evo"
    }

    fn propose(&mut self, view: &View<'_>, dice: &mut Dice) -> Option<Proposal> {
        let elites = population::elites(view.history, TOP);
        let made = match elites.first() {
            None => None,
            Some(_) if self.in_first_layer(view) => (0..TRIES).find_map(|_| structure(view, dice)),
            Some(_) => (0..TRIES).find_map(|_| second_layer(view, &elites, dice)),
        };
        made.or_else(|| Random.propose(view, dice))
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
fn structure(view: &View<'_>, dice: &mut Dice) -> Option<Proposal> {
    let point = operators::restructured(view.space, &view.space.default_point(), dice);
    view.is_free(&point).then(|| Proposal::new(point, "sample", Vec::new()))
}

fn second_layer(
    view: &View<'_>,
    elites: &[&crate::evolve::log::Evaluation],
    dice: &mut Dice,
) -> Option<Proposal> {
    // The best of two drawn: better parents are likelier, none is certain.
    let parent = *elites.get(dice.below(elites.len()).min(dice.below(elites.len())))?;
    let mut throw = dice.below(20);
    let mut falls_in = |share: usize| {
        let hit = throw < share;
        throw = throw.wrapping_sub(share);
        hit
    };
    let proposal = if falls_in(LOCAL) {
        let free: Vec<_> =
            view.space.neighbours(&parent.point).into_iter().filter(|point| view.is_free(point)).collect();
        Proposal::new(dice.pick(&free)?.clone(), "neighbour", vec![parent.number])
    } else if falls_in(MUTATION) {
        Proposal::new(operators::mutated(view.space, &parent.point, dice), "mutation", vec![parent.number])
    } else if falls_in(CROSSOVER) {
        let other = *dice.pick(elites)?;
        let child = operators::crossed(&parent.point, &other.point, dice);
        Proposal::new(child, "crossover", vec![parent.number, other.number])
    } else if falls_in(INSIGHT) {
        // Insights are about the best.
        let best = *elites.first()?;
        let insight = insight::choose(view.insights, view.prior, dice)?;
        let point = insight::applied(insight, view.space, &best.point, dice)?;
        Proposal { insight: Some(insight.id.clone()), ..Proposal::new(point, "insight", vec![best.number]) }
    } else {
        Proposal::new(operators::redetailed(view.space, &parent.point, dice), "details", vec![parent.number])
    };
    view.is_free(&proposal.point).then_some(proposal)
}
