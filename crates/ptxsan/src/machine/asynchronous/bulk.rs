//! Bulk copies: `cp.async.bulk` between global and shared memory, of runs of bytes and of boxes of tensors.

use super::barrier_state::BarrierAt;
use super::flight::{BulkFlight, Course, Move};
use super::tensor_map::{MAP_BYTES, TensorMap};
use crate::decode::memory_apply;
use crate::decode::{Bulk, Combine, Extent, Register, TensorCombine};
use crate::finding::Kind;
use crate::hazard::clock::Proxy;
use crate::hazard::log::Other;
use crate::machine::access::{Agent, Request};
use crate::machine::run::{Context, for_lanes};
use crate::machine::warp::Warp;
use crate::memory::window;
use crate::parse::ast::Space;
use crate::tensor::wgmma::Swizzle;
use std::rc::Rc;

/// What a copy moves: its pieces, their bytes, what is read outside a tensor, and the tensor.
type Content = (Vec<Move>, u32, [u8; 4], Option<TensorMap>);

/// A run of bytes in pieces of 16.
fn run_of_bytes(shared: u32, global: u64, bytes: u32) -> Vec<Move> {
    (0..bytes / 16)
        .map(|i| Move { shared: shared + 16 * i, from: 0, to: 16, global: global + 16 * u64::from(i) })
        .collect()
}

/// A box of a tensor in pieces of 16 bytes, each where swizzling puts it.
fn box_of_tensor(map: &TensorMap, coordinates: &[i32], shared: u32) -> Vec<Move> {
    let mut moves = Vec::new();
    for row in map.rows(coordinates) {
        for piece in (0..map.row_bytes()).step_by(16) {
            let place = map.swizzle.apply((shared + row.offset + piece) as usize) as u32;
            let from = row.from.clamp(piece, piece + 16);
            let to = row.to.clamp(from, piece + 16);
            let global = row.global.wrapping_add(u64::from(from - row.from.min(from)));
            moves.push(Move { shared: place, from: (from - piece) as u8, to: (to - piece) as u8, global });
        }
    }
    moves
}

/// Aligned powers of two that make up a run of bytes.
fn aligned_parts(mut at: u64, mut bytes: u32) -> impl Iterator<Item = (u64, u32)> {
    std::iter::from_fn(move || {
        if bytes == 0 {
            return None;
        }
        let mut part = 16u32;
        while part > bytes || !at.is_multiple_of(u64::from(part)) {
            part /= 2;
        }
        let found = (at, part);
        at = at.wrapping_add(u64::from(part));
        bytes -= part;
        Some(found)
    })
}

impl Warp {
    pub(in crate::machine) fn bulk(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, op: &Bulk) {
        self.copies_issued += u64::from(mask.count_ones());
        match op {
            Bulk::Prefetch => {}
            Bulk::Load { to, from, barrier, multicast } => {
                let (to, barriers) = (self.shared_addresses(to), self.shared_addresses(barrier));
                for_lanes(mask, |lane| {
                    let targets = multicast.map(|m| self.lane(m, lane) as u32 & 0xffff);
                    self.bulk_load(cx, pc, lane, to[lane] as u32, from, barriers[lane], targets);
                });
            }
            Bulk::Store { to, from, combine } => {
                let from = self.shared_addresses(from);
                for_lanes(mask, |lane| {
                    self.bulk_store(cx, pc, lane, to, from[lane] as u32, combine.as_ref())
                });
            }
            Bulk::Send { to, from, bytes, barrier, combine } => {
                let [to, from, barriers] = [to, from, barrier].map(|a| self.shared_addresses(a));
                for_lanes(mask, |lane| {
                    self.bulk_send(
                        cx,
                        pc,
                        lane,
                        to[lane],
                        from[lane],
                        *bytes,
                        barriers[lane],
                        combine.is_some(),
                    );
                });
            }
        }
    }

    fn wrong_copy(&self, cx: &mut Context<'_, '_>, pc: u32, lane: usize, detail: impl FnOnce() -> String) {
        cx.report(Kind::BulkCopy, pc, self.index, 1 << lane, detail);
    }

    /// What has no room in shared memory is not even cut into pieces.
    fn fits(&self, cx: &mut Context<'_, '_>, pc: u32, lane: usize, offset: u32, bytes: u64) -> Option<()> {
        let room = cx.shared.data.len() as u64;
        if u64::from(offset) + bytes <= room {
            return Some(());
        }
        cx.report(Kind::OutOfBounds, pc, self.index, 1 << lane, || {
            format!("{bytes} bytes at shared {offset:#x}; the block has {room} bytes of shared memory")
        });
        None
    }

