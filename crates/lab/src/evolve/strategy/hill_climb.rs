//! From the best point to its neighbours; from a summit to somewhere else.

use super::{Proposal, Random, Strategy, View};
use crate::evolve::population;
use evosdpa_oracle::rng::Rng;

/// Steepest ascent with restarts.
#[derive(Clone, Copy, Debug, Default)]
pub struct HillClimb;

impl Strategy for HillClimb {
    fn name(&self) -> &'static str {
        "hill-climb"
    }

    fn propose(&mut self, view: &View<'_>, rng: &mut Rng) -> Option<Proposal> {
        if let Some(best) = population::anchors(view.history, 1).first() {
            let free: Vec<_> =
                view.space.neighbours(&best.point).into_iter().filter(|point| view.is_free(point)).collect();
            if let Some(point) = rng.pick(&free) {
                return Some(Proposal::new(point.clone(), "climb", vec![best.number]));
            }
        }
        Random.propose(view, rng)
    }

    fn heeds_the_best(&self) -> bool {
        true
    }
}
