//! Who touched each byte last: FastTrack epochs per cell, cells as large as the accesses allow.
//!
//! (Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009: the last write
//! as one epoch; reads as one epoch, or several when they were not ordered among themselves.)

use super::clock::{Clock, Numbering, Proxy, Who};

/// Cells are kept in chunks of this many bytes, each with a cell size of its own.
const CHUNK_BYTES: usize = 256;
const CHUNK_SHIFT: u32 = CHUNK_BYTES.trailing_zeros();
/// Instruction numbers carry these marks in their upper bits.
pub(crate) const STRONG: u32 = 1 << 31;
pub(crate) const BLOCK_SCOPE: u32 = 1 << 30;
const PC_MASK: u32 = BLOCK_SCOPE - 1;
/// Readers of one cell that are remembered apart; beyond it the oldest is forgotten.
const MAX_READERS: usize = 64;

/// Readers: lanes of one warp (or their agents) at one time in one instruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Readers {
    base: u32,
    mask: u32,
    time: u32,
    pc: u32,
}

/// What is known of a cell.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    writer: u32,
    /// 0: never written.
    write_time: u32,
    write_pc: u32,
    readers: Readers,
    /// 1 + index of further readers.
    more: u32,
}

/// Cells of [`CHUNK_BYTES`] bytes.
struct Chunk {
    /// log2 of the bytes of a cell.
    shift: u32,
    cells: Vec<Cell>,
}

/// The cells of a region of memory.
#[derive(Default)]
pub(crate) struct Shadow {
    chunks: Vec<Option<Box<Chunk>>>,
    lists: Vec<Vec<Readers>>,
    free: Vec<u32>,
}

/// Who accesses, and what they know.
pub(crate) struct Accessor<'a> {
    pub(crate) numbering: Numbering,
    /// Identity of lane 0 of the warp, or of its agents for an asynchronous copy.
    pub(crate) base: u32,
    /// The lanes that access; more than one only if all know the same.
    pub(crate) mask: u32,
    pub(crate) time: u32,
    /// Instruction with [`STRONG`] and [`BLOCK_SCOPE`].
    pub(crate) pc: u32,
    pub(crate) known: &'a Clock,
    /// The one lane of `mask` and up to which group its copies are waited for; `None` for several lanes.
    pub(crate) alone: Option<(u32, u32)>,
    /// Identity of lane 0 of the warp and of its agents.
    pub(crate) lanes_base: u32,
    pub(crate) agents_base: u32,
    /// The access goes through the async proxy: what came before through the generic one must be fenced from it.
    pub(crate) proxy: Option<Proxy>,
    /// Earlier reads must be fenced as well as writes.
    pub(crate) fences_reads: bool,
}

/// Two accesses that were not ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Conflict {
    pub(crate) who: u32,
    pub(crate) pc: u32,
    pub(crate) is_write: bool,
    /// The other access is by another lane in the same instruction of the same warp.
    pub(crate) same_instruction: bool,
    /// They are ordered, but not across proxies.
    pub(crate) only_proxy: bool,
}

