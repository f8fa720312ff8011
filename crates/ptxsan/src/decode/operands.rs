//! Operands to registers: constants and special registers get a register of their own, filled once per warp.

use super::build::Builder;
use super::scope::{Symbol, bank};
use super::special::{Special, is_clock, is_not_simulated};
use super::{Address, Bank, Base, Op, Register};
use crate::error::Result;
use crate::memory::window;
use crate::parse::ast::{Operand, Space, Type, function_address};

impl Builder<'_> {
    pub(super) fn find(&mut self, name: &str) -> Option<Symbol> {
        if let Some(symbol) = self.scopes.find(name) {
            return Some(symbol);
        }
        self.globals.get(name).map(|v| Symbol::Memory { space: v.space, address: v.address, bytes: v.bytes })
    }

    pub(super) fn constant(&mut self, bank: Bank, bits: u32, value: u64) -> Register {
        if let Some(&index) = self.constants.get(&(bank, value)) {
            return Register { bank, index, bits };
        }
        let index = self.scopes.counts[bank as usize];
        self.scopes.counts[bank as usize] += 1;
        self.constants.insert((bank, value), index);
        Register { bank, index, bits }
    }

    pub(super) fn temporary(&mut self, kind: Type) -> Result<Register> {
        self.scopes.fresh(kind).ok_or_else(|| self.unsupported("128-bit registers"))
    }

    fn special(&mut self, name: &str, component: Option<&str>) -> Result<Option<Register>> {
        if component.is_none() && is_clock(name) {
            let kind = if name.ends_with("64") || name == "%globaltimer" { Type::U64 } else { Type::U32 };
            let register = self.temporary(kind)?;
            self.emit_step(Op::Clock(register), super::lanes::Args::default());
            return Ok(Some(register));
        }
        let Some(special) = Special::named(name, component) else { return Ok(None) };
        let next = self.scopes.counts[Bank::B32 as usize];
        let index = *self.specials.entry(special).or_insert(next);
        if index == next {
            self.scopes.counts[Bank::B32 as usize] += 1;
        }
        Ok(Some(Register { bank: Bank::B32, index, bits: 32 }))
    }

    /// The bits of an immediate in the type the instruction reads it as.
    fn immediate(&self, operand: &Operand, kind: Type) -> Option<u64> {
        let value = match (operand, kind) {
            (Operand::F64(bits), Type::F32) => u64::from((f64::from_bits(*bits) as f32).to_bits()),
            (Operand::F32(bits), Type::F64) => f64::from(f32::from_bits(*bits)).to_bits(),
            (Operand::Int(v), Type::F32) => u64::from((*v as i64 as f32).to_bits()),
            (Operand::Int(v), Type::F64) => (*v as i64 as f64).to_bits(),
            (Operand::Int(v), _) | (Operand::F64(v), _) => *v,
            (Operand::F32(bits), _) => u64::from(*bits),
            _ => return None,
        };
        Some(match kind.bytes() {
            0 => u64::from(value != 0),
            1 => value & 0xff,
            2 => value & 0xffff,
            4 => value & 0xffff_ffff,
            _ => value,
        })
    }

    /// A source register, whatever its width.
    pub(super) fn any_source(&mut self, operand: &Operand, kind: Type) -> Result<Register> {
        let (wanted, bits) = bank(kind).ok_or_else(|| self.unsupported("128-bit operands"))?;
        if let Some(value) = self.immediate(operand, kind) {
            return Ok(self.constant(wanted, bits, value));
        }
        match operand {
            Operand::Name(name) => match self.find(name) {
                Some(Symbol::Register(register)) => {
                    self.reads.push(register);
                    Ok(register)
                }
                Some(Symbol::Memory { space, address, .. }) => {
                    self.mention = self.shared_variable(space, address);
                    Ok(self.constant(wanted, bits, address))
                }
                None => match self.special(name, None)? {
                    Some(register) => Ok(register),
                    None if self.ast.function_place(name).is_some() => {
                        let address = self.ast.function_place(name).map_or(0, function_address);
                        Ok(self.constant(wanted, bits, address))
                    }
                    None if name == "WARP_SZ" => Ok(self.constant(wanted, bits, 32)),
                    None if is_not_simulated(name) => {
                        Err(self.unsupported(&format!("`{name}` is not simulated")))
                    }
                    None => Err(self.bad(format!("unknown name `{name}`"))),
                },
            },
            Operand::Component(name, part) => match self.special(name, Some(part))? {
                Some(register) => Ok(register),
                None => Err(self.unsupported(&format!("`{name}.{part}`"))),
            },
            Operand::Offset(name, offset) => match self.find(name) {
                Some(Symbol::Memory { space, address, .. }) => {
                    self.mention = self.shared_variable(space, address);
                    Ok(self.constant(wanted, bits, address.wrapping_add_signed(*offset)))
                }
                _ => Err(self.bad(format!("`{name}` is not a variable"))),
            },
            Operand::Not(inner) => {
                let a = self.source(inner, Type::Pred)?;
                let d = self.temporary(Type::Pred)?;
                let args = super::lanes::Args { d: d.index, a, b: 0, c: 0 };
                self.emit_step(Op::Alu(super::lanes::pred_1(|p| !p)), args);
                Ok(d)
            }
            _ => Err(self.unsupported("an operand of this form here")),
        }
    }

    /// A source whose bank must be that of `kind`.
    pub(super) fn source_register(&mut self, operand: &Operand, kind: Type) -> Result<Register> {
        let register = self.any_source(operand, kind)?;
        let (wanted, _) = bank(kind).ok_or_else(|| self.unsupported("128-bit operands"))?;
        if register.bank == wanted {
            return Ok(register);
        }
        // A 32-bit special register read as 64 bits.
        if wanted == Bank::B64 && register.bank == Bank::B32 {
            let d = self.temporary(Type::B64)?;
            let args = super::lanes::Args { d: d.index, a: register.index, b: 0, c: 0 };
            self.emit_step(Op::Alu(super::lanes::b64_from_b32(u64::from)), args);
            return Ok(d);
        }
        Err(self.bad(format!("an operand has {} bits where {} are needed", register.bits, kind.bytes() * 8)))
    }

    pub(super) fn source(&mut self, operand: &Operand, kind: Type) -> Result<u32> {
        Ok(self.source_register(operand, kind)?.index)
    }

    /// A destination, whatever its width; `_` becomes a register that is never read.
    pub(super) fn any_destination(&mut self, operand: &Operand, kind: Type) -> Result<Register> {
        let Operand::Name(name) = operand else { return Err(self.unsupported("a destination of this form")) };
        if name == "_" {
            return self.temporary(kind);
        }
        match self.find(name) {
            Some(Symbol::Register(register)) => {
                self.writes.push(register);
                Ok(register)
            }
            _ => Err(self.bad(format!("`{name}` is not a register"))),
        }
    }

    pub(super) fn destination(&mut self, operand: &Operand, kind: Type) -> Result<Register> {
        let register = self.any_destination(operand, kind)?;
        let (wanted, _) = bank(kind).ok_or_else(|| self.unsupported("128-bit operands"))?;
        if register.bank == wanted {
            return Ok(register);
        }
        Err(self.bad(format!(
            "the destination has {} bits where {} are written",
            register.bits,
            kind.bytes() * 8
        )))
    }

    /// The elements of `{a, b}`, or the operand itself.
    pub(super) fn elements(operand: &Operand) -> &[Operand] {
        match operand {
            Operand::Vector(items) => items,
            single => std::slice::from_ref(single),
        }
    }

    /// `[base+offset]` in `space`.
    pub(super) fn address(&mut self, operand: &Operand, space: Space) -> Result<Address> {
        let Operand::Address { base, offset } = operand else {
            return Err(self.bad("expected `[address]`".into()));
        };
        let in_function = !self.in_entry;
        match &**base {
            Operand::Int(value) => {
                let offset = offset.wrapping_add(*value as i64);
                Ok(Address { space, base: Base::Absolute, offset, variable: None, extent: 0 })
            }
            Operand::Name(name) => match self.find(name) {
                Some(Symbol::Register(register)) => {
                    self.reads.push(register);
                    let base = match register.bank {
                        Bank::B32 => Base::R32(register.index),
                        Bank::B64 => Base::R64(register.index),
                        Bank::Pred => return Err(self.bad(format!("`{name}` cannot be an address"))),
                    };
                    let space = if space == Space::Param && in_function { Space::Local } else { space };
                    Ok(Address { space, base, offset: *offset, variable: None, extent: 0 })
                }
                Some(Symbol::Memory { space: home, address, .. }) => {
                    let base_address =
                        if space == Space::Generic { address + window::base(home) } else { address };
                    // Parameters of a call live in local memory, whatever the instruction calls them.
                    let space = if space == Space::Param { home } else { space };
                    let offset = offset.wrapping_add(base_address as i64);
                    let variable = self.shared_variable(home, address);
                    Ok(Address { space, base: Base::Absolute, offset, variable, extent: 0 })
                }
                None => Err(self.bad(format!("unknown name `{name}`"))),
            },
            _ => Err(self.unsupported("an address of this form")),
        }
    }
}
