//! `evosdpa compare A B`: did anything change?

use evosdpa_lab::{
    Error, bench,
    machine::Environment,
    measure::compare::{Comparison, Outcome},
    record::catalogue,
};
use serde::Serialize;

use crate::{
    Status,
    args::Compare,
    output::{self, time},
};

#[derive(Serialize)]
struct CompareRow {
    kernel: String,
    problem: String,
    a_p50_us: f64,
    b_p50_us: f64,
    comparison: Comparison,
}

pub(crate) fn run(args: Compare) -> anyhow::Result<Status> {
    let (path_a, path_b) = (catalogue::find(&args.out, &args.a)?, catalogue::find(&args.out, &args.b)?);
    let (rows_a, rows_b) = (catalogue::rows(&path_a)?, catalogue::rows(&path_b)?);
    let mut rows = Vec::new();
    for (key, b) in &rows_b {
        let Some(a) = rows_a.get(key) else { continue };
        let comparison = Comparison::unpaired(&b.samples_us, &a.samples_us, args.margin);
        if let (Some(comparison), Some(a_p50_us), Some(b_p50_us)) = (comparison, a.p50_us, b.p50_us) {
            let (kernel, problem) = key.clone();
            rows.push(CompareRow { kernel, problem, a_p50_us, b_p50_us, comparison });
        }
    }
    if rows.is_empty() {
        return Err(Error::NothingInCommon { a: args.a, b: args.b }.into());
    }
    if args.json {
        output::print_json("compare", &Environment::look(None), &rows)?;
    } else {
        output::print(&page(&rows, rows_a.len().max(rows_b.len())))?;
    }
    let regressed = rows.iter().any(|row| bench::is_regression(&row.comparison));
    Ok(if regressed && args.fail_on_regression { Status::Failed } else { Status::Passed })
}

fn page(rows: &[CompareRow], most: usize) -> String {
    let table_rows = rows
        .iter()
        .map(|row| {
            let [low, high] = row.comparison.interval;
            vec![
                row.problem.clone(),
                row.kernel.clone(),
                row.comparison.verdict.to_string(),
                time(row.a_p50_us),
                time(row.b_p50_us),
                format!("{:.3}×", row.comparison.ratio),
                format!("{low:.3}–{high:.3}"),
            ]
        })
        .collect();
    let header = ["problem", "kernel", "B is", "A p50", "B p50", "B as fast", "95 % interval"];
    let mut page = output::table(&header, 3, table_rows);
    let count = |word: Outcome| rows.iter().filter(|row| row.comparison.verdict == word).count();
    page.push_str(&format!(
        "\n{} FAST, {} SLOW, {} SAME, {} AMBIGUOUS; {} rows of the larger run have no partner\n",
        count(Outcome::Fast),
        count(Outcome::Slow),
        count(Outcome::Same),
        count(Outcome::Ambiguous),
        most - rows.len().min(most),
    ));
    page
}
