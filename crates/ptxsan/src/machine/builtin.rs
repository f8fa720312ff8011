//! `printf` and `assert` from device code, and the copying of call parameters.

use super::print::{self, Values};
use super::run::{Context, Flow, for_lanes};
use super::warp::Warp;
use crate::decode::{Builtin, ParamCopy};
use crate::finding::Kind;
use crate::memory::{PAGE_BYTES, window};
use crate::parse::ast::Space;

/// Text kept per launch; a kernel that prints for ever must not fill the memory.
const MAX_OUTPUT_BYTES: usize = 1 << 20;
/// Strings longer than this are cut.
const MAX_STRING_BYTES: usize = 4096;

impl Warp {
    /// Copies parameter bytes between frames, lane by lane.
    pub(super) fn copy_params(&mut self, copies: &[ParamCopy], mask: u32) {
        let frame = self.local.len() / 32;
        for copy in copies {
            let (from, to, n) = (copy.from as usize, copy.to as usize, copy.bytes as usize);
            for_lanes(mask, |lane| {
                let base = lane * frame;
                self.local.copy_within(base + from..base + from + n, base + to);
                self.local_written.copy_within(base + from..base + from + n, base + to);
            });
        }
    }

    pub(super) fn builtin(
        &mut self,
        cx: &mut Context<'_, '_>,
        at: usize,
        mask: u32,
        which: Builtin,
        inputs: &[u64],
        output: Option<u64>,
    ) -> Flow {
        let pc = self.groups[at].pc;
        let frame = self.local.len() / 32;
        let argument = |warp: &Warp, lane: usize, index: usize, bytes: usize| -> u64 {
            let Some(offset) = inputs.get(index) else { return 0 };
            let start = lane * frame + *offset as usize;
            warp.local.get(start..start + bytes).map_or(0, super::access::little_endian)
        };
        match which {
            Builtin::Printf => {
                for_lanes(mask, |lane| {
                    if cx.output.len() >= MAX_OUTPUT_BYTES {
                        return;
                    }
                    let format = self.string(cx, argument(self, lane, 0, 8), lane);
                    let values = argument(self, lane, 1, 8);
                    let mut values = Printed { warp: self, cx, lane, at: values };
                    let (text, taken) = print::format(&format, &mut values);
                    cx.output.push_str(&text);
                    if let Some(output) = output {
                        let start = lane * frame + output as usize;
                        if let Some(slot) = self.local.get_mut(start..start + 4) {
                            slot.copy_from_slice(&taken.to_le_bytes());
                            self.local_written[start..start + 4].fill(1);
                        }
                    }
                });
                Flow::Next
            }
            Builtin::AssertFail => {
                let lane = mask.trailing_zeros() as usize;
                let message = self.string(cx, argument(self, lane, 0, 8), lane);
                let file = self.string(cx, argument(self, lane, 1, 8), lane);
                let line = argument(self, lane, 2, 4);
                cx.report(Kind::Assertion, pc, self.index, mask, || format!("`{message}` at {file}:{line}"));
                *cx.is_stopped = true;
                cx.barriers.lanes_left(self, mask);
                self.exit(at, mask);
                Flow::Yield
            }
        }
    }

    /// Bytes at a generic address, unchecked: what cannot be read ends the copy.
    fn peek(&self, cx: &mut Context<'_, '_>, address: u64, bytes: usize, lane: usize) -> Option<Vec<u8>> {
        let (space, at) = window::split(address);
        let range = at as usize..(at as usize).checked_add(bytes)?;
        match space {
            Space::Shared => cx.shared.data.get(range).map(<[u8]>::to_vec),
            Space::Local => {
                let base = lane * (self.local.len() / 32);
                self.local.get(base + range.start..base + range.end).map(<[u8]>::to_vec)
            }
            Space::Param => cx.params.get(range).map(<[u8]>::to_vec),
            _ => {
                let start = at as usize % PAGE_BYTES;
                let page = cx.view.page(at)?;
                let page = cx.view.at(page);
                (start + bytes <= page.valid as usize).then(|| page.data()[start..start + bytes].to_vec())
            }
        }
    }

    fn string(&self, cx: &mut Context<'_, '_>, address: u64, lane: usize) -> String {
        let mut bytes = Vec::new();
        while bytes.len() < MAX_STRING_BYTES {
            match self.peek(cx, address + bytes.len() as u64, 1, lane) {
                Some(b) if b[0] != 0 => bytes.push(b[0]),
                _ => break,
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The values of a lane's `printf`: each lies at a multiple of its size.
struct Printed<'p, 'c, 'm> {
    warp: &'p Warp,
    cx: &'p mut Context<'c, 'm>,
    lane: usize,
    at: u64,
}

impl Values for Printed<'_, '_, '_> {
    fn next(&mut self, bytes: u64) -> u64 {
        let at = self.at.checked_next_multiple_of(bytes).unwrap_or(self.at);
        self.at = at.wrapping_add(bytes);
        let found = self.warp.peek(self.cx, at, bytes as usize, self.lane);
        found.map_or(0, |bytes| super::access::little_endian(&bytes))
    }

    fn string(&mut self, address: u64) -> String {
        self.warp.string(self.cx, address, self.lane)
    }
}
