//! What happens to scaled scores before the softmax: softcap, then bias and ALiBi, then the boolean mask
//! and the block table; and the sinks.

use evosdpa_core::{Blocks, Broadcast, Problem, SideInputs, TensorView, U8Code};

use super::gemm::Real;

/// A problem's modifiers with their data.
#[derive(Clone, Copy)]
pub(super) struct Modifiers<'a> {
    softcap: Option<f64>,
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
    /// Of side inputs that fit the problem.
    pub(super) fn new(problem: &Problem, side: &SideInputs<'a>) -> Self {
        let scores = problem.scores();
        Self {
            softcap: scores.softcap.map(|cap| f64::from(cap.value())),
            slopes: side.alibi_slopes,
            bias: scores.bias.zip(side.bias),
            mask: scores.mask.zip(side.mask),
            blocks: scores.blocks.zip(side.blocks),
            sinks: side.sinks,
        }
    }

    /// Whether scores are changed at all.
    pub(super) fn any(&self) -> bool {
        self.softcap.is_some() || self.slopes.is_some() || self.bias.is_some() || self.hides()
    }

    /// Whether keys are hidden one by one.
    pub(super) fn hides(&self) -> bool {
        self.mask.is_some() || self.blocks.is_some()
    }

    /// Whether keys are hidden block by block.
    pub(super) fn has_blocks(&self) -> bool {
        self.blocks.is_some()
    }

    pub(super) fn sink(&self, head: usize) -> Option<f64> {
        self.sinks.map(|sinks| f64::from(sinks[head]))
    }

    /// Changes the scores of keys `first ..`; returns how large a score can be that this made.
    pub(super) fn apply<R: Real>(&self, row: Row, first: usize, scores: &mut [R]) -> f64 {
        let slope = self.slopes.map(|slopes| f64::from(slopes[row.head]));
        let mut bias_row = Vec::new();
        if let Some((broadcast, bias)) = &self.bias {
            let [b, h, s, _] = broadcast.index([row.sequence, row.head, row.query, 0]);
            bias.row_f64(b, h, s, &mut bias_row);
        }
        let mut largest = 0.0f64;
        for (i, score) in scores.iter_mut().enumerate() {
            let key = first + i;
            let mut x = score.to_f64();
            if let Some(cap) = self.softcap {
                x = cap * (x / cap).tanh();
            }
            let mut added = slope.map_or(0.0, |slope| -slope * (row.position - key as i64).abs() as f64);
            if let Some(bias) = bias_row.get(key) {
                added += bias;
            }
            if added.is_finite() {
                largest = largest.max(added.abs());
            }
            *score = R::from_f64(x + added);
        }
        largest + self.softcap.unwrap_or(0.0)
    }

    /// Gives hidden keys the score −∞, whatever they had, and marks them.
    pub(super) fn hide<R: Real>(&self, row: Row, first: usize, scores: &mut [R], hidden: &mut [bool]) {
        if let Some((blocks, table)) = &self.blocks {
            let line = blocks.row(table, row.sequence, row.head, row.query);
            for (i, (score, hidden)) in scores.iter_mut().zip(&mut *hidden).enumerate() {
                if line[(first + i) / blocks.keys()] == 0 {
                    (*score, *hidden) = (-R::INFINITY, true);
                }
            }
        }
        let Some((broadcast, mask)) = &self.mask else { return };
        let [b, h, s, _] = broadcast.index([row.sequence, row.head, row.query, 0]);
        let [sb, sh, ss, _] = mask.strides();
        // The mask's type was checked with the question.
        let Some(bytes) = mask.elements::<U8Code>() else { return };
        let bytes = &bytes[b * sb + h * sh + s * ss + first..];
        for ((score, hidden), byte) in scores.iter_mut().zip(hidden).zip(bytes) {
            if byte.0 == 0 {
                (*score, *hidden) = (-R::INFINITY, true);
            }
        }
    }
}
