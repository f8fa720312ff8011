//! The access history of a shadow cell: its last plain write, and the reads and strong writes since.

use super::accessor::Accessor;

/// Instruction numbers carry these marks in their upper bits: a strong access, one whose scope is its block,
pub(crate) const STRONG: u32 = 1 << 31;
pub(crate) const BLOCK_SCOPE: u32 = 1 << 30;
/// a strong one that wrote,
pub(super) const WROTE: u32 = 1 << 29;
/// a read-modify-write, a load that goes through the read-only cache, a store of what was made from a load of the same place,
pub(crate) const ATOMIC: u32 = 1 << 28;
pub(crate) const NON_COHERENT: u32 = 1 << 27;
pub(crate) const UPDATE: u32 = 1 << 26;
/// a read-modify-write whose result is used, a plain write of what its block had read before.
pub(crate) const ASKED: u32 = 1 << 25;
pub(super) const SEEN: u32 = 1 << 24;
pub(super) const PC_MASK: u32 = SEEN - 1;
/// A list of accesses as long as this is looked through for those that need not be remembered.
const PRUNE_AT: usize = 16;
/// Accesses that a cell holds itself; more of them are kept in a list.
const NEAR: usize = 2;

/// Reads and strong writes: lanes of one warp (or their agents) at one time in one instruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) base: u32,
    pub(super) mask: u32,
    pub(super) time: u32,
    pub(super) pc: u32,
}

impl Access {
    pub(super) fn wrote(&self) -> bool {
        self.pc & WROTE != 0
    }

    /// An atomic that no other atomic races with.
    pub(super) fn is_far_atomic(&self) -> bool {
        self.pc & (STRONG | ATOMIC | BLOCK_SCOPE) == STRONG | ATOMIC
    }

    /// Whether whoever conflicts with this access conflicts with `later` as well, if that comes after it.
    #[inline]
    pub(super) fn is_covered_by(&self, later: u32) -> bool {
        let (old, new) = (self.pc, later);
        let writes = old & WROTE == 0 || new & WROTE != 0;
        let is_as_weak =
            new & STRONG == 0 || old & STRONG != 0 && (new & BLOCK_SCOPE != 0 || old & BLOCK_SCOPE == 0);
        writes && is_as_weak && (old & NON_COHERENT == 0 || new & NON_COHERENT != 0)
    }
}

/// Accesses of one cell beyond the first, by ascending `base`, where there are many.
#[derive(Debug, Clone, Default)]
struct List {
    items: Vec<Access>,
    /// Whether one of them wrote, and whether all are atomics of the whole device.
    wrote: bool,
    all_atomic: bool,
    prune_at: usize,
}

/// What is known of a cell, brought together: [`super::chunk::Chunk`] keeps the parts of many cells side by side.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cell {
    pub(super) write: Write,
    /// A read or a strong write since.
    pub(super) first: Access,
    pub(super) near: Near,
}

/// The last plain write.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Write {
    pub(super) who: u32,
    /// 0: never written.
    pub(super) time: u32,
    pub(super) pc: u32,
}

impl Write {
    /// Whether the place was read before, or what is stored made from it.
    pub(super) fn saw(&self) -> bool {
        self.pc & (SEEN | UPDATE) != 0
    }
}

/// Accesses beyond the first.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Near {
    /// By ascending `base`, as long as there is room.
    items: [Access; NEAR],
    /// How many there are; beyond [`NEAR`]: the list of them has the index `more - NEAR - 1`.
    more: u32,
}

/// Lists that are in use, and those that were given up and keep their memory for the next cell.
#[derive(Default)]
pub(super) struct Lists {
    all: Vec<List>,
    free: Vec<u32>,
}

impl Lists {
    fn index(more: u32) -> Option<usize> {
        (more as usize).checked_sub(NEAR + 1)
    }

    /// A list of the accesses that a cell has no room for; what the cell's `more` is then.
    fn start(&mut self, items: &[Access]) -> u32 {
        let index = self.unused();
        let list = &mut self.all[index as usize];
        list.items.extend_from_slice(items);
        list.wrote = items.iter().any(Access::wrote);
        list.all_atomic = items.iter().all(Access::is_far_atomic);
        list.prune_at = PRUNE_AT;
        index + NEAR as u32 + 1
    }

