//! Uninitialised values: which bytes of which registers of which lanes, where they come from, and where they matter.
//!
//! Moving such a value is no mistake: compilers copy halves that are never used. Deciding by it, addressing with it, or storing to
//! global memory what was computed from it is. While a warp holds none, none of this costs anything.

use super::access::space_name;
use super::run::{Context, for_lanes};
use super::warp::Warp;
use crate::decode::lanes::Args;
use crate::decode::{ALWAYS, Address, Bank, Base, CollectiveKind, FlowKind, Inst, Op, Register};
use crate::finding::Kind;
use crate::hazard::log::{Other, Words};
use crate::parse::ast::Space;
use std::collections::HashMap;

/// Bytes of a register that are not valid, per lane.
#[derive(Clone)]
pub(super) struct Mark {
    pub(super) bytes: [u8; 32],
    /// Lanes whose value was computed from such bytes, not only moved.
    pub(super) computed: u32,
    /// Per lane, an index of [`Validity::origins`].
    pub(super) origin: [u32; 32],
}

/// Where a value comes from that nothing made.
#[derive(Clone, Copy)]
pub(super) struct Origin {
    pub(super) kind: Kind,
    pub(super) pc: u32,
    pub(super) thread: u32,
    pub(super) space: Space,
    pub(super) address: u64,
    /// Something was stored there, which was not valid itself.
    pub(super) is_stored: bool,
}

/// A byte of memory that something was stored to which was not valid; 0: nothing was; 1: it is valid.
pub(super) const STORED_INVALID: u8 = 2;

/// What is not valid in a warp's registers.
#[derive(Default)]
pub(super) struct Validity {
    marks: [Vec<Option<Box<Mark>>>; 3],
    /// Registers with a mark.
    count: usize,
    pub(super) origins: Vec<Origin>,
    known: HashMap<(u32, u32), u32>,
}

impl Validity {
    /// Whether anything is marked.
    #[inline]
    pub(super) fn is_tracking(&self) -> bool {
        self.count > 0
    }

    pub(super) fn mark(&self, bank: Bank, index: u32) -> Option<&Mark> {
        self.marks[bank as usize].get(index as usize)?.as_deref()
    }

    pub(super) fn bytes(&self, bank: Bank, index: u32, lane: usize) -> u8 {
        self.mark(bank, index).map_or(0, |mark| mark.bytes[lane])
    }

    /// Lanes in which something of a register is not valid.
    fn lanes(&self, register: &Register) -> u32 {
        let Some(mark) = self.mark(register.bank, register.index) else { return 0 };
        mark.bytes.iter().enumerate().fold(0, |all, (lane, bytes)| all | u32::from(*bytes != 0) << lane)
    }

    pub(super) fn add_origin(&mut self, origin: Origin) -> u32 {
        let next = self.origins.len() as u32;
        let index = *self.known.entry((origin.pc, origin.thread)).or_insert(next);
        if index == next {
            self.origins.push(origin);
        }
        index
    }

    /// Sets what is not valid of one lane of a register.
    pub(super) fn set(&mut self, register: Register, lane: usize, bytes: u8, computed: bool, origin: u32) {
        let all = &mut self.marks[register.bank as usize];
        let index = register.index as usize;
        if bytes == 0 {
            self.clear(&register, 1 << lane);
            return;
        }
        if all.len() <= index {
            all.resize_with(index + 1, || None);
        }
        let mark = all[index].get_or_insert_with(|| {
            self.count += 1;
            Box::new(Mark { bytes: [0; 32], computed: 0, origin: [0; 32] })
        });
        mark.bytes[lane] = bytes;
        mark.computed = mark.computed & !(1 << lane) | u32::from(computed) << lane;
        mark.origin[lane] = origin;
    }

    /// Lanes of a register are valid.
    pub(super) fn clear(&mut self, register: &Register, lanes: u32) {
        let slot = self.marks[register.bank as usize].get_mut(register.index as usize);
        let Some(Some(mark)) = slot.map(Option::as_mut) else { return };
        for_lanes(lanes, |lane| mark.bytes[lane] = 0);
        if mark.bytes.iter().all(|bytes| *bytes == 0) {
            self.marks[register.bank as usize][register.index as usize] = None;
            self.count -= 1;
        }
    }
}

/// All bytes of a register.
pub(super) fn whole(bank: Bank) -> u8 {
    match bank {
        Bank::Pred => 1,
        Bank::B32 => 0xf,
        Bank::B64 => 0xff,
    }
}

