//! `evosdpa sanitize`: is every kernel clean under compute-sanitizer?

use std::{fmt::Write, path::PathBuf, time::Duration};

use anyhow::Context;
use evosdpa_core::Shape;
use evosdpa_cuda::loader;
use evosdpa_kernels::InputType;
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
    if cuda_ordinal(&args.device).is_none() {
        return Err(unknown_device(&args.device, &["cuda", "cuda:N"]));
    }
    let registry = registry(&args.kernel_path)?;
    let kernels = chosen_cuda_kernels(&registry, &args.kernels)?;
    let mut work: Vec<(&str, Shape, InputType)> = Vec::new();
    for kernel in &kernels {
        let dtypes = if args.dtype.is_empty() { &kernel.manifest.dtypes[..1] } else { &args.dtype };
        for &shape in &args.shapes {
            work.extend(dtypes.iter().map(|dtype| (kernel.name(), shape, *dtype)));
        }
    }
    let ready = ready(&args);
    let program =
        std::env::current_exe().context("cannot find this program to run it under the sanitizer")?;
    interrupt::listen();

    let bar = progress::bar((work.len() * args.tools.len()) as u64);
    let mut rows = Vec::new();
    for (kernel, shape, dtype) in work {
        for &tool in &args.tools {
            if interrupt::asked() {
                break;
            }
            progress::say(&bar, format!("{kernel} {shape} {dtype} {tool}"));
            let gate = match &ready {
                Ok(sanitizer) => Checked {
                    sanitizer,
                    program: &program,
                    arguments: &check_arguments(&args, kernel, shape, dtype),
                    limit: Duration::from_secs_f64(args.timeout),
                }
                .under(tool)?,
                Err(why) => GateResult::unavailable(tool.name(), why.clone()),
            };
            let (kernel, dtype) = (kernel.to_owned(), dtype.name().to_owned());
            rows.push(SanitizeRow { kernel, shape, dtype, tool, gates: vec![gate] });
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

/// The sanitizer, when there is one and a GPU to use it on; else why not.
fn ready(args: &Sanitize) -> Result<PathBuf, String> {
    // A sanitizer that was named is used as it is; whether it finds a GPU is then its own to say.
    if let Some(sanitizer) = &args.sanitizer {
        return Ok(sanitizer.clone());
    }
    let sanitizer = CudaTool::ComputeSanitizer.find()?;
    loader::driver().map_err(|error| error.to_string())?;
    Ok(sanitizer)
}

/// One kernel, one problem, one seed, each kernel launched once: everything under the tool is many times slower.
fn check_arguments(args: &Sanitize, kernel: &str, shape: Shape, dtype: InputType) -> Vec<String> {
    let shape = shape.to_string();
    let mut arguments: Vec<String> = [
        "check",
        "--device",
        &args.device,
        "--shapes",
        &shape,
        "--kernels",
        kernel,
        "--dtype",
        dtype.name(),
        "--seeds",
        "1",
        "--once",
        "--json",
    ]
    .map(str::to_owned)
    .to_vec();
    for folder in &args.kernel_path {
        arguments.extend(["--kernel-path".to_owned(), folder.display().to_string()]);
    }
    arguments
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
