//! The compile and the resource gate: what a compiled variant uses, held against its manifest's limits.
//!
//! The numbers are the compiler's own; the cubin and, where there is a GPU, the driver must agree with them.

use std::{collections::BTreeMap, path::Path};

use evosdpa_core::file;
use evosdpa_cuda::{
    Artifact, Device, Limiter, Origin, ResourceReport,
    ptxas::{self, Callee, Entry},
    resources,
};
use evosdpa_kernels::{Arch, LimitRules, Limits, Registry};
use serde::Serialize;

use crate::{
    Error, ErrorKind,
    gate::{GateResult, Verdict},
    variants::{Job, Refused},
};

/// The gate that a source passes by compiling.
pub const COMPILE: &str = "compile";
/// The gate that holds resources against limits.
pub const RESOURCES: &str = "resources";

/// What is known of one built variant, or of one entry point in a log.
#[derive(Clone, Debug, Serialize)]
pub struct ResourceRow {
    /// The kernel; in a log, the entry point.
    pub kernel: String,
    /// What it was built for, where that is known.
    pub arch: Option<String>,
    /// What it reads, where that is known.
    pub dtype: Option<String>,
    /// The problem it was built for, where that is known.
    pub problem: Option<String>,
    /// Its tunables.
    pub tunables: BTreeMap<String, i64>,
    /// What it uses, if it compiled.
    pub usage: Option<Usage>,
    /// What it may use.
    pub limits: Limits,
    /// Whether it came from the cache.
    pub from_cache: Option<bool>,
    /// How long it took to compile, or to read from the cache.
    pub build_us: Option<f64>,
    /// What the compiler warns of, and anything else that is no failure.
    pub notes: Vec<String>,
    /// The gates it went through.
    pub gates: Vec<GateResult>,
}

/// What a variant uses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Usage {
    /// Registers per thread.
    pub registers: u32,
    /// Static shared memory per block.
    pub smem_static_bytes: u32,
    /// Dynamic shared memory per block; a log does not say.
    pub smem_dynamic_bytes: Option<u32>,
    /// Stack per thread, of the entry point and its callees.
    pub stack_bytes: u32,
    /// Spill stores, of the entry point or the worst of its callees.
    pub spill_store_bytes: u32,
    /// Spill loads, likewise.
    pub spill_load_bytes: u32,
    /// Named barriers; CUDA 11 does not say.
    pub barriers: Option<u32>,
    /// Functions that were not inlined.
    pub callees: Vec<Callee>,
    /// How it fills an SM; a log does not say enough.
    pub occupancy: Option<Filling>,
}

/// How a variant fills an SM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Filling {
    /// Threads per block.
    pub threads_per_block: u32,
    /// Blocks at once.
    pub blocks_per_sm: u32,
    /// Warps at once.
    pub warps_per_sm: u32,
    /// Warps at once, of what is possible.
    pub fraction: f64,
    /// What keeps another block from fitting.
    pub limited_by: &'static str,
}

impl ResourceRow {
    /// The first verdict that is not a pass, or a pass.
    pub fn verdict(&self) -> &Verdict {
        let verdicts = self.gates.iter().map(|gate| &gate.verdict);
        verdicts.into_iter().find(|verdict| !verdict.is_pass()).unwrap_or(&Verdict::Pass)
    }
}

impl From<Refused> for ResourceRow {
    fn from(refused: Refused) -> Self {
        Self {
            kernel: refused.kernel,
            arch: Some(refused.arch.name().to_owned()),
            dtype: Some(refused.dtype.name().to_owned()),
            problem: None,
            tunables: BTreeMap::new(),
            usage: None,
            limits: Limits::default(),
            from_cache: None,
            build_us: None,
            notes: Vec::new(),
            gates: vec![refused.gate],
        }
    }
}

/// The compiler's words: what it minds first, on the first line, then everything.
fn refused(log: &str) -> String {
    let log = log.trim();
    let minds = |line: &&str| line.contains("error") || line.contains("fatal");
    match log.lines().find(minds).or_else(|| log.lines().next()) {
        Some(first) if first.trim() == log => format!("does not compile: {log}"),
        Some(first) => format!("does not compile: {}\n{log}", first.trim()),
        None => "does not compile, and the compiler says nothing".to_owned(),
    }
}

