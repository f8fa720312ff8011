//! Clusters: their barrier, whether another block is there, and the registers that warps of a block give and take.

use crate::decode::ClusterBarrier;
use crate::finding::Kind;
use crate::hazard::clock::{Clock, Numbering};
use crate::hazard::log::Log;
use crate::machine::run::{Context, Flow, Stir, for_lanes};
use crate::machine::warp::{Parked, State, Warp};
use std::collections::BTreeMap;
use std::rc::Rc;

/// What the blocks of a cluster share.
#[derive(Default)]
pub(crate) struct Cluster {
    /// Threads that have not exited.
    live: u32,
    /// Barriers completed, and threads that have arrived at the next.
    rounds: u32,
    arrived: u32,
    publishing: Option<Clock>,
    published: Option<Clock>,
}

impl Cluster {
    pub(crate) fn new(threads: u32) -> Self {
        Cluster { live: threads, ..Cluster::default() }
    }

    /// Completes the barrier if all are there; whether it did.
    fn settle(&mut self) -> bool {
        if self.arrived == 0 || self.arrived < self.live {
            return false;
        }
        self.arrived = 0;
        self.rounds += 1;
        if let Some(clock) = self.publishing.take() {
            match &mut self.published {
                Some(all) => all.join(&clock),
                empty => *empty = Some(clock),
            }
        }
        true
    }

    pub(crate) fn describe(&self) -> String {
        format!("{} of {} threads arrived", self.arrived, self.live)
    }
}

/// A thread's last use of another block's shared memory.
struct Visit {
    time: u32,
    /// Cluster barriers that the thread had arrived at.
    arrivals: u32,
    pc: u32,
}

/// What threads of other blocks of the cluster did in a block's shared memory, by their identities. It must be over before the block is.
#[derive(Default)]
pub(crate) struct Visits(BTreeMap<u32, Visit>);

impl Visits {
    /// The block ends, with what its threads knew: reports what none of them can have waited for. Whether it came first is chance.
    pub(crate) fn report_unawaited<'a>(
        &self,
        numbering: Numbering,
        rank: u32,
        known: impl Iterator<Item = &'a Rc<Clock>> + Clone,
        log: &mut Log,
    ) {
        for (&who, visit) in &self.0 {
            let waited = |clock: &Rc<Clock>| {
                clock.time_of(numbering.cluster_rounds()) > visit.arrivals
                    || clock.knows(numbering, who, visit.time)
                    || clock.is_over(numbering, who, visit.time)
            };
            if !known.clone().any(waited) {
                let by = (numbering.block_of(who), numbering.thread_of(who));
                log.add(Kind::ClusterLifetime, visit.pc, None, by, || {
                    format!(
                        "shared memory of the block of rank {rank}, which may have exited: a cluster barrier, or a wait of that block for \
                         this thread, must keep it alive"
                    )
                });
            }
        }
    }
}

/// Registers of a block that its warps have given back.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    free: u32,
    /// What each warp's threads have.
    each: Vec<u32>,
}

impl Pool {
    pub(crate) fn new(warps: u32, registers: u32) -> Self {
        Pool { free: 0, each: vec![registers; warps as usize] }
    }

    pub(crate) fn describe(&self) -> String {
        format!("the pool has {} registers", self.free)
    }
}

impl Warp {
    /// Whether the shared memory of another block of the cluster can be there, as far as a lane knows.
    pub(in crate::machine) fn reachable(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lane: usize,
        block: u32,
    ) -> bool {
        let thread = self.index * 32 + lane as u32;
        let rank = block.wrapping_sub(cx.cluster_first);
        let size = cx.shape.cluster_size();
        if rank >= size {
            cx.log.add(Kind::ClusterLifetime, pc, None, (cx.block, thread), || {
                format!("rank {rank} in a cluster of {size} blocks")
            });
            return false;
        }
        if cx.peers.get(&block).is_none_or(|peer| peer.has_exited) {
            cx.log.add(Kind::ClusterLifetime, pc, None, (cx.block, thread), || {
                format!("shared memory of the block of rank {rank}, which has exited: a cluster barrier must keep it alive")
            });
            return false;
        }
        if cx.options.check_races && self.known[lane].time_of(cx.numbering.cluster_rounds()) == 0 {
            cx.log.add(Kind::ClusterLifetime, pc, None, (cx.block, thread), || {
                format!("shared memory of the block of rank {rank}, which may not have started: a cluster barrier must come before")
            });
        }
        true
    }

    /// Notes that a lane uses the shared memory of another block, if that is still there.
    pub(in crate::machine) fn visit(&self, cx: &mut Context<'_, '_>, pc: u32, lane: usize, block: u32) {
        if !cx.options.check_races || block == cx.block {
            return;
        }
        let who = cx.numbering.identity(cx.block, self.index * 32 + lane as u32);
        if let Some(peer) = cx.peers.get_mut(&block).filter(|peer| !peer.has_exited) {
            let visit = Visit { time: self.time, arrivals: self.cluster_arrivals[lane], pc };
            peer.visits.0.insert(who, visit);
        }
    }

