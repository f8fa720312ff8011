//! Executes instructions of one warp until it blocks or its turn is over.

use super::asynchronous::barrier_state::Mbarriers;
use super::asynchronous::cluster::{Cluster, Pool, Visits};
use super::asynchronous::flight::BulkFlight;
use super::asynchronous::wgmma::{Operands, Warpgroups};
use super::barrier::Barriers;
use super::launch::{Options, Schedule, Shape};
use super::warp::{NO_MEETING, Parked, State, Warp};
use crate::count::counters::Tally;
use crate::decode::{ALWAYS, Bank, Inst, Kernel, Op, SharedVariable};
use crate::finding::{Kind, Variable};
use crate::hazard::clock::Numbering;
use crate::hazard::log::Log;
use crate::hazard::sync::SyncPlaces;
use crate::memory::shared::SharedMemory;
use crate::memory::view::View;
use crate::memory::window;
use crate::parse::ast::Space;
use crate::random::Random;
use std::collections::HashMap;

/// After so many instructions without meeting, lanes that wait for others go on alone: the others may be
/// waiting for them in a loop.
const PATIENCE: u32 = 20_000;
/// An atomic that changes nothing, as those that ask for a lock that is held, wears it down like so many instructions.
const SPIN: u32 = PATIENCE / 64;

/// What a running warp may touch beside itself.
pub(super) struct Context<'a, 'm> {
    pub(super) kernel: &'a Kernel,
    pub(super) shape: &'a Shape,
    pub(super) options: &'a Options,
    pub(super) numbering: Numbering,
    /// The block's number in this world.
    pub(super) block: u32,
    pub(super) params: &'a [u8],
    pub(super) shared: &'a mut SharedMemory,
    pub(super) barriers: &'a mut Barriers,
    pub(super) mbarriers: &'a mut Mbarriers,
    pub(super) warpgroups: &'a mut Warpgroups,
    /// Registers that warps give and take; absent where `setmaxnreg` does nothing.
    pub(super) pool: &'a mut Option<Pool>,
    pub(super) cluster: &'a mut Cluster,
    /// The number of the first block of the cluster.
    pub(super) cluster_first: u32,
    /// The other blocks that are running.
    pub(super) peers: &'a mut HashMap<u32, Box<Resident>>,
    /// Where operands of `wgmma` lie.
    pub(super) operands: &'a mut Operands,
    /// Bulk copies on their way.
    pub(super) flights: &'a mut Vec<BulkFlight>,
    /// What has changed that somebody may wait for.
    pub(super) stirs: &'a mut Vec<Stir>,
    pub(super) view: &'a mut View<'m>,
    pub(super) places: &'a mut SyncPlaces,
    pub(super) log: &'a mut Log,
    pub(super) tallies: &'a mut [Tally],
    pub(super) output: &'a mut String,
    pub(super) random: &'a mut Random,
    /// Warp instructions left.
    pub(super) budget: &'a mut u64,
    /// A trap or a failed assertion ends the launch.
    pub(super) is_stopped: &'a mut bool,
}

/// What an instruction did to its group.
pub(super) enum Flow {
    /// On to the next instruction.
    Next,
    /// The group's `pc` is set; it may have split.
    Moved,
    /// The group waits, exited, or must let the scheduler look.
    Yield,
    /// As `Yield`, and the instruction will be executed again: it has done nothing yet.
    Park,
}

/// A change that parked groups may wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stir {
    /// The phase of an mbarrier: block and offset.
    Mbarrier(u32, u32),
    /// The barrier of this block's cluster.
    Cluster,
    /// A warpgroup of this block.
    Warpgroup,
    /// The pool of this block.
    Registers,
}

/// What a running block has beside its warps.
pub(super) struct Resident {
    pub(super) shared: SharedMemory,
    pub(super) barriers: Barriers,
    pub(super) mbarriers: Mbarriers,
    pub(super) warpgroups: Warpgroups,
    pub(super) pool: Option<Pool>,
    /// All its warps are done; its memory must not be used any more.
    pub(super) has_exited: bool,
    /// What others of its cluster did here.
    pub(super) visits: Visits,
}

impl Kernel {
    /// The shared variable at an offset and its size. `dynamic`: bytes of the part that the launch sizes.
    pub(super) fn shared_variable_at(&self, at: u64, dynamic: u64) -> Option<(&SharedVariable, u64)> {
        let sized = self.shared_variables.iter().map(|v| (v, v.bytes.unwrap_or(dynamic)));
        sized.into_iter().find(|(v, bytes)| (v.address..v.address + bytes).contains(&at))
    }

