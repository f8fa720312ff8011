//! The agent of an access (lane or asynchronous copy), its vector clock, and the accesses it conflicts with.

use super::clock::{Clock, Numbering, Proxy};
use super::history::{
    ASKED, ATOMIC, Access, BLOCK_SCOPE, Cell, Lists, NON_COHERENT, PC_MASK, SEEN, STRONG, UPDATE,
};

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
    /// Whether who learns of this access also learns what came before it. Who waits for a copy on an mbarrier learns nothing of the
    /// thread that asked for it.
    pub(crate) passes_on: bool,
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
pub(super) fn worse(a: Option<Conflict>, b: Option<Conflict>) -> Option<Conflict> {
    match (a, b) {
        (Some(x), Some(y)) if x.both_strong && !y.both_strong => Some(y),
        (Some(x), _) => Some(x),
        (None, other) => other,
    }
}

impl Accessor<'_> {
    /// The access as it is remembered.
    #[inline(always)]
    pub(super) fn access(&self) -> Access {
        Access { base: self.base, mask: self.mask, time: self.time, pc: self.pc }
    }

    /// Whether every one of the lanes knows of an access of somebody else, whatever they did themselves.
    #[inline(always)]
    pub(super) fn knows(&self, who: u32, time: u32) -> bool {
        self.known.knows(self.numbering, who, time)
    }

    #[inline(always)]
    fn knows_all(&self, old: &Access) -> bool {
        self.known.knows_all(self.numbering, old.base, old.mask, old.time)
    }

    #[inline(always)]
    pub(super) fn ordered(&self, who: u32, time: u32) -> bool {
        self.happens_after(who, time) && (self.proxy.is_none() || self.is_fenced(who, time))
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
        // What an agent did is over when its thread knows of it: nothing of it waits to be seen.
        self.known.knows(self.numbering, who, time)
            || self.numbering.is_async(who) && self.known.is_over(self.numbering, who, time)
    }

    /// Strong operations do not race with each other, if each one's scope reaches the other.
    #[inline]
    fn both_strong(&self, old: &Access) -> bool {
        let both = self.pc & old.pc & STRONG != 0;
        let near = || self.numbering.block_of(old.base) == self.numbering.block_of(self.base);
        both && ((self.pc | old.pc) & BLOCK_SCOPE == 0 || near())
    }

    #[inline]
    pub(super) fn all_ordered(&self, readers: &Access) -> bool {
        self.knows_all(readers) || self.first_unordered(readers).is_none()
    }

    pub(super) fn first_unordered(&self, readers: &Access) -> Option<u32> {
        let mut rest = readers.mask;
        while rest != 0 {
            let who = readers.base + rest.trailing_zeros();
            rest &= rest - 1;
            let is_over = || !readers.wrote() && self.known.is_over(self.numbering, who, readers.time);
            let happened = self.happens_after(who, readers.time) || is_over();
            if !happened || self.fences_reads && !self.is_fenced(who, readers.time) {
                return Some(who);
            }
        }
        None
    }
}

