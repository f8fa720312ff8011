//! Ordering: every access of shared and global memory against everybody's earlier ones, and what is said of a race.

use super::access::{By, Direction, Request, space_name};
use super::run::{Context, for_lanes};
use super::runs::{self, Following};
use super::warp::Warp;
use crate::decode::{Kernel, Op};
use crate::finding::{Kind, Severity};
use crate::hazard::accessor::{Accessor, Conflict, Found};
use crate::hazard::clock::Who;
use crate::hazard::log::{Other, Words};
use crate::hazard::shadow::Run;
use crate::memory::{PAGE_BYTES, window};
use crate::parse::ast::Space;
use std::rc::Rc;

/// One access is recorded in parts of at most this many bytes.
const PART_BYTES: u32 = 16;

impl Warp {
    /// Orders the access of each lane; `then` gets each lane, or several that read the same, with what they conflict with.
    pub(super) fn order_each(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        lanes: u32,
        request: &Request,
        mut then: impl FnMut(&mut Self, &mut Context<'_, '_>, u32, Found),
    ) {
        if !cx.options.check_races || !matches!(space, Space::Shared | Space::Global) {
            then(self, cx, lanes, [None; 2]);
            return;
        }
        let mut rest = lanes;
        while rest != 0 {
            let passed = self.order_quickly(cx, space, addresses, rest, request);
            rest &= !passed;
            if passed != 0 {
                then(self, cx, passed, [None; 2]);
            }
            if rest != 0 {
                let known = Rc::clone(&self.known[rest.trailing_zeros() as usize]);
                let mut by = self.accessor(cx, request, &known);
                let together = self.next_access(addresses, rest, request, &mut by);
                rest &= !together;
                let at = addresses[together.trailing_zeros() as usize & 31];
                let found = self.record(cx, space, at, request, &by);
                then(self, cx, together, found);
            }
        }
    }

    /// Records the accesses of lanes, from the lowest up, as long as they conflict with nothing; which lanes those were.
    fn order_quickly(
        &self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        lanes: u32,
        request: &Request,
    ) -> u32 {
        if self.sync_trace.is_some() || request.bytes > PART_BYTES || !request.bytes.is_power_of_two() {
            return 0;
        }
        if !matches!((request.direction, request.by), (Direction::Read, By::Lanes) | (_, By::Agent(_))) {
            return self.order_runs(cx, space, addresses, lanes, request);
        }
        let is_noted = space == Space::Shared && is_notable(cx, request);
        let mut rest = lanes;
        let mut passes = true;
        while rest != 0 && passes {
            // Lanes that know the same share one description of the accessor.
            let known = &self.known[rest.trailing_zeros() as usize];
            let mut by = self.accessor(cx, request, known);
            if is_noted {
                cx.shared.shadow.start_reads(known);
            }
            while rest != 0 && Rc::ptr_eq(&self.known[rest.trailing_zeros() as usize], known) {
                let together = self.next_access(addresses, rest, request, &mut by);
                let at = addresses[together.trailing_zeros() as usize & 31];
                passes = match is_noted {
                    true => cx.shared.shadow.note_read(at as usize, request.bytes, &by),
                    false => self.pass_near(cx, space, at, request, &by),
                };
                if !passes {
                    break;
                }
                rest &= !together;
            }
            if is_noted {
                cx.shared.shadow.end_reads(&by, known, &self.waited_group, request.bytes);
            }
        }
        lanes & !rest
    }

    /// The same for accesses that each lane, or its copy, makes alone: those that follow one another at once.
    fn order_runs(
        &self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        lanes: u32,
        request: &Request,
    ) -> u32 {
        let following = Following::new(addresses, lanes, request.bytes);
        let is_write = request.direction == Direction::Write;
        // A copy belongs to the open group of its lane.
        let times = matches!(request.by, By::Copies);
        let mut rest = lanes;
        while rest != 0 {
            let mut alike = self.alike(rest);
            let mut by = self.accessor(cx, request, &self.known[rest.trailing_zeros() as usize & 31]);
            while alike != 0 && alike.trailing_zeros() == rest.trailing_zeros() {
                let (lane, count) = (alike.trailing_zeros(), following.count(alike));
                let at = addresses[lane as usize & 31];
                let run = Run {
                    offset: at as usize,
                    bytes: request.bytes,
                    is_write,
                    lanes: lane as usize..(lane + count) as usize,
                    waited: &self.waited_group,
                    times: times.then_some(&self.open_group),
                };
                let passed = match space {
                    Space::Shared if window::rank(at as u32).is_some() => 0,
                    Space::Shared => cx.shared.shadow.pass_run(run, &mut by),
                    _ => cx.view.page(at).map_or(0, |page| {
                        let page = cx.view.at(page);
                        // Reads of read-only memory leave no trace.
                        if !is_write && page.is_read_only {
                            return count;
                        }
                        page.shadow.pass_run(Run { offset: at as usize % PAGE_BYTES, ..run }, &mut by)
                    }),
                };
                rest &= !runs::of(lane, passed);
                alike &= rest;
                if passed < count {
                    return lanes & !rest;
                }
            }
        }
        lanes
    }

