//! mbarriers: phases, pending arrivals and bytes, and what is learnt from a phase that has completed.

use crate::decode::{Address, Arrival, MbarrierOp, Phase, Register};
use crate::finding::Kind;
use crate::hazard::clock::{Clock, MBARRIERS, Numbering};
use crate::machine::run::{Context, Flow, Stir, for_lanes};
use crate::machine::warp::{Parked, State, Warp};
use crate::memory::window;
use crate::parse::ast::Space;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The largest count of arrivals and of bytes.
const MAX_COUNT: u32 = (1 << 20) - 1;
/// Marks a token that `pending_count` may be asked about.
const NO_COMPLETE: u64 = 1 << 63;

/// One mbarrier.
pub(crate) struct Mbarrier {
    /// Which identity the copies that report to it have.
    slot: u32,
    expected: u32,
    pub(crate) pending: u32,
    /// Bytes announced and not there yet; negative: there and not announced.
    pub(crate) tx: i64,
    /// Phases completed since it was initialised.
    pub(crate) phase: u32,
    /// The time of the first phase: identities are used again when a barrier is.
    base: u32,
    /// What the arrivals of this phase publish, and what all phases before published.
    publishing: Option<Clock>,
    published: Option<Rc<Clock>>,
    /// Who initialised it, identity and time, and where.
    by: (u32, u32),
    pc: u32,
    /// The cluster barrier that must be complete before other blocks may use it, and the fence; `None`: not fenced.
    fenced_at: Option<(u32, u32)>,
}

impl Mbarrier {
    /// The time at which what reports to the current phase is known.
    pub(super) fn time(&self) -> u32 {
        self.base + self.phase + 1
    }

    fn token(&self, no_complete: bool) -> u64 {
        let mark = if no_complete { NO_COMPLETE } else { 0 };
        mark | u64::from(self.pending) << 32 | u64::from(self.phase)
    }

    fn publish(&mut self, clock: &Clock) {
        match &mut self.publishing {
            Some(all) => all.join(clock),
            empty => *empty = Some(clock.clone()),
        }
    }
}

/// The mbarriers of a block, by their offset in its shared memory.
#[derive(Default)]
pub(crate) struct Mbarriers {
    all: BTreeMap<u32, Mbarrier>,
    /// Slots that were given out, with the time that the next barrier of this place starts from.
    slots: BTreeMap<u32, (u32, u32)>,
    /// Who issued the last copy that reports to a slot.
    pub(super) issuers: Vec<u32>,
    /// The first and the last byte of all live barriers.
    reach: (u32, u32),
}

impl Mbarriers {
    pub(crate) fn get(&self, offset: u32) -> Option<&Mbarrier> {
        self.all.get(&offset)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Who issued the last copy of an mbarrier's slot.
    pub(crate) fn issuer(&self, slot: u32) -> u32 {
        self.issuers.get(slot as usize).copied().unwrap_or(0)
    }

    /// A live barrier that overlaps these bytes.
    #[inline]
    pub(crate) fn overlapping(&self, start: u64, bytes: u32) -> Option<u32> {
        if self.all.is_empty()
            || start >= u64::from(self.reach.1)
            || start + u64::from(bytes) <= u64::from(self.reach.0)
        {
            return None;
        }
        let start = start as u32;
        let (&at, _) = self.all.range(..start.saturating_add(bytes)).next_back()?;
        (at + 8 > start).then_some(at)
    }

    fn measure(&mut self) {
        let first = self.all.keys().next().copied().unwrap_or(0);
        let end = self.all.keys().next_back().map_or(0, |last| last + 8);
        self.reach = (first, end);
    }

    /// Completes the phase if nothing is missing; whether it did.
    fn settle(&mut self, offset: u32, numbering: Numbering) -> bool {
        let Some(barrier) = self.all.get_mut(&offset) else { return false };
        if barrier.pending != 0 || barrier.tx != 0 {
            return false;
        }
        if let Some(mut clock) = barrier.publishing.take() {
            if let Some(before) = &barrier.published {
                clock.join(before);
            }
            if barrier.slot < MBARRIERS {
                clock.raise(numbering.mbarrier(barrier.slot), barrier.time());
            }
            clock.settle();
            barrier.published = Some(Rc::new(clock));
        }
        barrier.phase += 1;
        barrier.pending = barrier.expected;
        true
    }
}

/// A barrier that lanes name: the block it belongs to and its offset there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BarrierAt {
    pub(crate) block: u32,
    pub(crate) offset: u32,
}

