//! A warp: 32 lanes in one or more groups that run at different places, and how the groups meet again.

use crate::decode::lanes::Regs;
use crate::decode::{Bank, Kernel, Special};
use crate::hazard::clock::{Clock, Numbering};
use crate::hazard::sync::{Place, Said, Seen};
use crate::machine::asynchronous::wgmma::Products;
use crate::machine::launch::Shape;
use crate::machine::sync_trace::SyncTrace;
use crate::machine::validity::Validity;
use std::collections::HashMap;
use std::rc::Rc;

/// No meeting point.
pub(super) const NO_MEETING: u32 = u32::MAX;

/// Why a group does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    /// At the meeting point of a divergent branch, waiting for the other lanes.
    Meeting,
    /// At a collective or an aligned barrier, waiting for lanes that must take part.
    Together,
    /// At a CTA barrier.
    Barrier(u32),
    /// Before an instruction that will be executed again when something has changed.
    Parked(Parked),
}

/// What must change before a parked group goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parked {
    /// The phase of an mbarrier of the block, by its offset.
    Mbarrier(u32),
    /// The cluster's barrier.
    Cluster,
    /// The other warps of the warpgroup.
    Warpgroup,
    /// The registers in the block's pool.
    Registers,
}

/// Lanes that run together.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) pc: u32,
    pub(super) mask: u32,
    pub(super) state: State,
    /// Index of the innermost meeting, or [`NO_MEETING`].
    pub(super) meeting: u32,
    /// Where to return to, and the call instruction.
    pub(super) calls: Vec<u32>,
    /// The lanes' absence from a collective was reported: do not wait any longer.
    pub(super) is_forced: bool,
    /// Nothing else can happen: a wait that is parked answers no.
    pub(super) gives_up: bool,
}

/// Where the lanes of a divergent branch come together again.
#[derive(Debug, Clone)]
pub(super) struct Meeting {
    pub(super) outer: u32,
    pub(super) pc: u32,
    pub(super) members: u32,
    pub(super) arrived: u32,
}

/// What a lane fenced, for strong writes that follow.
#[derive(Debug, Clone)]
pub(super) struct Fenced {
    pub(super) clock: Rc<Clock>,
    pub(super) scope: crate::decode::Scope,
    pub(super) is_sc: bool,
}

/// Asynchronous copies on their way: of one lane, or of neighbours, if they read all they write and follow one another at both ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flight {
    pub(super) lane: u32,
    /// How many lanes.
    pub(super) count: u32,
    pub(super) group: u32,
    pub(super) to: u32,
    pub(super) from: u64,
    /// Of each lane.
    pub(super) bytes: u32,
    /// Bytes read from the source by each lane; the rest is zero.
    pub(super) source_bytes: u32,
}

impl Flight {
    /// The copy of one of its lanes.
    pub(super) fn of_lane(&self, index: u32) -> Flight {
        Flight {
            lane: self.lane + index,
            count: 1,
            to: self.to + index * self.bytes,
            from: self.from + u64::from(index * self.bytes),
            ..*self
        }
    }
}