    /// Records an access of one part to memory that is near, if it conflicts with nothing; otherwise nothing.
    #[inline(always)]
    pub(super) fn pass_near(
        &self,
        cx: &mut Context<'_, '_>,
        space: Space,
        at: u64,
        request: &Request,
        by: &Accessor<'_>,
    ) -> bool {
        let is_write = request.direction == Direction::Write;
        match space {
            Space::Shared if window::rank(at as u32).is_some() => false,
            Space::Shared => cx.shared.shadow.pass(at as usize, request.bytes, is_write, by),
            _ => cx.view.page(at).is_some_and(|page| {
                let page = cx.view.at(page);
                // Reads of read-only memory leave no trace.
                !is_write && page.is_read_only
                    || page.shadow.pass(at as usize % PAGE_BYTES, request.bytes, is_write, by)
            }),
        }
    }

    /// The lowest of `rest`, with its neighbours that know the same and read the same place; describes them.
    #[inline(always)]
    fn next_access(&self, addresses: &[u64; 32], rest: u32, request: &Request, by: &mut Accessor<'_>) -> u32 {
        let lane = rest.trailing_zeros() as usize & 31;
        let mut together = 1 << lane;
        by.alone = Some((lane as u32, self.waited_group[lane]));
        if request.direction == Direction::Read && matches!(request.by, By::Lanes) {
            for next in lane + 1..32 {
                let is_same = rest >> next & 1 == 1 && addresses[next] == addresses[lane];
                if !is_same || !Rc::ptr_eq(&self.known[next], &self.known[lane]) {
                    break;
                }
                together |= 1 << next;
                by.alone = None;
            }
        }
        by.mask = together;
        match request.by {
            By::Lanes => {}
            By::Copies => by.time = self.open_group[lane],
            // One lane stands for the agent, whose identity has no lanes.
            By::Agent(_) => by.mask = 1,
        }
        together
    }

    /// The lanes of `lanes` that know the same as the lowest of them.
    pub(super) fn alike(&self, lanes: u32) -> u32 {
        let place = |lane: usize| Rc::as_ptr(&self.known[lane]) as usize;
        let known = place(lanes.trailing_zeros() as usize & 31);
        // All of them, mostly.
        if (0..32).fold(0, |others, lane| others | (place(lane) ^ known)) == 0 {
            return lanes;
        }
        (0..32).fold(0, |all, lane| all | u32::from(place(lane) == known) << lane) & lanes
    }

    /// Orders reads of places in shared memory, one for each lane of `named`, by several lanes each: as one if they know the same, else one
    /// by one.
    pub(super) fn order_together(
        &mut self,
        cx: &mut Context<'_, '_>,
        addresses: &[u64; 32],
        named: u32,
        readers: impl Fn(usize) -> u32,
        request: &Request,
    ) {
        if !cx.options.check_races {
            return;
        }
        let mut rest = 0;
        for_lanes(named, |lane| rest |= readers(lane));
        while rest != 0 {
            let alike = self.alike(rest);
            let known = Rc::clone(&self.known[rest.trailing_zeros() as usize]);
            rest &= !alike;
            let mut by = self.accessor(cx, request, &known);
            let is_noted = self.sync_trace.is_none() && is_notable(cx, request);
            let mut left = named;
            if is_noted {
                cx.shared.shadow.start_reads(&known);
                let masks = |lane: usize| readers(lane) & alike;
                left &= !cx.shared.shadow.note_known(addresses, named, request.bytes, masks, &by);
            }
            for_lanes(left, |lane| {
                by.mask = readers(lane) & alike;
                if by.mask == 0 {
                    return;
                }
                let (address, one) = (addresses[lane], by.mask.trailing_zeros());
                by.alone = by.mask.is_power_of_two().then(|| (one, self.waited_group[one as usize]));
                if is_noted {
                    if cx.shared.shadow.note_read(address as usize, request.bytes, &by) {
                        return;
                    }
                    cx.shared.shadow.end_reads(&by, &known, &self.waited_group, request.bytes);
                }
                if self.sync_trace.is_none() && self.pass_near(cx, Space::Shared, address, request, &by) {
                    return;
                }
                let [found, _] = self.record(cx, Space::Shared, address, request, &by);
                if let Some(conflict) = found {
                    self.report_race(cx, Space::Shared, address, by.mask, request, conflict, false);
                }
            });
            if is_noted {
                cx.shared.shadow.end_reads(&by, &known, &self.waited_group, request.bytes);
            }
        }
    }

