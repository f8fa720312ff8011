//! CTA-wide barriers: sixteen per block, with counts.

use super::run::{Context, Flow, for_lanes};
use super::warp::{State, Warp};
use crate::decode::{Bank, BarrierKind, BarrierOp, Reduction};
use crate::finding::Kind;
use crate::hazard::clock::{Clock, Numbering, join_distinct};
use std::rc::Rc;

/// Barriers a block has.
pub(super) const BARRIERS: usize = 16;

/// One barrier between two completions.
#[derive(Debug, Default, Clone)]
pub(super) struct Barrier {
    /// Threads expected; `None`: all that are left in the block.
    pub(super) expected: Option<u32>,
    /// Threads arrived, whole warps counted as 32.
    pub(super) arrived: u32,
    /// Lanes arrived, for barriers of all threads.
    pub(super) lanes: u32,
    clock: Option<Clock>,
    /// `bar.red`: lanes whose predicate holds, and lanes in all.
    votes: u32,
    voters: u32,
}

/// What the waiting lanes get when a barrier completes.
pub(super) struct Completion {
    pub(super) clock: Option<Rc<Clock>>,
    pub(super) votes: u32,
    pub(super) voters: u32,
}

/// The barriers of a block.
pub(super) struct Barriers {
    all: [Barrier; BARRIERS],
    numbering: Numbering,
    block: u32,
    threads: u32,
    /// Threads that have not exited.
    live: u32,
    /// What threads that exited did and knew.
    left: Clock,
    /// A barrier may have completed.
    pub(super) is_touched: bool,
}

impl Barriers {
    pub(super) fn new(numbering: Numbering, block: u32, threads: u32) -> Self {
        Barriers {
            all: Default::default(),
            numbering,
            block,
            threads,
            live: threads,
            left: Clock::new(numbering, block, threads),
            is_touched: false,
        }
    }

    pub(super) fn get(&self, id: usize) -> &Barrier {
        &self.all[id]
    }

    pub(super) fn live(&self) -> u32 {
        self.live
    }

    /// Lanes exit: barriers of all threads no longer wait for them.
    pub(super) fn lanes_left(&mut self, warp: &Warp, mask: u32) {
        self.live -= mask.count_ones();
        self.is_touched = true;
        for_lanes(mask, |lane| {
            let slot = warp.index * 32 + lane as u32;
            self.left.raise(slot, warp.time);
            self.left.raise(slot + self.numbering.lanes, warp.waited_group[lane]);
        });
    }

    /// The barrier that is complete, if any, ready to start again.
    pub(super) fn complete(&mut self, id: usize) -> Option<Completion> {
        let barrier = &self.all[id];
        let is_complete = match barrier.expected {
            _ if barrier.lanes == 0 => false,
            Some(expected) => barrier.arrived >= expected,
            None => barrier.lanes >= self.live,
        };
        if !is_complete {
            return None;
        }
        let barrier = std::mem::take(&mut self.all[id]);
        let clock = barrier.clock.map(|mut clock| {
            clock.join(&self.left);
            clock.settle();
            Rc::new(clock)
        });
        Some(Completion { clock, votes: barrier.votes, voters: barrier.voters })
    }
}

impl Warp {
    pub(super) fn barrier(&mut self, cx: &mut Context<'_, '_>, at: usize, mask: u32, op: &BarrierOp) -> Flow {
        let pc = self.groups[at].pc;
        match self.gathered(cx, at, mask, op.aligned) {
            Some(lanes) => self.arrive_at_barrier(cx, pc, lanes, op),
            None => Flow::Yield,
        }
    }

    /// The lanes that come to a barrier together; `None`: others of the warp must come first.
    pub(super) fn gathered(
        &mut self,
        cx: &mut Context<'_, '_>,
        at: usize,
        mask: u32,
        aligned: bool,
    ) -> Option<u32> {
        let pc = self.groups[at].pc;
        let mut lanes = mask;
        if aligned && !self.groups[at].is_forced {
            // Groups of this warp that wait at the same barrier go on as one.
            let is_here = |g: &super::warp::Group| g.pc == pc && g.state == State::Together;
            let others = self.groups.iter().filter(|g| is_here(g)).fold(0, |m, g| m | g.mask);
            if (mask | others) & self.live != self.live {
                self.groups[at].state = State::Together;
                return None;
            }
            lanes |= others;
            for g in self.groups.iter_mut().filter(|g| g.pc == pc && g.state == State::Together) {
                g.state = State::Ready;
            }
        } else if self.groups[at].is_forced {
            self.groups[at].is_forced = false;
            let missing = self.live & !mask;
            cx.report(Kind::BarrierDivergence, pc, self.index, mask, || {
                format!(
                    "lanes {mask:#010x} of warp {} are at the barrier, lanes {missing:#010x} are not",
                    self.index
                )
            });
        }
        Some(lanes)
    }