/// A warp and all that belongs to it.
pub(super) struct Warp {
    pub(super) index: u32,
    pub(super) regs: Regs,
    /// Per bank, which lanes wrote each register; only kept for registers that are asked about.
    pub(super) initialised: [Vec<u32>; 3],
    /// Values in registers that nothing made.
    pub(super) validity: Validity,
    /// Lanes whose last checked read met bytes that nothing wrote.
    pub(super) unwritten: u32,
    pub(super) groups: Vec<Group>,
    pub(super) meetings: Vec<Meeting>,
    /// Lanes that have not exited.
    pub(super) live: u32,
    pub(super) local: Vec<u8>,
    pub(super) local_written: Vec<u8>,
    /// Time stamp of accesses; grows with every release.
    pub(super) time: u32,
    pub(super) known: [Rc<Clock>; 32],
    pub(super) fenced: Vec<Option<Fenced>>,
    /// What strong reads saw, to be learnt at the next fence.
    pub(super) seen: Vec<Seen>,
    /// What strong reads saw, fence or not, by place.
    pub(super) heard: Vec<HashMap<Place, Said>>,
    /// Lanes that made a strong read, and those that fenced after one.
    pub(super) polled: u32,
    /// Where `test_wait` said no, of which mbarrier and in which phase: asked again, it waits.
    pub(super) told_no: HashMap<u32, (u32, u32)>,
    pub(super) acquired: u32,
    /// The number of the open group of copies, and up to which group they are waited for.
    pub(super) open_group: [u32; 32],
    pub(super) waited_group: [u32; 32],
    pub(super) flights: Vec<Flight>,
    /// Per lane the open group of bulk stores, the last with one in it, and the last that has read its source.
    pub(super) bulk_open: [u32; 32],
    pub(super) bulk_issued: [u32; 32],
    /// Which instruction that last one was.
    pub(super) bulk_pc: [u32; 32],
    pub(super) bulk_read: [u32; 32],
    /// The cluster barrier that each lane has arrived at last.
    pub(super) cluster_arrivals: [u32; 32],
    pub(super) products: Option<Box<Products>>,
    /// Room for the values of operands of products.
    pub(super) scratch: Vec<f64>,
    pub(super) copies_issued: u64,
    /// Kept when each synchronisation is to be explained.
    pub(super) sync_trace: Option<Box<SyncTrace>>,
    /// Instructions since lanes last met or waited.
    pub(super) since_meeting: u32,
    pub(super) next_group: usize,
    /// How often it had its turn.
    pub(super) turns: u64,
}

