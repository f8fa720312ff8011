//! `evosdpa build`: does every kernel compile, and what does it use?

use std::{fmt::Write, path::Path, time::Duration};

use evosdpa_cuda::{ArtifactKind, Builder, Device, loader, toolkit::Toolkit, worker::CompilePool};
use evosdpa_kernels::Target;
use evosdpa_lab::{
    device::{DeviceId, Sim},
    gate::{
        GateResult, Verdict,
        resources::{self, ResourceRow, Usage},
    },
    machine::Environment,
    variants::{self, Job, Request, Selection, Space},
};

use crate::{
    Status,
    args::{Build, Place},
    command::{chosen_cuda_kernels, refused_device, registry},
    interrupt, output, progress,
};

pub(crate) fn run(args: Build) -> anyhow::Result<Status> {
    if let Some(log) = &args.parse {
        return parse(log, &args);
    }
    // Known before anything is started, and with what to install.
    let sim = (args.device == Place::On(DeviceId::Sim))
        .then(|| Sim::open(registry(&args.cuda.kernel_path)?).map_err(anyhow::Error::from));
    let sim = sim.transpose()?;
    let gpu = if sim.is_some() { None } else { open_gpu(args.device)? };
    let only = |kernel: &str| match (&sim, &gpu) {
        (Some(sim), _) => Some(sim.target(kernel)),
        (None, Some(gpu)) if gpu.asked_for => Some(gpu.target),
        (None, _) => None,
    };
    let selection = select(&args, &only)?;
    Toolkit::find()?;
    interrupt::listen();
    let mut rows = build(&args, &selection.jobs, gpu.as_ref(), sim.as_ref())?;
    rows.extend(selection.refused.into_iter().map(ResourceRow::from));

    if args.json {
        output::print_json("build", &Environment::look(None), &rows)?;
    } else {
        output::print(&page(&rows, &selection.spaces))?;
    }
    Ok(if interrupt::asked() { Status::Interrupted } else { status_of(&rows) })
}

fn parse(log: &Path, args: &Build) -> anyhow::Result<Status> {
    let rows = resources::from_log(log, &registry(&args.cuda.kernel_path)?)?;
    if args.json {
        output::print_json("build", &Environment::look(None), &rows)?;
    } else {
        output::print(&page(&rows, &[]))?;
    }
    let failed = rows.iter().any(|row| row.verdict().is_fail());
    Ok(if failed { Status::Failed } else { Status::Passed })
}

fn status_of(rows: &[ResourceRow]) -> Status {
    if rows.iter().any(|row| row.verdict().is_fail()) {
        Status::Failed
    } else if rows.iter().all(|row| matches!(row.verdict(), Verdict::Unavailable(_))) {
        Status::Unavailable
    } else {
        Status::Passed
    }
}

/// A GPU to compare with, and what to build for it.
struct Gpu {
    device: Device,
    target: Target,
    /// Whether to build for it alone.
    asked_for: bool,
}

fn open_gpu(place: Place) -> anyhow::Result<Option<Gpu>> {
    let open = |ordinal: usize, asked_for: bool| -> anyhow::Result<Gpu> {
        let device = Device::open(ordinal)?;
        let target = device.target()?;
        Ok(Gpu { device, target, asked_for })
    };
    match place {
        Place::None => Ok(None),
        // A GPU that cannot be used is no reason not to compile.
        Place::Auto => Ok(loader::driver().ok().and_then(|_| open(0, false).ok())),
        Place::On(DeviceId::Cuda(ordinal)) => open(ordinal, true).map(Some),
        Place::On(_) => Err(refused_device(place, &["auto", "none", "cuda", "cuda:N", "sim"])),
    }
}

/// With `only`, for the target it gives for a kernel unless architectures were named.
fn select(args: &Build, only: &dyn Fn(&str) -> Option<Target>) -> anyhow::Result<Selection> {
    let targets: Vec<Target> = args.arch.iter().map(|arch| Target::nominal(*arch)).collect();
    let default_problem = "mission".parse()?;
    let mut request = Request {
        targets,
        dtypes: args.dtype.clone(),
        shape: args.problem.unwrap_or(default_problem),
        adapt: args.problem.is_none(),
        set: args.set.clone(),
        all_variants: args.all_variants.then_some(args.max_variants as usize),
    };
    let registry = registry(&args.cuda.kernel_path)?;
    let mut selection = Selection::default();
    for kernel in chosen_cuda_kernels(&registry, &args.cuda.kernels)? {
        if args.arch.is_empty() {
            request.targets = only(kernel.name()).into_iter().collect();
        }
        selection.add(kernel, &request)?;
    }
    Ok(selection)
}

fn build(
    args: &Build,
    jobs: &[Job],
    gpu: Option<&Gpu>,
    sim: Option<&Sim>,
) -> anyhow::Result<Vec<ResourceRow>> {
    let pool = CompilePool::new(args.workers as usize, Duration::from_secs_f64(args.compile_timeout))?;
    let builder = Builder::new()?.with_pool(pool);
    let variants: Vec<_> = jobs.iter().map(|job| job.variant.clone()).collect();
    let bar = progress::bar(jobs.len() as u64);
    let built = builder.build_while(&variants, ArtifactKind::Cubin, |i| {
        progress::say(&bar, jobs[i].label());
        bar.inc(1);
        !interrupt::asked()
    });
    bar.finish_and_clear();
    let mut rows = Vec::new();
    for (job, built) in jobs.iter().zip(built) {
        // What Ctrl-C kept from being begun has no row.
        let Some(built) = built else { continue };
        let device = gpu.filter(|gpu| gpu.target.arch == job.target.arch).map(|gpu| &gpu.device);
        let mut row = resources::check(job, built, device)?;
        if let Some(sim) = sim.filter(|_| row.verdict().is_pass()) {
            row.gates.push(match sim.understands(&job.variant) {
                Ok(()) => GateResult::pass("sim", "the simulator understands every instruction"),
                Err(error) => GateResult::fail("sim", error.to_string()),
            });
        }
        rows.push(row);
    }
    Ok(rows)
}

