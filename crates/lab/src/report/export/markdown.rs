//! A run to read: environment, correctness, baseline, profile, variants, elites, next steps.

use std::fmt::{Result, Write};

use super::super::document::{Document, Source};
use crate::{gate::Verdict, profile::Direction, record::Row};

pub(crate) fn render(document: &Document) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_all(&mut out, document);
    out
}

fn write_all(out: &mut String, document: &Document) -> Result {
    let (word, why) = document.verdict();
    let names: Vec<&str> = document.sources.iter().map(|source| source.name.as_str()).collect();
    writeln!(out, "# Run {}\n\n**{word}**: {why}.\n", names.join(", "))?;
    for line in document.headlines() {
        writeln!(out, "- {line}")?;
    }
    writeln!(out, "\n## Environment\n")?;
    document.sources.iter().try_for_each(|source| environment(out, source))?;
    writeln!(out, "\n## Correctness\n")?;
    gates(out, document)?;
    writeln!(out, "\n## Baseline\n")?;
    baseline(out, document)?;
    writeln!(out, "\n## Profile\n")?;
    profiles(out, document)?;
    writeln!(out, "\n## Variants\n")?;
    variants(out, document)?;
    writeln!(out, "\n## Elites\n")?;
    elites(out, document)?;
    writeln!(out, "\n## Next steps\n")?;
    next_steps(out, document)
}

fn environment(out: &mut String, source: &Source) -> Result {
    let Some(env) = &source.environment else {
        let notes: Vec<String> = source.notes.iter().map(|(name, value)| format!("{name} {value}")).collect();
        return writeln!(
            out,
            "- {}: {}",
            source.name,
            if notes.is_empty() { "not said".to_owned() } else { notes.join(", ") }
        );
    };
    writeln!(out, "- {}: `{}` {}", source.name, source.command, source.status)?;
    let device = env.accelerator.clone().unwrap_or_else(|| format!("{}, {} threads", env.cpu, env.threads));
    writeln!(out, "  - {device}; {}, {} cores", env.system, env.cores)?;
    writeln!(
        out,
        "  - evosdpa {} at {} (dirty: {}), {}",
        env.version, env.revision, env.dirty, env.compiler
    )?;
    if let (Some(peak), Some(bandwidth)) = (env.fma_peak_gflops, env.memory_gbps) {
        writeln!(
            out,
            "  - measured peaks: {peak:.0} GFLOP/s fused multiply-add, {bandwidth:.1} GB/s memory"
        )?;
    }
    let torch = env.torch.as_deref().unwrap_or("not a baseline in this run");
    writeln!(out, "  - torch: {torch}; started {}", env.started)
}

fn gates(out: &mut String, document: &Document) -> Result {
    if document.gates.is_empty() {
        let of_candidates = !document.evolutions.is_empty();
        let words = if of_candidates { "Those of candidates are in the log." } else { "No gate ran." };
        return writeln!(out, "{words}");
    }
    writeln!(out, "| kernel | problem | gate | verdict | times | evidence |\n|---|---|---|---|---|---|")?;
    for line in &document.gates {
        let (word, detail) = (line.verdict.word(), cell(&line.detail));
        writeln!(
            out,
            "| {} | {} | {} | {word} | {} | {detail} |",
            line.kernel,
            line.problem(),
            line.gate,
            line.count
        )?;
    }
    Ok(())
}

fn baseline(out: &mut String, document: &Document) -> Result {
    if document.rows.iter().all(|row| row.p50_us.is_none()) {
        return writeln!(out, "Nothing was timed.");
    }
    writeln!(
        out,
        "| problem | kernel | p50 µs | p90 µs | p99 µs | GFLOP/s | % roof | n | against the fastest baseline |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|")?;
    for row in document.rows.iter().filter(|row| row.p50_us.is_some()) {
        let number = |x: Option<f64>| x.map_or("–".to_owned(), |x| format!("{x:.1}"));
        let Row { problem, kernel, samples_us, .. } = row;
        let against = row.fastest_baseline().map_or("–".to_owned(), |(name, c)| {
            format!("{:.2}× ({:.2}–{:.2}) {} vs {name}", c.ratio, c.interval[0], c.interval[1], c.verdict)
        });
        let (p50, p90, p99) = (number(row.p50_us), number(row.p90_us), number(row.p99_us));
        let (gflops, roof, n) =
            (number(row.gflops), number(row.roofline.map(|share| 100.0 * share)), samples_us.len());
        writeln!(
            out,
            "| {problem} | {kernel} | {p50} | {p90} | {p99} | {gflops} | {roof} | {n} | {against} |"
        )?;
    }
    Ok(())
}