impl Warp {
    pub(super) fn new(
        kernel: &Kernel,
        shape: &Shape,
        numbering: Numbering,
        block: u32,
        index: u32,
        known: &Rc<Clock>,
    ) -> Self {
        let threads = shape.threads();
        let lanes = (threads - index * 32).min(32);
        let live = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
        let mut regs = Regs {
            b32: vec![[0; 32]; kernel.b32_count],
            b64: vec![[0; 32]; kernel.b64_count],
            pred: vec![0; kernel.pred_count],
            carry: 0,
        };
        for (register, value) in &kernel.constants32 {
            regs.b32[*register as usize] = [*value; 32];
        }
        for (register, value) in &kernel.constants64 {
            regs.b64[*register as usize] = [*value; 32];
        }
        for (register, value) in &kernel.constants_pred {
            regs.pred[*register as usize] = if *value { u32::MAX } else { 0 };
        }
        for (special, register) in &kernel.specials {
            regs.b32[*register as usize] = special_values(*special, kernel, shape, numbering, block, index);
        }
        let group = Group {
            pc: 0,
            mask: live,
            state: State::Ready,
            meeting: NO_MEETING,
            calls: Vec::new(),
            is_forced: false,
            gives_up: false,
        };
        let local = kernel.local_bytes as usize * 32;
        Warp {
            index,
            regs,
            initialised: [vec![0; kernel.pred_count], vec![0; kernel.b32_count], vec![0; kernel.b64_count]],
            validity: Validity::default(),
            unwritten: 0,
            groups: vec![group],
            meetings: Vec::new(),
            live,
            local: vec![0; local],
            local_written: vec![0; local],
            time: 1,
            known: std::array::from_fn(|_| Rc::clone(known)),
            fenced: Vec::new(),
            seen: Vec::new(),
            heard: Vec::new(),
            polled: 0,
            told_no: HashMap::new(),
            acquired: 0,
            open_group: [1; 32],
            waited_group: [0; 32],
            flights: Vec::new(),
            bulk_open: [1; 32],
            bulk_issued: [0; 32],
            bulk_pc: [0; 32],
            bulk_read: [0; 32],
            cluster_arrivals: [0; 32],
            products: None,
            scratch: Vec::new(),
            copies_issued: 0,
            sync_trace: None,
            since_meeting: 0,
            next_group: 0,
            turns: 0,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.groups.is_empty()
    }

    /// What the lanes know that have not exited; once where neighbours share it.
    pub(super) fn live_clocks(&self) -> impl Iterator<Item = &Rc<Clock>> {
        let is_new = |lane: usize| lane == 0 || !Rc::ptr_eq(&self.known[lane - 1], &self.known[lane]);
        let starts_here = move |lane: usize| is_new(lane) || self.live >> (lane - 1) & 1 == 0;
        (0..32)
            .filter(move |lane| self.live >> lane & 1 == 1 && starts_here(*lane))
            .map(|lane| &self.known[lane])
    }

    pub(super) fn has_ready(&self) -> bool {
        self.groups.iter().any(|g| g.state == State::Ready)
    }

    pub(super) fn initialised(&self, bank: Bank, index: u32) -> u32 {
        self.initialised[bank as usize][index as usize]
    }

    /// Splits `mask` off group `at`, to run from `pc`; both halves meet at `meet`, if anywhere.
    pub(super) fn split(&mut self, at: usize, parts: &[(u32, u32)], meet: u32) {
        let whole = self.groups[at].mask;
        let mut meeting = self.groups[at].meeting;
        if meet != crate::decode::NEVER {
            // A loop that sheds lanes at the same exit again and again needs only one meeting there.
            let same = meeting != NO_MEETING && self.meetings[meeting as usize].pc == meet;
            if !same {
                meeting = self.new_meeting(Meeting { outer: meeting, pc: meet, members: whole, arrived: 0 });
            }
        }
        let template = self.groups[at].clone();
        for (i, (pc, mask)) in parts.iter().enumerate() {
            let group = Group { pc: *pc, mask: *mask, meeting, ..template.clone() };
            if i == 0 { self.groups[at] = group } else { self.groups.push(group) }
        }
    }

    fn new_meeting(&mut self, meeting: Meeting) -> u32 {
        // A meeting without members is over; its place can be taken.
        match self.meetings.iter().position(|m| m.members == 0) {
            Some(free) => {
                self.meetings[free] = meeting;
                free as u32
            }
            None => {
                self.meetings.push(meeting);
                self.meetings.len() as u32 - 1
            }
        }
    }

    /// Group `at` reached its meeting point. Returns whether it may go on.
    pub(super) fn arrive(&mut self, at: usize) -> bool {
        let (index, mask) = (self.groups[at].meeting, self.groups[at].mask);
        self.meetings[index as usize].arrived |= mask;
        self.groups[at].state = State::Meeting;
        self.settle_meeting(index)
    }

    /// Joins the groups at a meeting if all its lanes are there.
    fn settle_meeting(&mut self, index: u32) -> bool {
        let meeting = &self.meetings[index as usize];
        if meeting.members == 0 || meeting.arrived != meeting.members {
            return false;
        }
        let (outer, mask, pc) = (meeting.outer, meeting.arrived, meeting.pc);
        let is_here = |g: &Group| g.state == State::Meeting && g.meeting == index && g.pc == pc;
        let Some(first) = self.groups.iter().position(is_here) else { return false };
        self.groups[first].mask = mask;
        self.groups[first].state = State::Ready;
        self.groups[first].meeting = outer;
        let mut at = 0;
        self.groups.retain(|g| {
            let keep = at == first || !is_here(g);
            at += 1;
            keep
        });
        self.meetings[index as usize].members = 0;
        self.meetings[index as usize].arrived = 0;
        self.since_meeting = 0;
        true
    }

    /// Lanes leave for good.
    pub(super) fn exit(&mut self, at: usize, mask: u32) {
        self.live &= !mask;
        self.groups[at].mask &= !mask;
        if self.groups[at].mask == 0 {
            self.groups.remove(at);
        }
        for index in 0..self.meetings.len() {
            self.meetings[index].members &= !mask;
            self.meetings[index].arrived &= !mask;
            self.settle_meeting(index as u32);
        }
    }

    /// Lanes have waited long for others that may be waiting for them in turn: let them go on alone.
    pub(super) fn release_meetings(&mut self) {
        for at in 0..self.groups.len() {
            if self.groups[at].state == State::Meeting {
                let (index, mask) = (self.groups[at].meeting as usize, self.groups[at].mask);
                let outer = self.meetings[index].outer;
                self.meetings[index].members &= !mask;
                self.meetings[index].arrived &= !mask;
                self.groups[at].state = State::Ready;
                self.groups[at].meeting = outer;
            }
        }
        self.since_meeting = 0;
    }
}

fn special_values(
    special: Special,
    kernel: &Kernel,
    shape: &Shape,
    numbering: Numbering,
    block: u32,
    warp: u32,
) -> [u32; 32] {
    let [bx, by, _] = shape.block;
    let [gx, gy, _] = shape.grid;
    let thread = |lane: usize| warp * 32 + lane as u32;
    let rank = block % shape.cluster_size();
    let block = shape.linear_block(block);
    let place = Shape::coordinates(shape.grid, block);
    let (gx64, gy64) = (u64::from(gx), u64::from(gy));
    match special {
        Special::Tid(0) => std::array::from_fn(|l| thread(l) % bx),
        Special::Tid(1) => std::array::from_fn(|l| thread(l) / bx % by),
        Special::Tid(_) => std::array::from_fn(|l| thread(l) / (bx * by)),
        Special::Ntid(axis) => [shape.block[axis as usize]; 32],
        Special::Ctaid(0) => [(block % gx64) as u32; 32],
        Special::Ctaid(1) => [(block / gx64 % gy64) as u32; 32],
        Special::Ctaid(_) => [(block / (gx64 * gy64)) as u32; 32],
        Special::Nctaid(axis) => [shape.grid[axis as usize]; 32],
        Special::LaneId => std::array::from_fn(|l| l as u32),
        Special::WarpId => [warp; 32],
        Special::NumWarps => [numbering.lanes / 32; 32],
        Special::SmId => [(block % 132) as u32; 32],
        Special::NumSms => [132; 32],
        Special::GridId => [0; 32],
        Special::Clusterid(axis) => [place[axis as usize] as u32 / shape.cluster[axis as usize]; 32],
        Special::Nclusterid(axis) => [shape.grid[axis as usize] / shape.cluster[axis as usize]; 32],
        Special::ClusterCtaid(axis) => [place[axis as usize] as u32 % shape.cluster[axis as usize]; 32],
        Special::ClusterNctaid(axis) => [shape.cluster[axis as usize]; 32],
        Special::ClusterRank => [rank; 32],
        Special::ClusterSize => [shape.cluster_size(); 32],
        Special::IsCluster => [u32::from(shape.is_cluster); 32],
        Special::EnvReg(1) => [(shape.workspace >> 32) as u32; 32],
        Special::EnvReg(2) => [shape.workspace as u32; 32],
        Special::EnvReg(_) => [0; 32],
        Special::LaneMaskEq => std::array::from_fn(|l| 1 << l),
        Special::LaneMaskLt => std::array::from_fn(|l| (1u32 << l) - 1),
        Special::LaneMaskLe => std::array::from_fn(|l| (((1u64 << l) << 1) - 1) as u32),
        Special::LaneMaskGe => std::array::from_fn(|l| !((1u32 << l) - 1)),
        Special::LaneMaskGt => std::array::from_fn(|l| !(((1u64 << l) << 1) - 1) as u32),
        Special::DynamicSharedBytes => [shape.shared_bytes; 32],
        Special::TotalSharedBytes => [(kernel.shared_bytes as u32).saturating_add(shape.shared_bytes); 32],
    }
}