/// The verdict on a resource report.
pub fn judge(report: &ResourceReport) -> GateResult {
    let failures: Vec<&str> =
        report.findings.iter().filter(|finding| finding.fails).map(|finding| finding.text.as_str()).collect();
    if failures.is_empty() {
        let detail = format!(
            "{} registers, {} bytes of shared memory; the cubin agrees",
            report.entry.resources.registers, report.smem_bytes
        );
        return GateResult::pass(RESOURCES, detail);
    }
    GateResult::fail(RESOURCES, failures.join("; "))
}

/// Puts what came of building a job through both gates; with a device of its architecture, the driver is asked too.
///
/// An error is about the environment. What is wrong with the kernel is in the row.
pub fn check(
    job: &Job,
    built: evosdpa_cuda::Result<Artifact>,
    device: Option<&Device>,
) -> Result<ResourceRow, Error> {
    let mut row = ResourceRow {
        kernel: job.variant.id.kernel.clone(),
        arch: Some(job.target.arch.name().to_owned()),
        dtype: Some(job.dtype.name().to_owned()),
        problem: Some(job.problem.to_string()),
        tunables: job.variant.id.tunables.to_map(),
        usage: None,
        limits: job.variant.limits,
        from_cache: None,
        build_us: None,
        notes: Vec::new(),
        gates: Vec::new(),
    };
    let artifact = match built {
        Ok(artifact) => artifact,
        Err(evosdpa_cuda::Error::Compile(error)) => {
            row.gates.push(GateResult::fail(COMPILE, refused(&error.log)));
            return Ok(row);
        }
        Err(error) => {
            row.gates.push(match error.kind() {
                ErrorKind::Kernel => GateResult::fail(COMPILE, error.to_string()),
                ErrorKind::Machine => GateResult::unavailable(COMPILE, error.to_string()),
                ErrorKind::Refused | ErrorKind::Caller => return Err(error.into()),
            });
            return Ok(row);
        }
    };
    row.from_cache = Some(artifact.origin == Origin::Cache);
    row.build_us = Some(artifact.time.as_secs_f64() * 1e6);
    let source = match artifact.origin {
        Origin::Compiled => "compiled",
        Origin::Cache => "from the cache",
        Origin::Precompiled => "precompiled, read",
    };
    row.gates.push(GateResult::pass(COMPILE, format!("{source} in {} ms", artifact.time.as_millis())));

    let mut report = match resources::gate(&artifact, &job.variant, &job.target) {
        Ok(report) => report,
        // A missing entry point, or a report that cannot be read: the source's doing.
        Err(error) => {
            row.gates.push(GateResult::fail(RESOURCES, error.to_string()));
            return Ok(row);
        }
    };
    if let Some(device) = device {
        let loaded = device.load(&artifact.code, &job.label())?;
        report.cross_check_driver(&loaded.function(&job.variant.entry)?.attributes()?);
    }
    row.usage = Some(usage(&report, job));
    row.notes = report.findings.iter().filter(|finding| !finding.fails).map(|f| f.text.clone()).collect();
    row.gates.push(judge(&report));
    Ok(row)
}

fn usage(report: &ResourceReport, job: &Job) -> Usage {
    let occupancy = report.occupancy;
    Usage {
        smem_dynamic_bytes: Some(job.variant.launch.dynamic_smem_bytes),
        occupancy: Some(Filling {
            threads_per_block: job.variant.launch.threads_per_block(),
            blocks_per_sm: occupancy.blocks_per_sm,
            warps_per_sm: occupancy.warps_per_sm,
            fraction: occupancy.fraction,
            limited_by: match occupancy.limiter {
                Limiter::Registers => "registers",
                Limiter::SharedMemory => "shared memory",
                Limiter::Warps => "warps",
                Limiter::Blocks => "blocks",
            },
        }),
        ..entry_usage(&report.entry)
    }
}

fn entry_usage(entry: &Entry) -> Usage {
    let own = &entry.resources;
    let worst = |own: u32, of: fn(&Callee) -> u32| entry.callees.iter().map(of).fold(own, u32::max);
    Usage {
        registers: own.registers,
        smem_static_bytes: own.smem_static_bytes,
        smem_dynamic_bytes: None,
        stack_bytes: entry.worst_stack_bytes(),
        spill_store_bytes: worst(own.spill_store_bytes, |callee| callee.spill_store_bytes),
        spill_load_bytes: worst(own.spill_load_bytes, |callee| callee.spill_load_bytes),
        barriers: own.barriers,
        callees: entry.callees.clone(),
        occupancy: None,
    }
}

