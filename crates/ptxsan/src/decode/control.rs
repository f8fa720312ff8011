//! Branches, calls, barriers, fences and warp-wide instructions.

use super::build::{Builder, Fixup};
use super::lanes::Args;
use super::memory::scope;
use super::opcode::Opcode;
use super::scope::Symbol;
use super::{
    BarrierKind, BarrierOp, Builtin, Collective, CollectiveKind, Fence, NEVER, Op, ParamCopy, Reduction,
    Register, Scope, Shuffle,
};
use crate::error::Result;
use crate::parse::ast::{Operand, Space, Type};

const INDIRECT: &str = "of the functions whose address this module takes, none has these parameters and results, or more than 256 have; call one by its name";

impl Builder<'_> {
    /// Decodes control flow and synchronisation; `false` when the instruction is neither.
    pub(super) fn control(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<bool> {
        match op.name {
            "bra" => self.branch(operands)?,
            "brx" => self.branch_index(operands)?,
            "call" => self.call(operands)?,
            "ret" if self.in_entry => self.emit(Op::Exit, Args::default()),
            "ret" => self.jump(vec![String::new()]),
            "exit" => self.emit(Op::Exit, Args::default()),
            "trap" => self.emit(Op::Trap { is_call: !operands.is_empty() }, Args::default()),
            "brkpt" | "nanosleep" | "pmevent" => self.emit(Op::Nop, Args::default()),
            "bar" if op.parts.first() == Some(&"warp") => {
                let members = self.operand(operands, 0, Type::B32)?;
                self.collective(CollectiveKind::WarpSync, Some(members));
            }
            "bar" | "barrier" if !op.has("cluster") => self.barrier(op, operands)?,
            "membar" | "fence" if !op.has("proxy") && !op.has("mbarrier_init") => self.fence(op)?,
            "shfl" => self.shuffle(op, operands)?,
            "vote" => self.vote(op, operands)?,
            "match" => self.matching(op, operands)?,
            "redux" => self.redux(op, operands)?,
            "elect" => self.elect(operands)?,
            "activemask" => {
                let d = self.destination(self.at(operands, 0)?, Type::B32)?.index;
                self.emit(Op::ActiveMask(d), Args::default());
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn at<'o>(&self, operands: &'o [Operand], index: usize) -> Result<&'o Operand> {
        operands.get(index).ok_or_else(|| self.bad(format!("operand {} is missing", index + 1)))
    }

    pub(super) fn operand(&mut self, operands: &[Operand], index: usize, kind: Type) -> Result<Register> {
        let operand = self.at(operands, index)?;
        self.source_register(operand, kind)
    }

    pub(super) fn collective(&mut self, kind: CollectiveKind, members: Option<Register>) {
        self.emit(Op::Collective(Box::new(Collective { kind, members })), Args::default());
    }

    fn jump(&mut self, labels: Vec<String>) {
        let fixup = Fixup { pc: self.here(), line: self.line(), chain: self.scopes.chain(), labels };
        self.fixups.push(fixup);
        self.emit(Op::Branch { target: 0, meet: NEVER }, Args::default());
    }

    fn branch(&mut self, operands: &[Operand]) -> Result<()> {
        let Operand::Name(label) = self.at(operands, 0)? else {
            return Err(self.bad("needs a label".into()));
        };
        self.jump(vec![label.clone()]);
        Ok(())
    }

    fn branch_index(&mut self, operands: &[Operand]) -> Result<()> {
        let index = self.operand(operands, 0, Type::U32)?.index;
        let Operand::Name(list) = self.at(operands, 1)? else {
            return Err(self.bad("needs a target list".into()));
        };
        let chain = self.scopes.chain();
        let targets = self.branch_targets.iter().find(|((_, name), _)| name == list).map(|(_, t)| t.clone());
        let labels = targets.ok_or_else(|| self.bad(format!("no target list `{list}`")))?;
        self.fixups.push(Fixup { pc: self.here(), line: self.line(), chain, labels });
        self.emit(Op::BranchIndex { index, targets: Box::new([]), meet: NEVER }, Args::default());
        Ok(())
    }

    /// `call (results), function, (arguments)`
    fn call(&mut self, operands: &[Operand]) -> Result<()> {
        let mut lists: [&[Operand]; 2] = [&[], &[]];
        let mut name = None;
        for operand in operands {
            match operand {
                Operand::List(items) if name.is_none() => lists[0] = items,
                Operand::List(items) => lists[1] = items,
                Operand::Name(n) if name.is_none() => name = Some(n.clone()),
                // The prototype of an indirect call.
                _ => return Err(self.unsupported(INDIRECT)),
            }
        }
        let name = name.ok_or_else(|| self.bad("needs a function".into()))?;
        if let Some(Symbol::Register(_)) = self.find(&name) {
            return Err(self.unsupported(INDIRECT));
        }
        let results = self.param_places(lists[0])?;
        let arguments = self.param_places(lists[1])?;
        if let Some(which) = builtin(&name) {
            let inputs = arguments.iter().map(|(a, _)| *a).collect();
            self.emit(
                Op::Builtin { which, inputs, output: results.first().map(|(a, _)| *a) },
                Args::default(),
            );
            return Ok(());
        }
        let Some(placed) = self.placed.get(&name).cloned() else {
            return Err(self.unsupported(&without_body(&name)));
        };
        if placed.params.len() != arguments.len() || placed.results.len() != results.len() {
            return Err(self.bad(format!(
                "`{name}` takes {} arguments and gives {}",
                placed.params.len(),
                placed.results.len()
            )));
        }
        let pair = |(from, bytes): &(u64, u64), (to, room): &(u64, u64)| ParamCopy {
            from: *from,
            to: *to,
            bytes: *bytes.min(room),
        };
        let inputs = arguments.iter().zip(&placed.params).map(|(a, p)| pair(a, p)).collect();
        let outputs = placed.results.iter().zip(&results).map(|(p, r)| pair(p, r)).collect();
        self.calls.push((self.here(), name));
        self.emit(Op::Call { target: 0, inputs, outputs }, Args::default());
        Ok(())
    }

    fn param_places(&mut self, operands: &[Operand]) -> Result<Vec<(u64, u64)>> {
        let mut out = Vec::new();
        for operand in operands {
            let Operand::Name(name) = operand else {
                return Err(self.unsupported("arguments that are not `.param`"));
            };
            match self.find(name) {
                Some(Symbol::Memory { space: Space::Local, address, bytes }) => out.push((address, bytes)),
                _ => return Err(self.unsupported("arguments that are not `.param`")),
            }
        }
        Ok(out)
    }

    /// `bar{rier}{.cta}.{sync,arrive,red}{.aligned}`
    fn barrier(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let aligned = op.name == "bar" || op.has("aligned");
        if op.has("red") {
            return self.barrier_reduce(op, operands, aligned);
        }
        let kind = match () {
            () if op.has("sync") => BarrierKind::Sync,
            () if op.has("arrive") => BarrierKind::Arrive,
            () => return Err(self.unsupported("this kind of barrier")),
        };
        let id = self.operand(operands, 0, Type::U32)?;
        let count = operands.get(1).map(|o| self.source_register(o, Type::U32)).transpose()?;
        if kind == BarrierKind::Arrive && count.is_none() {
            return Err(self.bad("needs a thread count".into()));
        }
        self.emit(Op::Barrier(Box::new(BarrierOp { kind, id, count, aligned })), Args::default());
        Ok(())
    }

    fn barrier_reduce(&mut self, op: &Opcode<'_>, operands: &[Operand], aligned: bool) -> Result<()> {
        let (reduction, result) = match () {
            () if op.has("popc") => (Reduction::Popc, Type::U32),
            () if op.has("and") => (Reduction::And, Type::Pred),
            () if op.has("or") => (Reduction::Or, Type::Pred),
            () => return Err(self.unsupported("this reduction")),
        };
        let d = self.destination(self.at(operands, 0)?, result)?;
        let id = self.operand(operands, 1, Type::U32)?;
        let (count, last) =
            if operands.len() > 3 { (Some(self.operand(operands, 2, Type::U32)?), 3) } else { (None, 2) };
        let (source, negated) = self.predicate(self.at(operands, last)?)?;
        let kind = BarrierKind::Reduce { d, source, negated, reduction };
        self.emit(Op::Barrier(Box::new(BarrierOp { kind, id, count, aligned })), Args::default());
        Ok(())
    }

    pub(super) fn predicate(&mut self, operand: &Operand) -> Result<(Register, bool)> {
        match operand {
            Operand::Not(inner) => Ok((self.source_register(inner, Type::Pred)?, true)),
            other => Ok((self.source_register(other, Type::Pred)?, false)),
        }
    }

    fn fence(&mut self, op: &Opcode<'_>) -> Result<()> {
        let scope = scope(op).unwrap_or(Scope::Device);
        // A fence that says nothing is `.acq_rel`.
        let fence = Fence { scope, is_sc: op.name == "membar" || op.has("sc") };
        self.emit(Op::Fence(fence), Args::default());
        Ok(())
    }

    fn shuffle(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        if !op.has("sync") {
            return Err(self.unsupported("shuffles without `.sync`"));
        }
        let mode = match () {
            () if op.has("up") => Shuffle::Up,
            () if op.has("down") => Shuffle::Down,
            () if op.has("bfly") => Shuffle::Bfly,
            () if op.has("idx") => Shuffle::Idx,
            () => return Err(self.unsupported("this mode")),
        };
        let (d, p) = self.value_and_predicate(self.at(operands, 0)?, Type::B32)?;
        let a = self.operand(operands, 1, Type::B32)?;
        let b = self.operand(operands, 2, Type::B32)?;
        let c = self.operand(operands, 3, Type::B32)?;
        let members = self.operand(operands, 4, Type::B32)?;
        self.collective(CollectiveKind::Shuffle { mode, d, p, a, b, c }, Some(members));
        Ok(())
    }

    fn value_and_predicate(&mut self, operand: &Operand, kind: Type) -> Result<(Register, Option<Register>)> {
        match operand {
            Operand::Pair(d, p) => Ok((self.destination(d, kind)?, Some(self.destination(p, Type::Pred)?))),
            other => Ok((self.destination(other, kind)?, None)),
        }
    }

    fn vote(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        if !op.has("sync") {
            return Err(self.unsupported("votes without `.sync`"));
        }
        let result = if op.has("ballot") { Type::B32 } else { Type::Pred };
        let d = self.destination(self.at(operands, 0)?, result)?;
        let (a, negated) = self.predicate(self.at(operands, 1)?)?;
        let members = self.operand(operands, 2, Type::B32)?;
        let kind = match () {
            () if op.has("ballot") => CollectiveKind::Ballot { d, a, negated },
            () if op.has("all") => CollectiveKind::VoteAll { d, a, negated },
            () if op.has("any") => CollectiveKind::VoteAny { d, a, negated },
            () if op.has("uni") => CollectiveKind::VoteUni { d, a, negated },
            () => return Err(self.unsupported("this vote")),
        };
        self.collective(kind, Some(members));
        Ok(())
    }

    fn matching(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let kind = op.kind().unwrap_or(Type::B32);
        let (d, p) = self.value_and_predicate(self.at(operands, 0)?, Type::B32)?;
        let a = self.operand(operands, 1, kind)?;
        let members = self.operand(operands, 2, Type::B32)?;
        let kind = match () {
            () if op.has("any") => CollectiveKind::MatchAny { d, a },
            () if op.has("all") => CollectiveKind::MatchAll { d, p, a },
            () => return Err(self.unsupported("this match")),
        };
        self.collective(kind, Some(members));
        Ok(())
    }

    fn redux(&mut self, op: &Opcode<'_>, operands: &[Operand]) -> Result<()> {
        let kind = op.kind().filter(|k| k.bytes() == 4).unwrap_or(Type::U32);
        let apply: fn(u32, u32) -> u32 = match (op.parts.get(1).copied(), kind) {
            (Some("add"), Type::U32 | Type::S32) => u32::wrapping_add,
            (Some("min"), Type::U32) => u32::min,
            (Some("max"), Type::U32) => u32::max,
            (Some("min"), Type::S32) => |a, b| (a as i32).min(b as i32) as u32,
            (Some("max"), Type::S32) => |a, b| (a as i32).max(b as i32) as u32,
            (Some("and"), _) => |a, b| a & b,
            (Some("or"), _) => |a, b| a | b,
            (Some("xor"), _) => |a, b| a ^ b,
            _ => return Err(self.unsupported("this reduction")),
        };
        let d = self.destination(self.at(operands, 0)?, kind)?;
        let a = self.operand(operands, 1, kind)?;
        let members = self.operand(operands, 2, Type::B32)?;
        self.collective(CollectiveKind::Reduce { d, a, apply }, Some(members));
        Ok(())
    }

    fn elect(&mut self, operands: &[Operand]) -> Result<()> {
        let (d, p) = self.value_and_predicate(self.at(operands, 0)?, Type::B32)?;
        let p = p.ok_or_else(|| self.bad("needs a predicate".into()))?;
        let members = self.operand(operands, 1, Type::B32)?;
        self.collective(CollectiveKind::Elect { d, p }, Some(members));
        Ok(())
    }
}

/// Why a function that is only declared cannot be called, and what helps.
fn without_body(name: &str) -> String {
    match name {
        "malloc" | "free" | "_Znwm" | "_Znam" | "_ZdlPv" | "_ZdaPv" => format!(
            "`{name}`: memory is not allocated on the device here (malloc, new); allocate it before the launch and pass a pointer"
        ),
        _ if name.starts_with("cudaLaunchDevice") || name.starts_with("cudaGetParameterBuffer") => {
            format!(
                "`{name}`: a kernel that launches another is not simulated; launch them one after the other"
            )
        }
        _ => format!("`{name}` has no body in this module; compile its definition with the kernel"),
    }
}

fn builtin(name: &str) -> Option<Builtin> {
    match name {
        "vprintf" => Some(Builtin::Printf),
        "__assertfail" => Some(Builtin::AssertFail),
        _ => None,
    }
}