    /// A copy with a list of its own.
    pub(super) fn copy(&mut self, near: &Near) -> Near {
        let mut copy = *near;
        if let Some(index) = Self::index(near.more) {
            let list = self.all[index].clone();
            let index = self.unused();
            self.all[index as usize] = list;
            copy.more = index + NEAR as u32 + 1;
        }
        copy
    }

    fn unused(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.all.push(List::default());
            self.all.len() as u32 - 1
        })
    }

    #[cold]
    fn give_up(&mut self, index: usize) {
        self.all[index].items.clear();
        self.free.push(index as u32);
    }
}

impl Access {
    /// Takes a later access in, or makes room for it: whether it is remembered so.
    #[inline(always)]
    pub(super) fn take(&mut self, mine: Access, by: &Accessor<'_>) -> bool {
        if self.base == mine.base && self.time == mine.time && self.pc == mine.pc && self.mask != 0 {
            self.mask |= mine.mask;
            return true;
        }
        if self.mask == 0 {
            *self = mine;
            return true;
        }
        if !self.is_covered_by(mine.pc) {
            return false;
        }
        if self.base == mine.base {
            self.mask &= !mine.mask;
        }
        // A write that is not ordered after the old reads is not ordered after this one either.
        let is_over = self.mask == 0 || by.passes_on && by.all_ordered(self);
        if is_over {
            *self = mine;
        }
        is_over
    }
}

impl Near {
    #[inline]
    pub(super) fn all<'a>(&'a self, lists: &'a Lists) -> &'a [Access] {
        match Lists::index(self.more) {
            None => &self.items[..self.more as usize],
            Some(index) => &lists.all[index].items,
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.more == 0
    }

    #[inline]
    fn wrote(&self, lists: &Lists) -> bool {
        match Lists::index(self.more) {
            None => self.items[..self.more as usize].iter().any(Access::wrote),
            Some(index) => lists.all[index].wrote,
        }
    }

    /// Whether all are atomics of the whole device.
    pub(super) fn all_atomic(&self, lists: &Lists) -> bool {
        match Lists::index(self.more) {
            None => self.items[..self.more as usize].iter().all(Access::is_far_atomic),
            Some(index) => lists.all[index].all_atomic,
        }
    }

    #[inline]
    pub(super) fn clear(&mut self, lists: &mut Lists) {
        if let Some(index) = Lists::index(self.more) {
            lists.give_up(index);
        }
        self.more = 0;
    }

    /// Adds an access; those that it covers are forgotten, nothing else ever is.
    pub(super) fn remember(&mut self, mine: Access, by: &Accessor<'_>, lists: &mut Lists) {
        if let Some(index) = Lists::index(self.more) {
            lists.all[index].remember(mine, by);
            return;
        }
        let mut all = [Access::default(); NEAR + 1];
        let (mut count, mut at) = (0, 0);
        for i in 0..self.more as usize {
            let old = &mut self.items[i];
            if old.base == mine.base {
                if old.time == mine.time && old.pc == mine.pc {
                    old.mask |= mine.mask;
                    // What was covered before this one is gone.
                    all[count..][..self.more as usize - i]
                        .copy_from_slice(&self.items[i..self.more as usize]);
                    count += self.more as usize - i;
                    self.items.copy_from_slice(&all[..NEAR]);
                    self.more = count as u32;
                    return;
                }
                if old.is_covered_by(mine.pc) {
                    old.mask &= !mine.mask;
                    if old.mask == 0 {
                        continue;
                    }
                }
            }
            all[count] = *old;
            count += 1;
            if old.base <= mine.base {
                at = count;
            }
        }
        all.copy_within(at..count, at + 1);
        all[at] = mine;
        count += 1;
        if count <= NEAR {
            self.items.copy_from_slice(&all[..NEAR]);
            self.more = count as u32;
        } else {
            self.more = lists.start(&all);
        }
    }
}

impl Cell {
    /// Whether one of the accesses since the last plain write wrote.
    #[inline]
    pub(super) fn wrote(&self, lists: &Lists) -> bool {
        self.first.wrote() || self.near.wrote(lists)
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
            if by.passes_on {
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
