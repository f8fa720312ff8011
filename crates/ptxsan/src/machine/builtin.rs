//! `printf` and `assert` from device code, and the copying of call parameters.

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
                    let text = self.format(cx, &format, values, lane);
                    cx.output.push_str(&text);
                    if let Some(output) = output {
                        let start = lane * frame + output as usize;
                        if let Some(slot) = self.local.get_mut(start..start + 4) {
                            slot.copy_from_slice(&0u32.to_le_bytes());
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

    /// C's `printf` for the conversions CUDA knows.
    fn format(&self, cx: &mut Context<'_, '_>, format: &str, values: u64, lane: usize) -> String {
        let mut out = String::new();
        let mut at = values;
        let mut chars = format.chars().peekable();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut flags = String::new();
            while let Some(f) = chars.next_if(|c| "-+ #0123456789.".contains(*c)) {
                flags.push(f);
            }
            let mut is_long = false;
            while let Some(f) = chars.next_if(|c| "lhzjtL".contains(*c)) {
                is_long |= f != 'h';
            }
            let Some(kind) = chars.next() else { break };
            if kind == '%' {
                out.push('%');
                continue;
            }
            let bytes = if is_long || "fFeEgGaAsp".contains(kind) { 8u64 } else { 4 };
            at = at.next_multiple_of(bytes);
            let raw = self.peek(cx, at, bytes as usize, lane).map_or(0, |b| super::access::little_endian(&b));
            at += bytes;
            let text = match kind {
                'd' | 'i' if bytes == 8 => (raw as i64).to_string(),
                'd' | 'i' => (raw as u32 as i32).to_string(),
                'u' => raw.to_string(),
                'x' => format!("{raw:x}"),
                'X' => format!("{raw:X}"),
                'o' => format!("{raw:o}"),
                'c' => char::from(raw as u8).to_string(),
                'p' => format!("{raw:#x}"),
                's' => self.string(cx, raw, lane),
                'e' | 'E' => format!("{:e}", f64::from_bits(raw)),
                'f' | 'F' => {
                    let digits =
                        flags.split_once('.').and_then(|(_, d)| d.parse::<usize>().ok()).unwrap_or(6);
                    format!("{:.*}", digits.min(64), f64::from_bits(raw))
                }
                'g' | 'G' | 'a' | 'A' => format!("{}", f64::from_bits(raw)),
                other => format!("%{other}"),
            };
            out.push_str(&padded(&text, &flags));
        }
        out
    }
}

fn padded(text: &str, flags: &str) -> String {
    let is_left = flags.contains('-');
    let digits = flags.split('.').next().unwrap_or("").trim_start_matches(['-', '+', ' ', '#']);
    let is_zero = digits.starts_with('0') && !is_left;
    let width = digits.parse::<usize>().unwrap_or(0).min(256);
    match (is_left, is_zero) {
        (true, _) => format!("{text:<width$}"),
        (false, true) if text.len() < width => {
            let (sign, rest) = text.strip_prefix('-').map_or(("", text), |r| ("-", r));
            let zeros = "0".repeat(width - text.len());
            format!("{sign}{zeros}{rest}")
        }
        _ => format!("{text:>width$}"),
    }
}
