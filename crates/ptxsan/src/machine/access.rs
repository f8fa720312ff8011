//! Loads, stores and atomics: bounds, alignment, initialised bytes, ordering, then the data.

use super::run::{Context, for_lanes};
use super::warp::Warp;
use crate::decode::{Address, Atomic, Bank, Base, Order, Register, Scope, Transfer};
use crate::hazard::log::{Kind, Other};
use crate::hazard::shadow::{Accessor, BLOCK_SCOPE, Conflict, STRONG};
use crate::memory::{PAGE_BYTES, window};
use crate::parse::ast::Space;
use std::rc::Rc;

/// The largest single access of a lane.
pub(super) const MAX_BYTES: usize = 64;

/// A lane's bytes of one access.
pub(super) type Bytes = [u8; MAX_BYTES];

/// Which way the data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// One access of some lanes of a warp, in one space.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) pc: u32,
    pub(super) bytes: u32,
    pub(super) direction: Direction,
    pub(super) order: Order,
    /// By the lane's asynchronous agent, as part of this group of copies.
    pub(super) agent_groups: bool,
}

impl Request {
    fn marked_pc(&self) -> u32 {
        match self.order.strong {
            Some(Scope::Cta) => self.pc | STRONG | BLOCK_SCOPE,
            Some(Scope::Device) => self.pc | STRONG,
            None => self.pc,
        }
    }
}

impl Warp {
    pub(super) fn addresses(&self, address: &Address) -> [u64; 32] {
        let offset = address.offset as u64;
        match address.base {
            Base::Absolute => [offset; 32],
            Base::R64(r) => self.regs.b64[r as usize].map(|x| x.wrapping_add(offset)),
            // Shared addresses are 32 bits wide and wrap there.
            Base::R32(r) => self.regs.b32[r as usize].map(|x| u64::from(x.wrapping_add(offset as u32))),
        }
    }

    /// Splits lanes by the space their addresses lie in.
    pub(super) fn by_space(
        &self,
        address: &Address,
        mask: u32,
        mut each: impl FnMut(Space, &[u64; 32], u32),
    ) {
        let mut addresses = self.addresses(address);
        if address.space != Space::Generic {
            let space = if address.space == Space::Const { Space::Global } else { address.space };
            return each(space, &addresses, mask);
        }
        let mut spaces = [Space::Global; 32];
        for lane in 0..32 {
            (spaces[lane], addresses[lane]) = window::split(addresses[lane]);
        }
        for space in [Space::Global, Space::Shared, Space::Local, Space::Param] {
            let lanes = (0..32).filter(|l| spaces[*l] == space).fold(0u32, |m, l| m | 1 << l) & mask;
            if lanes != 0 {
                each(space, &addresses, lanes);
            }
        }
    }

    pub(super) fn load(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, t: &Transfer) {
        let bytes = t.bytes * t.registers.len() as u32;
        let request = Request { pc, bytes, direction: Direction::Read, order: t.order, agent_groups: false };
        let mut parts: [(Space, [u64; 32], u32); 4] = [(Space::Global, [0; 32], 0); 4];
        let mut count = 0;
        self.by_space(&t.address, mask, |space, addresses, lanes| {
            parts[count] = (space, *addresses, lanes);
            count += 1;
        });
        for (space, addresses, lanes) in &parts[..count] {
            let good = self.check(cx, *space, addresses, *lanes, &request);
            self.read_registers(cx, *space, addresses, good, *lanes, t);
            if t.order.strong.is_some() {
                self.after_strong_read(cx, *space, addresses, good, t.order);
            }
        }
    }

    fn read_registers(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        good: u32,
        mask: u32,
        t: &Transfer,
    ) {
        let width = t.bytes as usize;
        let total = (width * t.registers.len()) as u32;
        for lane in 0..32 {
            if mask >> lane & 1 == 0 {
                continue;
            }
            let mut data: Bytes = [0; MAX_BYTES];
            if good >> lane & 1 == 1 {
                self.fetch(cx, space, addresses[lane], total, lane, &mut data);
            }
            for (i, register) in t.registers.iter().enumerate() {
                let value = little_endian(&data[i * width..(i + 1) * width]);
                let value = if t.is_signed { sign_extend(value, t.bytes) } else { value };
                self.set_lane(*register, lane, value);
            }
        }
    }

    pub(super) fn set_lane(&mut self, register: Register, lane: usize, value: u64) {
        match register.bank {
            Bank::B64 => self.regs.b64[register.index as usize][lane] = value,
            Bank::B32 => {
                let mask = if register.bits >= 32 { u32::MAX } else { (1 << register.bits) - 1 };
                self.regs.b32[register.index as usize][lane] = value as u32 & mask;
            }
            Bank::Pred => {
                let bit = 1 << lane;
                let p = &mut self.regs.pred[register.index as usize];
                *p = if value != 0 { *p | bit } else { *p & !bit };
            }
        }
    }

    pub(super) fn lane(&self, register: Register, lane: usize) -> u64 {
        match register.bank {
            Bank::B64 => self.regs.b64[register.index as usize][lane],
            Bank::B32 => u64::from(self.regs.b32[register.index as usize][lane]),
            Bank::Pred => u64::from(self.regs.pred[register.index as usize] >> lane & 1),
        }
    }

