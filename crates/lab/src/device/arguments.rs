//! A problem and its tensors as the library's description of them, and as the arguments of a CUDA kernel.

use evosdpa::{DeviceLse, DeviceTensor, DeviceTensors};
use evosdpa_core::{Problem, TensorView};

/// Tensors (Q, K, V, O) with the strides of these views at these addresses.
pub(super) fn tensors(
    problem: &Problem,
    views: &[TensorView<'_>; 4],
    addresses: [u64; 4],
    lse: Option<u64>,
) -> DeviceTensors {
    let tensor = |i: usize| {
        let [batch, head, seq, _] = views[i].strides();
        DeviceTensor { address: addresses[i], strides: [batch as i64, head as i64, seq as i64] }
    };
    DeviceTensors {
        q: tensor(0),
        k: tensor(1),
        v: tensor(2),
        o: tensor(3),
        lse: lse.map(|address| DeviceLse::packed(address, problem)),
        scales: None,
    }
}
