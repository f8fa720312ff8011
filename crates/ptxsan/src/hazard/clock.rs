//! Vector clocks.
//!
//! Threads are lanes. Each lane also owns one *agent*: its asynchronous copies, which run on their own until
//! waited for. Kernels that use Hopper's asynchronous instructions have further agents: per lane its bulk stores, per
//! warpgroup its `wgmma` groups, per mbarrier the copies that report to it. A clock has one component per identity of its block,
//! and, for blocks that talk to each other, the same of other blocks. Lanes share clocks (`Rc`) until they learn different things.
//!
//! Beside what a thread knows stands what of it is ordered for the async proxy: a proxy fence raises the second to the first, and
//! both travel together. So does what is only known to be *over*: an arrival whose scope ends at its block says to another block of the
//! cluster that the thread has come so far, which frees what it read, and shows nothing of what it wrote.

use std::rc::Rc;

/// mbarriers of a block whose copies are told apart.
pub(crate) const MBARRIERS: u32 = 128;
/// Slots for what is no access: see [`Numbering::launch_before`] and [`Numbering::cluster_rounds`].
const MARKS: u32 = 32;

/// How identities are numbered in one launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbering {
    /// Lanes of a block, rounded up to whole warps.
    pub(crate) lanes: u32,
    /// A block's identities start at a multiple of `1 << shift`.
    pub(crate) shift: u32,
    /// Whether there are identities beyond lanes and their copies.
    has_agents: bool,
}

/// Who an identity is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// A thread.
    Lane,
    /// The `cp.async` copies of a thread.
    Copies,
    /// What the bulk stores of a thread read from shared memory.
    BulkReads,
    /// What they write.
    BulkWrites,
    /// The products of a warpgroup.
    Wgmma,
    /// The copies that report to an mbarrier, by its slot.
    Mbarrier(u32),
}

impl Numbering {
    /// `has_agents`: the kernel uses mbarriers, bulk copies, `wgmma`, clusters or programmatic launches.
    pub(crate) fn new(threads_per_block: u32, has_agents: bool) -> Self {
        let lanes = threads_per_block.next_multiple_of(32);
        let mut numbering = Numbering { lanes, shift: 0, has_agents };
        numbering.shift = numbering.count().next_power_of_two().trailing_zeros();
        numbering
    }

    /// Identities of one block.
    fn count(&self) -> u32 {
        if self.has_agents { 4 * self.lanes + 32 + MBARRIERS + MARKS } else { 2 * self.lanes }
    }

    /// The identity of lane 0 of a warp.
    pub(crate) fn warp(&self, block: u32, warp: u32) -> u32 {
        (block << self.shift) + warp * 32
    }

    /// The identity of the agent of lane 0 of a warp.
    pub(crate) fn agents(&self, block: u32, warp: u32) -> u32 {
        self.warp(block, warp) + self.lanes
    }

    /// The slot of what a thread's bulk stores read.
    pub(crate) fn bulk_reads(&self, thread: u32) -> u32 {
        2 * self.lanes + thread
    }

    /// The slot of what a thread's bulk stores write.
    pub(crate) fn bulk_writes(&self, thread: u32) -> u32 {
        3 * self.lanes + thread
    }

    /// The slot of a warpgroup's products.
    pub(crate) fn wgmma(&self, warpgroup: u32) -> u32 {
        4 * self.lanes + warpgroup
    }

    /// The slot of the copies that report to an mbarrier.
    pub(crate) fn mbarrier(&self, number: u32) -> u32 {
        4 * self.lanes + 32 + number
    }

    /// Raised to 1 where the launch before is known to be over.
    pub(crate) fn launch_before(&self) -> u32 {
        4 * self.lanes + 32 + MBARRIERS
    }

    /// Raised to the number of cluster barriers that are known to be complete.
    pub(crate) fn cluster_rounds(&self) -> u32 {
        self.launch_before() + 1
    }

    pub(crate) fn identity(&self, block: u32, slot: u32) -> u32 {
        (block << self.shift) + slot
    }

    pub(crate) fn block_of(&self, who: u32) -> u32 {
        who >> self.shift
    }

    pub(crate) fn slot_of(&self, who: u32) -> u32 {
        who & ((1 << self.shift) - 1)
    }

    pub(crate) fn is_agent(&self, who: u32) -> bool {
        self.slot_of(who) >= self.lanes
    }

    /// Whether an identity works through the async proxy.
    #[inline]
    pub(crate) fn is_async(&self, who: u32) -> bool {
        self.slot_of(who) >= 2 * self.lanes
    }

    /// The thread's index in its block; for an agent, that of the lane it works for.
    pub(crate) fn thread_of(&self, who: u32) -> u32 {
        let slot = self.slot_of(who);
        match self.who(who) {
            Who::Wgmma => (slot - 4 * self.lanes) * 128,
            Who::Mbarrier(_) => 0,
            _ => slot % self.lanes,
        }
    }

