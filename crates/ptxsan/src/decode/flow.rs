//! Where the lanes of a divergent branch meet again, and which registers may be read before they are written.

use super::{ALWAYS, Bank, Inst, NEVER, Op, Register};
use std::collections::HashSet;

/// Successors of an instruction inside its function. `None` stands for the function's end.
fn successors(code: &[Inst], pc: usize, end: usize) -> Vec<Option<usize>> {
    let next = if pc + 1 < end { Some(pc + 1) } else { None };
    let guarded = code[pc].guard != ALWAYS;
    let mut out = Vec::with_capacity(2);
    match &code[pc].op {
        Op::Branch { target, .. } => {
            out.push(Some(*target as usize));
            if guarded {
                out.push(next);
            }
        }
        Op::BranchIndex { targets, .. } => {
            out.extend(targets.iter().map(|t| Some(*t as usize)));
            if guarded {
                out.push(next);
            }
        }
        Op::Exit | Op::Return | Op::Trap { .. } => {
            out.push(None);
            if guarded {
                out.push(next);
            }
        }
        _ => out.push(next),
    }
    out.dedup();
    out
}

/// The control-flow graph of one function's code `[start, end)`.
pub(super) struct Graph {
    start: usize,
    /// First instruction of each block, ascending; one more entry at the end.
    leaders: Vec<usize>,
    next: Vec<Vec<usize>>,
    previous: Vec<Vec<usize>>,
    block_of: Vec<u32>,
}

impl Graph {
    pub(super) fn new(code: &[Inst], start: usize, end: usize) -> Self {
        let mut leads = vec![false; end - start + 1];
        leads[0] = true;
        leads[end - start] = true;
        for pc in start..end {
            let is_jump = matches!(
                code[pc].op,
                Op::Branch { .. } | Op::BranchIndex { .. } | Op::Exit | Op::Return | Op::Trap { .. }
            );
            if is_jump {
                leads[pc + 1 - start] = true;
                for target in successors(code, pc, end).into_iter().flatten() {
                    leads[target - start] = true;
                }
            }
        }
        let leaders: Vec<usize> = (start..=end).filter(|pc| leads[pc - start]).collect();
        let blocks = leaders.len() - 1;
        let mut block_of = vec![0u32; end - start];
        for block in 0..blocks {
            block_of[leaders[block] - start..leaders[block + 1] - start].fill(block as u32);
        }
        // The block after the last stands for "left the function".
        let mut next = vec![Vec::new(); blocks + 1];
        let mut previous = vec![Vec::new(); blocks + 1];
        for block in 0..blocks {
            for successor in successors(code, leaders[block + 1] - 1, end) {
                let to = successor.map_or(blocks, |pc| block_of[pc - start] as usize);
                next[block].push(to);
                previous[to].push(block);
            }
        }
        Graph { start, leaders, next, previous, block_of }
    }

    fn exit(&self) -> usize {
        self.leaders.len() - 1
    }

    /// Writes into every branch where its lanes meet: the first instruction of the immediate post-dominator.
    pub(super) fn join_branches(&self, code: &mut [Inst]) {
        let dominators = self.post_dominators();
        for block in 0..self.exit() {
            let pc = self.leaders[block + 1] - 1;
            let meet_at = match dominators[block] {
                Some(d) if d != self.exit() => self.leaders[d] as u32,
                _ => NEVER,
            };
            if let Op::Branch { meet, .. } | Op::BranchIndex { meet, .. } = &mut code[pc].op {
                *meet = meet_at;
            }
        }
    }

