//! What happens to scaled scores before the softmax, in this order: softcap, ALiBi and bias, boolean mask and block
//! table; and the sinks.

use evosdpa_core::{Blocks, Broadcast, Problem, SideInputs, TensorView, U8Code};

/// A problem's modifiers with their data.
pub(super) struct Modifiers<'a> {
    softcap: Option<f32>,
    slopes: Option<&'a [f32]>,
    bias: Option<(Broadcast, TensorView<'a>)>,
    mask: Option<(Broadcast, TensorView<'a>)>,
    blocks: Option<(Blocks, TensorView<'a>)>,
    sinks: Option<&'a [f32]>,
}

/// Which row: its sequence, query head, query, and the query's position among the keys.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) sequence: usize,
    pub(super) head: usize,
    pub(super) query: usize,
    pub(super) position: i64,
}

impl<'a> Modifiers<'a> {
    /// Of side inputs that were checked.
    pub(super) fn new(problem: &Problem, side: &SideInputs<'a>) -> Self {
        let scores = problem.scores();
        Self {
            softcap: scores.softcap.map(|cap| cap.value()),
            slopes: side.alibi_slopes,
            bias: scores.bias.zip(side.bias),
            mask: scores.mask.zip(side.mask),
            blocks: scores.blocks.zip(side.blocks),
            sinks: side.sinks,
        }
    }

    /// Whether scores are changed.
    pub(super) fn any(&self) -> bool {
        self.softcap.is_some() || self.slopes.is_some() || self.bias.is_some() || self.hide()
    }

    /// Whether keys are hidden one by one.
    pub(super) fn hide(&self) -> bool {
        self.mask.is_some() || self.blocks.is_some()
    }

    pub(super) fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.map(|sinks| sinks[head])
    }

    /// Changes the scores of keys `first ..`.
    pub(super) fn change(&self, row: Row, first: usize, scores: &mut [f32]) {
        if let Some(cap) = self.softcap {
            scores.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
        }
        if let Some(slopes) = self.slopes {
            let slope = slopes[row.head];
            for (key, score) in (first as i64..).zip(scores.iter_mut()) {
                *score -= slope * (row.position - key).abs() as f32;
            }
        }
        if let Some((broadcast, bias)) = &self.bias {
            let [b, h, s, _] = broadcast.index([row.sequence, row.head, row.query, 0]);
            let mut line = vec![0.0; bias.shape()[3]];
            bias.read_row(b, h, s, &mut line);
            scores.iter_mut().zip(&line[first..]).for_each(|(score, x)| *score += x);
        }
    }

    /// Hides the keys `first ..` that the block table or the boolean mask hides, and marks them.
    pub(super) fn mask(&self, row: Row, first: usize, scores: &mut [f32], hidden: &mut [bool]) {
        if let Some((blocks, table)) = &self.blocks {
            let line = blocks.row(table, row.sequence, row.head, row.query);
            for (i, (score, hidden)) in scores.iter_mut().zip(&mut *hidden).enumerate() {
                if line[(first + i) / blocks.keys()] == 0 {
                    (*score, *hidden) = (f32::NEG_INFINITY, true);
                }
            }
        }
        let Some((broadcast, mask)) = &self.mask else { return };
        let [b, h, s, _] = broadcast.index([row.sequence, row.head, row.query, 0]);
        let [sb, sh, ss, _] = mask.strides();
        // The type was checked.
        let Some(bytes) = mask.elements::<U8Code>() else { return };
        let bytes = &bytes[b * sb + h * sh + s * ss + first..];
        for ((score, hidden), byte) in scores.iter_mut().zip(hidden).zip(bytes) {
            if byte.0 == 0 {
                (*score, *hidden) = (f32::NEG_INFINITY, true);
            }
        }
    }
}
