//! Whether an access may be made at all, and what traffic it causes.

use super::access::{Direction, Request, space_name};
use super::run::Context;
use super::warp::Warp;
use crate::count::counters::{sectors, wavefronts};
use crate::hazard::log::Kind;
use crate::memory::PAGE_BYTES;
use crate::parse::ast::Space;

impl Warp {
    /// Alignment, bounds, freed and read-only memory, and for reads initialised bytes.
    pub(super) fn check_bounds(
        &mut self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) -> u32 {
        let mut good = mask;
        let bytes = u64::from(request.bytes);
        let mut fault =
            |cx: &mut Context<'_, '_>, kind: Kind, lane: usize, is_fatal: bool, detail: String| {
                cx.report(kind, request.pc, self.index, 1 << lane, || detail);
                if is_fatal {
                    good &= !(1 << lane);
                }
            };
        let is_write = request.direction == Direction::Write;
        let verb = if is_write { "write" } else { "read" };
        let name = space_name(space);
        for lane in 0..32usize {
            if mask >> lane & 1 == 0 {
                continue;
            }
            let at = addresses[lane];
            if !at.is_multiple_of(bytes.next_power_of_two().min(32)) {
                fault(cx, Kind::Misaligned, lane, true, format!("{verb} of {bytes} bytes at {name} {at:#x}"));
                continue;
            }
            let end = at.wrapping_add(bytes);
            match space {
                Space::Shared => {
                    let size = cx.shared.data.len() as u64;
                    if end > size || end < at {
                        fault(
                            cx,
                            Kind::OutOfBounds,
                            lane,
                            true,
                            format!(
                                "{verb} of {bytes} bytes at shared {at:#x}; the block has {size} bytes of shared memory"
                            ),
                        );
                    } else if !is_write && !all_set(&cx.shared.written[at as usize..end as usize]) {
                        fault(
                            cx,
                            Kind::UninitialisedMemory,
                            lane,
                            false,
                            format!("read of {bytes} bytes at shared {at:#x}"),
                        );
                        cx.shared.written[at as usize..end as usize].fill(1);
                    }
                }
                Space::Local => {
                    let size = cx.kernel.local_bytes;
                    if end > size || end < at {
                        fault(
                            cx,
                            Kind::OutOfBounds,
                            lane,
                            true,
                            format!(
                                "{verb} of {bytes} bytes at local {at:#x}; a thread has {size} bytes of local memory"
                            ),
                        );
                    } else if !is_write {
                        let start = lane * size as usize + at as usize;
                        let written = &mut self.local_written[start..start + bytes as usize];
                        if !all_set(written) {
                            written.fill(1);
                            fault(
                                cx,
                                Kind::UninitialisedMemory,
                                lane,
                                false,
                                format!("read of {bytes} bytes at local {at:#x}"),
                            );
                        }
                    }
                }
                Space::Param => {
                    let size = cx.params.len() as u64;
                    if end > size || end < at {
                        fault(
                            cx,
                            Kind::OutOfBounds,
                            lane,
                            true,
                            format!("{verb} of {bytes} bytes at parameter offset {at}; there are {size}"),
                        );
                    } else if is_write {
                        fault(
                            cx,
                            Kind::ReadOnlyWrite,
                            lane,
                            true,
                            format!("write of {bytes} bytes at parameter offset {at}"),
                        );
                    }
                }
                _ => {
                    let within = (at % PAGE_BYTES as u64) as u32;
                    let page = cx.view.page(at).map(|p| cx.view.at(p));
                    match page {
                        Some(p) if within + request.bytes <= p.valid && !p.is_freed => {
                            let range = within as usize..(within + request.bytes) as usize;
                            if is_write && p.is_read_only {
                                let near = cx.view.base().locate(at);
                                fault(
                                    cx,
                                    Kind::ReadOnlyWrite,
                                    lane,
                                    true,
                                    format!("write of {bytes} bytes at {at:#x}{near}"),
                                );
                            } else if !is_write && !all_set(&p.written[range.clone()]) {
                                p.written[range].fill(1);
                                let near = cx.view.base().locate(at);
                                fault(
                                    cx,
                                    Kind::UninitialisedMemory,
                                    lane,
                                    false,
                                    format!("read of {bytes} bytes at {at:#x}{near}"),
                                );
                            }
                        }
                        Some(p) if p.is_freed => {
                            let near = cx.view.base().describe(at, bytes);
                            fault(
                                cx,
                                Kind::UseAfterFree,
                                lane,
                                true,
                                format!("{verb} of {bytes} bytes at {at:#x}, {near}"),
                            );
                        }
                        _ => {
                            let near = cx.view.base().describe(at, bytes);
                            fault(
                                cx,
                                Kind::OutOfBounds,
                                lane,
                                true,
                                format!("{verb} of {bytes} bytes at {at:#x}, {near}"),
                            );
                        }
                    }
                }
            }
        }
        good
    }

    pub(super) fn count_traffic(
        &self,
        cx: &mut Context<'_, '_>,
        space: Space,
        addresses: &[u64; 32],
        mask: u32,
        request: &Request,
    ) {
        let tally = &mut cx.tallies[request.pc as usize];
        match space {
            Space::Global => {
                tally.bytes += u64::from(mask.count_ones() * request.bytes);
                tally.sectors += sectors(addresses, mask, request.bytes);
            }
            Space::Shared => {
                tally.bytes += u64::from(mask.count_ones() * request.bytes);
                let (taken, ideal) = wavefronts(addresses, mask, request.bytes.min(16));
                tally.wavefronts += taken;
                tally.ideal_wavefronts += ideal;
            }
            _ => {}
        }
    }
}

/// Whether every flag is 1; the usual sizes in one comparison.
fn all_set(flags: &[u8]) -> bool {
    const ONES: u128 = 0x0101_0101_0101_0101_0101_0101_0101_0101;
    if let Ok(raw) = <[u8; 16]>::try_from(flags) {
        return u128::from_ne_bytes(raw) == ONES;
    }
    if let Ok(raw) = <[u8; 4]>::try_from(flags) {
        return u32::from_ne_bytes(raw) == ONES as u32;
    }
    flags.iter().all(|f| *f == 1)
}