impl Accessor<'_> {
    #[inline(always)]
    fn ordered(&self, who: u32, time: u32) -> bool {
        self.happens_after(who, time) && (self.proxy.is_none() || self.is_fenced(who, time))
    }

    /// Whether who learns of this access also learns what came before it. Who waits for a copy on an mbarrier learns nothing of the
    /// thread that asked for it.
    fn passes_on(&self) -> bool {
        !matches!(self.numbering.who(self.base), Who::Mbarrier(_))
    }

    fn is_fenced(&self, who: u32, time: u32) -> bool {
        let Some(proxy) = self.proxy else { return true };
        self.numbering.is_async(who) || self.known.fenced(self.numbering, who, time, proxy)
    }

    #[inline(always)]
    fn happens_after(&self, who: u32, time: u32) -> bool {
        if let Some((lane, waited)) = self.alone {
            if who == self.lanes_base + lane {
                return true;
            }
            if who == self.agents_base + lane && waited >= time {
                return true;
            }
        }
        self.known.knows(self.numbering, who, time)
    }

    /// Strong operations do not race with each other, if each one's scope reaches the other.
    fn both_strong(&self, who: u32, pc: u32) -> bool {
        let both = self.pc & pc & STRONG != 0;
        let near = self.numbering.block_of(who) == self.numbering.block_of(self.base);
        both && (near || (self.pc | pc) & BLOCK_SCOPE == 0)
    }

    #[inline]
    fn all_ordered(&self, readers: &Readers) -> bool {
        if self.known.knows_all(self.numbering, readers.base, readers.mask, readers.time) {
            return true;
        }
        self.first_unordered(readers).is_none()
    }

    fn first_unordered(&self, readers: &Readers) -> Option<u32> {
        let mut rest = readers.mask;
        while rest != 0 {
            let who = readers.base + rest.trailing_zeros();
            rest &= rest - 1;
            let ordered = match self.fences_reads {
                true => self.ordered(who, readers.time),
                false => self.happens_after(who, readers.time),
            };
            if !ordered {
                return Some(who);
            }
        }
        None
    }
}

impl Shadow {
    pub(crate) fn new(bytes: usize) -> Self {
        let mut chunks = Vec::new();
        chunks.resize_with(bytes.div_ceil(CHUNK_BYTES), || None);
        Shadow { chunks, lists: Vec::new(), free: Vec::new() }
    }

    /// Records an access to `bytes` (a power of two up to 16) at `offset`, a multiple of them.
    #[inline]
    pub(crate) fn access(
        &mut self,
        offset: usize,
        bytes: u32,
        write: bool,
        by: &Accessor<'_>,
    ) -> Option<Conflict> {
        let size = bytes.trailing_zeros();
        let slot = offset >> CHUNK_SHIFT;
        let inside = (offset & (CHUNK_BYTES - 1)) as u32;
        let chunk = self.chunks.get_mut(slot)?;
        let chunk = chunk.get_or_insert_with(|| {
            Box::new(Chunk { shift: size, cells: vec![Cell::default(); CHUNK_BYTES >> size] })
        });
        if chunk.shift > size {
            refine(chunk, size, &mut self.lists, &mut self.free);
        }
        let first = inside >> chunk.shift;
        let last = (inside + bytes - 1) >> chunk.shift;
        let mut found = None;
        for cell in &mut chunk.cells[first as usize..=last as usize] {
            let conflict = if write {
                write_cell(cell, by, &mut self.lists, &mut self.free)
            } else {
                read_cell(cell, by, &mut self.lists, &mut self.free)
            };
            found = found.or(conflict);
        }
        found
    }

    /// Who made earlier accesses that one to these bytes would conflict with, and when.
    pub(crate) fn earlier(&self, offset: usize, bytes: u32, write: bool) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        let Some(Some(chunk)) = self.chunks.get(offset >> CHUNK_SHIFT) else { return found };
        let inside = offset & (CHUNK_BYTES - 1);
        let range = inside >> chunk.shift..=(inside + bytes as usize - 1) >> chunk.shift;
        for cell in &chunk.cells[range] {
            if cell.write_time != 0 {
                found.push((cell.writer, cell.write_time));
            }
            if write {
                let more = cell.more.checked_sub(1).map(|list| &self.lists[list as usize]);
                for readers in more.into_iter().flatten().chain([&cell.readers]) {
                    let lanes = (0..32).filter(|lane| readers.mask >> lane & 1 == 1);
                    found.extend(lanes.map(|lane| (readers.base + lane, readers.time)));
                }
            }
        }
        found
    }

    /// Every cell that was touched: offset, bytes, the last writer and a reader with their instructions.
    pub(crate) fn touched(&self) -> impl Iterator<Item = Touched> + '_ {
        self.chunks.iter().enumerate().filter_map(|(i, c)| c.as_ref().map(|c| (i, c))).flat_map(
            |(i, chunk)| {
                chunk.cells.iter().enumerate().filter_map(move |(k, cell)| {
                    let write = (cell.write_time != 0).then_some((cell.writer, cell.write_pc & PC_MASK));
                    let read = (cell.readers.mask != 0).then_some((
                        cell.readers.base + cell.readers.mask.trailing_zeros(),
                        cell.readers.pc & PC_MASK,
                    ));
                    (write.is_some() || read.is_some()).then_some(Touched {
                        offset: (i * CHUNK_BYTES + (k << chunk.shift)) as u32,
                        bytes: 1 << chunk.shift,
                        write,
                        read,
                    })
                })
            },
        )
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

