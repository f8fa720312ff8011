//! Walks the functions an entry needs and emits their code.

use super::callees::{Functions, reachable};
use super::dataflow::{Flow, FlowKind};
use super::flow::{BANKS, Graph, keep_wanted_writes};
use super::lanes::Args;
use super::mangled::source_name;
use super::modifier;
use super::opcode::Opcode;
use super::scope::{Scopes, Symbol};
use super::{
    ALWAYS, Bank, Info, Inst, Kernel, Op, Param, Register, SharedVariable, Special, Watch, provenance,
    updates,
};
use crate::count::Class;
use crate::error::{Error, Result};
use crate::module::GlobalVariable;
use crate::names::demangled;
use crate::numeric::approx::Perturb;
use crate::parse::ast::{Ast, Function, Instruction, Operand, Space, Statement, Variable};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Registers are 128 or 256 bytes each per warp: more than this is not a kernel but an attack.
const MAX_REGISTERS: u32 = 1 << 18;
/// Shared memory that the system keeps, as far as programs use it (cooperative groups may expect 288 bytes).
const RESERVED: &str = "%reserved_smem_offset_1";
const RESERVED_BYTES: u64 = 512;
const RESERVED_ALIGN: u64 = 128;

/// Where a function's parameters live and where its code starts.
#[derive(Debug, Clone, Default)]
pub(super) struct Placed {
    pub(super) start: Option<u32>,
    pub(super) params: Vec<(u64, u64)>,
    pub(super) results: Vec<(u64, u64)>,
}

pub(super) struct Fixup {
    pub(super) pc: usize,
    pub(super) line: u32,
    pub(super) chain: Vec<u32>,
    pub(super) labels: Vec<String>,
}

pub(super) struct Builder<'m> {
    pub(super) ast: &'m Ast,
    pub(super) globals: &'m HashMap<String, GlobalVariable>,
    pub(super) scopes: Scopes,
    pub(super) constants: HashMap<(Bank, u64), u32>,
    pub(super) specials: BTreeMap<Special, u32>,
    pub(super) reads: Vec<Register>,
    pub(super) writes: Vec<Register>,
    pub(super) in_entry: bool,
    pub(super) placed: HashMap<String, Placed>,
    pub(super) fixups: Vec<Fixup>,
    pub(super) calls: Vec<(usize, String)>,
    pub(super) branch_targets: HashMap<(u32, String), Vec<String>>,
    pub(super) communicates: bool,
    pub(super) polls: bool,
    shared_variables: Vec<SharedVariable>,
    reserved: std::ops::Range<usize>,
    pub(super) perturb: Perturb,
    pub(super) has_agents: bool,
    /// Registers of 32 bits that a `wgmma` uses.
    pub(super) watched: HashSet<u32>,
    /// How validity flows through the instruction being decoded, where its name does not say.
    pub(super) flow: Option<FlowKind>,
    flows: Vec<Flow>,
    /// The shared variable whose address the instruction being decoded takes.
    pub(super) mention: Option<u16>,
    extents: Vec<provenance::Extent>,
    code: Vec<Inst>,
    info: Vec<Info>,
    labels: HashMap<(u32, String), u32>,
    guard: (u32, bool),
    line: u32,
    id: u32,
    location: Option<u32>,
    opcode: String,
    is_step: bool,
    local_bytes: u64,
    shared: HashMap<(String, String), u64>,
}

