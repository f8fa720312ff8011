//! Names in nested scopes.

use super::{Bank, Register};
use crate::parse::ast::{Space, Type};
use std::collections::HashMap;

/// What a name stands for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Symbol {
    Register(Register),
    /// A variable: its space and its address there.
    Memory {
        space: Space,
        address: u64,
        bytes: u64,
    },
}

/// One `{ … }`.
#[derive(Debug, Default)]
struct Level {
    id: u32,
    symbols: HashMap<String, Symbol>,
    /// `%r<100>`: prefix → (type, count).
    ranges: HashMap<String, (Type, u32)>,
}

/// The scopes around the statement being decoded, and the register files they fill.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    levels: Vec<Level>,
    next_id: u32,
    pub(super) counts: [u32; 3],
}

/// The bank and width a type's registers have; `None` for types that have none.
pub(super) fn bank(kind: Type) -> Option<(Bank, u32)> {
    Some(match kind.bytes() {
        0 => (Bank::Pred, 1),
        1 => (Bank::B32, 8),
        2 => (Bank::B32, 16),
        4 => (Bank::B32, 32),
        8 => (Bank::B64, 64),
        _ => return None,
    })
}

impl Scopes {
    pub(super) fn enter(&mut self) {
        self.next_id += 1;
        self.levels.push(Level { id: self.next_id, ..Level::default() });
    }

    pub(super) fn leave(&mut self) {
        self.levels.pop();
    }

    /// Ids of the scopes around, innermost last.
    pub(super) fn chain(&self) -> Vec<u32> {
        self.levels.iter().map(|l| l.id).collect()
    }

    pub(super) fn innermost(&self) -> u32 {
        self.levels.last().map_or(0, |l| l.id)
    }

    pub(super) fn fresh(&mut self, kind: Type) -> Option<Register> {
        let (bank, bits) = bank(kind)?;
        let index = self.counts[bank as usize];
        self.counts[bank as usize] += 1;
        Some(Register { bank, index, bits })
    }

    pub(super) fn define(&mut self, name: &str, symbol: Symbol) {
        if let Some(level) = self.levels.last_mut() {
            level.symbols.insert(name.to_owned(), symbol);
        }
    }

    /// Registers of a range get a number when first used: a declaration alone costs nothing.
    pub(super) fn define_range(&mut self, prefix: &str, kind: Type, count: u32) {
        if let Some(level) = self.levels.last_mut() {
            level.ranges.insert(prefix.to_owned(), (kind, count));
        }
    }

    pub(super) fn find(&mut self, name: &str) -> Option<Symbol> {
        let digits = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (prefix, number) = name.split_at(digits);
        for depth in (0..self.levels.len()).rev() {
            if let Some(symbol) = self.levels[depth].symbols.get(name) {
                return Some(*symbol);
            }
            if let Some(&(kind, count)) = self.levels[depth].ranges.get(prefix)
                && number.parse::<u32>().is_ok_and(|n| n < count)
            {
                let register = self.fresh(kind)?;
                let symbol = Symbol::Register(register);
                self.levels[depth].symbols.insert(name.to_owned(), symbol);
                return Some(symbol);
            }
        }
        None
    }
}
