//! Uninitialised values on their way through memory, matrix fragments and other lanes.

use super::run::{Context, for_lanes};
use super::validity::{Origin, STORED_INVALID, whole};
use super::warp::Warp;
use crate::decode::{Bank, MatrixMultiply, Register, Transfer};
use crate::finding::Kind;
use crate::memory::PAGE_BYTES;
use crate::parse::ast::Space;
use crate::tensor::Fragment;
use std::collections::HashSet;

impl Warp {
    /// The flags of bytes that were checked: 1 where something wrote; nothing where everything counts as written.
    pub(super) fn flags<'s>(
        &'s mut self,
        cx: &'s mut Context<'_, '_>,
        (space, address): (Space, u64),
        bytes: u32,
        lane: usize,
    ) -> &'s mut [u8] {
        let (at, n) = (address as usize, bytes as usize);
        match space {
            Space::Shared => match cx.shared_at(address) {
                Some((memory, at)) => &mut memory.written[at..at + n],
                None => &mut [],
            },
            Space::Local => {
                let start = lane * cx.kernel.local_bytes as usize + at;
                &mut self.local_written[start..start + n]
            }
            Space::Param => &mut [],
            _ => match cx.view.page(address) {
                Some(page) => &mut cx.view.at(page).written_mut()[at % PAGE_BYTES..at % PAGE_BYTES + n],
                None => &mut [],
            },
        }
    }

    /// The bytes at an address that are not valid, one bit each.
    pub(super) fn unwritten_bytes(
        &mut self,
        cx: &mut Context<'_, '_>,
        place: (Space, u64),
        bytes: u32,
        lane: usize,
    ) -> u8 {
        let flags = self.flags(cx, place, bytes, lane).iter().take(8);
        flags.enumerate().fold(0, |all, (k, flag)| all | u8::from(*flag != 1) << k)
    }

    /// One element of a load of bytes that nothing wrote.
    pub(super) fn load_validity(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        place: (Space, u64),
        t: &Transfer,
        register: Register,
        lane: usize,
    ) {
        let mut bytes = self.unwritten_bytes(cx, place, t.bytes, lane);
        if bytes == 0 {
            return;
        }
        let at = (place.0, place.1 + u64::from(bytes.trailing_zeros()));
        let is_stored = self.flags(cx, at, 1, lane).contains(&STORED_INVALID);
        if t.is_signed && bytes >> (t.bytes - 1) & 1 == 1 {
            bytes |= (0xffu16 << t.bytes) as u8;
        }
        self.mark_loaded(pc, at, is_stored, register, lane, bytes & whole(register.bank));
    }

    /// After a store of `bytes` of a register, from byte `first` on: what is not valid of it is not valid in memory either, unless
    /// it was computed and is an output.
    pub(super) fn store_validity(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        place: (Space, u64),
        register: &Register,
        first: u32,
        bytes: u32,
        lane: usize,
    ) {
        let Some((invalid, computed, origin)) = self.invalid(register, lane) else { return };
        let invalid = invalid >> first & ((1u16 << bytes.min(8)) - 1) as u8;
        if invalid == 0 {
            return;
        }
        if computed && place.0 == Space::Global {
            self.report_use(cx, pc, lane, "a value stored to global memory", origin);
            return;
        }
        for (k, flag) in self.flags(cx, place, bytes, lane).iter_mut().enumerate() {
            if invalid >> k & 1 == 1 {
                *flag = STORED_INVALID;
            }
        }
    }

    /// The same after a store of whole registers.
    pub(super) fn store_validities(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        (space, at): (Space, u64),
        t: &Transfer,
        lane: usize,
    ) {
        for (i, register) in t.registers.iter().enumerate() {
            let place = (space, at + i as u64 * u64::from(t.bytes));
            self.store_validity(cx, pc, place, register, 0, t.bytes, lane);
        }
    }

    /// An atomic computes with what it finds, unless it only puts something else there.
    pub(super) fn check_updated(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        space: Space,
        address: u64,
        bytes: u32,
        lane: usize,
    ) {
        let is_unwritten = self.unwritten_bytes(cx, (space, address), bytes, lane) != 0;
        if is_unwritten && !cx.kernel.info[pc as usize].opcode.contains(".exch") {
            let thread = self.index * 32 + lane as u32;
            let kind = Kind::UninitialisedMemory;
            let origin = Origin { kind, pc, thread, space, address, is_stored: false };
            self.report_use(cx, pc, lane, "an atomic", origin);
        }
    }

    /// Marks words of a warp that were brought together from memory; `words`: ones where nothing wrote, from `place` on.
    pub(super) fn mark_words(
        &mut self,
        pc: u32,
        place: (Space, u64),
        register: Register,
        lanes: u32,
        words: &[u32; 32],
    ) {
        for_lanes(lanes, |lane| {
            let bytes = (0..4).fold(0u8, |all, k| all | u8::from(words[lane] >> (8 * k) & 0xff != 0) << k);
            if bytes != 0 {
                self.mark_loaded(pc, place, false, register, lane, bytes);
            }
        });
    }

    /// `movmatrix`: a register gets the words of another, moved; `words`: ones where they are not valid.
    pub(super) fn transpose_validity(&mut self, a: Register, d: Register, lanes: u32, words: &[u32; 32]) {
        let origin = self.validity.mark(a.bank, a.index).and_then(|mark| {
            let lane = mark.bytes.iter().position(|bytes| *bytes != 0)?;
            Some(self.validity.origins[mark.origin[lane] as usize])
        });
        self.validity.clear(&d, lanes);
        if let Some(origin) = origin {
            self.mark_words(origin.pc, (origin.space, origin.address), d, lanes, words);
        }
    }

    /// Ones where a register of 32 bits is not valid.
    pub(super) fn invalid_words(&self, index: u32) -> [u32; 32] {
        let mark = self.validity.mark(Bank::B32, index);
        std::array::from_fn(|lane| {
            let bytes = mark.map_or(0, |mark| mark.bytes[lane]);
            (0..4).fold(0, |word, k| word | (u32::from(bytes >> k & 1) * (0xff << (8 * k))))
        })
    }

    /// A register gets each lane's value from another lane of a second one, with what is not valid of it.
    pub(super) fn move_lanes(&mut self, d: Register, a: Register, lanes: u32, from: &[u8; 32]) {
        if !self.validity.is_tracking() {
            return;
        }
        let mark = self.validity.mark(a.bank, a.index).cloned();
        self.validity.clear(&d, lanes);
        let Some(mark) = mark else { return };
        for_lanes(lanes, |lane| {
            let source = from[lane] as usize & 31;
            let computed = mark.computed >> source & 1 == 1;
            self.validity.set(d, lane, mark.bytes[source], computed, mark.origin[source]);
        });
    }

    /// Of a product, the rows of A and the columns of B that are not valid spoil the same of D; what of C is not valid, itself.
    pub(super) fn multiply_validity(&mut self, m: &MatrixMultiply, lanes: u32) {
        if !self.validity.is_tracking() {
            return;
        }
        let mut origin = None;
        let mut spoilt = |this: &Self, registers: &[Register], fragment: &Fragment| {
            let mut places = Vec::new();
            for element in 0..fragment.elements() {
                let (word, bit) = fragment.position(element);
                let register = if fragment.element_bits() == 64 { word / 2 } else { word };
                let Some(register) = registers.get(register) else { continue };
                let Some(mark) = this.validity.mark(register.bank, register.index) else { continue };
                let bytes = (fragment.element_bits() / 8).max(1) as u32;
                let wanted = (((1u16 << bytes) - 1) as u8) << (bit / 8);
                for lane in (0..32).filter(|lane| mark.bytes[*lane] & wanted != 0) {
                    origin.get_or_insert(mark.origin[lane]);
                    places.extend(fragment.coordinates(lane, element));
                }
            }
            places
        };
        let rows: HashSet<usize> =
            spoilt(self, &m.a, m.contraction.a()).into_iter().map(|(row, _)| row).collect();
        let columns: HashSet<usize> =
            spoilt(self, &m.b, m.contraction.b()).into_iter().map(|(_, column)| column).collect();
        let own: HashSet<(usize, usize)> = spoilt(self, &m.c, m.contraction.c()).into_iter().collect();
        m.d.iter().for_each(|register| self.validity.clear(register, lanes));
        let Some(origin) = origin else { return };
        let fragment = m.contraction.d();
        for element in 0..fragment.elements() {
            let (word, bit) = fragment.position(element);
            let register = if fragment.element_bits() == 64 { word / 2 } else { word };
            let Some(register) = m.d.get(register) else { continue };
            let bytes = (((1u16 << (fragment.element_bits() / 8).max(1)) - 1) as u8) << (bit / 8);
            for_lanes(lanes, |lane| {
                let Some(at) = fragment.coordinates(lane, element) else { return };
                if rows.contains(&at.0) || columns.contains(&at.1) || own.contains(&at) {
                    let old = self.validity.bytes(register.bank, register.index, lane);
                    self.validity.set(*register, lane, old | bytes, true, origin);
                }
            });
        }
    }
}
