//! Bulk copies on their way, and how they land.

use super::barrier_state::BarrierAt;
use crate::decode::Combine;
use crate::finding::Kind;
use crate::machine::access::little_endian;
use crate::machine::run::Context;
use crate::memory::PAGE_BYTES;
use crate::memory::view::Page;
use std::ops::Range;
use std::rc::Rc;

/// 16 bytes of shared memory, and which of them lie where in global memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Move {
    pub(super) shared: u32,
    pub(super) from: u8,
    pub(super) to: u8,
    pub(super) global: u64,
}

/// Which way a flight goes.
pub(crate) enum Course {
    /// To the shared memory of a block, whose barrier is told.
    ToShared { block: u32, barrier: BarrierAt, bytes: u32, phase: u32, outside: [u8; 4] },
    /// To global memory, as part of a thread's group.
    ToGlobal { group: u32, data: Option<Vec<[u8; 16]>>, combine: Option<Rc<Combine>> },
    /// From shared memory to that of another block.
    Across { to: BarrierAt, from: u32, barrier: BarrierAt, bytes: u32, phase: u32 },
    /// A value of a register to the shared memory of another block.
    Value { to: BarrierAt, data: Vec<u8>, barrier: BarrierAt, phase: u32, combine: Option<Combine> },
}

/// A bulk copy on its way.
pub(crate) struct BulkFlight {
    pub(crate) block: u32,
    pub(crate) thread: u32,
    pub(crate) pc: u32,
    pub(super) moves: Rc<[Move]>,
    pub(crate) course: Course,
}

impl Context<'_, '_> {
    /// Bytes of global memory that were checked, page by page: the page, where in it, and which of the bytes.
    fn global_bytes(&mut self, at: u64, bytes: usize, mut visit: impl FnMut(&mut Page, usize, Range<usize>)) {
        let mut done = 0;
        while done < bytes {
            let at = at + done as u64;
            let within = at as usize % PAGE_BYTES;
            let part = (bytes - done).min(PAGE_BYTES - within);
            let Some(page) = self.view.page(at) else { return };
            visit(self.view.at(page), within, done..done + part);
            done += part;
        }
    }

    fn read_global(&mut self, at: u64, out: &mut [u8]) {
        self.global_bytes(at, out.len(), |page, within, part| {
            let from = &page.data()[within..within + part.len()];
            out[part].copy_from_slice(from);
        });
    }

    fn write_global(&mut self, at: u64, from: &[u8]) {
        self.global_bytes(at, from.len(), |page, within, part| page.put(within, &from[part]));
    }

    fn shared_piece(&mut self, block: u32, offset: u32) -> [u8; 16] {
        let at = offset as usize;
        let memory = self.memory_of(block);
        memory.and_then(|m| m.data.get(at..at + 16)).and_then(|raw| raw.try_into().ok()).unwrap_or([0; 16])
    }

    fn put_shared(&mut self, block: u32, offset: u32, raw: &[u8; 16]) {
        let at = offset as usize;
        if let Some(memory) = self.memory_of(block)
            && let Some(place) = memory.data.get_mut(at..at + 16)
        {
            place.copy_from_slice(raw);
            memory.written[at..at + 16].fill(1);
        }
    }

    /// A copy happens.
    pub(in crate::machine) fn land_bulk(&mut self, flight: BulkFlight) {
        let BulkFlight { block, thread, pc, moves, course } = flight;
        match course {
            Course::ToShared { block: to, barrier, bytes, phase, outside } => {
                if self.has_exited(to) {
                    let rank = to - self.cluster_first;
                    self.log.add(Kind::ClusterLifetime, pc, None, (block, thread), || {
                        format!("a copy arrives in the block of rank {rank}, which has exited")
                    });
                    return;
                }
                for m in moves.iter() {
                    let mut raw: [u8; 16] = std::array::from_fn(|i| outside[i % 4]);
                    self.read_global(m.global, &mut raw[usize::from(m.from)..usize::from(m.to)]);
                    self.put_shared(to, m.shared, &raw);
                }
                self.complete_bytes(barrier, bytes, Some(phase), pc, thread);
            }
            Course::ToGlobal { data, combine, .. } => {
                let data = data.unwrap_or_else(|| self.source_of(block, &moves));
                for (m, raw) in moves.iter().zip(data) {
                    let mut part = raw[usize::from(m.from)..usize::from(m.to)].to_vec();
                    if let Some(combine) = &combine {
                        self.combine(m.global, &mut part, combine);
                    }
                    self.write_global(m.global, &part);
                }
            }
            Course::Value { to, data, barrier, phase, combine } => {
                self.put_value(to, &data, combine.as_ref());
                self.complete_bytes(barrier, data.len() as u32, Some(phase), pc, thread);
            }
            Course::Across { to, from, barrier, bytes, phase } => {
                for i in 0..bytes / 16 {
                    let raw = self.shared_piece(block, from + 16 * i);
                    self.put_shared(to.block, to.offset + 16 * i, &raw);
                }
                self.complete_bytes(barrier, bytes, Some(phase), pc, thread);
            }
        }
    }

    fn put_value(&mut self, to: BarrierAt, data: &[u8], combine: Option<&Combine>) {
        let at = to.offset as usize;
        let Some(memory) = self.memory_of(to.block) else { return };
        let Some(place) = memory.data.get_mut(at..at + data.len()) else { return };
        match combine {
            None => place.copy_from_slice(data),
            Some(combine) => {
                let width = combine.bytes as usize;
                for (old, new) in place.chunks_exact_mut(width).zip(data.chunks_exact(width)) {
                    let value = (combine.apply)(little_endian(old), little_endian(new));
                    old.copy_from_slice(&value.to_le_bytes()[..width]);
                }
            }
        }
        memory.written[at..at + data.len()].fill(1);
    }

    fn combine(&mut self, at: u64, part: &mut [u8], combine: &Combine) {
        let mut old = vec![0; part.len()];
        self.read_global(at, &mut old);
        let width = combine.bytes as usize;
        for (new, old) in part.chunks_exact_mut(width).zip(old.chunks_exact(width)) {
            let value = (combine.apply)(little_endian(old), little_endian(new));
            new.copy_from_slice(&value.to_le_bytes()[..width]);
        }
    }

    fn source_of(&mut self, block: u32, moves: &[Move]) -> Vec<[u8; 16]> {
        moves.iter().map(|m| self.shared_piece(block, m.shared)).collect()
    }

    /// Finishes a thread's groups up to `group`: all of them, or only their reading.
    pub(super) fn finish_groups(&mut self, thread: u32, group: u32, reads_only: bool) {
        let mut at = 0;
        while at < self.flights.len() {
            let flight = &self.flights[at];
            let is_meant = flight.block == self.block && flight.thread == thread;
            let is_in = matches!(&flight.course, Course::ToGlobal { group: g, .. } if *g <= group);
            if !(is_meant && is_in) {
                at += 1;
            } else if reads_only {
                let moves = Rc::clone(&self.flights[at].moves);
                let source = self.source_of(self.block, &moves);
                if let Course::ToGlobal { data, .. } = &mut self.flights[at].course {
                    data.get_or_insert(source);
                }
                at += 1;
            } else {
                let flight = self.flights.remove(at);
                self.land_bulk(flight);
            }
        }
    }
}
