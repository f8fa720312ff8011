//! A problem's score modifiers with their data, as the drivers hand them to the kernels in `hook`.

use evosdpa_core::{Blocks, Broadcast, DType, Problem, SideInputs, TensorView};
use std::f32::consts::LOG2_E;

/// What happens to the scores of a problem.
pub(crate) struct Modifiers<'a> {
    /// `cap · log2 e`; 0 without a softcap.
    pub(crate) cap: f32,
    slopes: Option<&'a [f32]>,
    pub(crate) bias: Option<Dense<'a>>,
    pub(crate) mask: Option<Dense<'a>>,
    pub(crate) blocks: Option<BlockTable<'a>>,
    sinks: Option<&'a [f32]>,
}

impl<'a> Modifiers<'a> {
    /// Of side inputs that were checked.
    pub(crate) fn new(problem: &Problem, side: &SideInputs<'a>) -> Self {
        let scores = problem.scores();
        let dense = |(broadcast, view)| Dense { broadcast, view };
        Self {
            cap: scores.softcap.map_or(0.0, |cap| cap.value() * LOG2_E),
            slopes: side.alibi_slopes,
            bias: scores.bias.zip(side.bias).map(dense),
            mask: scores.mask.zip(side.mask).map(dense),
            blocks: scores.blocks.zip(side.blocks).map(|(blocks, view)| BlockTable { blocks, view }),
            sinks: side.sinks,
        }
    }

    /// Whether every score is changed, rather than hidden here and there.
    pub(crate) fn change(&self) -> bool {
        self.cap > 0.0 || self.slopes.is_some() || self.bias.is_some()
    }

    /// Whether few of the keys that a band leaves to a row may hold most of its weight.
    pub(crate) fn choose_keys(&self) -> bool {
        self.hide() || self.bias.is_some() || self.slopes.is_some()
    }

    /// Whether keys are hidden by data: one by one, or block by block.
    pub(crate) fn hide(&self) -> bool {
        self.mask.is_some() || self.blocks.is_some()
    }

    /// Whether distances between queries and keys count.
    pub(crate) fn alibi(&self) -> bool {
        self.slopes.is_some()
    }

    /// What a key's distance from a query of this head is multiplied with, in units of log2.
    pub(crate) fn slope(&self, head: usize) -> f32 {
        self.slopes.map_or(0.0, |slopes| -slopes[head] * LOG2_E)
    }

    /// The sink logit of a head, which is asked for where there are sinks: a key without a value.
    #[inline]
    pub(crate) fn sink(&self, head: impl FnOnce() -> usize) -> Option<f32> {
        self.sinks.map(|sinks| sinks[head()])
    }
}

/// A dense tensor over queries and keys, some of its dimensions shared.
pub(crate) struct Dense<'a> {
    broadcast: Broadcast,
    view: TensorView<'a>,
}

impl Dense<'_> {
    pub(crate) fn dtype(&self) -> DType {
        self.view.dtype()
    }

    /// The element of a query's first key.
    pub(crate) fn row(&self, sequence: usize, head: usize, query: usize) -> *const u8 {
        let [b, h, s, _] = self.broadcast.index([sequence, head, query, 0]);
        let [batch_stride, head_stride, row_stride, _] = self.view.strides();
        let elements = b * batch_stride + h * head_stride + s * row_stride;
        // The indices are within the tensor, which was checked.
        self.view.bytes().as_ptr().wrapping_add(elements * self.view.dtype().bytes())
    }
}

/// Which blocks of keys each block of queries sees.
pub(crate) struct BlockTable<'a> {
    blocks: Blocks,
    view: TensorView<'a>,
}

impl<'a> BlockTable<'a> {
    /// Keys of a block.
    pub(crate) fn keys(&self) -> usize {
        self.blocks.keys()
    }

    /// A byte for each block of keys, 0 where it is hidden from a query.
    pub(crate) fn row(&self, sequence: usize, head: usize, query: usize) -> &'a [u8] {
        self.blocks.row(&self.view, sequence, head, query)
    }
}
