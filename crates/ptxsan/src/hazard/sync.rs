//! Synchronisation through memory: release and acquire patterns on flags and counters.
//!
//! A strong write publishes what its thread had fenced (or, with `.release`, all it knows); a strong read of
//! the same place learns it at the reader's next fence (or, with `.acquire`, at once). Without the fence on
//! either side nothing is learnt, and the data behind the flag races.

use super::clock::{Clock, Numbering};
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

/// What a strong write tells whoever reads it, fence or not: who wrote, and what they had done and known before.
#[derive(Debug, Clone)]
pub(crate) struct Said {
    pub(crate) who: u32,
    pub(crate) time: u32,
    pub(crate) known: Rc<Clock>,
}

impl Said {
    /// Whether an access came before the write.
    pub(crate) fn covers(&self, numbering: Numbering, who: u32, time: u32) -> bool {
        self.who == who && self.time >= time || self.known.knows(numbering, who, time)
    }
}

/// All places that strong operations touched.
#[derive(Default)]
pub(crate) struct SyncPlaces {
    places: HashMap<Place, Published>,
    /// The last strong write, in kernels that poll.
    said: HashMap<Place, Said>,
}

impl SyncPlaces {
    pub(crate) fn say(&mut self, place: Place, said: Said) {
        if self.said.len() < MAX_PLACES || self.said.contains_key(&place) {
            self.said.insert(place, said);
        }
    }

    pub(crate) fn said(&self, place: &Place) -> Option<&Said> {
        self.said.get(place)
    }

    /// Whether what is stored there was stored behind a fence.
    pub(crate) fn is_released(&self, place: &Place) -> bool {
        self.places.contains_key(place)
    }

    /// How far an access was released, anywhere.
    pub(crate) fn release_of(&self, numbering: Numbering, who: u32, time: u32) -> Option<Scope> {
        let all = self.places.values().flatten();
        all.filter(|(_, _, clock)| clock.knows(numbering, who, time)).map(|(_, scope, _)| *scope).max()
    }

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
