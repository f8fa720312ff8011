//! A loaded module: entries ready to launch, and the synchronisation points one may take out of them.

use crate::decode::{self, Info, Kernel};
use crate::error::{Error, Result};
use crate::finding::{Frame, one_line};
use crate::memory::{PAGE_BYTES, window};
use crate::numeric::approx::Perturb;
use crate::parse::ast::{
    Ast, Function, Initial, Instruction, Operand, Space, Statement, Type, function_address,
};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Modules' variables live below all allocations, each module in a range of its own.
const MODULE_BASE: u64 = 0x0001_0000_0000;
const MODULE_SPAN: u64 = 0x0000_8000_0000;
/// How many modules one device can hold.
pub(crate) const MAX_MODULES: u64 = 16;
/// All variables of a module together may not be larger.
const MAX_MODULE_BYTES: u64 = 256 << 20;

/// A variable of a module in memory.
#[derive(Debug, Clone)]
pub(crate) struct GlobalVariable {
    pub(crate) space: Space,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) initial: Vec<u8>,
}

/// A PTX module, parsed and decoded. Entries with something in them that is not supported are refused when they are asked for; the
/// others can be run.
#[derive(Clone)]
pub struct Module {
    ast: Arc<Ast>,
    pub(crate) globals: Arc<HashMap<String, GlobalVariable>>,
    kernels: BTreeMap<String, Arc<Kernel>>,
    /// Entries that cannot be run, and why, in the order of the text.
    refused: Vec<(String, Error)>,
    perturb: Perturb,
}

/// What is done to a synchronisation to see whether it is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Edit {
    /// It is taken out; a wait on an mbarrier hears yes at once.
    Delete,
    /// It expects 16 bytes more.
    MoreBytes,
    /// It waits for the other parity.
    OtherParity,
}

/// A synchronisation instruction that can be changed to see whether the change is noticed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SyncPoint {
    /// The instruction's number, for [`Module::without`].
    pub id: u32,
    /// What is changed, for [`Module::with`].
    pub edit: Edit,
    /// The instruction as written, without operands.
    pub opcode: String,
    /// Its line in the PTX text.
    pub ptx_line: u32,
    /// Its place in the CUDA source, if known.
    pub source: Option<String>,
}

impl Module {
    /// Reads PTX text. An entry that holds something that is not supported is refused alone (see [`Module::refused`]); if there is no
    /// other, the module is, naming the instruction and its line.
    pub fn parse(text: &str) -> Result<Module> {
        Self::parse_with(text, Perturb::None)
    }

    /// As [`Module::parse`], with approximate instructions pushed to the edge of their documented error.
    pub fn parse_with(text: &str, perturb: Perturb) -> Result<Module> {
        Self::build(Arc::new(crate::parse::parse(text)?), 0, perturb)
    }

    fn build(ast: Arc<Ast>, slot: u64, perturb: Perturb) -> Result<Module> {
        let globals = Arc::new(place_globals(&ast, MODULE_BASE + slot * MODULE_SPAN)?);
        let (mut kernels, mut refused) = (BTreeMap::new(), Vec::new());
        let functions = decode::functions(&ast);
        for entry in ast.functions.iter().filter(|f| f.is_entry && f.body.is_some()) {
            match decode::kernel(&ast, &functions, &globals, entry, perturb) {
                Ok(kernel) => drop(kernels.insert(entry.name.clone(), Arc::new(kernel))),
                Err(error) => refused.push((entry.name.clone(), located(&ast, error))),
            }
        }
        match refused.first() {
            Some((_, error)) if kernels.is_empty() => Err(error.clone()),
            _ => Ok(Module { ast, globals, kernels, refused, perturb }),
        }
    }

    /// The same module with its variables in the range of `slot`.
    pub(crate) fn at_slot(&self, slot: u64) -> Result<Module> {
        if slot == 0 { Ok(self.clone()) } else { Self::build(Arc::clone(&self.ast), slot, self.perturb) }
    }

    /// Names of the entries.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// Entries that cannot be run, and why.
    pub fn refused(&self) -> impl Iterator<Item = (&str, &Error)> {
        self.refused.iter().map(|(name, why)| (name.as_str(), why))
    }

    /// Names and sizes in bytes of the module's `__device__` and `__constant__` variables.
    pub fn variables(&self) -> impl Iterator<Item = (&str, u64)> {
        self.globals.iter().map(|(name, variable)| (name.as_str(), variable.bytes))
    }

    /// The `.target` the module was compiled for.
    pub fn target(&self) -> &str {
        &self.ast.target
    }

    /// The `.version` of the PTX language.
    pub fn version(&self) -> &str {
        &self.ast.version
    }

