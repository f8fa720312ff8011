//! Accesses of an asynchronous agent: many addresses, one after the other, for one lane.

use super::access::{Direction, Request};
use super::bounds::all_set;
use super::run::Context;
use super::warp::Warp;
use crate::memory::PAGE_BYTES;
use crate::parse::ast::Space;
use std::rc::Rc;

impl Warp {
    /// Checks each place, of so many bytes, as an access of `request`; `then` hears whether it can be made.
    pub(super) fn check_each(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        lane: usize,
        places: impl Iterator<Item = (u64, u32)>,
        request: &Request,
        mut then: impl FnMut(&mut Context<'_, '_>, u64, u32, bool),
    ) {
        let known = Rc::clone(&self.known[lane]);
        let mut by = self.accessor(cx, request, &known);
        by.mask = 1;
        by.alone = Some((lane as u32, self.waited_group[lane]));
        let is_quick = self.sync_trace.is_none() && request.extent == 0 && !cx.options.programmatic;
        let (mut run, mut traffic) = (Run::default(), 0);
        let mut places = places.peekable();
        while let Some(place) = places.next() {
            run.push(place);
            if places.peek().is_some_and(|next| run.takes(*next)) {
                continue;
            }
            if let Some((at, bytes)) = run.whole().filter(|_| is_quick) {
                let whole = Request { bytes, ..*request };
                let is_usual = is_usual(cx, space, at, &whole);
                if is_usual && (!cx.options.check_races || self.pass_near(cx, space, at, &whole, &by)) {
                    traffic += u64::from(bytes);
                    then(cx, at, bytes, true);
                    run = Run::default();
                    continue;
                }
            }
            for (at, bytes) in std::mem::take(&mut run).parts() {
                let mut addresses = [0; 32];
                addresses[lane] = at;
                let part = Request { bytes, ..*request };
                let is_good = self.check(cx, space, &addresses, 1 << lane, &part) != 0;
                then(cx, at, bytes, is_good);
            }
        }
        let tally = &mut cx.tallies[request.pc as usize];
        *(if space == Space::Shared { &mut tally.shared_bytes } else { &mut tally.global_bytes }) += traffic;
    }
}

/// Places that follow one another, of 16 bytes each and in the same [`RUN_BYTES`]; or one place of fewer bytes.
#[derive(Default)]
struct Run {
    places: [(u64, u32); RUN_PARTS],
    count: usize,
    /// Which parts of the row they are.
    mask: u32,
}

/// A row of a swizzled tile.
const RUN_BYTES: u64 = 128;
const PART_BYTES: u32 = 16;
const RUN_PARTS: usize = (RUN_BYTES / PART_BYTES as u64) as usize;

impl Run {
    fn push(&mut self, place: (u64, u32)) {
        self.places[self.count] = place;
        self.count += 1;
        self.mask |= Self::bit(place.0);
    }

    fn bit(at: u64) -> u32 {
        1 << (at % RUN_BYTES / u64::from(PART_BYTES))
    }

    /// Whether a place belongs to the run.
    fn takes(&self, (at, bytes): (u64, u32)) -> bool {
        let (first, size) = self.places[0];
        let is_near = at / RUN_BYTES == first / RUN_BYTES && at.is_multiple_of(u64::from(PART_BYTES));
        is_near && (bytes, size) == (PART_BYTES, PART_BYTES) && self.mask & Self::bit(at) == 0
    }

    /// Where it starts and its bytes, if nothing is missing between its parts.
    fn whole(&self) -> Option<(u64, u32)> {
        let (first, size) = self.places[0];
        if self.count == 1 {
            return Some((first, size));
        }
        let low = self.mask.trailing_zeros();
        let is_whole = (self.mask >> low).trailing_ones() == self.mask.count_ones();
        let start = first / RUN_BYTES * RUN_BYTES + u64::from(low * PART_BYTES);
        is_whole.then_some((start, PART_BYTES * self.mask.count_ones()))
    }

    fn parts(self) -> impl Iterator<Item = (u64, u32)> {
        self.places.into_iter().take(self.count)
    }
}

/// Whether an access is aligned, to memory of the own block or a buffer, of bytes that something wrote, and of no mbarrier.
pub(super) fn is_usual(cx: &mut Context<'_, '_>, space: Space, at: u64, request: &Request) -> bool {
    let bytes = request.bytes as usize;
    let (start, is_read) = (at as usize, request.direction == Direction::Read);
    let unit = if bytes > PART_BYTES as usize { PART_BYTES as usize } else { bytes };
    if !bytes.is_multiple_of(unit) || !unit.is_power_of_two() || !start.is_multiple_of(unit) {
        return false;
    }
    match space {
        Space::Shared => {
            let written = cx.shared.written.get(start..start + bytes);
            written.is_some_and(|written| !is_read || all_set(written))
                && cx.mbarriers.overlapping(at, request.bytes).is_none()
        }
        Space::Global => is_in_buffer(cx, at, bytes, is_read),
        _ => false,
    }
}

/// Whether bytes of one page are a buffer's, which something wrote, or which may be written.
#[inline]
pub(super) fn is_in_buffer(cx: &mut Context<'_, '_>, at: u64, bytes: usize, is_read: bool) -> bool {
    let within = at as usize % PAGE_BYTES;
    cx.view.page(at).map(|page| cx.view.at(page)).is_some_and(|page| {
        let is_there = !page.is_freed && within + bytes <= page.valid as usize;
        is_there && if is_read { all_set(&page.written()[within..][..bytes]) } else { !page.is_read_only }
    })
}
