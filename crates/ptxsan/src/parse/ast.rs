//! What a PTX module says, before anything is resolved.

use crate::error::Error;
use crate::finding::Frame;
use serde::Serialize;
use std::collections::HashSet;

/// A parsed module.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ast {
    pub(crate) version: String,
    pub(crate) target: String,
    pub(crate) files: Vec<(u64, String)>,
    pub(crate) locations: Vec<Location>,
    pub(crate) variables: Vec<Variable>,
    pub(crate) functions: Vec<Function>,
    /// Names of the entries that have a body.
    pub(crate) entries: HashSet<String>,
}

impl Ast {
    /// Where a function stands among [`Ast::functions`]; of several declarations the first counts.
    pub(crate) fn function_place(&self, name: &str) -> Option<usize> {
        self.functions.iter().position(|f| f.name == name)
    }

    /// The line of a location, then the line that it was inlined into, and so on; nothing without line information.
    pub(crate) fn stack(&self, location: Option<u32>) -> Vec<Frame> {
        let Some(location) = location.and_then(|index| self.locations.get(index as usize)) else {
            return Vec::new();
        };
        let frame = |(index, line): (u64, u32)| {
            let path = self.files.iter().find(|(i, _)| *i == index).map_or("?", |(_, n)| n.as_str());
            Frame::new(path.to_owned(), line)
        };
        let own = (location.file, location.line);
        let mut frames: Vec<Frame> =
            std::iter::once(own).chain(location.callers.iter().copied()).map(frame).collect();
        frames.dedup();
        frames
    }
}

/// Where an instruction comes from in the CUDA source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Location {
    pub(crate) file: u64,
    pub(crate) line: u32,
    /// File and line that it was inlined into, and where that was, outwards.
    pub(crate) callers: Vec<(u64, u32)>,
}

/// A state space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Space {
    /// Memory all threads share.
    Global,
    /// Memory of one block.
    Shared,
    /// Memory of one thread.
    Local,
    /// Read-only memory.
    Const,
    /// Kernel or function parameters.
    Param,
    /// Any of them, told apart by address.
    Generic,
}

/// The basic types of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
    Pred,
}

impl Type {
    pub(crate) fn named(name: &str) -> Option<Type> {
        Some(match name {
            "b8" => Type::B8,
            "b16" => Type::B16,
            "b32" => Type::B32,
            "b64" => Type::B64,
            "b128" => Type::B128,
            "u8" => Type::U8,
            "u16" => Type::U16,
            "u32" => Type::U32,
            "u64" => Type::U64,
            "s8" => Type::S8,
            "s16" => Type::S16,
            "s32" => Type::S32,
            "s64" => Type::S64,
            "f16" => Type::F16,
            "f16x2" => Type::F16x2,
            "bf16" => Type::Bf16,
            "bf16x2" => Type::Bf16x2,
            "f32" => Type::F32,
            "f64" => Type::F64,
            "pred" => Type::Pred,
            _ => return None,
        })
    }

    /// Size in memory; a predicate has none.
    pub(crate) fn bytes(self) -> u32 {
        match self {
            Type::B8 | Type::U8 | Type::S8 => 1,
            Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::Bf16 => 2,
            Type::B32 | Type::U32 | Type::S32 | Type::F32 | Type::F16x2 | Type::Bf16x2 => 4,
            Type::B64 | Type::U64 | Type::S64 | Type::F64 => 8,
            Type::B128 => 16,
            Type::Pred => 0,
        }
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }
}

/// A variable in memory.
#[derive(Debug, Clone)]
pub(crate) struct Variable {
    pub(crate) line: u32,
    pub(crate) space: Space,
    pub(crate) name: String,
    pub(crate) align: u32,
    pub(crate) bytes: u64,
    /// `.extern .shared x[]`: sized by the launch.
    pub(crate) is_dynamic: bool,
    pub(crate) element: Type,
    pub(crate) values: Vec<Initial>,
}

/// One element of an initialiser.
#[derive(Debug, Clone)]
pub(crate) enum Initial {
    Bits(u64),
    /// The address of a variable, plus an offset; `generic(x)` sets the flag.
    Address {
        name: String,
        offset: i64,
        generic: bool,
    },
}

/// An entry or a device function.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) is_entry: bool,
    pub(crate) results: Vec<Variable>,
    pub(crate) params: Vec<Variable>,
    /// Absent for a declaration.
    pub(crate) body: Option<Vec<Statement>>,
    /// Why the body could not be read; it is empty then.
    pub(crate) refusal: Option<Error>,
    /// Where in the CUDA source that was: index into [`Ast::locations`].
    pub(crate) refused_at: Option<u32>,
    /// `.maxntid` or `.reqntid`, as written.
    pub(crate) max_threads: Option<u32>,
    /// `.minnctapersm`.
    pub(crate) blocks_per_sm: Option<u32>,
    /// `.maxnreg`.
    pub(crate) max_registers: Option<u32>,
    /// `.reqnctapercluster`.
    pub(crate) cluster: Option<[u32; 3]>,
}

/// Where functions would lie, whose addresses tables and registers may hold.
const FUNCTION_BASE: u64 = 0x0000_1000_0000;

/// The address of a module's function, by its place in [`Ast::functions`].
pub(crate) fn function_address(index: usize) -> u64 {
    FUNCTION_BASE + 16 * index as u64
}

/// One statement of a body; braces are kept as scope marks.
#[derive(Debug, Clone)]
pub(crate) enum Statement {
    Enter,
    Leave,
    Label { name: String, line: u32 },
    Registers { prefix: String, count: Option<u32>, kind: Type },
    Variable(Variable),
    BranchTargets { label: String, targets: Vec<String> },
    Instruction(Instruction),
}

/// An instruction as written.
#[derive(Debug, Clone)]
pub(crate) struct Instruction {
    /// Number of the instruction in the module, stable when another one is removed.
    pub(crate) id: u32,
    pub(crate) line: u32,
    /// Index into [`Ast::locations`], when a `.loc` came before.
    pub(crate) location: Option<u32>,
    /// Register and whether it is negated.
    pub(crate) guard: Option<(String, bool)>,
    pub(crate) opcode: String,
    pub(crate) operands: Vec<Operand>,
}

/// An operand as written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand {
    /// Register, variable, label, function or `_`.
    Name(String),
    /// `%tid.x`.
    Component(String, String),
    /// `name+offset`.
    Offset(String, i64),
    Int(u64),
    F32(u32),
    F64(u64),
    Not(Box<Operand>),
    Vector(Vec<Operand>),
    /// `a|b`
    Pair(Box<Operand>, Box<Operand>),
    /// `[base+offset]`
    Address {
        base: Box<Operand>,
        offset: i64,
    },
    /// `[map, {x, y}]`: a box of a tensor.
    Tensor {
        map: Box<Operand>,
        offset: i64,
        coordinates: Vec<Operand>,
    },
    /// `(a, b)` of a call.
    List(Vec<Operand>),
}
