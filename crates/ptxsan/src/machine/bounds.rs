//! Whether an access may be made at all, and what traffic it causes.

use super::access::{By, Direction, Request, space_name};
use super::places::is_in_buffer;
use super::run::{Context, for_lanes};
use super::runs::Following;
use super::warp::Warp;
use crate::count::counters::{sectors, wavefronts};
use crate::finding::Kind;
use crate::hazard::log::Words;
use crate::host::{Host, compiled_thrice};
use crate::memory::{PAGE_BYTES, window};
use crate::parse::ast::Space;

/// Whether an access that is wrong in this way cannot be made. Reading what nothing wrote can.
fn is_fatal(kind: Kind) -> bool {
    kind != Kind::UninitialisedMemory
}

impl Warp {
    /// Alignment, bounds, freed and read-only memory, and for reads initialised bytes. Returns the lanes whose access
    /// can be made, and counts their traffic.
    pub(super) fn check_bounds(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) -> u32 {
        let mut mask = mask;
        if space == Space::Shared && cx.shape.cluster_size() > 1 {
            mask = self.there(cx, addresses, mask, request);
        }
        let mut good = mask;
        self.unwritten = 0;
        if !in_shared(cx, space, addresses, mask, request) && !in_buffers(cx, space, addresses, mask, request)
        {
            let (base, shared, params) = (cx.view.base(), cx.shared.data.len(), cx.params.len());
            let local = cx.kernel.local_bytes;
            for_lanes(mask, |lane| {
                let at = addresses[lane];
                if let Some(kind) = self.fault(cx, space, at, lane, request) {
                    good &= !(u32::from(is_fatal(kind)) << lane);
                    if !is_fatal(kind) && request.moves {
                        self.unwritten |= 1 << lane;
                        return;
                    }
                    // The same mistake is made again and again: words are only found for the first time.
                    cx.report(kind, request.pc, self.index, 1 << lane, || {
                        let limit = match space {
                            Space::Shared => format!("; the block has {shared} bytes of shared memory"),
                            Space::Local => format!("; a thread has {local} bytes of local memory"),
                            Space::Param => format!("; there are {params}"),
                            _ => format!(", {}", base.describe(at, u64::from(request.bytes))),
                        };
                        describe(kind, space, at, request, &limit, || base.locate(at))
                    });
                }
            });
        }
        if space == Space::Shared && request.extent != 0 {
            good = self.check_extent(cx, addresses, good, request);
        }
        if space == Space::Shared {
            self.spare_mbarriers(cx, addresses, good, request);
        }
        if cx.options.programmatic && space == Space::Global {
            self.check_launch_before(cx, addresses, good, request);
        }
        count_traffic(cx, space, addresses, good, request);
        good
    }

    /// The lanes whose shared address is the own block's, or one of a block of the cluster that is there.
    fn there(
        &mut self,
        cx: &mut Context<'_, '_>,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) -> u32 {
        let mut there = mask;
        for_lanes(mask, |lane| {
            let block = cx.barrier_at(addresses[lane]).block;
            if block != cx.block && !self.reachable(cx, request.pc, lane, block) {
                there &= !(1 << lane);
            } else if matches!(request.by, By::Lanes) {
                self.visit(cx, request.pc, lane, block);
            }
        });
        there
    }

    /// The lanes whose access stays within the variables that its address was made from.
    fn check_extent(
        &mut self,
        cx: &mut Context<'_, '_>,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) -> u32 {
        let kernel = cx.kernel;
        let extent = &kernel.extents[request.extent as usize - 1];
        let bytes = u64::from(request.bytes);
        let all = extent_of(addresses, mask);
        let is_own = window::rank(all.last as u32).is_none();
        if is_own && extent.iter().any(|(from, to)| all.first >= *from && all.last + bytes <= *to) {
            return mask;
        }
        let mut good = mask;
        for_lanes(mask, |lane| {
            let at = u64::from(window::offset(addresses[lane] as u32));
            if extent.iter().any(|(from, to)| at >= *from && at + bytes <= *to) {
                return;
            }
            good &= !(1 << lane);
            let meant =
                kernel.shared_variables.iter().find(|v| extent.iter().any(|(from, _)| *from == v.address));
            let hit = cx.variable(Space::Shared, at);
            let thread = self.index * 32 + lane as u32;
            cx.log.add(Kind::OutOfBounds, request.pc, None, (cx.block, thread), || {
                let verb = if request.direction == Direction::Write { "write" } else { "read" };
                let aim = meant.map_or_else(String::new, |v| {
                    let (end, size) = v.bytes.map_or((u64::MAX, 0), |bytes| (v.address + bytes, bytes));
                    if at < v.address {
                        return format!(", {} bytes before `{}`", v.address - at, v.name);
                    }
                    format!(", {} bytes past the end of `{}` ({size} bytes)", at.saturating_sub(end), v.name)
                });
                let into = hit.as_ref().map_or_else(String::new, |v| format!(", in `{}`", v.name));
                Words {
                    detail: format!("{verb} of {bytes} bytes at shared {at:#x}{aim}{into}"),
                    advice: Some(
                        "the address was made from one shared variable and lies outside it".to_owned(),
                    ),
                    variable: hit,
                }
            });
        });
        good
    }

