//! What is remembered of a cell of memory: its last plain write, and the reads and strong writes since.

use super::accessor::Accessor;

/// Instruction numbers carry these marks in their upper bits: a strong access, one whose scope is its block,
pub(crate) const STRONG: u32 = 1 << 31;
pub(crate) const BLOCK_SCOPE: u32 = 1 << 30;
/// a strong one that wrote,
pub(super) const WROTE: u32 = 1 << 29;
/// a read-modify-write, a load that goes through the read-only cache, a store of what was made from a load of the same place.
pub(crate) const ATOMIC: u32 = 1 << 28;
pub(crate) const NON_COHERENT: u32 = 1 << 27;
pub(crate) const UPDATE: u32 = 1 << 26;
pub(super) const PC_MASK: u32 = UPDATE - 1;
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

/// What is known of a cell: a line of the host's cache.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
pub(super) struct Cell {
    /// The last plain write.
    pub(super) writer: u32,
    /// 0: never written.
    pub(super) write_time: u32,
    pub(super) write_pc: u32,
    /// A read or a strong write since.
    pub(super) first: Access,
    /// Further ones by ascending `base`, as long as there is room.
    near: [Access; NEAR],
    /// How many of `near` there are; beyond [`NEAR`]: the list of further ones has the index `more - NEAR - 1`.
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

    /// A copy of a cell with a list of its own.
    pub(super) fn copy(&mut self, cell: &Cell) -> Cell {
        let mut copy = *cell;
        if let Some(index) = Self::index(cell.more) {
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

impl Cell {
    /// The accesses beyond the first.
    #[inline]
    pub(super) fn further<'a>(&'a self, lists: &'a Lists) -> &'a [Access] {
        match Lists::index(self.more) {
            None => &self.near[..self.more as usize],
            Some(index) => &lists.all[index].items,
        }
    }

    #[inline]
    pub(super) fn is_alone(&self) -> bool {
        self.more == 0
    }

    /// Whether one of the accesses since the last plain write wrote.
    #[inline]
    pub(super) fn wrote(&self, lists: &Lists) -> bool {
        self.first.wrote()
            || match Lists::index(self.more) {
                None => self.near[..self.more as usize].iter().any(Access::wrote),
                Some(index) => lists.all[index].wrote,
            }
    }

    /// Whether all accesses beyond the first are atomics of the whole device.
    pub(super) fn all_atomic(&self, lists: &Lists) -> bool {
        match Lists::index(self.more) {
            None => self.near[..self.more as usize].iter().all(Access::is_far_atomic),
            Some(index) => lists.all[index].all_atomic,
        }
    }

    /// A plain write: what was before it matters no more.
    #[inline]
    pub(super) fn write(&mut self, by: &Accessor<'_>, lists: &mut Lists) {
        if let Some(index) = Lists::index(self.more) {
            lists.give_up(index);
        }
        self.more = 0;
        self.first = Access::default();
        self.writer = by.base + by.mask.trailing_zeros();
        self.write_time = by.time;
        self.write_pc = by.pc;
    }

    /// Remembers a read or a strong write.
    #[inline]
    pub(super) fn remember(&mut self, mine: Access, by: &Accessor<'_>, lists: &mut Lists) {
        let first = &mut self.first;
        if first.base == mine.base && first.time == mine.time && first.pc == mine.pc && first.mask != 0 {
            first.mask |= mine.mask;
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
            if first.mask == 0 || by.passes_on && by.all_ordered(first) {
                *first = mine;
                return;
            }
        }
        match Lists::index(self.more) {
            None => self.remember_near(mine, lists),
            Some(index) => lists.all[index].remember(mine, by),
        }
    }

    /// Adds an access; those that it covers are forgotten, nothing else ever is.
    fn remember_near(&mut self, mine: Access, lists: &mut Lists) {
        let mut all = [Access::default(); NEAR + 1];
        let (mut count, mut at) = (0, 0);
        for i in 0..self.more as usize {
            let old = &mut self.near[i];
            if old.base == mine.base {
                if old.time == mine.time && old.pc == mine.pc {
                    old.mask |= mine.mask;
                    // What was covered before this one is gone.
                    all[count..][..self.more as usize - i].copy_from_slice(&self.near[i..self.more as usize]);
                    count += self.more as usize - i;
                    self.near.copy_from_slice(&all[..NEAR]);
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
            self.near.copy_from_slice(&all[..NEAR]);
            self.more = count as u32;
        } else {
            self.more = lists.start(&all);
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