    /// Sizes in bytes of an entry's parameters, in order.
    pub fn parameters(&self, entry: &str) -> Result<Vec<usize>> {
        Ok(self.kernel(entry)?.params.iter().map(|p| p.bytes as usize).collect())
    }

    /// Shared memory an entry declares, before what a launch adds.
    pub fn static_shared_bytes(&self, entry: &str) -> Result<u64> {
        Ok(self.kernel(entry)?.shared_bytes)
    }

    pub(crate) fn kernel(&self, entry: &str) -> Result<&Arc<Kernel>> {
        if let Some((_, why)) = self.refused.iter().find(|(name, _)| name == entry) {
            return Err(why.clone());
        }
        self.kernels.get(entry).ok_or_else(|| Error::NoSuchEntry {
            name: entry.to_owned(),
            available: self.entries().collect::<Vec<_>>().join(", "),
        })
    }

    /// Where an instruction stands: file and line to sort by, and the whole as it is written.
    pub(crate) fn place(&self, info: &Info) -> (String, u64, String) {
        let stack = self.stack(info.location);
        match (stack.last(), one_line(&stack)) {
            (Some(outer), Some(source)) => (outer.file_name().to_owned(), u64::from(outer.line), source),
            _ => (String::new(), u64::from(info.line), format!("PTX line {}", info.line)),
        }
    }

    /// The line of a location, then the line that it was inlined into, and so on; nothing without line information.
    pub(crate) fn stack(&self, location: Option<u32>) -> Vec<Frame> {
        self.ast.stack(location)
    }

    /// [`Module::stack`] in one line.
    pub(crate) fn describe(&self, location: Option<u32>) -> Option<String> {
        one_line(&self.stack(location))
    }

    /// Barriers, waits, commits, fences and warp synchronisations that an entry can reach, in order of the text.
    pub fn sync_points(&self, entry: &str) -> Result<Vec<SyncPoint>> {
        let kernel = self.kernel(entry)?;
        let mut points: Vec<SyncPoint> = kernel
            .info
            .iter()
            .filter(|i| !i.is_step && is_sync(&i.opcode))
            .flat_map(|i| edits(&i.opcode).map(move |edit| (i, edit)))
            .map(|(i, edit)| SyncPoint {
                id: i.id,
                edit,
                opcode: i.opcode.to_string(),
                ptx_line: i.line,
                source: self.describe(i.location),
            })
            .collect();
        points.sort_by_key(|p| p.id);
        Ok(points)
    }

    /// The module with one change made.
    pub fn with(&self, point: &SyncPoint) -> Result<Module> {
        let is_wait = point.opcode.contains("_wait");
        if point.edit == Edit::Delete && !is_wait {
            return self.without(point.id);
        }
        let mut ast = (*self.ast).clone();
        let mut changed = false;
        for body in ast.functions.iter_mut().filter_map(|f| f.body.as_mut()) {
            let found = body.iter().position(|s| matches!(s, Statement::Instruction(i) if i.id == point.id));
            let Some(at) = found else { continue };
            let Statement::Instruction(instruction) = &body[at] else { continue };
            if let Some(new) = edited(instruction, point.edit) {
                body.splice(at..=at, new);
                changed = true;
            }
        }
        if !changed {
            return Err(Error::parse(0, format!("instruction {} cannot be changed so", point.id)));
        }
        Self::build(Arc::new(ast), 0, self.perturb)
    }

    /// The module with one synchronisation instruction deleted; all other numbers stay.
    pub fn without(&self, id: u32) -> Result<Module> {
        let mut ast = (*self.ast).clone();
        let mut removed = false;
        for body in ast.functions.iter_mut().filter_map(|f| f.body.as_mut()) {
            body.retain(|s| {
                let hit = matches!(s, Statement::Instruction(i) if i.id == id && is_sync(&i.opcode));
                removed |= hit;
                !hit
            });
        }
        if !removed {
            return Err(Error::parse(0, format!("instruction {id} is no deletable synchronisation")));
        }
        Self::build(Arc::new(ast), 0, self.perturb)
    }
}

pub(crate) fn is_sync(opcode: &str) -> bool {
    let starts = |prefix: &str| opcode == prefix || opcode.starts_with(&format!("{prefix}."));
    let is_reduction = opcode.contains(".red");
    let barrier = (starts("bar") || starts("barrier")) && !is_reduction;
    let copy =
        ["cp.async.wait_group", "cp.async.wait_all", "cp.async.commit_group"].iter().any(|p| starts(p));
    let bulk = starts("cp.async.bulk.wait_group") || starts("cp.async.bulk.commit_group");
    let products = starts("wgmma.fence") || starts("wgmma.commit_group") || starts("wgmma.wait_group");
    let mbarrier = ["arrive", "arrive_drop", "expect_tx", "test_wait", "try_wait"]
        .iter()
        .any(|what| starts(&format!("mbarrier.{what}")));
    let launch = starts("griddepcontrol.wait");
    barrier || copy || bulk || products || mbarrier || launch || starts("fence") || starts("membar")
}

