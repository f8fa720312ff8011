//! An opcode taken apart at its dots.

use crate::parse::ast::{Space, Type};

/// `ld.global.v4.f32`: the name and the parts after it.
#[derive(Debug, Clone)]
pub(super) struct Opcode<'a> {
    pub(super) name: &'a str,
    pub(super) parts: Vec<&'a str>,
}

impl<'a> Opcode<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let mut words = text.split('.');
        let name = words.next().unwrap_or("");
        Opcode { name, parts: words.collect() }
    }

    /// Whether a modifier is there.
    pub(super) fn has(&self, part: &str) -> bool {
        self.parts.contains(&part)
    }

    /// The last part that is a type.
    pub(super) fn kind(&self) -> Option<Type> {
        self.parts.iter().rev().find_map(|p| Type::named(p))
    }

    /// All parts that are types, in order.
    pub(super) fn kinds(&self) -> Vec<Type> {
        self.parts.iter().filter_map(|p| Type::named(p)).collect()
    }

    /// The state space named, or generic.
    pub(super) fn space(&self) -> Space {
        for part in &self.parts {
            match part.split("::").next().unwrap_or("") {
                "global" => return Space::Global,
                "shared" => return Space::Shared,
                "local" => return Space::Local,
                "const" => return Space::Const,
                "param" => return Space::Param,
                _ => {}
            }
        }
        Space::Generic
    }

    /// `.v2`, `.v4` or `.v8`.
    pub(super) fn vector(&self) -> usize {
        match () {
            () if self.has("v2") => 2,
            () if self.has("v4") => 4,
            () if self.has("v8") => 8,
            () => 1,
        }
    }
}