#[inline(always)]
pub(super) fn against_write(cell: &Cell, by: &Accessor<'_>) -> Option<Conflict> {
    let write = &cell.write;
    if write.time == 0 || by.ordered(write.who, write.time) {
        return None;
    }
    let lane = write.who.wrapping_sub(by.base);
    let same_instruction = lane < 32 && (write.pc ^ by.pc) & !SEEN == 0 && write.time == by.time;
    Some(Conflict {
        who: write.who,
        time: write.time,
        pc: write.pc & PC_MASK,
        is_write: true,
        same_instruction,
        only_proxy: by.happens_after(write.who, write.time),
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
        let both_plain = is_plain(old.pc) && is_plain(by.pc);
        let same_warp = old.wrote() && old.base == by.base && both_plain;
        let is_read = !write && is_plain(by.pc);
        let was_read = write && !old.wrote() && both_plain;
        if !same_warp && !is_read && !was_read {
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
    let unordered = if !by.fences_reads && by.knows_all(old) { None } else { by.first_unordered(old) };
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
pub(super) fn against_accesses(
    cell: &Cell,
    by: &Accessor<'_>,
    lists: &Lists,
    write: bool,
) -> Option<Conflict> {
    let found = worst(cell, by, lists, write, Observed::default());
    if !found.is_some_and(|found| found.is_write && !found.both_strong && by.pc & STRONG == 0) {
        return found;
    }
    let observed = Observed::of(cell, by, lists);
    if observed == Observed::default() { found } else { worst(cell, by, lists, write, observed) }
}

fn worst(cell: &Cell, by: &Accessor<'_>, lists: &Lists, write: bool, observed: Observed) -> Option<Conflict> {
    let mut found = against_access(&observed.rest(&cell.first, by), by, write);
    let is_atomic = by.pc & (STRONG | ATOMIC | BLOCK_SCOPE) == STRONG | ATOMIC;
    let further = cell.near.all(lists);
    if !further.is_empty() && (write || cell.wrote(lists)) && !(is_atomic && cell.near.all_atomic(lists)) {
        for old in further {
            if found.is_some_and(|found| !found.both_strong) {
                break;
            }
            found = worse(found, against_access(&observed.rest(old, by), by, write));
        }
    }
    found
}

/// The latest strong reads of a cell that happened before an access: what strong writes before them stored, or what replaced it, they have
/// read. By the causality order of PTX such a write comes before the access, fence or not: who takes the last ticket may reset the counter
/// with a plain store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Observed {
    /// By a thread of the accessor's block, and by one whose scope reaches all blocks.
    near: Moment,
    far: Moment,
}

/// When a lane made a strong access.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Moment {
    time: u32,
    /// Lanes of one instruction come one after the other.
    base: u32,
    pc: u32,
    lane: u32,
}

impl Moment {
    /// The lanes of a strong write that did not come before.
    fn later(self, write: &Access) -> u32 {
        let together = (self.time, self.base, self.pc) == (write.time, write.base, write.pc & PC_MASK);
        match write.time < self.time {
            true => 0,
            false if together => write.mask & u32::MAX << self.lane,
            false => write.mask,
        }
    }
}

impl Observed {
    #[cold]
    fn of(cell: &Cell, by: &Accessor<'_>, lists: &Lists) -> Self {
        let mut all = Self::default();
        for read in [&cell.first].into_iter().chain(cell.near.all(lists)) {
            // Who does not look at what an atomic found cannot have made anything depend on it.
            let reads = !read.wrote() || read.pc & ASKED != 0;
            if read.pc & STRONG == 0 || !reads || by.numbering.is_async(read.base) {
                continue;
            }
            let known = |lane: &u32| by.happens_after(read.base + lane, read.time);
            let mut lanes = (0..32).rev().filter(|lane| read.mask >> lane & 1 == 1);
            let Some(lane) = lanes.find(known) else { continue };
            let moment = Moment { time: read.time, base: read.base, pc: read.pc & PC_MASK, lane };
            if by.numbering.block_of(read.base) == by.numbering.block_of(by.base) {
                all.near = all.near.max(moment);
            }
            if read.pc & BLOCK_SCOPE == 0 {
                all.far = all.far.max(moment);
            }
        }
        all
    }

    /// An earlier access without the lanes whose writes were read so.
    #[inline]
    fn rest(&self, old: &Access, by: &Accessor<'_>) -> Access {
        let is_observable = old.pc & STRONG != 0 && old.wrote() && !by.numbering.is_async(old.base);
        if *self == Self::default() || !is_observable {
            return *old;
        }
        let is_near = by.numbering.block_of(old.base) == by.numbering.block_of(by.base);
        let mask = match (is_near, old.pc & BLOCK_SCOPE) {
            (true, _) => self.near.later(old) & self.far.later(old),
            (false, 0) => self.far.later(old),
            (false, _) => old.mask,
        };
        Access { mask, ..*old }
    }
}
