//! `evosdpa plan`: which kernel the library takes for a problem, and why.

use std::{collections::BTreeMap, fmt::Write};

use evosdpa::{
    Attention, CpuKernel, DType, Isa, Problem, VariantId,
    choose::{Choice, Origin, Planner, Question, assumed_tensors},
};
use evosdpa_cuda::Device;
use evosdpa_kernels::{Registry, Target};
use evosdpa_lab::{device::DeviceId, machine::Environment};
use serde::Serialize;

use crate::{
    Status,
    args::{self, Plan},
    command::{refused_device, registry},
    output,
};

/// One problem and its answer.
#[derive(Serialize)]
struct PlanRow {
    problem: String,
    device: String,
    /// Of a GPU its architecture, of a CPU the instruction set that the problem takes.
    arch: Option<String>,
    kernel: String,
    /// Every tunable's value.
    tunables: BTreeMap<String, i64>,
    from: String,
    why: Option<String>,
    /// What the row says was measured.
    p50_us: Option<f64>,
    grid: Option<[u32; 3]>,
    block: Option<[u32; 3]>,
    cluster: Option<[u32; 3]>,
    dynamic_smem_bytes: Option<u32>,
    programmatic: Option<bool>,
    counter: Option<bool>,
    workspace_bytes: Option<u64>,
    /// Tile, schedule and the like, in the order in which they were decided.
    reasons: Vec<ReasonRow>,
    others: Vec<OtherRow>,
}

#[derive(Serialize)]
struct ReasonRow {
    concern: &'static str,
    settings: BTreeMap<&'static str, i64>,
    why: &'static str,
}

#[derive(Serialize)]
struct OtherRow {
    kernel: String,
    tunables: BTreeMap<String, i64>,
    from: String,
    why_not: String,
}

/// Where a plan is for.
enum Place {
    /// With why there is no GPU, where one was looked for.
    Cpu {
        no_gpu: Option<String>,
    },
    Gpu {
        target: Target,
        name: Option<String>,
    },
}

pub(crate) fn run(args: Plan) -> anyhow::Result<Status> {
    let place = place(&args)?;
    let registry = registry(&args.kernel_path)?;
    let mut rows = Vec::new();
    for shape in &args.shapes {
        let dtype = args.dtype.unwrap_or(match place {
            Place::Cpu { .. } => DType::F32,
            Place::Gpu { .. } => DType::BF16,
        });
        let problem = Problem::new(*shape, dtype)?.with_lse(args.lse);
        rows.push(match &place {
            Place::Cpu { .. } => on_cpu(problem)?,
            Place::Gpu { target, name } => on_gpu(&registry, &problem, target, name.as_deref())?,
        });
    }
    let no_gpu = match place {
        Place::Cpu { no_gpu } => no_gpu,
        Place::Gpu { .. } => None,
    };
    if args.json {
        let environment = Environment { no_accelerator: no_gpu, ..Environment::look(None) };
        output::print_json("plan", &environment, &rows)?;
    } else {
        let mut pages: Vec<String> = rows.iter().map(|row| page(row, args.explain)).collect();
        pages.extend(no_gpu.map(|why| output::no_gpu(&why) + "\n"));
        output::print(&pages.join("\n"))?;
    }
    Ok(Status::Passed)
}

/// The device that was meant. An architecture needs no GPU.
fn place(args: &Plan) -> anyhow::Result<Place> {
    if let Some(arch) = args.arch {
        return Ok(Place::Gpu { target: Target::nominal(arch), name: None });
    }
    let open = |ordinal: usize| -> anyhow::Result<Place> {
        let device = Device::open(ordinal)?;
        Ok(Place::Gpu { target: device.target()?, name: Some(device.info().name.clone()) })
    };
    match args.device {
        args::Place::On(DeviceId::Cpu) => Ok(Place::Cpu { no_gpu: None }),
        args::Place::Auto => {
            Ok(open(0).unwrap_or_else(|why| Place::Cpu { no_gpu: Some(format!("{why:#}")) }))
        }
        args::Place::On(DeviceId::Cuda(ordinal)) => open(ordinal),
        other => Err(refused_device(other, &["auto", "cpu", "cuda", "cuda:N"])),
    }
}