    pub(crate) fn who(&self, who: u32) -> Who {
        let slot = self.slot_of(who);
        match slot / self.lanes {
            0 => Who::Lane,
            1 => Who::Copies,
            2 => Who::BulkReads,
            3 => Who::BulkWrites,
            _ if slot < 4 * self.lanes + 32 => Who::Wgmma,
            _ => Who::Mbarrier(slot - 4 * self.lanes - 32),
        }
    }
}

/// Where a proxy fence reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Proxy {
    Shared,
    Global,
}

/// Up to which time each identity of a block is known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Times {
    known: Vec<u32>,
    /// The same for accesses through the async proxy, to shared and to global memory; empty: nothing.
    fenced: [Vec<u32>; 2],
    /// Up to which time each is over, though what it wrote may not be seen; empty: nothing beyond what is known.
    over: Vec<u32>,
}

fn raise_all(mine: &mut Vec<u32>, theirs: &[u32]) {
    if mine.is_empty() {
        mine.extend_from_slice(theirs);
    }
    for (a, b) in mine.iter_mut().zip(theirs) {
        *a = (*a).max(*b);
    }
}

impl Times {
    fn join(&mut self, other: &Times) {
        raise_all(&mut self.known, &other.known);
        raise_all(&mut self.over, &other.over);
        self.join_fenced(other);
    }

    fn join_fenced(&mut self, other: &Times) {
        for (mine, theirs) in self.fenced.iter_mut().zip(&other.fenced) {
            raise_all(mine, theirs);
        }
    }

    fn join_as_over(&mut self, other: &Times) {
        self.known.resize(other.known.len(), 0);
        raise_all(&mut self.over, &other.known);
        raise_all(&mut self.over, &other.over);
        self.join_fenced(other);
    }

    fn fence(&mut self, proxy: Proxy) {
        let known = &self.known;
        self.fenced[proxy as usize].clone_from(known);
    }
}

/// What a thread knows to have happened: for each identity, up to which time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Lanes, then agents, of the own block.
    own: Times,
    /// The least entry of each group of 32, so that a whole warp is compared at once.
    floor: Vec<u32>,
    /// Other blocks, by ascending number.
    foreign: Vec<(u32, Rc<Times>)>,
    /// What was released behind a sequentially consistent fence and read without one: the next such fence shows it, whoever's it is.
    heard: Option<Rc<Clock>>,
    block: u32,
}

impl Clock {
    /// Knows nothing; lanes that do not exist count as known.
    pub(crate) fn new(numbering: Numbering, block: u32, threads: u32) -> Self {
        let lanes = numbering.lanes as usize;
        let mut known = vec![0; numbering.count() as usize];
        for copies in known[..2 * lanes].chunks_exact_mut(lanes) {
            copies[threads as usize..].fill(u32::MAX);
        }
        let own = Times { known, fenced: Default::default(), over: Vec::new() };
        let mut clock =
            Clock { floor: vec![0; own.known.len() / 32], own, foreign: Vec::new(), heard: None, block };
        clock.settle();
        clock
    }

    /// Whether the access of `who` at `time` is known to have happened.
    #[inline(always)]
    pub(crate) fn knows(&self, numbering: Numbering, who: u32, time: u32) -> bool {
        let (block, slot) = (numbering.block_of(who), numbering.slot_of(who) as usize);
        if block == self.block {
            return self.own.known[slot] >= time;
        }
        self.times_of(block).is_some_and(|times| times.known[slot] >= time)
    }

    /// Whether that access is known to be over, seen or not.
    pub(crate) fn is_over(&self, numbering: Numbering, who: u32, time: u32) -> bool {
        let times = self.times_of(numbering.block_of(who));
        let over = times.and_then(|times| times.over.get(numbering.slot_of(who) as usize));
        over.is_some_and(|over| *over >= time)
    }

    fn times_of(&self, block: u32) -> Option<&Times> {
        if block == self.block {
            return Some(&self.own);
        }
        let at = self.foreign.binary_search_by_key(&block, |(b, _)| *b).ok()?;
        Some(&self.foreign[at].1)
    }

    /// Whether that access is ordered before what the async proxy does next.
    pub(crate) fn fenced(&self, numbering: Numbering, who: u32, time: u32, proxy: Proxy) -> bool {
        let slot = numbering.slot_of(who) as usize;
        let times = self.times_of(numbering.block_of(who));
        times.and_then(|t| t.fenced[proxy as usize].get(slot)).is_some_and(|known| *known >= time)
    }

    /// Orders all that is known before the async proxy.
    pub(crate) fn fence(&mut self, proxy: Proxy) {
        self.own.fence(proxy);
        for (_, times) in &mut self.foreign {
            Rc::make_mut(times).fence(proxy);
        }
    }

    /// Up to which time a slot of the own block is known.
    pub(crate) fn time_of(&self, slot: u32) -> u32 {
        self.own.known.get(slot as usize).copied().unwrap_or(0)
    }