    fn arrive_at_barrier(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, op: &BarrierOp) -> Flow {
        let first = lanes.trailing_zeros() as usize;
        let id = self.lane(op.id, first) as usize;
        let count = op.count.map(|c| self.lane(c, first) as u32);
        let waits = op.kind != BarrierKind::Arrive;
        if id >= BARRIERS || count.is_some_and(|c| c % 32 != 0 || c == 0 || c > cx.numbering.lanes) {
            let most = cx.numbering.lanes;
            cx.report(Kind::BarrierMisuse, pc, self.index, lanes, || {
                let count = count.map_or_else(String::new, |count| format!(" with a count of {count}"));
                format!("barrier {id}{count}: there are barriers 0 to 15, and the count must be a multiple of 32 up to the block's {most}")
            });
            self.pass(pc, lanes);
            return Flow::Moved;
        }
        let block_threads = cx.barriers.threads;
        let barrier = &mut cx.barriers.all[id];
        let whole = block_threads.next_multiple_of(32);
        if barrier.lanes > 0 && barrier.expected.unwrap_or(whole) != count.unwrap_or(whole) {
            let before = barrier.expected.unwrap_or(whole);
            let now = count.unwrap_or(whole);
            cx.log.add(Kind::BarrierCount, pc, None, (cx.block, self.index * 32 + first as u32), || {
                format!("barrier {id} was started with a count of {before} and is now used with {now}")
            });
        }
        if barrier.lanes == 0 {
            barrier.expected = count;
        }
        barrier.arrived += if lanes == self.live { 32 } else { lanes.count_ones() };
        barrier.lanes += lanes.count_ones();
        if let Some(expected) = barrier.expected
            && barrier.arrived > expected
        {
            let arrived = barrier.arrived;
            cx.log.add(Kind::BarrierCount, pc, None, (cx.block, self.index * 32 + first as u32), || {
                format!("{arrived} threads arrived at barrier {id}, which expects {expected}")
            });
        }
        if let BarrierKind::Reduce { source, negated, .. } = op.kind {
            let value = self.regs.pred[source.index as usize];
            let value = if negated { !value } else { value };
            barrier.votes += (value & lanes).count_ones();
            barrier.voters += lanes.count_ones();
        }
        if cx.options.check_races {
            let (numbering, block) = (cx.barriers.numbering, cx.barriers.block);
            let mut clock =
                barrier.clock.take().unwrap_or_else(|| Clock::new(numbering, block, block_threads));
            join_distinct(&mut clock, (0..32).filter(|l| lanes >> l & 1 == 1).map(|l| &self.known[l]));
            for_lanes(lanes, |lane| self.raise_lane(cx, lane, &mut clock));
            cx.barriers.all[id].clock = Some(clock);
            self.advance();
        }
        cx.barriers.is_touched = true;
        if waits {
            cx.tallies[pc as usize].waits += 1;
            for g in self.groups.iter_mut().filter(|g| g.pc == pc && g.mask & lanes != 0) {
                g.state = State::Barrier(id as u32);
            }
        } else {
            self.pass(pc, lanes);
        }
        Flow::Yield
    }

    /// Lanes go on behind the barrier at `pc`.
    pub(super) fn pass(&mut self, pc: u32, lanes: u32) {
        for g in self.groups.iter_mut().filter(|g| g.pc == pc && g.mask & lanes != 0) {
            g.pc = pc + 1;
        }
    }

    /// Lanes waiting at barrier `id` go on.
    pub(super) fn released(&mut self, code: &[crate::decode::Inst], id: u32, completion: &Completion) {
        for at in 0..self.groups.len() {
            if self.groups[at].state != State::Barrier(id) {
                continue;
            }
            let (pc, mask) = (self.groups[at].pc, self.groups[at].mask);
            self.groups[at].state = State::Ready;
            self.groups[at].pc = pc + 1;
            if let Some(clock) = &completion.clock {
                for_lanes(mask, |lane| self.learn(lane, pc, Rc::clone(clock)));
            }
            if let crate::decode::Op::Barrier(op) = &code[pc as usize].op
                && let BarrierKind::Reduce { d, reduction, .. } = op.kind
            {
                let value = match reduction {
                    Reduction::Popc => completion.votes,
                    Reduction::And => u32::from(completion.votes == completion.voters),
                    Reduction::Or => u32::from(completion.votes > 0),
                };
                for_lanes(mask, |lane| self.set_lane(d, lane, u64::from(value)));
                self.mark_written(&code[pc as usize], mask);
                debug_assert!(d.bank != Bank::B64);
            }
        }
    }
}