    /// The bytes of a block's shared memory.
    pub(super) fn shared_with(&self, dynamic: u32) -> usize {
        self.shared_bytes as usize + dynamic as usize
    }
}

impl Resident {
    /// Whether what is waited for is wrong whoever else waits.
    pub(super) fn is_cause(&self, parked: Parked) -> bool {
        matches!(parked, Parked::Mbarrier(offset) if self.mbarriers.has_wrong_bytes(offset))
    }
}

impl Context<'_, '_> {
    /// The memory that a shared address names, and the place in it; `None`: no such block.
    #[inline]
    pub(super) fn shared_at(&mut self, address: u64) -> Option<(&mut SharedMemory, usize)> {
        match window::rank(address as u32) {
            None => Some((self.shared, address as usize)),
            Some(rank) => {
                let memory = self.memory_of(self.cluster_first + rank)?;
                Some((memory, window::offset(address as u32) as usize))
            }
        }
    }

    pub(super) fn memory_of(&mut self, block: u32) -> Option<&mut SharedMemory> {
        if block == self.block {
            return Some(self.shared);
        }
        self.peers.get_mut(&block).map(|peer| &mut peer.shared)
    }

    pub(super) fn has_exited(&self, block: u32) -> bool {
        block != self.block && self.peers.get(&block).is_none_or(|peer| peer.has_exited)
    }

    /// The variable or buffer that an address of shared or global memory lies in.
    pub(super) fn variable(&self, space: Space, address: u64) -> Option<Variable> {
        match space {
            Space::Shared => {
                let at = u64::from(window::offset(address as u32));
                let (found, size) = self.kernel.shared_variable_at(at, self.shape.shared_bytes.into())?;
                Some(Variable::new(found.name.clone(), "shared", at - found.address, size))
            }
            Space::Global => self.view.base().variable(address),
            _ => None,
        }
    }

    pub(super) fn report(
        &mut self,
        kind: Kind,
        pc: u32,
        warp: u32,
        lanes: u32,
        detail: impl FnOnce() -> String,
    ) {
        let thread = warp * 32 + lanes.trailing_zeros().min(31);
        self.log.add(kind, pc, None, (self.block, thread), detail);
    }
}

impl Warp {
    /// Runs a ready group for at most `turn` instructions.
    pub(super) fn run(&mut self, cx: &mut Context<'_, '_>, turn: u32) {
        let count = self.groups.len();
        let pick =
            (0..count).map(|k| (self.next_group + k) % count).find(|g| self.groups[*g].state == State::Ready);
        let Some(at) = pick else { return };
        self.next_group = at + 1;
        self.run_group(cx, at, turn);
        if self.since_meeting > PATIENCE {
            self.release_meetings();
        }
    }

    fn run_group(&mut self, cx: &mut Context<'_, '_>, at: usize, turn: u32) {
        let kernel = cx.kernel;
        let mut left = u64::from(turn).min(*cx.budget);
        let allowed = left;
        let mut pc = self.groups[at].pc;
        while left > 0 {
            let group = &self.groups[at];
            if group.meeting != NO_MEETING && self.meetings[group.meeting as usize].pc == pc {
                self.groups[at].pc = pc;
                // Joining may renumber the groups, so `at` may be another one now; the scheduler picks up from there.
                self.arrive(at);
                pc = u32::MAX;
                break;
            }
            let inst = &kernel.code[pc as usize];
            let mut mask = group.mask;
            if inst.guard != ALWAYS {
                let guard = self.regs.pred[inst.guard as usize];
                mask &= if inst.guard_negated { !guard } else { guard };
            }
            left -= 1;
            let tally = &mut cx.tallies[pc as usize];
            tally.executed += 1;
            tally.lanes += u64::from(mask.count_ones());
            if !inst.reads.is_empty() {
                self.check_registers(inst, pc, group_mask(inst, mask, self.groups[at].mask));
            }
            if self.validity.is_tracking() {
                self.track(cx, pc, inst, mask, self.groups[at].mask);
            }
            if let Some(watch) = &inst.watch
                && mask != 0
            {
                self.watch(cx, pc, mask, watch);
            }
            if let Op::Alu(alu) = &inst.op {
                if mask != 0 {
                    alu(&mut self.regs, &inst.args, mask);
                    self.mark_written(inst, mask);
                }
                pc += 1;
                continue;
            }
            if mask == 0 && !matches!(inst.op, Op::Branch { .. }) {
                pc += 1;
                continue;
            }
            self.groups[at].pc = pc;
            match self.execute(cx, at, inst, mask) {
                Flow::Next => {
                    self.mark_written(inst, mask);
                    pc += 1;
                }
                Flow::Moved => pc = self.groups[at].pc,
                Flow::Yield => {
                    self.mark_written(inst, mask);
                    pc = u32::MAX;
                    break;
                }
                Flow::Park => {
                    let tally = &mut cx.tallies[pc as usize];
                    tally.executed -= 1;
                    tally.lanes -= u64::from(mask.count_ones());
                    pc = u32::MAX;
                    break;
                }
            }
        }
        if pc != u32::MAX && at < self.groups.len() && self.groups[at].state == State::Ready {
            self.groups[at].pc = pc;
        }
        let used = allowed - left;
        *cx.budget -= used;
        if self.groups.iter().any(|g| g.state == State::Meeting) {
            self.since_meeting = self.since_meeting.saturating_add(used as u32);
        }
    }