impl Warp {
    /// Before an instruction: what it does with values that are not valid.
    pub(super) fn track(&mut self, cx: &mut Context<'_, '_>, pc: u32, inst: &Inst, mask: u32, group: u32) {
        if inst.guard != ALWAYS {
            let guard = Register { bank: Bank::Pred, index: inst.guard, bits: 1 };
            let is_branch = matches!(inst.op, Op::Branch { .. } | Op::BranchIndex { .. });
            let what = if is_branch { "a branch" } else { "whether an instruction is executed" };
            self.matters(cx, pc, &guard, group, what);
        }
        let kernel = cx.kernel;
        let flow = &kernel.flows[pc as usize];
        let marked = |this: &Self, register: &Register| this.validity.lanes(register) & mask;
        let is_touched = flow.reads.iter().any(|register| marked(self, register) != 0);
        match &inst.op {
            Op::Alu(_) if is_touched => {
                self.flow(&flow.kind, &inst.args, &flow.reads, &flow.writes, mask);
                return;
            }
            Op::Load(t) => self.check_address(cx, pc, mask, &t.address),
            Op::Store(t) => return self.check_address(cx, pc, mask, &t.address),
            Op::Collective(collective) => {
                // What these move is followed where they move it.
                match &collective.kind {
                    CollectiveKind::Shuffle { b, c, .. } => {
                        self.matters(cx, pc, b, mask, "the lane of a shuffle");
                        self.matters(cx, pc, c, mask, "the lane of a shuffle");
                    }
                    CollectiveKind::LoadMatrix { address, .. }
                    | CollectiveKind::StoreMatrix { address, .. } => {
                        self.check_address(cx, pc, mask, address)
                    }
                    CollectiveKind::FragmentLoad(access) | CollectiveKind::FragmentStore(access) => {
                        self.check_address(cx, pc, mask, &access.address);
                    }
                    CollectiveKind::Multiply(_) | CollectiveKind::MoveMatrix { .. } => {}
                    _ => flow.reads.iter().for_each(|r| self.matters(cx, pc, r, mask, "an operand")),
                }
                return;
            }
            _ if is_touched => {
                flow.reads.iter().for_each(|r| self.matters(cx, pc, r, mask, "an operand"));
            }
            _ => {}
        }
        flow.writes.iter().for_each(|register| self.validity.clear(register, mask));
    }

    fn check_address(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, address: &Address) {
        let register = match address.base {
            Base::Absolute => return,
            Base::R32(index) => Register { bank: Bank::B32, index, bits: 32 },
            Base::R64(index) => Register { bank: Bank::B64, index, bits: 64 },
        };
        self.matters(cx, pc, &register, mask, "an address");
    }

    /// Reports a register where its value matters, and then lets it be: once is enough.
    pub(super) fn matters(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        register: &Register,
        lanes: u32,
        what: &str,
    ) {
        let lanes = self.validity.lanes(register) & lanes;
        if lanes == 0 {
            return;
        }
        let lane = lanes.trailing_zeros() as usize;
        if let Some(mark) = self.validity.mark(register.bank, register.index) {
            let origin = self.validity.origins[mark.origin[lane] as usize];
            self.report_use(cx, pc, lane, what, origin);
        }
        self.validity.clear(register, lanes);
    }

    pub(super) fn report_use(
        &self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lane: usize,
        what: &str,
        origin: Origin,
    ) {
        let other = Other { pc: origin.pc, block: u64::from(cx.block), thread: origin.thread };
        let other = Some(other).filter(|_| origin.pc != pc);
        let at = (cx.block, self.index * 32 + lane as u32);
        let variable = cx.variable(origin.space, origin.address);
        cx.log.add(origin.kind, pc, other, at, || {
            let source = match origin.kind {
                Kind::UninitialisedRegister => "a register that no instruction has written".to_owned(),
                _ => {
                    let place = variable
                        .as_ref()
                        .map_or_else(String::new, |v| format!(" ({}+{})", v.name, v.offset_bytes));
                    let (space, address) = (space_name(origin.space), origin.address);
                    let why = if origin.is_stored {
                        "which holds what was made of memory that nothing wrote"
                    } else {
                        "which nothing wrote"
                    };
                    format!("{space} {address:#x}{place}, {why}")
                }
            };
            Words { detail: format!("{what} depends on {source}"), advice: None, variable }
        });
    }

    /// What of an instruction's results is not valid, by what of its operands is not.
    fn flow(&mut self, kind: &FlowKind, args: &Args, reads: &[Register], writes: &[Register], mask: u32) {
        let of = |this: &Self, bank: Bank, index: u32, lane: usize| this.validity.bytes(bank, index, lane);
        for_lanes(mask, |lane| {
            let any = reads.iter().fold(0, |all, r| all | of(self, r.bank, r.index, lane));
            let source = reads.iter().find(|r| of(self, r.bank, r.index, lane) != 0);
            let source = source.and_then(|r| self.validity.mark(r.bank, r.index));
            let (origin, was) = source.map_or((0, false), |m| (m.origin[lane], m.computed >> lane & 1 == 1));
            for write in writes {
                let bytes = if any == 0 { 0 } else { self.bytes_after(kind, args, any, write, lane) };
                self.validity.set(*write, lane, bytes, was || kind.computes(), origin);
            }
        });
    }