impl Context<'_, '_> {
    fn mbarriers_of(&mut self, block: u32) -> Option<&mut Mbarriers> {
        if block == self.block {
            return Some(self.mbarriers);
        }
        self.peers.get_mut(&block).map(|peer| &mut peer.mbarriers)
    }

    pub(super) fn mbarrier(&mut self, at: BarrierAt) -> Option<&mut Mbarrier> {
        self.mbarriers_of(at.block)?.all.get_mut(&at.offset)
    }

    /// Bytes arrived. `issued_in`: the phase that their copy was issued in.
    pub(super) fn complete_bytes(
        &mut self,
        at: BarrierAt,
        bytes: u32,
        issued_in: Option<u32>,
        pc: u32,
        thread: u32,
    ) {
        let numbering = self.numbering;
        let Some(barrier) = self.mbarrier(at) else {
            self.misuse(pc, thread, || {
                format!("{bytes} bytes reported to shared {:#x}, where no mbarrier is any more", at.offset)
            });
            return;
        };
        barrier.tx -= i64::from(bytes);
        let (phase, tx) = (barrier.phase, barrier.tx);
        if let Some(issued_in) = issued_in.filter(|i| *i != phase) {
            self.misuse(pc, thread, || {
                format!(
                    "{bytes} bytes of a copy issued in phase {issued_in} of mbarrier {:#x} arrive in phase {phase}: the phase was closed \
                     without them; it must expect the bytes of all its copies",
                    at.offset
                )
            });
        }
        if tx < -i64::from(MAX_COUNT) {
            self.misuse(pc, thread, || {
                format!(
                    "mbarrier {:#x} is {} bytes short of expected ones: beyond what it can count",
                    at.offset, -tx
                )
            });
        }
        self.settle_mbarrier(at, numbering);
    }

    fn settle_mbarrier(&mut self, at: BarrierAt, numbering: Numbering) {
        if self.mbarriers_of(at.block).is_some_and(|all| all.settle(at.offset, numbering)) {
            self.stirs.push(Stir::Mbarrier(at.block, at.offset));
        }
    }

    pub(in crate::machine) fn misuse(&mut self, pc: u32, thread: u32, detail: impl FnOnce() -> String) {
        self.log.add(Kind::Mbarrier, pc, None, (self.block, thread), detail);
    }

    /// The barrier that a shared or generic address names.
    pub(in crate::machine) fn barrier_at(&self, address: u64) -> BarrierAt {
        let address = address as u32;
        let block = window::rank(address).map_or(self.block, |rank| self.cluster_first + rank);
        BarrierAt { block, offset: window::offset(address) }
    }
}

