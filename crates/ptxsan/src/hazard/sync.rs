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

/// What a strong write publishes: by which block, how far it reaches, and what is learnt.
#[derive(Debug, Clone)]
pub(crate) struct Release {
    pub(crate) block: u32,
    pub(crate) scope: Scope,
    /// Behind a sequentially consistent fence of the whole device.
    pub(crate) is_sc: bool,
    pub(crate) clock: Rc<Clock>,
}

/// What strong reads of a lane saw, to be learnt at its next fence.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// Of the own block, which a fence of any scope shows, and of others.
    near: Option<Clock>,
    far: Option<Clock>,
    /// What of it was released behind a sequentially consistent fence: whoever is ordered behind the read may fence it as well.
    sc: Option<Rc<Clock>>,
}

impl Seen {
    /// Takes what a fence shows.
    pub(crate) fn take(&mut self, scope: Scope) -> [Option<Clock>; 2] {
        self.sc = None;
        [self.near.take(), if scope == Scope::Device { self.far.take() } else { None }]
    }

    /// What a strong read saw; of the own block alone if `is_near`.
    pub(crate) fn add(&mut self, clock: &Clock, is_near: bool) {
        match if is_near { &mut self.near } else { &mut self.far } {
            Some(old) => old.join(clock),
            empty => *empty = Some(clock.clone()),
        }
    }

    /// Passes on what others may fence.
    pub(crate) fn tell(&self, clock: &mut Clock) {
        if let Some(sc) = &self.sc {
            clock.hear(sc);
        }
    }

    pub(crate) fn knows(&self, numbering: Numbering, who: u32, time: u32) -> bool {
        [&self.near, &self.far].into_iter().flatten().any(|clock| clock.knows(numbering, who, time))
    }
}

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
    places: HashMap<Place, Vec<Release>>,
    /// The last strong write, in kernels that poll.
    said: HashMap<Place, Said>,
    /// The time of the latest strong access, and whether one wrote since the last that read.
    latest: u32,
    is_written: bool,
}

impl SyncPlaces {
    /// The time of a strong access by a warp whose own time is `own`: a write has an earlier one than a read, whoever made them, only if it
    /// came before it. Writes that nobody reads between share a time.
    pub(crate) fn strong_time(&mut self, own: u32, reads: bool, writes: bool) -> u32 {
        self.latest = self.latest.max(own);
        if reads && (self.is_written || writes) {
            self.latest = self.latest.saturating_add(1);
        }
        self.is_written = writes || self.is_written && !reads;
        self.latest
    }

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
        all.filter(|release| release.clock.knows(numbering, who, time)).map(|release| release.scope).max()
    }

    /// A plain strong store: a new value, published with what the writer releases, if anything.
    pub(crate) fn store(&mut self, place: Place, released: Option<Release>) {
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
    pub(crate) fn update(&mut self, place: Place, released: Option<Release>) {
        let Some(release) = released else { return };
        if self.places.len() >= MAX_PLACES {
            return;
        }
        let list = self.places.entry(place).or_default();
        let kind = |r: &Release| (r.block, r.scope, r.is_sc);
        match list.iter_mut().find(|earlier| kind(earlier) == kind(&release)) {
            Some(earlier) => {
                let mut joined = (*earlier.clock).clone();
                joined.join(&release.clock);
                joined.settle();
                earlier.clock = Rc::new(joined);
            }
            None => list.push(release),
        }
    }

    /// What was published at a place for a strong read by a thread of `block` that reaches `scope`.
    fn published(&self, place: Place, block: u32, scope: Scope) -> impl Iterator<Item = &Release> {
        let reaches = move |r: &&Release| r.block == block || r.scope.min(scope) == Scope::Device;
        self.places.get(&place).into_iter().flatten().filter(reaches)
    }

    /// What a read that acquires learns; `false`: nothing.
    pub(crate) fn learn(&self, place: Place, block: u32, scope: Scope, into: &mut Clock) -> bool {
        let mut learnt = false;
        for release in self.published(place, block, scope) {
            into.join(&release.clock);
            learnt = true;
        }
        learnt
    }

    /// What a read that does not acquire sees.
    pub(crate) fn see(&self, place: Place, block: u32, scope: Scope, seen: &mut Seen) {
        for release in self.published(place, block, scope) {
            seen.add(&release.clock, release.block == block);
            if release.is_sc {
                match &mut seen.sc {
                    Some(old) if Rc::ptr_eq(old, &release.clock) => {}
                    Some(old) => Rc::make_mut(old).join(&release.clock),
                    empty => *empty = Some(Rc::clone(&release.clock)),
                }
            }
        }
    }

    /// Whether anything is published at a place.
    pub(crate) fn is_silent(&self, place: &Place) -> bool {
        !self.places.contains_key(place)
    }
}