/// Decodes one entry and everything it calls.
pub(crate) fn kernel<'m>(
    ast: &'m Ast,
    functions: &Functions<'m>,
    globals: &'m HashMap<String, GlobalVariable>,
    entry: &'m Function,
    perturb: Perturb,
) -> Result<Kernel> {
    let needed = reachable(functions, entry)?;
    if let Some(error) = needed.iter().find_map(|function| function.refusal.as_ref()) {
        return Err(error.clone());
    }
    let mut builder = Builder {
        ast,
        globals,
        scopes: Scopes::default(),
        constants: HashMap::new(),
        specials: BTreeMap::new(),
        reads: Vec::new(),
        writes: Vec::new(),
        in_entry: true,
        placed: HashMap::new(),
        fixups: Vec::new(),
        calls: Vec::new(),
        branch_targets: HashMap::new(),
        communicates: false,
        polls: false,
        shared_variables: Vec::new(),
        reserved: 0..0,
        perturb,
        has_agents: false,
        watched: HashSet::new(),
        flow: None,
        flows: Vec::new(),
        mention: None,
        extents: Vec::new(),
        code: Vec::new(),
        info: Vec::new(),
        labels: HashMap::new(),
        guard: (ALWAYS, false),
        line: 0,
        id: 0,
        location: None,
        opcode: String::new(),
        is_step: false,
        local_bytes: 0,
        shared: HashMap::new(),
    };
    builder.scopes.enter();
    let shared_bytes = builder.place_shared(&needed)?;
    let (params, param_bytes) = builder.place_params(entry)?;
    for function in needed.iter().filter(|f| !f.is_entry) {
        let placed = Placed {
            start: None,
            params: function.params.iter().map(|v| (builder.place_local(v), v.bytes)).collect(),
            results: function.results.iter().map(|v| (builder.place_local(v), v.bytes)).collect(),
        };
        builder.placed.insert(function.name.clone(), placed);
    }
    for function in &needed {
        builder.function(function)?;
    }
    builder.resolve_calls()?;
    builder.watch();
    keep_wanted_writes(&mut builder.code);
    let total: u32 = builder.scopes.counts.iter().sum();
    if total > MAX_REGISTERS {
        return Err(Error::parse(
            0,
            format!("`{}` uses {total} registers, more than {MAX_REGISTERS}", entry.name),
        ));
    }
    let of = |bank: Bank| builder.constants.iter().filter(move |((b, _), _)| *b == bank);
    let mut constants32: Vec<_> = of(Bank::B32).map(|((_, v), i)| (*i, *v as u32)).collect();
    let mut constants64: Vec<_> = of(Bank::B64).map(|((_, v), i)| (*i, *v)).collect();
    constants32.sort_unstable();
    constants64.sort_unstable();
    Ok(Kernel {
        b32_count: builder.scopes.counts[Bank::B32 as usize] as usize,
        b64_count: builder.scopes.counts[Bank::B64 as usize] as usize,
        pred_count: builder.scopes.counts[Bank::Pred as usize] as usize,
        constants_pred: of(Bank::Pred).map(|((_, v), i)| (*i, *v != 0)).collect(),
        constants32,
        constants64,
        specials: builder.specials.iter().map(|(s, i)| (*s, *i)).collect(),
        params,
        param_bytes,
        shared_bytes,
        local_bytes: builder.local_bytes,
        communicates: builder.communicates,
        polls: builder.polls,
        shared_variables: builder.shared_variables,
        reserved: builder.reserved,
        extents: builder.extents,
        max_threads: entry.max_threads,
        has_agents: builder.has_agents || entry.cluster.is_some(),
        cluster: entry.cluster,
        registers: starting_registers(entry),
        flows: builder.flows,
        code: builder.code,
        info: builder.info,
    })
}

/// What a thread starts with: `.maxnreg`, or the largest number that lets the blocks of an SM have as many threads as
/// the bounds say. Without bounds `setmaxnreg` does nothing.
fn starting_registers(entry: &Function) -> Option<u32> {
    let fitting = |threads: u32| {
        let blocks = entry.blocks_per_sm.unwrap_or(1).max(1);
        (65_536 / threads.max(1).next_multiple_of(32).saturating_mul(blocks) / 8 * 8).min(255)
    };
    entry.max_registers.or(entry.max_threads.map(fitting))
}

