//! `evosdpa check`: is every kernel right?

use std::{collections::BTreeMap, fmt::Write, time::Duration};

use evosdpa_core::{DType, Problem};
use evosdpa_kernels::VariantId;
use evosdpa_lab::{
    device::{Device, DeviceId},
    gate::{
        GateResult, Verdict,
        correctness::{self, CaseResult},
        suite::{self, CaseSpec, Group},
    },
    machine::{self, Environment},
};
use evosdpa_oracle::{
    Case, Control,
    inputs::{Family, Inputs},
};
use serde::Serialize;

use crate::{
    Status,
    args::Check,
    command::{Opened, chosen_kernels, lengths, registry},
    interrupt, output, progress,
};

#[derive(Serialize)]
struct CheckRow {
    kernel: String,
    device: DeviceId,
    problem: String,
    group: &'static str,
    family: &'static str,
    seed: u64,
    max_error: Option<f64>,
    #[serde(skip)]
    machine_fault: bool,
    gates: Vec<GateResult>,
}

impl CheckRow {
    fn case(&self) -> String {
        format!("{} on {} {} seed {}", self.kernel, self.problem, self.family, self.seed)
    }
}

pub(crate) fn run(args: Check) -> anyhow::Result<Status> {
    let mut known = registry(&args.common.kernel_path)?;
    if args.mutants {
        known = known.with_mutants();
    }
    let Opened { device, no_gpu } =
        args.common.open_with(known, args.time_limit.map(Duration::from_secs_f64))?;
    let kernels = chosen_kernels(device.as_ref(), &args.kernels, &args.common.kernel_path)?;
    let work = work(&args, device.as_ref(), &kernels)?;
    for (spec, _) in &work {
        machine::refuse_what_does_not_fit(&spec.problem, 1)?;
    }
    interrupt::listen();
    compile_ahead(&args, device.as_ref(), &work)?;

    let bar = progress::bar(work.len() as u64);
    let mut rows = Vec::new();
    for (spec, kernels) in work {
        if interrupt::asked() {
            break;
        }
        progress::say(&bar, spec.label());
        // The answer is worked out once, whatever the number of kernels and variants.
        let ask = if args.once { Ask::once(&spec) } else { Ask::check(&spec, &args) };
        for kernel in kernels {
            let (gate, result) = ask.of(device.as_ref(), &kernel)?;
            let (max_error, machine_fault) = (result.max_error, result.machine_fault);
            rows.push(CheckRow {
                kernel,
                device: device.id(),
                problem: spec.asked(),
                group: spec.group.name(),
                family: spec.family.name(),
                seed: spec.seed,
                max_error,
                machine_fault,
                gates: vec![result.gate(gate)],
            });
        }
        bar.inc(1);
    }
    bar.finish_and_clear();

    if args.common.json {
        let mut environment = Environment::look(args.common.thread_count());
        environment.accelerator = device.accelerator();
        environment.no_accelerator = no_gpu;
        output::print_json("check", &environment, &rows)?;
    } else {
        output::print(&page(&rows, no_gpu.as_deref()))?;
    }
    let verdicts: Vec<&Verdict> = rows.iter().map(|row| &row.gates[0].verdict).collect();
    let status = Status::of_gates(&verdicts, verdicts.iter().any(|verdict| verdict.is_pass()));
    Ok(match status {
        Status::Unavailable => output::nothing_done("checked", rows.iter().map(reason)),
        other => other,
    })
}

/// A row's kernel, and what its gate says.
fn reason(row: &CheckRow) -> (String, String) {
    (row.kernel.clone(), row.gates[0].detail.clone())
}

/// What is asked of each kernel about one case.
enum Ask {
    Check { case: Box<Case>, forced: Option<Control>, runs: usize },
    Once(Box<(Problem, [Inputs; 1])>),
}

impl Ask {
    fn check(spec: &CaseSpec, args: &Check) -> Self {
        Self::Check { case: Box::new(spec.build()), forced: args.force, runs: args.runs as usize }
    }

    fn once(spec: &CaseSpec) -> Self {
        Self::Once(Box::new((spec.problem, [spec.inputs()])))
    }

    /// The gate's name, and what it says.
    fn of(&self, device: &dyn Device, kernel: &str) -> anyhow::Result<(&'static str, CaseResult)> {
        Ok(match self {
            Self::Check { case, forced, runs } => {
                ("correctness", correctness::check_runs(device, kernel, case, *forced, *runs)?)
            }
            Self::Once(data) => ("launch", correctness::launch(device, kernel, &data.0, &data.1, 1)?),
        })
    }
}