fn profiles(out: &mut String, document: &Document) -> Result {
    if document.profiles.is_empty() {
        return writeln!(out, "Not profiled: `evosdpa profile --shape mission --kernels NAME`.");
    }
    for profile in &document.profiles {
        writeln!(out, "- {}", profile.sentence())?;
        for insight in &profile.insights {
            let numbers: Vec<String> =
                insight.evidence.iter().map(|e| format!("{} {:.1} {}", e.metric, e.value, e.unit)).collect();
            writeln!(out, "  - {} ({:.2}): {}", insight.id, insight.confidence, numbers.join(", "))?;
        }
    }
    Ok(())
}

fn variants(out: &mut String, document: &Document) -> Result {
    let evaluations: Vec<_> =
        document.evolutions.iter().flat_map(|evolution| &evolution.evaluations).collect();
    if evaluations.is_empty() {
        return writeln!(out, "No tune in this report.");
    }
    writeln!(out, "| id | from | operator | kernel | tunables | fitness | accepted | stopped by |")?;
    writeln!(out, "|---|---|---|---|---|---|---|---|")?;
    for e in evaluations {
        let tunables: Vec<String> =
            e.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let fitness = e.fitness.map_or("–".to_owned(), |fitness| format!("{fitness:.3}"));
        let stopped = e.stopped_by.as_deref().map(cell).unwrap_or_default();
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {fitness} | {} | {stopped} |",
            e.id,
            e.parents.join(" "),
            e.operator,
            e.kernel,
            tunables.join(" "),
            e.accepted
        )?;
    }
    Ok(())
}

fn elites(out: &mut String, document: &Document) -> Result {
    if document.evolutions.is_empty() {
        return writeln!(out, "No tune in this report.");
    }
    for verdict in document.evolutions.iter().filter_map(|evolution| evolution.verdict()) {
        writeln!(out, "{verdict}\n")?;
    }
    for elite in document.evolutions.iter().flat_map(|evolution| evolution.elites()) {
        let tunables: Vec<String> =
            elite.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let fitness = elite.fitness.unwrap_or_default();
        writeln!(out, "- {}[{}]: {fitness:.3} (evaluation {})", elite.kernel, tunables.join(" "), elite.id)?;
    }
    Ok(())
}

/// Failures first, then what the profiles point at.
fn next_steps(out: &mut String, document: &Document) -> Result {
    let mut said = 0;
    for line in document.gates.iter().filter(|line| line.verdict.is_fail()) {
        writeln!(
            out,
            "- repair {} on {}: {} {}",
            line.kernel,
            line.problem(),
            line.gate,
            cell(&line.detail)
        )?;
        said += 1;
    }
    for profile in &document.profiles {
        let Some(insight) = profile.insights.first() else { continue };
        let arrow = |direction: Direction| if direction == Direction::Up { "up" } else { "down" };
        let hints: Vec<String> =
            insight.tunables.iter().map(|hint| format!("{} {}", hint.name, arrow(hint.direction))).collect();
        let hints = if hints.is_empty() { String::new() } else { format!(" (try {})", hints.join(", ")) };
        writeln!(out, "- {}: {}{hints}", profile.kernel, insight.suggestion)?;
        said += 1;
    }
    for line in document.gates.iter() {
        if let Verdict::Unavailable(why) = &line.verdict {
            writeln!(out, "- {} could not run for {}: {}", line.gate, line.kernel, cell(why))?;
            said += 1;
        }
    }
    if said == 0 {
        writeln!(out, "- profile the slowest problem: `evosdpa profile --shape SHAPE --kernels NAME`")?;
    }
    Ok(())
}

/// Text in a table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
