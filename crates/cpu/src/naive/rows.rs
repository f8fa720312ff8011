//! Rows of Q, K and V of any type, as f32.

use evosdpa_core::{Granularity, TensorView};

/// A tensor to read rows from, with the scales of 8-bit codes.
pub(super) struct Rows<'a> {
    tensor: TensorView<'a>,
    scales: Option<&'a [f32]>,
    reach: Granularity,
}

impl<'a> Rows<'a> {
    /// The scales are as many as their reach says.
    pub(super) fn new(tensor: TensorView<'a>, scales: Option<&'a [f32]>, reach: Granularity) -> Self {
        Self { tensor, scales, reach }
    }

    /// The row of a sequence at these indices of the tensor: block (sequence or page), head, row.
    pub(super) fn read(&self, sequence: usize, block: usize, head: usize, row: usize, out: &mut [f32]) {
        self.tensor.read_row(block, head, row, out);
        if let Some(scales) = self.scales {
            let [_, heads, rows, _] = self.tensor.shape();
            let scale = match self.reach {
                Granularity::Tensor => scales[0],
                Granularity::Head => scales[sequence * heads + head],
                Granularity::Token => scales[(block * heads + head) * rows + row],
            };
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }
}
