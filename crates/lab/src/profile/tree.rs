//! The decision tree: which counter decides what, in the order in which they matter.
//!
//! ```text
//! 0  spills, or the compiler serialised ............. resources
//! 1  a unit at 95 % of its peak or more ............. roofline
//! 2  memory system at 60 % or more, ahead of the SM . dram, l2, shared-memory
//! 3  SM at 60 % or more ............................. math, softmax, issue, shared-queue
//! 4  neither ........................................ grid where SMs idle, else by what warps wait for
//! ```
//!
//! The tree picks one leaf. Other leaves whose own condition holds follow it, the most certain first.

use super::{
    insight::{Bottleneck, Evidence, Insight},
    knob::{Knob, hints},
    metric::{Metric, Stall},
    roofline::Work,
    values::Values,
};

/// A unit this busy cannot do more, in percent.
const AT_PEAK: f64 = 95.0;
/// A unit this busy is what the kernel is bound by.
const BOUND: f64 = 60.0;
/// Bytes moved over bytes that had to move: more than this is reuse lost.
const REUSE_LOST: f64 = 1.2;
/// Passes over shared memory that conflicts added: more than this share matters.
const CONFLICTS: f64 = 0.05;
/// Shared memory this idle does not care about conflicts, in percent.
const SHARED_IDLE: f64 = 20.0;
/// Idle SMs: more than this share outweighs what the busy ones wait for.
const IDLE: f64 = 0.3;
/// A reason to wait with less than this share of all waiting is not worth a line.
const WORTH_SAYING: f64 = 0.15;
/// Spill instructions of all instructions: from this share on they come first.
const SPILLED: f64 = 0.01;
/// Of each fetched sector, less used than this is worth saying, in percent.
const SECTOR_USE: f64 = 60.0;

/// What a launch's counters say: the leaf of the tree first, then what else holds. `has` are the kernel's tunables,
/// `advisories` what the compiler warned of.
pub fn diagnose(values: &Values, work: Option<&Work>, has: &[String], advisories: &[String]) -> Vec<Insight> {
    let seen = Seen { values, work, has, advisories };
    let leaf = seen
        .resources()
        .filter(|_| seen.resources_come_first())
        .or_else(|| seen.roofline())
        .or_else(|| seen.memory())
        .or_else(|| seen.arithmetic())
        .unwrap_or_else(|| seen.underused());
    let mut others: Vec<Insight> =
        [seen.resources(), seen.grid(WORTH_SAYING), seen.layout(), seen.coalescing()]
            .into_iter()
            .flatten()
            .collect();
    others.extend(seen.waiting());
    others.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
    let mut insights = vec![leaf];
    for other in others {
        if insights.iter().all(|known| known.bottleneck != other.bottleneck) {
            insights.push(other);
        }
    }
    insights
}

struct Seen<'a> {
    values: &'a Values,
    work: Option<&'a Work>,
    has: &'a [String],
    advisories: &'a [String],
}

