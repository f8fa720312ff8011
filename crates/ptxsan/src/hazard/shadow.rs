//! Who touched each byte last: FastTrack epochs per cell, cells as large as the accesses allow.
//!
//! (Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009: the last write
//! as one epoch; reads as one epoch, or several when they were not ordered among themselves.)
//!
//! Strong accesses (volatile, relaxed, atomic) do not race with each other, so a strong write does not stand for the accesses
//! before it as a plain one does: it is remembered beside them, as reads are, until a plain write that conflicts with all of them.

use super::clock::{Clock, Numbering, Proxy, Who};

/// Cells are kept in chunks of this many bytes, each with a cell size of its own.
const CHUNK_BYTES: usize = 256;
const CHUNK_SHIFT: u32 = CHUNK_BYTES.trailing_zeros();
/// Instruction numbers carry these marks in their upper bits: a strong access, one whose scope is its block,
pub(crate) const STRONG: u32 = 1 << 31;
pub(crate) const BLOCK_SCOPE: u32 = 1 << 30;
/// a strong one that wrote,
const WROTE: u32 = 1 << 29;
/// a read-modify-write, a load that goes through the read-only cache, a store of what was made from a load of the same place.
pub(crate) const ATOMIC: u32 = 1 << 28;
pub(crate) const NON_COHERENT: u32 = 1 << 27;
pub(crate) const UPDATE: u32 = 1 << 26;
const PC_MASK: u32 = UPDATE - 1;
/// A list of accesses as long as this is looked through for those that need not be remembered.
const PRUNE_AT: usize = 16;

/// Reads and strong writes: lanes of one warp (or their agents) at one time in one instruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Access {
    base: u32,
    mask: u32,
    time: u32,
    pc: u32,
}

impl Access {
    fn wrote(&self) -> bool {
        self.pc & WROTE != 0
    }

    /// An atomic that no other atomic races with.
    fn is_far_atomic(&self) -> bool {
        self.pc & (STRONG | ATOMIC | BLOCK_SCOPE) == STRONG | ATOMIC
    }

    /// Whether whoever conflicts with this access conflicts with `later` as well, if that comes after it.
    #[inline]
    fn is_covered_by(&self, later: u32) -> bool {
        let (old, new) = (self.pc, later);
        let writes = old & WROTE == 0 || new & WROTE != 0;
        let is_as_weak =
            new & STRONG == 0 || old & STRONG != 0 && (new & BLOCK_SCOPE != 0 || old & BLOCK_SCOPE == 0);
        writes && is_as_weak && (old & NON_COHERENT == 0 || new & NON_COHERENT != 0)
    }
}

/// Accesses of one cell beyond the first, by ascending `base`.
#[derive(Debug, Clone, Default)]
struct List {
    items: Vec<Access>,
    /// Whether one of them wrote, and whether all are atomics of the whole device.
    wrote: bool,
    all_atomic: bool,
    prune_at: usize,
}

/// What is known of a cell.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    /// The last plain write.
    writer: u32,
    /// 0: never written.
    write_time: u32,
    write_pc: u32,
    /// A read or a strong write since.
    first: Access,
    /// 1 + index of further ones.
    more: u32,
}

/// Cells of [`CHUNK_BYTES`] bytes.
struct Chunk {
    /// log2 of the bytes of a cell.
    shift: u32,
    cells: Vec<Cell>,
}

/// Lists that are in use, and those that were given up and keep their memory for the next cell.
#[derive(Default)]
struct Lists {
    all: Vec<List>,
    free: Vec<u32>,
}

impl Lists {
    fn of(&self, more: u32) -> Option<&List> {
        more.checked_sub(1).map(|index| &self.all[index as usize])
    }

    /// A list of one access.
    fn start(&mut self, access: Access) -> u32 {
        let index = self.unused();
        let list = &mut self.all[index as usize];
        list.items.push(access);
        (list.wrote, list.all_atomic, list.prune_at) = (access.wrote(), access.is_far_atomic(), PRUNE_AT);
        index + 1
    }

    /// Another list like one that is in use.
    fn copy(&mut self, more: u32) -> u32 {
        let Some(list) = self.of(more).cloned() else { return 0 };
        let index = self.unused();
        self.all[index as usize] = list;
        index + 1
    }

    fn unused(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.all.push(List::default());
            self.all.len() as u32 - 1
        })
    }

    fn give_up(&mut self, more: &mut u32) {
        if let Some(index) = more.checked_sub(1) {
            self.all[index as usize].items.clear();
            self.free.push(index);
            *more = 0;
        }
    }
}

