//! Chart: latency samples of each row, over the row's median.

use std::fmt::Write;

use super::{
    super::document::Document,
    Chart, Scale,
    rows::{Rows, SPAN},
    time,
};

/// Ticks drawn of each row; more are thinned out evenly, and the extremes stay.
const TICKS: usize = 200;

/// Samples further from their median than this are drawn on the edge.
const WIDEST: [f64; 2] = [0.7, 1.6];

/// Every sample as a tick over its row's median, so that spreads of slow and fast kernels compare; p90 and p99 as bars.
pub(crate) fn chart(document: &Document) -> Option<Chart> {
    let mut problems = document.problems();
    for problem in &mut problems {
        problem.rows.retain(|row| !row.samples_us.is_empty() && row.p50_us.is_some_and(|p50| p50 > 0.0));
        problem.rows.sort_by(|a, b| a.p50_us.unwrap_or_default().total_cmp(&b.p50_us.unwrap_or_default()));
    }
    problems.retain(|problem| !problem.rows.is_empty());
    if problems.is_empty() {
        return None;
    }
    let over_median = problems.iter().flat_map(|p| &p.rows).flat_map(|row| {
        let p50 = row.p50_us.unwrap_or(1.0);
        let least = row.samples_us.iter().copied().fold(p50, f64::min);
        [least / p50, row.p99_us.unwrap_or(p50) / p50]
    });
    let (low, high) = over_median.fold((0.98_f64, 1.02_f64), |(low, high), x| (low.min(x), high.max(x)));
    let scale = Scale::between(low.max(WIDEST[0]), high.min(WIDEST[1]), SPAN);
    let groups: Vec<usize> = problems.iter().map(|problem| problem.rows.len()).collect();
    let mut chart = Rows::new(
        "latency",
        &groups,
        scale,
        "time over the row's median; a tick is a sample, bars are p90 and p99",
    );
    for problem in &problems {
        chart.group(&problem.name);
        for row in &problem.rows {
            let p50 = row.p50_us.unwrap_or_default();
            let y = chart.row(&row.kernel, row.baseline, &time(p50));
            let class = if row.baseline { "baseline" } else { "ours" };
            let mut path = String::new();
            for sample in thinned(&row.samples_us) {
                let _ = write!(path, "M{:.1} {:.1}v8", chart.place(sample / p50), y - 4.0);
            }
            chart.canvas.push(format_args!(r#"<path d="{path}" class="ticks {class}"/>"#));
            for quantile in [row.p90_us, row.p99_us].into_iter().flatten() {
                let x = chart.place(quantile / p50);
                chart.canvas.line([x, y - 6.0], [x, y + 6.0], "quantile");
            }
            let (x, name) = (chart.place(1.0), format!("{}|{}", row.kernel, problem.name));
            let tip = format!(
                "{} on {}: {} samples, p50 {}, p90 {}, p99 {}",
                row.kernel,
                problem.name,
                row.samples_us.len(),
                time(p50),
                time(row.p90_us.unwrap_or_default()),
                time(row.p99_us.unwrap_or_default())
            );
            chart.canvas.mark(
                name,
                p50,
                format_args!(r#"circle cx="{x:.1}" cy="{y:.1}" r="4""#),
                class,
                &tip,
            );
        }
    }
    Some(chart.canvas.finish("Latency distributions by problem"))
}

fn thinned(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.len() <= TICKS {
        return sorted;
    }
    let last = sorted.len() - 1;
    (0..TICKS).map(|i| sorted[i * last / (TICKS - 1)]).collect()
}
