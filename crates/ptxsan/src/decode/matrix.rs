//! `ldmatrix`, `stmatrix`, `movmatrix`, `mma.sync` and `wmma`.

use super::build::Builder;
use super::opcode::Opcode;
use super::{CollectiveKind, Register};
use crate::error::Result;
use crate::parse::ast::{Operand, Type};

impl Builder<'_> {
    /// Decodes a matrix instruction; `false` when it is none.
    pub(super) fn matrix(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<bool> {
        match (op.name, operands) {
            ("ldmatrix", [d, source]) => {
                let registers = self.tile_registers(op, d, true)?;
                let address = self.address(source, op.space())?;
                let kind = CollectiveKind::LoadMatrix { registers, address, transposed: op.has("trans") };
                self.collective(kind, None);
            }
            ("stmatrix", [target, a]) => {
                let registers = self.tile_registers(op, a, false)?;
                let address = self.address(target, op.space())?;
                let kind = CollectiveKind::StoreMatrix { registers, address, transposed: op.has("trans") };
                self.collective(kind, None);
            }
            ("movmatrix", [d, a]) => {
                let a = self.source(a, Type::B32)?;
                let d = self.destination(d, Type::B32)?.index;
                self.collective(CollectiveKind::MoveMatrix { d, a }, None);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn tile_registers(&mut self, op: &Opcode<'_>, operand: &Operand, is_load: bool) -> Result<Box<[u32]>> {
        if !op.has("m8n8") || op.kind() != Some(Type::B16) {
            return Err(self.unsupported("matrices other than 8×8 of 16 bits"));
        }
        let wanted = match () {
            () if op.has("x4") => 4,
            () if op.has("x2") => 2,
            () => 1,
        };
        let registers = self.fragment(operand, Type::B32, is_load)?;
        if registers.len() != wanted {
            return Err(self.bad(format!("{} registers for {wanted} matrices", registers.len())));
        }
        Ok(registers.iter().map(|r| r.index).collect())
    }

    /// The registers of a fragment, all of one type.
    pub(super) fn fragment(&mut self, operand: &Operand, kind: Type, is_destination: bool) -> Result<Vec<Register>> {
        Self::elements(operand)
            .iter()
            .map(|o| if is_destination { self.destination(o, kind) } else { self.source_register(o, kind) })
            .collect()
    }
}
