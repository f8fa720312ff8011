//! `st.async` and `red.async`: values that travel to another block's shared memory and report to its mbarrier.

use super::flight::Course;
use crate::decode::AsyncStore;
use crate::machine::access::Request;
use crate::machine::run::{Context, for_lanes};
use crate::machine::warp::Warp;
use crate::parse::ast::Space;
use std::rc::Rc;

impl Warp {
    pub(in crate::machine) fn async_store(
        &mut self,
        cx: &mut Context<'_, '_>,
        pc: u32,
        mask: u32,
        op: &AsyncStore,
    ) {
        let (to, barriers) = (self.shared_addresses(&op.to), self.shared_addresses(&op.barrier));
        let width = op.bytes as usize;
        for_lanes(mask, |lane| {
            let (target, barrier) = (cx.barrier_at(to[lane]), cx.barrier_at(barriers[lane]));
            if target.block != barrier.block || cx.shape.cluster_size() < 2 {
                cx.report(crate::finding::Kind::BulkCopy, pc, self.index, 1 << lane, || {
                    "data and mbarrier must lie in one block of a cluster of at least two".into()
                });
                return;
            }
            if !self.usable(cx, pc, lane, barrier) {
                return;
            }
            let Some(agent) = self.mbarrier_agent(cx, lane, barrier) else { return };
            let mut addresses = [0; 32];
            addresses[lane] = to[lane];
            let mut request = Request::write(pc, (width * op.registers.len()) as u32).by(agent);
            if op.combine.is_some() {
                request.order.strong = Some(crate::decode::Scope::Device);
            }
            if self.check(cx, Space::Shared, &addresses, 1 << lane, &request) == 0 {
                return;
            }
            if let Some((memory, at)) = cx.shared_at(to[lane]) {
                memory.written[at..at + request.bytes as usize].fill(1);
            }
            let value = |r: &crate::decode::Register| self.lane(*r, lane).to_le_bytes()[..width].to_vec();
            let data: Vec<u8> = op.registers.iter().flat_map(value).collect();
            let phase = cx.mbarrier(barrier).map_or(0, |b| b.phase);
            let course = Course::Value { to: target, data, barrier, phase, combine: op.combine.clone() };
            self.take_off(cx, pc, lane, Rc::new([]), course);
        });
    }
}
