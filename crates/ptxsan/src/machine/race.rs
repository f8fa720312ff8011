//! Ordering: every access of shared and global memory against everybody's earlier ones, and what is said of a race.

use super::access::{By, Direction, Request, space_name};
use super::run::{Context, for_lanes};
use super::warp::Warp;
use crate::hazard::clock::Who;
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
        let is_shared_read = request.direction == Direction::Read && matches!(request.by, By::Lanes);
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
                match request.by {
                    By::Lanes => {}
                    By::Copies => by.time = self.open_group[lane],
                    // One lane stands for the agent, whose identity has no lanes.
                    By::Agent(_) => by.mask = 1,
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
            base: match request.by {
                By::Lanes => lanes_base,
                By::Copies => agents_base,
                By::Agent(agent) => agent.identity,
            },
            mask: 0,
            time: if let By::Agent(agent) = request.by { agent.time } else { self.time },
            pc: request.marked_pc(),
            known,
            alone: None,
            lanes_base,
            agents_base,
            proxy: if let By::Agent(agent) = request.by { agent.proxy } else { None },
            fences_reads: cx.options.strict_proxies,
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
            if self.sync_trace.is_some() {
                self.credit(cx, space, at, step, is_write, by);
            }
            let found = match space {
                Space::Shared => match cx.shared_at(at) {
                    Some((memory, at)) => memory.shadow.access(at, step, is_write, by),
                    None => None,
                },
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
        let other = match numbering.who(conflict.who) {
            Who::Mbarrier(slot) => {
                let block = numbering.block_of(conflict.who);
                let peer = cx.peers.get(&block).map(|peer| &peer.mbarriers);
                let barriers = if block == cx.block { Some(&*cx.mbarriers) } else { peer };
                Other { thread: barriers.map_or(0, |all| all.issuer(slot)), ..other }
            }
            _ => other,
        };
        let is_by_agent = !matches!(request.by, By::Lanes);
        let with_agent = is_by_agent || numbering.is_agent(conflict.who);
        let kind = match () {
            () if conflict.only_proxy => Kind::ProxyRace,
            () if with_agent => Kind::AsyncRace,
            () => Kind::Race,
        };
        let thread = self.index * 32 + lanes.trailing_zeros();
        let verb = |write: bool| if write { "write" } else { "read" };
        let mine = verb(request.direction == Direction::Write);
        let theirs = verb(conflict.is_write);
        let advice = self.advice(cx, request, &conflict, &other, thread);
        let mine_by = match request.by {
            By::Lanes => "",
            By::Copies => "asynchronous ",
            By::Agent(agent) => agent_name(numbering.who(agent.identity)),
        };
        let their_by = agent_name(numbering.who(conflict.who));
        let (space_name, bytes) = (space_name(space), request.bytes);
        let base = cx.view.base();
        let detail = || {
            let place = if space == Space::Global { base.locate(address) } else { String::new() };
            let relation = if conflict.only_proxy { "a" } else { "an unordered" };
            format!(
                "{mine_by}{mine} of {bytes} bytes at {space_name} {address:#x}{place} after {relation} {their_by}{theirs}; {advice}"
            )
        };
        cx.log.add(kind, request.pc, Some(other), (cx.block, thread), detail);
    }

    /// What is missing.
    fn advice(
        &self,
        cx: &Context<'_, '_>,
        request: &Request,
        conflict: &Conflict,
        other: &Other,
        thread: u32,
    ) -> &'static str {
        let is_near = other.block == u64::from(cx.block);
        if conflict.same_instruction && matches!(request.by, By::Lanes) {
            return "two lanes write different values in one instruction: which one stays is undefined";
        }
        if conflict.only_proxy {
            return "ordered, but not across proxies: fence.proxy.async must come between, mostly by who wrote, before the barrier";
        }
        match cx.numbering.who(conflict.who) {
            Who::Copies if is_near && other.thread == thread => {
                "the copy is still in flight: cp.async.wait_group must come first"
            }
            Who::Copies => {
                "the copy is not published: its thread must cp.async.wait_group, and a barrier must follow"
            }
            Who::Mbarrier(_) => {
                "the copy is in flight: its mbarrier must be waited for, in the phase it reports to"
            }
            Who::BulkReads => {
                "the bulk store may not have read its source: its thread must cp.async.bulk.wait_group.read, and a barrier must follow"
            }
            Who::BulkWrites => {
                "the bulk store may not have written: its thread must cp.async.bulk.wait_group, and a barrier must follow"
            }
            Who::Wgmma => {
                "the products may not have read it: wgmma.wait_group must come first, and a barrier must follow"
            }
            Who::Lane if !is_near => {
                "nothing orders the two blocks: a fence (__threadfence) on both sides of a flag or atomic is missing"
            }
            Who::Lane if !matches!(request.by, By::Lanes) => {
                "nothing orders it before the asynchronous access: a barrier before its issue is missing"
            }
            Who::Lane if other.thread / 32 == thread / 32 => {
                "nothing orders the two lanes: __syncwarp() or a barrier between the accesses is missing"
            }
            Who::Lane => {
                "nothing orders the two warps: __syncthreads() or a named barrier between the accesses is missing"
            }
        }
    }
}

/// What stands before "read" or "write" of an agent.
fn agent_name(who: Who) -> &'static str {
    match who {
        Who::Lane => "",
        Who::Copies => "asynchronous ",
        Who::BulkReads | Who::BulkWrites => "bulk store's ",
        Who::Wgmma => "wgmma's ",
        Who::Mbarrier(_) => "bulk copy's ",
    }
}
