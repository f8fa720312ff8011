//! Loops that never end, proved: every warp that runs comes back to where it was, and nothing has changed that could lead it elsewhere.
//!
//! A warp's way depends on its own state and on memory. While nothing is written, a warp whose state comes back goes round for ever.
//! Of the state only what decides counts: registers that reach a branch, an address or an exchange between lanes in the instructions
//! that were executed meanwhile. A counter of turns that no condition reads does not hide the loop.

use super::warp::{State, Warp};
use crate::count::counters::Tally;
use crate::decode::{ALWAYS, Bank, Kernel, Op, Register};
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Instructions without an effect before anybody looks closer; and then between two looks.
const QUIET: u64 = 1 << 14;
const STEP: u64 = 1 << 10;
/// After so many looks without an answer they become rarer: long arithmetic is no spin.
const PATIENT: u64 = 64;
/// A warp has its turn within so many instructions for each that runs.
const ROUND: u64 = 512;

/// A warp: its block's number and its own.
type Name = (u32, u32);

/// What has been seen since anything last happened.
struct Quiet {
    /// How often each instruction had been executed when it began.
    executed: Vec<u64>,
    /// Registers that decide.
    deciding: HashSet<(Bank, u32)>,
    /// State and turns of each warp when it was marked.
    marks: HashMap<Name, (u64, u64)>,
    /// Warps that were seen in their marked state again.
    returned: HashSet<Name>,
    looks: u32,
    /// The look at which states are marked anew: twice as far each time, so that it is one within the loop at last.
    next_marks: u32,
}

/// Watches a world for loops that never end.
#[derive(Default)]
pub(super) struct SpinWatch {
    /// Instructions executed when the next look is due.
    due: u64,
    effects: u64,
    quiet: Option<Quiet>,
}

impl SpinWatch {
    /// Whether it is time for a look.
    #[inline]
    pub(super) fn is_due(&self, instructions: u64) -> bool {
        instructions >= self.due
    }

    /// Looks at the warps that can run; `true` if none of them can ever do anything but what it does now. `pending` counts what else
    /// may happen, by itself or by those that left.
    pub(super) fn look<'w>(
        &mut self,
        kernel: &Kernel,
        tallies: &[Tally],
        instructions: u64,
        pending: u64,
        warps: impl Iterator<Item = (u32, &'w Warp)>,
    ) -> bool {
        let running: Vec<(Name, &Warp)> = warps
            .filter(|(_, warp)| warp.has_ready())
            .map(|(block, warp)| ((block, warp.index), warp))
            .collect();
        let round = ROUND * running.len() as u64;
        let effects = effects(kernel, tallies).wrapping_add(pending);
        let executed = || tallies.iter().map(|tally| tally.executed).collect();
        if effects != std::mem::replace(&mut self.effects, effects) {
            self.quiet = None;
            self.due = instructions + QUIET.max(2 * round);
            return false;
        }
        let quiet = self.quiet.get_or_insert_with(|| Quiet {
            executed: executed(),
            deciding: HashSet::new(),
            marks: HashMap::new(),
            returned: HashSet::new(),
            looks: 0,
            next_marks: 1,
        });
        self.due = instructions + STEP.max(round) * (1 + u64::from(quiet.looks) / PATIENT);
        quiet.look(kernel, tallies, &running)
    }
}

impl Quiet {
    fn look(&mut self, kernel: &Kernel, tallies: &[Tally], running: &[(Name, &Warp)]) -> bool {
        self.looks += 1;
        let deciding = deciding(kernel, |pc| tallies[pc].executed > self.executed[pc]);
        let marked = |(name, warp): &(Name, &Warp)| (*name, (state(warp, &deciding), warp.turns));
        let states: HashMap<Name, (u64, u64)> = running.iter().map(marked).collect();
        let is_same = deciding == self.deciding;
        for (name, warp) in running.iter().filter(|_| is_same) {
            // Lanes that wait for their warp are let go after a while.
            let waits = warp.groups.iter().any(|group| group.state == State::Meeting);
            if let (Some(mark), Some(now)) = (self.marks.get(name), states.get(name))
                // One that a schedule holds back is where it was for another reason. Groups of lanes take turns.
                && now.1 > mark.1 + warp.groups.len() as u64
                && !waits
                && now.0 == mark.0
            {
                self.returned.insert(*name);
            }
        }
        if is_same && running.iter().all(|(name, _)| self.returned.contains(name)) {
            return true;
        }
        if !is_same || self.looks >= self.next_marks {
            self.next_marks = 2 * self.looks;
            self.returned.clear();
            (self.deciding, self.marks) = (deciding, states);
        }
        false
    }
}

/// How many lanes did anything that others can see, or that depends on time.
fn effects(kernel: &Kernel, tallies: &[Tally]) -> u64 {
    let counted = kernel.code.iter().zip(tallies).map(|(inst, tally)| match inst.op {
        Op::Alu(_) | Op::Nop | Op::Branch { .. } | Op::BranchIndex { .. } => 0,
        Op::Load(_) | Op::Fence(_) | Op::Collective(_) | Op::ActiveMask(_) => 0,
        // One that leaves memory as it is, such as a compare-and-swap that fails, changes nothing.
        Op::Atomic(_) => tally.work,
        _ => tally.lanes,
    });
    counted.fold(0, u64::wrapping_add)
}

/// Registers that reach a branch, an address or another lane in the instructions that are executed.
fn deciding(kernel: &Kernel, is_executed: impl Fn(usize) -> bool) -> HashSet<(Bank, u32)> {
    let name = |register: &Register| (register.bank, register.index);
    let executed: Vec<usize> = (0..kernel.code.len()).filter(|pc| is_executed(*pc)).collect();
    let mut found: HashSet<(Bank, u32)> = HashSet::new();
    let mut more = true;
    while std::mem::take(&mut more) {
        for &pc in &executed {
            let (inst, flow) = (&kernel.code[pc], &kernel.flows[pc]);
            let decides = !matches!(inst.op, Op::Alu(_) | Op::Nop);
            if !decides && !flow.writes.iter().any(|register| found.contains(&name(register))) {
                continue;
            }
            let guard = (inst.guard != ALWAYS).then_some((Bank::Pred, inst.guard));
            for register in flow.reads.iter().map(name).chain(guard) {
                more |= found.insert(register);
            }
        }
    }
    found
}

/// Where the lanes of a warp are, and what is in the registers that decide.
fn state(warp: &Warp, deciding: &HashSet<(Bank, u32)>) -> u64 {
    let mut hasher = DefaultHasher::new();
    for group in &warp.groups {
        (group.pc, group.mask, group.state == State::Ready, &group.calls).hash(&mut hasher);
    }
    let mut registers: Vec<&(Bank, u32)> = deciding.iter().collect();
    registers.sort_unstable();
    for (bank, index) in registers {
        let at = *index as usize;
        match bank {
            Bank::B32 => warp.regs.b32[at].hash(&mut hasher),
            Bank::B64 => warp.regs.b64[at].hash(&mut hasher),
            Bank::Pred => warp.regs.pred[at].hash(&mut hasher),
        }
    }
    warp.regs.carry.hash(&mut hasher);
    hasher.finish()
}
