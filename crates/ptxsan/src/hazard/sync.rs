//! Synchronisation through memory: release and acquire patterns on flags and counters.
//!
//! A strong write publishes what its thread had fenced (or, with `.release`, all it knows); a strong read of
//! the same place learns it at the reader's next fence (or, with `.acquire`, at once). Without the fence on
//! either side nothing is learnt, and the data behind the flag races.

use super::clock::Clock;
use crate::decode::Scope;
use crate::parse::ast::Space;
use std::collections::HashMap;
use std::rc::Rc;

/// Places are remembered up to this many; more is no synchronisation but an attack.
const MAX_PLACES: usize = 1 << 20;

/// A place in memory: shared memory differs from block to block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) space: Space,
    pub(crate) block: u32,
    pub(crate) address: u64,
}

/// What was published at a place: by which block, how far it reaches, and what is learnt.
type Published = Vec<(u32, Scope, Rc<Clock>)>;

/// All places that strong operations touched.
#[derive(Default)]
pub(crate) struct SyncPlaces {
    places: HashMap<Place, Published>,
}

impl SyncPlaces {
    /// A plain strong store: a new value, published with what the writer releases, if anything.
    pub(crate) fn store(&mut self, place: Place, released: Option<(u32, Scope, Rc<Clock>)>) {
        match released {
            Some(entry) if self.places.len() < MAX_PLACES => {
                self.places.insert(place, vec![entry]);
            }
            _ => {
                self.places.remove(&place);
            }
        }
    }

    /// An atomic read-modify-write continues what earlier ones released.
    pub(crate) fn update(&mut self, place: Place, released: Option<(u32, Scope, Rc<Clock>)>) {
        let Some((block, scope, clock)) = released else { return };
        if self.places.len() >= MAX_PLACES {
            return;
        }
        let list = self.places.entry(place).or_default();
        match list.iter_mut().find(|(b, s, _)| *b == block && *s == scope) {
            Some((_, _, known)) => {
                let mut joined = (**known).clone();
                joined.join(&clock);
                joined.settle();
                *known = Rc::new(joined);
            }
            None => list.push((block, scope, clock)),
        }
    }

    /// What a strong read of `place` by a thread of `block`, reaching `scope`, may learn.
    pub(crate) fn learn(&self, place: Place, block: u32, scope: Scope, into: &mut Clock) -> bool {
        let mut learnt = false;
        for (other, reach, clock) in self.places.get(&place).into_iter().flatten() {
            let near = *other == block;
            if near || (*reach == Scope::Device && scope == Scope::Device) {
                into.join(clock);
                learnt = true;
            }
        }
        learnt
    }
}