    pub(super) fn store(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, t: &Transfer) {
        let bytes = t.bytes * t.registers.len() as u32;
        let request = Request { pc, bytes, direction: Direction::Write, order: t.order, agent_groups: false };
        let width = t.bytes as usize;
        let mut values = [[0u8; MAX_BYTES]; 32];
        for_lanes(mask, |lane| {
            for (i, register) in t.registers.iter().enumerate() {
                let value = self.lane(*register, lane).to_le_bytes();
                values[lane][i * width..(i + 1) * width].copy_from_slice(&value[..width]);
            }
        });
        self.store_bytes(cx, &t.address, mask, &request, &values);
    }

    /// Stores each lane's bytes, with all checks.
    pub(super) fn store_bytes(
        &mut self,
        cx: &mut Context<'_, '_>,
        address: &Address,
        mask: u32,
        request: &Request,
        values: &[Bytes; 32],
    ) {
        let mut parts: [(Space, [u64; 32], u32); 4] = [(Space::Global, [0; 32], 0); 4];
        let mut count = 0;
        self.by_space(address, mask, |space, addresses, lanes| {
            parts[count] = (space, *addresses, lanes);
            count += 1;
        });
        for (space, addresses, lanes) in &parts[..count] {
            let good = self.check_bounds(cx, *space, addresses, *lanes, request);
            self.count_traffic(cx, *space, addresses, good, request);
            for_lanes(good, |lane| {
                let data = &values[lane][..request.bytes as usize];
                if let Some(conflict) = self.order(cx, *space, addresses[lane], 1 << lane, request) {
                    // Lanes that store the same value to one place in one instruction agree, whoever is last.
                    if !(conflict.same_instruction && self.holds(cx, *space, addresses[lane], data)) {
                        self.report_race(cx, *space, addresses[lane], 1 << lane, request, conflict);
                    }
                }
                self.put(cx, *space, addresses[lane], data, lane);
            });
            if request.order.strong.is_some() {
                self.after_strong_write(cx, *space, addresses, good, request.order, false);
            }
        }
    }