    /// The bytes of a result that are not valid in a lane; `any`: those of any operand.
    fn bytes_after(&self, kind: &FlowKind, args: &Args, any: u8, write: &Register, lane: usize) -> u8 {
        let of = |bank: Bank, index: u32| self.validity.bytes(bank, index, lane);
        let value = |bank: Bank, index: u32| match bank {
            Bank::B64 => self.regs.b64[index as usize][lane],
            Bank::B32 => u64::from(self.regs.b32[index as usize][lane]),
            Bank::Pred => u64::from(self.regs.pred[index as usize] >> lane & 1),
        };
        // One bit for each byte that is not zero.
        let set_bytes =
            |value: u64| (0..8).fold(0u8, |all, k| all | u8::from(value >> (8 * k) & 0xff != 0) << k);
        let all = whole(write.bank);
        let bytes = match kind {
            FlowKind::Whole => all,
            FlowKind::Copy | FlowKind::Bytewise => any,
            FlowKind::Halves => [0x3u8, 0xc].into_iter().filter(|half| any & half != 0).sum(),
            FlowKind::And(bank) | FlowKind::Or(bank) => {
                let keeps = |index: u32| {
                    let (value, is_and) = (value(*bank, index), matches!(kind, FlowKind::And(_)));
                    match bank {
                        Bank::Pred => u8::from((value != 0) == is_and),
                        _ => set_bytes(if is_and { value } else { !value }),
                    }
                };
                let (a, b) = (of(*bank, args.a), of(*bank, args.b));
                a & b | a & keeps(args.b) | b & keeps(args.a)
            }
            FlowKind::Select(_) if of(Bank::Pred, args.c) != 0 => all,
            FlowKind::Select(bank) => of(*bank, if value(Bank::Pred, args.c) != 0 { args.a } else { args.b }),
            FlowKind::Shift { .. } if of(Bank::B32, args.b) != 0 => all,
            FlowKind::Shift { bank, left, signed } => {
                let bits = value(Bank::B32, args.b).min(64) as u32;
                let a = u32::from(of(*bank, args.a)) << if *left { 0 } else { 8 };
                let steps = [bits / 8, bits.div_ceil(8)];
                let moved = steps.map(|n| if *left { a << n } else { a >> n });
                let top = 1 << (7 + whole(*bank).count_ones());
                let fill = if *signed && a & top != 0 { u32::from(all) << 8 } else { 0 };
                let out = moved[0] | moved[1] | fill;
                (if *left { out } else { out >> 8 }) as u8
            }
            FlowKind::Permute if of(Bank::B32, args.c) != 0 => all,
            FlowKind::Permute => {
                let source = of(Bank::B32, args.a) | of(Bank::B32, args.b) << 4;
                let picks = value(Bank::B32, args.c);
                (0..4).fold(0, |out, k| out | (source >> (picks >> (4 * k) & 7) & 1) << k)
            }
            FlowKind::Pack { bytes, parts } => {
                let part = |(i, index): (usize, &u32)| {
                    let low = u32::from(of(Bank::B32, *index)) & ((1 << bytes) - 1);
                    (low << (i as u32 * bytes)) as u8
                };
                parts.iter().enumerate().map(part).fold(0, |all, part| all | part)
            }
            FlowKind::Unpack { from, bytes } => any >> from & ((1u16 << bytes) - 1) as u8,
            FlowKind::Resize { bytes, signed } => {
                let low = any & ((1u16 << bytes) - 1) as u8;
                let is_top = low >> (bytes - 1) & 1 == 1;
                if *signed && is_top { low | (0xffu16 << bytes) as u8 } else { low }
            }
            FlowKind::PackHalves => {
                let half = |index: u32, half: u8| if of(Bank::B32, index) != 0 { half } else { 0 };
                half(args.a, 0xc) | half(args.b, 0x3)
            }
        };
        bytes & all
    }

    /// A register that no instruction has written is read: from here on it is followed.
    pub(super) fn mark_register(&mut self, pc: u32, register: Register, lanes: u32) {
        for_lanes(lanes, |lane| {
            let thread = self.index * 32 + lane as u32;
            let kind = Kind::UninitialisedRegister;
            let origin = Origin { kind, pc, thread, space: Space::Local, address: 0, is_stored: false };
            let origin = self.validity.add_origin(origin);
            self.validity.set(register, lane, whole(register.bank), false, origin);
        });
    }

    /// Marks what a lane has read of memory that nothing wrote.
    pub(super) fn mark_loaded(
        &mut self,
        pc: u32,
        (space, address): (Space, u64),
        is_stored: bool,
        register: Register,
        lane: usize,
        bytes: u8,
    ) {
        let thread = self.index * 32 + lane as u32;
        let kind = Kind::UninitialisedMemory;
        let origin = self.validity.add_origin(Origin { kind, pc, thread, space, address, is_stored });
        self.validity.set(register, lane, bytes, false, origin);
    }

    /// The bytes of a register that are not valid, and whether they were computed.
    pub(super) fn invalid(&self, register: &Register, lane: usize) -> Option<(u8, bool, Origin)> {
        let mark = self.validity.mark(register.bank, register.index).filter(|m| m.bytes[lane] != 0)?;
        let origin = self.validity.origins[mark.origin[lane] as usize];
        Some((mark.bytes[lane], mark.computed >> lane & 1 == 1, origin))
    }
}