/// The changes that can be made to a synchronisation.
fn edits(opcode: &str) -> impl Iterator<Item = Edit> + use<> {
    let expects = opcode.starts_with("mbarrier.") && opcode.contains("expect_tx");
    let parity = opcode.starts_with("mbarrier.") && opcode.contains("_wait.parity");
    let all = [(true, Edit::Delete), (expects, Edit::MoreBytes), (parity, Edit::OtherParity)];
    all.into_iter().filter(|(is_possible, _)| *is_possible).map(|(_, edit)| edit)
}

/// What stands in the place of an instruction that is changed.
fn edited(instruction: &Instruction, edit: Edit) -> Option<Vec<Statement>> {
    const NAME: &str = "%changed";
    let mut new = instruction.clone();
    if edit == Edit::Delete {
        new.opcode = "setp.eq.u32".to_owned();
        new.operands = vec![instruction.operands.first()?.clone(), Operand::Int(0), Operand::Int(0)];
        return Some(vec![Statement::Instruction(new)]);
    }
    let operand = new.operands.last_mut()?;
    let (opcode, by) = match edit {
        Edit::MoreBytes => ("add.u32", 16),
        _ => ("xor.b32", 1),
    };
    let other = std::mem::replace(operand, Operand::Name(NAME.to_owned()));
    let step = Instruction {
        id: u32::MAX,
        guard: None,
        opcode: opcode.to_owned(),
        operands: vec![Operand::Name(NAME.to_owned()), other, Operand::Int(by)],
        ..instruction.clone()
    };
    Some(vec![
        Statement::Enter,
        Statement::Registers { prefix: NAME.to_owned(), count: None, kind: Type::U32 },
        Statement::Instruction(step),
        Statement::Instruction(new),
        Statement::Leave,
    ])
}

/// The error with the line of the CUDA source, which is what its writer knows; the PTX of a compiler nobody has seen.
fn located(ast: &Ast, error: Error) -> Error {
    let Error::Unsupported { line, instruction, reason, .. } = error else { return error };
    let refused = |f: &Function| matches!(f.refusal, Some(Error::Unsupported { line: at, .. }) if at == line);
    let at = |s: &Statement| match s {
        Statement::Instruction(i) if i.line == line => i.location,
        _ => None,
    };
    let location = ast.functions.iter().find_map(|f| match refused(f) {
        true => f.refused_at,
        false => f.body.iter().flatten().find_map(at),
    });
    Error::Unsupported { line, source_line: one_line(&ast.stack(location)), instruction, reason }
}

fn place_globals(ast: &Ast, base: u64) -> Result<HashMap<String, GlobalVariable>> {
    let mut out = HashMap::new();
    let mut at = base;
    for v in ast.variables.iter().filter(|v| matches!(v.space, Space::Global | Space::Const)) {
        let variable = GlobalVariable { space: v.space, address: at, bytes: v.bytes, initial: Vec::new() };
        out.insert(v.name.clone(), variable);
        at = (at + v.bytes).next_multiple_of(PAGE_BYTES as u64) + PAGE_BYTES as u64;
        if at - base > MAX_MODULE_BYTES {
            return Err(Error::parse(v.line, format!("variables of more than {MAX_MODULE_BYTES} bytes")));
        }
    }
    for v in ast.variables.iter().filter(|v| matches!(v.space, Space::Global | Space::Const)) {
        let mut bytes = Vec::new();
        let width = v.element.bytes() as usize;
        for value in &v.values {
            let bits = match value {
                Initial::Bits(bits) => *bits,
                Initial::Address { name, offset, generic } => {
                    let function = ast.function_place(name);
                    match (out.get(name.as_str()), function) {
                        (Some(target), _) => {
                            let window = if *generic { window::base(target.space) } else { 0 };
                            (target.address + window).wrapping_add_signed(*offset)
                        }
                        (None, Some(function)) => function_address(function),
                        (None, None) => return Err(Error::parse(v.line, format!("no variable `{name}`"))),
                    }
                }
            };
            let raw = bits.to_le_bytes();
            bytes.extend((0..width).map(|i| raw.get(i).copied().unwrap_or(0)));
        }
        if bytes.len() as u64 > v.bytes {
            return Err(Error::parse(v.line, format!("`{}` has more initial values than elements", v.name)));
        }
        // Variables start as zeros where the initialiser says nothing.
        bytes.resize(v.bytes as usize, 0);
        if let Some(variable) = out.get_mut(&v.name) {
            variable.initial = bytes;
        }
    }
    Ok(out)
}
