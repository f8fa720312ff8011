//! How many times as fast as the fastest baseline, with its interval.

use super::{
    super::document::Document,
    Chart, Scale,
    rows::{Rows, SPAN},
    short,
};
use crate::{measure::compare::Outcome, record::Row};

/// Kernels against the fastest baseline of each problem, or, where there is no baseline, against the first kernel.
pub(crate) fn chart(document: &Document) -> Option<Chart> {
    let problems = document.problems();
    let compared: Vec<(String, Vec<Compared<'_>>)> = problems
        .iter()
        .map(|problem| (problem.name.clone(), problem.rows.iter().filter_map(compared).collect()))
        .filter(|(_, rows): &(String, Vec<Compared<'_>>)| !rows.is_empty())
        .collect();
    if compared.is_empty() {
        return None;
    }
    let all = compared.iter().flat_map(|(_, rows)| rows.iter().flat_map(|row| [row.low, row.high, 1.0]));
    let scale = Scale::log(all, SPAN);
    let groups: Vec<usize> = compared.iter().map(|(_, rows)| rows.len()).collect();
    let mut chart = Rows::new("speedup", &groups, scale, "times as fast (95 % interval)");
    chart.reference(1.0);
    for (problem, rows) in &compared {
        chart.group(&format!("{problem}: against {}", rows[0].against));
        for row in rows {
            let y = chart.row(&row.row.kernel, false, &format!("{}×", short(row.ratio)));
            let (x, low, high) = (chart.place(row.ratio), chart.place(row.low), chart.place(row.high));
            // How far from equal, at a glance.
            chart.canvas.line([chart.place(1.0), y], [x, y], &format!("stem {}", row.class));
            chart.canvas.line([low, y], [high, y], &format!("interval {}", row.class));
            let tip = format!(
                "{} on {problem}: {}× as fast as {} ({}–{}), {}",
                row.row.kernel,
                short(row.ratio),
                row.against,
                short(row.low),
                short(row.high),
                row.word
            );
            let key = format!("{}|{}", row.row.kernel, problem);
            chart.canvas.mark(
                key,
                row.ratio,
                format_args!(r#"circle cx="{x:.1}" cy="{y:.1}" r="4.5""#),
                row.class,
                &tip,
            );
        }
    }
    Some(chart.canvas.finish("Speed-up by problem"))
}

struct Compared<'a> {
    row: &'a Row,
    against: &'a str,
    ratio: f64,
    low: f64,
    high: f64,
    word: Outcome,
    class: &'static str,
}

fn compared<'a>(row: &&'a Row) -> Option<Compared<'a>> {
    let row: &'a Row = row;
    if row.baseline {
        return None;
    }
    let (against, comparison) = row.fastest_baseline().or_else(|| row.speedup.iter().next())?;
    let [low, high] = comparison.interval;
    let class = match comparison.verdict {
        Outcome::Fast => "fast",
        Outcome::Slow => "slow",
        Outcome::Same => "same",
        Outcome::Ambiguous => "ambiguous",
    };
    Some(Compared { row, against, ratio: comparison.ratio, low, high, word: comparison.verdict, class })
}
