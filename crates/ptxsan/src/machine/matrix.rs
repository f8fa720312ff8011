//! `ldmatrix`, `stmatrix`, `movmatrix`: 8×8 matrices of 16-bit elements spread over a warp.

use super::access::{Bytes, Direction, MAX_BYTES, Request};
use super::run::Context;
use super::warp::Warp;
use crate::decode::{Address, CollectiveKind, Order};
use crate::parse::ast::Space;

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
                let out = transpose(&source);
                crate::decode::lanes::blend(&mut self.regs.b32[*d as usize], &out, lanes);
            }
            _ => {}
        }
    }

    /// Shared addresses of the rows; generic ones must lie in shared memory and become so.
    fn rows(&self, address: &Address) -> [u64; 32] {
        let mut addresses = [0; 32];
        self.by_space(address, u32::MAX, |space, found, lanes| {
            for lane in 0..32 {
                if lanes >> lane & 1 == 1 {
                    // Anything outside shared memory is out of its bounds, and reported so.
                    addresses[lane] = if space == Space::Shared { found[lane] } else { u64::from(u32::MAX) & !15 };
                }
            }
        });
        addresses
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
        let request = Request { pc, bytes: 16, direction: Direction::Read, order: Order::WEAK, agent_groups: false };
        // Bounds are the naming lane's, the reads are those of the lanes that receive the row.
        let good = self.check_quietly(cx, Space::Shared, &rows, naming, &request);
        for (m, register) in registers.iter().enumerate() {
            let mut tile = [0u32; 32];
            for r in 0..8 {
                let lane = 8 * m + r;
                if good >> lane & 1 == 0 {
                    continue;
                }
                let receivers = if transposed { u32::MAX } else { 0xf << (4 * r) };
                self.read_together(cx, rows[lane], receivers & lanes, &request);
                let mut data: Bytes = [0; MAX_BYTES];
                self.fetch(cx, Space::Shared, rows[lane], 16, lane, &mut data);
                for k in 0..4 {
                    tile[4 * r + k] = u32::from_le_bytes([data[4 * k], data[4 * k + 1], data[4 * k + 2], data[4 * k + 3]]);
                }
            }
            let tile = if transposed { transpose(&tile) } else { tile };
            crate::decode::lanes::blend(&mut self.regs.b32[*register as usize], &tile, lanes);
        }
    }

    /// A read of 16 bytes by several lanes: as one if they know the same, else one by one.
    fn read_together(&mut self, cx: &mut Context<'_, '_>, address: u64, lanes: u32, request: &Request) {
        if lanes == 0 || !cx.options.check_races {
            return;
        }
        let first = lanes.trailing_zeros() as usize;
        let alike = (first..32).all(|l| lanes >> l & 1 == 0 || std::rc::Rc::ptr_eq(&self.known[l], &self.known[first]));
        if alike {
            self.order_and_report(cx, Space::Shared, address, lanes, request);
        } else {
            super::run::for_lanes(lanes, |lane| {
                self.order_and_report(cx, Space::Shared, address, 1 << lane, request);
            });
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
        let request = Request { pc, bytes: 16, direction: Direction::Write, order: Order::WEAK, agent_groups: false };
        let good = self.check_quietly(cx, Space::Shared, &rows, naming, &request);
        let part = Request { bytes: 4, ..request };
        for (m, register) in registers.iter().enumerate() {
            let tile = self.regs.b32[*register as usize];
            let tile = if transposed { transpose(&tile) } else { tile };
            for r in 0..8 {
                let lane = 8 * m + r;
                if good >> lane & 1 == 0 {
                    continue;
                }
                for k in 0..4 {
                    let at = rows[lane] + 4 * k as u64;
                    self.order_and_report(cx, Space::Shared, at, 1 << (4 * r + k), &part);
                    self.put(cx, Space::Shared, at, &tile[4 * r + k].to_le_bytes(), 4 * r + k);
                }
            }
        }
    }
}

/// Transposes an 8×8 matrix of 16-bit elements held two to a lane.
fn transpose(source: &[u32; 32]) -> [u32; 32] {
    let element = |row: usize, column: usize| source[4 * row + column / 2] >> (16 * (column % 2)) & 0xffff;
    std::array::from_fn(|lane| {
        let (row, column) = (lane / 4, 2 * (lane % 4));
        element(column, row) | element(column + 1, row) << 16
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_twice_gives_the_matrix_back() {
        let m: [u32; 32] = std::array::from_fn(|i| (i as u32) << 17 | (i as u32 * 3 + 1));
        let t = transpose(&m);
        assert_ne!(t, m);
        assert_eq!(transpose(&t), m);
        // Element (0, 1) becomes element (1, 0).
        assert_eq!(t[4] & 0xffff, m[0] >> 16);
    }
}
