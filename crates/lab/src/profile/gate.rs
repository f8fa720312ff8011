//! The profile gate, the fourth after resources, correctness and speed: tensor cores busy for half the time, or memory not
//! the limit.

use super::{metric::Metric, values::Values};
use crate::gate::GateResult;

/// The gate's name.
pub const GATE: &str = "profile";

/// Tensor cores at least this busy pass, in percent of peak.
const TENSOR_AT_LEAST: f64 = 50.0;
/// Device memory less busy than this passes.
const DRAM_BELOW: f64 = 50.0;

/// The verdict on a launch.
pub fn gate(values: &Values) -> GateResult {
    let (tensor, dram) = (values.required(Metric::TensorPipe), values.required(Metric::DramThroughput));
    let numbers = format!("tensor pipe {tensor:.1} % and DRAM {dram:.1} % of peak");
    if tensor >= TENSOR_AT_LEAST || dram < DRAM_BELOW {
        GateResult::pass(GATE, numbers)
    } else {
        GateResult::fail(
            GATE,
            format!(
                "{numbers}; it takes a tensor pipe of at least {TENSOR_AT_LEAST} % or DRAM below {DRAM_BELOW} %"
            ),
        )
    }
}
