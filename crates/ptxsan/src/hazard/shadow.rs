//! Shadow memory: FastTrack epochs per cell, cells as large as the accesses allow.
//!
//! (Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009: the last write
//! as one epoch; reads as one epoch, or several when they were not ordered among themselves.)
//!
//! Strong accesses (volatile, relaxed, atomic) do not race with each other, so a strong write does not stand for the accesses
//! before it as a plain one does: it is remembered beside them, as reads are, until a plain write that conflicts with all of them.

use super::accessor::{Accessor, Conflict, Found, against_accesses, against_write, worse};
use super::chunk::{CHUNK_BYTES, CHUNK_SHIFT, Chunk};
use super::history::{Access, Cell, Lists, NON_COHERENT, PC_MASK, SEEN, STRONG, WROTE, Write};
use std::ops::Range;

/// log2 of the bytes of the largest cell, and of the largest access that is recorded as one.
const LARGEST_SHIFT: u32 = 4;

/// The cells of a region of memory.
pub(crate) struct Shadow {
    chunks: Vec<Chunk>,
    lists: Lists,
}

impl Shadow {
    pub(crate) fn new(bytes: usize) -> Self {
        let mut chunks = Vec::new();
        chunks.resize_with(bytes.div_ceil(CHUNK_BYTES), Chunk::default);
        Shadow { chunks, lists: Lists::default() }
    }

    /// The chunk that an access of so many bytes goes to, ready for it.
    #[inline(always)]
    pub(super) fn chunk(&mut self, offset: usize, size: u32) -> Option<(&mut Chunk, &mut Lists)> {
        let chunk = self.chunks.get_mut(offset >> CHUNK_SHIFT)?;
        chunk.prepare(size, &mut self.lists);
        Some((chunk, &mut self.lists))
    }

    /// The generation of noted reads that has some of the chunk of these bytes.
    #[inline(always)]
    pub(super) fn noted(&self, offset: usize) -> Option<u32> {
        self.chunks.get(offset >> CHUNK_SHIFT).map(|chunk| chunk.noted)
    }

    /// Records an access to `bytes` (a power of two up to 16) at `offset`, a multiple of them.
    pub(crate) fn access(&mut self, offset: usize, bytes: u32, write: bool, by: &Accessor<'_>) -> Found {
        let mut found = [None; 2];
        let Some((chunk, lists)) = self.chunk(offset, bytes.trailing_zeros()) else {
            return found;
        };
        for at in chunk.range(offset, bytes).into_iter().flatten() {
            let mut cell = chunk.cell(at);
            let conflict = if write {
                write_cell(&mut cell, by, lists)
            } else {
                [read_cell(&mut cell, by, lists), None]
            };
            chunk.set_cell(at, &cell, lists);
            if conflict[0].is_some() {
                found = [worse(found[0], conflict[0]), worse(found[1], conflict[1])];
            }
        }
        found
    }

    /// Does what [`Shadow::access`] does if the access is not strong and conflicts with nothing, as nearly all do. Otherwise nothing
    /// is recorded, and the answer is no. There may be more bytes, as many parts of 16, up to the next multiple of [`CHUNK_BYTES`].
    #[inline]
    pub(crate) fn pass(&mut self, offset: usize, bytes: u32, write: bool, by: &Accessor<'_>) -> bool {
        let size = bytes.trailing_zeros().min(LARGEST_SHIFT);
        let Some((chunk, lists)) = self.chunk(offset, size) else { return false };
        let Some(range) = chunk.range(offset, bytes) else { return false };
        if by.pc & STRONG != 0 {
            return false;
        }
        let is_free = match write {
            true => chunk.can_write(range.clone(), by, lists),
            false => chunk.can_read(range.clone(), by, lists),
        };
        if is_free {
            match write {
                true => chunk.write(range, by, lists),
                false => chunk.remember(range, by.access(), by, lists),
            }
        }
        is_free
    }

    /// Does what [`Shadow::pass`] does for each lane of a run, from the first on, until one conflicts; how many did not. `by` then
    /// describes the last of them.
    #[inline]
    pub(crate) fn pass_run(&mut self, run: Run<'_>, by: &mut Accessor<'_>) -> u32 {
        let shift = run.bytes.trailing_zeros();
        let Some((chunk, lists)) = self.chunk(run.offset, shift) else { return 0 };
        if by.pc & STRONG != 0 || chunk.range(run.offset, run.bytes * run.lanes.len() as u32).is_none() {
            return 0;
        }
        let first = (run.offset & (CHUNK_BYTES - 1)) >> chunk.shift;
        let each = 1 << (shift - chunk.shift);
        if each == 1 && run.is_write && chunk.write_again(first, &run, by) {
            return run.lanes.len() as u32;
        }
        // A cell for each lane, mostly.
        match each {
            1 => pass_cells(chunk, lists, first, 1, &run, by),
            each => pass_cells(chunk, lists, first, each, &run, by),
        }
    }