    /// Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm", on the reversed graph.
    fn post_dominators(&self) -> Vec<Option<usize>> {
        let exit = self.exit();
        let mut order = Vec::with_capacity(exit + 1);
        let mut number = vec![usize::MAX; exit + 1];
        let mut visited = vec![false; exit + 1];
        let mut stack = vec![(exit, 0usize)];
        visited[exit] = true;
        while let Some((block, edge)) = stack.pop() {
            if let Some(&to) = self.previous[block].get(edge) {
                stack.push((block, edge + 1));
                if !visited[to] {
                    visited[to] = true;
                    stack.push((to, 0));
                }
            } else {
                number[block] = order.len();
                order.push(block);
            }
        }
        let mut idom: Vec<Option<usize>> = vec![None; exit + 1];
        idom[exit] = Some(exit);
        let mut changed = true;
        while changed {
            changed = false;
            for &block in order.iter().rev() {
                if block == exit {
                    continue;
                }
                let mut chosen: Option<usize> = None;
                for &to in &self.next[block] {
                    if idom[to].is_none() {
                        continue;
                    }
                    chosen = Some(match chosen {
                        None => to,
                        Some(mut a) => {
                            let mut b = to;
                            while a != b {
                                while number[a] < number[b] {
                                    // Blocks with a dominator were numbered, so the walk ends at the exit.
                                    a = idom[a].unwrap_or(exit);
                                }
                                while number[b] < number[a] {
                                    b = idom[b].unwrap_or(exit);
                                }
                            }
                            a
                        }
                    });
                }
                if chosen.is_some() && idom[block] != chosen {
                    idom[block] = chosen;
                    changed = true;
                }
            }
        }
        idom[exit] = None;
        idom
    }

    /// For each instruction, keeps in `reads` only registers not proved to be written on every path before.
    pub(super) fn prove_written(&self, code: &mut [Inst], counts: [u32; 3]) {
        let blocks = self.exit();
        let offsets = [0, counts[0] as usize, (counts[0] + counts[1]) as usize];
        let total = (counts[0] + counts[1] + counts[2]) as usize;
        let words = total.div_ceil(64);
        // Too large to analyse: every read stays checked at run time.
        if words.saturating_mul(blocks) > 1 << 24 {
            return;
        }
        let slot = |r: &Register| offsets[r.bank as usize] + r.index as usize;
        let mut at_start = vec![vec![u64::MAX; words]; blocks + 1];
        at_start[0] = vec![0; words];
        let mut pending: Vec<usize> = vec![0];
        let mut queued = vec![false; blocks + 1];
        let mut reached = vec![false; blocks + 1];
        reached[0] = true;
        while let Some(block) = pending.pop() {
            queued[block] = false;
            let mut known = at_start[block].clone();
            for pc in self.leaders[block]..self.leaders[block + 1] {
                mark_written(&code[pc], &mut known, slot);
            }
            for &to in &self.next[block] {
                if to == blocks {
                    continue;
                }
                let mut changed = !reached[to];
                reached[to] = true;
                for (old, new) in at_start[to].iter_mut().zip(&known) {
                    let both = *old & new;
                    changed |= both != *old;
                    *old = both;
                }
                if changed && !queued[to] {
                    queued[to] = true;
                    pending.push(to);
                }
            }
        }
        for block in 0..blocks {
            let mut known = std::mem::take(&mut at_start[block]);
            for pc in self.leaders[block]..self.leaders[block + 1] {
                let kept: Vec<Register> = code[pc]
                    .reads
                    .iter()
                    .filter(|r| known[slot(r) / 64] >> (slot(r) % 64) & 1 == 0)
                    .copied()
                    .collect();
                code[pc].reads = kept.into();
                mark_written(&code[pc], &mut known, slot);
            }
        }
    }

    /// Blocks that nothing reaches are left alone; this is how many there are in all.
    pub(super) fn block_count(&self) -> usize {
        debug_assert_eq!(self.block_of.len() + self.start, self.leaders[self.exit()]);
        self.exit()
    }
}

fn mark_written(inst: &Inst, known: &mut [u64], slot: impl Fn(&Register) -> usize) {
    if inst.guard == ALWAYS {
        for r in &inst.writes {
            known[slot(r) / 64] |= 1 << (slot(r) % 64);
        }
    }
}

/// Drops write marks that no remaining read asks about.
pub(super) fn keep_wanted_writes(code: &mut [Inst]) {
    let mut wanted = HashSet::new();
    for inst in code.iter() {
        wanted.extend(inst.reads.iter().map(|r| (r.bank, r.index)));
    }
    for inst in code.iter_mut() {
        if inst.writes.is_empty() {
            continue;
        }
        let kept: Vec<Register> =
            inst.writes.iter().filter(|r| wanted.contains(&(r.bank, r.index))).copied().collect();
        inst.writes = kept.into();
    }
}

/// Register files in the order [`Graph::prove_written`] counts them.
pub(super) const BANKS: [Bank; 3] = [Bank::Pred, Bank::B32, Bank::B64];
