//! A problem and its tensors as the arguments of a CUDA kernel.

use evosdpa_core::{Problem, TensorView};
use evosdpa_kernels::SdpaParams;

/// The parameter struct for tensors (Q, K, V, O) at these addresses.
pub(super) fn params(
    problem: &Problem,
    views: &[TensorView<'_>; 4],
    [q, k, v, o]: [u64; 4],
    lse: Option<u64>,
) -> SdpaParams {
    let sizes = problem.sizes();
    let band = problem.band();
    let strides = |view: &TensorView<'_>| {
        let [batch, head, seq, _] = view.strides();
        [batch as i64, head as i64, seq as i64]
    };
    SdpaParams {
        q,
        k,
        v,
        o,
        lse: lse.unwrap_or(0),
        q_stride: strides(&views[0]),
        k_stride: strides(&views[1]),
        v_stride: strides(&views[2]),
        o_stride: strides(&views[3]),
        lse_stride: [(sizes.heads_q * sizes.seq_q) as i64, sizes.seq_q as i64],
        // Sizes are below 2^30 by construction of a shape, and so are the band's bounds.
        batch: sizes.batch as i32,
        heads_q: sizes.heads_q as i32,
        heads_kv: sizes.heads_kv as i32,
        seq_q: sizes.seq_q as i32,
        seq_kv: sizes.seq_kv as i32,
        dim_qk: sizes.dim_qk as i32,
        dim_v: sizes.dim_v as i32,
        band_lo: band.lo as i32,
        band_hi: band.hi as i32,
        scale: problem.scale(),
        scale_log2: problem.scale() * std::f32::consts::LOG2_E,
        ..SdpaParams::default()
    }
}
