//! Lane-wise instructions: the table-driven ones, and the few whose operands need care.

use super::build::Builder;
use super::lanes::{self, Args, Plan};
use super::opcode::Opcode;
use super::scope::Symbol;
use super::{Bank, FlowKind, Op, Register, convert, float, integer};
use crate::error::Result;
use crate::memory::window;
use crate::parse::ast::{Operand, Space, Type};

impl Builder<'_> {
    /// Decodes a lane-wise instruction; `false` when it is none.
    pub(super) fn simple(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<bool> {
        match op.name {
            "mov" => self.mov(op, operands)?,
            "cvt" => self.cvt(op, operands)?,
            "cvta" => self.cvta(op, operands)?,
            "isspacep" => self.isspacep(op, operands)?,
            "setp" => self.setp(op, operands)?,
            "set" => self.set(op, operands)?,
            "lop3" => self.lop3(operands)?,
            "bfi" => self.bfi(op, operands)?,
            "abs" | "neg" | "add" | "sub" | "mul" | "fma" | "mad" | "min" | "max"
                if op.has("u16x2") || op.has("s16x2") =>
            {
                let plan = integer::packed(op);
                let plan =
                    plan.ok_or_else(|| self.unsupported("of packed integers there are add, min and max"))?;
                self.emit_plan(plan, operands)?;
            }
            "vabsdiff2" | "vabsdiff4" => {
                let plan = integer::difference(op);
                let plan = plan.ok_or_else(|| self.unsupported("only .u32.u32.u32, with .add or without"))?;
                self.emit_plan(plan, operands)?;
            }
            "min" | "max" if operands.len() == 4 => return Err(self.unsupported("three-input min and max")),
            _ => {
                let Some(plan) = integer::plan(op).or_else(|| float::plan(op, self.perturb)) else {
                    return Ok(false);
                };
                self.emit_plan(plan, operands)?;
            }
        }
        Ok(true)
    }

    fn arity(&self, operands: &[Operand], wanted: usize) -> Result<()> {
        if operands.len() == wanted {
            return Ok(());
        }
        Err(self.bad(format!("needs {wanted} operands, has {}", operands.len())))
    }

    fn emit_plan(&mut self, plan: Plan, operands: &[Operand]) -> Result<()> {
        self.arity(operands, plan.sources.len() + 1)?;
        let mut numbers = [0u32; 3];
        for (i, kind) in plan.sources.iter().enumerate() {
            numbers[i] = self.source(&operands[i + 1], *kind)?;
        }
        let d = self.destination(&operands[0], plan.d)?.index;
        self.emit(Op::Alu(plan.alu), Args { d, a: numbers[0], b: numbers[1], c: numbers[2] });
        Ok(())
    }

    fn mov(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        self.arity(operands, 2)?;
        let kind = op.kind().ok_or_else(|| self.unsupported("`mov` without a type"))?;
        match (&operands[0], &operands[1]) {
            (Operand::Vector(parts), whole) => return self.unpack(kind, parts, whole),
            (whole, Operand::Vector(parts)) => return self.pack(kind, whole, parts),
            _ => {}
        }
        let a = self.source(&operands[1], kind)?;
        let d = self.destination(&operands[0], kind)?;
        let alu: lanes::Alu = match d.bank {
            Bank::Pred => lanes::pred_1(|a| a),
            Bank::B64 => lanes::b64_1(|a| a),
            Bank::B32 => lanes::b32_1(|a| a),
        };
        self.emit(Op::Alu(alu), Args { d: d.index, a, b: 0, c: 0 });
        Ok(())
    }

    /// `mov.b64 {a, b}, c`: parts of equal width, low part first.
    fn unpack(&mut self, kind: Type, parts: &[Operand], whole: &Operand) -> Result<()> {
        let (part, width) = self.part_type(kind, parts.len())?;
        let a = self.source_register(whole, kind)?;
        let reads = self.reads.clone();
        for (i, operand) in parts.iter().enumerate() {
            let d = self.destination(operand, part)?.index;
            let shift = width * i as u32;
            self.reads.clone_from(&reads);
            self.flow = Some(FlowKind::Unpack { from: shift / 8, bytes: width / 8 });
            let mask = if width == 32 { u64::from(u32::MAX) } else { (1u64 << width) - 1 };
            let alu = match a.bank {
                Bank::B64 => lanes::b32_from_b64(move |x| (x >> shift & mask) as u32),
                _ => lanes::b32_1(move |x| x >> shift & mask as u32),
            };
            let args = Args { d, a: a.index, b: 0, c: 0 };
            if i == 0 { self.emit(Op::Alu(alu), args) } else { self.emit_step(Op::Alu(alu), args) }
        }
        Ok(())
    }

    fn part_type(&self, kind: Type, parts: usize) -> Result<(Type, u32)> {
        match (kind.bytes() as usize, parts) {
            (8, 2) => Ok((Type::B32, 32)),
            (8, 4) | (4, 2) => Ok((Type::B16, 16)),
            (4, 4) | (2, 2) => Ok((Type::B8, 8)),
            _ if kind == Type::B128 => {
                Err(self.unsupported("128-bit registers are not simulated; two of 64 bits are"))
            }
            _ => Err(self.unsupported("a vector of this shape")),
        }
    }

    /// `mov.b64 c, {a, b}`.
    fn pack(&mut self, kind: Type, whole: &Operand, parts: &[Operand]) -> Result<()> {
        let (part, width) = self.part_type(kind, parts.len())?;
        let numbers: Vec<u32> = parts.iter().map(|p| self.source(p, part)).collect::<Result<_>>()?;
        let d = self.destination(whole, kind)?;
        let (a, b) = (numbers[0], numbers[1]);
        let args = Args { d: d.index, a, b, c: 0 };
        self.flow = Some(FlowKind::Pack { bytes: width / 8, parts: numbers.clone().into() });
        let alu: lanes::Alu = match (d.bank, numbers.len()) {
            (Bank::B64, 2) => lanes::b32_wide2(|a, b| u64::from(b) << 32 | u64::from(a)),
            (Bank::B32, 2) => lanes::b32_2(move |a, b| b << width | (a & ((1 << width) - 1))),
            (bank, _) => Box::new(move |r, args, mask| {
                let mut out = [0u64; 32];
                for (i, number) in numbers.iter().enumerate() {
                    for lane in 0..32 {
                        out[lane] |= u64::from(r.b32[*number as usize][lane]) << (width * i as u32);
                    }
                }
                if bank == Bank::B64 {
                    lanes::blend(&mut r.b64[args.d as usize], &out, mask);
                } else {
                    lanes::blend(&mut r.b32[args.d as usize], &out.map(|x| x as u32), mask);
                }
            }),
        };
        self.emit(Op::Alu(alu), args);
        Ok(())
    }

    fn cvt(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        if operands.len() < 2 {
            return Err(self.bad("needs a destination and a source".into()));
        }
        let from = op.kind().unwrap_or(Type::B32);
        let a_bits = match &operands[1] {
            Operand::Name(name) => match self.find(name) {
                Some(Symbol::Register(r)) => r.bits,
                _ => from.bytes() * 8,
            },
            Operand::Component(..) => 32,
            _ => from.bytes() * 8,
        };
        let d_bits = match &operands[0] {
            Operand::Name(name) => match self.find(name) {
                Some(Symbol::Register(r)) => r.bits,
                _ => 32,
            },
            _ => 32,
        };
        let plan = convert::plan(op, d_bits, a_bits).ok_or_else(|| self.unsupported("this pair of types"))?;
        self.emit_plan(plan, operands)
    }

    fn cvta(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        self.arity(operands, 2)?;
        let mut space = op.space();
        if space == Space::Param && !self.in_entry {
            space = Space::Local;
        }
        let base = window::base(space);
        let kind = op.kind().unwrap_or(Type::U64);
        if kind.bytes() != 8 {
            return Err(self.unsupported("32-bit generic addresses"));
        }
        let a = self.source(&operands[1], kind)?;
        let d = self.destination(&operands[0], kind)?.index;
        let alu = if op.has("to") {
            lanes::b64_1(move |x| x.wrapping_sub(base))
        } else {
            lanes::b64_1(move |x| x.wrapping_add(base))
        };
        self.emit(Op::Alu(alu), Args { d, a, b: 0, c: 0 });
        Ok(())
    }

    fn isspacep(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        self.arity(operands, 2)?;
        let space = op.space();
        let a = self.source(&operands[1], Type::U64)?;
        let d = self.destination(&operands[0], Type::Pred)?.index;
        let alu = lanes::test64_1(move |x| window::split(x).0 == space);
        self.emit(Op::Alu(alu), Args { d, a, b: 0, c: 0 });
        Ok(())
    }

    /// `setp.cmp[.bool][.ftz].type p[|q], a, b[, c]`
    fn setp(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let kind = op.kind().ok_or_else(|| self.unsupported("`setp` without a type"))?;
        let (first, second) = match operands.first() {
            Some(Operand::Pair(p, q)) => (&**p, Some(&**q)),
            Some(p) => (p, None),
            None => return Err(self.bad("needs operands".into())),
        };
        let p = self.destination(first, Type::Pred)?;
        let q = second.map(|q| self.destination(q, Type::Pred)).transpose()?;
        if matches!(kind, Type::F16x2 | Type::Bf16x2) {
            let Some(q) = q else { return Err(self.bad("a packed comparison needs two predicates".into())) };
            self.compare_into(op, kind, operands, p, 0, false)?;
            return self.compare_into(op, kind, operands, q, 1, false);
        }
        self.compare_into(op, kind, operands, p, 0, false)?;
        if let Some(q) = q {
            self.compare_into(op, kind, operands, q, 0, true)?;
        }
        Ok(())
    }

    /// One predicate of a comparison; `inverted` compares the other way round before the boolean operator.
    fn compare_into(
        &mut self,
        op: &Opcode<'_>,
        kind: Type,
        operands: &[Operand],
        d: Register,
        half: u32,
        inverted: bool,
    ) -> Result<()> {
        let operator = *op.parts.first().ok_or_else(|| self.unsupported("no comparison"))?;
        let boolean = op.parts.iter().find(|p| matches!(**p, "and" | "or" | "xor")).copied();
        self.arity(operands, if boolean.is_some() { 4 } else { 3 })?;
        let (a, b) = (self.source(&operands[1], kind)?, self.source(&operands[2], kind)?);
        let c = boolean.map(|_| self.source(&operands[3], Type::Pred)).transpose()?;
        let is_float =
            matches!(kind, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 | Type::F32 | Type::F64);
        let alu = if is_float {
            float::compare(operator, kind, op.has("ftz"), half)
        } else {
            integer::compare(operator, kind)
        };
        let alu = alu.ok_or_else(|| self.unsupported("this comparison"))?;
        // The destination may also be the third operand, so the comparison goes to a place of its own.
        let t = if c.is_some() || inverted { self.temporary(Type::Pred)? } else { d };
        let mut step = half > 0 || inverted;
        let mut put = |this: &mut Self, alu, args| {
            if step {
                this.emit_step(Op::Alu(alu), args)
            } else {
                this.emit(Op::Alu(alu), args)
            }
            step = true;
        };
        put(self, alu, Args { d: t.index, a, b, c: 0 });
        if inverted {
            let to = if c.is_some() { t } else { d };
            put(self, lanes::pred_1(|x| !x), Args { d: to.index, a: t.index, b: 0, c: 0 });
        }
        if let (Some(c), Some(boolean)) = (c, boolean) {
            let alu = match boolean {
                "and" => lanes::pred_2(|x, y| x & y),
                "or" => lanes::pred_2(|x, y| x | y),
                _ => lanes::pred_2(|x, y| x ^ y),
            };
            put(self, alu, Args { d: d.index, a: t.index, b: c, c: 0 });
        }
        Ok(())
    }

    /// `set.cmp.dtype.stype d, a, b`: the comparison's result as a value.
    fn set(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let kinds = op.kinds();
        let [.., to, from] = kinds[..] else { return Err(self.unsupported("`set` without two types")) };
        let packed = matches!(from, Type::F16x2 | Type::Bf16x2);
        let (one, zero): (u64, u64) = match to {
            Type::F32 => (u64::from(1f32.to_bits()), 0),
            Type::F16 | Type::F16x2 => (0x3c00, 0),
            Type::Bf16 | Type::Bf16x2 => (0x3f80, 0),
            Type::U16 | Type::S16 => (0xffff, 0),
            _ if packed => (0xffff, 0),
            Type::U32 | Type::S32 => (0xffff_ffff, 0),
            _ => return Err(self.unsupported("this result type")),
        };
        let low = self.temporary(Type::Pred)?;
        self.compare_into(op, from, operands, low, 0, false)?;
        let high = if packed { self.temporary(Type::Pred)? } else { low };
        if packed {
            self.compare_into(op, from, operands, high, 1, false)?;
        }
        let d = self.destination(&operands[0], if packed { Type::B32 } else { to })?.index;
        let alu: lanes::Alu = Box::new(move |r, args, mask| {
            let (low, high) = (r.pred[args.a as usize], r.pred[args.b as usize]);
            let mut out = [0u32; 32];
            for lane in 0..32 {
                let pick = |bits: u32| (if bits >> lane & 1 == 1 { one } else { zero }) as u32;
                out[lane] = if packed { pick(low) | pick(high) << 16 } else { pick(low) };
            }
            lanes::blend(&mut r.b32[args.d as usize], &out, mask);
        });
        self.emit_step(Op::Alu(alu), Args { d, a: low.index, b: high.index, c: 0 });
        Ok(())
    }

    fn lop3(&mut self, operands: &[Operand]) -> Result<()> {
        self.arity(operands, 5)?;
        let Operand::Int(table) = operands[4] else {
            return Err(self.bad("the table must be a number".into()));
        };
        let plan = lanes::same(Type::B32, 3, integer::lop3(table as u8));
        self.emit_plan(plan, &operands[..4])
    }

    fn bfi(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        self.arity(operands, 5)?;
        let kind = op.kind().unwrap_or(Type::B32);
        let length = self.source(&operands[4], Type::U32)?;
        let (a, b) = (self.source(&operands[1], kind)?, self.source(&operands[2], kind)?);
        let c = self.source(&operands[3], Type::U32)?;
        let d = self.destination(&operands[0], kind)?.index;
        let alu = integer::insert_field(kind, length).ok_or_else(|| self.unsupported("this type"))?;
        self.emit(Op::Alu(alu), Args { d, a, b, c });
        Ok(())
    }
}