impl List {
    /// Adds an access; those that it covers are forgotten, nothing else ever is.
    fn remember(&mut self, mine: Access, by: &Accessor<'_>) {
        let mut at = self.items.partition_point(|a| a.base < mine.base);
        while let Some(old) = self.items.get_mut(at).filter(|a| a.base == mine.base) {
            if old.time == mine.time && old.pc == mine.pc {
                old.mask |= mine.mask;
                return;
            }
            if old.is_covered_by(mine.pc) {
                old.mask &= !mine.mask;
                if old.mask == 0 {
                    self.items.remove(at);
                    continue;
                }
            }
            at += 1;
        }
        if self.items.len() >= self.prune_at {
            if by.passes_on() {
                self.items.retain(|old| !(old.is_covered_by(mine.pc) && by.all_ordered(old)));
            }
            self.prune_at = PRUNE_AT.max(2 * self.items.len());
            at = self.items.partition_point(|a| a.base <= mine.base);
        }
        self.items.insert(at, mine);
        self.wrote |= mine.wrote();
        self.all_atomic &= mine.is_far_atomic();
    }
}

/// The cells of a region of memory.
#[derive(Default)]
pub(crate) struct Shadow {
    chunks: Vec<Option<Box<Chunk>>>,
    lists: Lists,
}

/// Who accesses, and what they know.
pub(crate) struct Accessor<'a> {
    pub(crate) numbering: Numbering,
    /// Identity of lane 0 of the warp, or of its agents for an asynchronous copy.
    pub(crate) base: u32,
    /// The lanes that access; more than one only if all know the same.
    pub(crate) mask: u32,
    pub(crate) time: u32,
    /// Instruction with its marks: [`STRONG`] and the others.
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
    pub(crate) time: u32,
    pub(crate) pc: u32,
    pub(crate) is_write: bool,
    /// The other access is by another lane in the same instruction of the same warp.
    pub(crate) same_instruction: bool,
    /// They are ordered, but not across proxies.
    pub(crate) only_proxy: bool,
    /// Both are strong: no race by the letter, but of a shape that is often a mistake.
    pub(crate) both_strong: bool,
    /// Both are parts of a load and a store of the same place.
    pub(crate) is_update: bool,
    /// Ordered or not: the other read through the read-only cache what is written now.
    pub(crate) non_coherent: bool,
}

/// The worst conflict of an access; and if that is with a write, one with a read as well.
pub(crate) type Found = [Option<Conflict>; 2];

