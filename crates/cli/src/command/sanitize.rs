//! `evosdpa sanitize`: is every kernel clean under compute-sanitizer, or under ptxsan?

mod mutants;
mod variants;

use std::{
    ffi::OsString,
    fmt::Write,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Context;
use evosdpa_core::{DType, Problem, Shape};
use evosdpa_cuda::{Device, Program};
use evosdpa_kernels::{Arch, Kernel, ProblemFacts, Registry, Target, VariantId};
use evosdpa_lab::{
    device::{Device as _, DeviceId, Sim},
    gate::{
        GateResult, Verdict,
        hazards::{self, Policy, Suppressions},
        sanitizer::{Checked, Tool},
    },
    machine::Environment,
    tool::CudaTool,
};
use evosdpa_oracle::inputs::{Family, Inputs};
use serde::Serialize;

use crate::{
    Status,
    args::Sanitize,
    command::{chosen_cuda_kernels, read_text, refused_device, registry},
    interrupt, output, progress,
};

#[derive(Serialize)]
struct SanitizeRow {
    kernel: String,
    shape: Shape,
    dtype: String,
    tool: &'static str,
    gates: Vec<GateResult>,
}

/// The simulator's name where compute-sanitizer's tools have theirs: it looks for what all four of them look for.
const PTXSAN: &str = "ptxsan";

/// Small, ragged, and the one length that some kernels are made for.
const DEFAULT_SHAPES: [&str; 3] = ["tiny", "b1h4s77d64:causal", "b1h1s512d64:causal"];

/// The shapes that were asked for, else these.
fn parsed(asked: &[Shape], default: &[&str]) -> anyhow::Result<Vec<Shape>> {
    if !asked.is_empty() {
        return Ok(asked.to_vec());
    }
    Ok(default.iter().map(|text| text.parse()).collect::<Result<_, _>>()?)
}

/// Where kernels run, in the modes that have a choice.
fn device(args: &Sanitize) -> DeviceId {
    args.device.unwrap_or(DeviceId::Cuda(0))
}

/// Refuses any device but the simulator for a mode that only it can do; not to name one means it.
pub(crate) fn only_on_sim(args: &Sanitize, mode: &str) -> anyhow::Result<()> {
    match args.device {
        None | Some(DeviceId::Sim) => Ok(()),
        Some(gpu @ DeviceId::Cuda(_)) => anyhow::bail!(
            "{mode} runs on the simulator, not on --device {gpu}: the allowed device is sim; use --device sim or leave --device \
             out"
        ),
        Some(other) => Err(refused_device(other, &["sim"])),
    }
}

pub(crate) fn run(args: Sanitize) -> anyhow::Result<Status> {
    if args.mutation_score {
        return super::mutation::run(&args);
    }
    if args.mutants {
        return mutants::run(&args);
    }
    if let Some(most) = args.all_variants {
        return variants::run(&args, most);
    }
    let registry = registry(&args.cuda.kernel_path)?;
    let shapes = parsed(&args.shapes, &DEFAULT_SHAPES)?;
    let mut work: Vec<Work<'_>> = Vec::new();
    for (name, kernel) in named_kernels(&registry, &args.cuda.kernels)? {
        let dtypes = if args.dtype.is_empty() { &kernel.manifest.dtypes[..1] } else { &args.dtype };
        for &shape in &shapes {
            work.extend(dtypes.iter().map(|dtype| Work { name: name.clone(), kernel, shape, dtype: *dtype }));
        }
    }
    interrupt::listen();
    let mut environment = Environment::look(None);
    let rows = if device(&args) == DeviceId::Sim {
        let sim = Sim::open(registry.clone())?;
        environment.accelerator = sim.accelerator();
        under_ptxsan(&sim, &work, policy(&args)?)?
    } else {
        let DeviceId::Cuda(ordinal) = device(&args) else {
            return Err(refused_device(device(&args), &["cuda", "cuda:N", "sim"]));
        };
        let ready = ready(&args, ordinal);
        environment.accelerator = ready.as_ref().ok().and_then(|ready| ready.accelerator.clone());
        under_sanitizer(&args, ready, &work)?
    };

    if args.json {
        output::print_json("sanitize", &environment, &rows)?;
    } else {
        output::print(&page(&rows))?;
    }
    let verdicts: Vec<&Verdict> = rows.iter().map(|row| &row.gates[0].verdict).collect();
    Ok(Status::of_gates(&verdicts, verdicts.iter().any(|verdict| verdict.is_pass())))
}

/// What of the simulator's findings fails.
fn policy(args: &Sanitize) -> anyhow::Result<Policy> {
    let suppressions = match &args.suppressions {
        None => Suppressions::default(),
        Some(path) => {
            let text = read_text(path)?;
            Suppressions::parse(&text).with_context(|| path.display().to_string())?
        }
    };
    Ok(Policy { fail_on: args.fail_on.0, suppressions })
}

/// Each kernel on each problem, in every order of warps.
fn under_ptxsan(sim: &Sim, work: &[Work<'_>], mut policy: Policy) -> anyhow::Result<Vec<SanitizeRow>> {
    let bar = progress::bar(work.len() as u64);
    let mut rows = Vec::new();
    for work in work {
        if interrupt::asked() {
            break;
        }
        progress::say(&bar, work.name.clone());
        let problem = Problem::new(work.shape, work.dtype)?.with_lse(true);
        let inputs = Inputs::with_poisoned_gaps(&problem, Family::Normal, 0, 8);
        let result = hazards::run(sim, &work.name, &problem, &inputs, &mut policy)?;
        rows.push(work.row(PTXSAN, result.gate(PTXSAN)));
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// Each kernel on each problem under each tool, several at once.
fn under_sanitizer(
    args: &Sanitize,
    ready: Result<Ready, String>,
    work: &[Work<'_>],
) -> anyhow::Result<Vec<SanitizeRow>> {
    let program = program()?;
    let mut jobs: Vec<(&Work<'_>, Tool, Result<&PathBuf, String>)> = Vec::new();
    for work in work {
        let can_run = match &ready {
            Ok(ready) => work.supported(&ready.target)?.map(|()| &ready.sanitizer),
            Err(why) => Err(why.clone()),
        };
        jobs.extend(args.tools.iter().map(|tool| (work, *tool, can_run.clone())));
    }
    let bar = progress::bar(jobs.len() as u64);
    let rows = in_parallel(&jobs, args.workers as usize, |(work, tool, can_run)| {
        progress::say(&bar, format!("{} {} {} {tool}", work.name, work.shape, work.dtype));
        let gate = match can_run {
            Ok(sanitizer) => Checked {
                sanitizer,
                program: &program.path,
                arguments: &program.arguments_before(work.check_arguments(args)),
                limit: Duration::from_secs_f64(args.timeout),
            }
            .under(*tool)?,
            Err(why) => GateResult::unavailable(tool.name(), why.clone()),
        };
        bar.inc(1);
        Ok(work.row(tool.name(), gate))
    });
    bar.finish_and_clear();
    rows.into_iter().flatten().collect()
}

fn program() -> anyhow::Result<Program> {
    Program::running().context("cannot find this program to run it again")
}

/// Works on the items in order, several at once; what Ctrl-C kept from being begun is `None`.
fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    workers: usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<Option<R>> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..workers.min(items.len()) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(i).filter(|_| !interrupt::asked()) else { break };
                    let result = work(item);
                    // Each slot is locked by the one thread that fills it, and nothing panics under the lock.
                    *results[i].lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(result);
                }
            });
        }
    });
    results
        .into_iter()
        .map(|slot| slot.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()))
        .collect()
}

