//! The metrics the lab knows, by architecture: their names in the profiler, their units, and which it cannot do without.
//!
//! Names as Nsight Compute prints them: <https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html>. Where versions
//! differ an entry has several names; the first that the capture has is taken.

use evosdpa_kernels::Arch;

/// A quantity the diagnosis uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Metric {
    /// Time of the launch under the profiler: cold caches, and no benchmark number.
    Duration,
    /// Busiest unit of the SMs, of what is possible.
    SmThroughput,
    /// Busiest part of the memory system, caches and shared memory included.
    MemoryThroughput,
    /// Device memory.
    DramThroughput,
    /// L2.
    L2Throughput,
    /// First-level cache and shared memory.
    L1Throughput,
    /// Tensor cores over the whole launch and all SMs.
    TensorPipe,
    /// Tensor cores while an SM had work.
    TensorPipeActive,
    /// Fused multiply-add pipe while an SM had work.
    FmaPipe,
    /// Integer and logic pipe.
    AluPipe,
    /// Special functions and conversions.
    XuPipe,
    /// Loads, stores, shared memory.
    LsuPipe,
    /// Bytes read from device memory.
    DramReadBytes,
    /// Bytes written to device memory.
    DramWriteBytes,
    /// Hits in L2.
    L2HitRate,
    /// Passes over shared memory.
    SharedWavefronts,
    /// Of those, passes that bank conflicts added.
    SharedConflicts,
    /// Of each sector that a global load fetched, what was used. TMA is not seen here.
    LoadSectorUse,
    /// Warps resident, of what is possible, while an SM had work.
    WarpsActive,
    /// Cycles in which a scheduler issued an instruction.
    IssueActive,
    /// Cycles an SM had work: mean over all.
    SmActiveMean,
    /// The same of the busiest.
    SmActiveMost,
    /// The same of the idlest.
    SmActiveLeast,
    /// Registers per thread.
    Registers,
    /// Dynamic shared memory of a block.
    SmemDynamicBytes,
    /// Launch over what fits on the machine at once.
    Waves,
    /// Blocks of the launch.
    GridBlocks,
    /// Blocks per SM that registers allow.
    LimitRegisters,
    /// Blocks per SM that shared memory allows.
    LimitShared,
    /// SMs.
    SmCount,
    /// Instructions executed by warps.
    Instructions,
    /// Instructions that move spilled registers.
    Spills,
    /// Instructions of TMA.
    TmaInstructions,
    /// Clock of the SMs during the launch, in Hz.
    SmClock,
    /// Clock of the memory.
    DramClock,
    /// Bytes the memory can move in a cycle.
    DramPeakPerCycle,
    /// Warps waiting for a reason, per instruction issued.
    Stall(Stall),
}

/// Declares the reasons from one list: what each means, its name here and its name in the metric.
macro_rules! stalls {
    ($($(#[$doc:meta])+ $reason:ident = $name:literal,)+) => {
        /// Why a warp does not issue.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Stall {
            $($(#[$doc])+ $reason,)+
        }

        impl Stall {
            /// Every reason; [`Stall::Gmma`] exists on Hopper alone.
            pub const ALL: &[Self] = &[$(Self::$reason,)+];

            /// Its metric's names, of which it has one.
            const fn metric_names(self) -> &'static [&'static str] {
                match self {
                    $(Self::$reason => {
                        &[concat!("smsp__average_warps_issue_stalled_", $name, "_per_issue_active.ratio")]
                    })+
                }
            }
        }
    };
}

stalls! {
    /// Waits for other warps at a barrier.
    Barrier = "barrier",
    /// A branch is being resolved.
    BranchResolving = "branch_resolving",
    /// The dispatcher holds back.
    Dispatch = "dispatch_stall",
    /// Stores are draining at the end.
    Drain = "drain",
    /// Waits for a warpgroup's MMA.
    Gmma = "gmma",
    /// A constant is not in its cache.
    ImcMiss = "imc_miss",
    /// The queue of global and local accesses is full.
    LgThrottle = "lg_throttle",
    /// Waits for global or local memory (on Hopper also for an mbarrier).
    LongScoreboard = "long_scoreboard",
    /// An arithmetic pipe is busy.
    MathPipe = "math_pipe_throttle",
    /// A memory fence.
    Membar = "membar",
    /// The queue of shared-memory and special-function instructions is full.
    MioThrottle = "mio_throttle",
    /// Something else.
    Misc = "misc",
    /// The next instruction is not in its cache.
    NoInstruction = "no_instruction",
    /// Ready, but another warp was chosen.
    NotSelected = "not_selected",
    /// Waits for shared memory or a special function.
    ShortScoreboard = "short_scoreboard",
    /// Sleeps.
    Sleeping = "sleeping",
    /// The texture queue is full.
    TexThrottle = "tex_throttle",
    /// A fixed latency between dependent instructions.
    Wait = "wait",
}

impl Stall {
    /// Its metric's name.
    pub const fn metric_name(self) -> &'static str {
        self.metric_names()[0]
    }
}

/// What a value counts, after units were brought to their base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Percent.
    Percent,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// Cycles per second.
    Hertz,
    /// A plain number.
    Count,
}

