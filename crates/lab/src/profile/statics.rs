//! What the compiler knows of a kernel: the view that needs no counters.

use std::collections::BTreeMap;

use evosdpa_cuda::Builder;
use evosdpa_kernels::{Registry, Target};
use serde::{Deserialize, Serialize};

use super::{
    insight::{Bottleneck, Evidence, Insight},
    knob::{Knob, hints},
};
use crate::{
    Error,
    gate::resources,
    variants::{Request, Selection},
};

/// Resources and occupancy of a compiled variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Statics {
    /// What it was compiled for.
    pub arch: String,
    /// Its tunables.
    pub tunables: BTreeMap<String, i64>,
    /// Registers per thread.
    pub registers: u32,
    /// Static and dynamic shared memory of a block.
    pub smem_bytes: u32,
    /// Stack per thread.
    pub stack_bytes: u32,
    /// Spill stores and loads.
    pub spill_bytes: u32,
    /// Threads of a block.
    pub threads_per_block: u32,
    /// Blocks on an SM at once.
    pub blocks_per_sm: u32,
    /// Warps at once, of what is possible.
    pub occupancy: f64,
    /// What keeps another block from fitting.
    pub limited_by: String,
    /// What the compiler warns of.
    pub advisories: Vec<String>,
}

/// Occupancy below which there are few warps to switch to.
const FEW_WARPS: f64 = 0.25;

impl Statics {
    /// What the compiler's view alone can say.
    pub fn insights(&self, has: &[String]) -> Vec<Insight> {
        insights(self.spill_bytes, self.occupancy, &self.advisories, has)
    }
}

/// What spills, warps at once (of what is possible) and the compiler's warnings can say. Nothing here knows of time, so
/// confidence stays at or below a half. `has` are the kernel's tunables.
pub fn insights(spill_bytes: u32, occupancy: f64, advisories: &[String], has: &[String]) -> Vec<Insight> {
    let insight = |id: &str, bottleneck, confidence, evidence, suggestion: &str, knobs: &[Knob]| Insight {
        id: id.to_owned(),
        bottleneck,
        confidence,
        evidence,
        suggestion: suggestion.to_owned(),
        tunables: hints(knobs, has),
    };
    let mut all = Vec::new();
    if spill_bytes > 0 || !advisories.is_empty() {
        let mut evidence = vec![Evidence::derived(
            "spill stores and loads",
            f64::from(spill_bytes),
            "byte",
            "per thread, in the code",
        )];
        evidence.extend(advisories.iter().map(|text| Evidence::derived("ptxas advisory", 1.0, "", text)));
        all.push(insight(
            "0-resources",
            Bottleneck::Resources,
            0.5,
            evidence,
            "Free registers before anything else: smaller tiles per warp, or fewer values kept across the loop.",
            &[Knob::FewerRegisters, Knob::FewerRows],
        ));
    }
    let warps = vec![Evidence::derived(
        "warps at once, of what is possible",
        100.0 * occupancy,
        "%",
        "by registers, shared memory and threads",
    )];
    all.push(if occupancy < FEW_WARPS {
        insight(
            "s-few-warps",
            Bottleneck::Latency,
            0.4,
            warps,
            "Few warps are resident, so latency shows: smaller tiles let more blocks share an SM, and a deeper \
             pipeline hides more.",
            &[Knob::Occupancy, Knob::FewerKeys, Knob::DeeperPipeline],
        )
    } else {
        insight(
            "4-latency",
            Bottleneck::Latency,
            0.3,
            warps,
            "Enough warps are resident: what is left is waiting inside each of them. Fetch further ahead, or let other warps \
             fetch.",
            &[Knob::DeeperPipeline, Knob::MoreProducers],
        )
    });
    all
}

/// Compiles a kernel (`sdpa_v2c`, with or without tunables) and says what it uses; an error text where it cannot.
pub fn look(
    registry: &Registry,
    request: &Request,
    kernel: &str,
    target: &Target,
) -> Result<Result<Statics, String>, Error> {
    let mut selection = Selection::default();
    selection.add(registry.kernel(kernel)?, &Request { targets: vec![*target], ..request.clone() })?;
    let Some(job) = selection.jobs.first() else {
        let why = selection
            .refused
            .first()
            .map_or("nothing to build".to_owned(), |refused| refused.gate.detail.clone());
        return Ok(Err(why));
    };
    let row = match Builder::new() {
        Ok(builder) => resources::check(job, builder.build(&job.variant), None)?,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let Some((usage, filling)) =
        row.usage.as_ref().and_then(|usage| Some((usage, usage.occupancy.as_ref()?)))
    else {
        return Ok(Err(row.verdict().to_string()));
    };
    Ok(Ok(Statics {
        arch: target.arch.name().to_owned(),
        tunables: row.tunables.clone(),
        registers: usage.registers,
        smem_bytes: usage.smem_static_bytes + usage.smem_dynamic_bytes.unwrap_or_default(),
        stack_bytes: usage.stack_bytes,
        spill_bytes: usage.spill_store_bytes + usage.spill_load_bytes,
        threads_per_block: filling.threads_per_block,
        blocks_per_sm: filling.blocks_per_sm,
        occupancy: filling.fraction,
        limited_by: filling.limited_by.to_owned(),
        advisories: row.notes.iter().filter(|note| note.starts_with("ptxas C75")).cloned().collect(),
    }))
}
