//! Classes of instructions.

use crate::decode::{CollectiveKind, Op};
use serde::{Deserialize, Serialize};

/// What part of an SM an instruction keeps busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Class {
    /// Integer and bit arithmetic, moves and comparisons.
    Integer,
    /// Single-precision arithmetic.
    Float32,
    /// Double-precision arithmetic.
    Float64,
    /// Half-precision arithmetic, scalar and packed.
    Half,
    /// Functions of the special-function unit.
    Special,
    /// Conversions between types.
    Convert,
    /// Branches, calls and exits.
    Control,
    /// Loads, stores and atomics on global memory (and those told apart only by address).
    Global,
    /// The same on shared memory, `ldmatrix` included.
    Shared,
    /// The same on local, parameter and constant memory.
    OtherMemory,
    /// Asynchronous copies and their groups.
    AsyncCopy,
    /// Barriers, fences and warp synchronisation.
    Synchronise,
    /// Shuffles, votes and other exchanges between lanes.
    Warp,
    /// Matrix multiply-accumulate.
    Tensor,
}

impl Class {
    pub(crate) fn of(opcode: &str, op: &Op) -> Class {
        use crate::parse::ast::Space;
        let by_space = |space: Space| match space {
            Space::Global | Space::Generic => Class::Global,
            Space::Shared => Class::Shared,
            Space::Local | Space::Const | Space::Param => Class::OtherMemory,
        };
        match op {
            Op::Load(t) | Op::Store(t) => by_space(t.address.space),
            Op::Atomic(a) => by_space(a.address.space),
            Op::AsyncCopy(_) | Op::AsyncCommit | Op::AsyncWait(_) | Op::AsyncWaitAll => Class::AsyncCopy,
            Op::Barrier(_) | Op::Fence(_) => Class::Synchronise,
            Op::Collective(_) => Class::of_collective(opcode),
            Op::ActiveMask(_) => Class::Warp,
            Op::Alu(_) => Class::of_arithmetic(opcode),
            Op::Clock(_) | Op::Nop => Class::Integer,
            _ => Class::Control,
        }
    }

    fn of_collective(opcode: &str) -> Class {
        match opcode.split('.').next().unwrap_or("") {
            "bar" | "barrier" => Class::Synchronise,
            "ldmatrix" | "stmatrix" => Class::Shared,
            "mma" => Class::Tensor,
            "wmma" if opcode.starts_with("wmma.mma") => Class::Tensor,
            "wmma" if opcode.contains(".shared") => Class::Shared,
            "wmma" => Class::Global,
            _ => Class::Warp,
        }
    }

    fn of_arithmetic(opcode: &str) -> Class {
        let name = opcode.split('.').next().unwrap_or("");
        let kind = opcode.rsplit('.').next().unwrap_or("");
        match (name, kind) {
            ("cvt" | "cvta", _) => Class::Convert,
            ("mov" | "setp" | "set" | "selp" | "slct" | "testp", _) => Class::Integer,
            ("ex2" | "lg2" | "rcp" | "rsqrt" | "sqrt" | "sin" | "cos" | "tanh", _) => Class::Special,
            (_, "f32") => Class::Float32,
            (_, "f64") => Class::Float64,
            (_, "f16" | "bf16" | "f16x2" | "bf16x2") => Class::Half,
            _ => Class::Integer,
        }
    }

    /// Floating-point operations one lane does in this instruction: a fused multiply-add is two.
    pub(crate) fn lane_flops(self, opcode: &str) -> u32 {
        let each = match (self, opcode.split('.').next().unwrap_or("")) {
            (Class::Special, _) => 1,
            (Class::Float32 | Class::Float64 | Class::Half, "fma" | "mad") => 2,
            (
                Class::Float32 | Class::Float64 | Class::Half,
                "add" | "sub" | "mul" | "div" | "min" | "max",
            ) => 1,
            _ => 0,
        };
        if opcode.ends_with("x2") { 2 * each } else { each }
    }
}

/// Multiplications and additions of one matrix instruction, counted apart.
pub(crate) fn tensor_ops(op: &Op) -> u64 {
    match op {
        Op::Collective(collective) => match &collective.kind {
            CollectiveKind::Multiply(multiply) => 2 * multiply.contraction.multiply_adds() as u64,
            _ => 0,
        },
        _ => 0,
    }
}
