//! A line per kernel and problem, for spreadsheets.

use super::super::document::Document;

const HEADER: &str = "device,problem,kernel,baseline,verdict,samples,p50_us,p50_low_us,p50_high_us,p90_us,p99_us,outliers,gflops,gbps,\
                      percent_of_peak,fastest_baseline,speedup,speedup_low,speedup_high,outcome,roofline";

pub(crate) fn render(document: &Document) -> String {
    let mut out = HEADER.to_owned();
    out.push('\n');
    for row in &document.rows {
        let number = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
        let [low, high] = row.p50_interval_us.map_or([None, None], |[low, high]| [Some(low), Some(high)]);
        let verdict = row.first_problem().map_or("PASS", |gate| gate.verdict.word());
        let baseline = row.fastest_baseline();
        let comparison = baseline.map(|(_, comparison)| comparison);
        let fields = [
            row.device.to_string(),
            row.problem.clone(),
            row.kernel.clone(),
            row.baseline.to_string(),
            verdict.to_owned(),
            row.samples_us.len().to_string(),
            number(row.p50_us),
            number(low),
            number(high),
            number(row.p90_us),
            number(row.p99_us),
            row.outliers.to_string(),
            number(row.gflops),
            number(row.gbps),
            number(row.percent_of_peak),
            baseline.map_or(String::new(), |(name, _)| name.clone()),
            number(comparison.map(|c| c.ratio)),
            number(comparison.map(|c| c.interval[0])),
            number(comparison.map(|c| c.interval[1])),
            comparison.map_or(String::new(), |c| c.verdict.to_string()),
            number(row.roofline),
        ];
        let quoted: Vec<String> = fields.iter().map(|field| quote(field)).collect();
        out.push_str(&quoted.join(","));
        out.push('\n');
    }
    out
}

/// RFC 4180. Seven lines; the crate `csv` is four more crates in everybody's first build.
fn quote(field: &str) -> String {
    if field.contains([',', '"', '\n']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}
