//! The resource gate: does a compiled variant keep its limits, and do all witnesses agree?

use evosdpa_kernels::{Target, Variant};

use crate::{
    Artifact, Error, FunctionAttributes, Occupancy, Result,
    cubin::CubinFacts,
    occupancy,
    ptxas::{Advisory, Entry},
};

/// Something the gate found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Whether the gate fails on it; else it is a warning.
    pub fails: bool,
    /// What was found, with the numbers.
    pub text: String,
}

/// Everything the gate knows of one variant.
#[derive(Clone, Debug)]
pub struct ResourceReport {
    /// The variant.
    pub label: String,
    /// The compiler's report on the entry point and its callees.
    pub entry: Entry,
    /// Static and dynamic shared memory of one block.
    pub smem_bytes: u32,
    /// How it fills the target's SMs.
    pub occupancy: Occupancy,
    /// What the compiler warns of.
    pub advisories: Vec<Advisory>,
    /// What is wrong or worth knowing.
    pub findings: Vec<Finding>,
}

impl ResourceReport {
    /// Whether nothing failed.
    pub fn passed(&self) -> bool {
        !self.findings.iter().any(|finding| finding.fails)
    }

    /// Holds the report against what the driver says of the loaded kernel.
    pub fn cross_check_driver(&mut self, attributes: &FunctionAttributes) {
        let resources = &self.entry.resources;
        let stack = self.entry.worst_stack_bytes();
        let mut findings = Vec::new();
        differ(&mut findings, "the driver", "registers", resources.registers, attributes.registers);
        differ(
            &mut findings,
            "the driver",
            "bytes of static shared memory",
            resources.smem_static_bytes,
            attributes.smem_static_bytes,
        );
        // The driver rounds the stack up and may add to it; less than the compiler reserved would be wrong.
        if attributes.local_bytes < stack {
            findings.push(fail(format!(
                "the compiler reports {stack} bytes of stack, the driver {} of local memory",
                attributes.local_bytes
            )));
        }
        self.findings.extend(findings);
    }
}

/// Runs the gate on a cubin.
///
/// An error means that the gate could not run; what it finds wrong with the kernel is in the report.
pub fn gate(artifact: &Artifact, variant: &Variant, target: &Target) -> Result<ResourceReport> {
    let report = artifact.report()?;
    let entry = report.entry(&variant.entry).ok_or_else(|| {
        let names: Vec<&str> = report.entries.iter().map(|entry| entry.name.as_str()).collect();
        let problem =
            format!("there is no entry point `{}`; the source has {}", variant.entry, names.join(", "));
        Error::Report { label: variant.label(), problem }
    })?;
    let smem_bytes = entry.resources.smem_static_bytes.saturating_add(variant.launch.dynamic_smem_bytes);
    let occupancy =
        occupancy(target.arch, variant.launch.threads_per_block(), entry.resources.registers, smem_bytes);

    let mut findings = Vec::new();
    limits(&mut findings, entry, smem_bytes, variant, target);
    if occupancy.blocks_per_sm == 0 {
        findings.push(fail(format!("no block fits on an SM of {}: {:?}", target.arch, occupancy.limiter)));
    }
    let cubin = CubinFacts::read(&artifact.code)?;
    cross_check_cubin(&mut findings, entry, &cubin);
    parameters(&mut findings, entry, variant, &cubin);
    findings.extend(
        report
            .advisories
            .iter()
            .map(|advisory| Finding { fails: advisory.fails(), text: advisory.describe() }),
    );
    Ok(ResourceReport {
        label: variant.label(),
        entry: entry.clone(),
        smem_bytes,
        occupancy,
        advisories: report.advisories.clone(),
        findings,
    })
}

fn limits(findings: &mut Vec<Finding>, entry: &Entry, smem_bytes: u32, variant: &Variant, target: &Target) {
    let limits = &variant.limits;
    for (what, used, limit) in [
        ("registers", entry.resources.registers, limits.registers),
        ("bytes of shared memory", smem_bytes, limits.smem_bytes),
        ("bytes of stack", entry.worst_stack_bytes(), limits.stack_bytes),
        ("bytes of spills", entry.worst_spill_bytes(), limits.spill_bytes),
    ] {
        if let Some(limit) = limit
            && used > limit
        {
            findings.push(fail(format!("{used} {what}, the kernel's limit on {} is {limit}", target.arch)));
        }
    }
    if smem_bytes > target.smem_limit_bytes {
        findings.push(fail(format!(
            "{smem_bytes} bytes of shared memory, one block on {} can have {}",
            target.arch, target.smem_limit_bytes
        )));
    }
}

fn cross_check_cubin(findings: &mut Vec<Finding>, entry: &Entry, cubin: &CubinFacts) {
    let Some(kernel) = cubin.kernel(&entry.name) else {
        findings.push(fail(format!("the cubin has no kernel `{}`", entry.name)));
        return;
    };
    let resources = &entry.resources;
    differ(findings, "the cubin", "registers", resources.registers, kernel.registers);
    differ(
        findings,
        "the cubin",
        "bytes of static shared memory",
        resources.smem_static_bytes,
        kernel.smem_static_bytes,
    );
    if let (Some(reported), Some(has)) = (resources.barriers, kernel.barriers) {
        differ(findings, "the cubin", "barriers", reported, has);
    }
}

/// Tensor maps are aligned to so many bytes of the constant bank, where parameters begin elsewhere: cubins count that gap too.
const TENSOR_MAP_ALIGNMENT: u32 = 64;

/// A kernel that takes others than it is given reads whatever lies there.
fn parameters(findings: &mut Vec<Finding>, entry: &Entry, variant: &Variant, cubin: &CubinFacts) {
    let given = variant.parameter_bytes;
    let takes = cubin.kernel(&entry.name).and_then(|kernel| kernel.parameter_bytes);
    let gap = if variant.tensor_maps.is_empty() { 1 } else { TENSOR_MAP_ALIGNMENT };
    if let Some(takes) = takes.filter(|takes| !(given..given + gap).contains(takes)) {
        let maps = match variant.tensor_maps.len() {
            0 => String::new(),
            maps => format!(", then {maps} `const __grid_constant__ CUtensorMap`"),
        };
        findings.push(fail(format!(
            "it takes {takes} bytes of parameters and is given {given}: `const __grid_constant__ SdpaParams p`{maps}"
        )));
    }
}

fn differ(findings: &mut Vec<Finding>, witness: &str, what: &str, reported: u32, has: u32) {
    if reported != has {
        findings.push(fail(format!("the compiler reports {reported} {what}, {witness} has {has}")));
    }
}

fn fail(text: String) -> Finding {
    Finding { fails: true, text }
}
