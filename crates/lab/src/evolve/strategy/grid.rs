//! One point after the other: structures with default details first.

use super::{Proposal, Strategy, View};
use evosdpa_oracle::rng::Rng;

/// Points in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Grid {
    next: u128,
}

/// Points passed over in one go; a space whose constraints leave less than one in a million is better drawn from.
const LOOK_MAX: u128 = 1_000_000;

impl Strategy for Grid {
    fn name(&self) -> &'static str {
        "grid"
    }

    fn propose(&mut self, view: &View<'_>, _: &mut Rng) -> Option<Proposal> {
        let end = view.space.size().min(self.next.saturating_add(LOOK_MAX));
        while self.next < end {
            let point = view.space.at(self.next);
            self.next += 1;
            if view.is_free(&point) {
                return Some(Proposal::new(point, "grid", Vec::new()));
            }
        }
        None
    }
}
