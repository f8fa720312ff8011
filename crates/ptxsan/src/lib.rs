//! Runs PTX on a CPU and reports its races and memory errors.

pub mod numeric;
pub mod tensor;
