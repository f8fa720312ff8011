//! Loads, stores and atomics: bounds, alignment, initialised bytes, ordering, then the data.

use super::run::{Context, for_lanes};
use super::warp::Warp;
use crate::decode::lanes::blend;
use crate::decode::{Address, Atomic, Bank, Base, Order, Register, Scope, Transfer};
use crate::hazard::accessor::Conflict;
use crate::hazard::clock::{Proxy, Who};
use crate::hazard::history::{ASKED, ATOMIC, BLOCK_SCOPE, NON_COHERENT, STRONG, UPDATE};
use crate::memory::shared::SharedMemory;
use crate::memory::{PAGE_BYTES, mark_written, window};
use crate::parse::ast::Space;

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
    pub(super) by: By,
    /// Bytes that nothing wrote are only moved: whoever uses them is told of it, not who reads them.
    pub(super) moves: bool,
    /// 1 + index of the shared variables that the address was made from.
    pub(super) extent: u32,
    /// Marks that the instruction number carries beside those of its order.
    pub(super) marks: u32,
    /// What the address must be a multiple of, if more than the bytes ask for.
    pub(super) align: u32,
}

/// Who makes an access.
#[derive(Clone, Copy)]
pub(super) enum By {
    /// The lanes.
    Lanes,
    /// The lanes' asynchronous copies, as part of their open group.
    Copies,
    /// An agent that a lane, or all of a warp, has set to work.
    Agent(Agent),
}

/// An asynchronous agent: what it is called, the time of its accesses, and the proxy they go through, if not the generic one.
#[derive(Clone, Copy)]
pub(super) struct Agent {
    pub(super) identity: u32,
    pub(super) time: u32,
    pub(super) proxy: Option<Proxy>,
}

impl Request {
    pub(super) fn new(pc: u32, bytes: u32, direction: Direction, order: Order) -> Self {
        Request { pc, bytes, direction, order, by: By::Lanes, moves: false, extent: 0, marks: 0, align: 1 }
    }

    /// An ordinary read by the lanes themselves.
    pub(super) fn read(pc: u32, bytes: u32) -> Self {
        Request::new(pc, bytes, Direction::Read, Order::WEAK)
    }

    /// The same, of bytes that are followed where they go.
    pub(super) fn moving(self) -> Self {
        Request { moves: true, ..self }
    }

    /// The same, within the variables that an address was made from.
    pub(super) fn within(self, address: &Address) -> Self {
        Request { extent: address.extent, ..self }
    }

    /// An ordinary write by the lanes themselves.
    pub(super) fn write(pc: u32, bytes: u32) -> Self {
        Request::new(pc, bytes, Direction::Write, Order::WEAK)
    }

    /// The same by the lanes' asynchronous agents.
    pub(super) fn by_agents(self) -> Self {
        Request { by: By::Copies, ..self }
    }

    /// The same by another agent.
    pub(super) fn by(self, agent: Agent) -> Self {
        Request { by: By::Agent(agent), ..self }
    }

    fn marked(self, mark: u32, is_meant: bool) -> Self {
        Request { marks: if is_meant { self.marks | mark } else { self.marks }, ..self }
    }

    /// What the address must be a multiple of.
    pub(super) fn alignment(&self) -> u64 {
        u64::from(self.bytes.next_power_of_two().min(32).max(self.align))
    }

    pub(super) fn marked_pc(&self) -> u32 {
        let order = match self.order.strong {
            Some(Scope::Cta) => STRONG | BLOCK_SCOPE,
            Some(Scope::Device) => STRONG,
            None => 0,
        };
        self.pc | self.marks | order
    }
}

