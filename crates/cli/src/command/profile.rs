//! `evosdpa profile`: what holds a kernel back, argued from counters.

use std::{fmt::Write, path::Path, time::Duration};

use anyhow::Context;
use evosdpa_core::{DType, Problem, Shape};
use evosdpa_cuda::Device as Gpu;
use evosdpa_kernels::{Arch, Kernel, Origin, Registry, Target, VariantId};
use evosdpa_lab::{
    device::{Cuda, Device, DeviceId},
    gate::Verdict,
    machine::Environment,
    profile::{
        self, Capture, Launch, Ncu, ProfileRow, Registry as Metrics, Session, Unprofiled, Work,
        simulated::Counted,
    },
    record::{Row, Run, RunStatus},
};
use evosdpa_oracle::inputs::Inputs;

use crate::{Status, args::Profile, command, interrupt, output, progress};

pub(crate) fn run(args: Profile) -> anyhow::Result<Status> {
    let registry = command::registry(&args.kernel_path)?;
    if let Some(file) = &args.import {
        return import(&args, file, &registry);
    }
    let work = works(&args, &registry)?;
    if args.launch {
        return launch(&args, &work, registry);
    }
    interrupt::listen();
    let mut environment = Environment::look(None);
    let (session, gpu) = open(&args, registry)?;
    environment.accelerator = gpu;
    let mut record = Run::create(&args.out, &command::own_arguments(), &environment)?;
    let bar = progress::bar(work.len() as u64);
    let mut rows = Vec::new();
    for work in &work {
        if interrupt::asked() {
            break;
        }
        progress::say(&bar, work.label());
        let mut so_far = record.clone();
        // There is nobody left to tell of a failure.
        interrupt::on_end(move || drop(so_far.finish(RunStatus::Interrupted)));
        let row = session.profile(&work.name, &work.problem, record.folder())?;
        let mut summary = Row::new(&row.kernel, false, args.device, &work.problem.to_string());
        summary.gates.clone_from(&row.gates);
        record.add(&profile::stem(&work.name, &work.problem), &[summary], &[row.sentence()])?;
        rows.push(row);
        // After each, so that what was profiled is there whatever comes next.
        profile::save(record.folder(), &environment, &rows)?;
        bar.inc(1);
    }
    let _ending = interrupt::ending();
    bar.finish_and_clear();
    let status = if interrupt::asked() { RunStatus::Interrupted } else { RunStatus::Complete };
    record.finish(status)?;
    print(&args, &environment, &rows, Some(record.folder()))?;
    Ok(status_of(&rows, args.device == DeviceId::Sim))
}

/// A kernel on a problem.
struct Subject {
    name: String,
    problem: Problem,
}

impl Subject {
    fn label(&self) -> String {
        format!("{} on {}", self.name, self.problem)
    }
}

fn works(args: &Profile, registry: &Registry) -> anyhow::Result<Vec<Subject>> {
    let kernels = match args.kernels.as_slice() {
        [] => registry
            .kernels()
            .filter(|kernel| kernel.origin != Origin::Embedded)
            .map(|kernel| kernel.name().to_owned())
            .collect(),
        named => named.to_vec(),
    };
    anyhow::ensure!(!kernels.is_empty(), "--kernels names what to profile; `evosdpa kernels` lists them");
    let shapes = if args.shape.is_empty() { vec!["mission".parse::<Shape>()?] } else { args.shape.clone() };
    let mut works = Vec::new();
    for name in &kernels {
        let plain = VariantId::kernel_of(name);
        let kernel = registry.kernel(plain)?;
        let name = match &args.variant {
            Some(variant) => format!("{plain}[{variant}]"),
            None => name.clone(),
        };
        for &shape in &shapes {
            let dtype = args.dtype.unwrap_or_else(|| usual_dtype(kernel));
            let problem = Problem::new(shape, dtype)?;
            works.push(Subject { name: name.clone(), problem });
        }
    }
    Ok(works)
}

/// bf16 as in `bench`, else the first the kernel reads.
fn usual_dtype(kernel: &Kernel) -> DType {
    let dtypes = &kernel.manifest.dtypes;
    // A manifest without a type is refused when it is read.
    dtypes.iter().copied().find(|dtype| dtype.name() == "bf16").unwrap_or(dtypes[0])
}

/// What the profiler runs: each kernel once, and nobody looks at the answer.
fn launch(args: &Profile, work: &[Subject], registry: Registry) -> anyhow::Result<Status> {
    let device = Cuda::open(ordinal(args)?, registry)?;
    for work in work {
        let inputs = [Inputs::timed(&work.problem, 0)];
        device.load(&work.name, &work.problem, &inputs)?.run(0)?;
    }
    Ok(Status::Passed)
}

