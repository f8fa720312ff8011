//! `evosdpa sanitize --device sim --all-variants`: is every variant right and clean, whatever the order of warps?

use std::{fmt::Write, thread};

use evosdpa_core::Shape;
use evosdpa_lab::{
    device::{Device as _, Sim},
    gate::Verdict,
    machine::Environment,
    sweep::{LONG, Lot, SMALL, SweepRow, Trial, case_spec},
};

use super::{in_parallel, named_kernels, only_on_sim, parsed};
use crate::{Status, args::Sanitize, command::registry, interrupt, output, progress};

pub(super) fn run(args: &Sanitize, most: usize) -> anyhow::Result<Status> {
    // Only the simulator can be asked for an order of warps.
    only_on_sim(args, "--all-variants")?;
    let sim = Sim::open(registry(&args.cuda.kernel_path)?)?;
    interrupt::listen();
    let mut environment = Environment::look(None);
    environment.accelerator = sim.accelerator();
    let rows = sweep(args, &sim, most)?;

    if args.json {
        output::print_json("sanitize.variants", &environment, &rows)?;
    } else {
        output::print(&page(&rows))?;
    }
    let verdicts: Vec<&Verdict> = rows.iter().map(|row| &row.gates[0].verdict).collect();
    Ok(if interrupt::asked() {
        Status::Interrupted
    } else if verdicts.iter().any(|verdict| verdict.is_fail()) {
        Status::Failed
    } else if verdicts.iter().any(|verdict| verdict.is_pass()) {
        Status::Passed
    } else {
        Status::Unavailable
    })
}

/// One row for each kernel, type and shape. What Ctrl-C leaves undone is not in them.
fn sweep(args: &Sanitize, sim: &Sim, most: usize) -> anyhow::Result<Vec<SweepRow>> {
    let (small, long) = (parsed(&args.shapes, &SMALL)?, parsed(&[], &LONG)?);
    let mut lots: Vec<Result<Lot, SweepRow>> = Vec::new();
    for (name, kernel) in named_kernels(sim.registry(), &args.cuda.kernels)? {
        let dtypes = if args.dtype.is_empty() { &kernel.manifest.dtypes } else { &args.dtype };
        for &dtype in dtypes {
            let takes = |shape: &&Shape| {
                case_spec(**shape, dtype).is_ok_and(|spec| sim.refuses(&name, &spec.problem).is_none())
            };
            let is_for_long = args.shapes.is_empty() && !small.iter().any(|shape| takes(&shape));
            for &shape in if is_for_long { &long } else { &small } {
                let spec = case_spec(shape, dtype)?;
                let lot = Lot::new(sim, &name, spec, most)?;
                lots.push(lot.map_err(|why| SweepRow::refused(&name, &spec, why)));
            }
        }
    }
    compile(sim, lots.iter().flatten())?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let steps: usize = lots.iter().flatten().map(|lot| lot.variants.len()).sum();
    let bar = progress::bar(steps as u64);
    let mut rows = Vec::new();
    for lot in lots {
        if interrupt::asked() {
            break;
        }
        let lot = match lot {
            Ok(lot) => lot,
            Err(refused) => {
                rows.push(refused);
                continue;
            }
        };
        let trial = Trial::new(sim, &lot.spec);
        progress::say(&bar, format!("{} on {}", lot.kernel, lot.spec.problem));
        let shown = in_parallel(&lot.variants, cores, |variant| {
            let shown = trial.of(variant).map(|shown| (variant.clone(), shown));
            bar.inc(1);
            shown
        });
        let shown = shown.into_iter().flatten().collect::<Result<Vec<_>, _>>()?;
        rows.push(SweepRow::new(&lot, &shown));
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn compile<'a>(sim: &Sim, lots: impl Iterator<Item = &'a Lot>) -> anyhow::Result<()> {
    let work: Vec<_> =
        lots.flat_map(|lot| lot.variants.iter().map(|variant| (variant.clone(), lot.spec.problem))).collect();
    let bar = progress::bar(0);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    sim.prepare(&work, cores, &|begun, of| {
        bar.set_length(of as u64);
        bar.set_position(begun as u64);
        progress::say(&bar, "compiling");
        !interrupt::asked()
    })?;
    bar.finish_and_clear();
    Ok(())
}

/// A line for each kernel, type and shape, then every variant that is wrong.
fn page(rows: &[SweepRow]) -> String {
    let table_rows = rows
        .iter()
        .filter(|row| row.looked_at > 0)
        .map(|row| {
            let looked_at = if row.looked_at == row.variants {
                row.variants.to_string()
            } else {
                format!("{} of {}", row.looked_at, row.variants)
            };
            vec![
                row.kernel.clone(),
                row.shape.to_string(),
                row.dtype.clone(),
                row.gates[0].verdict.word().to_owned(),
                looked_at,
                row.codes.to_string(),
                row.runs.to_string(),
                format!("{:.1e}", row.max_error),
            ]
        })
        .collect();
    let header = ["kernel", "shape", "type", "verdict", "variants", "codes", "runs", "max error"];
    let mut page = output::table(&header, 4, table_rows);
    for row in rows {
        for failure in &row.failures {
            let verdict = output::coloured(&row.gates[0].verdict);
            let case = format!("{} on {} {}", failure.variant, row.shape, row.dtype);
            let _ = writeln!(page, "{verdict} {}", output::wrapped(&format!("{case}: {}", failure.why), 4));
        }
    }
    let not_taken = rows.iter().filter(|row| row.looked_at == 0).count();
    if not_taken > 0 {
        let _ = writeln!(page, "{not_taken} times a kernel does not take a problem: --json says why");
    }
    let (codes, runs) = rows.iter().fold((0, 0), |(codes, runs), row| (codes + row.codes, runs + row.runs));
    let wrong: usize = rows.iter().map(|row| row.failures.len()).sum();
    let _ = writeln!(page, "{codes} codes, {runs} runs, {wrong} codes wrong");
    page
}