    /// Who made earlier accesses that one to these bytes would conflict with, and when.
    pub(crate) fn earlier(&self, offset: usize, bytes: u32, write: bool) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        let Some(chunk) = self.chunks.get(offset >> CHUNK_SHIFT).filter(|c| c.is_used) else {
            return found;
        };
        let inside = offset & (CHUNK_BYTES - 1);
        let range = inside >> chunk.shift..=(inside + bytes as usize - 1) >> chunk.shift;
        for cell in range.map(|at| chunk.cell(at)) {
            if cell.write.time != 0 {
                found.push((cell.write.who, cell.write.time));
            }
            let all = cell.near.all(&self.lists).iter().chain([&cell.first]);
            for access in all.filter(|access| write || access.wrote()) {
                let lanes = (0..32).filter(|lane| access.mask >> lane & 1 == 1);
                found.extend(lanes.map(|lane| (access.base + lane, access.time)));
            }
        }
        found
    }

    /// log2 of the bytes of the smallest cell that was touched.
    pub(crate) fn smallest(&self) -> Option<u32> {
        self.chunks.iter().filter(|chunk| chunk.is_used).map(|chunk| chunk.shift).min()
    }

    /// Whether something was ever written.
    pub(crate) fn is_written(&self) -> bool {
        self.chunks.iter().any(Chunk::is_written)
    }

    /// Every cell that was read: offset, bytes, and a reader with its instruction.
    #[inline(always)]
    pub(crate) fn for_each_read(&self, mut f: impl FnMut(u32, u32, u32, u32)) {
        for (i, chunk) in self.chunks.iter().enumerate() {
            for (k, first) in chunk.firsts().iter().enumerate().filter(|(_, first)| first.mask != 0) {
                let offset = (i * CHUNK_BYTES + (k << chunk.shift)) as u32;
                f(offset, 1 << chunk.shift, first.base + first.mask.trailing_zeros(), first.pc & PC_MASK);
            }
        }
    }

    /// Every cell that was touched: offset, bytes, the last writer and a reader with their instructions.
    pub(crate) fn touched(&self) -> impl Iterator<Item = Touched> + '_ {
        self.chunks.iter().enumerate().flat_map(|(i, chunk)| {
            (0..chunk.len()).filter_map(move |k| {
                let cell = chunk.cell(k);
                let write = (cell.write.time != 0).then_some((cell.write.who, cell.write.pc & PC_MASK));
                let read = (cell.first.mask != 0)
                    .then_some((cell.first.base + cell.first.mask.trailing_zeros(), cell.first.pc & PC_MASK));
                (write.is_some() || read.is_some()).then_some(Touched {
                    offset: (i * CHUNK_BYTES + (k << chunk.shift)) as u32,
                    bytes: 1 << chunk.shift,
                    write,
                    read,
                    saw: cell.write.saw(),
                })
            })
        })
    }
}

/// Accesses of as many bytes each, by lanes of a warp one after the other, that follow one another within a chunk.
pub(crate) struct Run<'w> {
    pub(crate) offset: usize,
    pub(crate) bytes: u32,
    pub(crate) is_write: bool,
    pub(crate) lanes: Range<usize>,
    /// Up to which group each lane's copies are waited for.
    pub(crate) waited: &'w [u32; 32],
    /// The time of each lane's access, where it is not the same for all.
    pub(crate) times: Option<&'w [u32; 32]>,
}

/// The accesses of a run, of so many cells each.
#[inline(always)]
fn pass_cells(
    chunk: &mut Chunk,
    lists: &mut Lists,
    first: usize,
    each: usize,
    run: &Run<'_>,
    by: &mut Accessor<'_>,
) -> u32 {
    for (done, lane) in run.lanes.clone().enumerate() {
        by.mask = 1 << lane;
        by.alone = Some((lane as u32, run.waited[lane & 31]));
        by.time = run.times.map_or(by.time, |times| times[lane & 31]);
        let cells = first + done * each..first + (done + 1) * each;
        let is_free = match run.is_write {
            true => chunk.can_write(cells.clone(), by, lists),
            false => chunk.can_read(cells.clone(), by, lists),
        };
        match (is_free, run.is_write) {
            (false, _) => return done as u32,
            (true, true) => chunk.write(cells, by, lists),
            (true, false) => chunk.remember(cells, by.access(), by, lists),
        }
    }
    run.lanes.len() as u32
}

/// A cell that was touched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Touched {
    pub(crate) offset: u32,
    pub(crate) bytes: u32,
    pub(crate) write: Option<(u32, u32)>,
    pub(crate) read: Option<(u32, u32)>,
    /// The place was read before that write.
    pub(crate) saw: bool,
}

fn remember(cell: &mut Cell, mine: Access, by: &Accessor<'_>, lists: &mut Lists) {
    if !cell.first.take(mine, by) {
        cell.near.remember(mine, by, lists);
    }
}

#[inline]
fn read_cell(cell: &mut Cell, by: &Accessor<'_>, lists: &mut Lists) -> Option<Conflict> {
    let mut conflict = against_write(cell, by);
    if conflict.is_none() && by.pc & NON_COHERENT != 0 && cell.write.time != 0 {
        conflict = Some(Conflict {
            who: cell.write.who,
            time: cell.write.time,
            pc: cell.write.pc & PC_MASK,
            is_write: true,
            same_instruction: false,
            only_proxy: false,
            both_strong: false,
            is_update: false,
            non_coherent: true,
        });
    }
    if conflict.is_none() && cell.wrote(lists) {
        conflict = against_accesses(cell, by, lists, false);
    }
    remember(cell, by.access(), by, lists);
    conflict
}

#[inline]
fn write_cell(cell: &mut Cell, by: &Accessor<'_>, lists: &mut Lists) -> Found {
    let with_write = against_write(cell, by);
    let is_read = cell.first.mask != 0 || !cell.near.is_empty();
    let with_access = if is_read { against_accesses(cell, by, lists, true) } else { None };
    if by.pc & STRONG != 0 {
        remember(cell, Access { pc: by.pc | WROTE, ..by.access() }, by, lists);
    } else {
        let seen = if is_read { SEEN } else { cell.write.pc & SEEN };
        cell.near.clear(lists);
        cell.first = Access::default();
        cell.write = Write { who: by.base + by.mask.trailing_zeros(), time: by.time, pc: by.pc | seen };
    }
    match with_write {
        Some(_) => [with_write, with_access],
        None => [with_access, None],
    }
}

#[cfg(test)]
mod tests;