/// Keeps the worse of two.
fn worse(a: Option<Conflict>, b: Option<Conflict>) -> Option<Conflict> {
    match (a, b) {
        (Some(x), Some(y)) if x.both_strong && !y.both_strong => Some(y),
        (Some(x), _) => Some(x),
        (None, other) => other,
    }
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
    #[inline]
    fn both_strong(&self, old: &Access) -> bool {
        let both = self.pc & old.pc & STRONG != 0;
        let near = || self.numbering.block_of(old.base) == self.numbering.block_of(self.base);
        both && ((self.pc | old.pc) & BLOCK_SCOPE == 0 || near())
    }

    #[inline]
    fn all_ordered(&self, readers: &Access) -> bool {
        if self.known.knows_all(self.numbering, readers.base, readers.mask, readers.time) {
            return true;
        }
        self.first_unordered(readers).is_none()
    }

    fn first_unordered(&self, readers: &Access) -> Option<u32> {
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
        Shadow { chunks, lists: Lists::default() }
    }

    /// Records an access to `bytes` (a power of two up to 16) at `offset`, a multiple of them.
    #[inline]
    pub(crate) fn access(&mut self, offset: usize, bytes: u32, write: bool, by: &Accessor<'_>) -> Found {
        let size = bytes.trailing_zeros();
        let slot = offset >> CHUNK_SHIFT;
        let inside = (offset & (CHUNK_BYTES - 1)) as u32;
        let mut found = [None; 2];
        let Some(chunk) = self.chunks.get_mut(slot) else { return found };
        let chunk = chunk.get_or_insert_with(|| {
            Box::new(Chunk { shift: size, cells: vec![Cell::default(); CHUNK_BYTES >> size] })
        });
        if chunk.shift > size {
            refine(chunk, size, &mut self.lists);
        }
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
            let more = self.lists.of(cell.more).map_or(&[][..], |list| &list.items);
            for access in more.iter().chain([&cell.first]).filter(|access| write || access.wrote()) {
                let lanes = (0..32).filter(|lane| access.mask >> lane & 1 == 1);
                found.extend(lanes.map(|lane| (access.base + lane, access.time)));
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
                    let read = (cell.first.mask != 0).then_some((
                        cell.first.base + cell.first.mask.trailing_zeros(),
                        cell.first.pc & PC_MASK,
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
fn refine(chunk: &mut Chunk, shift: u32, lists: &mut Lists) {
    let parts = 1usize << (chunk.shift - shift);
    let mut cells = Vec::with_capacity(chunk.cells.len() * parts);
    for cell in &chunk.cells {
        for part in 0..parts {
            let mut copy = *cell;
            if part > 0 {
                copy.more = lists.copy(cell.more);
            }
            cells.push(copy);
        }
    }
    chunk.cells = cells;
    chunk.shift = shift;
}

#[inline(always)]
fn against_write(cell: &Cell, by: &Accessor<'_>) -> Option<Conflict> {
    if cell.write_time == 0 || by.ordered(cell.writer, cell.write_time) {
        return None;
    }
    let lane = cell.writer.wrapping_sub(by.base);
    let same_instruction = lane < 32 && cell.write_pc == by.pc && cell.write_time == by.time;
    Some(Conflict {
        who: cell.writer,
        time: cell.write_time,
        pc: cell.write_pc & PC_MASK,
        is_write: true,
        same_instruction,
        only_proxy: by.happens_after(cell.writer, cell.write_time),
        both_strong: false,
        is_update: false,
        non_coherent: false,
    })
}

/// The conflict with an earlier read or strong write, if there is one.
#[inline]
fn against_access(old: &Access, by: &Accessor<'_>, write: bool) -> Option<Conflict> {
    if old.mask == 0 || !write && !old.wrote() {
        return None;
    }
    let both_strong = by.both_strong(old);
    let is_update = write && old.wrote() && (old.pc | by.pc) & UPDATE != 0;
    if both_strong && !is_update {
        // The usual case by far is two atomics, or a flag that is stored and polled.
        let is_plain = |pc: u32| pc & ATOMIC == 0;
        let same_warp = old.wrote() && old.base == by.base && is_plain(old.pc) && is_plain(by.pc);
        let is_read = !write && is_plain(by.pc);
        if !same_warp && !is_read {
            return None;
        }
    }
    let conflict = |who: u32| Conflict {
        who,
        time: old.time,
        pc: old.pc & PC_MASK,
        is_write: old.wrote(),
        same_instruction: false,
        only_proxy: by.happens_after(who, old.time),
        both_strong: false,
        is_update: false,
        non_coherent: false,
    };
    let is_known = || by.known.knows_all(by.numbering, old.base, old.mask, old.time);
    let unordered = if !by.fences_reads && is_known() { None } else { by.first_unordered(old) };
    let Some(who) = unordered else {
        if !write || old.pc & NON_COHERENT == 0 {
            return None;
        }
        let who = old.base + old.mask.trailing_zeros();
        return Some(Conflict { non_coherent: true, only_proxy: false, ..conflict(who) });
    };
    Some(Conflict { both_strong, is_update: both_strong && is_update, ..conflict(who) })
}

/// The worst conflict with the accesses since the last plain write.
#[inline]
fn against_accesses(cell: &Cell, by: &Accessor<'_>, lists: &Lists, write: bool) -> Option<Conflict> {
    let mut found = against_access(&cell.first, by, write);
    let is_atomic = by.pc & (STRONG | ATOMIC | BLOCK_SCOPE) == STRONG | ATOMIC;
    let matters = |list: &&List| (write || list.wrote) && !(is_atomic && list.all_atomic);
    if let Some(list) = lists.of(cell.more).filter(matters) {
        for old in &list.items {
            if found.is_some_and(|found| !found.both_strong) {
                break;
            }
            found = worse(found, against_access(old, by, write));
        }
    }
    found
}

/// Remembers a read or a strong write.
#[inline]
fn remember(cell: &mut Cell, mine: Access, by: &Accessor<'_>, lists: &mut Lists) {
    let first = &mut cell.first;
    if first.base == by.base && first.time == by.time && first.pc == mine.pc && first.mask != 0 {
        first.mask |= by.mask;
        return;
    }
    if first.mask == 0 {
        *first = mine;
        return;
    }
    if first.is_covered_by(mine.pc) {
        if first.base == mine.base {
            first.mask &= !mine.mask;
        }
        // A write that is not ordered after the old reads is not ordered after this one either.
        if first.mask == 0 || by.passes_on() && by.all_ordered(first) {
            *first = mine;
            return;
        }
    }
    match cell.more.checked_sub(1) {
        None => cell.more = lists.start(mine),
        Some(index) => lists.all[index as usize].remember(mine, by),
    }
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
    let is_written = || cell.first.wrote() || lists.of(cell.more).is_some_and(|list| list.wrote);
    if conflict.is_none() && is_written() {
        conflict = against_accesses(cell, by, lists, false);
    }
    let mine = Access { base: by.base, mask: by.mask, time: by.time, pc: by.pc };
    remember(cell, mine, by, lists);
    conflict
}

#[inline]
fn write_cell(cell: &mut Cell, by: &Accessor<'_>, lists: &mut Lists) -> Found {
    let with_write = against_write(cell, by);
    let is_read = cell.first.mask != 0 || cell.more != 0;
    let with_access = if is_read { against_accesses(cell, by, lists, true) } else { None };
    if by.pc & STRONG != 0 {
        let mine = Access { base: by.base, mask: by.mask, time: by.time, pc: by.pc | WROTE };
        remember(cell, mine, by, lists);
    } else {
        lists.give_up(&mut cell.more);
        cell.first.mask = 0;
        cell.writer = by.base + by.mask.trailing_zeros();
        cell.write_time = by.time;
        cell.write_pc = by.pc;
    }
    match with_write {
        Some(_) => [with_write, with_access],
        None => [with_access, None],
    }
}

#[cfg(test)]
mod tests;
