//! Loads, stores, atomics and asynchronous copies.

use super::build::Builder;
use super::lanes::Args;
use super::opcode::Opcode;
use super::scope::bank;
use super::{Address, AsyncCopy, Atomic, Op, Order, Register, Scope, Transfer};
use crate::error::Result;
use crate::numeric::{Extreme, ExtremeMode, FloatMode, Half, HalfMode, Round, compare, float, format, half};
use crate::parse::ast::{Operand, Space, Type};

impl Builder<'_> {
    /// Decodes an instruction that touches memory; `false` when it does not.
    pub(super) fn transfer(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<bool> {
        match op.name {
            "ld" | "ldu" => self.load(op, operands)?,
            "st" => self.store(op, operands)?,
            "atom" | "red" => self.atomic(op, operands)?,
            "cp" if op.parts.first() == Some(&"async") => self.async_copy(op, operands)?,
            "prefetch" | "prefetchu" | "discard" | "applypriority" => self.emit(Op::Nop, Args::default()),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn order(&self, op: &Opcode<'_>) -> Order {
        let scope = scope(op).unwrap_or(Scope::Device);
        let acquires = op.has("acquire") || op.has("acq_rel");
        let releases = op.has("release") || op.has("acq_rel");
        let strong = op.has("volatile") || op.has("relaxed") || op.has("mmio") || acquires || releases;
        Order { strong: strong.then_some(scope), acquires, releases }
    }

    fn load(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let Some((target, source)) = operands.split_first() else {
            return Err(self.bad("needs operands".into()));
        };
        let Some(source) = source.first() else { return Err(self.bad("needs an address".into())) };
        let kind = self.element_type(op)?;
        let registers = Self::elements(target)
            .iter()
            .map(|o| self.any_destination(o, kind))
            .collect::<Result<Vec<_>>>()?;
        self.check_vector(op, registers.len())?;
        let address = self.address(source, op.space())?;
        let order = self.order(op);
        self.communicates |=
            order.strong.is_some() && matches!(address.space, Space::Global | Space::Generic);
        self.polls |= order.strong.is_some() && !order.acquires;
        self.check_widths(kind, &registers)?;
        let transfer = Transfer {
            address,
            bytes: kind.bytes(),
            is_signed: kind.is_signed(),
            registers: registers.into(),
            order,
            non_coherent: op.has("nc"),
            is_update: false,
            is_constant: false,
            is_compared: false,
            is_volatile_data: op.has("volatile"),
        };
        self.emit(Op::Load(transfer), Args::default());
        Ok(())
    }

    fn store(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let [target, value, ..] = operands else {
            return Err(self.bad("needs an address and a value".into()));
        };
        let kind = self.element_type(op)?;
        let registers =
            Self::elements(value).iter().map(|o| self.any_source(o, kind)).collect::<Result<Vec<_>>>()?;
        self.check_vector(op, registers.len())?;
        self.check_widths(kind, &registers)?;
        let address = self.address(target, op.space())?;
        let order = self.order(op);
        self.communicates |=
            order.strong.is_some() && matches!(address.space, Space::Global | Space::Generic);
        let transfer = Transfer {
            address,
            bytes: kind.bytes(),
            is_signed: false,
            registers: registers.into(),
            order,
            non_coherent: false,
            is_update: false,
            is_constant: false,
            is_compared: false,
            is_volatile_data: op.has("volatile"),
        };
        self.emit(Op::Store(transfer), Args::default());
        Ok(())
    }

    fn element_type(&self, op: &Opcode<'_>) -> Result<Type> {
        op.kind()
            .filter(|k| bank(*k).is_some() && *k != Type::Pred)
            .ok_or_else(|| self.unsupported("this type"))
    }

    fn check_vector(&self, op: &Opcode<'_>, registers: usize) -> Result<()> {
        if registers == op.vector() {
            return Ok(());
        }
        Err(self.bad(format!("{registers} registers for a vector of {}", op.vector())))
    }

    fn check_widths(&self, kind: Type, registers: &[Register]) -> Result<()> {
        match registers.iter().find(|r| r.bits < kind.bytes() * 8) {
            Some(r) => Err(self.bad(format!("a register of {} bits for {} bytes", r.bits, kind.bytes()))),
            None => Ok(()),
        }
    }

    fn atomic(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let kind = self.element_type(op)?;
        let is_red = op.name == "red";
        let (d, rest) = match operands.split_first() {
            Some((d, rest)) if !is_red => (Some(d), rest),
            _ => (None, operands),
        };
        let operation = op.parts.iter().find(|p| {
            matches!(**p, "add" | "min" | "max" | "and" | "or" | "xor" | "exch" | "cas" | "inc" | "dec")
        });
        let operation = *operation.ok_or_else(|| self.unsupported("this operation"))?;
        let wanted = if operation == "cas" { 3 } else { 2 };
        if rest.len() < wanted {
            return Err(self.bad(format!("needs {wanted} operands beside the destination")));
        }
        let address = self.address(&rest[0], op.space())?;
        self.communicates |= matches!(address.space, Space::Global | Space::Generic);
        let mut order = self.order(op);
        order.strong = Some(scope(op).unwrap_or(Scope::Device));
        let bytes = kind.bytes();
        let values = Self::elements(&rest[1]);
        let places = d.map_or(&[][..], Self::elements);
        self.check_vector(op, values.len())?;
        if d.is_some() {
            self.check_vector(op, places.len())?;
        }
        // A vector is atomic by element, and aligned as a whole.
        for (i, value) in values.iter().enumerate() {
            let d = places.get(i).map(|d| self.destination(d, kind)).transpose()?;
            let a = self.source_register(value, kind)?;
            let b = if operation == "cas" { Some(self.source_register(&rest[2], kind)?) } else { None };
            let apply =
                apply(operation, kind).ok_or_else(|| self.unsupported("this operation on this type"))?;
            let address = Address { offset: address.offset + i as i64 * i64::from(bytes), ..address };
            let align = if i == 0 { bytes * values.len() as u32 } else { bytes };
            let atomic =
                Op::Atomic(Box::new(Atomic { address, bytes, align, d, is_read: false, a, b, apply, order }));
            if i == 0 { self.emit(atomic, Args::default()) } else { self.emit_step(atomic, Args::default()) }
        }
        Ok(())
    }

    /// `cp.async.{ca,cg}.shared.global [to], [from], bytes{, source_bytes | ignore}` and its groups.
    fn async_copy(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        match op.parts.get(1).copied() {
            Some("mbarrier") => self.arrive_after_copies(op, operands)?,
            Some("commit_group") => self.emit(Op::AsyncCommit, Args::default()),
            Some("wait_all") => self.emit(Op::AsyncWaitAll, Args::default()),
            Some("wait_group") => {
                let Some(Operand::Int(n)) = operands.first() else {
                    return Err(self.bad("needs a number of groups".into()));
                };
                self.emit(Op::AsyncWait(u32::try_from(*n).unwrap_or(u32::MAX)), Args::default());
            }
            Some(level @ ("ca" | "cg")) => {
                let [to, from, Operand::Int(bytes), rest @ ..] = operands else {
                    return Err(self.bad("needs two addresses and a size".into()));
                };
                let bytes = *bytes as u32;
                if !matches!((level, bytes), ("ca", 4 | 8 | 16) | ("cg", 16)) {
                    return Err(self.bad(format!("copies {bytes} bytes; .ca copies 4, 8 or 16, .cg only 16")));
                }
                let (mut source_bytes, mut ignore_source) = (None, None);
                if let Some(operand) = rest.first() {
                    // The cache policy of `.L2::cache_hint` may stand alone; it has 64 bits.
                    let is_policy = op.has("L2::cache_hint") && rest.len() == 1;
                    if !is_policy {
                        let register = self.any_source(operand, Type::U32)?;
                        match register.bank {
                            super::Bank::Pred => ignore_source = Some(register),
                            _ => source_bytes = Some(register),
                        }
                    }
                }
                let to = self.address(to, Space::Shared)?;
                let from = self.address(from, Space::Global)?;
                let copy = AsyncCopy { to, from, bytes, source_bytes, ignore_source };
                self.emit(Op::AsyncCopy(Box::new(copy)), Args::default());
            }
            _ => return Err(self.unsupported("this kind of asynchronous copy")),
        }
        Ok(())
    }
}

/// The scope an opcode names.
pub(super) fn scope(op: &Opcode<'_>) -> Option<Scope> {
    op.parts.iter().find_map(|p| match *p {
        "cta" => Some(Scope::Cta),
        "cluster" | "gpu" | "gl" | "sys" => Some(Scope::Device),
        _ => None,
    })
}

pub(super) type Apply = Box<dyn Fn(u64, u64, u64) -> u64 + Send + Sync>;

pub(crate) fn apply(operation: &str, kind: Type) -> Option<Apply> {
    let bytes = kind.bytes();
    let mask = if bytes == 8 { u64::MAX } else { (1u64 << (8 * bytes)) - 1 };
    let signed = move |x: u64| {
        let unused = 64 - 8 * bytes;
        ((x << unused) as i64) >> unused
    };
    let halves = HalfMode::default();
    let fold = |which: Extreme| -> Apply {
        match kind {
            Type::F16x2 => Box::new(move |old, a, _| {
                let f = |x, y| Half::F16.extreme(which, x, y, ExtremeMode::default());
                u64::from(half::each2(old as u32, a as u32, f))
            }),
            Type::F16 | Type::Bf16 => Box::new(move |old, a, _| {
                let half = if kind == Type::F16 { Half::F16 } else { Half::Bf16 };
                u64::from(half.extreme(which, old as u16, a as u16, ExtremeMode::default()))
            }),
            Type::Bf16x2 => Box::new(move |old, a, _| {
                let f = |x, y| Half::Bf16.extreme(which, x, y, ExtremeMode::default());
                u64::from(half::each2(old as u32, a as u32, f))
            }),
            Type::F32 => Box::new(move |old, a, _| {
                compare::extreme(&format::F32, which, old, a, ExtremeMode::default())
            }),
            _ if kind.is_signed() && which == Extreme::Min => {
                Box::new(move |old, a, _| if signed(a) < signed(old) { a } else { old })
            }
            _ if kind.is_signed() => Box::new(move |old, a, _| if signed(a) > signed(old) { a } else { old }),
            _ if which == Extreme::Min => Box::new(|old, a, _| old.min(a)),
            _ => Box::new(|old, a, _| old.max(a)),
        }
    };
    Some(match (operation, kind) {
        // Atomic f32 addition in global memory flushes nothing; rounding is to nearest.
        ("add", Type::F32) => {
            Box::new(|old, a, _| u64::from(float::add_f32(old as u32, a as u32, FloatMode::DEFAULT)))
        }
        ("add", Type::F64) => Box::new(|old, a, _| float::add_f64(old, a, Round::NearestEven)),
        ("add", Type::F16) => {
            Box::new(move |old, a, _| u64::from(Half::F16.add(old as u16, a as u16, halves)))
        }
        ("add", Type::Bf16) => {
            Box::new(move |old, a, _| u64::from(Half::Bf16.add(old as u16, a as u16, halves)))
        }
        ("add", Type::F16x2) => Box::new(move |old, a, _| {
            u64::from(half::each2(old as u32, a as u32, |x, y| Half::F16.add(x, y, halves)))
        }),
        ("add", Type::Bf16x2) => Box::new(move |old, a, _| {
            u64::from(half::each2(old as u32, a as u32, |x, y| Half::Bf16.add(x, y, halves)))
        }),
        ("add", _) => Box::new(move |old, a, _| old.wrapping_add(a) & mask),
        ("min", _) => fold(Extreme::Min),
        ("max", _) => fold(Extreme::Max),
        ("and", _) => Box::new(|old, a, _| old & a),
        ("or", _) => Box::new(|old, a, _| old | a),
        ("xor", _) => Box::new(|old, a, _| old ^ a),
        ("exch", _) => Box::new(|_, a, _| a),
        ("cas", _) => Box::new(|old, a, b| if old == a { b } else { old }),
        ("inc", _) => Box::new(|old, a, _| if old >= a { 0 } else { old + 1 }),
        ("dec", _) => Box::new(|old, a, _| if old == 0 || old > a { a } else { old - 1 }),
        _ => return None,
    })
}
