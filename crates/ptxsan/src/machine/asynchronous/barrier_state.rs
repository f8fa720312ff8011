//! What an mbarrier is at a time: its phase, pending arrivals and bytes, and what its phases publish.

use crate::hazard::clock::{Clock, MBARRIERS, Numbering};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Marks a token that `pending_count` may be asked about.
pub(super) const NO_COMPLETE: u64 = 1 << 63;

/// One mbarrier.
pub(crate) struct Mbarrier {
    /// Which identity the copies that report to it have.
    pub(super) slot: u32,
    pub(super) expected: u32,
    pub(crate) pending: u32,
    /// Bytes announced and not there yet; negative: there and not announced.
    pub(crate) tx: i64,
    /// Phases completed since it was initialised.
    pub(crate) phase: u32,
    /// The time of the first phase: identities are used again when a barrier is.
    base: u32,
    /// What the arrivals of this phase publish, and what all phases before published.
    publishing: Option<Clock>,
    pub(super) published: Option<Rc<Clock>>,
    /// The same of arrivals from other blocks of the cluster, for those whose wait reaches that far.
    publishing_far: Option<Clock>,
    pub(super) published_far: Option<Rc<Clock>>,
    /// Who initialised it, identity and time, and where.
    pub(super) by: (u32, u32),
    pc: u32,
    /// The cluster barrier that must be complete before other blocks may use it, and the fence; `None`: not fenced.
    pub(super) fenced_at: Option<(u32, u32)>,
    /// Whether a proxy fence shows the initialisation to copies.
    pub(super) is_shown: bool,
}

impl Mbarrier {
    /// The time at which what reports to the current phase is known.
    pub(super) fn time(&self) -> u32 {
        self.base + self.phase + 1
    }

    pub(super) fn token(&self, no_complete: bool) -> u64 {
        let mark = if no_complete { NO_COMPLETE } else { 0 };
        mark | u64::from(self.pending) << 32 | u64::from(self.phase)
    }

    /// What the arrivals of this phase publish; the barrier lies in `block`.
    pub(super) fn publishing(&mut self, numbering: Numbering, block: u32, threads: u32) -> &mut Clock {
        self.publishing.get_or_insert_with(|| Clock::new(numbering, block, threads))
    }

    /// What arrivals of other blocks publish, as far as the cluster.
    pub(super) fn publishing_far(&mut self, numbering: Numbering, block: u32, threads: u32) -> &mut Clock {
        self.publishing_far.get_or_insert_with(|| Clock::new(numbering, block, threads))
    }
}

/// The mbarriers of a block, by their offset in its shared memory.
#[derive(Default)]
pub(crate) struct Mbarriers {
    all: BTreeMap<u32, Mbarrier>,
    /// Slots that were given out, with the time that the next barrier of this place starts from.
    slots: BTreeMap<u32, (u32, u32)>,
    /// Who issued the last copy that reports to a slot.
    pub(super) issuers: Vec<u32>,
    /// The first and the last byte of all live barriers.
    reach: (u32, u32),
}

impl Mbarriers {
    pub(crate) fn get(&self, offset: u32) -> Option<&Mbarrier> {
        self.all.get(&offset)
    }

    pub(super) fn get_mut(&mut self, offset: u32) -> Option<&mut Mbarrier> {
        self.all.get_mut(&offset)
    }

