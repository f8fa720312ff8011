//! From which shared variables an address was made: an access outside all of them is out of bounds, though it may lie in another.

use super::dataflow::Flow;
use super::{Address, Base, CollectiveKind, Inst, Op, Register, SharedVariable};
use crate::parse::ast::Space;
use std::collections::HashMap;

/// Variables are told apart by the bits of a word.
const MAX_VARIABLES: usize = 64;

/// What a register may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    /// Not known yet.
    Nothing,
    /// No address, as far as can be seen.
    Number,
    /// An address within one of these variables.
    Within(u64),
    /// Anything.
    Unknown,
}

impl Value {
    /// One or the other.
    fn or(self, other: Value) -> Value {
        match (self, other) {
            (Value::Nothing, value) | (value, Value::Nothing) => value,
            (Value::Number, Value::Number) => Value::Number,
            (Value::Within(a), Value::Within(b)) => Value::Within(a | b),
            _ => Value::Unknown,
        }
    }

    /// One plus the other.
    fn plus(self, other: Value) -> Value {
        match (self, other) {
            (Value::Unknown, _) | (_, Value::Unknown) => Value::Unknown,
            (Value::Nothing, value) | (value, Value::Nothing) => value,
            (Value::Number, value) | (value, Value::Number) => value,
            (Value::Within(a), Value::Within(b)) => Value::Within(a | b),
        }
    }
}

/// What the instructions of a function make of the variables' addresses, whatever way it takes.
pub(super) struct Provenance {
    values: HashMap<Register, Value>,
}

impl Provenance {
    pub(super) fn new(code: &[Inst], flows: &[Flow], opcodes: &[&str]) -> Self {
        let mut this = Provenance { values: HashMap::new() };
        // Values only grow, and each can grow three times.
        loop {
            let mut changed = false;
            for ((inst, flow), opcode) in code.iter().zip(flows).zip(opcodes) {
                let made = this.made(inst, flow, opcode);
                for write in &flow.writes {
                    let old = this.of(write);
                    let new = old.or(made);
                    changed |= new != old;
                    this.values.insert(*write, new);
                }
            }
            if !changed {
                return this;
            }
        }
    }

    fn of(&self, register: &Register) -> Value {
        self.values.get(register).copied().unwrap_or(Value::Nothing)
    }

    fn made(&self, inst: &Inst, flow: &Flow, opcode: &str) -> Value {
        let own = flow.mention.map_or(Value::Number, |variable| Value::Within(1 << variable));
        let sum = flow.reads.iter().fold(own, |all, register| all.plus(self.of(register)));
        let name = opcode.split('.').next().unwrap_or(opcode);
        match &inst.op {
            Op::Load(_) => Value::Number,
            Op::Alu(_) => match name {
                "mov" | "cvta" | "cvt" | "add" | "sub" | "mad" | "and" | "or" | "xor" | "lop3" => sum,
                "selp" => {
                    let first = flow.mention.map_or(Value::Nothing, |_| own);
                    let choices = flow.reads.iter().filter(|r| r.bank != super::Bank::Pred);
                    choices.fold(first, |all, register| all.or(self.of(register)))
                }
                _ if matches!(sum, Value::Within(_)) => Value::Unknown,
                _ => sum,
            },
            _ if matches!(sum, Value::Within(_)) => Value::Unknown,
            _ => sum,
        }
    }

    /// The variables that an address was made from, if that is known.
    fn variables(&self, address: &Address) -> Option<u64> {
        let register = |bank, index, bits| self.of(&Register { bank, index, bits });
        let value = match address.base {
            Base::Absolute => return address.variable.map(|variable| 1 << variable),
            Base::R32(index) => register(super::Bank::B32, index, 32),
            Base::R64(index) => register(super::Bank::B64, index, 64),
        };
        match value {
            Value::Within(variables) => Some(variables),
            _ => None,
        }
    }
}

/// Address ranges in shared memory, from and to; as long as the launch makes it where it is the dynamic part.
pub(crate) type Extent = Box<[(u64, u64)]>;

/// Gives every access to shared memory the variables that it may touch.
pub(super) fn mark(
    code: &mut [Inst],
    flows: &[Flow],
    opcodes: &[&str],
    variables: &[SharedVariable],
    extents: &mut Vec<Extent>,
) {
    if variables.len() < 2 || variables.len() > MAX_VARIABLES {
        return;
    }
    let provenance = Provenance::new(code, flows, opcodes);
    for address in code.iter_mut().filter_map(shared_address) {
        let Some(mask) = provenance.variables(address) else { continue };
        let meant = variables.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1);
        let range = |v: &SharedVariable| (v.address, v.bytes.map_or(u64::MAX, |bytes| v.address + bytes));
        let extent: Extent = meant.map(|(_, v)| range(v)).collect();
        let known = extents.iter().position(|known| *known == extent);
        let index = known.unwrap_or_else(|| {
            extents.push(extent);
            extents.len() - 1
        });
        address.extent = index as u32 + 1;
    }
}

fn shared_address(inst: &mut Inst) -> Option<&mut Address> {
    let address = match &mut inst.op {
        Op::Load(t) | Op::Store(t) => &mut t.address,
        Op::Atomic(a) => &mut a.address,
        Op::AsyncCopy(copy) => &mut copy.to,
        Op::Collective(collective) => match &mut collective.kind {
            CollectiveKind::LoadMatrix { address, .. } | CollectiveKind::StoreMatrix { address, .. } => {
                address
            }
            CollectiveKind::FragmentLoad(access) | CollectiveKind::FragmentStore(access) => {
                &mut access.address
            }
            _ => return None,
        },
        _ => return None,
    };
    matches!(address.space, Space::Shared | Space::Generic).then_some(address)
}