    /// Lanes asked for something that others have, maybe those of their own warp that wait for them behind the loop.
    pub(super) fn spun(&mut self) {
        if self.groups.iter().any(|g| g.state == State::Meeting) {
            self.since_meeting = self.since_meeting.saturating_add(SPIN);
        }
    }

    /// Registers that no instruction has written are followed from where they are first read.
    fn check_registers(&mut self, inst: &Inst, pc: u32, mask: u32) {
        for register in &inst.reads {
            let missing = mask & !self.initialised(register.bank, register.index);
            if missing != 0 {
                self.mark_register(pc, *register, missing);
                self.initialised[register.bank as usize][register.index as usize] |= missing;
            }
        }
    }

    #[inline]
    pub(super) fn mark_written(&mut self, inst: &Inst, mask: u32) {
        for register in &inst.writes {
            self.initialised[register.bank as usize][register.index as usize] |= mask;
        }
    }

    fn execute(&mut self, cx: &mut Context<'_, '_>, at: usize, inst: &Inst, mask: u32) -> Flow {
        let pc = self.groups[at].pc;
        match &inst.op {
            Op::Alu(_) | Op::Nop => Flow::Next,
            Op::Branch { target, meet } => self.branch(at, mask, *target, *meet),
            Op::BranchIndex { index, targets, meet } => self.branch_index(at, mask, *index, targets, *meet),
            Op::Call { target, inputs, .. } => {
                if mask != self.groups[at].mask {
                    // The lanes that do not call wait behind the call.
                    let rest = self.groups[at].mask & !mask;
                    self.split(at, &[(pc, mask), (pc + 1, rest)], pc + 1);
                    return Flow::Moved;
                }
                self.copy_params(inputs, mask);
                self.groups[at].calls.push(pc);
                self.groups[at].pc = *target;
                Flow::Moved
            }
            Op::Return => match self.groups[at].calls.pop() {
                Some(call) => {
                    if let Op::Call { outputs, .. } = &cx.kernel.code[call as usize].op {
                        self.copy_params(outputs, mask);
                    }
                    self.groups[at].pc = call + 1;
                    Flow::Moved
                }
                None => self.leave(cx, at, mask),
            },
            Op::Exit => self.leave(cx, at, mask),
            Op::Trap { is_call } => {
                cx.report(Kind::Trap, pc, self.index, mask, || match is_call {
                    true => "a call through a pointer that is no function with these parameters".into(),
                    false => "the kernel executed `trap`".into(),
                });
                *cx.is_stopped = true;
                self.leave(cx, at, mask)
            }
            Op::Builtin { which, inputs, output } => self.builtin(cx, at, mask, *which, inputs, *output),
            Op::Load(transfer) => {
                self.load(cx, pc, mask, transfer);
                Flow::Next
            }
            Op::Store(transfer) => {
                self.store(cx, pc, mask, transfer);
                Flow::Next
            }
            Op::Atomic(atomic) => {
                self.atomic(cx, pc, mask, atomic);
                Flow::Next
            }
            Op::AsyncCopy(copy) => {
                self.issue_copies(cx, pc, mask, copy);
                Flow::Next
            }
            Op::AsyncCommit => {
                self.commit_copies(cx, pc, mask);
                Flow::Next
            }
            Op::AsyncWait(pending) => {
                self.wait_copies(cx, pc, mask, Some(*pending));
                Flow::Next
            }
            Op::AsyncWaitAll => {
                self.wait_copies(cx, pc, mask, None);
                Flow::Next
            }
            Op::Barrier(barrier) => self.barrier(cx, at, mask, barrier),
            Op::Mbarrier(op) => self.mbarrier(cx, at, mask, op),
            Op::Cluster(op) => self.cluster_barrier(cx, at, mask, op),
            Op::Bulk(op) => {
                self.bulk(cx, pc, mask, op);
                Flow::Next
            }
            Op::BulkCommit => {
                self.commit_bulk(mask);
                Flow::Next
            }
            Op::BulkWait { pending, reads_only } => {
                self.wait_bulk(cx, pc, mask, *pending, *reads_only);
                Flow::Next
            }
            Op::AsyncStore(op) => {
                self.async_store(cx, pc, mask, op);
                Flow::Next
            }
            Op::ProxyFence { shared, global } => {
                self.fence_proxy(cx, pc, mask, *shared, *global);
                if *shared && cx.options.strict_proxies {
                    self.show_inits(cx, mask);
                }
                Flow::Next
            }
            Op::InitFence => {
                self.fence_inits(cx, pc, mask);
                Flow::Next
            }
            Op::LaunchWait => {
                self.await_launch(cx, pc, mask);
                Flow::Next
            }
            Op::Fence(fence) => {
                self.fence(cx, pc, mask, *fence);
                Flow::Next
            }
            Op::Collective(collective) => self.collective(cx, at, mask, collective),
            Op::ActiveMask(d) => {
                let active = self.groups[at].mask;
                crate::decode::lanes::blend(&mut self.regs.b32[*d as usize], &[active; 32], mask);
                Flow::Next
            }
            Op::Clock(d) => {
                // Time passes with the instructions executed.
                let now = cx.options.instruction_budget.saturating_sub(*cx.budget);
                match d.bank {
                    Bank::B64 => {
                        crate::decode::lanes::blend(&mut self.regs.b64[d.index as usize], &[now; 32], mask)
                    }
                    _ => crate::decode::lanes::blend(
                        &mut self.regs.b32[d.index as usize],
                        &[now as u32; 32],
                        mask,
                    ),
                }
                Flow::Next
            }
        }
    }