    /// Barriers that a thread has initialised and not fenced.
    pub(super) fn unfenced_of(&mut self, thread: u32) -> impl Iterator<Item = &mut Mbarrier> {
        self.all.values_mut().filter(move |b| b.by.0 == thread && b.fenced_at.is_none())
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Mbarrier> {
        self.all.values_mut()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Who issued the last copy of an mbarrier's slot.
    pub(crate) fn issuer(&self, slot: u32) -> u32 {
        self.issuers.get(slot as usize).copied().unwrap_or(0)
    }

    /// A live barrier that overlaps these bytes.
    #[inline]
    pub(crate) fn overlapping(&self, start: u64, bytes: u32) -> Option<u32> {
        if self.all.is_empty()
            || start >= u64::from(self.reach.1)
            || start + u64::from(bytes) <= u64::from(self.reach.0)
        {
            return None;
        }
        let start = start as u32;
        let (&at, _) = self.all.range(..start.saturating_add(bytes)).next_back()?;
        (at + 8 > start).then_some(at)
    }

    fn measure(&mut self) {
        let first = self.all.keys().next().copied().unwrap_or(0);
        let end = self.all.keys().next_back().map_or(0, |last| last + 8);
        self.reach = (first, end);
    }

    /// Completes the phase if nothing is missing; whether it did.
    pub(super) fn settle(&mut self, offset: u32, numbering: Numbering) -> bool {
        let Some(barrier) = self.all.get_mut(&offset) else { return false };
        if barrier.pending != 0 || barrier.tx != 0 {
            return false;
        }
        if let Some(mut clock) = barrier.publishing.take() {
            if let Some(before) = &barrier.published {
                clock.join(before);
            }
            if barrier.slot < MBARRIERS {
                clock.raise(numbering.mbarrier(barrier.slot), barrier.time());
            }
            clock.settle();
            barrier.published = Some(Rc::new(clock));
        }
        if let Some(mut clock) = barrier.publishing_far.take() {
            if let Some(before) = &barrier.published_far {
                clock.join(before);
            }
            clock.settle();
            barrier.published_far = Some(Rc::new(clock));
        }
        barrier.phase += 1;
        barrier.pending = barrier.expected;
        true
    }

    /// A barrier is initialised; its slot.
    pub(super) fn start(&mut self, offset: u32, count: u32, by: (u32, u32), pc: u32) -> u32 {
        let next = self.slots.len() as u32;
        let (slot, base) = *self.slots.entry(offset).or_insert((next, 0));
        let barrier = Mbarrier {
            slot,
            expected: count,
            pending: count,
            tx: 0,
            phase: 0,
            base,
            publishing: None,
            published: None,
            publishing_far: None,
            published_far: None,
            by,
            pc,
            fenced_at: None,
            is_shown: false,
        };
        self.all.insert(offset, barrier);
        self.measure();
        slot
    }

    pub(super) fn remove(&mut self, offset: u32) {
        if let Some(barrier) = self.all.remove(&offset) {
            self.slots.insert(offset, (barrier.slot, barrier.base + barrier.phase + 1));
        }
        self.measure();
    }

    /// The identity of what reports to a barrier now, and its time; `None` beyond the slots there are.
    pub(super) fn agent(&mut self, offset: u32, numbering: Numbering, issuer: u32) -> Option<(u32, u32)> {
        let barrier = self.all.get(&offset).filter(|b| b.slot < MBARRIERS)?;
        let slot = barrier.slot as usize;
        if self.issuers.len() <= slot {
            self.issuers.resize(slot + 1, 0);
        }
        self.issuers[slot] = issuer;
        Some((numbering.mbarrier(barrier.slot), barrier.time()))
    }

    /// Barriers whose bytes do not come out even when their block ends: where they were initialised, and what is wrong.
    pub(crate) fn unsettled(&self) -> impl Iterator<Item = (u32, String)> + '_ {
        self.all.iter().filter(|(_, b)| b.tx != 0).map(|(offset, b)| {
            let what = if b.tx < 0 { "were never expected" } else { "never arrive" };
            (b.pc, format!("{} bytes of mbarrier {offset:#x} {what}", b.tx.abs()))
        })
    }

    /// What a barrier waits for, in words. `name`: of the variable that it lies in.
    pub(crate) fn describe(&self, offset: u32, name: &str) -> String {
        let Some(b) = self.all.get(&offset) else {
            return format!("shared {offset:#x}{name}, where no mbarrier is");
        };
        let bytes = match b.tx {
            ..0 => format!("{} bytes more arrived than were expected", -b.tx),
            _ => format!("{} bytes missing", b.tx),
        };
        format!(
            "mbarrier {offset:#x}{name} in phase {} (parity {}): {} of {} arrivals pending, {bytes}",
            b.phase,
            b.phase & 1,
            b.pending,
            b.expected,
        )
    }

    /// Whether everybody has arrived and only the bytes do not come out: what others wait for follows from it.
    pub(crate) fn has_wrong_bytes(&self, offset: u32) -> bool {
        self.all.get(&offset).is_some_and(|b| b.pending == 0 && b.tx != 0)
    }
}

/// A barrier that lanes name: the block it belongs to and its offset there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BarrierAt {
    pub(crate) block: u32,
    pub(crate) offset: u32,
}
