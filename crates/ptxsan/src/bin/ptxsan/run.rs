//! `ptxsan run`: launches one after the other, under each schedule, and what they did wrong.

use crate::options::{LaunchArgs, RunArgs};
use crate::session::{Session, Shown, entry_of, is_stopped};
use crate::{input, say};
use anyhow::{Context, Result};
use ptxsan::names::demangled;
use ptxsan::{Finding, Module, Options, Outcome, Severity, Suppressions, finding, report, sarif};
use serde_json::{Value, json};

/// Values of a variable that are shown as text.
const SHOWN: usize = 16;

/// What was found in all launches of one entry.
struct Found {
    entry: String,
    findings: Vec<Finding>,
    dropped: u64,
}

/// Everything that a command line led to.
struct Report {
    found: Vec<Found>,
    seed: u64,
    suppressed: usize,
    unused: Vec<String>,
    rows: Vec<Value>,
    /// Counters and variables as text, with the schedules that they are of.
    told: Vec<(String, Vec<&'static str>)>,
}

pub(crate) fn run(args: &RunArgs, then: &[LaunchArgs], json: bool) -> Result<bool> {
    let launches: Vec<&LaunchArgs> = std::iter::once(&args.launch).chain(then).collect();
    let module = input::load(&args.input, launches.iter().filter_map(|launch| launch.entry.as_deref()))?;
    let report = all_schedules(args, &launches, &module, json)?;
    if let Some(path) = &args.sarif {
        let named =
            report.found.iter().flat_map(|found| found.findings.iter().map(|f| (found.entry.as_str(), f)));
        let document = sarif::document(&args.input.file.display().to_string(), named);
        let text = serde_json::to_string_pretty(&document)?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    if json {
        print_json(&report)?
    } else {
        print_text(&report)?
    }
    // What could not be listed may be of any severity.
    let fails = |severity: Severity| args.fail_on.0.is_some_and(|least| severity >= least);
    Ok(!report.found.iter().any(|found| {
        found.findings.iter().any(|finding| fails(finding.severity))
            || found.dropped > 0 && fails(Severity::Error)
    }))
}

fn all_schedules(args: &RunArgs, launches: &[&LaunchArgs], module: &Module, json: bool) -> Result<Report> {
    let mut suppressions = suppressions(args)?;
    let mut report = Report {
        found: Vec::new(),
        seed: args.seed,
        suppressed: 0,
        unused: Vec::new(),
        rows: Vec::new(),
        told: Vec::new(),
    };
    for launch in launches {
        let entry = entry_of(module, launch)?;
        if !report.found.iter().any(|found| found.entry == entry) {
            report.found.push(Found { entry, findings: Vec::new(), dropped: 0 });
        }
    }
    for &schedule in &args.schedule.0 {
        let options = Options { schedule, ..Options::default() };
        let mut session = Session::new(module)?;
        for (index, launch) in launches.iter().enumerate() {
            let launched = session.launch(args, launch, &options);
            let launched = match launches.len() {
                1 => launched,
                of => launched.with_context(|| format!("launch {} of {of}", index + 1)),
            };
            let (mut outcome, shown) = launched?;
            let ends = is_stopped(&outcome);
            report.suppressed += suppressions.apply(&outcome.entry, &mut outcome.findings);
            if let Some(found) = report.found.iter_mut().find(|found| found.entry == outcome.entry) {
                finding::merge(&mut found.findings, outcome.findings.iter().cloned());
                found.dropped += outcome.dropped;
            }
            if json {
                report.rows.push(row(&outcome, &shown, index, &options, args.seed)?);
            } else {
                say(&outcome.output)?;
                tell(&mut report.told, told(&outcome, &shown, launches.len()), schedule.name());
            }
            if ends && index + 1 < launches.len() {
                let left = launches.len() - index - 1;
                let text = format!("{left} more of the launches not made: this one did not end by itself\n");
                tell(&mut report.told, text, schedule.name());
                break;
            }
        }
        session.save()?;
    }
    report.unused = suppressions.unused().map(|(line, rule)| format!("line {line}: {rule}")).collect();
    Ok(report)
}

fn suppressions(args: &RunArgs) -> Result<Suppressions> {
    let Some(path) = &args.suppressions else { return Ok(Suppressions::default()) };
    let text = String::from_utf8(crate::input::bytes_of(path)?);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    Suppressions::parse(&text).with_context(|| path.display().to_string())
}

fn row(outcome: &Outcome, shown: &[Shown], index: usize, options: &Options, seed: u64) -> Result<Value> {
    let mut row = serde_json::to_value(outcome)?;
    row["launch"] = index.into();
    row["schedule"] = serde_json::to_value(options.schedule)?;
    row["seed"] = seed.into();
    if !shown.is_empty() {
        row["variables"] = serde_json::to_value(shown)?;
    }
    Ok(row)
}

/// Schedules under which the same happened are told together.
fn tell(all: &mut Vec<(String, Vec<&'static str>)>, text: String, schedule: &'static str) {
    match all.iter_mut().find(|(known, _)| *known == text) {
        Some((_, schedules)) => schedules.push(schedule),
        None => all.push((text, vec![schedule])),
    }
}

fn told(outcome: &Outcome, shown: &[Shown], launches: usize) -> String {
    let mut text = if launches > 1 { format!("{}:\n", demangled(&outcome.entry)) } else { String::new() };
    text += &outcome.counters.to_string();
    for variable in shown {
        let values: Vec<String> = variable.values.iter().take(SHOWN).map(Value::to_string).collect();
        let rest = variable.values.len().saturating_sub(SHOWN);
        let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
        text += &format!("  {} = {}{more}\n", variable.name, values.join(" ").replace('"', ""));
    }
    text
}

fn print_json(report: &Report) -> Result<()> {
    let mut findings = Vec::new();
    for found in &report.found {
        for finding in &found.findings {
            let mut value = serde_json::to_value(finding)?;
            value["entry"] = found.entry.clone().into();
            findings.push(value);
        }
    }
    let entries: Vec<Value> =
        report.found.iter().map(|f| json!({ "entry": f.entry, "name": demangled(&f.entry) })).collect();
    let document = json!({
        "schema": "ptxsan.run/3",
        "entries": entries,
        "findings": findings,
        "suppressed": report.suppressed,
        "unused_suppressions": report.unused,
        "rows": report.rows,
    });
    say(&format!("{document}\n"))
}

fn print_text(report: &Report) -> Result<()> {
    for finding in report.found.iter().flat_map(|found| &found.findings) {
        say(&format!("{finding}\n\n"))?;
    }
    for found in &report.found {
        say(&format!("{}: {}\n", demangled(&found.entry), report::tally(&found.findings, found.dropped)))?;
    }
    if report.suppressed > 0 {
        say(&format!("  {} suppressed\n", report.suppressed))?;
    }
    for rule in &report.unused {
        say(&format!("  suppression not used: {rule}\n"))?;
    }
    for (text, schedules) in &report.told {
        let word = if schedules.len() == 1 { "schedule" } else { "schedules" };
        say(&format!("{text}  {word} {}, seed {}\n", schedules.join(", "), report.seed))?;
    }
    Ok(())
}
