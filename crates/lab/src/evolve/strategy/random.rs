//! Points by chance: what every other strategy must beat.

use super::{Grid, Proposal, Strategy, View};
use evosdpa_oracle::rng::Rng;

/// Points by chance, none twice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Random;

impl Strategy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn propose(&mut self, view: &View<'_>, rng: &mut Rng) -> Option<Proposal> {
        let free = |point: &_| view.is_free(point);
        match view.space.draw(rng, &free) {
            Some(point) => Some(Proposal::new(point, "sample", Vec::new())),
            // Few are left: chance no longer finds them.
            None => Grid::default().propose(view, rng),
        }
    }
}