    /// Bounds, alignment, initialised bytes, ordering and traffic of a read; returns the lanes that may read.
    pub(super) fn check(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) -> u32 {
        let good = self.check_bounds(cx, space, addresses, mask, request);
        self.count_traffic(cx, space, addresses, good, request);
        if !cx.options.check_races || !matches!(space, Space::Shared | Space::Global) {
            return good;
        }
        // Lanes that read the same place and know the same are taken together.
        let mut rest = good;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            let mut group = 1u32 << lane;
            let mut next = lane + 1;
            while next < 32
                && rest >> next & 1 == 1
                && addresses[next] == addresses[lane]
                && Rc::ptr_eq(&self.known[next], &self.known[lane])
            {
                group |= 1 << next;
                next += 1;
            }
            rest &= !group;
            self.order_and_report(cx, space, addresses[lane], group, request);
        }
        good
    }

    /// As [`Warp::check`] without ordering: for instructions whose data goes to other lanes than name it.
    pub(super) fn check_quietly(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) -> u32 {
        let good = self.check_bounds(cx, space, addresses, mask, request);
        self.count_traffic(cx, space, addresses, good, request);
        good
    }

    /// As [`Warp::check_quietly`], and every lane's write is ordered.
    pub(super) fn check_write(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) -> u32 {
        let good = self.check_quietly(cx, space, addresses, mask, request);
        for_lanes(good, |lane| self.order_and_report(cx, space, addresses[lane], 1 << lane, request));
        good
    }

    pub(super) fn order_and_report(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        lanes: u32,
        request: &Request,
    ) {
        if let Some(conflict) = self.order(cx, space, address, lanes, request) {
            self.report_race(cx, space, address, lanes, request, conflict);
        }
    }

    /// Checks one place against everybody's earlier accesses and records this one.
    pub(super) fn order(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        lanes: u32,
        request: &Request,
    ) -> Option<Conflict> {
        if !cx.options.check_races || !matches!(space, Space::Shared | Space::Global) {
            return None;
        }
        let lane = lanes.trailing_zeros();
        let lanes_base = cx.numbering.warp(cx.block, self.index);
        let agents_base = cx.numbering.agents(cx.block, self.index);
        let (base, time) = if request.agent_groups {
            (agents_base, self.open_group[lane as usize])
        } else {
            (lanes_base, self.time)
        };
        let by = Accessor {
            numbering: cx.numbering,
            base,
            mask: lanes,
            time,
            pc: request.marked_pc(),
            known: &self.known[lane as usize],
            alone: (lanes & (lanes - 1) == 0).then(|| (lane, self.waited_group[lane as usize])),
            lanes_base,
            agents_base,
        };
        let is_write = request.direction == Direction::Write;
        let step = request.bytes.min(16);
        let mut conflict = None;
        for part in (0..request.bytes).step_by(step as usize) {
            let at = address + u64::from(part);
            let found = match space {
                Space::Shared => cx.shared.shadow.access(at as usize, step, is_write, &by),
                _ => match cx.view.page(at) {
                    Some(page) => {
                        cx.view.at(page).shadow.access(at as usize % PAGE_BYTES, step, is_write, &by)
                    }
                    None => None,
                },
            };
            conflict = conflict.or(found);
        }
        conflict
    }

    fn report_race(
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
        let place = if space == Space::Global { cx.view.base().locate(address) } else { String::new() };
        let detail = || {
            format!(
                "{a}{mine} of {bytes} bytes at {space_name} {address:#x}{place} after an unordered {b}{theirs}; {advice}"
            )
        };
        cx.log.add(kind, request.pc, Some(other), (cx.block, thread), detail);
    }

    /// Reads bytes that were checked.
    #[inline]
    pub(super) fn fetch(
        &self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        bytes: u32,
        lane: usize,
        into: &mut Bytes,
    ) {
        let n = bytes as usize;
        let into = &mut into[..n];
        match space {
            Space::Shared => into.copy_from_slice(&cx.shared.data[address as usize..address as usize + n]),
            Space::Local => {
                let start = lane * cx.kernel.local_bytes as usize + address as usize;
                into.copy_from_slice(&self.local[start..start + n]);
            }
            Space::Param => into.copy_from_slice(&cx.params[address as usize..address as usize + n]),
            _ => {
                if let Some(page) = cx.view.page(address) {
                    let at = address as usize % PAGE_BYTES;
                    into.copy_from_slice(&cx.view.at(page).data[at..at + n]);
                }
            }
        }
    }

    /// Whether memory already holds these bytes.
    fn holds(&self, cx: &mut Context<'_, '_>, space: Space, address: u64, data: &[u8]) -> bool {
        match space {
            Space::Shared => &cx.shared.data[address as usize..address as usize + data.len()] == data,
            Space::Global => cx.view.page(address).is_some_and(|page| {
                let at = address as usize % PAGE_BYTES;
                &cx.view.at(page).data[at..at + data.len()] == data
            }),
            _ => false,
        }
    }

    /// Writes bytes that were checked.
    #[inline]
    pub(super) fn put(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        data: &[u8],
        lane: usize,
    ) {
        let n = data.len();
        match space {
            Space::Shared => {
                let range = address as usize..address as usize + n;
                cx.shared.data[range.clone()].copy_from_slice(data);
                cx.shared.written[range].fill(1);
            }
            Space::Local => {
                let start = lane * cx.kernel.local_bytes as usize + address as usize;
                self.local[start..start + n].copy_from_slice(data);
                self.local_written[start..start + n].fill(1);
            }
            Space::Param => {}
            _ => {
                if let Some(page) = cx.view.page(address) {
                    let range = address as usize % PAGE_BYTES..address as usize % PAGE_BYTES + n;
                    let page = cx.view.at(page);
                    page.data[range.clone()].copy_from_slice(data);
                    page.written[range.clone()].fill(1);
                    page.dirty[range].fill(1);
                    page.is_dirty = true;
                }
            }
        }
    }

    pub(super) fn atomic(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, a: &Atomic) {
        let request =
            Request { pc, bytes: a.bytes, direction: Direction::Write, order: a.order, agent_groups: false };
        let mut parts: [(Space, [u64; 32], u32); 4] = [(Space::Global, [0; 32], 0); 4];
        let mut count = 0;
        self.by_space(&a.address, mask, |space, addresses, lanes| {
            parts[count] = (space, *addresses, lanes);
            count += 1;
        });
        for (space, addresses, lanes) in &parts[..count] {
            let good = self.check_bounds(cx, *space, addresses, *lanes, &request);
            self.count_traffic(cx, *space, addresses, good, &request);
            for_lanes(good, |lane| {
                self.order_and_report(cx, *space, addresses[lane], 1 << lane, &request);
                let mut data: Bytes = [0; MAX_BYTES];
                self.fetch(cx, *space, addresses[lane], a.bytes, lane, &mut data);
                let old = little_endian(&data[..a.bytes as usize]);
                let first = self.lane(a.a, lane);
                let second = a.b.map_or(0, |b| self.lane(b, lane));
                let new = (a.apply)(old, first, second);
                self.put(cx, *space, addresses[lane], &new.to_le_bytes()[..a.bytes as usize], lane);
                if let Some(d) = a.d {
                    self.set_lane(d, lane, old);
                }
                let one = 1 << lane;
                self.after_strong_read(cx, *space, addresses, one, a.order);
                self.after_strong_write(cx, *space, addresses, one, a.order, true);
            });
        }
    }
}

pub(super) fn little_endian(bytes: &[u8]) -> u64 {
    let mut raw = [0; 8];
    raw[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(raw)
}

fn sign_extend(value: u64, bytes: u32) -> u64 {
    let unused = 64 - 8 * bytes;
    ((value << unused) as i64 >> unused) as u64
}

pub(super) fn space_name(space: Space) -> &'static str {
    match space {
        Space::Shared => "shared",
        Space::Local => "local",
        Space::Param => "parameter",
        _ => "global",
    }
}
