//! Scratch memory of a thread, kept between calls.

use std::cell::RefCell;

/// A cache line of floats, so that buffers are aligned to vectors.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

const LINE: usize = 16;

thread_local! {
    static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Calls `body` with at least `floats` f32 of this thread's scratch memory, aligned to 64 bytes, holding
/// whatever the last use left there.
pub(crate) fn with_scratch<R>(floats: usize, body: impl FnOnce(*mut f32) -> R) -> R {
    LINES.with_borrow_mut(|lines| {
        let needed = floats.div_ceil(LINE);
        if lines.len() < needed {
            // Not `resize`: what was there need not be copied.
            *lines = Vec::new();
            lines.resize(needed, Line([0.0; LINE]));
        }
        body(lines.as_mut_ptr().cast())
    })
}

/// Hands out consecutive line-aligned pieces of a scratch buffer.
#[derive(Default)]
pub(crate) struct Carver {
    used: usize,
}

impl Carver {
    /// The offset, in floats, of a new piece.
    pub(crate) fn take(&mut self, floats: usize) -> usize {
        let at = self.used;
        self.used += floats.div_ceil(LINE) * LINE;
        at
    }

    /// Floats handed out so far.
    pub(crate) fn floats(&self) -> usize {
        self.used
    }
}
