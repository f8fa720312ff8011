//! What would order two accesses that are not: said of what is really missing.

use super::access::{By, Request};
use super::run::Context;
use super::warp::Warp;
use crate::decode::Scope;
use crate::finding::Kind;
use crate::hazard::accessor::Conflict;
use crate::hazard::clock::Who;
use crate::hazard::log::Other;
use crate::parse::ast::Space;

impl Warp {
    /// What is missing between an access of `lane` and the one it conflicts with.
    pub(super) fn advice(
        &self,
        cx: &Context<'_, '_>,
        kind: Kind,
        lane: usize,
        request: &Request,
        conflict: &Conflict,
        other: &Other,
        space: Space,
        agrees: bool,
    ) -> String {
        let is_near = other.block == u64::from(cx.block);
        let thread = self.index * 32 + lane as u32;
        let text = match kind {
            _ if agrees => {
                "both store the same value, so the result does not depend on the order; let one thread store it"
            }
            Kind::LostUpdate => {
                "another thread may store between this thread's load and its store, and one of the two updates is lost: \
                 an atomic (atomicAdd and the like) is missing"
            }
            Kind::WarpSynchronous => {
                "lanes of a warp do not run in step since Volta, and volatile does not order them: __syncwarp() between the \
                 accesses is missing"
            }
            Kind::VolatileRace => {
                "volatile makes each access real and orders none: __syncthreads() between the accesses is missing"
            }
            Kind::NonCoherentLoad => {
                "ld.global.nc (__ldg, const __restrict__) may only read what nobody writes during the launch: the buffers \
                 overlap, or the pointer must not be __restrict__"
            }
            _ if conflict.same_instruction && matches!(request.by, By::Lanes) => {
                "two lanes write different values in one instruction: which one stays is undefined"
            }
            Kind::ProxyRace => {
                "ordered, but not across proxies: fence.proxy.async must come between, mostly by who wrote, before the barrier"
            }
            _ => match cx.numbering.who(conflict.who) {
                // No wait reaches a group that is still open.
                Who::Copies
                    if is_near && other.thread == thread && self.open_group[lane & 31] == conflict.time =>
                {
                    "the copy is still in flight, and its group is open: cp.async.commit_group and cp.async.wait_group, or \
                     cp.async.wait_all, must come first"
                }
                Who::Copies if is_near && other.thread == thread => {
                    "the copy is still in flight: cp.async.wait_group must come first"
                }
                Who::Copies => {
                    "the copy is not published: its thread must cp.async.wait_group, and a barrier must follow"
                }
                Who::Mbarrier(_) => {
                    "the copy is in flight: its mbarrier must be waited for, in the phase it reports to"
                }
                Who::BulkReads => {
                    "the bulk store may not have read its source: its thread must cp.async.bulk.wait_group.read, and a \
                     barrier must follow"
                }
                Who::BulkWrites => {
                    "the bulk store may not have written: its thread must cp.async.bulk.wait_group, and a barrier must follow"
                }
                Who::Wgmma => {
                    "the products may not have read it: wgmma.wait_group must come first, and a barrier must follow"
                }
                Who::Lane => match request.by {
                    By::Lanes => return self.missing_order(cx, lane, conflict, other, space),
                    By::Copies => return unordered(Who::Copies, is_near && other.thread == thread),
                    By::Agent(agent) => {
                        return unordered(
                            cx.numbering.who(agent.identity),
                            is_near && other.thread == thread,
                        );
                    }
                },
            },
        };
        text.to_owned()
    }

    /// Between two threads: which side of a flag lacks its fence; where there is no flag, a barrier.
    fn missing_order(
        &self,
        cx: &Context<'_, '_>,
        lane: usize,
        conflict: &Conflict,
        other: &Other,
        space: Space,
    ) -> String {
        let is_near = other.block == u64::from(cx.block);
        let fence = if is_near { "__threadfence_block()" } else { "__threadfence()" };
        let flag = "the flag or atomic that passes it on";
        let released = cx.places.release_of(cx.numbering, conflict.who, conflict.time);
        let seen = self.seen.get(lane);
        let has_seen = seen.is_some_and(|seen| seen.knows(cx.numbering, conflict.who, conflict.time));
        let acquires = self.acquired >> lane & 1 == 1;
        let has_heard = self.heard_of(cx, lane, conflict);
        if !is_near && self.known[lane].is_over(cx.numbering, conflict.who, conflict.time) {
            return "the arrival or the wait that passes it on reaches no further than its block, which is what it does unless told: \
                    mbarrier.arrive.release.cluster there and mbarrier.try_wait.acquire.cluster here"
                .to_owned();
        }
        match released {
            Some(Scope::Cta) if !is_near => format!(
                "the other side's fence reaches no further than its block (__threadfence_block, .cta), and this is another \
                 block: {fence} is needed"
            ),
            Some(_) if has_seen => format!(
                "the other side has its fence; on this side one is missing: {fence} between the read of {flag} and this access"
            ),
            Some(_) => format!(
                "the other side has a fence and releases it, but this thread has not read what it was released through: read \
                 {flag}, then {fence}, then this"
            ),
            None if acquires && (!is_near || has_heard) => format!(
                "this side has its fence; on the other side one is missing: {fence} between its access and its store to {flag}"
            ),
            None if !is_near && space == Space::Shared => {
                "nothing orders the two blocks: a cluster barrier (barrier.cluster, cluster.sync()) between the accesses is missing"
                    .to_owned()
            }
            None if !is_near && !has_heard => format!(
                "nothing orders the two blocks: a barrier of the whole grid (grid.sync()) is missing, or a flag or atomic with a \
                 fence ({fence}) on both sides"
            ),
            None if !is_near || has_heard => format!(
                "nothing orders the two {}: a fence ({fence}) is missing on both sides of a flag or atomic",
                if is_near { "threads" } else { "blocks" }
            ),
            None if other.thread / 32 != self.index => {
                "nothing orders the two warps: __syncthreads() or a named barrier between the accesses is missing"
                    .to_owned()
            }
            // One pair of threads is told, and it may be that other warps access the same place.
            None if cx.shape.threads() > 32 => {
                "nothing orders the two lanes: __syncthreads() between the accesses is missing, or __syncwarp() where only lanes of one \
                 warp share this"
                    .to_owned()
            }
            None => {
                "nothing orders the two lanes: __syncwarp() or a barrier between the accesses is missing".to_owned()
            }
        }
    }
}

/// Of an asynchronous access and an ordinary one that came first in this run: which of the two was meant to cannot be known, unless the
/// issuing thread made both.
fn unordered(by: Who, is_issuer: bool) -> String {
    let wait = match by {
        Who::Copies => "cp.async.wait_group and a barrier",
        Who::BulkReads => "cp.async.bulk.wait_group.read and a barrier",
        Who::BulkWrites => "cp.async.bulk.wait_group and a barrier",
        Who::Wgmma => "wgmma.wait_group and a barrier",
        Who::Mbarrier(_) | Who::Lane => "a wait for its mbarrier",
    };
    match is_issuer {
        true => format!(
            "the asynchronous access is in flight, issued by this very thread before: {wait} must come between"
        ),
        false => format!(
            "nothing orders the two: if the asynchronous access is to come second, a barrier before its issue is missing; if first, {wait}"
        ),
    }
}
