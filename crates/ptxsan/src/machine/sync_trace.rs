//! What each synchronisation did: kept only when asked for, to say why one of them could be missing.
//!
//! A barrier's (or warp synchronisation's, or fence's) work is the conflicting accesses of other threads that it was the
//! first to order before an access of this thread; a wait's, the copies it was the first to wait for; a commit's, the
//! copies it put into a group.

use super::run::{Context, for_lanes};
use super::warp::Warp;
use crate::hazard::accessor::Accessor;
use crate::hazard::clock::Clock;
use crate::memory::PAGE_BYTES;
use crate::parse::ast::Space;
use std::rc::Rc;

/// What the lanes of a warp learnt, in order, and their copies that are not waited for.
pub(super) struct SyncTrace {
    /// Per lane: the synchronising instruction, and all that was known after it.
    events: [Vec<(u32, Rc<Clock>)>; 32],
    /// Lane and group of each copy.
    copies: Vec<(usize, u32)>,
}

impl SyncTrace {
    pub(super) fn issued(&mut self, lane: usize, group: u32) {
        self.copies.push((lane, group));
    }

    /// Copies of these lanes in the group that each has open.
    pub(super) fn copies_in(&self, mask: u32, open: &[u32; 32]) -> u64 {
        let is_in = |(lane, group): &&(usize, u32)| mask >> lane & 1 == 1 && open[*lane] == *group;
        self.copies.iter().filter(is_in).count() as u64
    }

    /// Forgets the copies that are waited for now, and counts them.
    pub(super) fn retire(&mut self, mask: u32, waited: &[u32; 32]) -> u64 {
        let before = self.copies.len();
        self.copies.retain(|(lane, group)| mask >> lane & 1 == 0 || *group > waited[*lane]);
        (before - self.copies.len()) as u64
    }

    /// The instruction by which a lane first knew what `who` did at `time`; `None` if nothing had to.
    fn source(&self, by: &Accessor<'_>, lane: usize, who: u32, time: u32) -> Option<u32> {
        let events = &self.events[lane];
        let at = events.partition_point(|(_, clock)| !clock.knows(by.numbering, who, time));
        events.get(at).map(|(pc, _)| *pc)
    }
}

impl Warp {
    pub(super) fn with_sync_trace(mut self) -> Self {
        let events = std::array::from_fn(|_| Vec::new());
        self.sync_trace = Some(Box::new(SyncTrace { events, copies: Vec::new() }));
        self
    }

    /// A lane knows more from instruction `pc` on.
    pub(super) fn learn(&mut self, lane: usize, pc: u32, clock: Rc<Clock>) {
        if let Some(sync_trace) = &mut self.sync_trace {
            sync_trace.events[lane].push((pc, Rc::clone(&clock)));
        }
        self.known[lane] = clock;
    }

    /// Credits the synchronisations that order an access after the earlier ones it conflicts with.
    pub(super) fn credit(
        &self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        bytes: u32,
        is_write: bool,
        by: &Accessor<'_>,
    ) {
        let Some(sync_trace) = &self.sync_trace else { return };
        let earlier = match space {
            Space::Shared => match cx.shared_at(address) {
                Some((memory, at)) => memory.shadow.earlier(at, bytes, is_write, by.numbering),
                None => Vec::new(),
            },
            _ => match cx.view.page(address) {
                Some(page) => cx.view.at(page).shadow.earlier(address as usize % PAGE_BYTES, bytes, is_write),
                None => Vec::new(),
            },
        };
        for (who, time) in earlier {
            for_lanes(by.mask, |lane| {
                let is_own = who == by.lanes_base + lane as u32 || who == by.agents_base + lane as u32;
                if !is_own && let Some(pc) = sync_trace.source(by, lane, who, time) {
                    cx.tallies[pc as usize].work += 1;
                }
            });
        }
    }
}
