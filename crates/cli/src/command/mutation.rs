//! `evosdpa sanitize --mutation-score`: would the simulator notice if a kernel's synchronisation were missing?

use std::fmt::Write;

use evosdpa_lab::{
    device::{Device, Sim},
    machine::Environment,
    mutation::{self, Fate, MutationRow, Schedule},
};

use crate::{
    Status,
    args::Sanitize,
    command::{registry, sanitize::only_on_sim},
    interrupt, output, progress,
};

/// The share of deletions that matter which must be noticed.
const FLOOR: f64 = 0.95;

pub(crate) fn run(args: &Sanitize) -> anyhow::Result<Status> {
    // The simulator is what is measured here.
    only_on_sim(args, "--mutation-score")?;
    let sim = Sim::open(registry(&args.cuda.kernel_path)?)?;
    let subjects = mutation::subjects(&sim, &args.cuda.kernels)?;
    interrupt::listen();
    let mut environment = Environment::look(None);
    environment.accelerator = sim.accelerator();
    let bar = progress::bar(subjects.len() as u64);
    let mut rows = Vec::new();
    for subject in &subjects {
        if interrupt::asked() {
            break;
        }
        let launched = |runs: usize| progress::say(&bar, format!("{}: launch {runs}", subject.kernel));
        rows.push(mutation::score(&sim, subject, &Schedule::ALL, &launched)?);
        bar.inc(1);
    }
    bar.finish_and_clear();

    if args.json {
        output::print_json("mutation-score", &environment, &rows)?;
    } else {
        output::print(&page(&rows))?;
    }
    let (noticed, matter) = total(&rows);
    let is_clean = rows.iter().all(|row| row.score.unmutated_findings.is_empty());
    Ok(if interrupt::asked() {
        Status::Interrupted
    } else if is_clean && noticed as f64 >= FLOOR * matter as f64 {
        Status::Passed
    } else {
        Status::Failed
    })
}

fn total(rows: &[MutationRow]) -> (usize, usize) {
    rows.iter().fold((0, 0), |(noticed, matter), row| (noticed + row.noticed, matter + row.matter))
}

/// A line for each kernel, then what it does wrong as it stands and every deletion that was not noticed, with the reason
/// where there is one.
fn page(rows: &[MutationRow]) -> String {
    let mut page = String::new();
    for row in rows {
        let redundant = row.score.deletions.len() - row.matter;
        let counts = format!("{} of {} that matter noticed, {redundant} redundant", row.noticed, row.matter);
        let about = format!("{} {}: {counts}", row.kernel, row.dtype);
        let _ = writeln!(page, "{}", output::wrapped(&about, 4));
        for finding in &row.score.unmutated_findings {
            for line in format!("as it stands: {finding}").lines() {
                let _ = writeln!(page, "{}", output::wrapped(&format!("  {}", line.trim()), 4));
            }
        }
        let unnoticed = |fate: &Fate| !matches!(fate, Fate::Noticed { .. } | Fate::WrongResult { .. });
        for deletion in row.score.deletions.iter().filter(|deletion| unnoticed(&deletion.fate)) {
            let _ = writeln!(page, "{}", output::wrapped(&format!("  {deletion}"), 13));
        }
    }
    let (noticed, matter) = total(rows);
    let share = if matter == 0 { 100.0 } else { 100.0 * noticed as f64 / matter as f64 };
    let _ = writeln!(
        page,
        "mutation score {share:.1} %: {noticed} of {matter} deletions that matter are noticed"
    );
    page
}
