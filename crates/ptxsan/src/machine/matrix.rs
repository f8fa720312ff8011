//! Matrix instructions: `ldmatrix` and its kin, `wmma` loads and stores, `mma`.

use super::access::{Request, little_endian, space_name};
use super::run::{Context, for_lanes};
use super::validity::STORED_INVALID;
use super::warp::Warp;
use crate::decode::lanes::blend;
use crate::decode::{Address, Bank, CollectiveKind, FragmentAccess, MatrixMultiply, Register};
use crate::finding::Kind;
use crate::parse::ast::Space;
use crate::tensor::{Lanes, transfer};

impl Warp {
    pub(super) fn matrix(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, kind: &CollectiveKind) {
        match kind {
            CollectiveKind::LoadMatrix { registers, address, transposed } => {
                self.load_matrix(cx, pc, lanes, registers, address, *transposed);
            }
            CollectiveKind::StoreMatrix { registers, address, transposed } => {
                self.store_matrix(cx, pc, lanes, registers, address, *transposed);
            }
            CollectiveKind::MoveMatrix { d, a } => {
                let source = self.regs.b32[*a as usize];
                let out = transfer::transpose(&source);
                blend(&mut self.regs.b32[*d as usize], &out, lanes);
                if self.validity.is_tracking() {
                    let words = transfer::transpose(&self.invalid_words(*a));
                    let [a, d] = [*a, *d].map(|index| Register { bank: Bank::B32, index, bits: 32 });
                    self.transpose_validity(a, d, lanes, &words);
                }
            }
            CollectiveKind::Multiply(multiply) => self.multiply(cx, lanes, multiply),
            CollectiveKind::FragmentLoad(access) => self.load_fragment(cx, pc, lanes, access),
            CollectiveKind::FragmentStore(access) => self.store_fragment(cx, pc, lanes, access),
            _ => {}
        }
    }