/// Reads a saved `ptxas -v` log. Entry points that a kernel of the registry names are held against its limits.
pub fn from_log(path: &Path, registry: &Registry) -> Result<Vec<ResourceRow>, Error> {
    let unreadable = |problem: String| {
        let problem = format!(
            "{problem}. Expected what `ptxas -v` prints: compile with `nvcc -Xptxas -v` and save the standard error"
        );
        Error::Cuda(evosdpa_cuda::Error::Report { label: path.display().to_string(), problem })
    };
    let bytes = file::read(path, file::TEXT_BYTES_MAX)
        .map_err(|error| unreadable(format!("cannot be read: {error}")))?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(unreadable("it is empty".to_owned()));
    }
    let report = ptxas::Report::parse(&String::from_utf8_lossy(&bytes)).map_err(|error| match error {
        evosdpa_cuda::Error::Report { problem, .. } => unreadable(problem),
        other => other.into(),
    })?;
    // No function uses 0 registers: the line that says how many is not there.
    if let Some(cut) = report.entries.iter().find(|entry| entry.resources.registers == 0) {
        return Err(unreadable(format!("`{}` has no `Used N registers` line, so it is cut short", cut.name)));
    }
    let mut rows: Vec<ResourceRow> = report.entries.iter().map(|entry| log_row(entry, registry)).collect();
    for advisory in &report.advisories {
        // An advisory belongs to the entry point it names; one that names none may be about any of them.
        let names = |row: &ResourceRow| advisory.text.contains(&format!("'{}'", row.kernel));
        let about = rows.iter().position(names).unwrap_or(0);
        if advisory.fails() {
            rows[about].gates.insert(0, GateResult::fail(RESOURCES, advisory.describe()));
        } else {
            rows[about].notes.push(advisory.describe());
        }
    }
    Ok(rows)
}

fn log_row(entry: &Entry, registry: &Registry) -> ResourceRow {
    let arch: Option<Arch> = entry.arch.as_deref().and_then(|name| name.parse().ok());
    let kernel = registry.kernels().find(|kernel| kernel.manifest.entry == entry.name);
    let limits = kernel
        .zip(arch)
        .and_then(|(kernel, arch)| kernel.manifest.limits.get(&arch))
        .map(LimitRules::of_any_variant);
    let usage = entry_usage(entry);
    let gate = match (limits, kernel) {
        (Some(limits), _) => against_limits(entry, &limits),
        (None, Some(kernel)) => GateResult::unavailable(
            RESOURCES,
            format!("{} has no limits for {}", kernel.manifest_file, entry.arch.as_deref().unwrap_or("it")),
        ),
        (None, None) => GateResult::unavailable(RESOURCES, "no manifest names it, so it has no limits"),
    };
    ResourceRow {
        kernel: entry.name.clone(),
        arch: entry.arch.clone(),
        dtype: None,
        problem: None,
        tunables: BTreeMap::new(),
        usage: Some(usage),
        limits: limits.unwrap_or_default(),
        from_cache: None,
        build_us: None,
        notes: Vec::new(),
        gates: vec![gate],
    }
}

/// Limits on a log's numbers. Dynamic shared memory is not among them, so that limit can only be broken, never kept.
fn against_limits(entry: &Entry, limits: &Limits) -> GateResult {
    let numbers = [
        ("registers", entry.resources.registers, limits.registers),
        ("bytes of static shared memory", entry.resources.smem_static_bytes, limits.smem_bytes),
        ("bytes of stack", entry.worst_stack_bytes(), limits.stack_bytes),
        ("bytes of spills", entry.worst_spill_bytes(), limits.spill_bytes),
    ];
    let broken: Vec<String> = numbers
        .into_iter()
        .filter_map(|(what, used, limit)| {
            limit.filter(|limit| used > *limit).map(|limit| format!("{used} {what}, the limit is {limit}"))
        })
        .collect();
    if broken.is_empty() {
        GateResult::pass(RESOURCES, "within the limits of its manifest, as far as a log says")
    } else {
        GateResult::fail(RESOURCES, broken.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_of_a_refusal_has_the_compilers_words() {
        let log = "kernel.cu(3): warning: unused\nkernel.cu(7): error: expected a \";\"\n1 error detected";
        let said = refused(log);
        assert!(said.starts_with("does not compile: kernel.cu(7): error: expected a \";\"\n"), "{said}");
        assert!(said.ends_with(log));
        assert_eq!(refused("no such header\n"), "does not compile: no such header");
        assert_eq!(refused(" \n"), "does not compile, and the compiler says nothing");
    }
}