fn ordinal(args: &Profile) -> anyhow::Result<usize> {
    match args.device {
        DeviceId::Cuda(ordinal) => Ok(ordinal),
        other => Err(command::refused_device(other, &["cuda", "cuda:N", "sim"])),
    }
}

fn open(args: &Profile, registry: Registry) -> anyhow::Result<(Session, Option<String>)> {
    let nominal = Target::nominal(args.arch.unwrap_or(Arch::Sm90a));
    let limit = Duration::from_secs_f64(args.timeout);
    if args.device == DeviceId::Sim {
        let why = "the simulator counts and has no clock; --device cuda profiles".to_owned();
        return Ok((Session::open(registry, nominal, args.device, Err(Unprofiled(why)), limit)?, None));
    }
    let opened = Gpu::open(ordinal(args)?).and_then(|gpu| Ok((gpu.target()?, gpu.info().name.clone())));
    let (target, gpu, no_gpu) = match opened {
        Ok((target, name)) => (target, Some(name), None),
        Err(error) => (nominal, None, Some(Unprofiled(error.to_string()))),
    };
    let ncu = match (no_gpu, &args.ncu) {
        // A profiler that was named is used as it is; whether it finds a GPU is then its own to say.
        (Some(why), None) => Err(why),
        (_, named) => Ncu::find(named.as_deref()),
    };
    let session = Session::open(registry, target, args.device, ncu, limit)?;
    Ok((session.with_kernel_path(&args.kernel_path), gpu))
}