    pub(in crate::machine) fn cluster_barrier(
        &mut self,
        cx: &mut Context<'_, '_>,
        at: usize,
        mask: u32,
        op: &ClusterBarrier,
    ) -> Flow {
        let pc = self.groups[at].pc;
        let Some(lanes) = self.gathered(cx, at, mask, op.aligned) else { return Flow::Yield };
        if op.is_wait {
            let waits = (0..32).any(|l| lanes >> l & 1 == 1 && self.cluster_arrivals[l] > cx.cluster.rounds);
            let absent =
                (0..32).find(|l| lanes >> l & 1 == 1 && self.cluster_arrivals[*l] < cx.cluster.rounds.max(1));
            if let Some(lane) = absent.filter(|_| !waits) {
                cx.report(Kind::BarrierMisuse, pc, self.index, 1 << lane, || {
                    "barrier.cluster.wait without barrier.cluster.arrive before".into()
                });
            }
            if waits {
                self.groups[at].state = State::Parked(Parked::Cluster);
                return Flow::Park;
            }
            self.learn_cluster(cx, pc, lanes, op.orders);
        } else {
            for_lanes(lanes, |lane| {
                if self.cluster_arrivals[lane] > cx.cluster.rounds {
                    cx.report(Kind::BarrierMisuse, pc, self.index, 1 << lane, || {
                        "a second barrier.cluster.arrive without a wait between".into()
                    });
                    return;
                }
                self.cluster_arrivals[lane] = cx.cluster.rounds + 1;
                cx.cluster.arrived += 1;
            });
            if op.orders && cx.options.check_races {
                let mut clock = cx.cluster.publishing.take().unwrap_or_else(|| self.fresh_clock(cx));
                for_lanes(lanes, |lane| clock.join(&self.published(cx, lane)));
                cx.cluster.publishing = Some(clock);
                self.advance();
            }
            if cx.cluster.settle() {
                cx.stirs.push(Stir::Cluster);
            }
        }
        self.pass(pc, lanes);
        Flow::Yield
    }

    pub(super) fn fresh_clock(&self, cx: &Context<'_, '_>) -> Clock {
        Clock::new(cx.numbering, cx.block, cx.shape.threads())
    }

    fn learn_cluster(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, orders: bool) {
        if !cx.options.check_races {
            return;
        }
        let numbering: Numbering = cx.numbering;
        for_lanes(lanes, |lane| {
            let mut clock = (*self.known[lane]).clone();
            if let Some(published) = cx.cluster.published.as_ref().filter(|_| orders) {
                clock.join(published);
            }
            clock.raise(numbering.cluster_rounds(), self.cluster_arrivals[lane]);
            clock.settle();
            // Neighbours mostly learn the same.
            let same = (0..lane).rev().find(|l| lanes >> l & 1 == 1 && *self.known[*l] == clock);
            let clock = same.map_or_else(|| Rc::new(clock), |l| Rc::clone(&self.known[l]));
            self.learn(lane, pc, clock);
        });
    }

    /// Lanes exit: the cluster no longer waits for them.
    pub(in crate::machine) fn leave_cluster(&self, cx: &mut Context<'_, '_>, mask: u32) {
        for_lanes(mask, |lane| {
            cx.cluster.live -= 1;
            cx.cluster.arrived -= u32::from(self.cluster_arrivals[lane] > cx.cluster.rounds);
        });
        if cx.cluster.settle() {
            cx.stirs.push(Stir::Cluster);
        }
    }

    /// `setmaxnreg`; `false`: the pool has not enough, and the warp waits.
    pub(in crate::machine) fn set_registers(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        claims: bool,
        count: u32,
    ) -> bool {
        let Some(pool) = cx.pool.as_mut() else { return true };
        let has = pool.each[self.index as usize];
        if claims && count < has || !claims && count > has {
            let verb = if claims { "claims" } else { "keeps" };
            let (fewer, rule) = if claims {
                ("fewer", "setmaxnreg.inc takes more")
            } else {
                ("more", "setmaxnreg.dec takes fewer")
            };
            cx.report(Kind::Registers, pc, self.index, 1, || {
                format!(
                    "a warp whose threads have {has} registers {verb} {count}, which is {fewer}: {rule}. At the launch they have what the \
                     launch bounds leave each"
                )
            });
            return true;
        }
        if claims {
            let more = 32 * (count - has);
            if more > pool.free {
                return false;
            }
            pool.free -= more;
        } else {
            pool.free += 32 * (has - count);
            cx.stirs.push(Stir::Registers);
        }
        pool.each[self.index as usize] = count;
        true
    }
}
