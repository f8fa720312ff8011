//! The functions that an entry can call.

use crate::error::{Error, Result};
use crate::parse::ast::{Ast, Function, Instruction, Operand, Statement};
use std::collections::{HashMap, HashSet};

/// A module's functions that have a body, by name.
pub(crate) type Functions<'m> = HashMap<&'m str, &'m Function>;

/// Made once for a module, whose entries may be thousands.
pub(crate) fn functions(ast: &Ast) -> Functions<'_> {
    ast.functions.iter().filter(|f| f.body.is_some()).map(|f| (f.name.as_str(), f)).collect()
}

fn calls_in(function: &Function) -> impl Iterator<Item = (&Instruction, &str)> {
    function.body.iter().flatten().filter_map(|s| match s {
        Statement::Instruction(i) if i.opcode == "call" || i.opcode.starts_with("call.") => {
            let name = i.operands.iter().find_map(|o| match o {
                Operand::Name(name) => Some(name.as_str()),
                _ => None,
            });
            name.map(|n| (i, n))
        }
        _ => None,
    })
}

/// The entry first, then every function it can call; calling oneself again is refused.
pub(super) fn reachable<'a>(by_name: &Functions<'a>, entry: &'a Function) -> Result<Vec<&'a Function>> {
    let mut order = Vec::new();
    let mut done: HashSet<&str> = HashSet::new();
    let mut open: Vec<&str> = Vec::new();
    // Depth first with an explicit stack: (function, calls not yet followed).
    let mut stack: Vec<(&Function, Vec<(u32, &str)>)> = Vec::new();
    let calls = |f: &'a Function| calls_in(f).map(|(i, n)| (i.line, n)).collect::<Vec<_>>();
    stack.push((entry, calls(entry)));
    open.push(&entry.name);
    order.push(entry);
    done.insert(&entry.name);
    while let Some((_, rest)) = stack.last_mut() {
        let Some((line, name)) = rest.pop() else {
            stack.pop();
            open.pop();
            continue;
        };
        if open.contains(&name) {
            return Err(Error::Unsupported {
                line,
                source_line: None,
                instruction: "call".into(),
                reason: format!(
                    "`{name}` calls itself, and recursion is not simulated; a loop with a stack of its own is"
                ),
            });
        }
        if let Some(&callee) = by_name.get(name)
            && done.insert(name)
        {
            order.push(callee);
            open.push(name);
            stack.push((callee, calls(callee)));
        }
    }
    Ok(order)
}