    pub(super) fn accessor<'k>(
        &self,
        cx: &Context<'_, '_>,
        request: &Request,
        known: &'k crate::hazard::clock::Clock,
    ) -> Accessor<'k> {
        let lanes_base = cx.numbering.warp(cx.block, self.index);
        let agents_base = cx.numbering.agents(cx.block, self.index);
        Accessor {
            numbering: cx.numbering,
            base: match request.by {
                By::Lanes => lanes_base,
                By::Copies => agents_base,
                By::Agent(agent) => agent.identity,
            },
            mask: 0,
            time: if let By::Agent(agent) = request.by { agent.time } else { self.time },
            pc: request.marked_pc(),
            known,
            alone: None,
            lanes_base,
            agents_base,
            proxy: if let By::Agent(agent) = request.by { agent.proxy } else { None },
            passes_on: match request.by {
                By::Agent(agent) => !matches!(cx.numbering.who(agent.identity), Who::Mbarrier(_)),
                _ => true,
            },
            fences_reads: cx.options.strict_proxies,
        }
    }

    /// Checks one place against everybody's earlier accesses and records this one.
    #[inline]
    fn record(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        request: &Request,
        by: &Accessor<'_>,
    ) -> Found {
        let is_write = request.direction == Direction::Write;
        let step = request.bytes.min(PART_BYTES);
        let mut all = [None; 2];
        for part in (0..request.bytes).step_by(step as usize) {
            let at = address + u64::from(part);
            if self.sync_trace.is_some() {
                self.credit(cx, space, at, step, is_write, by);
            }
            let found = match space {
                Space::Shared => match cx.shared_at(at) {
                    Some((memory, at)) => memory.shadow.access(at, step, is_write, by),
                    None => [None; 2],
                },
                _ => match cx.view.page(at) {
                    Some(page) => {
                        cx.view.at(page).shadow.access(at as usize % PAGE_BYTES, step, is_write, by)
                    }
                    None => [None; 2],
                },
            };
            if found[0].is_some() {
                all = [all[0].or(found[0]), all[1].or(found[1])];
            }
        }
        all
    }

    /// Says that an access of `lanes` is not ordered with an earlier one. `agrees`: both store the same value.
    pub(super) fn report_race(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        address: u64,
        lanes: u32,
        request: &Request,
        conflict: Conflict,
        agrees: bool,
    ) {
        let numbering = cx.numbering;
        let lane = self.unordered_lane(cx, lanes, request, &conflict);
        let Some(kind) = self.race_kind(cx, space, address, lane, request, &conflict) else { return };
        let mut other = Other {
            pc: conflict.pc,
            block: u64::from(numbering.block_of(conflict.who)),
            thread: numbering.thread_of(conflict.who),
        };
        if let Who::Mbarrier(slot) = numbering.who(conflict.who) {
            let block = numbering.block_of(conflict.who);
            let peer = cx.peers.get(&block).map(|peer| &peer.mbarriers);
            let barriers = if block == cx.block { Some(&*cx.mbarriers) } else { peer };
            other.thread = barriers.map_or(0, |all| all.issuer(slot));
        }
        let is_guess = kind == Kind::Race && is_first_guess(cx.kernel, request.pc, conflict.pc);
        let severity = if agrees || is_guess { Severity::Info } else { kind.severity() };
        let thread = self.index * 32 + lane as u32;
        let at = (u64::from(cx.block), thread);
        // The log is taken out: what is said is made only once, and may look at everything else.
        let mut log = std::mem::take(cx.log);
        log.add_at(kind, severity, request.pc, Some(other), at, || {
            let detail = self.race_detail(cx, space, address, request, &conflict);
            let advice = match is_guess {
                true => FIRST_GUESS.to_owned(),
                false => self.advice(cx, kind, lane, request, &conflict, &other, space, agrees),
            };
            Words { detail, advice: Some(advice), variable: cx.variable(space, address) }
        });
        *cx.log = log;
    }

    /// Of lanes that made one access together, one that is really not ordered with the other side.
    fn unordered_lane(
        &self,
        cx: &Context<'_, '_>,
        lanes: u32,
        request: &Request,
        conflict: &Conflict,
    ) -> usize {
        let own = conflict.who.wrapping_sub(cx.numbering.warp(cx.block, self.index));
        let copies = conflict.who.wrapping_sub(cx.numbering.agents(cx.block, self.index));
        let mut others = lanes;
        if matches!(request.by, By::Lanes) {
            if own < 32 {
                others &= !(1 << own);
            } else if copies < 32 && self.waited_group[copies as usize] >= conflict.time {
                others &= !(1 << copies);
            }
        }
        let lane = if others == 0 { lanes } else { others };
        lane.trailing_zeros() as usize & 31
    }

    /// What kind of finding a conflict is; `None`: two strong accesses that are as they should be.
    fn race_kind(
        &self,
        cx: &Context<'_, '_>,
        space: Space,
        address: u64,
        lane: usize,
        request: &Request,
        conflict: &Conflict,
    ) -> Option<Kind> {
        let with_agent = !matches!(request.by, By::Lanes) || cx.numbering.is_agent(conflict.who);
        if conflict.both_strong {
            let stores_flag =
                matches!(&cx.kernel.code[conflict.pc as usize].op, Op::Store(t) if t.is_constant);
            let near = conflict.who.wrapping_sub(cx.numbering.warp(cx.block, self.index)) < 32;
            let same_warp = near && conflict.is_write && !stores_flag;
            // A flag that was stored behind a fence is there to synchronise.
            let is_flag = || cx.places.is_released(&Self::place(cx, space, address));
            let has_heard = self.heard_of(cx, lane, conflict);
            return match () {
                () if conflict.is_update => Some(Kind::LostUpdate),
                () if same_warp && !is_flag() => Some(Kind::WarpSynchronous),
                () if has_heard && conflict.is_write => Some(Kind::UnfencedMessage),
                () if has_heard || !is_exchange(cx, space, request, conflict) || is_flag() => None,
                () if near => Some(Kind::WarpSynchronous),
                () => Some(Kind::VolatileRace),
            };
        }
        Some(match () {
            () if conflict.non_coherent => Kind::NonCoherentLoad,
            () if conflict.only_proxy => Kind::ProxyRace,
            () if with_agent => Kind::AsyncRace,
            () => Kind::Race,
        })
    }

    fn race_detail(
        &self,
        cx: &Context<'_, '_>,
        space: Space,
        address: u64,
        request: &Request,
        conflict: &Conflict,
    ) -> String {
        let numbering = cx.numbering;
        let verb = |write: bool| if write { "write" } else { "read" };
        let mine = verb(request.direction == Direction::Write);
        let theirs = verb(conflict.is_write);
        let mine_by = match request.by {
            By::Lanes => "",
            By::Copies => "asynchronous ",
            By::Agent(agent) => agent_name(numbering.who(agent.identity)),
        };
        let their_by = agent_name(numbering.who(conflict.who));
        let (space_name, bytes) = (space_name(space), request.bytes);
        let place = cx.variable(space, address);
        let place = place.map_or_else(String::new, |v| format!(" ({}+{})", v.name, v.offset_bytes));
        let is_ordered = conflict.only_proxy || conflict.non_coherent;
        let relation = if is_ordered { "a" } else { "an unordered" };
        format!(
            "{mine_by}{mine} of {bytes} bytes at {space_name} {address:#x}{place} after {relation} {their_by}{theirs}"
        )
    }
}

