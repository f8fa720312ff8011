//! `ldmatrix`, `stmatrix`, `movmatrix`, `mma.sync` and `wmma`.

use super::build::Builder;
use super::opcode::Opcode;
use super::{Bank, CollectiveKind, FragmentAccess, MatrixMultiply, Register};
use crate::error::Result;
use crate::parse::ast::{Operand, Type};
use crate::tensor::mma::Mma;
use crate::tensor::wmma::{self, Wmma};
use crate::tensor::{Accumulator, Contraction, Element, Fragment, Layout, Shape};

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
            ("mma", [d, a, b, c, ..]) if op.parts.first() == Some(&"sync") => self.mma(op, [d, a, b, c])?,
            ("wmma", [d, a, b, c]) if op.parts.first() == Some(&"mma") => self.wmma(op, [d, a, b, c])?,
            ("wmma", [registers, address, stride @ ..]) if op.parts.first() == Some(&"load") => {
                self.fragment_access(op, registers, address, stride.first(), true)?;
            }
            ("wmma", [address, registers, stride @ ..]) if op.parts.first() == Some(&"store") => {
                self.fragment_access(op, registers, address, stride.first(), false)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn shape(&self, op: &Opcode<'_>) -> Result<Shape> {
        let parse = |text: &str| {
            let (m, rest) = text.strip_prefix('m')?.split_once('n')?;
            let (n, k) = rest.split_once('k')?;
            Some(Shape::new(m.parse().ok()?, n.parse().ok()?, k.parse().ok()?))
        };
        op.parts.iter().find_map(|p| parse(p)).ok_or_else(|| self.unsupported("no shape"))
    }

    fn layouts(op: &Opcode<'_>) -> Vec<Layout> {
        op.parts
            .iter()
            .filter_map(|p| match *p {
                "row" => Some(Layout::Row),
                "col" => Some(Layout::Col),
                _ => None,
            })
            .collect()
    }

    /// `mma.sync.aligned.shape.row.col.d.a.b.c`
    fn mma(&mut self, op: &Opcode<'_>, operands: [&Operand; 4]) -> Result<()> {
        let shape = self.shape(op)?;
        let kinds: Vec<&str> = op.parts.iter().copied().filter(|p| is_kind(p)).collect();
        let layouts = Self::layouts(op);
        if op.has("b1") {
            return Err(
                self.unsupported("products of single bits are not simulated; those of 4 and 8 bits are")
            );
        }
        let ([d, a, b, c], [a_layout, b_layout]) = (&kinds[..], &layouts[..]) else {
            return Err(self.unsupported("its name must have two layouts and four types"));
        };
        let spec = (|| {
            Some(Mma {
                a_layout: *a_layout,
                b_layout: *b_layout,
                a: element(a)?,
                b: element(b)?,
                c: accumulator(c)?,
                d: accumulator(d)?,
                satfinite: op.has("satfinite"),
                ..Mma::new(shape, Element::F16, Accumulator::F32)
            })
        })();
        let contraction = spec.and_then(Mma::contraction);
        let contraction = contraction.ok_or_else(|| self.unsupported("this shape and these types"))?;
        self.multiply(contraction, operands)
    }

    /// `wmma.mma.sync.aligned.row.col.shape.d[.a.b].c`
    fn wmma(&mut self, op: &Opcode<'_>, operands: [&Operand; 4]) -> Result<()> {
        let shape = self.shape(op)?;
        let kinds: Vec<&str> = op.parts.iter().copied().filter(|p| is_kind(p)).collect();
        let (d, multiplicand, c) = match kinds[..] {
            [d, c] => (d, "f16", c),
            [d, a, _, c] => (d, a, c),
            _ => return Err(self.unsupported("its name must have two or four types")),
        };
        let spec = (|| {
            Some(Wmma {
                d: accumulator(d)?,
                c: accumulator(c)?,
                satfinite: op.has("satfinite"),
                ..Wmma::new(shape, element(multiplicand)?, Accumulator::F32)
            })
        })();
        let contraction = spec.and_then(Wmma::contraction);
        let contraction = contraction.ok_or_else(|| self.unsupported("this shape and these types"))?;
        self.multiply(contraction, operands)
    }

    fn multiply(&mut self, contraction: Contraction, [d, a, b, c]: [&Operand; 4]) -> Result<()> {
        let a = self.fragment_registers(a, contraction.a(), false)?;
        let b = self.fragment_registers(b, contraction.b(), false)?;
        let c = self.fragment_registers(c, contraction.c(), false)?;
        let d = self.fragment_registers(d, contraction.d(), true)?;
        let has_words = [&a, &b, &c, &d].iter().all(|list| list.iter().all(|r| r.bank == Bank::B32));
        let multiply = MatrixMultiply { contraction, a, b, c, d, has_words };
        self.collective(CollectiveKind::Multiply(Box::new(multiply)), None);
        Ok(())
    }

    /// As many registers as the fragment needs, 64-bit ones for 64-bit elements.
    fn fragment_registers(
        &mut self,
        operand: &Operand,
        f: &Fragment,
        is_destination: bool,
    ) -> Result<Box<[Register]>> {
        let kind = if f.element_bits() == 64 { Type::B64 } else { Type::B32 };
        let registers = self.fragment(operand, kind, is_destination)?;
        let words = registers.len() * kind.bytes() as usize / 4;
        if words != f.registers() {
            return Err(self.bad(format!("a fragment of {words} words where {} are needed", f.registers())));
        }
        Ok(registers.into())
    }

    /// `wmma.load.{a,b,c}.sync.aligned.layout.shape.type` and `wmma.store.d…`
    fn fragment_access(
        &mut self,
        op: &Opcode<'_>,
        registers: &Operand,
        address: &Operand,
        stride: Option<&Operand>,
        is_load: bool,
    ) -> Result<()> {
        let shape = self.shape(op)?;
        let kind = *op.parts.last().unwrap_or(&"");
        let operand = match op.parts.get(1).copied() {
            Some("a") => element(kind).map(wmma::Operand::A),
            Some("b") => element(kind).map(wmma::Operand::B),
            Some("c" | "d") => accumulator(kind).map(wmma::Operand::C),
            _ => None,
        };
        let operand = operand.ok_or_else(|| self.unsupported("this matrix"))?;
        let fragment = wmma::fragment(shape, operand).filter(|f| f.element_bits() >= 8);
        let fragment = fragment.ok_or_else(|| self.unsupported("this shape and this type"))?;
        let layout = Self::layouts(op).first().copied().unwrap_or(Layout::Row);
        let stride = match stride {
            Some(stride) => self.source_register(stride, Type::U32)?,
            None => self.constant(Bank::B32, 32, wmma::default_stride(shape, operand, layout) as u64),
        };
        let address = self.address(address, op.space())?;
        let registers = self.fragment_registers(registers, &fragment, is_load)?;
        let access = Box::new(FragmentAccess { fragment, layout, address, stride, registers });
        let kind = if is_load {
            CollectiveKind::FragmentLoad(access)
        } else {
            CollectiveKind::FragmentStore(access)
        };
        self.collective(kind, None);
        Ok(())
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
    pub(super) fn fragment(
        &mut self,
        operand: &Operand,
        kind: Type,
        is_destination: bool,
    ) -> Result<Vec<Register>> {
        Self::elements(operand)
            .iter()
            .map(|o| if is_destination { self.destination(o, kind) } else { self.source_register(o, kind) })
            .collect()
    }
}

pub(super) fn is_kind(part: &str) -> bool {
    element(part).is_some() || accumulator(part).is_some()
}

pub(super) fn element(name: &str) -> Option<Element> {
    Some(match name {
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "tf32" => Element::Tf32,
        "e4m3" => Element::E4m3,
        "e5m2" => Element::E5m2,
        "f64" => Element::F64,
        "s8" => Element::S8,
        "u8" => Element::U8,
        "s4" => Element::S4,
        "u4" => Element::U4,
        _ => return None,
    })
}

pub(super) fn accumulator(name: &str) -> Option<Accumulator> {
    Some(match name {
        "f16" => Accumulator::F16,
        "f32" => Accumulator::F32,
        "f64" => Accumulator::F64,
        "s32" => Accumulator::S32,
        _ => return None,
    })
}
