//! Which stores put back what was loaded from the same place and changed: the updates that an atomic would make whole.

use super::{Address, Bank, Inst, Op, Register};
use std::collections::{HashMap, HashSet};

/// Marks strong stores whose value comes from a strong load of the same address. Called before reads are thinned out.
pub(super) fn mark(code: &mut [Inst]) {
    let is_strong_store = |inst: &Inst| matches!(&inst.op, Op::Store(t) if t.order.strong.is_some());
    if !code.iter().any(is_strong_store) {
        return;
    }
    let mut writers: HashMap<(Bank, u32), Vec<usize>> = HashMap::new();
    for (pc, inst) in code.iter().enumerate() {
        for register in &inst.writes {
            writers.entry((register.bank, register.index)).or_default().push(pc);
        }
    }
    let updates: Vec<usize> =
        (0..code.len()).filter(|pc| is_strong_store(&code[*pc]) && is_update(code, &writers, *pc)).collect();
    for pc in updates {
        if let Op::Store(transfer) = &mut code[pc].op {
            transfer.is_update = true;
        }
    }
}

fn is_update(code: &[Inst], writers: &HashMap<(Bank, u32), Vec<usize>>, pc: usize) -> bool {
    let Op::Store(store) = &code[pc].op else { return false };
    let mut pending: Vec<Register> = store.registers.to_vec();
    let mut seen: HashSet<(Bank, u32)> = HashSet::new();
    while let Some(register) = pending.pop() {
        let key = (register.bank, register.index);
        if !seen.insert(key) {
            continue;
        }
        for &at in writers.get(&key).into_iter().flatten() {
            match &code[at].op {
                Op::Load(load) if load.order.strong.is_some() && is_same(&load.address, &store.address) => {
                    return true;
                }
                Op::Alu(_) => pending.extend(code[at].reads.iter()),
                _ => {}
            }
        }
    }
    false
}

fn is_same(a: &Address, b: &Address) -> bool {
    (a.space, a.base, a.offset) == (b.space, b.base, b.offset)
}
