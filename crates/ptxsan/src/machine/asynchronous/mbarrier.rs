//! mbarriers: phases, pending arrivals and bytes, and what is learnt from a phase that has completed.

use super::barrier_state::{BarrierAt, Mbarrier, Mbarriers, NO_COMPLETE};
use crate::decode::{Address, Arrival, MbarrierOp, Phase, Register, Scope};
use crate::finding::Kind;
use crate::hazard::clock::{Clock, MBARRIERS, Numbering};
use crate::hazard::sync::Seen;
use crate::machine::run::{Context, Flow, Stir, for_lanes};
use crate::machine::warp::{Parked, State, Warp};
use crate::memory::window;
use crate::parse::ast::Space;
use std::rc::Rc;

/// The largest count of arrivals and of bytes.
const MAX_COUNT: u32 = (1 << 20) - 1;
impl Context<'_, '_> {
    fn mbarriers_of(&mut self, block: u32) -> Option<&mut Mbarriers> {
        if block == self.block {
            return Some(self.mbarriers);
        }
        self.peers.get_mut(&block).map(|peer| &mut peer.mbarriers)
    }

    pub(super) fn mbarrier(&mut self, at: BarrierAt) -> Option<&mut Mbarrier> {
        self.mbarriers_of(at.block)?.get_mut(at.offset)
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
            MbarrierOp::Wait { d, address, phase, acquires, scope, tests } => {
                return self.wait_at_mbarrier(
                    cx,
                    at,
                    mask,
                    (*d, address, *phase),
                    (*acquires, *scope),
                    *tests,
                );
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
        let slot = cx.mbarriers.start(place.offset, count, by, pc);
        if slot == MBARRIERS {
            cx.misuse(pc, thread, || format!("more than {MBARRIERS} mbarriers in a block: copies that report to further ones are not ordered"));
        }
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
        if let Some((_, fence)) = fenced.filter(|_| checks && !is_known) {
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
        // What was published last: where, in which phase, and by whose knowledge.
        let mut last = None;
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
            // Who waits for the phase knows of an arrival that releases something.
            if arrival.releases {
                self.visit(cx, pc, lane, place.block);
            }
            if cx.options.check_races {
                self.publish_at(cx, lane, place, arrival, &mut last);
            }
            self.arrive_with(cx, pc, thread, place, count, arrival, Some(lane));
        });
        if cx.options.check_races && arrival.releases {
            self.advance();
        }
    }

    /// A lane's arrival publishes what it knows and did; once what lanes know that know the same. `last`: what was published just before.
    /// A relaxed one publishes what was fenced before it. To another block an arrival that reaches no further than its own says
    /// only that what came before is over: by the letter not even that, but slots are freed so everywhere, and nothing read can be seen
    /// too early.
    fn publish_at(
        &self,
        cx: &mut Context<'_, '_>,
        lane: usize,
        at: BarrierAt,
        arrival: &Arrival,
        last: &mut Option<(BarrierAt, u32, *const Clock)>,
    ) {
        let (numbering, threads, is_own) = (cx.numbering, cx.shape.threads(), at.block == cx.block);
        let fenced = self.fenced.get(lane).and_then(Option::as_ref);
        let (clock, scope) = match (arrival.releases, fenced) {
            (true, _) if is_own => (None, arrival.scope),
            (true, _) => (Some(Rc::new(self.published(cx, lane))), arrival.scope),
            (false, Some(fenced)) => (Some(Rc::clone(&fenced.clock)), fenced.scope.min(arrival.scope)),
            (false, None) => (Some(Rc::new(self.fresh_clock(cx))), arrival.scope),
        };
        let Some(barrier) = cx.mbarrier(at) else { return };
        let me = Some((at, barrier.phase, Rc::as_ptr(&self.known[lane])));
        let publishing = barrier.publishing(numbering, at.block, threads);
        if let Some(clock) = clock {
            match (is_own, scope) {
                (true, _) => publishing.join(&clock),
                (false, Scope::Cta) => publishing.join_as_over(&clock),
                (false, Scope::Device) => barrier.publishing_far(numbering, at.block, threads).join(&clock),
            }
            return;
        }
        if *last != me {
            publishing.join(&self.known[lane]);
            *last = me;
        }
        self.raise_lane_of(numbering, lane, publishing);
    }

    /// The arrival itself.
    fn arrive_with(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        thread: u32,
        at: BarrierAt,
        count: u32,
        arrival: &Arrival,
        lane: Option<usize>,
    ) {
        let numbering = cx.numbering;
        let Some(barrier) = cx.mbarrier(at) else { return };
        let token = barrier.token(arrival.no_complete);
        let (pending, expected, phase) = (barrier.pending, barrier.expected, barrier.phase);
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
        self.land_copies(cx, |lane, _| mask >> lane & 1 == 1);
        let addresses = self.shared_addresses(address);
        for_lanes(mask, |lane| {
            let (place, thread) = (cx.barrier_at(addresses[lane]), self.thread(lane));
            if !self.usable(cx, pc, lane, place) {
                return;
            }
            if let Some(barrier) = cx.mbarrier(place).filter(|_| !is_counted) {
                barrier.pending += 1;
            }
            if cx.options.check_races {
                // Only the copies are published, not what else the thread did.
                let mut clock = Clock::new(cx.numbering, cx.block, cx.shape.threads());
                clock.raise(thread + cx.numbering.lanes, self.open_group[lane]);
                let (numbering, threads) = (cx.numbering, cx.shape.threads());
                if let Some(barrier) = cx.mbarrier(place) {
                    barrier.publishing(numbering, place.block, threads).join(&clock);
                }
            }
            self.open_group[lane] += 1;
            let arrival = Arrival {
                address: *address,
                d: None,
                count: None,
                bytes: None,
                drops: false,
                no_complete: false,
                releases: true,
                scope: Scope::Cta,
            };
            self.arrive_with(cx, pc, thread, place, 1, &arrival, None);
        });
    }

