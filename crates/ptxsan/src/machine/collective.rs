//! Instructions that lanes of a warp execute together.

use super::launch::Schedule;
use super::run::{Context, Flow, for_lanes};
use super::warp::{Parked, State, Warp};
use crate::decode::lanes::blend;
use crate::decode::{Collective, CollectiveKind, Register, Shuffle};
use crate::finding::Kind;
use crate::hazard::clock::{Clock, join_distinct};
use std::rc::Rc;

impl Warp {
    /// Gathers the lanes that must take part, then executes for all of them.
    pub(super) fn collective(
        &mut self,
        cx: &mut Context<'_, '_>,
        at: usize,
        mask: u32,
        op: &Collective,
    ) -> Flow {
        let pc = self.groups[at].pc;
        let is_waiting = |g: &super::warp::Group| g.pc == pc && g.state == State::Together;
        // Lanes of groups that already wait here; their guards were checked when they came.
        let others = self.groups.iter().filter(|g| is_waiting(g)).fold(0, |m, g| m | g.mask);
        let present = mask | others;
        let wanted = self.wanted(op, present);
        let forced = self.groups[at].is_forced;
        if wanted & !present != 0 && !forced {
            self.groups[at].state = State::Together;
            return Flow::Yield;
        }
        if forced {
            self.groups[at].is_forced = false;
            let missing = wanted & !present;
            cx.report(Kind::SyncMask, pc, self.index, mask, || {
                format!(
                    "lanes {missing:#010x} must take part but do not come; lanes {present:#010x} are there"
                )
            });
        }
        if let Some(members) = op.members {
            let outside = (0..32)
                .filter(|l| present >> l & 1 == 1 && self.lane(members, *l) >> l & 1 == 0)
                .fold(0u32, |m, l| m | 1 << l);
            if outside != 0 {
                cx.report(Kind::SyncMask, pc, self.index, outside, || {
                    format!("lanes {outside:#010x} execute it but are not in their own mask")
                });
            }
        }
        if let Some(parked) = self.must_park(cx, pc, op) {
            self.groups[at].state = State::Parked(parked);
            return Flow::Park;
        }
        self.perform(cx, pc, present, op);
        self.mark_written(&cx.kernel.code[pc as usize], present);
        let mut mine = false;
        for (i, g) in self.groups.iter_mut().enumerate() {
            if i == at || is_waiting(g) {
                g.pc = pc + 1;
                g.state = State::Ready;
                mine |= i == at;
            }
        }
        debug_assert!(mine);
        if cx.warpgroups.is_newly_waited() { Flow::Yield } else { Flow::Moved }
    }

    /// Whether an instruction cannot be executed yet, and what it waits for.
    fn must_park(&mut self, cx: &mut Context<'_, '_>, pc: u32, op: &Collective) -> Option<Parked> {
        match op.kind {
            CollectiveKind::WgmmaWait(pending) => {
                self.awaits_siblings(cx, pending).then_some(Parked::Warpgroup)
            }
            CollectiveKind::Registers { claims, count } => {
                (!self.set_registers(cx, pc, claims, count)).then_some(Parked::Registers)
            }
            _ => None,
        }
    }

    /// Union of the masks that the lanes present name, of lanes that still live.
    pub(super) fn wanted(&self, op: &Collective, present: u32) -> u32 {
        match op.members {
            None => self.live,
            Some(members) => {
                let values = &self.regs.b32[members.index as usize];
                let mut all = 0;
                for_lanes(present, |lane| all |= values[lane]);
                all & self.live
            }
        }
    }

    fn perform(&mut self, cx: &mut Context<'_, '_>, pc: u32, present: u32, op: &Collective) {
        // Lanes with different masks in one instruction form separate collectives.
        let Some(members) = op.members else {
            self.perform_for(cx, pc, present, op);
            return;
        };
        let values = self.regs.b32[members.index as usize];
        let mut rest = present;
        while rest != 0 {
            let value = values[rest.trailing_zeros() as usize];
            let same =
                (0..32).filter(|l| rest >> l & 1 == 1 && values[*l] == value).fold(0u32, |m, l| m | 1 << l);
            rest &= !same;
            self.perform_for(cx, pc, same, op);
        }
    }