    fn branch(&mut self, at: usize, taken: u32, target: u32, meet: u32) -> Flow {
        let group = &mut self.groups[at];
        let stays = group.mask & !taken;
        if stays == 0 {
            group.pc = target;
        } else if taken == 0 {
            group.pc += 1;
        } else {
            let next = group.pc + 1;
            self.split(at, &[(next, stays), (target, taken)], meet);
        }
        Flow::Moved
    }

    fn branch_index(&mut self, at: usize, mask: u32, index: u32, targets: &[u32], meet: u32) -> Flow {
        let values = self.regs.b32[index as usize];
        let mut parts: Vec<(u32, u32)> = Vec::new();
        let next = self.groups[at].pc + 1;
        let mut put = |pc: u32, lanes: u32| match parts.iter_mut().find(|(p, _)| *p == pc) {
            Some((_, m)) => *m |= lanes,
            None => parts.push((pc, lanes)),
        };
        let rest = self.groups[at].mask & !mask;
        if rest != 0 {
            put(next, rest);
        }
        for lane in 0..32 {
            if mask >> lane & 1 == 1 {
                // An index past the list is undefined; the next instruction is as good as any.
                put(targets.get(values[lane] as usize).copied().unwrap_or(next), 1 << lane);
            }
        }
        if let [(pc, _)] = parts[..] {
            self.groups[at].pc = pc;
        } else {
            self.split(at, &parts, meet);
        }
        Flow::Moved
    }

    fn leave(&mut self, cx: &mut Context<'_, '_>, at: usize, mask: u32) -> Flow {
        let pc = self.groups[at].pc;
        self.groups[at].pc += 1;
        self.land_copies(cx, |_, _| true);
        cx.barriers.lanes_left(self, mask);
        self.leave_bulk(cx, pc, mask);
        self.leave_cluster(cx, mask);
        self.exit(at, mask);
        if self.live == 0 {
            self.leave_products(cx, pc);
        }
        Flow::Yield
    }
}

fn group_mask(inst: &Inst, active: u32, whole: u32) -> u32 {
    // The guard itself is read by all lanes of the group, the operands by those it lets through. Reading the
    // operands' lanes is what matters; a guard never written shows as lanes that should not be active.
    if inst.guard == ALWAYS { whole } else { active }
}

#[inline(always)]
pub(super) fn for_lanes(mask: u32, mut f: impl FnMut(usize)) {
    let mut rest = mask;
    while rest != 0 {
        f(rest.trailing_zeros() as usize);
        rest &= rest - 1;
    }
}

impl Schedule {
    /// Whether a copy issued now lands at once.
    pub(super) fn lands_early(self, random: &mut Random) -> bool {
        match self {
            Schedule::ConsumerLate | Schedule::CopiesEarly => true,
            Schedule::Random => random.below(2) == 0,
            Schedule::RoundRobin | Schedule::ProducerLate | Schedule::CopiesLate => false,
        }
    }
}