impl Warp {
    pub(in crate::machine) fn mbarrier(
        &mut self,
        cx: &mut Context<'_, '_>,
        at: usize,
        mask: u32,
        op: &MbarrierOp,
    ) -> Flow {
        let pc = self.groups[at].pc;
        match op {
            MbarrierOp::Init { address, count } => {
                let addresses = self.shared_addresses(address);
                for_lanes(mask, |lane| {
                    self.init(cx, pc, lane, addresses[lane], self.lane(*count, lane) as u32)
                });
                if cx.options.check_races {
                    self.advance();
                }
            }
            MbarrierOp::Inval { address } => {
                let addresses = self.shared_addresses(address);
                for_lanes(mask, |lane| {
                    let place = cx.barrier_at(addresses[lane]);
                    if self.usable(cx, pc, lane, place) {
                        cx.mbarriers.remove(place.offset);
                    }
                });
            }
            MbarrierOp::Arrive(arrival) => self.arrive_at_mbarrier(cx, pc, mask, arrival),
            MbarrierOp::ExpectTx { address, bytes } | MbarrierOp::CompleteTx { address, bytes } => {
                let is_expect = matches!(op, MbarrierOp::ExpectTx { .. });
                let addresses = self.shared_addresses(address);
                for_lanes(mask, |lane| {
                    let (place, bytes) = (cx.barrier_at(addresses[lane]), self.lane(*bytes, lane) as u32);
                    let thread = self.thread(lane);
                    if !self.usable(cx, pc, lane, place) {
                        return;
                    }
                    if is_expect {
                        self.expect_bytes(cx, pc, lane, place, bytes);
                    } else {
                        cx.complete_bytes(place, bytes, None, pc, thread);
                    }
                });
            }
            MbarrierOp::Wait { d, address, phase, acquires } => {
                return self.wait_at_mbarrier(cx, at, mask, *d, address, *phase, *acquires);
            }
            MbarrierOp::PendingCount { d, token } => for_lanes(mask, |lane| {
                let token = self.lane(*token, lane);
                if token & NO_COMPLETE == 0 {
                    let thread = self.thread(lane);
                    cx.misuse(pc, thread, || {
                        "pending_count of a token that is not of a .noComplete arrival".into()
                    });
                }
                self.set_lane(*d, lane, token >> 32 & u64::from(MAX_COUNT));
            }),
            MbarrierOp::AfterCopies { address, is_counted } => {
                self.arrive_after_copies(cx, pc, mask, address, *is_counted)
            }
        }
        Flow::Next
    }

    pub(super) fn thread(&self, lane: usize) -> u32 {
        self.index * 32 + lane as u32
    }

    /// Addresses in the shared window, generic ones cut to it.
    pub(super) fn shared_addresses(&self, address: &Address) -> [u64; 32] {
        let mut all = self.addresses(address);
        if address.space == Space::Generic {
            all = all.map(|at| match window::split(at) {
                (Space::Shared, at) => at,
                // Nothing is there: reported where it is used.
                _ => u64::from(u32::MAX >> 8),
            });
        }
        all
    }

    fn init(&mut self, cx: &mut Context<'_, '_>, pc: u32, lane: usize, address: u64, count: u32) {
        let thread = self.thread(lane);
        let place = cx.barrier_at(address);
        if place.block != cx.block {
            cx.misuse(pc, thread, || {
                "an mbarrier of another block can be arrived at, not initialised".into()
            });
            return;
        }
        if !place.offset.is_multiple_of(8) || place.offset as usize + 8 > cx.shared.data.len() {
            cx.misuse(pc, thread, || {
                format!(
                    "no mbarrier can be at shared {:#x}: it takes 8 aligned bytes of shared memory",
                    place.offset
                )
            });
            return;
        }
        if count == 0 || count > MAX_COUNT {
            cx.misuse(pc, thread, || format!("a count of {count} arrivals; 1 to {MAX_COUNT} are possible"));
            return;
        }
        if cx.mbarriers.get(place.offset).is_some() {
            cx.misuse(pc, thread, || {
                format!(
                    "mbarrier {:#x} is initialised again while it is in use: mbarrier.inval must come first",
                    place.offset
                )
            });
            cx.mbarriers.remove(place.offset);
        }
        // The bytes are written like others: who used them before must be done.
        let mut addresses = [0; 32];
        addresses[lane] = u64::from(place.offset);
        let request = crate::machine::access::Request::write(pc, 8);
        self.check(cx, Space::Shared, &addresses, 1 << lane, &request);
        self.put(cx, Space::Shared, u64::from(place.offset), &[0; 8], lane);
        let by = (cx.numbering.identity(cx.block, thread), self.time);
        let next = cx.mbarriers.slots.len() as u32;
        let (slot, base) = *cx.mbarriers.slots.entry(place.offset).or_insert((next, 0));
        if slot == MBARRIERS {
            cx.misuse(pc, thread, || format!("more than {MBARRIERS} mbarriers in a block: copies that report to further ones are not ordered"));
        }
        let barrier = Mbarrier {
            slot,
            expected: count,
            pending: count,
            tx: 0,
            phase: 0,
            base,
            publishing: None,
            published: None,
            by,
            pc,
            fenced_at: None,
        };
        cx.mbarriers.all.insert(place.offset, barrier);
        cx.mbarriers.measure();
    }