    fn perform_for(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32, op: &Collective) {
        let orders = matches!(op.kind, CollectiveKind::WarpSync) || cx.options.collectives_order_memory;
        if orders && cx.options.check_races {
            self.synchronise(cx, pc, lanes);
        }
        match &op.kind {
            CollectiveKind::WarpSync => {}
            CollectiveKind::Shuffle { mode, d, p, a, b, c } => {
                self.shuffle(cx, pc, lanes, *mode, *d, *p, [*a, *b, *c]);
            }
            CollectiveKind::VoteAll { d, a, negated } => {
                let yes = self.ballot(*a, *negated, lanes) == lanes;
                self.set_predicate(*d, lanes, yes);
            }
            CollectiveKind::VoteAny { d, a, negated } => {
                let yes = self.ballot(*a, *negated, lanes) != 0;
                self.set_predicate(*d, lanes, yes);
            }
            CollectiveKind::VoteUni { d, a, negated } => {
                let ballot = self.ballot(*a, *negated, lanes);
                self.set_predicate(*d, lanes, ballot == 0 || ballot == lanes);
            }
            CollectiveKind::Ballot { d, a, negated } => {
                let ballot = self.ballot(*a, *negated, lanes);
                blend(&mut self.regs.b32[d.index as usize], &[ballot; 32], lanes);
            }
            CollectiveKind::MatchAny { d, a } => {
                let equal: [u32; 32] = std::array::from_fn(|lane| {
                    let value = self.lane(*a, lane);
                    (0..32)
                        .filter(|l| lanes >> l & 1 == 1 && self.lane(*a, *l) == value)
                        .fold(0u32, |m, l| m | 1 << l)
                });
                blend(&mut self.regs.b32[d.index as usize], &equal, lanes);
            }
            CollectiveKind::MatchAll { d, p, a } => {
                let first = self.lane(*a, lanes.trailing_zeros() as usize);
                let all = (0..32).all(|l| lanes >> l & 1 == 0 || self.lane(*a, l) == first);
                blend(&mut self.regs.b32[d.index as usize], &[if all { lanes } else { 0 }; 32], lanes);
                if let Some(p) = p {
                    self.set_predicate(*p, lanes, all);
                }
            }
            CollectiveKind::Reduce { d, a, apply } => {
                let values = self.regs.b32[a.index as usize];
                let result = (0..32).filter(|l| lanes >> l & 1 == 1).map(|l| values[l]).reduce(apply);
                blend(&mut self.regs.b32[d.index as usize], &[result.unwrap_or(0); 32], lanes);
            }
            CollectiveKind::Registers { .. } => {}
            CollectiveKind::WgmmaFence
            | CollectiveKind::WgmmaCommit
            | CollectiveKind::WgmmaWait(_)
            | CollectiveKind::Wgmma(_) => self.wgmma_kind(cx, pc, lanes, &op.kind),
            CollectiveKind::Elect { d, p } => {
                // Which lane it is nobody may rely on, only that it stays the same.
                let highest = 31 - lanes.leading_zeros();
                let leader = if cx.options.schedule == Schedule::ConsumerLate {
                    highest
                } else {
                    lanes.trailing_zeros()
                };
                blend(&mut self.regs.b32[d.index as usize], &[leader; 32], lanes);
                for_lanes(lanes, |lane| self.set_lane(*p, lane, u64::from(lane as u32 == leader)));
            }
            kind => self.matrix(cx, pc, lanes, kind),
        }
    }

    /// Every lane of `lanes` learns what every other did and knew.
    fn synchronise(&mut self, cx: &mut Context<'_, '_>, pc: u32, lanes: u32) {
        let mut clock = Clock::clone(&self.known[lanes.trailing_zeros() as usize & 31]);
        join_distinct(&mut clock, (0..32).filter(|l| lanes >> l & 1 == 1).map(|l| &self.known[l]));
        for_lanes(lanes, |lane| self.raise_lane(cx, lane, &mut clock));
        clock.settle();
        let clock = Rc::new(clock);
        for_lanes(lanes, |lane| self.learn(lane, pc, Rc::clone(&clock)));
        self.advance();
    }

    fn ballot(&self, a: Register, negated: bool, lanes: u32) -> u32 {
        let value = self.regs.pred[a.index as usize];
        (if negated { !value } else { value }) & lanes
    }

    fn set_predicate(&mut self, d: Register, lanes: u32, yes: bool) {
        let p = &mut self.regs.pred[d.index as usize];
        *p = if yes { *p | lanes } else { *p & !lanes };
    }

    fn shuffle(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        lanes: u32,
        mode: Shuffle,
        d: Register,
        p: Option<Register>,
        [a, b, c]: [Register; 3],
    ) {
        let values = self.regs.b32[a.index as usize];
        let amounts = self.regs.b32[b.index as usize];
        let controls = self.regs.b32[c.index as usize];
        let mut out = values;
        let mut sources = [0u8; 32];
        let (mut valid, mut stray) = (0u32, 0u32);
        for_lanes(lanes, |lane| {
            let l = lane as u32;
            let (amount, clamp, segment) =
                (amounts[lane] & 31, controls[lane] & 31, controls[lane] >> 8 & 31);
            let max = (l & segment) | (clamp & !segment);
            let min = l & segment;
            let (from, inside) = match mode {
                Shuffle::Up => (l.wrapping_sub(amount), (l as i32 - amount as i32) >= max as i32),
                Shuffle::Down => (l + amount, l + amount <= max),
                Shuffle::Bfly => (l ^ amount, l ^ amount <= max),
                Shuffle::Idx => {
                    let from = min | (amount & !segment);
                    (from, from <= max)
                }
            };
            let from = if inside { from & 31 } else { l };
            valid |= u32::from(inside) << lane;
            if lanes >> from & 1 == 0 {
                stray |= 1 << lane;
            }
            sources[lane] = from as u8;
            out[lane] = values[from as usize];
        });
        if stray != 0 {
            cx.report(Kind::ShuffleInactive, pc, self.index, stray, || {
                format!("lanes {stray:#010x} read lanes that do not take part ({lanes:#010x} do)")
            });
        }
        self.move_lanes(d, a, lanes, &sources);
        blend(&mut self.regs.b32[d.index as usize], &out, lanes);
        if let Some(p) = p {
            crate::decode::lanes::blend_bits(&mut self.regs.pred[p.index as usize], valid, lanes);
        }
    }
}
