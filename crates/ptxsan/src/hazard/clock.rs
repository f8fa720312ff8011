//! Vector clocks.
//!
//! Threads are lanes. Each lane also owns one *agent*: its asynchronous copies, which run on their own until
//! waited for. A clock has one component per lane and one per agent of its block, and, for blocks that talk
//! to each other, the same of other blocks. Lanes share clocks (`Rc`) until they learn different things.

use std::rc::Rc;

/// How identities are numbered in one launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbering {
    /// Lanes of a block, rounded up to whole warps.
    pub(crate) lanes: u32,
    /// A block's identities start at a multiple of `1 << shift`.
    pub(crate) shift: u32,
}

impl Numbering {
    pub(crate) fn new(threads_per_block: u32) -> Self {
        let lanes = threads_per_block.next_multiple_of(32);
        Numbering { lanes, shift: (2 * lanes).next_power_of_two().trailing_zeros() }
    }

    /// The identity of lane 0 of a warp.
    pub(crate) fn warp(&self, block: u32, warp: u32) -> u32 {
        (block << self.shift) + warp * 32
    }

    /// The identity of the agent of lane 0 of a warp.
    pub(crate) fn agents(&self, block: u32, warp: u32) -> u32 {
        self.warp(block, warp) + self.lanes
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

    /// The thread's index in its block; for an agent, that of the lane it works for.
    pub(crate) fn thread_of(&self, who: u32) -> u32 {
        let slot = self.slot_of(who);
        if slot >= self.lanes { slot - self.lanes } else { slot }
    }
}

/// What a thread knows to have happened: for each identity, up to which time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Lanes, then agents, of the own block.
    own: Vec<u32>,
    /// The least entry of each group of 32, so that a whole warp is compared at once.
    floor: Vec<u32>,
    /// Other blocks, by ascending number.
    foreign: Vec<(u32, Rc<Vec<u32>>)>,
    block: u32,
}

impl Clock {
    /// Knows nothing; lanes that do not exist count as known.
    pub(crate) fn new(numbering: Numbering, block: u32, threads: u32) -> Self {
        let lanes = numbering.lanes as usize;
        let mut own = vec![0; 2 * lanes];
        own[threads as usize..lanes].fill(u32::MAX);
        own[lanes + threads as usize..].fill(u32::MAX);
        let mut clock = Clock { floor: vec![0; own.len() / 32], own, foreign: Vec::new(), block };
        clock.settle();
        clock
    }

    /// Whether the access of `who` at `time` is known to have happened.
    #[inline(always)]
    pub(crate) fn knows(&self, numbering: Numbering, who: u32, time: u32) -> bool {
        let (block, slot) = (numbering.block_of(who), numbering.slot_of(who) as usize);
        if block == self.block {
            return self.own[slot] >= time;
        }
        match self.foreign.binary_search_by_key(&block, |(b, _)| *b) {
            Ok(i) => self.foreign[i].1[slot] >= time,
            Err(_) => false,
        }
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

    /// Learns that `slot` of the own block has reached `time`. Call [`Clock::settle`] when done.
    pub(crate) fn raise(&mut self, slot: u32, time: u32) {
        let entry = &mut self.own[slot as usize];
        *entry = (*entry).max(time);
    }

    /// Learns all that another thread knows. Call [`Clock::settle`] when done.
    pub(crate) fn join(&mut self, other: &Clock) {
        if other.block == self.block {
            for (a, b) in self.own.iter_mut().zip(&other.own) {
                *a = (*a).max(*b);
            }
        } else {
            self.join_foreign(other.block, &Rc::new(other.own.clone()));
        }
        for (block, times) in &other.foreign {
            if *block == self.block {
                for (a, b) in self.own.iter_mut().zip(times.iter()) {
                    *a = (*a).max(*b);
                }
            } else {
                self.join_foreign(*block, times);
            }
        }
    }

    fn join_foreign(&mut self, block: u32, times: &Rc<Vec<u32>>) {
        match self.foreign.binary_search_by_key(&block, |(b, _)| *b) {
            Ok(i) if Rc::ptr_eq(&self.foreign[i].1, times) => {}
            Ok(i) => {
                let mine = Rc::make_mut(&mut self.foreign[i].1);
                for (a, b) in mine.iter_mut().zip(times.iter()) {
                    *a = (*a).max(*b);
                }
            }
            Err(i) => self.foreign.insert(i, (block, Rc::clone(times))),
        }
    }

    /// Recomputes what comparisons of whole warps rely on.
    pub(crate) fn settle(&mut self) {
        for (floor, group) in self.floor.iter_mut().zip(self.own.chunks(32)) {
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
        let numbering = Numbering::new(64);
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
        let numbering = Numbering::new(40);
        let mut a = Clock::new(numbering, 0, 40);
        for lane in 32..40 {
            a.raise(lane, 2);
        }
        a.settle();
        assert!(a.knows_all(numbering, 32, 0xff, 2));
    }
}