fn import(args: &Profile, file: &Path, registry: &Registry) -> anyhow::Result<Status> {
    let is_report = file.extension().is_some_and(|ending| ending == "ncu-rep");
    let text = if is_report {
        let ncu = Ncu::find(args.ncu.as_deref()).map_err(|Unprofiled(why)| anyhow::anyhow!("{why}"))?;
        ncu.import(file)?.map_err(|Unprofiled(why)| anyhow::anyhow!("{}: {why}", file.display()))?
    } else {
        let bytes = command::read_file(file)?;
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let capture = Capture::parse(&text, &file.display().to_string())?;
    let wanted = |launch: &&Launch| {
        args.kernels.is_empty() || args.kernels.iter().any(|name| launch.kernel == VariantId::kernel_of(name))
    };
    let mut rows = Vec::new();
    for launch in capture.launches.iter().filter(wanted) {
        let arch = arch_of(launch, args.arch)?;
        let kernel = registry.kernels().find(|kernel| kernel.manifest.entry == launch.kernel);
        let has: Vec<String> = kernel
            .map(|kernel| kernel.manifest.tunables.iter().map(|tunable| tunable.name.clone()).collect())
            .unwrap_or_default();
        let problem = match (args.shape.as_slice(), kernel) {
            ([], _) => None,
            (shapes, kernel) => {
                let dtype = args.dtype.or_else(|| kernel.map(usual_dtype)).map_or("bf16", DType::name);
                Some(Problem::new(shapes[0], dtype.parse()?)?)
            }
        };
        let name = problem.as_ref().map(ToString::to_string);
        let mut row = ProfileRow::new(&launch.kernel, name, "import", arch.name());
        row.profiled(launch, &Metrics::of(arch), problem.as_ref().map(Work::from).as_ref(), &has)?;
        rows.push(row);
    }
    anyhow::ensure!(!rows.is_empty(), "{} has no launch of {}", file.display(), args.kernels.join(", "));
    print(args, &Environment::look(None), &rows, None)?;
    Ok(status_of(&rows, false))
}

fn arch_of(launch: &Launch, given: Option<Arch>) -> anyhow::Result<Arch> {
    if let Some(arch) = given {
        return Ok(arch);
    }
    let Some(capability) = &launch.capability else {
        anyhow::bail!("the capture does not say which GPU it is of: add --arch, such as --arch sm_90a");
    };
    let numbers = capability.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    numbers
        .and_then(|(major, minor)| Arch::of_device(major, minor))
        .with_context(|| format!("no metrics are known for compute capability {capability}"))
}

fn status_of(rows: &[ProfileRow], counting: bool) -> Status {
    let verdicts: Vec<&Verdict> = rows.iter().map(ProfileRow::verdict).collect();
    let counted = counting && rows.iter().any(|row| row.simulated.is_some());
    Status::of_gates(&verdicts, counted || verdicts.iter().any(|verdict| verdict.is_pass()))
}

fn print(
    args: &Profile,
    environment: &Environment,
    rows: &[ProfileRow],
    folder: Option<&Path>,
) -> anyhow::Result<()> {
    if args.json {
        return output::print_json("profile", environment, &rows);
    }
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = rows.iter().try_for_each(|row| write_row(&mut page, row));
    if let Some(folder) = folder {
        let _ = writeln!(page, "recorded in {}", folder.display());
    }
    output::print(&page)
}

fn write_row(out: &mut String, row: &ProfileRow) -> std::fmt::Result {
    writeln!(out, "{}\n", row.sentence())?;
    for gate in &row.gates {
        writeln!(out, "{} {}: {}", output::coloured(&gate.verdict), gate.gate, gate.detail)?;
    }
    if let Some(rule) = &row.rule {
        writeln!(out, "by tensor pipe and DRAM alone: {rule}")?;
    }
    if let Some(roof) = &row.roofline {
        let memory = roof.dram_peak_gbps.map_or(String::new(), |gbps| format!(", memory {gbps:.0} GB/s"));
        writeln!(
            out,
            "roofline: {:.1} of {:.0} TFLOP/s under the roof at {:.0} FLOP/byte ({:.1} %); tensor peak {:.0} TFLOP/s{memory}; \
             {:.2} MB moved, {:.2} MB had to",
            roof.achieved_tflops,
            roof.roof_tflops,
            roof.intensity,
            100.0 * roof.of_roof,
            roof.tensor_peak_tflops,
            roof.dram_bytes / 1e6,
            roof.compulsory_bytes / 1e6,
        )?;
    }
    if let Some(statics) = &row.statics {
        writeln!(
            out,
            "{}: {} registers, {} bytes of shared memory, {} of stack, {} of spills; {} blocks of {} threads per SM \
             ({:.0} %), limited by {}",
            statics.arch,
            statics.registers,
            statics.smem_bytes,
            statics.stack_bytes,
            statics.spill_bytes,
            statics.blocks_per_sm,
            statics.threads_per_block,
            100.0 * statics.occupancy,
            statics.limited_by
        )?;
    }
    if let Some(counted) = &row.simulated {
        write_counted(out, counted)?;
    }
    for (rank, insight) in row.insights.iter().enumerate() {
        writeln!(
            out,
            "\n{}. {} ({}, confidence {:.2}): {}",
            rank + 1,
            insight.bottleneck,
            insight.id,
            insight.confidence,
            insight.suggestion
        )?;
        for evidence in &insight.evidence {
            let unit = if evidence.unit.is_empty() { String::new() } else { format!(" {}", evidence.unit) };
            writeln!(out, "   {} {}{unit}: {}", evidence.metric, short(evidence.value), evidence.says)?;
        }
        if !insight.tunables.is_empty() {
            writeln!(out, "   try: {}", insight.hints())?;
        }
    }
    for note in row.rules.iter().filter(|rule| rule.starts_with("no ")) {
        writeln!(out, "{note}")?;
    }
    writeln!(out)
}

fn write_counted(out: &mut String, counted: &Counted) -> std::fmt::Result {
    let total: u64 = counted.warp_instructions.values().sum();
    let mut mix: Vec<(&String, &u64)> = counted.warp_instructions.iter().collect();
    mix.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let share = |count: u64| 100.0 * count as f64 / (total as f64).max(1.0);
    let mix: Vec<String> =
        mix.iter().take(8).map(|(class, count)| format!("{class} {:.0} %", share(**count))).collect();
    writeln!(out, "simulated on {}: {total} warp instructions ({})", counted.problem, mix.join(", "))?;
    writeln!(
        out,
        "  global memory: {} bytes in {} sectors ({:.0} % used); shared memory: {} passes, {} of them conflicts; {} barrier waits",
        counted.global_bytes,
        counted.global_sectors,
        100.0 * counted.sector_use(),
        counted.shared_wavefronts,
        counted.shared_conflicts,
        counted.barrier_waits
    )?;
    for line in &counted.conflict_lines {
        writeln!(out, "  {}: {} of {} passes are conflicts", line.source, line.conflicts, line.wavefronts)?;
    }
    Ok(())
}

/// Enough digits to argue with.
fn short(value: f64) -> String {
    match value.abs() {
        x if x >= 1e6 => format!("{value:.3e}"),
        x if x >= 100.0 => format!("{value:.0}"),
        x if x >= 1.0 || x == 0.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}