/// Why an instruction is not there, and what is.
fn outside(op: &Opcode<'_>) -> &'static str {
    match op.name {
        "mma" if op.parts.first().is_some_and(|part| part.starts_with("sp")) => {
            "sparse products are not simulated; dense ones are"
        }
        "tcgen05" => {
            "instructions up to sm_90a are simulated; compile for --arch sm_90a, without what is Blackwell's"
        }
        "multimem" => "one GPU is simulated, and multimem reaches several",
        "tensormap" => {
            "tensor maps that the kernel edits are not simulated; pass each map as an argument, made before the launch"
        }
        "stacksave" | "stackrestore" | "alloca" => {
            "alloca is not simulated; give the array a size that the compiler knows"
        }
        "vadd" | "vsub" | "vmin" | "vmax" | "vmad" | "vset" | "vshl" | "vshr" | "vabsdiff" => {
            "of the video instructions there are vabsdiff2 and vabsdiff4"
        }
        _ if op.has("f32x2") => "packed f32 is Blackwell's; instructions up to sm_90a are simulated",
        _ => "it is outside the supported set",
    }
}

fn align_up(value: u64, align: u32) -> u64 {
    value.next_multiple_of(u64::from(align.max(1)))
}

impl Builder<'_> {
    /// Lays out shared memory: static variables, then the dynamic part.
    fn place_shared(&mut self, needed: &[&Function]) -> Result<u64> {
        let mut used: HashSet<&str> = HashSet::new();
        for function in needed {
            for statement in function.body.iter().flatten() {
                if let Statement::Instruction(i) = statement {
                    i.operands.iter().for_each(|o| names(o, &mut used));
                }
            }
        }
        let mut at = 0u64;
        let mut dynamic_align = 0;
        for v in
            self.ast.variables.iter().filter(|v| v.space == Space::Shared && used.contains(v.name.as_str()))
        {
            if v.is_dynamic {
                dynamic_align = dynamic_align.max(v.align).max(1);
            } else {
                at = align_up(at, v.align);
                self.scopes
                    .define(&v.name, Symbol::Memory { space: Space::Shared, address: at, bytes: v.bytes });
                self.add_shared(&v.name, at, Some(v.bytes));
                at += v.bytes;
            }
        }
        for function in needed {
            for statement in function.body.iter().flatten() {
                if let Statement::Variable(v) = statement
                    && v.space == Space::Shared
                {
                    at = align_up(at, v.align);
                    self.shared.insert((function.name.clone(), v.name.clone()), at);
                    self.add_shared(&v.name, at, Some(v.bytes));
                    at = at.saturating_add(v.bytes);
                }
            }
        }
        at = self.place_reserved(&used, at);
        if dynamic_align > 0 {
            at = align_up(at, dynamic_align);
            for v in self.ast.variables.iter().filter(|v| v.is_dynamic && v.space == Space::Shared) {
                self.scopes.define(&v.name, Symbol::Memory { space: Space::Shared, address: at, bytes: 0 });
                if used.contains(v.name.as_str()) && self.shared_variables.iter().all(|v| v.bytes.is_some()) {
                    self.add_shared(&v.name, at, None);
                }
            }
        }
        Ok(at)
    }

    /// The part that the system keeps of a block's shared memory, for entries that ask where it is: cooperative groups have the barriers
    /// of tiles of several warps there. The end of what is placed.
    fn place_reserved(&mut self, used: &HashSet<&str>, end: u64) -> u64 {
        if !used.contains(RESERVED) {
            return end;
        }
        let address = end.next_multiple_of(RESERVED_ALIGN);
        let bytes = RESERVED_BYTES;
        self.scopes.define(RESERVED, Symbol::Memory { space: Space::Shared, address, bytes });
        self.add_shared("reserved shared memory", address, Some(bytes));
        self.reserved = address as usize..(address + bytes) as usize;
        address + bytes
    }

    fn add_shared(&mut self, name: &str, address: u64, bytes: Option<u64>) {
        let own = source_name(name);
        let name = if own == name { demangled(name) } else { own.to_owned() };
        self.shared_variables.push(SharedVariable { name, address, bytes });
    }

    /// The number of the shared variable at an address.
    pub(super) fn shared_variable(&self, space: Space, address: u64) -> Option<u16> {
        let at =
            self.shared_variables.iter().rposition(|v| space == Space::Shared && v.address == address)?;
        u16::try_from(at).ok()
    }

    fn place_params(&mut self, entry: &Function) -> Result<(Vec<Param>, u64)> {
        let mut at = 0u64;
        let mut params = Vec::new();
        for v in &entry.params {
            at = align_up(at, v.align);
            self.scopes.define(&v.name, Symbol::Memory { space: Space::Param, address: at, bytes: v.bytes });
            params.push(Param { name: v.name.clone(), offset: at, bytes: v.bytes });
            at += v.bytes;
        }
        // Hardware takes 4 KB, or 32 KB from sm_70 with CUDA 12.1 on.
        if at > 32_764 {
            return Err(Error::parse(
                0,
                format!("`{}` has {at} bytes of parameters, more than 32764", entry.name),
            ));
        }
        Ok((params, at))
    }

    fn place_local(&mut self, v: &Variable) -> u64 {
        let at = align_up(self.local_bytes, v.align);
        self.local_bytes = at.saturating_add(v.bytes);
        at
    }

    fn function(&mut self, function: &Function) -> Result<()> {
        let start = self.code.len();
        self.in_entry = function.is_entry;
        self.labels.clear();
        self.fixups.clear();
        self.branch_targets.clear();
        self.scopes.enter();
        if let Some(placed) = self.placed.get_mut(&function.name) {
            placed.start = Some(start as u32);
            let placed = placed.clone();
            for (v, (address, bytes)) in
                function.params.iter().zip(&placed.params).chain(function.results.iter().zip(&placed.results))
            {
                let symbol = Symbol::Memory { space: Space::Local, address: *address, bytes: *bytes };
                self.scopes.define(&v.name, symbol);
            }
        }
        let body = function.body.as_deref().unwrap_or(&[]);
        let outer = self.scopes.innermost();
        // `.branchtargets` may stand before or after the branch that names it.
        for statement in body {
            if let Statement::BranchTargets { label, targets } = statement {
                self.branch_targets.insert((outer, label.clone()), targets.clone());
            }
        }
        for statement in body {
            self.statement(function, statement)?;
        }
        // The one place every return goes to, so that lanes that return early meet the others.
        self.guard = (ALWAYS, false);
        self.opcode = if function.is_entry { "exit".into() } else { "ret".into() };
        self.is_step = true;
        let last = if function.is_entry { Op::Exit } else { Op::Return };
        self.emit(last, Args::default());
        self.is_step = false;
        let end = self.code.len();
        self.resolve_labels((end - 1) as u32)?;
        let graph = Graph::new(&self.code, start, end);
        graph.join_branches(&mut self.code);
        let counts = BANKS.map(|b| self.scopes.counts[b as usize]);
        let numbers = self.constants.iter().map(|((bank, _), index)| (*bank, *index)).collect();
        updates::mark(&mut self.code[start..end], &numbers);
        updates::mark_read(&mut self.code[start..end]);
        updates::mark_compared(&mut self.code[start..end], |at| self.flows[start + at].is_move);
        let opcodes: Vec<&str> = self.info[start..end].iter().map(|info| &*info.opcode).collect();
        let (code, flows) = (&mut self.code[start..end], &self.flows[start..end]);
        provenance::mark(code, flows, &opcodes, &self.shared_variables, &mut self.extents);
        graph.prove_written(&mut self.code, counts);
        debug_assert!(graph.block_count() > 0);
        while self.scopes.chain().len() > 1 {
            self.scopes.leave();
        }
        Ok(())
    }

    fn statement(&mut self, function: &Function, statement: &Statement) -> Result<()> {
        match statement {
            Statement::Enter => self.scopes.enter(),
            Statement::Leave => self.scopes.leave(),
            Statement::Label { name, line } => {
                let key = (self.scopes.innermost(), name.clone());
                if self.labels.insert(key, self.code.len() as u32).is_some() {
                    return Err(Error::parse(*line, format!("label `{name}` is defined twice")));
                }
            }
            Statement::Registers { prefix, count: Some(count), kind } => {
                self.scopes.define_range(prefix, *kind, *count);
            }
            Statement::Registers { prefix, count: None, kind } => {
                // A 128-bit register gets no number; using it is refused.
                if let Some(register) = self.scopes.fresh(*kind) {
                    self.scopes.define(prefix, Symbol::Register(register));
                }
            }
            Statement::Variable(v) => {
                let address = match v.space {
                    Space::Shared => {
                        self.shared.get(&(function.name.clone(), v.name.clone())).copied().unwrap_or(0)
                    }
                    Space::Local | Space::Param => self.place_local(v),
                    _ => {
                        return Err(Error::parse(v.line, "only shared, local and param variables in a body"));
                    }
                };
                let space = if v.space == Space::Param { Space::Local } else { v.space };
                self.scopes.define(&v.name, Symbol::Memory { space, address, bytes: v.bytes });
            }
            Statement::BranchTargets { .. } => {}
            Statement::Instruction(instruction) => self.instruction(instruction)?,
        }
        Ok(())
    }

    fn instruction(&mut self, instruction: &Instruction) -> Result<()> {
        self.line = instruction.line;
        self.id = instruction.id;
        self.location = instruction.location;
        self.opcode.clone_from(&instruction.opcode);
        self.is_step = false;
        self.mention = None;
        self.reads.clear();
        self.writes.clear();
        self.guard = (ALWAYS, false);
        if let Some((name, negated)) = &instruction.guard {
            match self.find(name) {
                Some(Symbol::Register(r)) if r.bank == Bank::Pred => {
                    self.reads.push(r);
                    self.guard = (r.index, *negated);
                }
                _ => return Err(self.bad(format!("guard `{name}` is not a predicate"))),
            }
        }
        let op = Opcode::new(&instruction.opcode);
        let operands = &instruction.operands;
        if self.asynchronous(&op, operands)?
            || self.simple(&op, operands)?
            || self.transfer(&op, operands)?
            || self.control(&op, operands)?
            || self.matrix(&op, operands)?
        {
            return match op.parts.iter().find(|part| !modifier::is_known(part)) {
                Some(part) => Err(self.unsupported(&format!("`.{part}` is no modifier that is known"))),
                None => Ok(()),
            };
        }
        Err(self.unsupported(outside(&op)))
    }

    pub(super) fn unsupported(&self, reason: &str) -> Error {
        let (instruction, reason) = (self.opcode.clone(), reason.to_owned());
        Error::Unsupported { line: self.line, source_line: None, instruction, reason }
    }

    pub(super) fn bad(&self, message: String) -> Error {
        Error::Parse { line: self.line, message: format!("`{}`: {message}", self.opcode) }
    }

    pub(super) fn emit(&mut self, op: Op, args: Args) {
        let class = Class::of(&self.opcode, &op);
        let lane_flops = class.lane_flops(&self.opcode);
        let tensor_ops = crate::count::tensor_ops(&op);
        self.info.push(Info {
            id: self.id,
            line: self.line,
            location: self.location,
            opcode: self.opcode.as_str().into(),
            class,
            lane_flops,
            tensor_ops,
            is_step: self.is_step,
        });
        let is_move = self.opcode.starts_with("mov.") && self.reads.len() == 1 && self.writes.len() == 1;
        let kind = self.flow.take().unwrap_or_else(|| FlowKind::of(&self.opcode));
        let (reads, writes) = (self.reads.clone().into(), self.writes.clone().into());
        self.flows.push(Flow { kind, reads, writes, is_move, mention: self.mention.take() });
        self.code.push(Inst {
            watch: None,
            guard: self.guard.0,
            guard_negated: self.guard.1,
            args,
            op,
            reads: std::mem::take(&mut self.reads).into(),
            writes: std::mem::take(&mut self.writes).into(),
        });
    }

    /// Marks the instructions that touch registers of a `wgmma`.
    fn watch(&mut self) {
        for (inst, all) in self.code.iter_mut().zip(&self.flows) {
            let is_wgmma =
                matches!(&inst.op, Op::Collective(c) if matches!(c.kind, super::CollectiveKind::Wgmma(_)));
            let kept = |list: &[Register]| -> Box<[u32]> {
                let of_32 = list.iter().filter(|r| r.bank == Bank::B32).map(|r| r.index);
                of_32.filter(|index| self.watched.contains(index)).collect()
            };
            let (reads, writes) = (kept(&all.reads), kept(&all.writes));
            let is_touched = !reads.is_empty() || !writes.is_empty();
            if is_touched && !is_wgmma {
                inst.watch = Some(Box::new(Watch { reads, writes, is_move: all.is_move }));
            }
        }
    }

    /// Emits a helper of the instruction being decoded, which is counted with it.
    pub(super) fn emit_step(&mut self, op: Op, args: Args) {
        let was = std::mem::replace(&mut self.is_step, true);
        self.emit(op, args);
        self.is_step = was;
    }

    pub(super) fn here(&self) -> usize {
        self.code.len()
    }

    pub(super) fn line(&self) -> u32 {
        self.line
    }

    fn label(&self, chain: &[u32], name: &str) -> Option<u32> {
        chain.iter().rev().find_map(|scope| self.labels.get(&(*scope, name.to_owned())).copied())
    }

    /// Fills in branch targets; `return_pc` stands for "the end of the function".
    fn resolve_labels(&mut self, return_pc: u32) -> Result<()> {
        for fixup in std::mem::take(&mut self.fixups) {
            let mut targets = Vec::with_capacity(fixup.labels.len());
            for label in &fixup.labels {
                let target = if label.is_empty() { Some(return_pc) } else { self.label(&fixup.chain, label) };
                targets.push(target.ok_or_else(|| Error::parse(fixup.line, format!("no label `{label}`")))?);
            }
            match &mut self.code[fixup.pc].op {
                Op::Branch { target, .. } => *target = targets[0],
                Op::BranchIndex { targets: list, .. } => *list = targets.into(),
                _ => {}
            }
        }
        Ok(())
    }

    fn resolve_calls(&mut self) -> Result<()> {
        for (pc, name) in std::mem::take(&mut self.calls) {
            let start = self.placed.get(&name).and_then(|p| p.start);
            let line = self.info[pc].line;
            let start = start.ok_or_else(|| Error::parse(line, format!("no function `{name}`")))?;
            if let Op::Call { target, .. } = &mut self.code[pc].op {
                *target = start;
            }
        }
        Ok(())
    }
}

fn names<'a>(operand: &'a Operand, out: &mut HashSet<&'a str>) {
    match operand {
        Operand::Name(n) | Operand::Offset(n, _) => {
            out.insert(n);
        }
        Operand::Address { base, .. } | Operand::Tensor { map: base, .. } => names(base, out),
        Operand::Vector(items) | Operand::List(items) => items.iter().for_each(|o| names(o, out)),
        _ => {}
    }
}