    /// The words of registers that hold 32 or 64 bits, low words first.
    fn words<'r>(&self, registers: impl IntoIterator<Item = &'r Register>) -> Vec<Lanes> {
        let registers = registers.into_iter();
        let mut out = Vec::with_capacity(registers.size_hint().0);
        for register in registers {
            match register.bank {
                Bank::B64 => {
                    let value = &self.regs.b64[register.index as usize];
                    out.push(value.map(|x| x as u32));
                    out.push(value.map(|x| (x >> 32) as u32));
                }
                _ => out.push(self.regs.b32[register.index as usize]),
            }
        }
        out
    }

    fn set_words(&mut self, registers: &[Register], words: &[Lanes], lanes: u32) {
        let mut words = words.iter();
        for register in registers {
            match (register.bank, words.next()) {
                (Bank::B64, Some(low)) => {
                    let high = words.next().copied().unwrap_or([0; 32]);
                    let value = std::array::from_fn(|l| u64::from(high[l]) << 32 | u64::from(low[l]));
                    blend(&mut self.regs.b64[register.index as usize], &value, lanes);
                }
                (_, Some(word)) => blend(&mut self.regs.b32[register.index as usize], word, lanes),
                (_, None) => {}
            }
        }
    }

    fn multiply(&mut self, cx: &mut Context<'_, '_>, lanes: u32, m: &MatrixMultiply) {
        if self.multiply_halves(cx, lanes, m) {
            return;
        }
        let words = self.words(m.a.iter().chain(&m.b).chain(&m.c));
        let (of_a, of_b) = (m.contraction.a().registers(), m.contraction.b().registers());
        let mut d = vec![[0; 32]; m.contraction.d().registers()];
        // The decoder gave every operand as many registers as its fragment has.
        let (Some((a, rest)), true) = (words.split_at_checked(of_a), words.len() >= of_a + of_b) else {
            return;
        };
        let (b, c) = rest.split_at(of_b);
        self.multiply_validity(m, lanes);
        if m.contraction.execute(a, b, c, &mut d, cx.options.accumulate).is_ok() {
            self.set_words(&m.d, &d, lanes);
        }
    }

    /// Products of halves, which nearly all are, straight from and to the registers; `false` if it is another.
    fn multiply_halves(&mut self, cx: &Context<'_, '_>, lanes: u32, m: &MatrixMultiply) -> bool {
        match m.d.len() {
            4 => self.multiply_tiles::<4>(cx, lanes, m),
            8 => self.multiply_tiles::<8>(cx, lanes, m),
            _ => false,
        }
    }

    /// The same for a D of so many registers.
    fn multiply_tiles<const D: usize>(
        &mut self,
        cx: &Context<'_, '_>,
        lanes: u32,
        m: &MatrixMultiply,
    ) -> bool {
        /// Registers of A and B, at most.
        const MOST: usize = 8;
        let Ok(c) = <&[Register; D]>::try_from(&m.c[..]) else { return false };
        if !m.has_words || m.a.len() > MOST || m.b.len() > MOST {
            return false;
        }
        let none = [0; 32];
        let (mut a, mut b) = ([&none; MOST], [&none; MOST]);
        for (list, registers) in [(&mut a, &m.a), (&mut b, &m.b)] {
            for (value, register) in list.iter_mut().zip(registers) {
                *value = &self.regs.b32[register.index as usize];
            }
        }
        // D starts as C.
        let mut d: [Lanes; D] = [[0; 32]; D];
        for (value, register) in d.iter_mut().zip(c) {
            *value = self.regs.b32[register.index as usize];
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let (a, b) = (&a[..m.a.len()], &b[..m.b.len()]);
        let is_done = m.contraction.execute_halves(a, b, &mut d, cx.options.accumulate, &mut scratch);
        self.scratch = scratch;
        if !is_done {
            return false;
        }
        self.multiply_validity(m, lanes);
        for (register, words) in m.d.iter().zip(&d) {
            blend(&mut self.regs.b32[register.index as usize], words, lanes);
        }
        true
    }

    /// Where a fragment's matrix starts; reports memory that matrix instructions cannot reach.
    fn matrix_start(
        &self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lanes: u32,
        access: &FragmentAccess,
    ) -> Option<(Space, u64, u64)> {
        let first = lanes.trailing_zeros() as usize & 31;
        let (addresses, mut spaces) = self.located(&access.address, 1 << first);
        let (space, at) = (spaces.next()?.0, addresses[first]);
        if !matches!(space, Space::Shared | Space::Global) {
            cx.report(Kind::WrongSpace, pc, self.index, lanes, || {
                format!("a matrix at {} {at:#x}: fragments can only be loaded from and stored to shared and global memory", space_name(space))
            });
            return None;
        }
        Some((space, at, self.lane(access.stride, first)))
    }

    /// Per register of 32 bits: where each lane's part starts, and whether all of it lies together.
    fn part_addresses(access: &FragmentAccess, start: u64, stride: u64, element: usize) -> [u64; 32] {
        let bytes = access.fragment.element_bits() as u64 / 8;
        std::array::from_fn(|lane| {
            let (row, col) = access.fragment.coordinates(lane, element).unwrap_or((0, 0));
            let offset = access.layout.offset(row, col, stride as usize) as u64;
            start.wrapping_add(offset.wrapping_mul(bytes))
        })
    }

    /// Splits a fragment into accesses: first element, elements in one, addresses.
    fn parts(access: &FragmentAccess, start: u64, stride: u64) -> Vec<(usize, usize, [u64; 32])> {
        let bytes = access.fragment.element_bits() / 8;
        let per_word = (4 / bytes).max(1);
        let mut out = Vec::new();
        for first in (0..access.fragment.distinct_elements()).step_by(per_word) {
            let all: Vec<[u64; 32]> =
                (0..per_word).map(|k| Self::part_addresses(access, start, stride, first + k)).collect();
            let together = (0..32).all(|l| {
                all[0][l].is_multiple_of((per_word * bytes) as u64)
                    && (1..per_word).all(|k| all[k][l] == all[0][l].wrapping_add((k * bytes) as u64))
            });
            if together {
                out.push((first, per_word, all[0]));
            } else {
                out.extend(all.into_iter().enumerate().map(|(k, addresses)| (first + k, 1, addresses)));
            }
        }
        out
    }

    fn load_fragment(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, access: &FragmentAccess) {
        let Some((space, start, stride)) = self.matrix_start(cx, pc, lanes, access) else { return };
        let bytes = access.fragment.element_bits() / 8;
        let mut words = vec![[0u32; 32]; access.fragment.registers()];
        self.clear_validity(&access.registers, lanes);
        let mut invalid = vec![[0u32; 32]; words.len()];
        for (first, count, addresses) in Self::parts(access, start, stride) {
            let size = (count * bytes) as u32;
            let request = Request::read(pc, size).moving().within(&access.address);
            let good = self.check(cx, space, &addresses, lanes, &request);
            for_lanes(self.unwritten, |lane| {
                let (register, shift) = access.fragment.position(first);
                let bytes = self.unwritten_bytes(cx, (space, addresses[lane]), size, lane);
                let ones = (0..8).fold(0u64, |all, k| all | (u64::from(bytes >> k & 1) * (0xff << (8 * k))));
                invalid[register][lane] |= (ones << shift) as u32;
            });
            let (register, shift) = access.fragment.position(first);
            for_lanes(good, |lane| {
                let value = little_endian(self.bytes(cx, space, addresses[lane], size, lane));
                words[register][lane] |= (value << shift) as u32;
                if size == 8 {
                    words[register + 1][lane] = (value >> 32) as u32;
                }
            });
        }
        // Some fragments hold their elements more than once.
        let distinct = access.fragment.distinct_elements() * access.fragment.element_bits() / 32;
        for i in distinct..words.len() {
            words[i] = words[i % distinct.max(1)];
        }
        self.set_words(&access.registers, &words, lanes);
        for (register, invalid) in access.registers.iter().zip(&invalid).filter(|(_, w)| **w != [0; 32]) {
            self.mark_words(pc, (space, start), *register, lanes, invalid);
        }
    }

    fn store_fragment(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, access: &FragmentAccess) {
        let Some((space, start, stride)) = self.matrix_start(cx, pc, lanes, access) else { return };
        let bytes = access.fragment.element_bits() / 8;
        let words = self.words(&access.registers);
        for (first, count, addresses) in Self::parts(access, start, stride) {
            let size = (count * bytes) as u32;
            let request = Request::write(pc, size).within(&access.address);
            let good = self.check(cx, space, &addresses, lanes, &request);
            let (register, shift) = access.fragment.position(first);
            for_lanes(good, |lane| {
                let mut value = u64::from(words[register][lane]) >> shift;
                if size == 8 {
                    value |= u64::from(words[register + 1][lane]) << 32;
                }
                self.put(cx, space, addresses[lane], &value.to_le_bytes()[..size as usize], lane);
                if let Some(register) = access.registers.get(register).filter(|_| self.validity.is_tracking())
                {
                    let place = (space, addresses[lane]);
                    self.store_validity(cx, pc, place, register, shift / 8, size.min(4), lane);
                }
            });
        }
    }

    /// Shared addresses of the rows; generic ones must lie in shared memory and become so.
    fn rows(&self, address: &Address) -> [u64; 32] {
        if address.space == Space::Shared {
            return self.addresses(address);
        }
        let (mut rows, spaces) = self.located(address, u32::MAX);
        for (_, lanes) in spaces.filter(|(space, _)| *space != Space::Shared) {
            // Anything outside shared memory is out of its bounds, and reported so.
            for_lanes(lanes, |lane| rows[lane] = u64::from(u32::MAX) & !15);
        }
        rows
    }

    /// Lane 8·m + r names row r of matrix m; lane l receives elements 2·(l mod 4) and +1 of row l / 4.
    fn load_matrix(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lanes: u32,
        registers: &[u32],
        address: &Address,
        transposed: bool,
    ) {
        let rows = self.rows(address);
        let naming = (((1u64 << (8 * registers.len())) - 1) as u32) & lanes;
        let request = Request::read(pc, 16).moving().within(address);
        // Bounds are the naming lane's, the reads are those of the lanes that receive the row.
        let good = self.check_bounds(cx, Space::Shared, &rows, naming, &request);
        let unwritten = self.unwritten;
        let receivers = |lane: usize| if transposed { lanes } else { (0xf << (4 * (lane % 8))) & lanes };
        self.order_together(cx, &rows, good, receivers, &request);
        for (m, register) in registers.iter().enumerate() {
            let here = good >> (8 * m) & 0xff;
            let to = &mut self.regs.b32[*register as usize];
            let is_plain = lanes == u32::MAX && here == 0xff && !transposed;
            if !(is_plain && load_rows(&cx.shared.data, &rows[8 * m..], to)) {
                let mut tile = [0u32; 32];
                for_lanes(here, |r| {
                    let row = self.bytes(cx, Space::Shared, rows[8 * m + r], 16, 8 * m + r);
                    if let Some(raw) = row.first_chunk() {
                        tile[4 * r..4 * r + 4].copy_from_slice(&words_of(raw));
                    }
                });
                let tile = if transposed { transfer::transpose(&tile) } else { tile };
                blend(&mut self.regs.b32[*register as usize], &tile, lanes);
            }
            let register = Register { bank: Bank::B32, index: *register, bits: 32 };
            self.clear_validity(&[register], lanes);
            let spoilt = unwritten & 0xff << (8 * m);
            if spoilt != 0 {
                self.load_matrix_validity(cx, pc, lanes, register, &rows, spoilt, transposed);
            }
        }
    }

    /// What nothing wrote of a matrix of an `ldmatrix`, brought to the lanes as its words are; `spoilt`: the lanes that name such rows.
    fn load_matrix_validity(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lanes: u32,
        register: Register,
        rows: &[u64; 32],
        spoilt: u32,
        transposed: bool,
    ) {
        let mut invalid = [0u32; 32];
        for_lanes(spoilt, |lane| {
            let r = lane % 8;
            let flags = self.flags(cx, (Space::Shared, rows[lane]), 16, lane);
            for (word, flags) in invalid[4 * r..4 * r + 4].iter_mut().zip(flags.chunks_exact(4)) {
                let byte = |(k, flag): (usize, &u8)| u32::from(*flag != 1) * (0xff << (8 * k));
                *word = flags.iter().enumerate().map(byte).sum();
            }
        });
        let invalid = if transposed { transfer::transpose(&invalid) } else { invalid };
        let first = rows[spoilt.trailing_zeros() as usize & 31];
        self.mark_words(pc, (Space::Shared, first), register, lanes, &invalid);
    }

    fn clear_validity(&mut self, registers: &[Register], lanes: u32) {
        if self.validity.is_tracking() {
            registers.iter().for_each(|register| self.validity.clear(register, lanes));
        }
    }

    fn store_matrix(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lanes: u32,
        registers: &[u32],
        address: &Address,
        transposed: bool,
    ) {
        let rows = self.rows(address);
        let naming = (((1u64 << (8 * registers.len())) - 1) as u32) & lanes;
        let request = Request::write(pc, 16).within(address);
        let good = self.check_bounds(cx, Space::Shared, &rows, naming, &request);
        let part = Request::write(pc, 4);
        for (m, register) in registers.iter().enumerate() {
            let tile = self.regs.b32[*register as usize];
            let tile = if transposed { transfer::transpose(&tile) } else { tile };
            // Lane 4·r + k holds the k-th word of row r.
            let at: [u64; 32] = std::array::from_fn(|lane| rows[8 * m + lane / 4] + 4 * (lane as u64 % 4));
            let mut holders = 0;
            for_lanes(good >> (8 * m) & 0xff, |row| holders |= 0xf << (4 * row));
            self.check_order(cx, Space::Shared, &at, holders, &part);
            for_lanes(holders, |lane| self.put(cx, Space::Shared, at[lane], &tile[lane].to_le_bytes(), lane));
            if self.validity.is_tracking() {
                let invalid = self.invalid_words(*register);
                let invalid = if transposed { transfer::transpose(&invalid) } else { invalid };
                for_lanes(holders, |lane| {
                    for (k, flag) in self.flags(cx, (Space::Shared, at[lane]), 4, lane).iter_mut().enumerate()
                    {
                        if invalid[lane] >> (8 * k) & 0xff != 0 {
                            *flag = STORED_INVALID;
                        }
                    }
                });
            }
        }
    }
}

/// Eight rows of shared memory, four lanes to a row; `false` if one is not there.
fn load_rows(data: &[u8], rows: &[u64], to: &mut Lanes) -> bool {
    to.as_chunks_mut().0.iter_mut().zip(rows).all(|(words, row)| {
        let raw = data.get(*row as usize..).and_then(|raw| raw.first_chunk());
        raw.inspect(|raw| *words = words_of(raw)).is_some()
    })
}

/// The words of a row.
#[inline(always)]
fn words_of(raw: &[u8; 16]) -> [u32; 4] {
    let word = |k: usize| u32::from_le_bytes([raw[k], raw[k + 1], raw[k + 2], raw[k + 3]]);
    [word(0), word(4), word(8), word(12)]
}