impl Warp {
    /// The address of each lane, in its own space, and which lanes are in which space.
    pub(super) fn located(
        &self,
        address: &Address,
        mask: u32,
    ) -> ([u64; 32], impl Iterator<Item = (Space, u32)> + use<>) {
        let mut addresses = self.addresses(address);
        let mut spaces = [(Space::Global, 0), (Space::Shared, 0), (Space::Local, 0), (Space::Param, 0)];
        match address.space {
            Space::Generic => {
                for lane in 0..32 {
                    let space;
                    (space, addresses[lane]) = window::split(addresses[lane]);
                    if let Some((_, lanes)) = spaces.iter_mut().find(|(s, _)| *s == space) {
                        *lanes |= (mask >> lane & 1) << lane;
                    }
                }
            }
            Space::Const => spaces[0].1 = mask,
            space => spaces[0] = (space, mask),
        }
        (addresses, spaces.into_iter().filter(|(_, lanes)| *lanes != 0))
    }

    pub(super) fn addresses(&self, address: &Address) -> [u64; 32] {
        let offset = address.offset as u64;
        match address.base {
            Base::Absolute => [offset; 32],
            Base::R64(r) => self.regs.b64[r as usize].map(|x| x.wrapping_add(offset)),
            // Shared addresses are 32 bits wide and wrap there.
            Base::R32(r) => self.regs.b32[r as usize].map(|x| u64::from(x.wrapping_add(offset as u32))),
        }
    }

    pub(super) fn load(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, t: &Transfer) {
        let bytes = t.bytes * t.registers.len() as u32;
        let (addresses, spaces) = self.located(&t.address, mask);
        self.before_strong(cx, t.order, true, false);
        for (space, lanes) in spaces {
            let is_marked = t.non_coherent && space == Space::Global;
            let request = Request::new(pc, bytes, Direction::Read, t.order)
                .marked(NON_COHERENT, is_marked)
                .within(&t.address);
            let good = self.check(cx, space, &addresses, lanes, &request.moving());
            let unwritten = self.unwritten;
            for (i, register) in t.registers.iter().enumerate() {
                self.load_register(cx, space, &addresses, good, lanes, t, i as u32, *register);
                if unwritten != 0 {
                    let first = i as u64 * u64::from(t.bytes);
                    for_lanes(unwritten, |lane| {
                        self.load_validity(cx, pc, (space, addresses[lane] + first), t, *register, lane);
                    });
                }
            }
            if t.order.strong.is_some() {
                self.after_strong_read(cx, space, &addresses, good, t.order, pc);
            }
        }
    }

    /// Element `index` of a vector load; lanes whose access was refused get zero.
    fn load_register(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        good: u32,
        lanes: u32,
        t: &Transfer,
        index: u32,
        register: Register,
    ) {
        let mut values = self.gather(cx, space, addresses, good, index * t.bytes, t.bytes);
        if t.is_signed {
            values = values.map(|value| sign_extend(value, t.bytes));
        }
        self.set_lanes(register, lanes, &values);
    }

    /// Numbers of up to eight bytes, `offset` behind each lane's address.
    fn gather(
        &self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        lanes: u32,
        offset: u32,
        bytes: u32,
    ) -> [u64; 32] {
        let mut values = [0u64; 32];
        let at = |lane: usize| addresses[lane] + u64::from(offset);
        let is_near = |lane: usize| lanes >> lane & 1 == 0 || at(lane) < cx.shared.data.len() as u64;
        if space == Space::Shared && (0..32).all(is_near) {
            let data = &cx.shared.data[..];
            for_lanes(lanes, |lane| {
                values[lane] = little_endian(&data[at(lane) as usize..][..bytes as usize]);
            });
        } else {
            for_lanes(lanes, |lane| {
                values[lane] = little_endian(self.bytes(cx, space, at(lane), bytes, lane));
            });
        }
        values
    }

