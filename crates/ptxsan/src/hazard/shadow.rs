//! Who touched each byte last: FastTrack epochs per cell, cells as large as the accesses allow.
//!
//! (Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009: the last write
//! as one epoch; reads as one epoch, or several when they were not ordered among themselves.)
//!
//! Strong accesses (volatile, relaxed, atomic) do not race with each other, so a strong write does not stand for the accesses
//! before it as a plain one does: it is remembered beside them, as reads are, until a plain write that conflicts with all of them.

use super::accessor::{Accessor, Conflict, Found, against_accesses, against_write, worse};
use super::history::{Access, Cell, Lists, NON_COHERENT, PC_MASK, STRONG, WROTE};

/// Cells are kept in chunks of this many bytes, each with a cell size of its own.
const CHUNK_BYTES: usize = 256;
const CHUNK_SHIFT: u32 = CHUNK_BYTES.trailing_zeros();

/// log2 of the bytes of the largest cell, and of the largest access that is recorded as one.
const LARGEST_SHIFT: u32 = 4;

/// Cells of [`CHUNK_BYTES`] bytes; none before the first access.
#[derive(Default)]
struct Chunk {
    /// log2 of the bytes of a cell.
    shift: u32,
    cells: Vec<Cell>,
}

/// The cells of a region of memory.
#[derive(Default)]
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

    /// Records an access to `bytes` (a power of two up to 16) at `offset`, a multiple of them.
    pub(crate) fn access(&mut self, offset: usize, bytes: u32, write: bool, by: &Accessor<'_>) -> Found {
        let size = bytes.trailing_zeros();
        let inside = (offset & (CHUNK_BYTES - 1)) as u32;
        let mut found = [None; 2];
        let Some(chunk) = self.chunks.get_mut(offset >> CHUNK_SHIFT) else { return found };
        prepare(chunk, size, &mut self.lists);
        let first = inside >> chunk.shift;
        let last = (inside + bytes - 1) >> chunk.shift;
        for cell in &mut chunk.cells[first as usize..=last as usize] {
            let conflict = if write {
                write_cell(cell, by, &mut self.lists)
            } else {
                [read_cell(cell, by, &mut self.lists), None]
            };
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
        let Some(chunk) = self.chunks.get_mut(offset >> CHUNK_SHIFT) else { return false };
        if chunk.shift > size || chunk.cells.is_empty() {
            prepare(chunk, size, &mut self.lists);
        }
        let first = (offset & (CHUNK_BYTES - 1)) >> chunk.shift;
        let count = bytes as usize >> chunk.shift;
        let Some(cells) = chunk.cells.get_mut(first..first + count) else { return false };
        let is_free = |cell: &Cell| match write {
            true => can_write(cell, by, &self.lists),
            false => can_read(cell, by, &self.lists),
        };
        if by.pc & STRONG != 0 || !cells.iter().all(is_free) {
            return false;
        }
        for cell in cells {
            match write {
                true => cell.write(by, &mut self.lists),
                false => cell.remember(by.access(), by, &mut self.lists),
            }
        }
        true
    }

    /// Who made earlier accesses that one to these bytes would conflict with, and when.
    pub(crate) fn earlier(&self, offset: usize, bytes: u32, write: bool) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        let Some(chunk) = self.chunks.get(offset >> CHUNK_SHIFT).filter(|c| !c.cells.is_empty()) else {
            return found;
        };
        let inside = offset & (CHUNK_BYTES - 1);
        let range = inside >> chunk.shift..=(inside + bytes as usize - 1) >> chunk.shift;
        for cell in &chunk.cells[range] {
            if cell.write_time != 0 {
                found.push((cell.writer, cell.write_time));
            }
            let all = cell.further(&self.lists).iter().chain([&cell.first]);
            for access in all.filter(|access| write || access.wrote()) {
                let lanes = (0..32).filter(|lane| access.mask >> lane & 1 == 1);
                found.extend(lanes.map(|lane| (access.base + lane, access.time)));
            }
        }
        found
    }

    /// log2 of the bytes of the smallest cell that was touched.
    pub(crate) fn smallest(&self) -> Option<u32> {
        self.chunks.iter().filter(|chunk| !chunk.cells.is_empty()).map(|chunk| chunk.shift).min()
    }

    /// Every cell that was touched: offset, bytes, the last writer and a reader with their instructions.
    pub(crate) fn touched(&self) -> impl Iterator<Item = Touched> + '_ {
        self.chunks.iter().enumerate().flat_map(|(i, chunk)| {
            chunk.cells.iter().enumerate().filter_map(move |(k, cell)| {
                let write = (cell.write_time != 0).then_some((cell.writer, cell.write_pc & PC_MASK));
                let read = (cell.first.mask != 0)
                    .then_some((cell.first.base + cell.first.mask.trailing_zeros(), cell.first.pc & PC_MASK));
                (write.is_some() || read.is_some()).then_some(Touched {
                    offset: (i * CHUNK_BYTES + (k << chunk.shift)) as u32,
                    bytes: 1 << chunk.shift,
                    write,
                    read,
                })
            })
        })
    }
}