impl Seen<'_> {
    fn insight(
        &self,
        id: &str,
        bottleneck: Bottleneck,
        confidence: f64,
        evidence: Vec<Evidence>,
        suggestion: &str,
        knobs: &[Knob],
    ) -> Insight {
        Insight {
            id: id.to_owned(),
            bottleneck,
            confidence: (confidence.clamp(0.0, 1.0) * 100.0).round() / 100.0,
            evidence,
            suggestion: suggestion.to_owned(),
            tunables: hints(knobs, self.has),
        }
    }

    /// A metric as evidence; nothing where the capture does not have it.
    fn evidence(&self, metric: Metric, says: &str) -> Option<Evidence> {
        let (name, unit, value) = self.values.named(metric)?;
        Some(Evidence { metric: name.to_owned(), value, unit: unit.to_owned(), says: says.to_owned() })
    }

    fn several(&self, metrics: &[(Metric, &str)]) -> Vec<Evidence> {
        metrics.iter().filter_map(|(metric, says)| self.evidence(*metric, says)).collect()
    }

    fn value(&self, metric: Metric) -> f64 {
        self.values.required(metric)
    }

    fn uses_copy_engine(&self) -> bool {
        self.values.value(Metric::TmaInstructions).unwrap_or_default() > 0.0
    }

    // 0

    fn spill_share(&self) -> f64 {
        let spills = self.values.value(Metric::Spills).unwrap_or_default();
        spills / self.value(Metric::Instructions).max(1.0)
    }

    fn resources_come_first(&self) -> bool {
        !self.advisories.is_empty() || self.spill_share() >= SPILLED
    }

    fn resources(&self) -> Option<Insight> {
        let share = self.spill_share();
        if share == 0.0 && self.advisories.is_empty() {
            return None;
        }
        let mut evidence = self.several(&[(Metric::Spills, "instructions that move spilled registers")]);
        evidence.push(Evidence::derived(
            "spill share of instructions",
            100.0 * share,
            "%",
            "of all instructions executed",
        ));
        evidence
            .extend(self.advisories.iter().map(|text| Evidence::derived("ptxas advisory", 1.0, "", text)));
        evidence.extend(self.several(&[(Metric::Registers, "registers per thread")]));
        let confidence = if self.resources_come_first() { 1.0 } else { share / SPILLED };
        Some(self.insight(
            "0-resources",
            Bottleneck::Resources,
            confidence,
            evidence,
            "Free registers before anything else: smaller tiles per warp, fewer values kept across the loop, or fewer blocks \
             per SM asked of the compiler.",
            &[Knob::FewerRegisters],
        ))
    }

    // 1

    fn roofline(&self) -> Option<Insight> {
        let (sm, memory) = (self.value(Metric::SmThroughput), self.value(Metric::MemoryThroughput));
        (sm.max(memory) >= AT_PEAK).then(|| {
            let evidence = self.several(&[
                (Metric::SmThroughput, "busiest unit of the SMs"),
                (Metric::MemoryThroughput, "busiest part of the memory system"),
            ]);
            let text = "At the roofline: only another algorithm or a smaller dtype makes it faster.";
            self.insight(
                "1-roofline",
                Bottleneck::Roofline,
                past(sm.max(memory), AT_PEAK),
                evidence,
                text,
                &[],
            )
        })
    }

    // 2

    fn memory(&self) -> Option<Insight> {
        let (sm, memory) = (self.value(Metric::SmThroughput), self.value(Metric::MemoryThroughput));
        if memory < BOUND || memory < sm {
            return None;
        }
        let dram = self.value(Metric::DramThroughput);
        let (l2, l1) = (self.value(Metric::L2Throughput), self.value(Metric::L1Throughput));
        Some(if dram >= l2.max(l1) {
            self.dram(dram)
        } else if l2 >= l1 {
            let evidence = self.several(&[
                (Metric::L2Throughput, "L2"),
                (Metric::L2HitRate, "hits there"),
                (Metric::LoadSectorUse, "used of each sector fetched by ordinary loads"),
            ]);
            let text = "Every block fetches K and V from L2: more rows per block use each tile more \
                        often; a cluster can share one fetch (multicast).";
            self.insight(
                "2b-l2",
                Bottleneck::L2,
                past(l2, BOUND),
                evidence,
                text,
                &[Knob::MoreRows, Knob::MoreKeys],
            )
        } else {
            self.shared(past(l1, BOUND))
        })
    }

    fn dram(&self, percent: f64) -> Insight {
        let moved = self.value(Metric::DramReadBytes) + self.value(Metric::DramWriteBytes);
        let mut evidence = self.several(&[(Metric::DramThroughput, "device memory")]);
        let over = self.work.map(|work| moved / work.compulsory_bytes.max(1.0));
        if let Some(over) = over {
            evidence.push(Evidence::derived(
                "bytes moved / compulsory bytes",
                over,
                "×",
                "1 means that nothing is fetched twice",
            ));
        }
        if over.is_some_and(|over| over > REUSE_LOST) {
            let text = "More bytes move than must: larger Q tiles, another order of blocks (heads first), coalesced loads.";
            let knobs = [Knob::MoreRows, Knob::DeeperPipeline];
            self.insight("2a-dram-reuse", Bottleneck::Dram, past(percent, BOUND), evidence, text, &knobs)
        } else {
            let text = "Every byte moves once and the memory is the limit: keep more loads in flight; only a smaller dtype \
                        moves less.";
            let knobs = [Knob::DeeperPipeline];
            self.insight("2a-dram-floor", Bottleneck::Dram, past(percent, BOUND), evidence, text, &knobs)
        }
    }

    fn shared(&self, confidence: f64) -> Insight {
        let mut evidence = self.several(&[
            (Metric::L1Throughput, "first-level cache and shared memory"),
            (Metric::SharedWavefronts, "passes over shared memory"),
        ]);
        let share = self.values.conflict_share();
        evidence.push(conflict_evidence(share));
        if share > CONFLICTS {
            let text = "Bank conflicts: pad or swizzle what the conflicting accesses read and write.";
            return self.insight(
                "2c-smem-conflicts",
                Bottleneck::SharedMemory,
                confidence,
                evidence,
                text,
                &[],
            );
        }
        let text = "Shared memory is busy without conflicts: fewer trips through it. Keep scores, weights and Q in registers; \
                    wider accesses (ldmatrix); MMAs that read shared memory themselves (wgmma).";
        let knobs = [Knob::LessSharedTraffic, Knob::TensorCores, Knob::MoreRows];
        self.insight("2c-smem-traffic", Bottleneck::SharedMemory, confidence, evidence, text, &knobs)
    }

    // 3

    fn arithmetic(&self) -> Option<Insight> {
        let sm = self.value(Metric::SmThroughput);
        if sm < BOUND {
            return None;
        }
        let tensor = self.value(Metric::TensorPipeActive);
        let pipes = [
            (Metric::FmaPipe, self.value(Metric::FmaPipe)),
            (Metric::AluPipe, self.value(Metric::AluPipe)),
            (Metric::XuPipe, self.value(Metric::XuPipe)),
            (Metric::LsuPipe, self.value(Metric::LsuPipe)),
        ];
        // Four pipes, so there is a busiest.
        let (busiest, percent) = pipes.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        let evidence = self.several(&[
            (Metric::SmThroughput, "busiest unit of the SMs"),
            (Metric::TensorPipeActive, "tensor cores"),
            (Metric::FmaPipe, "fused multiply-adds"),
            (Metric::AluPipe, "integers, comparisons, maxima"),
            (Metric::XuPipe, "exponentials and conversions"),
            (Metric::LsuPipe, "loads, stores, shared memory"),
            (Metric::IssueActive, "cycles in which schedulers issued"),
        ]);
        let confidence = past(sm, BOUND);
        Some(if tensor >= BOUND && tensor >= percent {
            let text = "The tensor cores are the limit: overlap softmax with MMAs (ping-pong), larger MMAs per \
                        instruction, or 8-bit MMAs.";
            self.insight(
                "3a-math",
                Bottleneck::Math,
                confidence,
                evidence,
                text,
                &[Knob::Overlap, Knob::MoreKeys],
            )
        } else if tensor > percent {
            let text = "Schedulers issue most of the time: fewer instructions per MMA (larger instructions, fewer \
                        address computations, unrolled loops).";
            self.insight(
                "3d-issue",
                Bottleneck::Issue,
                confidence,
                evidence,
                text,
                &[Knob::MoreKeys, Knob::TensorCores],
            )
        } else if busiest == Metric::LsuPipe {
            self.shared(confidence)
        } else if tensor < 1.0 {
            let text = "QKᵀ and PV are computed by the arithmetic pipes: move both to the tensor cores.";
            self.insight("3c-scalar", Bottleneck::Math, confidence, evidence, text, &[Knob::TensorCores])
        } else {
            let text = "Softmax and conversions keep the arithmetic pipes busier than MMAs keep the tensor cores: cheaper \
                        exponentials, fewer rescales, fewer conversions, wider tiles.";
            let knobs = [Knob::CheaperSoftmax, Knob::MoreKeys, Knob::Overlap];
            self.insight("3b-softmax", Bottleneck::Softmax, confidence, evidence, text, &knobs)
        })
    }

    // 4

    fn underused(&self) -> Insight {
        if let Some(grid) = self.grid(IDLE) {
            return grid;
        }
        // There are always reasons to wait: the registry requires them.
        self.waiting().into_iter().next().unwrap_or_else(|| {
            let text = "Nothing is busy and nothing waits: the launch is too short to say.";
            self.insight("4-unknown", Bottleneck::Latency, 0.0, Vec::new(), text, &[])
        })
    }

    fn grid(&self, idle_from: f64) -> Option<Insight> {
        let idle = 1.0 - self.values.balance();
        if idle < idle_from {
            return None;
        }
        let mut evidence = self.several(&[
            (Metric::SmActiveMean, "cycles an SM had work, mean"),
            (Metric::SmActiveMost, "the busiest"),
            (Metric::SmActiveLeast, "the idlest"),
            (Metric::GridBlocks, "blocks"),
            (Metric::SmCount, "SMs"),
            (Metric::Waves, "of what fits at once"),
        ]);
        evidence.insert(0, Evidence::derived("idle share of SMs", 100.0 * idle, "%", "1 − mean/busiest"));
        let text = "SMs idle while others work: more and smaller blocks, keys split over blocks, or persistent \
                    blocks that share the work out evenly.";
        let knobs = [Knob::SplitKeys, Knob::FewerRows, Knob::Persistence];
        Some(self.insight("4-grid", Bottleneck::Grid, idle, evidence, text, &knobs))
    }

    /// One insight for each group of reasons to wait that is worth saying, the largest first.
    fn waiting(&self) -> Vec<Insight> {
        let shares = self.values.stall_shares();
        let mut groups: Vec<(Group, f64)> = Vec::new();
        for (stall, share) in &shares {
            let group = group_of(*stall, self.uses_copy_engine());
            match groups.iter_mut().find(|(known, _)| *known == group) {
                Some((_, total)) => *total += share,
                None => groups.push((group, *share)),
            }
        }
        groups.sort_by(|a, b| b.1.total_cmp(&a.1));
        let worth = groups.iter().enumerate().filter(|(i, (_, share))| *i == 0 || *share >= WORTH_SAYING);
        worth.map(|(_, (group, share))| self.wait_insight(*group, *share, &shares)).collect()
    }

    fn wait_insight(&self, group: Group, share: f64, shares: &[(Stall, f64)]) -> Insight {
        let copies = self.uses_copy_engine();
        let mut evidence: Vec<Evidence> = shares
            .iter()
            .filter(|(stall, share)| group_of(*stall, copies) == group && *share >= 0.01)
            .map(|(stall, share)| {
                Evidence::derived(stall.metric_name(), 100.0 * share, "%", "of all waiting")
            })
            .collect();
        evidence.extend(self.several(&[(Metric::IssueActive, "cycles in which schedulers issued")]));
        let (id, bottleneck, text, knobs): (&str, _, &str, &[Knob]) = match group {
            Group::Gmma => (
                "4-overlap",
                Bottleneck::Overlap,
                "Warps wait for their own MMAs: keep one group in flight and do softmax under it.",
                &[Knob::Overlap, Knob::MoreKeys],
            ),
            Group::Arrival => (
                "4-producer",
                Bottleneck::Producer,
                "Consumers wait for tiles: a deeper ring, larger copies, multicast in a cluster; with one tile per block, \
                 start the first copy earlier.",
                &[Knob::DeeperPipeline, Knob::MoreProducers, Knob::SplitKeys, Knob::Occupancy],
            ),
            Group::Barrier => (
                "4-synchronisation",
                Bottleneck::Synchronisation,
                "Warps wait for each other: fewer barriers per tile (more keys each), named barriers or mbarriers between \
                 only those that depend on each other, warps with equal work.",
                &[Knob::MoreKeys, Knob::MoreProducers, Knob::DeeperPipeline],
            ),
            Group::Loads => {
                evidence.extend(self.several(&[
                    (Metric::WarpsActive, "warps resident"),
                    (Metric::LimitRegisters, "blocks per SM by registers"),
                    (Metric::LimitShared, "blocks per SM by shared memory"),
                ]));
                (
                    "4-latency",
                    Bottleneck::Latency,
                    "Loads are waited for: ask for them earlier (deeper cp.async ring), keep more of them in flight, or have \
                     more warps to switch to.",
                    &[Knob::DeeperPipeline, Knob::MoreProducers, Knob::Occupancy, Knob::FewerRows],
                )
            }
            Group::Shared => {
                evidence.push(conflict_evidence(self.values.conflict_share()));
                evidence.extend(self.several(&[(Metric::XuPipe, "exponentials and conversions")]));
                (
                    "4-shared-queue",
                    Bottleneck::SharedQueue,
                    "Shared memory and special functions share one queue, and it is waited for: fewer and wider shared \
                     accesses, scores and weights in registers, no bank conflicts.",
                    &[Knob::LessSharedTraffic, Knob::CheaperSoftmax, Knob::TensorCores],
                )
            }
            Group::Issue => (
                "4-issue",
                Bottleneck::Issue,
                "Instructions wait for the one before: independent chains (two rows or tiles at once), or more warps.",
                &[Knob::Occupancy, Knob::MoreKeys, Knob::SplitKeys],
            ),
            Group::Instructions => (
                "4-instruction-cache",
                Bottleneck::InstructionCache,
                "The code does not stay in the instruction cache: unroll less, fewer variants of the loop.",
                &[Knob::FewerKeys],
            ),
        };
        self.insight(id, bottleneck, share, evidence, text, knobs)
    }

    // Beside the tree

    fn layout(&self) -> Option<Insight> {
        let share = self.values.conflict_share();
        let busy = self.value(Metric::L1Throughput) >= SHARED_IDLE;
        (share > CONFLICTS && busy).then(|| self.shared(share.max(0.3)))
    }

    /// Loads that fetch more than they use. TMA's loads are not seen by this counter, so it speaks only for
    /// kernels without.
    fn coalescing(&self) -> Option<Insight> {
        let used = self.values.value(Metric::LoadSectorUse)?;
        (used < SECTOR_USE && !self.uses_copy_engine()).then(|| {
            let evidence = self.several(&[(Metric::LoadSectorUse, "used of each sector fetched")]);
            let text = "Global loads use a part of what they fetch: neighbouring lanes should read neighbouring 16 bytes.";
            let confidence = (1.0 - used / 100.0) * self.value(Metric::L2Throughput).max(10.0) / 100.0;
            self.insight("2d-coalescing", Bottleneck::L2, confidence, evidence, text, &[])
        })
    }
}

