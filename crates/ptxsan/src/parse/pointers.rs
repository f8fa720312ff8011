//! Calls through function pointers become calls by name: of each function whose address is taken and whose parameters and results are as
//! large, if the pointer is its address.
//!
//! A function's address is its place in the module; nothing else is known of it.

use super::ast::{Ast, Function, Initial, Instruction, Operand, Statement, Type, function_address};
use std::collections::HashSet;

/// A call may mean so many functions; one that may mean more is left as it is, and refused.
const MAX_CANDIDATES: usize = 256;
/// The predicate that says whether a pointer is an address.
const IS_MEANT: &str = "%call_is_meant";

/// A function that pointers may mean.
struct Candidate {
    name: String,
    address: u64,
    params: Vec<u64>,
    results: Vec<u64>,
}

/// The parts of a call: results, what is called, arguments.
type Parts<'a> = (&'a [Operand], &'a str, &'a [Operand]);

/// Rewrites the calls of a module.
pub(crate) fn resolve(ast: &mut Ast) {
    let is_indirect = |s: &Statement| match s {
        Statement::Instruction(i) => parts(i).is_some_and(|(_, name, _)| name.starts_with('%')),
        _ => false,
    };
    let wanted: Vec<bool> = ast.functions.iter().map(|f| f.body.iter().flatten().any(is_indirect)).collect();
    if !wanted.contains(&true) {
        return;
    }
    let candidates = candidates(ast);
    for (function, _) in ast.functions.iter_mut().zip(wanted).filter(|(_, is_wanted)| *is_wanted) {
        let body = function.body.take().unwrap_or_default();
        function.body = Some(resolved(body, &candidates));
    }
}

fn parts(instruction: &Instruction) -> Option<Parts<'_>> {
    if instruction.opcode != "call" && !instruction.opcode.starts_with("call.") {
        return None;
    }
    match &instruction.operands[..] {
        [Operand::List(results), Operand::Name(name), Operand::List(arguments), ..] => {
            Some((results, name, arguments))
        }
        [Operand::Name(name), Operand::List(arguments), ..] => Some((&[], name, arguments)),
        [Operand::List(results), Operand::Name(name), ..] => Some((results, name, &[])),
        [Operand::Name(name), ..] => Some((&[], name, &[])),
        _ => None,
    }
}

/// The functions whose address is taken by an initial value or an instruction.
fn candidates(ast: &Ast) -> Vec<Candidate> {
    let mut taken: HashSet<&str> = HashSet::new();
    for value in ast.variables.iter().flat_map(|v| &v.values) {
        if let Initial::Address { name, .. } = value {
            taken.insert(name);
        }
    }
    for statement in ast.functions.iter().flat_map(|f| f.body.iter().flatten()) {
        if let Statement::Instruction(i) = statement
            && i.opcode.starts_with("mov.")
            && let Some(Operand::Name(name)) = i.operands.get(1)
        {
            taken.insert(name);
        }
    }
    let is_meant = |f: &Function| !f.is_entry && f.body.is_some() && taken.contains(f.name.as_str());
    ast.functions
        .iter()
        .filter(|f| is_meant(f))
        .map(|f| Candidate {
            name: f.name.clone(),
            address: ast.function_place(&f.name).map_or(0, function_address),
            params: f.params.iter().map(|v| v.bytes).collect(),
            results: f.results.iter().map(|v| v.bytes).collect(),
        })
        .collect()
}

fn resolved(body: Vec<Statement>, candidates: &[Candidate]) -> Vec<Statement> {
    let mut out: Vec<Statement> = Vec::with_capacity(body.len());
    for statement in body {
        let Statement::Instruction(call) = &statement else {
            out.push(statement);
            continue;
        };
        let meant: Vec<&Candidate> = match parts(call) {
            Some((results, name, arguments)) if name.starts_with('%') => {
                let (results, arguments) = (sizes(&out, results), sizes(&out, arguments));
                candidates.iter().filter(|c| c.results == results && c.params == arguments).collect()
            }
            _ => Vec::new(),
        };
        if meant.is_empty() || meant.len() > MAX_CANDIDATES {
            out.push(statement);
        } else {
            by_name(&mut out, call, &meant);
        }
    }
    out
}

/// The bytes of parameters declared before.
fn sizes(before: &[Statement], names: &[Operand]) -> Vec<u64> {
    let size = |name: &Operand| {
        before.iter().rev().find_map(|s| match (s, name) {
            (Statement::Variable(v), Operand::Name(name)) if v.name == *name => Some(v.bytes),
            _ => None,
        })
    };
    names.iter().map(|name| size(name).unwrap_or(0)).collect()
}

/// `if (pointer == f) f(…); else if (pointer == g) g(…); else trap`.
fn by_name(out: &mut Vec<Statement>, call: &Instruction, meant: &[&Candidate]) {
    let Some((results, pointer, arguments)) = parts(call) else { return };
    let step = |opcode: &str, guard: Option<(String, bool)>, operands: Vec<Operand>| {
        Statement::Instruction(Instruction { guard, opcode: opcode.to_owned(), operands, ..call.clone() })
    };
    let name = |text: &str| Operand::Name(text.to_owned());
    let label = |text: String| Statement::Label { name: text, line: call.line };
    let end = format!("$call_{}_end", call.id);
    out.push(Statement::Enter);
    out.push(Statement::Registers { prefix: IS_MEANT.to_owned(), count: None, kind: Type::Pred });
    if let Some((guard, negated)) = &call.guard {
        out.push(step("bra", Some((guard.clone(), !negated)), vec![name(&end)]));
    }
    for (number, candidate) in meant.iter().enumerate() {
        let next = format!("$call_{}_{number}", call.id);
        let compared = vec![name(IS_MEANT), name(pointer), Operand::Int(candidate.address)];
        out.push(step("setp.eq.u64", None, compared));
        out.push(step("bra", Some((IS_MEANT.to_owned(), true)), vec![name(&next)]));
        let lists =
            [Operand::List(results.to_vec()), name(&candidate.name), Operand::List(arguments.to_vec())];
        out.push(step("call", None, lists.into()));
        out.push(step("bra", None, vec![name(&end)]));
        out.push(label(next));
    }
    out.push(step("trap", None, vec![name(pointer)]));
    out.push(label(end));
    out.push(Statement::Leave);
}