/// A line for each kernel, architecture and type, then everything worth knowing in full.
fn page(rows: &[ResourceRow], spaces: &[Space]) -> String {
    let mut table_rows: Vec<Vec<String>> = Vec::new();
    for group in rows.chunk_by(|a, b| identity(a) == identity(b)) {
        table_rows.push(line(group));
    }
    let header = [
        "kernel",
        "arch",
        "type",
        "verdict",
        "regs",
        "smem",
        "stack",
        "spills",
        "bar",
        "blocks/SM",
        "occup.",
    ];
    let mut page = output::table(&header, 4, table_rows);
    for space in spaces {
        let more = if space.total == variants::COUNT_LIMIT { "at least " } else { "" };
        let Space { kernel, arch, dtype, chosen, total, .. } = space;
        let _ = writeln!(page, "{kernel} {arch} {dtype}: built {chosen} of {more}{total} variants");
    }
    // With one variant of each the tunables are the defaults, or what the user has just typed.
    let label = |row: &ResourceRow| label(row, !spaces.is_empty());
    let whys = rows.iter().filter_map(|row| match row.verdict() {
        Verdict::Pass => None,
        Verdict::Fail(why) | Verdict::Unavailable(why) => Some((why.as_str(), row)),
    });
    for (why, rows) in grouped(whys) {
        let word = output::coloured(rows[0].verdict());
        let _ = writeln!(page, "\n{word} {}: {}", label(rows[0]), why.trim_end());
        if rows.len() > 1 {
            let others: Vec<String> = rows[1..].iter().map(|row| label(row)).collect();
            let _ = writeln!(page, "The same: {}", others.join(", "));
        }
    }
    for row in rows {
        for note in &row.notes {
            let _ = writeln!(page, "\nnote {}: {note}", label(row));
        }
    }
    page
}

fn label(row: &ResourceRow, with_tunables: bool) -> String {
    let mut parts = vec![row.kernel.clone()];
    parts.extend([&row.arch, &row.dtype].into_iter().flatten().cloned());
    if with_tunables {
        parts.extend(row.tunables.iter().map(|(name, value)| format!("{name}={value}")));
    }
    parts.join(" ")
}

/// What is wrong with several rows is said once.
fn grouped<'a>(
    whys: impl Iterator<Item = (&'a str, &'a ResourceRow)>,
) -> Vec<(&'a str, Vec<&'a ResourceRow>)> {
    let mut groups: Vec<(&str, Vec<&ResourceRow>)> = Vec::new();
    for (why, row) in whys {
        match groups.iter_mut().find(|(known, _)| *known == why) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((why, vec![row])),
        }
    }
    groups
}

fn identity(row: &ResourceRow) -> (&str, &str, &str) {
    (&row.kernel, row.arch.as_deref().unwrap_or("–"), row.dtype.as_deref().unwrap_or("–"))
}

/// One line for the variants of one kernel, architecture and type: the worst verdict and the range of each number.
fn line(group: &[ResourceRow]) -> Vec<String> {
    let (kernel, arch, dtype) = identity(&group[0]);
    let worst = group.iter().map(ResourceRow::verdict).find(|verdict| !verdict.is_pass());
    let range =
        |of: &dyn Fn(&Usage) -> Option<u32>| range(group.iter().filter_map(|row| of(row.usage.as_ref()?)));
    let smem_static = range(&|usage| Some(usage.smem_static_bytes));
    let smem = match range(&|usage| usage.smem_dynamic_bytes) {
        dynamic if dynamic == "–" => smem_static,
        dynamic => format!("{smem_static}+{dynamic}"),
    };
    let stores = range(&|usage| Some(usage.spill_store_bytes));
    let loads = range(&|usage| Some(usage.spill_load_bytes));
    let percent = range(&|usage| Some((usage.occupancy.as_ref()?.fraction * 100.0).round() as u32));
    vec![
        kernel.to_owned(),
        arch.to_owned(),
        dtype.to_owned(),
        worst.unwrap_or(&Verdict::Pass).word().to_owned(),
        range(&|usage| Some(usage.registers)),
        smem,
        range(&|usage| Some(usage.stack_bytes)),
        if stores == "–" { stores } else { format!("{stores}/{loads}") },
        range(&|usage| usage.barriers),
        range(&|usage| Some(usage.occupancy.as_ref()?.blocks_per_sm)),
        if percent == "–" { percent } else { format!("{percent} %") },
    ]
}

/// `40`, `40–72`, or `–` for no number at all.
fn range(numbers: impl Iterator<Item = u32>) -> String {
    let bounds = numbers.fold(None, |bounds, n| {
        let (low, high) = bounds.unwrap_or((n, n));
        Some((low.min(n), high.max(n)))
    });
    match bounds {
        None => "–".to_owned(),
        Some((low, high)) if low == high => low.to_string(),
        Some((low, high)) => format!("{low}–{high}"),
    }
}