    /// Whether the accesses of all lanes of `mask`, counted from `base`, at `time` are known.
    #[inline]
    pub(crate) fn knows_all(&self, numbering: Numbering, base: u32, mask: u32, time: u32) -> bool {
        if numbering.block_of(base) == self.block && self.floor[numbering.slot_of(base) as usize / 32] >= time
        {
            return true;
        }
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros();
            rest &= rest - 1;
            if !self.knows(numbering, base + lane, time) {
                return false;
            }
        }
        true
    }

    /// Whether each warp of the own block is known up to the time that stands for it.
    pub(crate) fn has_reached(&self, times: &[u32]) -> bool {
        self.floor.iter().zip(times).all(|(floor, time)| floor >= time)
    }

    /// Learns that `slot` of the own block has reached `time`. Call [`Clock::settle`] when done.
    pub(crate) fn raise(&mut self, slot: u32, time: u32) {
        let entry = &mut self.own.known[slot as usize];
        *entry = (*entry).max(time);
    }

    /// Learns all that another thread knows. Call [`Clock::settle`] when done.
    pub(crate) fn join(&mut self, other: &Clock) {
        if other.block == self.block {
            self.own.join(&other.own);
        } else {
            self.join_foreign(other.block, &Rc::new(other.own.clone()));
        }
        for (block, times) in &other.foreign {
            if *block == self.block {
                self.own.join(times);
            } else {
                self.join_foreign(*block, times);
            }
        }
        if let Some(heard) = &other.heard {
            self.hear(heard);
        }
    }

    /// Learns what a sequentially consistent fence will show.
    pub(crate) fn hear(&mut self, other: &Rc<Clock>) {
        match &mut self.heard {
            Some(mine) if Rc::ptr_eq(mine, other) => {}
            Some(mine) => Rc::make_mut(mine).join(other),
            empty => *empty = Some(Rc::clone(other)),
        }
    }

    /// Such a fence: what was heard is known.
    pub(crate) fn believe(&mut self) {
        if let Some(heard) = self.heard.take() {
            self.join(&heard);
        }
    }

    pub(crate) fn has_heard(&self) -> bool {
        self.heard.is_some()
    }

    fn join_foreign(&mut self, block: u32, times: &Rc<Times>) {
        match self.foreign.binary_search_by_key(&block, |(b, _)| *b) {
            Ok(i) if Rc::ptr_eq(&self.foreign[i].1, times) => {}
            Ok(i) => Rc::make_mut(&mut self.foreign[i].1).join(times),
            Err(i) => self.foreign.insert(i, (block, Rc::clone(times))),
        }
    }

    /// Learns that all that another thread knows is over, and nothing of what was written.
    pub(crate) fn join_as_over(&mut self, other: &Clock) {
        let all = other.foreign.iter().map(|(block, times)| (*block, &**times));
        for (block, times) in all.chain([(other.block, &other.own)]) {
            if block == self.block {
                self.own.join_as_over(times);
                continue;
            }
            let at = self.foreign.binary_search_by_key(&block, |(b, _)| *b).unwrap_or_else(|at| {
                self.foreign.insert(at, (block, Rc::default()));
                at
            });
            Rc::make_mut(&mut self.foreign[at].1).join_as_over(times);
        }
    }

    /// Recomputes what comparisons of whole warps rely on.
    pub(crate) fn settle(&mut self) {
        for (floor, group) in self.floor.iter_mut().zip(self.own.known.chunks(32)) {
            *floor = group.iter().copied().min().unwrap_or(0);
        }
    }
}

/// Joins the clocks of several lanes, skipping those that are one and the same.
pub(crate) fn join_distinct<'a>(into: &mut Clock, clocks: impl Iterator<Item = &'a Rc<Clock>>) {
    let mut last: Option<&Rc<Clock>> = None;
    for clock in clocks {
        if last.is_none_or(|l| !Rc::ptr_eq(l, clock)) {
            into.join(clock);
            last = Some(clock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_learns_and_floors_follow() {
        let numbering = Numbering::new(64, false);
        let mut a = Clock::new(numbering, 0, 64);
        let mut b = Clock::new(numbering, 0, 64);
        for lane in 0..32 {
            b.raise(lane, 3);
        }
        b.settle();
        assert!(!a.knows(numbering, 5, 1));
        a.join(&b);
        a.settle();
        assert!(a.knows(numbering, 5, 3) && !a.knows(numbering, 5, 4));
        assert!(a.knows_all(numbering, 0, u32::MAX, 3));
        assert!(!a.knows_all(numbering, 32, 1, 1));
        let mut c = Clock::new(numbering, 1, 64);
        c.join(&a);
        assert!(c.knows(numbering, 5, 3) && !c.knows(numbering, numbering.warp(1, 0), 1));
        let mut d = Clock::new(numbering, 0, 64);
        d.join(&c);
        assert!(d.knows(numbering, 31, 3));
    }

    #[test]
    fn missing_lanes_never_hold_a_warp_back() {
        let numbering = Numbering::new(40, false);
        let mut a = Clock::new(numbering, 0, 40);
        for lane in 32..40 {
            a.raise(lane, 2);
        }
        a.settle();
        assert!(a.knows_all(numbering, 32, 0xff, 2));
    }
}
