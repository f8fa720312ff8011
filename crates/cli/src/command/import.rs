//! `evosdpa import TOOL FILE`: an answer to an exported task, by the same gates as every kernel.

use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

use anyhow::Context;
use clap::Parser;
use evosdpa_core::{DType, Problem};
use evosdpa_lab::exchange::{Handed, Submission, task_beside};

use crate::{
    Status,
    args::{Cli, Command, Import},
    command::{bench, registry, write_files},
    output,
};

pub(crate) fn run(args: Import) -> anyhow::Result<Status> {
    let handed = Handed::read(args.tool, &args.file)?;
    let beside = task_beside(args.tool, &args.file);
    let shape = args.shape.or(beside.as_ref().map(|(problem, _)| problem.shape())).with_context(|| {
        format!(
            "there is no task of {} beside {}: say its shape with --shape",
            args.tool.name(),
            args.file.display()
        )
    })?;
    let dtype = args.dtype.or(beside.as_ref().map(|(problem, _)| problem.dtype())).unwrap_or(DType::BF16);
    let problem = Problem::new(shape, dtype).context("--shape")?;
    match handed {
        Handed::Python(submission) => evaluate(args, submission, &problem),
        Handed::Source(source) => {
            let kernel = args.kernel.clone().or(beside.and_then(|(_, kernel)| kernel));
            let kernel = kernel.context("name the kernel whose contract the source keeps with --kernel")?;
            make_kernel(&args, &kernel, &source, &problem)
        }
    }
}

/// A function in Python: correctness, audits, floor, and a duel with what the library would run.
fn evaluate(args: Import, submission: Submission, problem: &Problem) -> anyhow::Result<Status> {
    let mut words = of_bench(problem);
    words.extend(["--python".into(), args.python.into()]);
    words.extend(["--baseline-timeout".into(), args.timeout.to_string().into()]);
    if let Some(iters) = args.iters {
        words.extend(["--iters".into(), iters.to_string().into()]);
    }
    if let Some(out) = args.out {
        words.extend(["--out".into(), out.into()]);
    }
    let Command::Bench(mut bench) = Cli::try_parse_from(words)?.command else {
        unreachable!("that is what was written")
    };
    bench.common = args.common;
    bench::run(bench, Some(submission))
}

fn of_bench(problem: &Problem) -> Vec<OsString> {
    let words = ["evosdpa", "bench", "--no-baselines", "--shapes", &problem.shape().to_string()];
    let words = words.into_iter().chain(["--dtype", problem.dtype().name()]);
    words.map(OsString::from).collect()
}

/// A CUDA source: a kernel of its own in a folder, checked on the simulator.
fn make_kernel(args: &Import, kernel: &str, source: &str, problem: &Problem) -> anyhow::Result<Status> {
    let mut registry = registry(&args.common.kernel_path)?;
    registry.register_source(kernel, &args.name, source).with_context(|| args.file.display().to_string())?;
    let out = args.out.clone().unwrap_or_else(|| Path::new("kernels").join(&args.name));
    anyhow::ensure!(!out.exists(), "{} is there already: choose another folder with --out", out.display());
    write_files(&out, &registry.kernel(&args.name)?.files())?;
    // The simulator is slow: the same kernel on something small, as the exported evaluator does.
    let small = small(problem);
    let (name, dtype) = (args.name.as_str(), problem.dtype().name());
    let check =
        ["evosdpa", "check", "--device", "sim", "--kernels", name, "--shapes", &small, "--dtype", dtype];
    let check = [&check[..], &["--seeds", "1", "--kernel-path"]].concat().into_iter().map(OsStr::new);
    let check = check.chain([out.as_os_str()]).chain(args.common.json.then_some(OsStr::new("--json")));
    let Command::Check(check) = Cli::try_parse_from(check)?.command else {
        unreachable!("that is what was written")
    };
    let status = crate::command::check::run(check)?;
    if !args.common.json {
        let (shape, folder) = (problem.shape(), out.display());
        output::print(&format!(
            "\n{name} is in {folder}; on a GPU: evosdpa bench --device cuda --kernel-path {folder} --kernels {name} --shapes \
             {shape} --dtype {dtype}\n"
        ))?;
    }
    Ok(status)
}

fn small(problem: &Problem) -> String {
    let mask = if problem.mask() == evosdpa_core::Mask::Full { "" } else { ":causal" };
    format!("b1h{}/1s48d{}{mask}", problem.group(), problem.sizes().dim_qk)
}
