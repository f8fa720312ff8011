//! Shadow cells of 256 bytes of memory, in layers that are allocated when they are first needed.
//!
//! A tile that is written and read has its writes side by side, and nothing else; one that is only read has its readers so.

use super::accessor::Accessor;
use super::history::{Access, Cell, Lists, NON_COHERENT, Near, SEEN, Write};
use super::shadow::Run;
use std::ops::Range;

/// Cells are kept in chunks of this many bytes, each with a cell size of its own.
pub(crate) const CHUNK_BYTES: usize = 256;
pub(super) const CHUNK_SHIFT: u32 = CHUNK_BYTES.trailing_zeros();

/// Cells of [`CHUNK_BYTES`] bytes.
#[derive(Default)]
pub(super) struct Chunk {
    /// log2 of the bytes of a cell.
    pub(super) shift: u32,
    /// The generation of noted reads that has some of this chunk.
    pub(super) noted: u32,
    /// The round in which a thread that knows enough was last held against all writes, and whether it knows them; see
    /// [`super::read_log::SharedShadow`].
    asked: u32,
    is_known: bool,
    /// Something was accessed.
    pub(super) is_used: bool,
    /// A strong write may be among the accesses.
    has_strong: bool,
    writes: Box<[Write]>,
    firsts: Box<[Access]>,
    nears: Box<[Near]>,
}

/// A layer, made when it is first needed.
#[inline(always)]
fn made<T: Copy + Default>(layer: &mut Box<[T]>, shift: u32) -> &mut [T] {
    if layer.is_empty() {
        make(layer, shift);
    }
    layer
}

#[cold]
fn make<T: Copy + Default>(layer: &mut Box<[T]>, shift: u32) {
    *layer = vec![T::default(); CHUNK_BYTES >> shift].into_boxed_slice();
}

impl Chunk {
    /// Sets the size of cells, or splits those that are too large: each part inherits the whole cell's history.
    #[inline(always)]
    pub(super) fn prepare(&mut self, shift: u32, lists: &mut Lists) {
        if !self.is_used {
            self.is_used = true;
            self.shift = shift;
        } else if self.shift > shift {
            self.split(shift, lists);
        }
    }

    #[cold]
    fn split(&mut self, shift: u32, lists: &mut Lists) {
        let parts = 1usize << (self.shift - shift);
        fn split<T: Copy>(layer: &mut Box<[T]>, parts: usize, mut copy: impl FnMut(&T) -> T) {
            let mut split = Vec::with_capacity(layer.len() * parts);
            for item in layer.iter() {
                split.push(*item);
                split.extend((1..parts).map(|_| copy(item)));
            }
            *layer = split.into_boxed_slice();
        }
        split(&mut self.writes, parts, |write| *write);
        split(&mut self.firsts, parts, |first| *first);
        split(&mut self.nears, parts, |near| lists.copy(near));
        self.shift = shift;
    }

    /// The cells of some bytes, which must be whole ones; `None`: they go beyond the chunk.
    #[inline(always)]
    pub(super) fn range(&self, offset: usize, bytes: u32) -> Option<Range<usize>> {
        let inside = offset & (CHUNK_BYTES - 1);
        let is_in = inside + bytes as usize <= CHUNK_BYTES;
        is_in.then_some(inside >> self.shift..(inside + bytes as usize) >> self.shift)
    }

    pub(super) fn cell(&self, at: usize) -> Cell {
        Cell {
            write: self.writes.get(at).copied().unwrap_or_default(),
            first: self.firsts.get(at).copied().unwrap_or_default(),
            near: self.nears.get(at).copied().unwrap_or_default(),
        }
    }

    pub(super) fn set_cell(&mut self, at: usize, cell: &Cell, lists: &Lists) {
        self.has_strong |= cell.wrote(lists);
        self.asked = 0;
        if !self.writes.is_empty() || cell.write.time != 0 {
            made(&mut self.writes, self.shift)[at] = cell.write;
        }
        if !self.firsts.is_empty() || cell.first.mask != 0 {
            made(&mut self.firsts, self.shift)[at] = cell.first;
        }
        if !self.nears.is_empty() || !cell.near.is_empty() {
            made(&mut self.nears, self.shift)[at] = cell.near;
        }
    }

    /// The first of the accesses of each cell since its last plain write; none before the first access.
    pub(super) fn firsts(&self) -> &[Access] {
        &self.firsts
    }

    /// How many cells there are.
    pub(super) fn len(&self) -> usize {
        if self.is_used { CHUNK_BYTES >> self.shift } else { 0 }
    }

    /// Whether something was ever written.
    pub(super) fn is_written(&self) -> bool {
        !self.writes.is_empty() || self.has_strong
    }

