//! The simulator's counters: exact instruction mix, sectors and bank conflicts, by source line, without a GPU.

use std::collections::BTreeMap;

use evosdpa_core::Problem;
use evosdpa_oracle::inputs::Inputs;
use serde::{Deserialize, Serialize};

use super::{
    insight::{Bottleneck, Evidence, Insight},
    knob::{Knob, hints},
};
use crate::{Error, device::Sim};

/// Source lines that are kept, those with most conflicts first.
const LINES: usize = 12;
/// From this share of all arithmetic on, that outside the tensor cores is worth saying.
const SCALAR_SHARE: f64 = 0.5;

/// What a launch executed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counted {
    /// The problem it was counted on.
    pub problem: String,
    /// Warp instructions by class.
    pub warp_instructions: BTreeMap<String, u64>,
    /// Floating-point operations outside the tensor cores.
    pub flops: u64,
    /// Operations of the tensor cores.
    pub tensor_ops: u64,
    /// 32-byte sectors of global memory asked for.
    pub global_sectors: u64,
    /// Bytes of global memory asked for by lanes.
    pub global_bytes: u64,
    /// Passes over shared memory.
    pub shared_wavefronts: u64,
    /// Passes beyond those the access sizes need.
    pub shared_conflicts: u64,
    /// Times a warp waited at a barrier of its block.
    pub barrier_waits: u64,
    /// Source lines with conflicts.
    pub conflict_lines: Vec<Line>,
}

/// Shared-memory passes of a source line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Line {
    /// `file:line`.
    pub source: String,
    /// Passes taken.
    pub wavefronts: u64,
    /// Passes beyond those needed.
    pub conflicts: u64,
}

impl Counted {
    /// Runs a kernel on the simulator and counts.
    pub fn of(sim: &Sim, kernel: &str, problem: &Problem) -> Result<Self, Error> {
        let inputs = Inputs::timed(problem, 0);
        let counters = sim.count(kernel, problem, &inputs)?;
        // Through JSON, whose field names are the simulator's public promise.
        let value =
            serde_json::to_value(&counters).map_err(|error| Error::Report { why: error.to_string() })?;
        let mut counted: Self =
            serde_json::from_value(value).map_err(|error| Error::Report { why: error.to_string() })?;
        counted.problem = problem.to_string();
        let worst = counters.conflict_lines().into_iter().take(LINES).map(|line| Line {
            source: line.source.clone(),
            wavefronts: line.counts.shared_wavefronts,
            conflicts: line.counts.shared_conflicts,
        });
        counted.conflict_lines = worst.collect();
        Ok(counted)
    }

    /// Conflicts over passes.
    pub fn conflict_share(&self) -> f64 {
        self.shared_conflicts as f64 / (self.shared_wavefronts as f64).max(1.0)
    }

    /// Bytes asked for over bytes fetched: 1 where every sector is used whole. Lanes that read the same bytes ask for more
    /// than is fetched.
    pub fn sector_use(&self) -> f64 {
        (self.global_bytes as f64 / (32.0 * self.global_sectors as f64).max(1.0)).min(1.0)
    }

    /// What the counts alone can say. Nothing here knows of time, so confidence stays below a half.
    pub fn insights(&self, has: &[String]) -> Vec<Insight> {
        let mut insights = Vec::new();
        let share = self.conflict_share();
        if share > 0.05 {
            let mut evidence = vec![Evidence::derived(
                "shared_conflicts / shared_wavefronts",
                100.0 * share,
                "%",
                "bank conflicts",
            )];
            let lines = self.conflict_lines.iter().take(3);
            evidence.extend(lines.map(|line| evidence_of_line(line, self.shared_conflicts)));
            insights.push(Insight {
                id: "2c-smem-conflicts".to_owned(),
                bottleneck: Bottleneck::SharedMemory,
                confidence: round(share.min(0.5)),
                evidence,
                suggestion: "Bank conflicts on the lines above: pad or swizzle what they read and write."
                    .to_owned(),
                tunables: hints(&[Knob::LessSharedTraffic], has),
            });
        }
        let used = self.sector_use();
        if self.global_sectors > 0 && used < 0.6 {
            insights.push(Insight {
                id: "2d-coalescing".to_owned(),
                bottleneck: Bottleneck::L2,
                confidence: round((0.5 * (1.0 - used)).min(0.5)),
                evidence: vec![Evidence::derived("global_bytes / (32 × global_sectors)", 100.0 * used, "%", "used of each sector")],
                suggestion: "Global accesses use a part of what they fetch: neighbouring lanes should read neighbouring 16 bytes."
                    .to_owned(),
                tunables: Vec::new(),
            });
        }
        if self.tensor_ops == 0 {
            insights.push(Insight {
                id: "3c-scalar".to_owned(),
                bottleneck: Bottleneck::Math,
                confidence: 0.4,
                evidence: vec![Evidence::derived("tensor_ops", 0.0, "", "no MMA on tensor cores")],
                suggestion: "QKᵀ and PV are computed by the arithmetic pipes: move both to the tensor cores."
                    .to_owned(),
                tunables: hints(&[Knob::TensorCores], has),
            });
        }
        insights.extend(self.softmax(has));
        insights.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
        insights
    }
}

impl Counted {
    /// Arithmetic outside the tensor cores that outnumbers what is on them.
    fn softmax(&self, has: &[String]) -> Option<Insight> {
        let of = |class: &str| self.warp_instructions.get(class).copied().unwrap_or_default();
        let (scalar, tensor) = (of("special") + of("convert") + of("float32") + of("half"), of("tensor"));
        let share = scalar as f64 / ((scalar + tensor) as f64).max(1.0);
        (tensor > 0 && share > SCALAR_SHARE).then(|| Insight {
            id: "3b-softmax".to_owned(),
            bottleneck: Bottleneck::Softmax,
            confidence: round(0.5 * share),
            evidence: vec![Evidence::derived(
                "scalar / (scalar + tensor) instructions",
                100.0 * share,
                "%",
                "exponentials, conversions and arithmetic beside the tensor cores",
            )],
            suggestion: "Scalar instructions outnumber those of the tensor cores: cheaper exponentials, fewer conversions, \
                         scores that stay in registers."
                .to_owned(),
            tunables: hints(&[Knob::CheaperSoftmax, Knob::LessSharedTraffic], has),
        })
    }
}

fn round(confidence: f64) -> f64 {
    (confidence * 100.0).round() / 100.0
}

fn evidence_of_line(line: &Line, all: u64) -> Evidence {
    let share = 100.0 * line.conflicts as f64 / (all as f64).max(1.0);
    Evidence::derived(&line.source, share, "%", "of all conflicts are on this line")
}