    /// Bytes of an mbarrier are its own.
    fn spare_mbarriers(
        &mut self,
        cx: &mut Context<'_, '_>,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) {
        if cx.mbarriers.is_empty() {
            return;
        }
        for_lanes(mask, |lane| {
            if let Some(at) = cx.mbarriers.overlapping(addresses[lane], request.bytes) {
                let thread = self.index * 32 + lane as u32;
                let verb = if request.direction == Direction::Write { "write" } else { "read" };
                cx.misuse(request.pc, thread, || {
                    format!("{verb} of {} bytes over mbarrier {at:#x}, which is in use", request.bytes)
                });
            }
        });
    }

    fn check_launch_before(
        &mut self,
        cx: &mut Context<'_, '_>,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) {
        for_lanes(mask, |lane| {
            if self.known[lane].time_of(cx.numbering.launch_before()) == 0 {
                let at = addresses[lane];
                let place = cx.view.base().locate(at);
                cx.report(Kind::LaunchOrder, request.pc, self.index, 1 << lane, || {
                    format!(
                        "global {at:#x}{place} before griddepcontrol.wait: the launch before may still use it"
                    )
                });
            }
        });
    }

    fn fault(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        at: u64,
        lane: usize,
        request: &Request,
    ) -> Option<Kind> {
        let bytes = u64::from(request.bytes);
        let is_write = request.direction == Direction::Write;
        if !at.is_multiple_of(request.alignment()) {
            return Some(Kind::Misaligned);
        }
        let past = |size: u64| at.checked_add(bytes).is_none_or(|end| end > size);
        let start = at as usize;
        match space {
            Space::Shared => match cx.shared_at(at) {
                Some((memory, start)) if start + bytes as usize <= memory.data.len() => {
                    unwritten(request, &mut memory.written[start..start + bytes as usize])
                }
                _ => Some(Kind::OutOfBounds),
            },
            Space::Local if past(cx.kernel.local_bytes) => Some(Kind::OutOfBounds),
            Space::Local => {
                let start = lane * cx.kernel.local_bytes as usize + start;
                unwritten(request, &mut self.local_written[start..start + bytes as usize])
            }
            Space::Param if past(cx.params.len() as u64) => Some(Kind::OutOfBounds),
            Space::Param => is_write.then_some(Kind::ReadOnlyWrite),
            _ => {
                let within = start % PAGE_BYTES;
                match cx.view.page(at).map(|page| cx.view.at(page)) {
                    Some(page) if page.is_freed => Some(Kind::UseAfterFree),
                    Some(page) if within as u64 + bytes <= u64::from(page.valid) => {
                        if is_write && page.is_read_only {
                            return Some(Kind::ReadOnlyWrite);
                        }
                        let range = within..within + bytes as usize;
                        // Flags are copied only if they change.
                        if is_write || all_set(&page.written()[range.clone()]) {
                            return None;
                        }
                        unwritten(request, &mut page.written_mut()[range])
                    }
                    _ => Some(Kind::OutOfBounds),
                }
            }
        }
    }
}

/// What was done where; for what lies outside, against which limit, and for what lies in a buffer, in which.
fn describe(
    kind: Kind,
    space: Space,
    at: u64,
    request: &Request,
    limit: &str,
    inside: impl Fn() -> String,
) -> String {
    let verb = if request.direction == Direction::Write { "write" } else { "read" };
    let is_buffer = !matches!(space, Space::Shared | Space::Local | Space::Param);
    // A misaligned address may lie anywhere, so its space is named whatever it is.
    let place =
        if is_buffer && kind != Kind::Misaligned { String::new() } else { format!("{} ", space_name(space)) };
    let what = format!("{verb} of {} bytes at {place}{at:#x}", request.bytes);
    match kind {
        Kind::OutOfBounds | Kind::UseAfterFree => what + limit,
        Kind::ReadOnlyWrite | Kind::UninitialisedMemory if is_buffer => what + &inside(),
        _ => what,
    }
}

