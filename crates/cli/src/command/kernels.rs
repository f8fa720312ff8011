//! `evosdpa kernels`: what there is, and what grew from what.

use evosdpa_kernels::{Registry, Result as KernelResult};
use evosdpa_lab::{
    device::{Cpu, Device, DeviceId, KernelInfo},
    machine::Environment,
};
use serde::Serialize;

use crate::{
    Status,
    args::{Kernels, Place},
    command::{refused_device, registry},
    output,
};

#[derive(Serialize)]
struct KernelRow {
    name: String,
    device: &'static str,
    parent: Option<String>,
    /// How many ancestors it has.
    depth: usize,
    summary: String,
    changed: String,
    /// What it compiles for; empty on the CPU.
    archs: Vec<String>,
    /// What it reads.
    dtypes: Vec<String>,
    /// The manifest it is from; the user's own have a path.
    manifest: Option<String>,
}

pub(crate) fn run(args: Kernels) -> anyhow::Result<Status> {
    let (cpu, cuda) = match args.device {
        Place::Auto => (true, true),
        Place::On(DeviceId::Cpu) => (true, false),
        Place::On(DeviceId::Cuda(_)) => (false, true),
        other => return Err(refused_device(other, &["auto", "cpu", "cuda"])),
    };
    let mut rows = Vec::new();
    if cpu {
        rows.extend(cpu_rows());
    }
    if cuda {
        rows.extend(cuda_rows(&registry(&args.kernel_path)?)?);
    }
    if args.json {
        output::print_json("kernels", &Environment::look(None), &rows)?;
        return Ok(Status::Passed);
    }
    let table_rows = rows.iter().map(|row| {
        let branch = match row.depth {
            0 => String::new(),
            depth => format!("{}└ ", " ".repeat(depth - 1)),
        };
        let changed = if row.changed.is_empty() { "–" } else { &row.changed };
        vec![format!("{branch}{}", row.name), row.device.to_owned(), row.summary.clone(), changed.to_owned()]
    });
    let header = ["kernel", "device", "what it is", "what it changed against its parent"];
    output::print(&output::table(&header, 9, table_rows.collect()))?;
    Ok(Status::Passed)
}

fn cpu_rows() -> Vec<KernelRow> {
    let row = |kernel: KernelInfo| KernelRow {
        depth: usize::from(kernel.parent.is_some()),
        name: kernel.name,
        device: "cpu",
        parent: kernel.parent,
        summary: kernel.summary,
        changed: kernel.changed,
        archs: Vec::new(),
        dtypes: evosdpa_core::DType::FLOATS.map(|dtype| dtype.name().to_owned()).to_vec(),
        manifest: None,
    };
    Cpu::default().kernels().into_iter().map(row).collect()
}

fn cuda_rows(registry: &Registry) -> KernelResult<Vec<KernelRow>> {
    let mut rows = Vec::new();
    for entry in registry.lineage() {
        let kernel = registry.kernel(entry.name)?;
        rows.push(KernelRow {
            name: entry.name.to_owned(),
            device: "cuda",
            parent: entry.parent.map(str::to_owned),
            depth: entry.depth,
            summary: entry.summary.to_owned(),
            changed: entry.changed.unwrap_or_default().to_owned(),
            archs: kernel.manifest.archs.iter().map(ToString::to_string).collect(),
            dtypes: kernel.manifest.dtypes.iter().map(ToString::to_string).collect(),
            manifest: Some(kernel.manifest_file.clone()),
        });
    }
    Ok(rows)
}