fn on_cpu(problem: Problem) -> anyhow::Result<PlanRow> {
    let planned = Attention::plan(problem, evosdpa::Device::Cpu)?.variant();
    let chosen = CpuKernel::Flash.name().to_owned();
    let isa = Isa::best();
    let row = evosdpa::tuned::cpu_row(&problem, isa)?;
    let tunables = planned.parse::<VariantId>()?.tunables;
    let others =
        [CpuKernel::Flash, CpuKernel::Naive].map(CpuKernel::name).into_iter().filter(|name| *name != chosen);
    Ok(PlanRow {
        problem: problem.to_string(),
        device: format!("cpu ({isa})"),
        arch: Some(isa.for_problem(&problem).to_string()),
        kernel: chosen.clone(),
        tunables: tunables.iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        from: match &row {
            Some(row) => row.from.clone(),
            None => "rule: the streaming kernel is the fastest on a CPU".to_owned(),
        },
        why: row.as_ref().and_then(|row| row.why.clone()),
        p50_us: row.and_then(|row| row.p50_us),
        grid: None,
        block: None,
        cluster: None,
        dynamic_smem_bytes: None,
        programmatic: None,
        counter: None,
        workspace_bytes: None,
        reasons: Vec::new(),
        others: others
            .map(|name| OtherRow {
                kernel: name.to_owned(),
                tunables: BTreeMap::new(),
                from: "rule: simpler kernels to compare with".to_owned(),
                why_not: "something better is there".to_owned(),
            })
            .collect(),
    })
}

fn on_gpu(
    registry: &Registry,
    problem: &Problem,
    target: &Target,
    device: Option<&str>,
) -> anyhow::Result<PlanRow> {
    let planner = Planner::with_tables(registry.clone())?;
    let tensors = assumed_tensors(problem);
    let Choice { variant, origin, settings, others } =
        planner.choose(&Question { problem, tensors: &tensors, target, device })?;
    let (why, p50_us) = match &origin {
        Origin::Row { why, p50_us, .. } => (why.clone(), *p50_us),
        _ => (None, None),
    };
    let launch = variant.launch;
    Ok(PlanRow {
        problem: problem.to_string(),
        device: device.map_or_else(|| target.arch.to_string(), |name| format!("{name} ({})", target.arch)),
        arch: Some(target.arch.to_string()),
        kernel: variant.id.kernel.clone(),
        tunables: variant.id.tunables.to_map(),
        from: origin.to_string(),
        why,
        p50_us,
        grid: Some(launch.grid),
        block: Some(launch.block),
        cluster: Some(launch.cluster),
        dynamic_smem_bytes: Some(launch.dynamic_smem_bytes),
        programmatic: Some(launch.programmatic),
        counter: Some(launch.counter),
        workspace_bytes: Some(launch.workspace_bytes),
        reasons: settings
            .reasons()
            .map(|(reason, values)| ReasonRow {
                concern: reason.concern,
                settings: values.iter().copied().collect(),
                why: reason.why,
            })
            .collect(),
        others: others
            .into_iter()
            .map(|other| OtherRow {
                kernel: other.id.kernel,
                tunables: other.id.tunables.to_map(),
                from: other.origin.to_string(),
                why_not: other.why,
            })
            .collect(),
    })
}

fn page(row: &PlanRow, explain: bool) -> String {
    let mut page = format!("{} on {}: {}\n", row.problem, row.device, row.kernel);
    if !row.tunables.is_empty() {
        let _ = writeln!(page, "  tunables  {}", set(&row.tunables));
    }
    let _ = writeln!(page, "  from      {}", row.from);
    if !explain {
        return page;
    }
    if let Some(isa) = row.arch.as_ref().filter(|_| row.grid.is_none()) {
        let _ = writeln!(page, "  runs on   {isa}");
    }
    if let Some(why) = &row.why {
        let _ = writeln!(page, "  why       {why}");
    }
    if let Some(p50_us) = row.p50_us {
        let _ = writeln!(page, "  measured  {}", output::time(p50_us));
    }
    if let (Some(grid), Some(block), Some(cluster), Some(smem_bytes)) =
        (row.grid, row.block, row.cluster, row.dynamic_smem_bytes)
    {
        let sizes = |[x, y, z]: [u32; 3]| format!("{x}x{y}x{z}");
        let cluster = if cluster == [1; 3] { String::new() } else { format!(", cluster {}", sizes(cluster)) };
        let programmatic = if row.programmatic == Some(true) { ", programmatic" } else { "" };
        let counter = if row.counter == Some(true) { ", work counter" } else { "" };
        let workspace = match row.workspace_bytes {
            None | Some(0) => String::new(),
            Some(bytes) => format!(", workspace of {bytes} bytes"),
        };
        let _ = writeln!(
            page,
            "  launch    grid {}, block {}{cluster}{programmatic}{counter}{workspace}, {smem_bytes} bytes of shared memory",
            sizes(grid),
            sizes(block)
        );
    }
    for ReasonRow { concern, settings, why } in &row.reasons {
        let settings: Vec<String> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let _ = writeln!(page, "  {concern:<9} {}\n            {why}", settings.join(" "));
    }
    for other in &row.others {
        let tunables =
            if other.tunables.is_empty() { String::new() } else { format!("[{}]", set(&other.tunables)) };
        let _ = writeln!(page, "  not {}{tunables}: {}\n      ({})", other.kernel, other.why_not, other.from);
    }
    page
}

fn set(tunables: &BTreeMap<String, i64>) -> String {
    tunables.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}
