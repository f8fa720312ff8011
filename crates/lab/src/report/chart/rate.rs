//! Operations per second, kernels and baselines side by side.

use super::{
    super::document::Document,
    Chart, Scale,
    rows::{Rows, SPAN},
    short,
};

/// Bars by problem, the fastest first, with the interval of the median.
pub(crate) fn chart(document: &Document) -> Option<Chart> {
    let mut problems = document.problems();
    for problem in &mut problems {
        problem.rows.retain(|row| row.gflops.is_some());
        problem.rows.sort_by(|a, b| b.gflops.unwrap_or_default().total_cmp(&a.gflops.unwrap_or_default()));
    }
    problems.retain(|problem| !problem.rows.is_empty());
    let all = || problems.iter().flat_map(|problem| problem.rows.iter().filter_map(|row| row.gflops));
    let fastest = all().fold(0.0, f64::max);
    if fastest <= 0.0 {
        return None;
    }
    // One unit for the whole chart.
    let (unit, per) = if fastest >= 1e3 { ("TFLOP/s", 1e3) } else { ("GFLOP/s", 1.0) };
    let scale = Scale::linear(all().map(|gflops| gflops / per), SPAN);
    let groups: Vec<usize> = problems.iter().map(|problem| problem.rows.len()).collect();
    let mut chart =
        Rows::new("rate", &groups, scale, &format!("{unit} at the median, with its 95 % interval"));
    for problem in &problems {
        chart.group(&problem.name);
        for row in &problem.rows {
            let rate = row.gflops.unwrap_or_default() / per;
            let y = chart.row(&row.kernel, row.baseline, &short(rate));
            let (zero, x) = (chart.place(0.0), chart.place(rate));
            let class = if row.baseline { "bar baseline" } else { "bar" };
            let tip = format!("{} on {}: {} {unit}", row.kernel, problem.name, short(rate));
            let width = (x - zero).max(1.0);
            chart.canvas.mark(
                format!("{}|{}", row.kernel, problem.name),
                row.gflops.unwrap_or_default(),
                format_args!(
                    r#"rect x="{zero:.1}" y="{:.1}" width="{width:.1}" height="12" rx="2""#,
                    y - 6.0
                ),
                class,
                &tip,
            );
            if let (Some([low, high]), Some(p50)) = (row.p50_interval_us, row.p50_us) {
                let (slow, fast) = (chart.place(rate * p50 / high), chart.place(rate * p50 / low));
                chart.canvas.line([slow, y], [fast, y], "whisker");
            }
        }
    }
    Some(chart.canvas.finish("Operations per second by problem"))
}