/// Every case with the kernels, or variants of kernels, that it is put to.
fn work(
    args: &Check,
    device: &dyn Device,
    kernels: &[String],
) -> anyhow::Result<Vec<(CaseSpec, Vec<String>)>> {
    let dtypes: Vec<DType> = if args.dtype.is_empty() {
        let taken = |dtype: &DType| kernels.iter().any(|kernel| device.takes(kernel, *dtype));
        DType::ALL.into_iter().filter(taken).collect()
    } else {
        args.dtype.clone()
    };
    let mut work = Vec::new();
    for spec in specs(args, device.id(), &dtypes)? {
        // A type that was not asked for by name is only for those who take it.
        let takes = |kernel: &&String| !args.dtype.is_empty() || device.takes(kernel, spec.problem.dtype());
        let kernels: Vec<String> = kernels.iter().filter(takes).cloned().collect();
        let kernels = expanded(device, &kernels, &spec, args.all_variants)?;
        work.push((spec, kernels));
    }
    Ok(work)
}

fn compile_ahead(args: &Check, device: &dyn Device, work: &[(CaseSpec, Vec<String>)]) -> anyhow::Result<()> {
    let pairs: Vec<(String, Problem)> = work
        .iter()
        .flat_map(|(spec, kernels)| kernels.iter().map(|kernel| (kernel.clone(), spec.problem)))
        .collect();
    let workers = match args.workers {
        Some(workers) => workers as usize,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let bar = progress::bar(0);
    device.prepare(&pairs, workers, &|begun, of| {
        bar.set_length(of as u64);
        bar.set_position(begun as u64);
        progress::say(&bar, "compiling".to_owned());
        !interrupt::asked()
    })?;
    bar.finish_and_clear();
    Ok(())
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

fn specs(args: &Check, device: DeviceId, dtypes: &[DType]) -> anyhow::Result<Vec<CaseSpec>> {
    let mut specs = Vec::new();
    for &dtype in dtypes {
        if args.shapes.is_empty() && args.all_variants.is_some() {
            let short = |spec: &CaseSpec| spec.problem.sizes().seq_q < 512;
            specs.extend(suite::variants(dtype)?.into_iter().filter(|spec| !args.quick || short(spec)));
            continue;
        }
        if args.shapes.is_empty() && device == DeviceId::Sim {
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
        for (at, &shape) in args.shapes.iter().enumerate() {
            let lengths = lengths::of_shape(&args.lengths, at, args.shapes.len())?;
            let problem = lengths::fitted(&Problem::new(shape, dtype)?.with_lse(true), lengths)?;
            for family in families(args) {
                for seed in 0..args.seeds {
                    specs.push(CaseSpec {
                        group: Group::Families,
                        problem,
                        family,
                        seed,
                        row_gap: Some(8),
                        lengths,
                    });
                }
            }
        }
    }
    Ok(specs)
}

/// The input families of shapes that were given: those asked for, and otherwise all, but for one where nobody looks.
fn families(args: &Check) -> Vec<Family> {
    let all = if args.once { &Family::ALL[..1] } else { &Family::ALL[..] };
    if args.families.is_empty() { all.to_vec() } else { args.families.clone() }
}

/// Counts by kernel, dtype and group, then every failure and every fault of the machine in full.
fn page(rows: &[CheckRow], no_gpu: Option<&str>) -> String {
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
        let dtype = row.problem.split([' ', ',']).nth(1).unwrap_or_default().to_owned();
        let kernel = VariantId::kernel_of(&row.kernel).to_owned();
        let tally = tallies.entry((kernel, dtype, row.group)).or_default();
        let gate = &row.gates[0];
        match &gate.verdict {
            Verdict::Pass => tally.passed += 1,
            Verdict::Fail(why) => {
                tally.failed += 1;
                let _ = writeln!(failures, "{} {}: {why}", output::coloured(&gate.verdict), row.case());
            }
            Verdict::Unavailable(why) => {
                tally.unavailable += 1;
                if row.machine_fault {
                    let _ = writeln!(failures, "{} {}: {why}", output::coloured(&gate.verdict), row.case());
                }
            }
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
    let header = ["kernel", "dtype", "cases", "verdict", "passed", "unavailable", "max error"];
    let mut page = output::table(&header, 4, table_rows);
    if !failures.is_empty() {
        let _ = write!(page, "\n{failures}");
    }
    if let Some(why) = no_gpu {
        let _ = writeln!(page, "\n{}", output::no_gpu(why));
    }
    page
}