    pub(super) fn set_lanes(&mut self, register: Register, lanes: u32, values: &[u64; 32]) {
        match register.bank {
            Bank::B64 => blend(&mut self.regs.b64[register.index as usize], values, lanes),
            Bank::B32 => {
                let mask = if register.bits >= 32 { u32::MAX } else { (1 << register.bits) - 1 };
                let values = values.map(|value| value as u32 & mask);
                blend(&mut self.regs.b32[register.index as usize], &values, lanes);
            }
            Bank::Pred => for_lanes(lanes, |lane| self.set_lane(register, lane, values[lane])),
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
        let request =
            Request::new(pc, bytes, Direction::Write, t.order).marked(UPDATE, t.is_update).within(&t.address);
        let (addresses, spaces) = self.located(&t.address, mask);
        self.before_strong(cx, t.order, false, true);
        for (space, lanes) in spaces {
            let good = self.check_bounds(cx, space, &addresses, lanes, &request);
            self.order_each(cx, space, &addresses, good, &request, |warp, cx, lanes, found| {
                if let Some(conflict) = found[0] {
                    warp.report_store(cx, space, &addresses, lanes, &request, t, conflict, found[1]);
                }
                warp.put_registers(cx, space, &addresses, lanes, t);
                if warp.validity.is_tracking() {
                    for_lanes(lanes, |lane| warp.store_validities(cx, pc, (space, addresses[lane]), t, lane));
                }
            });
            if t.order.strong.is_some() {
                self.after_strong_write(cx, space, &addresses, good, t.order, false);
            }
        }
    }

    /// What a lane stores.
    fn stored(&self, t: &Transfer, lane: usize) -> Bytes {
        let mut data: Bytes = [0; MAX_BYTES];
        let width = t.bytes as usize;
        for (part, register) in data.chunks_exact_mut(width).zip(&t.registers) {
            part.copy_from_slice(&self.lane(*register, lane).to_le_bytes()[..width]);
        }
        data
    }

    /// A store that is not ordered with an earlier access. Threads that store the same value to one place agree, whoever is last; one
    /// that reads does not.
    fn report_store(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        lanes: u32,
        request: &Request,
        t: &Transfer,
        conflict: Conflict,
        reader: Option<Conflict>,
    ) {
        let lane = lanes.trailing_zeros() as usize & 31;
        let (data, at) = (self.stored(t, lane), addresses[lane]);
        // What a copy writes may not be there yet.
        let is_thread = matches!(cx.numbering.who(conflict.who), Who::Lane);
        let agrees = conflict.is_write
            && is_thread
            && !conflict.is_update
            && self.bytes(cx, space, at, request.bytes, lane) == &data[..request.bytes as usize];
        if !(agrees && conflict.both_strong) {
            self.report_race(cx, space, at, lanes, request, conflict, agrees);
        }
        if let Some(reader) = reader.filter(|_| agrees) {
            self.report_race(cx, space, at, lanes, request, reader, false);
        }
    }

    /// Stores the registers of lanes whose access was checked.
    fn put_registers(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        lanes: u32,
        t: &Transfer,
    ) {
        let bytes = t.bytes as usize * t.registers.len();
        let is_word = |register: &Register| register.bank == Bank::B32 && t.bytes == 4;
        let is_near = |lane: usize| lanes >> lane & 1 == 0 || addresses[lane] < cx.shared.data.len() as u64;
        if space == Space::Shared && t.registers.iter().all(is_word) && (0..32).all(is_near) {
            let SharedMemory { data, written, .. } = &mut *cx.shared;
            for (i, register) in t.registers.iter().enumerate() {
                let values = &self.regs.b32[register.index as usize];
                for_lanes(lanes, |lane| {
                    data[addresses[lane] as usize + 4 * i..][..4]
                        .copy_from_slice(&values[lane].to_le_bytes());
                });
            }
            for_lanes(lanes, |lane| mark_written(&mut written[addresses[lane] as usize..][..bytes]));
            return;
        }
        for_lanes(lanes, |lane| {
            let data = self.stored(t, lane);
            self.put(cx, space, addresses[lane], &data[..bytes], lane);
        });
    }

    /// Bounds, traffic and ordering; returns the lanes whose access can be made.
    pub(super) fn check(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) -> u32 {
        let good = self.check_bounds(cx, space, addresses, mask, request);
        self.check_order(cx, space, addresses, good, request);
        good
    }

    /// Orders each lane's access and reports what it races with.
    pub(super) fn check_order(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        lanes: u32,
        request: &Request,
    ) {
        self.order_each(cx, space, addresses, lanes, request, |warp, cx, lanes, found| {
            if let Some(conflict) = found[0] {
                let at = addresses[lanes.trailing_zeros() as usize & 31];
                warp.report_race(cx, space, at, lanes, request, conflict, false);
            }
        });
    }

    /// Bytes that were checked.
    #[inline]
    pub(super) fn bytes<'s>(
        &'s self,
        cx: &'s mut Context<'_, '_>,
        space: Space,
        address: u64,
        bytes: u32,
        lane: usize,
    ) -> &'s [u8] {
        let (at, n) = (address as usize, bytes as usize);
        match space {
            Space::Shared => match cx.shared_at(address) {
                Some((memory, at)) => &memory.data[at..at + n],
                None => &[],
            },
            Space::Local => {
                let start = lane * cx.kernel.local_bytes as usize + at;
                &self.local[start..start + n]
            }
            Space::Param => &cx.params[at..at + n],
            _ => match cx.view.page(address) {
                Some(page) => &cx.view.at(page).data()[at % PAGE_BYTES..at % PAGE_BYTES + n],
                None => &[],
            },
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
                if let Some((memory, at)) = cx.shared_at(address) {
                    memory.data[at..at + n].copy_from_slice(data);
                    mark_written(&mut memory.written[at..at + n]);
                }
            }
            Space::Local => {
                let start = lane * cx.kernel.local_bytes as usize + address as usize;
                self.local[start..start + n].copy_from_slice(data);
                self.local_written[start..start + n].fill(1);
            }
            Space::Param => {}
            _ => {
                if let Some(page) = cx.view.page(address) {
                    cx.view.at(page).put(address as usize % PAGE_BYTES, data);
                }
            }
        }
    }

    pub(super) fn atomic(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, a: &Atomic) {
        let request =
            Request::new(pc, a.bytes, Direction::Write, a.order).marked(ATOMIC, true).within(&a.address);
        let request = request.marked(ASKED, a.is_read);
        let request = Request { align: a.align, ..request };
        let (addresses, spaces) = self.located(&a.address, mask);
        self.before_strong(cx, a.order, a.is_read, true);
        let changes = cx.tallies[pc as usize].work;
        for (space, lanes) in spaces {
            let good = self.check_bounds(cx, space, &addresses, lanes, &request);
            for_lanes(good, |lane| {
                let (at, one) = (addresses[lane], 1 << lane);
                self.check_order(cx, space, &addresses, one, &request);
                let old = little_endian(self.bytes(cx, space, at, a.bytes, lane));
                self.check_updated(cx, pc, space, at, a.bytes, lane);
                let first = self.lane(a.a, lane);
                let second = a.b.map_or(0, |b| self.lane(b, lane));
                let new = (a.apply)(old, first, second);
                self.put(cx, space, at, &new.to_le_bytes()[..a.bytes as usize], lane);
                let unused = 64 - 8 * a.bytes;
                cx.tallies[pc as usize].work += u64::from((new ^ old) << unused != 0);
                if let Some(d) = a.d {
                    self.set_lane(d, lane, old);
                }
                self.after_strong_read(cx, space, &addresses, one, a.order, pc);
                self.after_strong_write(cx, space, &addresses, one, a.order, true);
            });
        }
        if cx.tallies[pc as usize].work == changes {
            self.spun();
        }
    }
}

/// Up to eight bytes as a number.
#[inline]
pub(super) fn little_endian(bytes: &[u8]) -> u64 {
    match bytes {
        [a, b, c, d] => u64::from(u32::from_le_bytes([*a, *b, *c, *d])),
        [a, b] => u64::from(u16::from_le_bytes([*a, *b])),
        [a] => u64::from(*a),
        [a, b, c, d, e, f, g, h] => u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]),
        _ => bytes.iter().take(8).rev().fold(0, |value, byte| value << 8 | u64::from(*byte)),
    }
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
