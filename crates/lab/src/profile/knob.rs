//! Which tunables address which bottleneck: how an insight becomes a candidate.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What can be turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knob {
    /// More tiles in flight.
    DeeperPipeline,
    /// More warps that fetch.
    MoreProducers,
    /// Fewer rows per block, so that there are more blocks.
    FewerRows,
    /// More rows per block, so that K and V are used more often.
    MoreRows,
    /// More keys per tile: fewer barriers and rescales.
    MoreKeys,
    /// Fewer keys per tile: fewer registers, less shared memory.
    FewerKeys,
    /// The keys of one Q tile shared out among more warps or blocks.
    SplitKeys,
    /// More blocks per SM.
    Occupancy,
    /// Blocks that take several work items, dealt out fairly.
    Persistence,
    /// MMAs and softmax overlapped.
    Overlap,
    /// Cheaper exponentials and rescales.
    CheaperSoftmax,
    /// More of the work on tensor cores.
    TensorCores,
    /// Fewer registers.
    FewerRegisters,
    /// Arithmetic in place of table look-ups in shared memory, and scores that stay in registers.
    LessSharedTraffic,
    /// Fewer threads of a CPU.
    FewerThreads,
}

/// Which way to turn a tunable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Towards larger values; for a toggle, on.
    Up,
    /// Towards smaller values; for a toggle, off.
    Down,
}

/// A tunable to try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hint {
    /// Its name.
    pub name: String,
    /// Which way.
    pub direction: Direction,
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arrow = match self.direction {
            Direction::Up => '↑',
            Direction::Down => '↓',
        };
        write!(f, "{}{arrow}", self.name)
    }
}

use Direction::{Down, Up};

/// The tunables that turn a knob, by the names that manifests use.
fn turned_by(knob: Knob) -> &'static [(&'static str, Direction)] {
    match knob {
        Knob::DeeperPipeline => &[("STAGES", Up), ("USE_CP_ASYNC", Up), ("Q_STAGES", Up)],
        Knob::MoreProducers => &[("NUM_PRODUCER_WARPS", Up), ("USE_WARP_SPECIALIZATION", Up)],
        Knob::FewerRows => &[("BLOCK_M", Down), ("CONSUMERS", Down), ("WG_M", Down), ("WARPS_M", Down)],
        Knob::MoreRows => &[("BLOCK_M", Up), ("CONSUMERS", Up), ("WG_M", Up), ("BLOCK_Q", Up)],
        Knob::MoreKeys => &[("BLOCK_N", Up), ("MAX_BLOCK_N", Up), ("BLOCK_KV", Up)],
        Knob::FewerKeys => &[("BLOCK_N", Down), ("MAX_BLOCK_N", Down)],
        Knob::SplitKeys => &[("CLUSTER", Up), ("WG_N", Up), ("WARPS_N", Up), ("KEYS_PER_WARP", Down)],
        Knob::Occupancy => &[("CTAS_PER_SM", Up)],
        Knob::Persistence => &[("PERSISTENT", Up), ("USE_PERSISTENT_CTA", Up), ("PAIRED", Up)],
        Knob::Overlap => &[("PINGPONG", Up)],
        Knob::CheaperSoftmax => &[("USE_FAST_EXP", Up), ("SKIP_RESCALE", Up), ("WEIGHT_PARTS", Down)],
        Knob::TensorCores => &[("USE_WMMA_PV", Up)],
        Knob::FewerRegisters => {
            &[("BLOCK_N", Down), ("Q_IN_REGS", Down), ("SPLIT_PRECISE_LOOP", Down), ("CTAS_PER_SM", Down)]
        }
        Knob::LessSharedTraffic => &[("USE_FUSED_SOFTMAX", Up), ("USE_KV_LUT", Down), ("Q_IN_REGS", Up)],
        Knob::FewerThreads => &[("THREADS", Down)],
    }
}

/// The tunables of a kernel that turn these knobs, the first knob's first, each once.
pub fn hints(knobs: &[Knob], has: &[String]) -> Vec<Hint> {
    let mut hints: Vec<Hint> = Vec::new();
    for (name, direction) in knobs.iter().flat_map(|knob| turned_by(*knob)) {
        let known = has.iter().any(|tunable| tunable == name);
        if known && !hints.iter().any(|hint| hint.name == *name) {
            hints.push(Hint { name: (*name).to_owned(), direction: *direction });
        }
    }
    hints
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name in the table that no kernel has would never be a hint.
    #[test]
    fn every_name_is_a_tunable_of_some_kernel() {
        let registry = evosdpa_kernels::Registry::embedded().unwrap();
        let problem = evosdpa_core::Problem::new("tiny".parse().unwrap(), evosdpa_core::DType::F32).unwrap();
        let of_cpu = crate::evolve::Space::of_cpu(&problem, 2).unwrap();
        let has: Vec<&str> = registry
            .kernels()
            .flat_map(|k| k.manifest.tunables.iter().map(|tunable| tunable.name.as_str()))
            .chain(of_cpu.dimensions.iter().map(|dimension| dimension.name.as_str()))
            .collect();
        let all = [
            Knob::DeeperPipeline,
            Knob::MoreProducers,
            Knob::FewerRows,
            Knob::MoreRows,
            Knob::MoreKeys,
            Knob::FewerKeys,
            Knob::SplitKeys,
            Knob::Occupancy,
            Knob::Persistence,
            Knob::Overlap,
            Knob::CheaperSoftmax,
            Knob::TensorCores,
            Knob::FewerRegisters,
            Knob::LessSharedTraffic,
            Knob::FewerThreads,
        ];
        for (name, _) in all.iter().flat_map(|knob| turned_by(*knob)) {
            assert!(has.contains(name), "{name}");
        }
    }

    #[test]
    fn hints_keep_to_what_the_kernel_has() {
        let has = ["STAGES".to_owned(), "BLOCK_M".to_owned()];
        let hints = hints(&[Knob::FewerRows, Knob::DeeperPipeline, Knob::MoreRows], &has);
        let expected = [("BLOCK_M", Direction::Down), ("STAGES", Direction::Up)];
        assert_eq!(hints.len(), 2);
        for (hint, (name, direction)) in hints.iter().zip(expected) {
            assert_eq!((hint.name.as_str(), hint.direction), (name, direction));
        }
    }
}
