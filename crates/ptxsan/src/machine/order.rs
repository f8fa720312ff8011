//! Fences and strong operations: how lanes learn from each other through memory.

use super::run::{Context, for_lanes};
use super::warp::{Fenced, Warp};
use crate::decode::{Fence, Order, Scope};
use crate::hazard::accessor::Conflict;
use crate::hazard::clock::{Clock, Numbering, Proxy};
use crate::hazard::sync::{Place, Release, Said, Seen};
use crate::parse::ast::Space;
use std::rc::Rc;

impl Warp {
    /// What a lane knows and did up to now, as another would learn it.
    pub(super) fn published(&self, cx: &Context<'_, '_>, lane: usize) -> Clock {
        let mut clock = (*self.known[lane]).clone();
        self.raise_lane(cx, lane, &mut clock);
        clock.settle();
        clock
    }

    /// Adds the lane's own time, and the copies it waited for.
    pub(super) fn raise_lane(&self, cx: &Context<'_, '_>, lane: usize, clock: &mut Clock) {
        self.raise_lane_of(cx.numbering, lane, clock);
    }

    pub(super) fn raise_lane_of(&self, numbering: Numbering, lane: usize, clock: &mut Clock) {
        let slot = self.index * 32 + lane as u32;
        clock.raise(slot, self.time);
        clock.raise(slot + numbering.lanes, self.waited_group[lane]);
        if let Some(seen) = self.seen.get(lane) {
            seen.tell(clock);
        }
    }

    /// After publishing, what follows must carry a later time.
    pub(super) fn advance(&mut self) {
        self.time = self.time.saturating_add(1);
    }

    pub(super) fn fence(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, fence: Fence) {
        if !cx.options.check_races {
            return;
        }
        self.fenced.resize(32, None);
        let is_sc = fence.is_sc && fence.scope == Scope::Device;
        self.acquired |= self.polled & mask;
        for_lanes(mask, |lane| {
            let seen = self.seen.get_mut(lane).map(|seen| seen.take(fence.scope)).unwrap_or_default();
            if is_sc && self.known[lane].has_heard() || seen.iter().any(Option::is_some) {
                let mut known = (*self.known[lane]).clone();
                seen.iter().flatten().for_each(|seen| known.join(seen));
                if is_sc {
                    known.believe();
                }
                known.settle();
                self.learn(lane, pc, Rc::new(known));
            }
            let clock = Rc::new(self.published(cx, lane));
            self.fenced[lane] = Some(Fenced { clock, scope: fence.scope, is_sc });
        });
        self.advance();
    }

    pub(super) fn place(cx: &Context<'_, '_>, space: Space, address: u64) -> Place {
        if space != Space::Shared {
            return Place { space, block: 0, address };
        }
        let at = cx.barrier_at(address);
        Place { space, block: at.block, address: u64::from(at.offset) }
    }

    /// A strong read learns what was published there: at once if it acquires, else at the next fence.
    pub(super) fn after_strong_read(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        order: Order,
        pc: u32,
    ) {
        let Some(scope) = order.strong.filter(|_| cx.options.check_races) else { return };
        if !matches!(space, Space::Global | Space::Shared) {
            return;
        }
        if order.acquires {
            self.acquired |= mask;
        } else {
            self.polled |= mask;
        }
        for_lanes(mask, |lane| {
            let place = Self::place(cx, space, addresses[lane]);
            if let Some(said) = cx.places.said(&place) {
                self.heard.resize_with(32, Default::default);
                self.heard[lane].insert(place, said.clone());
            }
            if order.acquires {
                let mut known = (*self.known[lane]).clone();
                if cx.places.learn(place, cx.block, scope, &mut known) {
                    known.settle();
                    self.learn(lane, pc, Rc::new(known));
                }
                return;
            }
            if !cx.places.is_silent(&place) {
                self.seen.resize_with(32, Seen::default);
                cx.places.see(place, cx.block, scope, &mut self.seen[lane]);
            }
        });
    }

    /// Before a strong access: its time tells which strong reads of others it comes after. If others may poll what it writes, it is later
    /// than all that this warp did as well.
    pub(super) fn before_strong(
        &mut self,
        cx: &mut Context<'_, '_>,
        order: Order,
        reads: bool,
        writes: bool,
    ) {
        if order.strong.is_none() || !cx.options.check_races {
            return;
        }
        if writes && cx.kernel.polls {
            self.advance();
        }
        self.time = cx.places.strong_time(self.time, reads, writes);
    }

    /// Whether a lane has read, without a fence, what was stored after the other access of a conflict.
    pub(super) fn heard_of(&self, cx: &Context<'_, '_>, lane: usize, conflict: &Conflict) -> bool {
        let heard = self.heard.get(lane).into_iter().flat_map(|heard| heard.values());
        heard.into_iter().any(|said| said.covers(cx.numbering, conflict.who, conflict.time))
    }

    /// A strong write publishes what was fenced before it, or everything if it releases.
    pub(super) fn after_strong_write(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        order: Order,
        is_update: bool,
    ) {
        let Some(scope) = order.strong.filter(|_| cx.options.check_races) else { return };
        if !matches!(space, Space::Global | Space::Shared) {
            return;
        }
        for_lanes(mask, |lane| {
            let released = if order.releases {
                let clock = Rc::new(self.published(cx, lane));
                Some(Release { block: cx.block, scope, is_sc: false, clock })
            } else {
                let fenced = self.fenced.get(lane).and_then(Option::as_ref);
                fenced.map(|f| {
                    let (scope, clock) = (f.scope.min(scope), Rc::clone(&f.clock));
                    Release { block: cx.block, scope, is_sc: f.is_sc && scope == Scope::Device, clock }
                })
            };
            let place = Self::place(cx, space, addresses[lane]);
            if cx.kernel.polls {
                let who = cx.numbering.warp(cx.block, self.index) + lane as u32;
                let known = Rc::clone(&self.known[lane]);
                cx.places.say(place, Said { who, time: self.time - 1, known });
            }
            if is_update {
                cx.places.update(place, released);
            } else {
                cx.places.store(place, released);
            }
        });
        if order.releases {
            self.advance();
        }
    }

    /// Orders what the lanes did and know before the async proxy.
    pub(super) fn fence_proxy(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        mask: u32,
        shared: bool,
        global: bool,
    ) {
        if !cx.options.check_races {
            return;
        }
        for_lanes(mask, |lane| {
            let mut clock = self.published(cx, lane);
            for (is_named, proxy) in [(shared, Proxy::Shared), (global, Proxy::Global)] {
                if is_named {
                    clock.fence(proxy);
                }
            }
            self.learn(lane, pc, Rc::new(clock));
        });
        self.advance();
    }

    /// `griddepcontrol.wait`: the launch before is over.
    pub(super) fn await_launch(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32) {
        if !cx.options.check_races {
            return;
        }
        for_lanes(mask, |lane| {
            let mut clock = (*self.known[lane]).clone();
            clock.raise(cx.numbering.launch_before(), 1);
            clock.settle();
            self.learn(lane, pc, Rc::new(clock));
        });
    }
}