/// Reasons to wait that have the same remedy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    Gmma,
    /// Tiles that TMA brings: consumers see them as a barrier, a load or sleep.
    Arrival,
    Barrier,
    Loads,
    Shared,
    Issue,
    Instructions,
}

fn group_of(stall: Stall, copy_engine: bool) -> Group {
    match stall {
        Stall::Gmma => Group::Gmma,
        Stall::Barrier | Stall::LongScoreboard | Stall::Sleeping | Stall::Membar if copy_engine => {
            Group::Arrival
        }
        Stall::Barrier | Stall::Membar | Stall::Sleeping => Group::Barrier,
        Stall::LongScoreboard | Stall::LgThrottle | Stall::TexThrottle | Stall::Drain => Group::Loads,
        Stall::ShortScoreboard | Stall::MioThrottle => Group::Shared,
        Stall::NoInstruction | Stall::ImcMiss => Group::Instructions,
        Stall::Wait
        | Stall::Dispatch
        | Stall::MathPipe
        | Stall::BranchResolving
        | Stall::Misc
        | Stall::NotSelected => Group::Issue,
    }
}

fn conflict_evidence(share: f64) -> Evidence {
    Evidence::derived("bank-conflict share of passes", 100.0 * share, "%", "of the passes over shared memory")
}

/// How sure a value past its threshold makes: half at the threshold, whole at 100 %.
fn past(percent: f64, threshold: f64) -> f64 {
    0.5 + 0.5 * (percent - threshold) / (100.0 - threshold)
}
