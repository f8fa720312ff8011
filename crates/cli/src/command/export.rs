//! `evosdpa export TOOL`: a problem, and a kernel, as files that another tool takes.

use anyhow::Context;
use evosdpa_core::Problem;
use evosdpa_kernels::Registry;
use evosdpa_lab::{
    exchange::{self, Tool},
    machine::Environment,
};
use serde::Serialize;

use crate::{
    Status,
    args::Export,
    command::{registry, write_files},
    output,
};

#[derive(Serialize)]
struct ExportRow {
    tool: &'static str,
    problem: String,
    folder: String,
    files: Vec<String>,
}

pub(crate) fn run(args: Export) -> anyhow::Result<Status> {
    let problem = Problem::new(args.shape, args.dtype).context("--shape")?;
    let mut registry = registry(&args.kernel_path)?;
    let evolved = match args.kernel.as_deref().filter(|_| args.tool == Tool::OpenEvolve) {
        Some(kernel) => Some(renamed(&mut registry, kernel)?),
        None => None,
    };
    let kernel = match &evolved {
        Some(name) => Some(registry.kernel(name)?),
        None => None,
    };
    let files = exchange::files(args.tool, &problem, kernel)?;
    write_files(&args.out, &files)?;
    let row = ExportRow {
        tool: args.tool.name(),
        problem: problem.to_string(),
        folder: args.out.display().to_string(),
        files: files.into_iter().map(|(name, _)| name).collect(),
    };
    if args.json {
        output::print_json("export", &Environment::look(None), &[row])?;
    } else {
        output::print(&format!(
            "{} as {} in {}: {}\n",
            row.problem,
            row.tool,
            row.folder,
            row.files.join(", ")
        ))?;
    }
    Ok(Status::Passed)
}

/// The kernel under a name of its own, beside which the program's stays.
fn renamed(registry: &mut Registry, kernel: &str) -> anyhow::Result<String> {
    let source = registry.kernel(kernel)?.source.to_string();
    let name = format!("{kernel}_evolved");
    registry.register_source(kernel, &name, &source)?;
    Ok(name)
}