    /// Whether a barrier is there, and known to be.
    pub(super) fn usable(&mut self, cx: &mut Context<'_, '_>, pc: u32, lane: usize, at: BarrierAt) -> bool {
        let thread = self.thread(lane);
        let is_remote = at.block != cx.block;
        if is_remote && !self.reachable(cx, pc, lane, at.block) {
            return false;
        }
        let numbering = cx.numbering;
        let known = Rc::clone(&self.known[lane]);
        let rank = at.block - cx.cluster_first;
        let checks = cx.options.check_races;
        let Some(barrier) = cx.mbarrier(at) else {
            cx.misuse(pc, thread, || {
                let whose = if is_remote { format!(" of the block of rank {rank}") } else { String::new() };
                format!("no mbarrier is initialised at shared {:#x}{whose}", at.offset)
            });
            return false;
        };
        let (who, time) = barrier.by;
        let rounds = known.time_of(numbering.cluster_rounds());
        let fenced = barrier.fenced_at.filter(|(round, _)| rounds > *round);
        let is_own = who == numbering.identity(cx.block, thread);
        let is_known = is_own || known.knows(numbering, who, time);
        if let Some((_, fence)) = fenced.filter(|_| checks && is_remote && !is_known) {
            cx.tallies[fence as usize].work += 1;
        } else if checks && !is_known {
            let advice = if is_remote {
                "fence.mbarrier_init and a cluster barrier must come between"
            } else {
                "a barrier must come between"
            };
            cx.misuse(pc, thread, || {
                format!("mbarrier {:#x} may not be initialised yet: {advice}", at.offset)
            });
        }
        true
    }

    fn expect_bytes(&mut self, cx: &mut Context<'_, '_>, pc: u32, lane: usize, at: BarrierAt, bytes: u32) {
        let thread = self.thread(lane);
        let Some(barrier) = cx.mbarrier(at) else { return };
        barrier.tx += i64::from(bytes);
        if barrier.tx > i64::from(MAX_COUNT) {
            let tx = barrier.tx;
            cx.misuse(pc, thread, || {
                format!("mbarrier {:#x} expects {tx} bytes; it can count {MAX_COUNT}", at.offset)
            });
        }
        // Bytes that came before they were expected may be all that was missing: an H200 completes the phase here too.
        cx.settle_mbarrier(at, cx.numbering);
    }

    fn arrive_at_mbarrier(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, arrival: &Arrival) {
        let addresses = self.shared_addresses(&arrival.address);
        for_lanes(mask, |lane| {
            let (place, thread) = (cx.barrier_at(addresses[lane]), self.thread(lane));
            if !self.usable(cx, pc, lane, place) {
                return;
            }
            if let Some(bytes) = arrival.bytes {
                let bytes = self.lane(bytes, lane) as u32;
                self.expect_bytes(cx, pc, lane, place, bytes);
            }
            let count = arrival.count.map_or(1, |count| self.lane(count, lane) as u32);
            let clock = (cx.options.check_races && arrival.releases).then(|| self.published(cx, lane));
            self.arrive_with(cx, pc, thread, place, count, clock.as_ref(), arrival, Some(lane));
        });
        if cx.options.check_races && arrival.releases {
            self.advance();
        }
    }

