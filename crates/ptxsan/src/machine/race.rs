//! Ordering: every access of shared and global memory against everybody's earlier ones, and what is said of a race.

use super::access::{Direction, Request, space_name};
use super::run::{Context, for_lanes};
use super::warp::Warp;
use crate::hazard::log::{Kind, Other};
use crate::hazard::shadow::{Accessor, Conflict};
use crate::memory::PAGE_BYTES;
use crate::parse::ast::Space;
use std::rc::Rc;

/// One access is recorded in parts of at most this many bytes.
const PART_BYTES: u32 = 16;

impl Warp {
    /// Orders the access of each lane; `then` gets each lane, or the first of several that read the same, with what it
    /// conflicts with.
    pub(super) fn order_each(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        lanes: u32,
        request: &Request,
        mut then: impl FnMut(&mut Self, &mut Context<'_, '_>, usize, Option<Conflict>),
    ) {
        if !cx.options.check_races || !matches!(space, Space::Shared | Space::Global) {
            for_lanes(lanes, |lane| then(self, cx, lane, None));
            return;
        }
        let is_shared_read = request.direction == Direction::Read && !request.agent_groups;
        let mut rest = lanes;
        while rest != 0 {
            // Lanes that know the same share one description of the accessor.
            let first = rest.trailing_zeros() as usize;
            let known = Rc::clone(&self.known[first]);
            let mut by = self.accessor(cx, request, &known);
            while rest != 0 {
                let lane = rest.trailing_zeros() as usize;
                if !Rc::ptr_eq(&self.known[lane], &known) {
                    break;
                }
                rest &= rest - 1;
                by.mask = 1 << lane;
                by.alone = Some((lane as u32, self.waited_group[lane]));
                if is_shared_read {
                    // Neighbours that read the same place are taken together.
                    while rest != 0 && rest.trailing_zeros() == 32 - by.mask.leading_zeros() {
                        let next = rest.trailing_zeros() as usize;
                        if addresses[next] != addresses[lane] || !Rc::ptr_eq(&self.known[next], &known) {
                            break;
                        }
                        rest &= rest - 1;
                        by.mask |= 1 << next;
                        by.alone = None;
                    }
                }
                if request.agent_groups {
                    by.time = self.open_group[lane];
                }
                let conflict = self.record(cx, space, addresses[lane], request, &by);
                then(self, cx, lane, conflict);
            }
        }
    }

    /// Orders reads of places in shared memory by several lanes each: as one if they know the same, else one by one.
    pub(super) fn order_together(
        &mut self,
        cx: &mut Context<'_, '_>,
        places: impl Iterator<Item = (u64, u32)> + Clone,
        request: &Request,
    ) {
        let mut rest = places.clone().fold(0, |all, (_, lanes)| all | lanes);
        while rest != 0 && cx.options.check_races {
            let first = rest.trailing_zeros() as usize;
            let known = Rc::clone(&self.known[first]);
            let mut alike = 0;
            for_lanes(rest, |lane| alike |= u32::from(Rc::ptr_eq(&self.known[lane], &known)) << lane);
            rest &= !alike;
            let mut by = self.accessor(cx, request, &known);
            for (address, lanes) in places.clone().filter(|(_, lanes)| lanes & alike != 0) {
                by.mask = lanes & alike;
                let one = by.mask.trailing_zeros();
                by.alone = by.mask.is_power_of_two().then(|| (one, self.waited_group[one as usize]));
                if let Some(conflict) = self.record(cx, Space::Shared, address, request, &by) {
                    self.report_race(cx, Space::Shared, address, by.mask, request, conflict);
                }
            }
        }
    }

    fn accessor<'k>(
        &self,
        cx: &Context<'_, '_>,
        request: &Request,
        known: &'k crate::hazard::clock::Clock,
    ) -> Accessor<'k> {
        let lanes_base = cx.numbering.warp(cx.block, self.index);
        let agents_base = cx.numbering.agents(cx.block, self.index);
        Accessor {
            numbering: cx.numbering,
            base: if request.agent_groups { agents_base } else { lanes_base },
            mask: 0,
            time: self.time,
            pc: request.marked_pc(),
            known,
            alone: None,
            lanes_base,
            agents_base,
        }
    }

    /// Checks one place against everybody's earlier accesses and records this one.
    #[inline]
    fn record(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        request: &Request,
        by: &Accessor<'_>,
    ) -> Option<Conflict> {
        let is_write = request.direction == Direction::Write;
        let step = request.bytes.min(PART_BYTES);
        let mut conflict = None;
        for part in (0..request.bytes).step_by(step as usize) {
            let at = address + u64::from(part);
            if self.memoir.is_some() {
                self.credit(cx, space, at, step, is_write, by);
            }
            let found = match space {
                Space::Shared => cx.shared.shadow.access(at as usize, step, is_write, by),
                _ => match cx.view.page(at) {
                    Some(page) => {
                        cx.view.at(page).shadow.access(at as usize % PAGE_BYTES, step, is_write, by)
                    }
                    None => None,
                },
            };
            conflict = conflict.or(found);
        }
        conflict
    }

    pub(super) fn report_race(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        lanes: u32,
        request: &Request,
        conflict: Conflict,
    ) {
        let numbering = cx.numbering;
        let other = Other {
            pc: conflict.pc,
            block: u64::from(numbering.block_of(conflict.who)),
            thread: numbering.thread_of(conflict.who),
        };
        let with_agent = request.agent_groups || numbering.is_agent(conflict.who);
        let kind = if with_agent { Kind::AsyncRace } else { Kind::Race };
        let thread = self.index * 32 + lanes.trailing_zeros();
        let verb = |write: bool| if write { "write" } else { "read" };
        let mine = verb(request.direction == Direction::Write);
        let theirs = verb(conflict.is_write);
        let advice = if conflict.same_instruction {
            "two lanes write different values in one instruction: which one stays is undefined"
        } else if numbering.is_agent(conflict.who)
            && other.block == u64::from(cx.block)
            && other.thread == thread
        {
            "the copy is still in flight: cp.async.wait_group must come first"
        } else if numbering.is_agent(conflict.who) {
            "the copy is not published: its thread must cp.async.wait_group, and a barrier must follow"
        } else if other.block != u64::from(cx.block) {
            "nothing orders the two blocks: a fence (__threadfence) on both sides of a flag or atomic is missing"
        } else if other.thread / 32 == thread / 32 {
            "nothing orders the two lanes: __syncwarp() or a barrier between the accesses is missing"
        } else {
            "nothing orders the two warps: __syncthreads() or a named barrier between the accesses is missing"
        };
        let agent = |yes: bool| if yes { "asynchronous " } else { "" };
        let (a, b) = (agent(request.agent_groups), agent(numbering.is_agent(conflict.who)));
        let (space_name, bytes) = (space_name(space), request.bytes);
        let base = cx.view.base();
        let detail = || {
            let place = if space == Space::Global { base.locate(address) } else { String::new() };
            format!(
                "{a}{mine} of {bytes} bytes at {space_name} {address:#x}{place} after an unordered {b}{theirs}; {advice}"
            )
        };
        cx.log.add(kind, request.pc, Some(other), (cx.block, thread), detail);
    }
}
