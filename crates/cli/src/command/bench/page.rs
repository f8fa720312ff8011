//! What `bench` prints.

use std::fmt::Write;

use evosdpa_lab::{
    bench,
    machine::Environment,
    measure::{compare::Comparison, interleave},
    record::{Row, Run},
};

use crate::output::{self, time};

pub(super) fn page(
    environment: &Environment,
    rows: &[Row],
    record: &Run,
    no_torch: Option<&String>,
) -> String {
    let mut text = String::new();
    let _ = write_page(&mut text, environment, rows, record, no_torch);
    text
}

fn write_page(
    out: &mut String,
    env: &Environment,
    rows: &[Row],
    record: &Run,
    no_torch: Option<&String>,
) -> std::fmt::Result {
    let mut peak = env.fma_peak_gflops.map_or(String::new(), |peak| format!(", peak {peak:.0} GFLOP/s"));
    if let Some(of_bf16) = env.bf16_peak_gflops {
        let _ = write!(peak, " ({of_bf16:.0} in bf16)");
    }
    let memory = env.memory_gbps.map_or(String::new(), |gbps| format!(", memory {gbps:.0} GB/s"));
    let machine = env.accelerator.clone().unwrap_or_else(|| format!("{} · {} threads", env.cpu, env.threads));
    writeln!(out, "{machine}{peak}{memory}")?;
    if let Some(why) = &env.no_accelerator {
        writeln!(out, "{}", output::no_gpu(why))?;
    }
    writeln!(out)?;
    let columns: Vec<Column> = COLUMNS.into_iter().filter(|column| (column.wanted)(rows)).collect();
    let header: Vec<&str> = columns.iter().map(|column| column.header).collect();
    let shown = rows
        .iter()
        .filter(|row| not_installed(row).is_none())
        .map(|row| columns.iter().map(|column| (column.cell)(row)).collect())
        .collect();
    out.push_str(&output::table(&header, 3, shown));
    if let Some(why) = no_torch {
        let why = why.strip_prefix("torch: ").unwrap_or(why);
        writeln!(out, "\n{}", output::wrapped(&format!("torch: UNAVAILABLE: {why}"), 2))?;
    } else {
        write_not_installed(out, rows)?;
    }
    let words = &record.summary().words;
    if !words.is_empty() {
        writeln!(out, "\n{}", words.join("\n"))?;
    }
    if rows.iter().any(|row| !row.samples_us.is_empty() && row.samples_us.len() < interleave::ROUNDS) {
        writeln!(
            out,
            "\nFewer samples than rounds on some rows: give them more time with --budget or --iters."
        )?;
    }
    writeln!(out, "\nrecorded in {}", record.folder().display())
}

fn rate(gflops: f64) -> String {
    if gflops >= 1e4 { format!("{:.1} T", gflops / 1e3) } else { format!("{gflops:.1} G") }
}

/// A column of the table, and whether a run has anything to say in it: dashes would only take the room that long names need.
struct Column {
    header: &'static str,
    wanted: fn(&[Row]) -> bool,
    cell: fn(&Row) -> String,
}

const COLUMNS: [Column; 11] = [
    Column { header: "problem", wanted: always, cell: |row| row.problem.clone() },
    Column { header: "kernel", wanted: always, cell: Row::shown },
    Column { header: "gates", wanted: always, cell: gates },
    Column { header: "p50", wanted: always, cell: |row| number(row.p50_us, time) },
    Column { header: "between", wanted: has_between, cell: |row| number(row.between_p50_us, time) },
    Column { header: "p90", wanted: always, cell: |row| number(row.p90_us, time) },
    Column { header: "p99", wanted: |rows| !has_between(rows), cell: |row| number(row.p99_us, time) },
    Column { header: "FLOP/s", wanted: always, cell: |row| number(row.gflops, rate) },
    Column {
        header: "% roof",
        wanted: |rows| rows.iter().any(|row| row.roofline.is_some()),
        cell: |row| number(row.roofline, output::percent),
    },
    Column { header: "n", wanted: always, cell: |row| row.samples_us.len().to_string() },
    Column {
        header: "vs baseline",
        wanted: |rows| rows.iter().any(|row| row.fastest_baseline().is_some()),
        cell: |row| row.fastest_baseline().map_or("–".to_owned(), |(_, comparison)| ratio(comparison)),
    },
];

/// Where the medians beside it say something else, both are there to be seen.
fn ratio(comparison: &Comparison) -> String {
    match comparison.medians_apart() {
        None => format!("{:.2}×", comparison.ratio),
        Some(of_medians) => format!("{:.2}× (p50 {of_medians:.2}×)", comparison.ratio),
    }
}

fn always(_: &[Row]) -> bool {
    true
}

fn has_between(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.between_p50_us.is_some())
}

fn number(x: Option<f64>, show: fn(f64) -> String) -> String {
    x.map_or("–".to_owned(), show)
}

fn gates(row: &Row) -> String {
    row.first_problem().map_or("PASS".to_owned(), |gate| gate.verdict.word().to_owned())
}

/// Why a baseline is not there at all, if it is not.
fn not_installed(row: &Row) -> Option<&str> {
    let gate = row.gates.first().filter(|gate| row.baseline && gate.gate == bench::AVAILABLE)?;
    (!gate.verdict.is_pass()).then_some(gate.detail.as_str())
}

/// A line for each baseline that is not there, whatever the number of problems.
fn write_not_installed(out: &mut String, rows: &[Row]) -> std::fmt::Result {
    let mut said = Vec::new();
    for (row, why) in rows.iter().filter_map(|row| Some((row, not_installed(row)?))) {
        let why = why.strip_prefix("torch: ").unwrap_or(why);
        let line = output::wrapped(&format!("{}: UNAVAILABLE: {why}", row.kernel), 2);
        if !said.contains(&line) {
            let gap = if said.is_empty() { "\n" } else { "" };
            writeln!(out, "{gap}{line}")?;
            said.push(line);
        }
    }
    Ok(())
}