/// The kernels that were asked for under the names they were asked by, which may set tunables: `sdpa_v2c[STAGES=3]`.
fn named_kernels<'a>(registry: &'a Registry, asked: &[String]) -> anyhow::Result<Vec<(String, &'a Kernel)>> {
    if asked.is_empty() {
        let kernels = chosen_cuda_kernels(registry, &[])?;
        return Ok(kernels.into_iter().map(|kernel| (kernel.name().to_owned(), kernel)).collect());
    }
    asked.iter().map(|name| Ok((name.clone(), registry.kernel(VariantId::kernel_of(name))?))).collect()
}

struct Ready {
    sanitizer: PathBuf,
    /// The GPU it would run on; a nominal one when the sanitizer was named and there is none.
    target: Target,
    /// Its name.
    accelerator: Option<String>,
}

/// The sanitizer, when there is one and a GPU to use it on; else why not.
fn ready(args: &Sanitize, ordinal: usize) -> Result<Ready, String> {
    let open = || -> evosdpa_cuda::Result<(Target, Option<String>)> {
        let device = Device::open(ordinal)?;
        Ok((device.target()?, Some(device.info().name.clone())))
    };
    if let Some(sanitizer) = &args.sanitizer {
        // A sanitizer that was named is used as it is; whether it finds a GPU is then its own to say.
        let (target, accelerator) = open().unwrap_or((Target::nominal(Arch::Sm90a), None));
        return Ok(Ready { sanitizer: sanitizer.clone(), target, accelerator });
    }
    let sanitizer = CudaTool::ComputeSanitizer.find()?;
    let (target, accelerator) = open().map_err(|error| error.to_string())?;
    Ok(Ready { sanitizer, target, accelerator })
}