    /// The pieces of a copy, its bytes, and what stands outside; `None` when it makes no sense.
    fn moves(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lane: usize,
        shared: u32,
        extent: &Extent,
    ) -> Option<Content> {
        let offset = window::offset(shared);
        match extent {
            Extent::Linear { address, bytes } => {
                let (addresses, mut spaces) = self.located(address, 1 << lane);
                let space = spaces.next().map(|(space, _)| space);
                let (global, bytes) = (addresses[lane], self.lane(*bytes, lane) as u32);
                if space != Some(Space::Global)
                    || !global.is_multiple_of(16)
                    || !offset.is_multiple_of(16)
                    || !bytes.is_multiple_of(16)
                {
                    self.wrong_copy(cx, pc, lane, || {
                        format!("{bytes} bytes between shared {offset:#x} and {global:#x}: addresses and size must be multiples of 16, one of them in global memory")
                    });
                    return None;
                }
                self.fits(cx, pc, lane, offset, u64::from(bytes))?;
                Some((run_of_bytes(offset, global, bytes), bytes, [0; 4], None))
            }
            Extent::Tensor { map, coordinates } => {
                let map = self.tensor_map(cx, pc, lane, map)?;
                let places: Vec<i32> =
                    coordinates.iter().map(|c| self.lane(*c, lane) as u32 as i32).collect();
                if places.len() != map.sizes.len() {
                    let (given, has) = (places.len(), map.sizes.len());
                    self.wrong_copy(cx, pc, lane, || {
                        format!("{given} coordinates for a tensor map of {has} dimensions")
                    });
                    return None;
                }
                let align = if map.swizzle == Swizzle::None { 16 } else { 128 };
                if !offset.is_multiple_of(align) {
                    self.wrong_copy(cx, pc, lane, || {
                        format!("a box at shared {offset:#x}, which must be a multiple of {align}")
                    });
                    return None;
                }
                self.fits(cx, pc, lane, offset, map.reach_bytes())?;
                let start = i64::from(places[0]) * i64::from(map.element.bytes());
                if start % 16 != 0 {
                    self.wrong_copy(cx, pc, lane, || {
                        format!("a box that starts {start} bytes into its rows: the machine wants a multiple of 16")
                    });
                    return None;
                }
                let bytes = map.box_bytes() as u32;
                Some((box_of_tensor(&map, &places, offset), bytes, map.outside(), Some(map)))
            }
        }
    }

    fn tensor_map(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lane: usize,
        address: &crate::decode::Address,
    ) -> Option<TensorMap> {
        let (addresses, mut spaces) = self.located(address, 1 << lane);
        let (space, at) = (spaces.next()?.0, addresses[lane]);
        let is_there = match space {
            Space::Param => at + u64::from(MAP_BYTES) <= cx.params.len() as u64,
            Space::Global => {
                let request = Request::read(pc, 16);
                (0..8u64).all(|part| {
                    let mut places = [0; 32];
                    places[lane] = at + 16 * part;
                    self.check(cx, Space::Global, &places, 1 << lane, &request) != 0
                })
            }
            _ => false,
        };
        let map = match is_there && at.is_multiple_of(64) {
            true => TensorMap::decode(self.bytes(cx, space, at, MAP_BYTES, lane)),
            false => None,
        };
        if map.is_none() {
            self.wrong_copy(cx, pc, lane, || format!("no tensor map lies at {at:#x}: it must come from TensorMap::encode, 64-byte aligned, in parameters or global memory"));
        }
        map
    }

    /// Holds one side of a copy against everybody's accesses; `false` if it cannot be made.
    fn claim(
        &mut self,
        cx: &mut Context<'_, '_>,
        lane: usize,
        space: Space,
        parts: impl Iterator<Item = (u64, u32)>,
        request: Request,
    ) -> bool {
        let mut good = true;
        self.check_each(cx, space, lane, parts, &request, |cx, at, bytes, is_good| {
            good &= is_good;
            if space == Space::Shared && good {
                // What a copy in flight will write counts as written: reading it too early is a race, not more.
                if let Some((memory, at)) = cx.shared_at(at) {
                    memory.written[at..at + bytes as usize].fill(1);
                }
            }
        });
        good
    }

