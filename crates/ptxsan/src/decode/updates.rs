//! Read-modify-write updates: which stores put back what was loaded from the same address and changed; which
//! store a number, as flags are set; and which loads a compare-and-swap checks.

use super::{Address, Bank, Base, Inst, Op, Register};
use std::collections::{HashMap, HashSet};

/// Marks strong stores by where their value comes from. `numbers`: registers that hold one. Called
/// before reads are thinned out.
pub(super) fn mark(code: &mut [Inst], numbers: &HashSet<(Bank, u32)>) {
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
    let stores: Vec<usize> = (0..code.len()).filter(|pc| is_strong_store(&code[*pc])).collect();
    for pc in stores {
        let (update, constant) = (is_update(code, &writers, pc), is_constant(code, &writers, numbers, pc));
        if let Op::Store(transfer) = &mut code[pc].op {
            (transfer.is_update, transfer.is_constant) = (update, constant);
            transfer.is_volatile_data &= !constant;
        }
    }
    mark_data(code);
}

/// Tells volatile loads of data from those that only ask: what is loaded by these goes nowhere but into comparisons.
fn mark_data(code: &mut [Inst]) {
    let is_volatile = |inst: &Inst| matches!(&inst.op, Op::Load(t) if t.is_volatile_data);
    let loads: Vec<usize> = (0..code.len()).filter(|pc| is_volatile(&code[*pc])).collect();
    if loads.is_empty() {
        return;
    }
    let mut readers: HashMap<(Bank, u32), Vec<usize>> = HashMap::new();
    for (pc, inst) in code.iter().enumerate() {
        for register in &inst.reads {
            readers.entry((register.bank, register.index)).or_default().push(pc);
        }
    }
    for pc in loads {
        let is_data = is_data(code, &readers, pc);
        if let Op::Load(transfer) = &mut code[pc].op {
            transfer.is_volatile_data = is_data;
        }
    }
}

fn is_data(code: &[Inst], readers: &HashMap<(Bank, u32), Vec<usize>>, pc: usize) -> bool {
    let mut pending: Vec<Register> = code[pc].writes.to_vec();
    let mut seen: HashSet<(Bank, u32)> = HashSet::new();
    while let Some(register) = pending.pop() {
        let key = (register.bank, register.index);
        if key.0 == Bank::Pred || !seen.insert(key) {
            continue;
        }
        for &at in readers.get(&key).into_iter().flatten() {
            match &code[at].op {
                Op::Alu(_) => pending.extend(code[at].writes.iter()),
                _ => return true,
            }
        }
    }
    false
}

/// Whether a store's value is a number that is written in the code.
fn is_constant(
    code: &[Inst],
    writers: &HashMap<(Bank, u32), Vec<usize>>,
    numbers: &HashSet<(Bank, u32)>,
    pc: usize,
) -> bool {
    let Op::Store(store) = &code[pc].op else { return false };
    store.registers.iter().all(|register| {
        let key = (register.bank, register.index);
        let is_number = |at: &usize| {
            let inst = &code[*at];
            matches!(inst.op, Op::Alu(_)) && inst.reads.is_empty() && numbers.contains(&(key.0, inst.args.a))
        };
        numbers.contains(&key) || writers.get(&key).is_some_and(|made| made.iter().all(is_number))
    })
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

/// Marks the atomics whose result something reads: compilers ask for it in shared memory whether it is used or not.
pub(super) fn mark_read(code: &mut [Inst]) {
    let reads = code.iter().flat_map(|inst| inst.reads.iter());
    let reads: HashSet<(Bank, u32)> = reads.map(|register| (register.bank, register.index)).collect();
    for inst in code {
        if let Op::Atomic(atomic) = &mut inst.op {
            atomic.is_read = atomic.d.is_some_and(|d| reads.contains(&(d.bank, d.index)));
        }
    }
}

/// Marks the loads whose value a compare-and-swap of the same place compares: the first guess of a loop that ends when the place holds
/// what was guessed. `is_move`: instructions that pass a value on as it is.
pub(super) fn mark_compared(code: &mut [Inst], is_move: impl Fn(usize) -> bool) {
    let swaps: Vec<usize> =
        (0..code.len()).filter(|pc| matches!(&code[*pc].op, Op::Atomic(a) if a.b.is_some())).collect();
    for pc in swaps {
        let Op::Atomic(swap) = &code[pc].op else { continue };
        let (address, mut pending) = (swap.address, vec![swap.a]);
        let mut seen: HashSet<(Bank, u32)> = HashSet::new();
        let mut loads = Vec::new();
        while let Some(register) = pending.pop() {
            if !seen.insert((register.bank, register.index)) {
                continue;
            }
            for (at, inst) in code.iter().enumerate().filter(|(_, inst)| inst.writes.contains(&register)) {
                match &inst.op {
                    Op::Load(load) if load.order.strong.is_none() && may_be_same(&load.address, &address) => {
                        loads.push(at);
                    }
                    Op::Alu(_) if is_move(at) => pending.extend(inst.reads.iter()),
                    _ => {}
                }
            }
        }
        for at in loads {
            if let Op::Load(load) = &mut code[at].op {
                load.is_compared = true;
            }
        }
    }
}

/// A variable is named by one and reached through a register by the other.
fn may_be_same(a: &Address, b: &Address) -> bool {
    let is_named = |address: &Address| address.base == Base::Absolute;
    is_same(a, b) || a.space == b.space && is_named(a) != is_named(b)
}

fn is_same(a: &Address, b: &Address) -> bool {
    (a.space, a.base, a.offset) == (b.space, b.base, b.offset)
}