/// Splits a chunk's cells: each part inherits the whole cell's history.
fn refine(chunk: &mut Chunk, shift: u32, lists: &mut Vec<Vec<Readers>>, free: &mut Vec<u32>) {
    let parts = 1usize << (chunk.shift - shift);
    let mut cells = Vec::with_capacity(chunk.cells.len() * parts);
    for cell in &chunk.cells {
        for part in 0..parts {
            let mut copy = *cell;
            if part > 0 && cell.more != 0 {
                let list = lists[cell.more as usize - 1].clone();
                copy.more = new_list(lists, free, &list);
            }
            cells.push(copy);
        }
    }
    chunk.cells = cells;
    chunk.shift = shift;
}

/// Lists that were given up keep their memory for the next cell.
fn new_list(lists: &mut Vec<Vec<Readers>>, free: &mut Vec<u32>, items: &[Readers]) -> u32 {
    match free.pop() {
        Some(index) => {
            lists[index as usize].extend_from_slice(items);
            index + 1
        }
        None => {
            lists.push(items.to_vec());
            lists.len() as u32
        }
    }
}

#[inline(always)]
fn against_write(cell: &Cell, by: &Accessor<'_>) -> Option<Conflict> {
    if cell.write_time == 0
        || by.ordered(cell.writer, cell.write_time)
        || by.both_strong(cell.writer, cell.write_pc)
    {
        return None;
    }
    let lane = cell.writer.wrapping_sub(by.base);
    let same_instruction = lane < 32 && cell.write_pc == by.pc && cell.write_time == by.time;
    let only_proxy = by.happens_after(cell.writer, cell.write_time);
    Some(Conflict {
        who: cell.writer,
        pc: cell.write_pc & PC_MASK,
        is_write: true,
        same_instruction,
        only_proxy,
    })
}

#[inline]
fn read_cell(
    cell: &mut Cell,
    by: &Accessor<'_>,
    lists: &mut Vec<Vec<Readers>>,
    free: &mut Vec<u32>,
) -> Option<Conflict> {
    let conflict = against_write(cell, by);
    let readers = &mut cell.readers;
    if readers.base == by.base && readers.time == by.time && readers.pc == by.pc && readers.mask != 0 {
        readers.mask |= by.mask;
        return conflict;
    }
    let mine = Readers { base: by.base, mask: by.mask, time: by.time, pc: by.pc };
    if readers.mask == 0 || by.passes_on() && by.all_ordered(readers) {
        // A write that is not ordered after the old reads is not ordered after this one either.
        *readers = mine;
        return conflict;
    }
    if cell.more == 0 {
        cell.more = new_list(lists, free, &[mine]);
        return conflict;
    }
    let list = &mut lists[cell.more as usize - 1];
    match list.iter_mut().find(|r| r.base == by.base && r.time == by.time && r.pc == by.pc) {
        Some(r) => r.mask |= by.mask,
        None => {
            if by.passes_on() {
                list.retain(|r| !by.all_ordered(r));
            }
            if list.len() >= MAX_READERS {
                list.remove(0);
            }
            list.push(mine);
        }
    }
    conflict
}