const FIRST_GUESS: &str = "the compare-and-swap finds out if what was loaded is old, so the result does not depend on the order; by the letter \
                           the load must be volatile or atomic as well";

/// Whether one access is the plain load that a loop around a compare-and-swap starts with, and the other an atomic.
fn is_first_guess(kernel: &Kernel, mine: u32, other: u32) -> bool {
    let (mine, other) = (&kernel.code[mine as usize].op, &kernel.code[other as usize].op);
    let is = |load: &Op, atomic: &Op| matches!((load, atomic), (Op::Load(t), Op::Atomic(_)) if t.is_compared);
    is(mine, other) || is(other, mine)
}

/// Whether threads of a block exchange data by volatile accesses of shared memory, one load and one store, as if they were ordered.
fn is_exchange(cx: &Context<'_, '_>, space: Space, request: &Request, conflict: &Conflict) -> bool {
    if space != Space::Shared || cx.numbering.block_of(conflict.who) != cx.block {
        return false;
    }
    let (mine, other) = (&cx.kernel.code[request.pc as usize].op, &cx.kernel.code[conflict.pc as usize].op);
    let (Op::Load(load), Op::Store(store)) = (if conflict.is_write { (mine, other) } else { (other, mine) })
    else {
        return false;
    };
    load.is_volatile_data && store.is_volatile_data
}

/// Whether reads of shared memory are only noted: plain ones by threads, of memory that no other block reaches.
fn is_notable(cx: &Context<'_, '_>, request: &Request) -> bool {
    request.direction == Direction::Read
        && request.order.strong.is_none()
        && request.marks == 0
        && matches!(request.by, By::Lanes)
        && cx.shape.cluster_size() == 1
        && !cx.options.strict_proxies
}

/// What stands before "read" or "write" of an agent.
fn agent_name(who: Who) -> &'static str {
    match who {
        Who::Lane => "",
        Who::Copies => "asynchronous ",
        Who::BulkReads | Who::BulkWrites => "bulk store's ",
        Who::Wgmma => "wgmma's ",
        Who::Mbarrier(_) => "bulk copy's ",
    }
}
