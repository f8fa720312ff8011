//! `evosdpa sanitize`: is every kernel clean under compute-sanitizer?

use std::{fmt::Write, path::PathBuf, time::Duration};

use anyhow::Context;
use evosdpa_core::{DType, Problem, Shape};
use evosdpa_cuda::{Device, Program};
use evosdpa_kernels::{Arch, InputType, Kernel, ProblemFacts, Registry, Target};
use evosdpa_lab::{
    gate::{
        GateResult, Verdict,
        sanitizer::{Checked, Tool},
    },
    machine::Environment,
    tool::CudaTool,
};
use serde::Serialize;

use crate::{
    Found,
    args::Sanitize,
    command::{chosen_cuda_kernels, cuda_ordinal, registry, unknown_device},
    interrupt, output, progress,
};

#[derive(Serialize)]
struct SanitizeRow {
    kernel: String,
    shape: Shape,
    dtype: String,
    tool: Tool,
    gates: Vec<GateResult>,
}

pub(crate) fn run(args: Sanitize) -> anyhow::Result<Found> {
    if args.mutation_score {
        return super::mutation::run(&args);
    }
    let Some(ordinal) = cuda_ordinal(&args.device) else {
        return Err(unknown_device(&args.device, &["cuda", "cuda:N"]));
    };
    let registry = registry(&args.kernel_path)?;
    let mut work: Vec<Work<'_>> = Vec::new();
    for (name, kernel) in named_kernels(&registry, &args.kernels)? {
        let dtypes = if args.dtype.is_empty() { &kernel.manifest.dtypes[..1] } else { &args.dtype };
        for &shape in &args.shapes {
            work.extend(dtypes.iter().map(|dtype| Work { name: name.clone(), kernel, shape, dtype: *dtype }));
        }
    }
    let ready = ready(&args, ordinal);
    let program = Program::running().context("cannot find this program to run it under the sanitizer")?;
    interrupt::listen();

    let bar = progress::bar((work.len() * args.tools.len()) as u64);
    let mut rows = Vec::new();
    for work in work {
        let can_run = match &ready {
            Ok(ready) => work.supported(&ready.target)?.map(|()| &ready.sanitizer),
            Err(why) => Err(why.clone()),
        };
        for &tool in &args.tools {
            if interrupt::asked() {
                break;
            }
            let Work { name, shape, dtype, .. } = &work;
            progress::say(&bar, format!("{name} {shape} {dtype} {tool}"));
            let gate = match &can_run {
                Ok(sanitizer) => Checked {
                    sanitizer,
                    program: &program.path,
                    arguments: &started_by(&program, work.check_arguments(&args)),
                    limit: Duration::from_secs_f64(args.timeout),
                }
                .under(tool)?,
                Err(why) => GateResult::unavailable(tool.name(), why.clone()),
            };
            let (kernel, dtype) = (name.clone(), dtype.name().to_owned());
            rows.push(SanitizeRow { kernel, shape: *shape, dtype, tool, gates: vec![gate] });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();

    if args.json {
        output::print_json("sanitize", &Environment::look(None), &rows)?;
    } else {
        output::print(&page(&rows))?;
    }
    let verdicts: Vec<&Verdict> = rows.iter().map(|row| &row.gates[0].verdict).collect();
    Ok(if interrupt::asked() {
        Found::Interrupted
    } else if verdicts.iter().any(|verdict| verdict.is_fail()) {
        Found::Failure
    } else if verdicts.iter().any(|verdict| verdict.is_pass()) {
        Found::NothingWrong
    } else {
        Found::Unavailable
    })
}

/// A program's own arguments after those that start it.
fn started_by(program: &Program, own: Vec<String>) -> Vec<String> {
    let first = program.arguments.iter().map(|argument| argument.to_string_lossy().into_owned());
    first.chain(own).collect()
}

/// The kernels that were asked for under the names they were asked by, which may set tunables: `sdpa_v2c[STAGES=3]`.
fn named_kernels<'a>(registry: &'a Registry, asked: &[String]) -> anyhow::Result<Vec<(String, &'a Kernel)>> {
    if asked.is_empty() {
        let kernels = chosen_cuda_kernels(registry, &[])?;
        return Ok(kernels.into_iter().map(|kernel| (kernel.name().to_owned(), kernel)).collect());
    }
    let base = |name: &str| name.split('[').next().unwrap_or_default().to_owned();
    asked.iter().map(|name| Ok((name.clone(), registry.kernel(&base(name))?))).collect()
}

struct Ready {
    sanitizer: PathBuf,
    /// The GPU it would run on; a nominal one when the sanitizer was named and there is none.
    target: Target,
}

/// The sanitizer, when there is one and a GPU to use it on; else why not.
fn ready(args: &Sanitize, ordinal: usize) -> Result<Ready, String> {
    let target = || Device::open(ordinal).and_then(|device| device.target());
    if let Some(sanitizer) = &args.sanitizer {
        // A sanitizer that was named is used as it is; whether it finds a GPU is then its own to say.
        let target = target().unwrap_or(Target::nominal(Arch::Sm90a));
        return Ok(Ready { sanitizer: sanitizer.clone(), target });
    }
    let sanitizer = CudaTool::ComputeSanitizer.find()?;
    Ok(Ready { sanitizer, target: target().map_err(|error| error.to_string())? })
}

/// A kernel on a problem.
struct Work<'a> {
    name: String,
    kernel: &'a Kernel,
    shape: Shape,
    dtype: InputType,
}

impl Work<'_> {
    /// Whether the kernel takes the problem: one that does not is not launched, and would look clean.
    fn supported(&self, target: &Target) -> anyhow::Result<Result<(), String>> {
        let mut facts = ProblemFacts::try_from(&Problem::new(self.shape, DType::F16)?)?;
        // As `check` asks for it.
        (facts.dtype, facts.lse) = (self.dtype, true);
        Ok(self.kernel.supports(&facts, target).map_err(|refusal| refusal.to_string()))
    }

    /// One kernel, one problem, one seed, launched once: everything under the tool is many times slower.
    fn check_arguments(&self, args: &Sanitize) -> Vec<String> {
        let shape = self.shape.to_string();
        let fixed = ["check", "--device", &args.device, "--seeds", "1", "--once", "--json"];
        let work = ["--shapes", &shape, "--kernels", &self.name, "--dtype", self.dtype.name()];
        let mut arguments: Vec<String> = fixed.into_iter().chain(work).map(str::to_owned).collect();
        for folder in &args.kernel_path {
            arguments.extend(["--kernel-path".to_owned(), folder.display().to_string()]);
        }
        arguments
    }
}

/// A line for each kernel and problem with a word for each tool, then what was found.
fn page(rows: &[SanitizeRow]) -> String {
    let mut tools: Vec<Tool> = Vec::new();
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
    header.extend(tools.iter().map(|tool| tool.name()));
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