/// A cell that was touched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Touched {
    pub(crate) offset: u32,
    pub(crate) bytes: u32,
    pub(crate) write: Option<(u32, u32)>,
    pub(crate) read: Option<(u32, u32)>,
}

/// Makes cells, or splits those that are too large: each part inherits the whole cell's history.
#[cold]
fn prepare(chunk: &mut Chunk, shift: u32, lists: &mut Lists) {
    if chunk.cells.is_empty() {
        *chunk = Chunk { shift, cells: vec![Cell::default(); CHUNK_BYTES >> shift] };
    }
    if chunk.shift <= shift {
        return;
    }
    let parts = 1usize << (chunk.shift - shift);
    let mut cells = Vec::with_capacity(chunk.cells.len() * parts);
    for cell in &chunk.cells {
        cells.push(*cell);
        cells.extend((1..parts).map(|_| lists.copy(cell)));
    }
    *chunk = Chunk { shift, cells };
}

/// Whether a plain write conflicts with nothing.
#[inline(always)]
fn can_write(cell: &Cell, by: &Accessor<'_>, lists: &Lists) -> bool {
    let is_over = |old: &Access| {
        let is_ordered = || match by.fences_reads {
            true => by.first_unordered(old).is_none(),
            false => by.all_ordered(old),
        };
        old.mask == 0 || old.pc & NON_COHERENT == 0 && is_ordered()
    };
    (cell.write_time == 0 || by.ordered(cell.writer, cell.write_time))
        && is_over(&cell.first)
        && (cell.is_alone() || cell.further(lists).iter().all(is_over))
}

/// Whether a plain read conflicts with nothing.
#[inline(always)]
fn can_read(cell: &Cell, by: &Accessor<'_>, lists: &Lists) -> bool {
    let is_written = cell.write_time != 0;
    !(is_written && (by.pc & NON_COHERENT != 0 || !by.ordered(cell.writer, cell.write_time)))
        && !cell.wrote(lists)
}

#[inline]
fn read_cell(cell: &mut Cell, by: &Accessor<'_>, lists: &mut Lists) -> Option<Conflict> {
    let mut conflict = against_write(cell, by);
    if conflict.is_none() && by.pc & NON_COHERENT != 0 && cell.write_time != 0 {
        conflict = Some(Conflict {
            who: cell.writer,
            time: cell.write_time,
            pc: cell.write_pc & PC_MASK,
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
    cell.remember(by.access(), by, lists);
    conflict
}

#[inline]
fn write_cell(cell: &mut Cell, by: &Accessor<'_>, lists: &mut Lists) -> Found {
    let with_write = against_write(cell, by);
    let is_read = cell.first.mask != 0 || !cell.is_alone();
    let with_access = if is_read { against_accesses(cell, by, lists, true) } else { None };
    if by.pc & STRONG != 0 {
        cell.remember(Access { pc: by.pc | WROTE, ..by.access() }, by, lists);
    } else {
        cell.write(by, lists);
    }
    match with_write {
        Some(_) => [with_write, with_access],
        None => [with_access, None],
    }
}

#[cfg(test)]
mod tests;
