//! `evosdpa compare A B`: did anything change?

use std::{collections::BTreeMap, path::PathBuf};

use evosdpa_lab::{
    Error,
    machine::Environment,
    measure::{
        compare::Outcome,
        runs::{FEWEST_RUNS, OfRuns, Rates},
        samples::median,
    },
    record::{Row, catalogue},
};
use serde::Serialize;

use crate::{
    Status,
    args::Compare,
    output::{self, time},
};

/// The same row of several runs, by kernel and problem.
type Rows = BTreeMap<(String, String), Vec<Row>>;

#[derive(Serialize)]
struct CompareRow {
    kernel: String,
    problem: String,
    /// Median of the runs' medians.
    a_p50_us: f64,
    b_p50_us: f64,
    comparison: OfRuns,
}

pub(crate) fn run(args: Compare) -> anyhow::Result<Status> {
    let set_a = catalogue::find_set(&args.out, &args.a)?;
    let rows_a = rows(&set_a)?;
    let Some(b) = &args.b else { return self_test(&args, &rows_a, set_a.len()) };
    let set_b = catalogue::find_set(&args.out, b)?;
    if let Some(both) = set_a.iter().find(|run| set_b.contains(run)) {
        anyhow::bail!("{} is on both sides: name two sets of different runs", both.display());
    }
    let rows_b = rows(&set_b)?;
    let mut compared = Vec::new();
    for (key, b) in &rows_b {
        let Some(a) = rows_a.get(key) else { continue };
        let Some(comparison) = OfRuns::compare(&samples(b), &samples(a), args.margin) else { continue };
        let (kernel, problem) = key.clone();
        let (a_p50_us, b_p50_us) = (p50_us(a), p50_us(b));
        compared.push(CompareRow { kernel, problem, a_p50_us, b_p50_us, comparison });
    }
    if compared.is_empty() {
        return Err(Error::NothingInCommon { a: args.a, b: b.clone() }.into());
    }
    let unknown = compared.iter().any(|row| row.comparison.cannot_know());
    if args.json {
        output::print_json("compare", &Environment::look(None), &compared)?;
    } else {
        let runs = [set_a.len(), set_b.len()];
        output::print(&page(&compared, rows_a.len().max(rows_b.len()), runs))?;
    }
    let regressed = compared.iter().any(|row| row.comparison.verdict == Outcome::Slow);
    Ok(match () {
        () if !args.fail_on_regression => Status::Passed,
        () if regressed => Status::Failed,
        () if unknown => {
            output::tell(&too_few([set_a.len(), set_b.len()]));
            Status::Unavailable
        }
        () => Status::Passed,
    })
}

/// What was measured in each run.
fn rows(set: &[PathBuf]) -> anyhow::Result<Rows> {
    let mut rows = Rows::new();
    for path in set {
        for (key, row) in catalogue::rows(path)? {
            if !row.samples_us.is_empty() {
                rows.entry(key).or_default().push(row);
            }
        }
    }
    Ok(rows)
}

fn samples(rows: &[Row]) -> Vec<&[f64]> {
    rows.iter().map(|row| row.samples_us.as_slice()).collect()
}

fn p50_us(rows: &[Row]) -> f64 {
    let medians: Vec<f64> = rows.iter().map(|row| median(&row.samples_us)).collect();
    median(&medians)
}

/// Why nothing can be said, and what would help.
fn too_few(runs: [usize; 2]) -> String {
    let [a, b] = runs;
    output::wrapped(
        &format!(
            "cannot know: A has {a} and B has {b} runs, and each needs at least {FEWEST_RUNS}, because runs of one and the same \
             program differ too. `evosdpa bench --repeat {FEWEST_RUNS}` makes such a set."
        ),
        2,
    )
}

fn page(rows: &[CompareRow], most: usize, runs: [usize; 2]) -> String {
    let table_rows = rows
        .iter()
        .map(|row| {
            let OfRuns { ratio, interval, verdict, .. } = &row.comparison;
            let interval = interval.map(|[low, high]| format!("{low:.3}–{high:.3}"));
            let verdict =
                if row.comparison.cannot_know() { "cannot know".to_owned() } else { verdict.to_string() };
            vec![
                row.problem.clone(),
                row.kernel.clone(),
                verdict,
                time(row.a_p50_us),
                time(row.b_p50_us),
                format!("{ratio:.3}×"),
                interval.unwrap_or_else(|| "–".to_owned()),
            ]
        })
        .collect();
    let header = ["problem", "kernel", "B is", "A p50", "B p50", "B as fast", "99 % interval"];
    let mut page = output::table(&header, 3, table_rows);
    let known = |word: Outcome| {
        rows.iter().filter(|row| !row.comparison.cannot_know() && row.comparison.verdict == word).count()
    };
    page.push_str(&format!(
        "\n{} FAST, {} SLOW, {} SAME, {} AMBIGUOUS; {} rows of the larger set have no partner\n",
        known(Outcome::Fast),
        known(Outcome::Slow),
        known(Outcome::Same),
        known(Outcome::Ambiguous),
        most - rows.len().min(most),
    ));
    if rows.iter().any(|row| row.comparison.cannot_know()) {
        page.push_str(&format!("{}\n", too_few(runs)));
    }
    page
}

#[derive(Serialize)]
struct SelfTestRow {
    kernel: String,
    problem: String,
    runs: usize,
    per_set: usize,
    #[serde(flatten)]
    rates: Rates,
}

/// The share of wrong words that is allowed.
const FALSE_MAX: f64 = 0.02;

fn self_test(args: &Compare, rows: &Rows, runs: usize) -> anyhow::Result<Status> {
    let per_set = args.self_test.unwrap_or(FEWEST_RUNS as u32) as usize;
    anyhow::ensure!(
        runs >= 2 * per_set,
        "{} has {runs} runs; two sets of {per_set} need {}: `evosdpa bench --repeat {}` makes them",
        args.a,
        2 * per_set,
        8 * per_set
    );
    let tests: Vec<SelfTestRow> = rows
        .iter()
        .map(|((kernel, problem), rows)| SelfTestRow {
            kernel: kernel.clone(),
            problem: problem.clone(),
            runs: rows.len(),
            per_set,
            rates: Rates::against_itself(&samples(rows), per_set, args.margin),
        })
        .collect();
    let sum = |of: fn(&Rates) -> usize| tests.iter().map(|test| of(&test.rates)).sum::<usize>();
    let all = Rates {
        comparisons: sum(|rates| rates.comparisons),
        fast: sum(|rates| rates.fast),
        slow: sum(|rates| rates.slow),
        same: sum(|rates| rates.same),
        ambiguous: sum(|rates| rates.ambiguous),
    };
    if args.json {
        output::print_json("compare-self-test", &Environment::look(None), &tests)?;
    } else {
        let shown = |problem: &str, kernel: &str, rates: &Rates| {
            let counts = [rates.comparisons, rates.fast, rates.slow, rates.same, rates.ambiguous];
            let mut row = vec![problem.to_owned(), kernel.to_owned()];
            row.extend(counts.map(|count| count.to_string()));
            row.push(format!("{:.2} %", 100.0 * rates.false_positives()));
            row
        };
        let mut lines: Vec<_> =
            tests.iter().map(|test| shown(&test.problem, &test.kernel, &test.rates)).collect();
        lines.push(shown("all", "", &all));
        let header = ["problem", "kernel", "compared", "FAST", "SLOW", "SAME", "AMBIGUOUS", "false"];
        output::print(&output::table(&header, 2, lines))?;
    }
    Ok(if all.false_positives() <= FALSE_MAX { Status::Passed } else { Status::Failed })
}