impl Unit {
    /// How it is written after a number.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Percent => "%",
            Self::Seconds => "s",
            Self::Bytes => "B",
            Self::Hertz => "Hz",
            Self::Count => "",
        }
    }
}

/// Whether the diagnosis can do without a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A capture without it is refused.
    Required,
    /// Evidence only where it is there: `n/a` on some launches, or absent from some versions.
    Optional,
}

/// A metric of one architecture.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// What it is.
    pub metric: Metric,
    /// Its names, the preferred first.
    pub names: &'static [&'static str],
    /// Section and label by which the long form calls it, where it does.
    pub label: Option<&'static str>,
    /// What it counts.
    pub unit: Unit,
    /// Whether the diagnosis can do without.
    pub need: Need,
}

/// The metrics of one architecture.
#[derive(Clone, Debug)]
pub struct Registry {
    arch: Arch,
    entries: Vec<Entry>,
}

impl Registry {
    /// The metrics of an architecture.
    pub fn of(arch: Arch) -> Self {
        let mut entries = COMMON.to_vec();
        if arch == Arch::Sm90a {
            entries.extend(HOPPER);
        }
        for &stall in Stall::ALL {
            if stall != Stall::Gmma || arch == Arch::Sm90a {
                entries.push(stall_entry(stall));
            }
        }
        Self { arch, entries }
    }

    /// The architecture.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Its metrics.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The names to ask the profiler for. One that a version does not know is left out of its capture without a word (seen
    /// with ncu 2025.3), and then missed here by name.
    pub fn asked_for(&self) -> impl Iterator<Item = &'static str> {
        self.entries.iter().map(|entry| entry.names[0])
    }
}

const fn required(
    metric: Metric,
    names: &'static [&'static str],
    label: Option<&'static str>,
    unit: Unit,
) -> Entry {
    Entry { metric, names, label, unit, need: Need::Required }
}

const fn optional(metric: Metric, names: &'static [&'static str], unit: Unit) -> Entry {
    Entry { metric, names, label: None, unit, need: Need::Optional }
}

fn stall_entry(stall: Stall) -> Entry {
    required(Metric::Stall(stall), stall.metric_names(), None, Unit::Count)
}

use Metric as M;
use Unit::{Bytes, Count, Hertz, Percent, Seconds};

