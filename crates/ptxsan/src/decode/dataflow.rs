//! How validity flows through an instruction: which bytes of its result depend on which bytes of its operands.

use super::{Bank, Register};

/// What an instruction reads and writes, and how one depends on the other.
#[derive(Debug, Clone)]
pub(crate) struct Flow {
    pub(crate) kind: FlowKind,
    pub(crate) reads: Box<[Register]>,
    pub(crate) writes: Box<[Register]>,
    /// One register moved to another.
    pub(crate) is_move: bool,
    /// The shared variable whose address is an operand.
    pub(crate) mention: Option<u16>,
}

/// Where the bytes of a result come from. Operands are those of [`super::lanes::Args`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FlowKind {
    /// Every byte from every byte of the operands: arithmetic.
    Whole,
    /// The same byte of the one operand.
    Copy,
    /// The same byte of every operand.
    Bytewise,
    /// The same half of every operand: packed 16-bit arithmetic.
    Halves,
    /// As `Bytewise`, but a byte or predicate that the other operand clears, or sets, is valid.
    And(Bank),
    Or(Bank),
    /// One of two operands, as a predicate says.
    Select(Bank),
    /// Bytes moved up or down.
    Shift {
        bank: Bank,
        left: bool,
        signed: bool,
    },
    /// `prmt`.
    Permute,
    /// Registers of so many bytes side by side.
    Pack {
        bytes: u32,
        parts: Box<[u32]>,
    },
    /// So many bytes of an operand, from one of them on.
    Unpack {
        from: u32,
        bytes: u32,
    },
    /// The low bytes of an integer, extended or cut.
    Resize {
        bytes: u32,
        signed: bool,
    },
    /// Two conversions side by side: the first operand above the second.
    PackHalves,
}

impl FlowKind {
    /// What the opcode says.
    pub(super) fn of(opcode: &str) -> FlowKind {
        let parts: Vec<&str> = opcode.split('.').collect();
        let last = parts.last().copied().unwrap_or("");
        let bank = match last {
            "pred" => Bank::Pred,
            "b64" | "u64" | "s64" | "f64" => Bank::B64,
            _ => Bank::B32,
        };
        let is_packed = |part: &&str| matches!(*part, "f16x2" | "bf16x2" | "s16x2" | "u16x2");
        match parts[0] {
            "mov" | "cvta" => FlowKind::Copy,
            "and" => FlowKind::And(bank),
            "or" => FlowKind::Or(bank),
            "xor" | "not" | "lop3" => FlowKind::Bytewise,
            "selp" => FlowKind::Select(bank),
            "shl" => FlowKind::Shift { bank, left: true, signed: false },
            "shr" => FlowKind::Shift { bank, left: false, signed: last.starts_with('s') },
            "prmt" if parts.len() == 2 => FlowKind::Permute,
            "cvt" => match parts[..] {
                [_, to, from] if integer_bytes(to).is_some() => match integer_bytes(from) {
                    Some(bytes) => FlowKind::Resize { bytes, signed: from.starts_with('s') },
                    None => FlowKind::Whole,
                },
                [.., to, "f32"] if is_packed(&to) => FlowKind::PackHalves,
                _ => FlowKind::Whole,
            },
            _ if parts.iter().any(is_packed) => FlowKind::Halves,
            _ => FlowKind::Whole,
        }
    }

    /// Whether the result is something new, not bytes moved elsewhere.
    pub(crate) fn computes(&self) -> bool {
        matches!(self, FlowKind::Whole | FlowKind::Halves | FlowKind::PackHalves | FlowKind::Bytewise)
    }
}

fn integer_bytes(part: &str) -> Option<u32> {
    let bits = part.strip_prefix(['u', 's', 'b'])?;
    matches!(bits, "8" | "16" | "32" | "64").then(|| bits.parse::<u32>().unwrap_or(32) / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_told_apart() {
        let shift = FlowKind::Shift { bank: Bank::B64, left: false, signed: true };
        for (opcode, kind) in [
            ("add.s32", FlowKind::Whole),
            ("mov.b32", FlowKind::Copy),
            ("and.b64", FlowKind::And(Bank::B64)),
            ("and.pred", FlowKind::And(Bank::Pred)),
            ("or.pred", FlowKind::Or(Bank::Pred)),
            ("shr.s64", shift),
            ("cvt.u16.u32", FlowKind::Resize { bytes: 4, signed: false }),
            ("cvt.s64.s32", FlowKind::Resize { bytes: 4, signed: true }),
            ("cvt.rn.f32.s32", FlowKind::Whole),
            ("cvt.rn.f16x2.f32", FlowKind::PackHalves),
            ("fma.rn.f16x2", FlowKind::Halves),
            ("prmt.b32", FlowKind::Permute),
            ("prmt.b32.f4e", FlowKind::Whole),
        ] {
            assert_eq!(FlowKind::of(opcode), kind, "{opcode}");
        }
    }
}