    #[inline(always)]
    fn after_writes(&self, range: Range<usize>, by: &Accessor<'_>) -> bool {
        if self.writes.is_empty() {
            return true;
        }
        // One cell, mostly.
        for write in &self.writes[range] {
            if write.time != 0 && !by.ordered(write.who, write.time) {
                return false;
            }
        }
        true
    }

    /// Whether a plain write conflicts with nothing.
    #[inline(always)]
    pub(super) fn can_write(&self, range: Range<usize>, by: &Accessor<'_>, lists: &Lists) -> bool {
        let is_over = |old: &Access| {
            let is_ordered = || match by.fences_reads {
                true => by.first_unordered(old).is_none(),
                false => by.all_ordered(old),
            };
            old.mask == 0 || old.pc & NON_COHERENT == 0 && is_ordered()
        };
        self.after_writes(range.clone(), by)
            && (self.firsts.is_empty() || self.firsts[range.clone()].iter().all(is_over))
            && (self.nears.is_empty()
                || self.nears[range]
                    .iter()
                    .all(|near| near.is_empty() || near.all(lists).iter().all(is_over)))
    }

    /// Whether all that was written is known to who asks in this round, so that no plain read of theirs conflicts; asked once.
    #[inline(always)]
    pub(super) fn is_all_known(&mut self, round: u32, by: &Accessor<'_>) -> bool {
        if self.asked != round {
            self.asked = round;
            let knows = |write: &Write| write.time == 0 || by.knows(write.who, write.time);
            self.is_known = !self.has_strong && self.writes.iter().all(knows);
        }
        self.is_known
    }

    /// Whether a plain read conflicts with nothing.
    #[inline(always)]
    pub(super) fn can_read(&self, range: Range<usize>, by: &Accessor<'_>, lists: &Lists) -> bool {
        let is_marked = by.pc & NON_COHERENT != 0;
        if is_marked && !self.writes.is_empty() && self.writes[range.clone()].iter().any(|w| w.time != 0) {
            return false;
        }
        self.after_writes(range.clone(), by)
            && (!self.has_strong || !range.clone().any(|at| self.cell(at).wrote(lists)))
    }

    /// A plain write: what was before it matters no more.
    #[inline(always)]
    pub(super) fn write(&mut self, range: Range<usize>, by: &Accessor<'_>, lists: &mut Lists) {
        let write = Write { who: by.base + by.mask.trailing_zeros(), time: by.time, pc: by.pc };
        self.asked = 0;
        let cells = &mut made(&mut self.writes, self.shift)[range.clone()];
        cells.iter_mut().for_each(|cell| *cell = Write { pc: write.pc | cell.pc & SEEN, ..write });
        if !self.firsts.is_empty() {
            let firsts = &mut self.firsts[range.clone()];
            for (cell, _) in cells.iter_mut().zip(&*firsts).filter(|(_, first)| first.mask != 0) {
                cell.pc |= SEEN;
            }
            firsts.fill(Access::default());
        }
        if !self.nears.is_empty() {
            self.nears[range].iter_mut().for_each(|near| near.clear(lists));
        }
    }

    /// Writes of a run, a cell for each lane, if each was last written by its own lane, or by a copy of it that is waited for, or
    /// never, and nothing was read since: what a buffer that is filled again and again sees.
    #[inline(always)]
    pub(super) fn write_again(&mut self, first: usize, run: &Run<'_>, by: &Accessor<'_>) -> bool {
        let lanes = run.lanes.clone();
        if !self.firsts.is_empty() || !self.nears.is_empty() || by.proxy.is_some() || lanes.end > 32 {
            return false;
        }
        let Some(cells) = self.writes.get_mut(first..first + lanes.len()) else { return false };
        let waited = &run.waited[lanes.clone()];
        let is_own = |(lane, write): (usize, &Write)| {
            let is_copy = write.who == by.agents_base + lane as u32;
            write.time == 0
                || write.who == by.lanes_base + lane as u32
                || is_copy && waited[lane - lanes.start] >= write.time
        };
        if !lanes.clone().zip(&*cells).all(is_own) {
            return false;
        }
        self.asked = 0;
        for (lane, cell) in lanes.zip(cells) {
            let time = run.times.map_or(by.time, |times| times[lane]);
            *cell = Write { who: by.base + lane as u32, time, pc: by.pc | cell.pc & SEEN };
        }
        true
    }

    /// Remembers a read or a strong write.
    #[inline(always)]
    pub(super) fn remember(
        &mut self,
        range: Range<usize>,
        mine: Access,
        by: &Accessor<'_>,
        lists: &mut Lists,
    ) {
        if mine.wrote() {
            self.has_strong = true;
            self.asked = 0;
        }
        let firsts = made(&mut self.firsts, self.shift);
        for at in range {
            if !firsts[at].take(mine, by) {
                made(&mut self.nears, self.shift)[at].remember(mine, by, lists);
            }
        }
    }
}
