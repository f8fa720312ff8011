//! Asynchronous copies: agents of their own that land somewhere between issue and wait.

use super::access::Request;
use super::launch::Schedule;
use super::run::{Context, for_lanes};
use super::runs::Following;
use super::warp::{Flight, Warp};
use crate::decode::AsyncCopy;
use crate::memory::{PAGE_BYTES, mark_written};
use crate::parse::ast::Space;

/// The largest copy of a lane.
const MAX_BYTES: usize = 16;

type Bytes = [u8; MAX_BYTES];

impl Warp {
    pub(super) fn issue_copies(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, copy: &AsyncCopy) {
        let to = self.addresses(&copy.to);
        let from = self.addresses(&copy.from);
        let bytes = copy.bytes;
        let write = Request::write(pc, bytes).by_agents().within(&copy.to);
        let wanted = self.wanted_bytes(mask, copy);
        self.copies_issued += u64::from(mask.count_ones());
        // The target is checked as a write of the agent, the source as its read: of what is really read.
        let good = self.check(cx, Space::Shared, &to, mask, &write);
        let mut readable = 0u32;
        let mut rest = good;
        while rest != 0 {
            let size = wanted[rest.trailing_zeros() as usize];
            let lanes = alike(&wanted, size) & rest;
            rest &= !lanes;
            if size.is_power_of_two() {
                let read = Request::read(pc, size).by_agents().moving();
                // A source of fewer bytes than the copy must still be aligned to the copy.
                readable |= self.check(cx, Space::Global, &from, lanes, &read);
            }
        }
        let together = self.flying_together(cx, good & readable, copy, [&to, &from], &wanted);
        for (lane, count) in together.runs(good) {
            let odd = wanted[lane] != 0 && !wanted[lane].is_power_of_two();
            let source_bytes = if readable >> lane & 1 == 1 { wanted[lane] } else { 0 };
            let source_bytes =
                if odd { self.checked_prefix(cx, pc, from[lane], wanted[lane], lane) } else { source_bytes };
            let start = to[lane] as usize;
            mark_written(&mut cx.shared.written[start..start + (count * bytes) as usize]);
            let flight = Flight {
                lane: lane as u32,
                count,
                group: self.open_group[lane],
                to: to[lane] as u32,
                from: from[lane],
                bytes,
                source_bytes,
            };
            if let Some(sync_trace) = &mut self.sync_trace {
                (lane..lane + count as usize).for_each(|l| sync_trace.issued(l, self.open_group[l]));
            }
            if cx.options.schedule.lands_early(cx.random) {
                land(cx, &flight);
            } else {
                self.flights.push(flight);
            }
        }
    }

    /// How many bytes the copy of each lane reads.
    fn wanted_bytes(&self, mask: u32, copy: &AsyncCopy) -> [u32; 32] {
        let mut wanted = [copy.bytes; 32];
        if copy.source_bytes.is_none() && copy.ignore_source.is_none() {
            return wanted;
        }
        for_lanes(mask, |lane| {
            if let Some(register) = copy.source_bytes {
                wanted[lane] = (self.lane(register, lane) as u32).min(copy.bytes);
            }
            if copy.ignore_source.is_some_and(|p| self.lane(p, lane) != 0) {
                wanted[lane] = 0;
            }
        });
        wanted
    }

    /// Which copies of neighbours are one flight. Under a schedule that draws lots each lands when it likes.
    fn flying_together(
        &self,
        cx: &Context<'_, '_>,
        lanes: u32,
        copy: &AsyncCopy,
        [to, from]: [&[u64; 32]; 2],
        wanted: &[u32; 32],
    ) -> Following {
        if cx.options.schedule == Schedule::Random {
            return Following::NONE;
        }
        let group = self.open_group[lanes.trailing_zeros() as usize & 31];
        let whole = lanes & alike(wanted, copy.bytes) & alike(&self.open_group, group);
        Following::new(to, whole, copy.bytes).and(Following::new(from, whole, copy.bytes))
    }

    /// A source that is no power of two is checked byte by byte.
    fn checked_prefix(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        from: u64,
        bytes: u32,
        lane: usize,
    ) -> u32 {
        let read = Request::read(pc, 1).by_agents().moving();
        for i in 0..bytes {
            let mut addresses = [0; 32];
            addresses[lane] = from + u64::from(i);
            if self.check(cx, Space::Global, &addresses, 1 << lane, &read) == 0 {
                return i;
            }
        }
        bytes
    }