    /// The arrival itself.
    fn arrive_with(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        thread: u32,
        at: BarrierAt,
        count: u32,
        clock: Option<&Clock>,
        arrival: &Arrival,
        lane: Option<usize>,
    ) {
        let (numbering, threads) = (cx.numbering, cx.shape.threads());
        let Some(barrier) = cx.mbarrier(at) else { return };
        let token = barrier.token(arrival.no_complete);
        let (pending, expected, phase) = (barrier.pending, barrier.expected, barrier.phase);
        if let Some(clock) = clock {
            if barrier.publishing.is_none() {
                barrier.publishing = Some(Clock::new(numbering, at.block, threads));
            }
            barrier.publish(clock);
        }
        if arrival.drops {
            barrier.expected = barrier.expected.saturating_sub(count);
        }
        barrier.pending = pending.saturating_sub(count);
        let completes = barrier.pending == 0 && barrier.tx == 0;
        if count > pending || count == 0 {
            cx.misuse(pc, thread, || {
                format!("{count} arrivals at mbarrier {:#x} in phase {phase}, where {pending} of {expected} are pending", at.offset)
            });
        }
        if completes && arrival.no_complete {
            cx.misuse(pc, thread, || {
                format!("a .noComplete arrival completes phase {phase} of mbarrier {:#x}", at.offset)
            });
        }
        cx.settle_mbarrier(at, numbering);
        if let (Some(d), Some(lane)) = (arrival.d, lane) {
            self.set_lane(d, lane, token);
        }
    }

    /// `cp.async.mbarrier.arrive`: the copies land now, and the arrival publishes them.
    fn arrive_after_copies(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        mask: u32,
        address: &Address,
        is_counted: bool,
    ) {
        self.land_copies(cx, |f| mask >> f.lane & 1 == 1);
        let addresses = self.shared_addresses(address);
        for_lanes(mask, |lane| {
            let (place, thread) = (cx.barrier_at(addresses[lane]), self.thread(lane));
            if !self.usable(cx, pc, lane, place) {
                return;
            }
            if let Some(barrier) = cx.mbarrier(place).filter(|_| !is_counted) {
                barrier.pending += 1;
            }
            // Only the copies are published, not what else the thread did.
            let clock = cx.options.check_races.then(|| {
                let mut clock = Clock::new(cx.numbering, cx.block, cx.shape.threads());
                clock.raise(thread + cx.numbering.lanes, self.open_group[lane]);
                clock
            });
            self.open_group[lane] += 1;
            let arrival = Arrival {
                address: *address,
                d: None,
                count: None,
                bytes: None,
                drops: false,
                no_complete: false,
                releases: true,
            };
            self.arrive_with(cx, pc, thread, place, 1, clock.as_ref(), &arrival, None);
        });
    }

    /// Asks whether a phase is over. Lanes that all hear no wait until it changes: asking again at once would hear the same.
    fn wait_at_mbarrier(
        &mut self,
        cx: &mut Context<'_, '_>,
        at: usize,
        mask: u32,
        d: Register,
        address: &Address,
        phase: Phase,
        acquires: bool,
    ) -> Flow {
        let pc = self.groups[at].pc;
        let addresses = self.shared_addresses(address);
        let mut yes = 0u32;
        let mut place = None;
        for_lanes(mask, |lane| {
            let at = cx.barrier_at(addresses[lane]);
            let thread = self.thread(lane);
            if at.block != cx.block {
                cx.misuse(pc, thread, || {
                    "a wait on an mbarrier of another block: only arrivals are possible there".into()
                });
                return;
            }
            if !self.usable(cx, pc, lane, at) {
                // There is nothing to wait for; the answer lets the kernel go on.
                yes |= 1 << lane;
                return;
            }
            let Some(barrier) = cx.mbarriers.get(at.offset) else { return };
            let is_over = match phase {
                Phase::Parity(parity) => u64::from(barrier.phase & 1) != self.lane(parity, lane) & 1,
                Phase::Token(token) => {
                    let token = self.lane(token, lane) as u32;
                    let now = barrier.phase;
                    if token != now && token.wrapping_add(1) != now {
                        cx.misuse(pc, thread, || format!("a token of phase {token} of mbarrier {:#x}, which is in phase {now}: only that and the one before can be asked for", at.offset));
                    }
                    token != now
                }
            };
            yes |= u32::from(is_over) << lane;
            place = Some(at);
        });
        if yes == 0
            && let Some(place) = place
            && !std::mem::take(&mut self.groups[at].gives_up)
        {
            self.groups[at].state = State::Parked(Parked::Mbarrier(place.offset));
            return Flow::Park;
        }
        self.groups[at].gives_up = false;
        let p = &mut self.regs.pred[d.index as usize];
        *p = *p & !mask | yes;
        if acquires && cx.options.check_races {
            self.learn_phases(cx, pc, yes, &addresses);
        }
        Flow::Next
    }