/// The usual case, for all lanes at once: aligned accesses within shared memory, of bytes that were written.
fn in_shared(
    cx: &Context<'_, '_>,
    space: Space,
    addresses: &[u64; 32],
    mask: u32,
    request: &Request,
) -> bool {
    let (bytes, written) = (u64::from(request.bytes), &cx.shared.written);
    if space != Space::Shared || !bytes.is_power_of_two() {
        return false;
    }
    let Extent { bits, last, .. } = extent_of(addresses, mask);
    let room = (written.len() as u64).checked_sub(bytes);
    if !bits.is_multiple_of(request.alignment()) || room.is_none_or(|room| last > room) {
        return false;
    }
    let is_written = |lane: usize| all_set(&written[addresses[lane] as usize..][..bytes as usize]);
    match (request.direction, bytes) {
        (Direction::Write, _) => true,
        (_, 16) => are_rows_written(written, addresses, mask),
        _ => (0..32).all(|lane| mask >> lane & 1 == 0 || is_written(lane)),
    }
}

/// Whether nothing is missing of 16 bytes at each address.
fn are_rows_written(written: &[u8], addresses: &[u64; 32], mask: u32) -> bool {
    let mut missing = 0;
    for_lanes(mask, |lane| {
        let row = written.get(addresses[lane] as usize..).and_then(|row| row.first_chunk::<16>());
        missing |= row.map_or(1, |row| u128::from_ne_bytes(*row) ^ ALL_SET);
    });
    missing == 0
}

/// The same for buffers: within one, not freed, of bytes that were written, or that may be.
fn in_buffers(
    cx: &mut Context<'_, '_>,
    space: Space,
    addresses: &[u64; 32],
    mask: u32,
    request: &Request,
) -> bool {
    let bytes = request.bytes;
    if space != Space::Global || bytes > 16 || !bytes.is_power_of_two() {
        return false;
    }
    if !extent_of(addresses, mask).bits.is_multiple_of(request.alignment()) {
        return false;
    }
    Following::new(addresses, mask, bytes).runs(mask).all(|(lane, count)| {
        is_in_buffer(cx, addresses[lane], (count * bytes) as usize, request.direction == Direction::Read)
    })
}

/// What addresses have in common.
struct Extent {
    /// All bits that are set in one of them.
    bits: u64,
    /// The smallest and the largest.
    first: u64,
    last: u64,
}

compiled_thrice! {
    /// The extent of the addresses of `mask`.
    fn extent_of = extent(addresses: &[u64; 32], mask: u32) -> Extent
}

#[inline(always)]
fn extent(addresses: &[u64; 32], mask: u32, _host: Host) -> Extent {
    let (mut bits, mut first, mut last) = (0, u64::MAX, 0);
    for (lane, address) in addresses.iter().enumerate() {
        let is_in = mask >> lane & 1 == 1;
        let at = if is_in { *address } else { 0 };
        bits |= at;
        last = last.max(at);
        first = first.min(if is_in { *address } else { u64::MAX });
    }
    Extent { bits, first, last }
}

/// A read of bytes that nothing wrote; where it is the reader that is told, once for each byte.
fn unwritten(request: &Request, flags: &mut [u8]) -> Option<Kind> {
    if request.direction == Direction::Write || all_set(flags) {
        return None;
    }
    if !request.moves {
        flags.fill(1);
    }
    Some(Kind::UninitialisedMemory)
}

fn count_traffic(
    cx: &mut Context<'_, '_>,
    space: Space,
    addresses: &[u64; 32],
    mask: u32,
    request: &Request,
) {
    let tally = &mut cx.tallies[request.pc as usize];
    if let By::Agent(_) = request.by {
        // Whole rows at a time: how they meet the banks is not known.
        let bytes = u64::from(mask.count_ones() * request.bytes);
        match space {
            Space::Global => tally.global_bytes += bytes,
            Space::Shared => tally.shared_bytes += bytes,
            _ => {}
        }
        return;
    }
    match space {
        Space::Global => {
            tally.global_bytes += u64::from(mask.count_ones() * request.bytes);
            tally.sectors += sectors(addresses, mask, request.bytes);
        }
        Space::Shared => {
            tally.shared_bytes += u64::from(mask.count_ones() * request.bytes);
            let (taken, ideal) = wavefronts(addresses, mask, request.bytes.min(16));
            tally.wavefronts += taken;
            tally.ideal_wavefronts += ideal;
        }
        _ => {}
    }
}

/// The flags of 16 bytes that were all written.
const ALL_SET: u128 = 0x0101_0101_0101_0101_0101_0101_0101_0101;

/// Whether every flag is 1; the usual sizes in one comparison.
#[inline]
pub(super) fn all_set(flags: &[u8]) -> bool {
    match flags.len() {
        16 => <[u8; 16]>::try_from(flags).is_ok_and(|raw| u128::from_ne_bytes(raw) == ALL_SET),
        8 => <[u8; 8]>::try_from(flags).is_ok_and(|raw| u64::from_ne_bytes(raw) == ALL_SET as u64),
        4 => <[u8; 4]>::try_from(flags).is_ok_and(|raw| u32::from_ne_bytes(raw) == ALL_SET as u32),
        n if n.is_multiple_of(16) => flags.chunks_exact(16).all(all_set),
        _ => flags.iter().all(|f| *f == 1),
    }
}