    /// Lands the copies that `which` names by their lane and group, oldest first.
    pub(super) fn land_copies(&mut self, cx: &mut Context<'_, '_>, which: impl Fn(usize, u32) -> bool) {
        if self.flights.is_empty() {
            return;
        }
        let is_split = |flight: &Flight| {
            let first = which(flight.lane as usize, flight.group);
            (1..flight.count).any(|index| which((flight.lane + index) as usize, flight.group) != first)
        };
        if self.flights.iter().any(is_split) {
            let lanes =
                |flight: &Flight| (0..flight.count).map(|index| flight.of_lane(index)).collect::<Vec<_>>();
            self.flights = self.flights.iter().flat_map(lanes).collect();
        }
        self.flights.retain(|flight| {
            let lands = which(flight.lane as usize, flight.group);
            if lands {
                land(cx, flight);
            }
            !lands
        });
    }

    /// Closes the open group of each lane.
    pub(super) fn commit_copies(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32) {
        if let Some(sync_trace) = &self.sync_trace {
            cx.tallies[pc as usize].work += sync_trace.copies_in(mask, &self.open_group);
        }
        for_lanes(mask, |lane| self.open_group[lane] += 1);
    }

    /// Waits until at most `pending` groups are open, or for everything.
    pub(super) fn wait_copies(&mut self, cx: &mut Context<'_, '_>, pc: u32, mask: u32, pending: Option<u32>) {
        for_lanes(mask, |lane| {
            let done = match pending {
                // The open group has not been committed and does not count.
                Some(pending) => (self.open_group[lane] - 1).saturating_sub(pending),
                None => {
                    self.open_group[lane] += 1;
                    self.open_group[lane] - 1
                }
            };
            self.waited_group[lane] = self.waited_group[lane].max(done);
        });
        let waited = self.waited_group;
        if let Some(sync_trace) = &mut self.sync_trace {
            cx.tallies[pc as usize].work += sync_trace.retire(mask, &waited);
        }
        self.land_copies(cx, |lane, group| mask >> lane & 1 == 1 && group <= waited[lane & 31]);
    }
}

/// A copy happens.
fn land(cx: &mut Context<'_, '_>, flight: &Flight) {
    let (from, to) = (flight.source_bytes as usize, flight.bytes as usize);
    if from == to && land_whole(cx, flight).is_some() {
        return;
    }
    if flight.count > 1 {
        (0..flight.count).for_each(|index| land(cx, &flight.of_lane(index)));
        return;
    }
    let (mut data, mut flags): (Bytes, Bytes) = ([0; MAX_BYTES], [1; MAX_BYTES]);
    if from > 0
        && let Some(page) = cx.view.page(flight.from)
    {
        let (page, at) = (cx.view.at(page), flight.from as usize % PAGE_BYTES);
        // What nothing wrote is not valid where it arrives either.
        data[..from].copy_from_slice(&page.data()[at..at + from]);
        flags[..from].copy_from_slice(&page.written()[at..at + from]);
    }
    if let Some((memory, at)) = cx.shared_at(u64::from(flight.to)) {
        memory.data[at..at + to].copy_from_slice(&data[..to]);
        memory.written[at..at + to].copy_from_slice(&flags[..to]);
    }
}

/// All bytes to the own block's memory, which is usual, at once.
#[inline(always)]
fn land_whole(cx: &mut Context<'_, '_>, flight: &Flight) -> Option<()> {
    let bytes = (flight.count * flight.bytes) as usize;
    let page = cx.view.page(flight.from)?;
    let (page, at) = (cx.view.at(page), flight.from as usize % PAGE_BYTES);
    let (from, to) = (at..at + bytes, flight.to as usize..flight.to as usize + bytes);
    let (data, flags) = (page.data().get(from.clone())?, page.written().get(from)?);
    cx.shared.data.get_mut(to.clone())?.copy_from_slice(data);
    cx.shared.written.get_mut(to)?.copy_from_slice(flags);
    Some(())
}

/// The lanes whose value is this one.
#[inline(always)]
fn alike(values: &[u32; 32], value: u32) -> u32 {
    (0..32).fold(0, |all, lane| all | u32::from(values[lane] == value) << lane)
}
