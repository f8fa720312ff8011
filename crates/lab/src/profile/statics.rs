//! What the compiler knows of a kernel: the view that needs no counters.

use std::collections::BTreeMap;

use evosdpa_cuda::Builder;
use evosdpa_kernels::{Registry, Target};
use serde::{Deserialize, Serialize};

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
    /// Blocks on a multiprocessor at once.
    pub blocks_per_sm: u32,
    /// Warps at once, of what is possible.
    pub occupancy: f64,
    /// What keeps another block from fitting.
    pub limited_by: String,
    /// What the compiler warns of.
    pub advisories: Vec<String>,
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
