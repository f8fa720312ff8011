//! `evosdpa check`: is every kernel right?

use std::{collections::BTreeMap, fmt::Write};

use evosdpa_core::{Case, DType, Problem, inputs::Family};
use evosdpa_lab::{
    device::Device,
    gate::{
        GateResult, Verdict, correctness,
        suite::{self, CaseSpec, Group},
    },
    machine::{self, Environment},
};
use serde::Serialize;

use crate::{Found, args::Check, command::chosen_kernels, interrupt, output, progress};

#[derive(Serialize)]
struct CheckRow {
    kernel: String,
    device: String,
    problem: String,
    group: &'static str,
    family: &'static str,
    seed: u64,
    max_error: Option<f64>,
    gates: Vec<GateResult>,
}

pub(crate) fn run(args: Check) -> anyhow::Result<Found> {
    let device = args.common.open()?;
    let kernels = chosen_kernels(device.as_ref(), &args.kernels)?;
    let specs = specs(&args, &device.name())?;
    for spec in &specs {
        machine::refuse_what_does_not_fit(&spec.problem, 1)?;
    }
    interrupt::listen();

    let bar = progress::bar(specs.len() as u64);
    let mut rows = Vec::new();
    for spec in &specs {
        if interrupt::asked() {
            break;
        }
        progress::say(&bar, spec.label());
        let case = spec.build();
        for kernel in expanded(device.as_ref(), &kernels, spec, args.all_variants)? {
            if args.once {
                run_once(device.as_ref(), &kernel, &case)?;
                continue;
            }
            let result = correctness::check(device.as_ref(), &kernel, &case, args.force)?;
            let gate =
                GateResult { gate: "correctness".into(), verdict: result.verdict, detail: result.detail };
            rows.push(CheckRow {
                kernel,
                device: device.name(),
                problem: spec.problem.to_string(),
                group: spec.group.name(),
                family: spec.family.name(),
                seed: spec.seed,
                max_error: result.max_error,
                gates: vec![gate],
            });
        }
        bar.inc(1);
    }
    bar.finish_and_clear();

    if args.common.json {
        output::print_json("check", &Environment::look(args.common.thread_count()), &rows)?;
    } else {
        output::print(&page(&rows))?;
    }
    Ok(if interrupt::asked() {
        Found::Interrupted
    } else if rows.iter().any(|row| row.gates.iter().any(|gate| gate.verdict.is_fail())) {
        Found::Failure
    } else {
        Found::NothingWrong
    })
}

/// Each kernel or, when asked for, each of its variants for this problem.
fn expanded(
    device: &dyn Device,
    kernels: &[String],
    spec: &CaseSpec,
    most: Option<usize>,
) -> anyhow::Result<Vec<String>> {
    let Some(most) = most else { return Ok(kernels.to_vec()) };
    let mut all = Vec::new();
    for kernel in kernels {
        match device.refuses(kernel, &spec.problem) {
            None => all.extend(device.variants(kernel, &spec.problem, most)?),
            // Kept, so that the refusal is shown.
            Some(_) => all.push(kernel.clone()),
        }
    }
    Ok(all)
}

fn run_once(device: &dyn Device, kernel: &str, case: &Case) -> anyhow::Result<()> {
    let inputs = [case.inputs.clone()];
    if device.refuses(kernel, &case.problem).is_none() {
        device.load(kernel, &case.problem, &inputs)?.run(0)?;
    }
    Ok(())
}

fn specs(args: &Check, device: &str) -> anyhow::Result<Vec<CaseSpec>> {
    let mut specs = Vec::new();
    let dtypes = match args.dtype.as_slice() {
        [] if device == "cpu" => &DType::ALL[..],
        [] => &[DType::F16, DType::BF16],
        given => given,
    };
    for &dtype in dtypes {
        if args.shapes.is_empty() && device == "sim" {
            specs.extend(suite::simulated(dtype)?);
            continue;
        }
        if args.shapes.is_empty() {
            let seeds = if args.quick { 1 } else { args.seeds };
            let mut of_dtype = suite::cases(&Group::ALL, dtype, seeds)?;
            if args.quick {
                of_dtype.retain(|spec| spec.group != Group::Acceptance || spec.problem.sizes().seq_kv <= 512);
            }
            specs.extend(of_dtype);
            continue;
        }
        for &shape in &args.shapes {
            let problem = Problem::new(shape, dtype)?.with_lse(true);
            let families = if args.once { &Family::ALL[..1] } else { &Family::ALL[..] };
            for &family in families {
                for seed in 0..args.seeds {
                    specs.push(CaseSpec { group: Group::Families, problem, family, seed, row_gap: Some(8) });
                }
            }
        }
    }
    Ok(specs)
}

/// Counts by kernel, dtype and group, then every failure in full.
fn page(rows: &[CheckRow]) -> String {
    #[derive(Default)]
    struct Tally {
        passed: usize,
        failed: usize,
        unavailable: usize,
        max_error: f64,
    }

    let mut tallies: BTreeMap<(String, String, &str), Tally> = BTreeMap::new();
    let mut failures = String::new();
    for row in rows {
        let dtype = row.problem.split_whitespace().nth(1).unwrap_or_default().to_owned();
        let kernel = row.kernel.split('[').next().unwrap_or_default().to_owned();
        let tally = tallies.entry((kernel, dtype, row.group)).or_default();
        let gate = &row.gates[0];
        match &gate.verdict {
            Verdict::Pass => tally.passed += 1,
            Verdict::Fail(why) => {
                tally.failed += 1;
                let case = format!("{} on {} {} seed {}", row.kernel, row.problem, row.family, row.seed);
                let _ = writeln!(failures, "{} {case}: {why}", output::coloured(&gate.verdict));
            }
            Verdict::Unavailable(_) => tally.unavailable += 1,
        }
        tally.max_error = tally.max_error.max(row.max_error.unwrap_or(0.0));
    }
    let table_rows = tallies
        .into_iter()
        .map(|((kernel, dtype, group), tally)| {
            let ran = tally.passed + tally.failed;
            let verdict = match (ran, tally.failed) {
                (0, _) => "UNAVAILABLE",
                (_, 0) => "PASS",
                _ => "FAIL",
            };
            let count = format!("{} of {ran}", tally.passed);
            let error = format!("{:.1e}", tally.max_error);
            vec![
                kernel,
                dtype,
                group.to_owned(),
                verdict.to_owned(),
                count,
                tally.unavailable.to_string(),
                error,
            ]
        })
        .collect();
    let header = ["kernel", "dtype", "cases", "verdict", "passed", "not supported", "max error"];
    let table = output::table(&header, 4, table_rows);
    if failures.is_empty() { table } else { format!("{table}\n{failures}") }
}
