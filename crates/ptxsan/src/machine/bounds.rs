//! Whether an access may be made at all, and what traffic it causes.

use super::access::{Direction, Request, space_name};
use super::run::{Context, for_lanes};
use super::warp::Warp;
use crate::count::counters::{sectors, wavefronts};
use crate::hazard::log::Kind;
use crate::memory::PAGE_BYTES;
use crate::parse::ast::Space;

/// Why a lane's access is wrong.
struct Fault {
    kind: Kind,
    detail: String,
}

impl Fault {
    fn new(kind: Kind, detail: String) -> Option<Self> {
        Some(Fault { kind, detail })
    }

    /// Whether the access cannot be made. Reading what nothing wrote can.
    fn is_fatal(&self) -> bool {
        self.kind != Kind::UninitialisedMemory
    }
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
        let mut good = mask;
        if !in_shared(cx, space, addresses, mask, request) {
            for_lanes(mask, |lane| {
                if let Some(fault) = self.fault(cx, space, addresses[lane], lane, request) {
                    good &= !(u32::from(fault.is_fatal()) << lane);
                    cx.report(fault.kind, request.pc, self.index, 1 << lane, || fault.detail);
                }
            });
        }
        count_traffic(cx, space, addresses, good, request);
        good
    }

    fn fault(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        at: u64,
        lane: usize,
        request: &Request,
    ) -> Option<Fault> {
        let bytes = u64::from(request.bytes);
        let is_write = request.direction == Direction::Write;
        let what = |place: String| {
            format!("{} of {bytes} bytes at {place}{at:#x}", if is_write { "write" } else { "read" })
        };
        let here = || what(format!("{} ", space_name(space)));
        if !at.is_multiple_of(bytes.next_power_of_two().min(32)) {
            return Fault::new(Kind::Misaligned, here());
        }
        let past = |size: u64| at.checked_add(bytes).is_none_or(|end| end > size);
        let start = at as usize;
        match space {
            Space::Shared => {
                let size = cx.shared.data.len() as u64;
                if past(size) {
                    let text = format!("{}; the block has {size} bytes of shared memory", here());
                    return Fault::new(Kind::OutOfBounds, text);
                }
                unwritten(is_write, &mut cx.shared.written[start..start + bytes as usize], here)
            }
            Space::Local => {
                let size = cx.kernel.local_bytes;
                if past(size) {
                    let text = format!("{}; a thread has {size} bytes of local memory", here());
                    return Fault::new(Kind::OutOfBounds, text);
                }
                let start = lane * size as usize + start;
                unwritten(is_write, &mut self.local_written[start..start + bytes as usize], here)
            }
            Space::Param => {
                let size = cx.params.len();
                if past(size as u64) {
                    Fault::new(Kind::OutOfBounds, format!("{}; there are {size}", here()))
                } else if is_write {
                    Fault::new(Kind::ReadOnlyWrite, here())
                } else {
                    None
                }
            }
            _ => {
                let base = cx.view.base();
                let within = start % PAGE_BYTES;
                match cx.view.page(at).map(|page| cx.view.at(page)) {
                    Some(page) if page.is_freed => {
                        let text = format!("{}, {}", what(String::new()), base.describe(at, bytes));
                        Fault::new(Kind::UseAfterFree, text)
                    }
                    Some(page) if within as u64 + bytes <= u64::from(page.valid) => {
                        let named = || format!("{}{}", what(String::new()), base.locate(at));
                        if is_write && page.is_read_only {
                            return Fault::new(Kind::ReadOnlyWrite, named());
                        }
                        unwritten(is_write, &mut page.written[within..within + bytes as usize], named)
                    }
                    _ => {
                        let text = format!("{}, {}", what(String::new()), base.describe(at, bytes));
                        Fault::new(Kind::OutOfBounds, text)
                    }
                }
            }
        }
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
    let (mut low_bits, mut last) = (0, 0);
    for lane in 0..32 {
        let at = if mask >> lane & 1 == 1 { addresses[lane] } else { 0 };
        low_bits |= at;
        last = last.max(at);
    }
    if !low_bits.is_multiple_of(bytes.min(32)) || last >= written.len() as u64 {
        return false;
    }
    if last + bytes > written.len() as u64 {
        return false;
    }
    let is_written = |lane: usize| all_set(&written[addresses[lane] as usize..][..bytes as usize]);
    request.direction == Direction::Write || (0..32).all(|lane| mask >> lane & 1 == 0 || is_written(lane))
}

/// A read of bytes that nothing wrote; said once for each byte.
fn unwritten(is_write: bool, flags: &mut [u8], what: impl Fn() -> String) -> Option<Fault> {
    if is_write || all_set(flags) {
        return None;
    }
    flags.fill(1);
    Fault::new(Kind::UninitialisedMemory, what())
}

fn count_traffic(
    cx: &mut Context<'_, '_>,
    space: Space,
    addresses: &[u64; 32],
    mask: u32,
    request: &Request,
) {
    let tally = &mut cx.tallies[request.pc as usize];
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

/// Whether every flag is 1; the usual sizes in one comparison.
#[inline]
fn all_set(flags: &[u8]) -> bool {
    const ONES: u128 = 0x0101_0101_0101_0101_0101_0101_0101_0101;
    match flags.len() {
        16 => <[u8; 16]>::try_from(flags).is_ok_and(|raw| u128::from_ne_bytes(raw) == ONES),
        8 => <[u8; 8]>::try_from(flags).is_ok_and(|raw| u64::from_ne_bytes(raw) == ONES as u64),
        4 => <[u8; 4]>::try_from(flags).is_ok_and(|raw| u32::from_ne_bytes(raw) == ONES as u32),
        _ => flags.iter().all(|f| *f == 1),
    }
}