const COMMON: &[Entry] = &[
    required(
        M::Duration,
        &["gpu__time_duration.sum"],
        Some("GPU Speed Of Light Throughput/Duration"),
        Seconds,
    ),
    required(
        M::SmThroughput,
        &["sm__throughput.avg.pct_of_peak_sustained_elapsed"],
        Some("GPU Speed Of Light Throughput/Compute (SM) Throughput"),
        Percent,
    ),
    required(
        M::MemoryThroughput,
        &["gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"],
        Some("GPU Speed Of Light Throughput/Memory Throughput"),
        Percent,
    ),
    required(
        M::DramThroughput,
        &[
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        ],
        Some("GPU Speed Of Light Throughput/DRAM Throughput"),
        Percent,
    ),
    required(
        M::L2Throughput,
        &["lts__throughput.avg.pct_of_peak_sustained_elapsed"],
        Some("GPU Speed Of Light Throughput/L2 Cache Throughput"),
        Percent,
    ),
    required(
        M::L1Throughput,
        &["l1tex__throughput.avg.pct_of_peak_sustained_active"],
        Some("GPU Speed Of Light Throughput/L1/TEX Cache Throughput"),
        Percent,
    ),
    required(
        M::TensorPipe,
        &["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"],
        None,
        Percent,
    ),
    required(
        M::TensorPipeActive,
        &["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"],
        None,
        Percent,
    ),
    required(M::FmaPipe, &["sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active"], None, Percent),
    required(M::AluPipe, &["sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active"], None, Percent),
    required(M::XuPipe, &["sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"], None, Percent),
    required(M::LsuPipe, &["sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active"], None, Percent),
    required(M::DramReadBytes, &["dram__bytes_read.sum"], None, Bytes),
    required(M::DramWriteBytes, &["dram__bytes_write.sum"], None, Bytes),
    required(M::SharedWavefronts, &["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"], None, Count),
    required(M::SharedConflicts, &["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"], None, Count),
    required(
        M::WarpsActive,
        &["sm__warps_active.avg.pct_of_peak_sustained_active"],
        Some("Occupancy/Achieved Occupancy"),
        Percent,
    ),
    required(M::IssueActive, &["smsp__issue_active.avg.pct_of_peak_sustained_active"], None, Percent),
    required(
        M::SmActiveMean,
        &["sm__cycles_active.avg"],
        Some("GPU Speed Of Light Throughput/SM Active Cycles"),
        Count,
    ),
    required(M::SmActiveMost, &["sm__cycles_active.max"], None, Count),
    required(M::SmActiveLeast, &["sm__cycles_active.min"], None, Count),
    required(
        M::Registers,
        &["launch__registers_per_thread"],
        Some("Launch Statistics/Registers Per Thread"),
        Count,
    ),
    required(M::Waves, &["launch__waves_per_multiprocessor"], Some("Launch Statistics/Waves Per SM"), Count),
    required(M::Instructions, &["smsp__inst_executed.sum"], None, Count),
    optional(M::SmemDynamicBytes, &["launch__shared_mem_per_block_dynamic"], Bytes),
    optional(M::GridBlocks, &["launch__grid_size"], Count),
    optional(M::LimitRegisters, &["launch__occupancy_limit_registers"], Count),
    optional(M::LimitShared, &["launch__occupancy_limit_shared_mem"], Count),
    optional(M::SmCount, &["launch__sm_count", "device__attribute_multiprocessor_count"], Count),
    optional(M::L2HitRate, &["lts__t_sector_hit_rate.pct"], Percent),
    optional(M::LoadSectorUse, &["smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct"], Percent),
    optional(
        M::Spills,
        &[
            "sass__inst_executed_register_spilling",
            "sass__inst_executed_register_spilling_mem_local",
            "derived__local_spilling_requests",
        ],
        Count,
    ),
    optional(M::SmClock, &["sm__cycles_elapsed.avg.per_second", "gpc__cycles_elapsed.avg.per_second"], Hertz),
    optional(M::DramClock, &["dram__cycles_elapsed.avg.per_second"], Hertz),
    optional(M::DramPeakPerCycle, &["dram__bytes.sum.peak_sustained"], Bytes),
];

const HOPPER: &[Entry] = &[optional(
    M::TmaInstructions,
    &[
        "smsp__sass_inst_executed_op_tma_ld.sum",
        "sm__inst_executed_pipe_tma.sum",
        "smsp__inst_executed_pipe_tma.sum",
    ],
    Count,
)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_the_warpgroup_stall_is_hoppers() {
        for arch in Arch::ALL {
            let registry = Registry::of(arch);
            let mut names: Vec<&str> =
                registry.entries().iter().flat_map(|entry| entry.names).copied().collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "{arch}");
            let has_gmma = registry.asked_for().any(|name| name.contains("_gmma_"));
            assert_eq!(has_gmma, arch == Arch::Sm90a);
            assert!(registry.asked_for().count() > 35);
        }
    }
}