/// A kernel on a problem.
struct Work<'a> {
    name: String,
    kernel: &'a Kernel,
    shape: Shape,
    dtype: DType,
}

impl Work<'_> {
    fn row(&self, tool: &'static str, gate: GateResult) -> SanitizeRow {
        let (kernel, dtype) = (self.name.clone(), self.dtype.name().to_owned());
        SanitizeRow { kernel, shape: self.shape, dtype, tool, gates: vec![gate] }
    }

    /// Whether the kernel takes the problem: one that does not is not launched, and would look clean.
    fn supported(&self, target: &Target) -> anyhow::Result<Result<(), String>> {
        let mut facts = ProblemFacts::try_from(&Problem::new(self.shape, DType::F16)?)?;
        // As `check` asks for it.
        (facts.dtype, facts.lse) = (self.dtype, true);
        Ok(self.kernel.supports(&facts, target).map_err(|refusal| refusal.to_string()))
    }

    /// One kernel, one problem, one seed, launched once: everything under the tool is many times slower.
    fn check_arguments(&self, args: &Sanitize) -> Vec<OsString> {
        let shape = self.shape.to_string();
        let device = device(args).to_string();
        let fixed = ["check", "--device", &device, "--seeds", "1", "--once", "--json"];
        let work = ["--shapes", &shape, "--kernels", &self.name, "--dtype", self.dtype.name()];
        let mut arguments: Vec<OsString> = fixed.into_iter().chain(work).map(OsString::from).collect();
        for folder in &args.cuda.kernel_path {
            arguments.extend(["--kernel-path".into(), folder.into()]);
        }
        arguments
    }
}

/// A line for each kernel and problem with a word for each tool, then what was found.
fn page(rows: &[SanitizeRow]) -> String {
    let mut tools: Vec<&str> = Vec::new();
    for row in rows {
        if !tools.contains(&row.tool) {
            tools.push(row.tool);
        }
    }
    let same =
        |a: &SanitizeRow, b: &SanitizeRow| (&a.kernel, a.shape, &a.dtype) == (&b.kernel, b.shape, &b.dtype);
    let table_rows = rows
        .chunk_by(same)
        .map(|group| {
            let mut line = vec![group[0].kernel.clone(), group[0].shape.to_string(), group[0].dtype.clone()];
            for tool in &tools {
                let row = group.iter().find(|row| row.tool == *tool);
                line.push(row.map_or("–", |row| row.gates[0].verdict.word()).to_owned());
            }
            line
        })
        .collect();
    let mut header = vec!["kernel", "shape", "type"];
    header.extend(&tools);
    let mut page = output::table(&header, 9, table_rows);
    let mut said: Vec<&str> = Vec::new();
    for row in rows {
        let gate = &row.gates[0];
        match &gate.verdict {
            Verdict::Pass => {}
            Verdict::Fail(why) => {
                let SanitizeRow { kernel, shape, dtype, tool, .. } = row;
                let _ = writeln!(
                    page,
                    "{} {kernel} {shape} {dtype} {tool}: {why}",
                    output::coloured(&gate.verdict)
                );
            }
            // One reason keeps many rows from running: it is said once.
            Verdict::Unavailable(why) if said.contains(&why.as_str()) => {}
            Verdict::Unavailable(why) => {
                said.push(why);
                let _ = writeln!(page, "{} {why}", output::coloured(&gate.verdict));
            }
        }
    }
    page
}
