//! `run.md`: a run to read.

use std::fmt::Write;

use super::{Row, run::Summary};

/// Renders a run.
pub fn render(run: &Summary) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_run(&mut text, run);
    text
}

fn write_run(out: &mut String, run: &Summary) -> std::fmt::Result {
    let env = &run.environment;
    writeln!(out, "# Run {}\n", run.id)?;
    writeln!(out, "`{}`: {:?}\n", run.command, run.status)?;
    writeln!(out, "## Environment\n")?;
    writeln!(out, "- evosdpa {} at {} (dirty: {}), {}", env.version, env.revision, env.dirty, env.compiler)?;
    writeln!(out, "- {}, {} cores, {} threads, {}", env.cpu, env.cores, env.threads, env.system)?;
    if let Some(accelerator) = &env.accelerator {
        writeln!(out, "- {accelerator}")?;
    }
    writeln!(out, "- instruction sets: {}", env.isas.join(", "))?;
    if let (Some(peak), Some(bandwidth)) = (env.fma_peak_gflops, env.memory_gbps) {
        writeln!(out, "- measured peaks: {peak:.0} GFLOP/s fused multiply-add, {bandwidth:.1} GB/s memory")?;
    }
    writeln!(out, "- torch: {}", env.torch.as_deref().unwrap_or("not a baseline in this run"))?;
    writeln!(out, "- started {}\n", env.started)?;

    writeln!(out, "## Verdicts\n")?;
    for words in &run.words {
        writeln!(out, "- {words}")?;
    }
    writeln!(
        out,
        "\n## Correctness\n\n| kernel | problem | gate | verdict | detail |\n|---|---|---|---|---|"
    )?;
    for row in &run.rows {
        for gate in &row.gates {
            let (kernel, problem, word) = (&row.kernel, &row.problem, gate.verdict.word());
            writeln!(
                out,
                "| {kernel} | {problem} | {} | {word} | {} |",
                gate.gate,
                gate.detail.replace('|', "\\|")
            )?;
        }
    }
    writeln!(out, "\n## Performance\n")?;
    writeln!(out, "| kernel | problem | p50 µs | p90 µs | p99 µs | GFLOP/s | % of roofline | outliers |")?;
    writeln!(out, "|---|---|---|---|---|---|---|---|")?;
    for row in &run.rows {
        write_times(out, row)?;
    }
    Ok(())
}

fn write_times(out: &mut String, row: &Row) -> std::fmt::Result {
    let number = |x: Option<f64>| x.map_or("–".to_owned(), |x| format!("{x:.1}"));
    let Row { kernel, problem, outliers, .. } = row;
    let (p50, p90, p99) = (number(row.p50_us), number(row.p90_us), number(row.p99_us));
    let (gflops, percent) = (number(row.gflops), number(row.roofline.map(|share| 100.0 * share)));
    writeln!(out, "| {kernel} | {problem} | {p50} | {p90} | {p99} | {gflops} | {percent} | {outliers} |")
}