    fn global_parts(moves: &[Move]) -> impl Iterator<Item = (u64, u32)> + '_ {
        moves.iter().flat_map(|m| aligned_parts(m.global, u32::from(m.to - m.from)))
    }

    fn bulk_load(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lane: usize,
        to: u32,
        from: &Extent,
        barrier: u64,
        targets: Option<u32>,
    ) {
        let Some((moves, bytes, outside, _)) = self.moves(cx, pc, lane, to, from) else { return };
        let moves: Rc<[Move]> = moves.into();
        let own = window::rank(to).unwrap_or(cx.block - cx.cluster_first);
        let mut is_first = true;
        for rank in (0..16).filter(|r| targets.unwrap_or(1 << own) >> r & 1 == 1) {
            let block = cx.cluster_first + rank;
            let at = match targets {
                Some(_) => BarrierAt { block, offset: cx.barrier_at(barrier).offset },
                None => cx.barrier_at(barrier),
            };
            if at.block != block {
                self.wrong_copy(cx, pc, lane, || {
                    "the mbarrier must lie in the block that receives the data".into()
                });
                continue;
            }
            if !self.usable(cx, pc, lane, at) {
                continue;
            }
            self.require_shown(cx, pc, lane, at);
            let Some(agent) = self.mbarrier_agent(cx, lane, at) else { continue };
            let read = Request::read(pc, 0).by(Agent { proxy: Some(Proxy::Global), ..agent });
            if is_first && !self.claim(cx, lane, Space::Global, Self::global_parts(&moves), read) {
                return;
            }
            is_first = false;
            let write = Request::write(pc, 0).by(Agent { proxy: Some(Proxy::Shared), ..agent });
            let place = |m: &Move| {
                let remote = if block == cx.block { m.shared } else { window::in_cluster(m.shared, rank) };
                (u64::from(remote), 16)
            };
            let places: Vec<(u64, u32)> = moves.iter().map(place).collect();
            if !self.claim(cx, lane, Space::Shared, places.into_iter(), write) {
                continue;
            }
            let phase = cx.mbarrier(at).map_or(0, |b| b.phase);
            let course = Course::ToShared { block, barrier: at, bytes, phase, outside };
            self.take_off(cx, pc, lane, Rc::clone(&moves), course);
        }
    }

    /// Who copies that report to a barrier are.
    pub(super) fn mbarrier_agent(
        &mut self,
        cx: &mut Context<'_, '_>,
        lane: usize,
        at: BarrierAt,
    ) -> Option<Agent> {
        let (numbering, thread) = (cx.numbering, self.thread(lane));
        let barriers = match at.block == cx.block {
            true => &mut *cx.mbarriers,
            false => &mut cx.peers.get_mut(&at.block)?.mbarriers,
        };
        let (slot, time) = barriers.agent(at.offset, numbering, thread)?;
        Some(Agent { identity: numbering.identity(at.block, slot), time, proxy: None })
    }

    fn bulk_store(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lane: usize,
        to: &Extent,
        from: u32,
        combine: Option<&TensorCombine>,
    ) {
        let Some((moves, _, _, map)) = self.moves(cx, pc, lane, from, to) else { return };
        if let Extent::Tensor { coordinates, .. } = to
            && let Some(start) =
                coordinates.iter().map(|c| self.lane(*c, lane) as u32 as i32).find(|c| *c < 0)
        {
            self.wrong_copy(cx, pc, lane, || {
                format!("a store to a box that starts at {start}: only loads may start outside")
            });
            return;
        }
        let moves: Rc<[Move]> = moves.into();
        let combine = match (combine, map) {
            (None, _) => None,
            (Some(TensorCombine::Typed(typed)), _) => Some(Rc::new(typed.clone())),
            (Some(TensorCombine::ByMap(operation)), Some(map)) => {
                let kind = map.element.kind();
                let Some(apply) = memory_apply(operation, kind) else {
                    self.wrong_copy(cx, pc, lane, || {
                        format!("no `{operation}` on elements of this tensor's type")
                    });
                    return;
                };
                Some(Rc::new(Combine {
                    bytes: kind.bytes(),
                    apply: std::sync::Arc::new(move |old, a| apply(old, a, 0)),
                }))
            }
            (Some(TensorCombine::ByMap(_)), None) => None,
        };
        let (group, thread) = (self.bulk_open[lane], self.thread(lane));
        let numbering = cx.numbering;
        let agent = |slot: u32, proxy: Proxy| Agent {
            identity: numbering.identity(cx.block, slot),
            time: group,
            proxy: Some(proxy),
        };
        let read = Request::read(pc, 0).by(agent(numbering.bulk_reads(thread), Proxy::Shared));
        let mut write = Request::write(pc, 0).by(agent(numbering.bulk_writes(thread), Proxy::Global));
        if combine.is_some() {
            // Reductions of one element do not race with each other.
            write.order.strong = Some(crate::decode::Scope::Device);
        }
        let sources: Vec<(u64, u32)> =
            moves.iter().filter(|m| m.from < m.to).map(|m| (u64::from(m.shared), 16)).collect();
        if self.claim(cx, lane, Space::Shared, sources.into_iter(), read)
            && self.claim(cx, lane, Space::Global, Self::global_parts(&moves), write)
        {
            (self.bulk_issued[lane], self.bulk_pc[lane]) = (group, pc);
            self.take_off(cx, pc, lane, moves, Course::ToGlobal { group, data: None, combine });
        }
    }

    fn bulk_send(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lane: usize,
        to: u64,
        from: u64,
        bytes: Register,
        barrier: u64,
        combines: bool,
    ) {
        let (target, at) = (cx.barrier_at(to), cx.barrier_at(barrier));
        let bytes = self.lane(bytes, lane) as u32;
        if combines
            || target.block != at.block
            || target.block == cx.block
            || !to.is_multiple_of(16)
            || !from.is_multiple_of(16)
            || !bytes.is_multiple_of(16)
        {
            self.wrong_copy(cx, pc, lane, || {
                format!("{bytes} bytes from shared {from:#x} to {to:#x}: it must be another block's memory, the mbarrier with it, multiples of 16 bytes, without reduction")
            });
            return;
        }
        if self.fits(cx, pc, lane, window::offset(from as u32), u64::from(bytes)).is_none()
            || !self.usable(cx, pc, lane, at)
        {
            return;
        }
        let Some(agent) = self.mbarrier_agent(cx, lane, at) else { return };
        let agent = Agent { proxy: Some(Proxy::Shared), ..agent };
        let parts = |start: u64| (0..bytes / 16).map(move |i| (start + 16 * u64::from(i), 16));
        if self.claim(cx, lane, Space::Shared, parts(from), Request::read(pc, 0).by(agent))
            && self.claim(cx, lane, Space::Shared, parts(to), Request::write(pc, 0).by(agent))
        {
            let phase = cx.mbarrier(at).map_or(0, |b| b.phase);
            let course =
                Course::Across { to: target, from: window::offset(from as u32), barrier: at, bytes, phase };
            self.take_off(cx, pc, lane, Rc::new([]), course);
        }
    }

    pub(super) fn take_off(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lane: usize,
        moves: Rc<[Move]>,
        course: Course,
    ) {
        let flight = BulkFlight { block: cx.block, thread: self.thread(lane), pc, moves, course };
        if cx.options.schedule.lands_early(cx.random) {
            cx.land_bulk(flight);
        } else {
            cx.flights.push(flight);
        }
    }

    pub(in crate::machine) fn commit_bulk(&mut self, mask: u32) {
        for_lanes(mask, |lane| self.bulk_open[lane] += 1);
    }

    /// Waits for a thread's own groups: their reads, or all of them.
    pub(in crate::machine) fn wait_bulk(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        mask: u32,
        pending: u32,
        reads_only: bool,
    ) {
        for_lanes(mask, |lane| {
            let (done, thread) = ((self.bulk_open[lane] - 1).saturating_sub(pending), self.thread(lane));
            cx.finish_groups(thread, done, reads_only);
            self.bulk_read[lane] = self.bulk_read[lane].max(done);
            let (reads, writes) = (cx.numbering.bulk_reads(thread), cx.numbering.bulk_writes(thread));
            let knows = self.known[lane].time_of(if reads_only { reads } else { writes }) >= done;
            if cx.options.check_races && !knows {
                let mut clock = (*self.known[lane]).clone();
                clock.raise(reads, done);
                if !reads_only {
                    clock.raise(writes, done);
                }
                clock.settle();
                self.learn(lane, pc, Rc::new(clock));
            }
        });
    }

    /// Threads end: their stores must have read shared memory.
    pub(in crate::machine) fn leave_bulk(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32) {
        let unread = (0..32usize).filter(|l| mask >> l & 1 == 1 && self.bulk_issued[*l] > self.bulk_read[*l]);
        let unread = unread.fold(0u32, |all, lane| all | 1 << lane);
        if unread != 0 {
            let lane = unread.trailing_zeros() & 31;
            let thread = self.index * 32 + lane;
            let store = Other { pc: self.bulk_pc[lane as usize], block: u64::from(cx.block), thread };
            cx.log.add(Kind::AsyncRace, pc, Some(store), (cx.block, thread), || {
                "a thread ends while its bulk stores may still read shared memory: cp.async.bulk.wait_group.read must come first".to_owned()
            });
        }
    }
}