    /// Lanes learn what the barriers' completed phases published; those that knew the same know the same afterwards.
    fn learn_phases(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, addresses: &[u64; 32]) {
        let mut rest = lanes;
        while rest != 0 {
            let first = rest.trailing_zeros() as usize;
            let (known, address) = (Rc::clone(&self.known[first]), addresses[first]);
            let mut alike = 0u32;
            for_lanes(rest, |lane| {
                let same = addresses[lane] == address && Rc::ptr_eq(&self.known[lane], &known);
                alike |= u32::from(same) << lane;
            });
            rest &= !alike;
            let place = cx.barrier_at(address);
            let Some(published) = cx.mbarriers.get(place.offset).and_then(|b| b.published.clone()) else {
                continue;
            };
            let mut clock = (*known).clone();
            clock.join(&published);
            clock.settle();
            let clock = Rc::new(clock);
            for_lanes(alike, |lane| self.learn(lane, pc, Rc::clone(&clock)));
        }
    }

    /// `fence.mbarrier_init`: what these lanes initialised may be used by others of the cluster after its next barrier.
    pub(in crate::machine) fn fence_inits(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32) {
        for_lanes(mask, |lane| {
            let me = cx.numbering.identity(cx.block, self.thread(lane));
            let round = self.cluster_arrivals[lane];
            for barrier in cx.mbarriers.all.values_mut().filter(|b| b.by.0 == me && b.fenced_at.is_none()) {
                barrier.fenced_at = Some((round, pc));
            }
        });
    }
}

impl Mbarriers {
    fn remove(&mut self, offset: u32) {
        if let Some(barrier) = self.all.remove(&offset) {
            self.slots.insert(offset, (barrier.slot, barrier.base + barrier.phase + 1));
        }
        self.measure();
    }

    /// The identity of what reports to a barrier now, and its time; `None` beyond the slots there are.
    pub(super) fn agent(&mut self, offset: u32, numbering: Numbering, issuer: u32) -> Option<(u32, u32)> {
        let barrier = self.all.get(&offset).filter(|b| b.slot < MBARRIERS)?;
        let slot = barrier.slot as usize;
        if self.issuers.len() <= slot {
            self.issuers.resize(slot + 1, 0);
        }
        self.issuers[slot] = issuer;
        Some((numbering.mbarrier(barrier.slot), barrier.time()))
    }

    /// Barriers whose bytes do not come out even when their block ends: where they were initialised, and what is wrong.
    pub(crate) fn unsettled(&self) -> impl Iterator<Item = (u32, String)> + '_ {
        self.all.iter().filter(|(_, b)| b.tx != 0).map(|(offset, b)| {
            let what = if b.tx < 0 { "were never expected" } else { "never arrive" };
            (b.pc, format!("{} bytes of mbarrier {offset:#x} {what}", b.tx.abs()))
        })
    }

    /// What a barrier waits for, in words.
    pub(crate) fn describe(&self, offset: u32) -> String {
        match self.all.get(&offset) {
            Some(b) => format!(
                "mbarrier {offset:#x} in phase {} (parity {}): {} of {} arrivals pending, {} bytes missing",
                b.phase,
                b.phase & 1,
                b.pending,
                b.expected,
                b.tx
            ),
            None => format!("shared {offset:#x}, where no mbarrier is"),
        }
    }
}