    /// Asks whether a phase is over. Lanes that all hear no wait until it changes: asking again at once would hear the same.
    fn wait_at_mbarrier(
        &mut self,
        cx: &mut Context<'_, '_>,
        at: usize,
        mask: u32,
        (d, address, phase): (Register, &Address, Phase),
        (acquires, scope): (bool, Scope),
        tests: bool,
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
            && !(tests && self.says_no(cx, pc, place))
        {
            self.groups[at].state = State::Parked(Parked::Mbarrier(place.offset));
            return Flow::Park;
        }
        self.groups[at].gives_up = false;
        let p = &mut self.regs.pred[d.index as usize];
        *p = *p & !mask | yes;
        if cx.options.check_races {
            self.learn_phases(cx, pc, yes, &addresses, (acquires, scope));
        }
        Flow::Next
    }

    /// Whether a `test_wait` says no at once: what comes then has code of its own. Who asks again waits.
    fn says_no(&mut self, cx: &Context<'_, '_>, pc: u32, at: BarrierAt) -> bool {
        let phase = cx.mbarriers.get(at.offset).map_or(0, |barrier| barrier.phase);
        self.told_no.insert(pc, (at.offset, phase)) != Some((at.offset, phase))
    }

    /// Lanes learn what the barriers' completed phases published: at once, or at the next fence if they do not acquire. Those that knew
    /// the same know the same afterwards.
    fn learn_phases(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lanes: u32,
        addresses: &[u64; 32],
        (acquires, scope): (bool, Scope),
    ) {
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
            let Some(barrier) = cx.mbarriers.get(place.offset) else { continue };
            let Some(published) = barrier.published.clone() else { continue };
            let mut clock = if acquires { (*known).clone() } else { self.fresh_clock(cx) };
            clock.join(&published);
            match (&barrier.published_far, scope) {
                (Some(far), Scope::Device) => clock.join(far),
                (Some(far), Scope::Cta) => clock.join_as_over(far),
                (None, _) => {}
            }
            clock.settle();
            if !acquires {
                self.polled |= alike;
                self.seen.resize_with(32, Seen::default);
                // A wait that reaches its block only says no more of others than that they have come so far.
                let reaches_far = barrier.published_far.is_some() && scope == Scope::Device;
                for_lanes(alike, |lane| self.seen[lane].add(&clock, !reaches_far));
                continue;
            }
            let clock = Rc::new(clock);
            for_lanes(alike, |lane| self.learn(lane, pc, Rc::clone(&clock)));
        }
    }

    /// `fence.mbarrier_init`: what these lanes initialised may be used by others of the cluster after its next barrier.
    pub(in crate::machine) fn fence_inits(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32) {
        for_lanes(mask, |lane| {
            let me = cx.numbering.identity(cx.block, self.thread(lane));
            let round = self.cluster_arrivals[lane];
            for barrier in cx.mbarriers.unfenced_of(me) {
                barrier.fenced_at = Some((round, pc));
                barrier.is_shown = true;
            }
        });
    }

    /// A proxy fence shows copies the initialisations that its lanes know of.
    pub(in crate::machine) fn show_inits(&mut self, cx: &mut Context<'_, '_>, mask: u32) {
        let numbering = cx.numbering;
        for_lanes(mask, |lane| {
            let me = numbering.identity(cx.block, self.thread(lane));
            let known = &self.known[lane];
            for barrier in cx.mbarriers.iter_mut().filter(|barrier| !barrier.is_shown) {
                let (who, time) = barrier.by;
                barrier.is_shown = who == me || known.knows(numbering, who, time);
            }
        });
    }

    /// Asks, where proxy fences are asked for, that one shows a barrier to the copy that reports to it.
    pub(super) fn require_shown(&mut self, cx: &mut Context<'_, '_>, pc: u32, lane: usize, at: BarrierAt) {
        let is_asked = cx.options.strict_proxies && cx.options.check_races;
        if is_asked && cx.mbarrier(at).is_some_and(|barrier| !barrier.is_shown) {
            cx.misuse(pc, self.thread(lane), || {
                format!(
                    "mbarrier {:#x} may not be initialised yet for a copy: fence.mbarrier_init or fence.proxy.async must follow \
                     mbarrier.init, before the barrier",
                    at.offset
                )
            });
        }
    }
}