#[inline]
fn write_cell(
    cell: &mut Cell,
    by: &Accessor<'_>,
    lists: &mut [Vec<Readers>],
    free: &mut Vec<u32>,
) -> Option<Conflict> {
    let mut conflict = against_write(cell, by);
    let check = |readers: &Readers| -> Option<Conflict> {
        let is_known = || by.known.knows_all(by.numbering, readers.base, readers.mask, readers.time);
        if readers.mask == 0 || !by.fences_reads && is_known() {
            return None;
        }
        let who = by.first_unordered(readers)?;
        if by.both_strong(who, readers.pc) {
            return None;
        }
        let only_proxy = by.happens_after(who, readers.time);
        Some(Conflict { who, pc: readers.pc & PC_MASK, is_write: false, same_instruction: false, only_proxy })
    };
    if conflict.is_none() {
        conflict = check(&cell.readers);
    }
    if cell.more != 0 {
        let index = cell.more - 1;
        if conflict.is_none() {
            conflict = lists[index as usize].iter().find_map(check);
        }
        lists[index as usize].clear();
        free.push(index);
        cell.more = 0;
    }
    cell.readers.mask = 0;
    cell.writer = by.base + by.mask.trailing_zeros();
    cell.write_time = by.time;
    cell.write_pc = by.pc;
    conflict
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(known: &Clock, lane: u32, time: u32, pc: u32) -> Accessor<'_> {
        let numbering = Numbering::new(64, false);
        let base = lane / 32 * 32;
        Accessor {
            numbering,
            base,
            mask: 1 << (lane % 32),
            time,
            pc,
            known,
            alone: Some((lane % 32, 0)),
            lanes_base: base,
            agents_base: base + 64,
            proxy: None,
            fences_reads: false,
        }
    }

    #[test]
    fn unordered_write_then_read_conflicts_and_ordered_does_not() {
        let numbering = Numbering::new(64, false);
        let fresh = Clock::new(numbering, 0, 64);
        let mut shadow = Shadow::new(1024);
        assert_eq!(shadow.access(16, 4, true, &by(&fresh, 0, 1, 7)), None);
        assert_eq!(shadow.access(16, 4, false, &by(&fresh, 0, 1, 8)), None, "own write");
        let conflict = shadow.access(16, 4, false, &by(&fresh, 40, 1, 9)).unwrap();
        assert_eq!((conflict.who, conflict.pc, conflict.is_write), (0, 7, true));
        let mut informed = fresh.clone();
        informed.raise(0, 1);
        informed.raise(40, 1);
        informed.settle();
        assert_eq!(shadow.access(16, 4, true, &by(&informed, 41, 1, 10)), None);
    }

    #[test]
    fn all_unordered_readers_are_remembered() {
        let numbering = Numbering::new(64, false);
        let fresh = Clock::new(numbering, 0, 64);
        let mut shadow = Shadow::new(1024);
        assert_eq!(shadow.access(0, 4, false, &by(&fresh, 1, 1, 7)), None);
        assert_eq!(shadow.access(0, 4, false, &by(&fresh, 33, 1, 8)), None);
        let mut knows_first = fresh.clone();
        knows_first.raise(1, 1);
        knows_first.settle();
        let conflict = shadow.access(0, 4, true, &by(&knows_first, 2, 1, 9)).unwrap();
        assert_eq!((conflict.who, conflict.pc, conflict.is_write), (33, 8, false));
    }

    #[test]
    fn halves_of_a_word_are_apart_and_history_survives_refinement() {
        let numbering = Numbering::new(64, false);
        let fresh = Clock::new(numbering, 0, 64);
        let mut shadow = Shadow::new(1024);
        assert_eq!(shadow.access(0, 16, true, &by(&fresh, 0, 1, 7)), None);
        assert_eq!(shadow.access(18, 2, true, &by(&fresh, 1, 1, 8)), None);
        assert_eq!(shadow.access(16, 2, true, &by(&fresh, 2, 1, 8)), None);
        assert!(shadow.access(14, 2, false, &by(&fresh, 3, 1, 9)).is_some());
        assert!(shadow.access(16, 4, false, &by(&fresh, 1, 1, 9)).is_some());
    }
}
