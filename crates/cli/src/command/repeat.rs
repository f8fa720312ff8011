//! `evosdpa bench --repeat N`: a set of runs, which `compare` can hold against another set.
//!
//! Each run is a process of its own. What differs between processes (addresses, thread pools, what the machine did at the
//! time) is then between the runs, where `compare` looks for it.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::Context;
use evosdpa_cuda::Program;
use evosdpa_lab::{
    machine::Environment,
    measure::runs::FEWEST_RUNS,
    record::{catalogue, run::short_id},
};
use serde::Serialize;

use crate::{
    Status,
    args::Bench,
    interrupt,
    output::{self, time},
    progress,
};

/// A row of the whole set.
#[derive(Serialize)]
struct SetRow {
    set: String,
    kernel: String,
    problem: String,
    /// Median of each run, in the order the runs were made.
    p50_us: Vec<f64>,
}

pub(crate) fn run(args: Bench, own: &[OsString]) -> anyhow::Result<Status> {
    let repeat = args.repeat.unwrap_or(1);
    let program = Program::running().context("cannot find this program to run it again")?;
    let environment = Environment::look(args.common.thread_count());
    let set = args.set.clone().unwrap_or_else(|| format!("set-{}", short_id()));
    let arguments = without_repeat(own);
    interrupt::listen();
    // The run that is told to stop ends soon by itself, and is waited for.
    let _ending = interrupt::ending();
    let bar = progress::bar(u64::from(repeat));
    let mut status = Status::Passed;
    for number in 1..=repeat {
        progress::say(&bar, format!("run {number} of {repeat}"));
        let mut command = program.command();
        command.args(&arguments).stdout(Stdio::null());
        if args.set.is_none() {
            command.args(["--set", &set]);
        }
        let child = command.spawn().context("cannot start this program again")?;
        match wait(child)?.code() {
            Some(0) => {}
            Some(1) => status = Status::Failed,
            _ if interrupt::asked() => {
                status = Status::Interrupted;
                break;
            }
            // It has said why.
            _ => return Ok(Status::Unavailable),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let rows = rows(&args, &set)?;
    if args.common.json {
        output::print_json("bench-set", &environment, &rows)?;
    } else {
        output::print(&page(&rows, &set, repeat as usize))?;
    }
    Ok(status)
}

/// The command line without `--repeat`.
fn without_repeat(own: &[OsString]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut arguments = own.iter();
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--repeat") => drop(arguments.next()),
            Some(text) if text.starts_with("--repeat=") => {}
            _ => kept.push(argument.clone()),
        }
    }
    kept
}

/// Waits for a run, and hands on the request to stop.
fn wait(mut child: Child) -> anyhow::Result<ExitStatus> {
    let mut told = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if interrupt::asked() && !told {
            told = true;
            // On a terminal it has heard it already, which does no harm.
            let _ = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn rows(args: &Bench, set: &str) -> anyhow::Result<Vec<SetRow>> {
    let mut rows: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    // A set of which nothing was recorded has no runs.
    for path in catalogue::find_set(&args.out, set).unwrap_or_default() {
        for (key, row) in catalogue::rows(&path)? {
            rows.entry(key).or_default().extend(row.p50_us);
        }
    }
    let row = |((kernel, problem), p50_us)| SetRow { set: set.to_owned(), kernel, problem, p50_us };
    Ok(rows.into_iter().map(row).filter(|row| !row.p50_us.is_empty()).collect())
}

fn page(rows: &[SetRow], set: &str, asked: usize) -> String {
    let shown = |row: &SetRow| {
        let mut sorted = row.p50_us.clone();
        sorted.sort_by(f64::total_cmp);
        let (least, most) = (sorted[0], sorted[sorted.len() - 1]);
        vec![
            row.problem.clone(),
            row.kernel.clone(),
            row.p50_us.len().to_string(),
            time(sorted[sorted.len() / 2]),
            time(least),
            time(most),
            format!("{:.1} %", 100.0 * (most / least - 1.0)),
        ]
    };
    let header = ["problem", "kernel", "runs", "p50", "fastest run", "slowest run", "apart"];
    let mut page = output::table(&header, 2, rows.iter().map(shown).collect());
    page.push_str(&format!("\n{set}: compare it with another set by `evosdpa compare {set} OTHER`\n"));
    if asked < FEWEST_RUNS {
        page.push_str(&format!("compare needs at least {FEWEST_RUNS} runs in each set to know anything\n"));
    }
    page
}
