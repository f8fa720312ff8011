//! Asynchronous copies: agents of their own that land somewhere between issue and wait.

use super::access::Request;
use super::run::{Context, for_lanes};
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
        let mut wanted = [bytes; 32];
        for_lanes(mask, |lane| {
            if let Some(register) = copy.source_bytes {
                wanted[lane] = (self.lane(register, lane) as u32).min(bytes);
            }
            if copy.ignore_source.is_some_and(|p| self.lane(p, lane) != 0) {
                wanted[lane] = 0;
            }
        });
        self.copies_issued += u64::from(mask.count_ones());
        // The target is checked as a write of the agent, the source as its read: of what is really read.
        let good = self.check(cx, Space::Shared, &to, mask, &write);
        let mut readable = 0u32;
        let mut rest = good;
        while rest != 0 {
            let size = wanted[rest.trailing_zeros() as usize];
            let lanes = (0..32).fold(0, |all, lane| all | u32::from(wanted[lane] == size) << lane) & rest;
            rest &= !lanes;
            if size.is_power_of_two() {
                let read = Request::read(pc, size).by_agents().moving();
                // A source of fewer bytes than the copy must still be aligned to the copy.
                readable |= self.check(cx, Space::Global, &from, lanes, &read);
            }
        }
        for_lanes(good, |lane| {
            let odd = wanted[lane] != 0 && !wanted[lane].is_power_of_two();
            let source_bytes = if readable >> lane & 1 == 1 { wanted[lane] } else { 0 };
            let source_bytes =
                if odd { self.checked_prefix(cx, pc, from[lane], wanted[lane], lane) } else { source_bytes };
            let start = to[lane] as usize;
            mark_written(&mut cx.shared.written[start..start + bytes as usize]);
            let flight = Flight {
                lane: lane as u32,
                group: self.open_group[lane],
                to: to[lane] as u32,
                from: from[lane],
                bytes,
                source_bytes,
            };
            if let Some(sync_trace) = &mut self.sync_trace {
                sync_trace.issued(lane, self.open_group[lane]);
            }
            if cx.options.schedule.lands_early(cx.random) {
                land(cx, &flight);
            } else {
                self.flights.push(flight);
            }
        });
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

    /// Lands the flights that `which` names, oldest first.
    pub(super) fn land_copies(&mut self, cx: &mut Context<'_, '_>, which: impl Fn(&Flight) -> bool) {
        if self.flights.is_empty() {
            return;
        }
        self.flights.retain(|flight| {
            let lands = which(flight);
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
        self.land_copies(cx, |f| mask >> f.lane & 1 == 1 && f.group <= waited[f.lane as usize]);
    }
}

/// A copy happens.
fn land(cx: &mut Context<'_, '_>, flight: &Flight) {
    let (from, to) = (flight.source_bytes as usize, flight.bytes as usize);
    if from == MAX_BYTES && land_whole(cx, flight).is_some() {
        return;
    }
    let (mut data, mut flags): (Bytes, Bytes) = ([0; MAX_BYTES], [1; MAX_BYTES]);
    if from > 0
        && let Some(page) = cx.view.page(flight.from)
    {
        let (page, at) = (cx.view.at(page), flight.from as usize % PAGE_BYTES);
        // What nothing wrote is not valid where it arrives either.
        data[..from].copy_from_slice(&page.data[at..at + from]);
        flags[..from].copy_from_slice(&page.written[at..at + from]);
    }
    if let Some((memory, at)) = cx.shared_at(u64::from(flight.to)) {
        memory.data[at..at + to].copy_from_slice(&data[..to]);
        memory.written[at..at + to].copy_from_slice(&flags[..to]);
    }
}

/// All 16 bytes to the own block's memory, which is usual, at once.
#[inline(always)]
fn land_whole(cx: &mut Context<'_, '_>, flight: &Flight) -> Option<()> {
    let page = cx.view.page(flight.from)?;
    let (page, at) = (cx.view.at(page), flight.from as usize % PAGE_BYTES);
    let data: &Bytes = page.data.get(at..)?.first_chunk()?;
    let flags: &Bytes = page.written.get(at..)?.first_chunk()?;
    let to = flight.to as usize;
    *cx.shared.written.get_mut(to..)?.first_chunk_mut()? = *flags;
    *cx.shared.data.get_mut(to..)?.first_chunk_mut()? = *data;
    Some(())
}
