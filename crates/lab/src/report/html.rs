//! One page that needs nothing else: template, style, plots and numbers in one file.

use std::collections::BTreeMap;

use minijinja::{AutoEscape, Environment, context};
use serde::Serialize;

use super::{
    chart::{self, Chart, Mark, short, time},
    document::{Document, GateLine},
};
use crate::{
    Error,
    evolve::insight::{Diagnosis, Seen},
    gate::Verdict,
};

const TEMPLATE: &str = include_str!("templates/report.html");
const STYLE: &str = include_str!("templates/report.css");
const CHECK: &str = include_str!("templates/check.js");

pub(super) fn render(document: &Document) -> Result<String, Error> {
    let report = |error: minijinja::Error| Error::Report { why: error.to_string() };
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.add_template("report", TEMPLATE).map_err(report)?;

    let charts: BTreeMap<&str, Option<Chart>> = BTreeMap::from([
        ("speedup", chart::speedup::chart(document)),
        ("rate", chart::rate::chart(document)),
        ("latency", chart::latency::chart(document)),
        ("roofline", chart::roofline::chart(document)),
    ]);
    let tunes: Vec<Tune> = document.evolutions.iter().enumerate().map(|(i, _)| tune(document, i)).collect();
    let drawn = charts.values().flatten().chain(tunes.iter().flat_map(|tune| &tune.charts));
    let marks: BTreeMap<&str, &[Mark]> =
        drawn.map(|chart| (chart.id.as_str(), chart.marks.as_slice())).collect();
    // Inside a script element nothing is escaped, so no tag may appear to end it.
    let marks = serde_json::to_string(&marks)
        .map_err(|error| Error::Report { why: error.to_string() })?
        .replace('<', "\\u003c");
    let svg: BTreeMap<&str, &str> =
        charts.iter().filter_map(|(name, chart)| Some((*name, chart.as_ref()?.svg.as_str()))).collect();
    let (word, why) = document.verdict();
    let names: Vec<&str> = document.sources.iter().map(|source| source.name.as_str()).collect();
    let template = environment.get_template("report").map_err(report)?;
    template
        .render(context! {
            title => names.join(", "),
            style => STYLE,
            check => CHECK,
            word => word,
            why => why,
            headlines => document.headlines(),
            places => places(document),
            svg => svg,
            marks => marks,
            failed => gates(document, |verdict| verdict.is_fail()),
            unavailable => gates(document, |verdict| matches!(verdict, Verdict::Unavailable(_))),
            passed => gates(document, Verdict::is_pass),
            resources => resources(document),
            profiles => profiles(document),
            tunes => tunes,
            environments => environments(document),
            rows => rows(document),
        })
        .map_err(report)
}

/// Where and on which day runs were made, each once.
fn places(document: &Document) -> Vec<String> {
    let mut places: Vec<String> = Vec::new();
    for environment in document.sources.iter().filter_map(|source| source.environment.as_ref()) {
        let device = environment.accelerator.as_deref().unwrap_or(&environment.cpu);
        let day = environment.started.split('T').next().unwrap_or_default();
        let place = format!("{device}, {day}");
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

#[derive(Serialize)]
struct Gate<'a> {
    kernel: &'a str,
    problem: String,
    gate: &'a str,
    word: &'static str,
    count: usize,
    detail: &'a str,
}

fn gates(document: &Document, which: impl Fn(&Verdict) -> bool) -> Vec<Gate<'_>> {
    let of = |line: &'_ GateLine| which(&line.verdict);
    document
        .gates
        .iter()
        .filter(|line| of(line))
        .map(|line| Gate {
            kernel: &line.kernel,
            problem: line.problem(),
            gate: &line.gate,
            word: line.verdict.word(),
            count: line.count,
            detail: &line.detail,
        })
        .collect()
}

/// Cells of a table, in the order of its header.
fn resources(document: &Document) -> Vec<Vec<String>> {
    document
        .resources
        .iter()
        .map(|resource| {
            vec![
                resource.kernel.clone(),
                resource.arch.clone(),
                resource.dtype.clone(),
                resource.registers.to_string(),
                resource.smem_bytes.to_string(),
                resource.stack_bytes.to_string(),
                resource.spill_bytes.to_string(),
                resource.blocks_per_sm.map_or("–".to_owned(), |blocks| blocks.to_string()),
                resource.occupancy_percent.map_or("–".to_owned(), |percent| format!("{percent:.0} %")),
                resource.limited_by.clone(),
            ]
        })
        .collect()
}

fn rows(document: &Document) -> Vec<Vec<String>> {
    let number = |value: Option<f64>| value.map_or("–".to_owned(), short);
    let us = |value: Option<f64>| value.map_or("–".to_owned(), time);
    let of = |row: &crate::record::Row| {
        let against = row.fastest_baseline().map_or("–".to_owned(), |(name, c)| {
            format!(
                "{}× ({}–{}) {} {name}",
                short(c.ratio),
                short(c.interval[0]),
                short(c.interval[1]),
                c.verdict
            )
        });
        vec![
            row.problem.clone(),
            row.kernel.clone(),
            us(row.p50_us),
            us(row.p90_us),
            us(row.p99_us),
            number(row.gflops),
            row.roofline.map_or("–".to_owned(), |share| format!("{:.0}", 100.0 * share)),
            row.samples_us.len().to_string(),
            against,
        ]
    };
    document.rows.iter().filter(|row| row.p50_us.is_some()).map(of).collect()
}

#[derive(Serialize)]
struct ProfileView {
    sentence: String,
    word: &'static str,
    verdict: String,
    rule: String,
    roof: String,
    insights: Vec<InsightView>,
}

#[derive(Serialize)]
struct InsightView {
    id: String,
    bottleneck: String,
    confidence: String,
    suggestion: String,
    hints: String,
    evidence: Vec<[String; 3]>,
}

fn profiles(document: &Document) -> Vec<ProfileView> {
    let insight = |insight: &crate::profile::Insight| InsightView {
        id: insight.id.clone(),
        bottleneck: insight.bottleneck.to_string(),
        confidence: format!("{:.2}", insight.confidence),
        suggestion: insight.suggestion.clone(),
        hints: insight.hints(),
        evidence: insight
            .evidence
            .iter()
            .map(|e| [e.metric.clone(), format!("{} {}", short(e.value), e.unit), e.says.clone()])
            .collect(),
    };
    let of = |profile: &crate::profile::ProfileRow| ProfileView {
        sentence: match (&profile.problem, profile.insights.first()) {
            (Some(problem), Some(insight)) => {
                format!("{} on {problem}: {}", profile.kernel, insight.bottleneck)
            }
            (None, Some(insight)) => format!("{}: {}", profile.kernel, insight.bottleneck),
            (_, None) => profile.sentence(),
        },
        word: profile.verdict().word(),
        verdict: profile.gates.first().map(|gate| gate.detail.clone()).unwrap_or_default(),
        rule: profile.rule.clone().unwrap_or_default(),
        roof: profile.roofline.as_ref().map_or(String::new(), |roof| {
            format!("{} of {} TFLOP/s under its roof", short(roof.achieved_tflops), short(roof.roof_tflops))
        }),
        insights: profile.insights.iter().map(insight).collect(),
    };
    document.profiles.iter().map(of).collect()
}

#[derive(Serialize)]
struct Tune {
    source: String,
    verdict: Option<String>,
    evaluations: usize,
    accepted: usize,
    stopped: usize,
    unreadable: usize,
    diagnoses: Vec<[String; 4]>,
    insights: Vec<(String, usize, usize)>,
    svg: Vec<String>,
    elites: Vec<Vec<String>>,
    #[serde(skip)]
    charts: Vec<Chart>,
}

fn tune(document: &Document, index: usize) -> Tune {
    let evolution = &document.evolutions[index];
    let charts: Vec<Chart> = [
        chart::best::chart(&format!("best-{index}"), evolution),
        chart::lineage::chart(&format!("lineage-{index}"), evolution),
    ]
    .into_iter()
    .flatten()
    .collect();
    let elites = evolution
        .elites()
        .into_iter()
        .map(|elite| {
            let tunables: Vec<String> =
                elite.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let shapes: Vec<String> = elite
                .shapes
                .iter()
                .map(|(shape, outcome)| format!("{shape} {}×", short(outcome.speedup.unwrap_or_default())))
                .collect();
            let fitness = short(elite.fitness.unwrap_or_default());
            vec![elite.id.clone(), elite.kernel.clone(), tunables.join(" "), fitness, shapes.join(", ")]
        })
        .collect();
    Tune {
        source: evolution.source.clone(),
        verdict: evolution.verdict(),
        evaluations: evolution.evaluations.len(),
        accepted: evolution.evaluations.iter().filter(|e| e.accepted).count(),
        stopped: evolution.evaluations.iter().filter(|e| e.stopped_by.is_some()).count(),
        unreadable: evolution.unreadable_lines,
        diagnoses: evolution.diagnoses.iter().filter_map(diagnosis).collect(),
        insights: evolution.insights(),
        svg: charts.iter().map(|chart| chart.svg.clone()).collect(),
        elites,
        charts,
    }
}

/// Which evaluation, what was looked at, and the first thing it said.
fn diagnosis(diagnosis: &Diagnosis) -> Option<[String; 4]> {
    let first = diagnosis.insights.first()?;
    let view = match diagnosis.view {
        Seen::Counters => "counters",
        Seen::Simulated => "simulator",
        Seen::Static => "resources and times",
    };
    let held_back = format!("{} ({}, {:.2})", first.bottleneck, first.id, first.confidence);
    let what = format!("{} {}", first.suggestion, first.hints());
    Some([diagnosis.number.to_string(), view.to_owned(), held_back, what.trim_end().to_owned()])
}

#[derive(Serialize)]
struct EnvironmentView {
    name: String,
    lines: Vec<[String; 2]>,
}

fn environments(document: &Document) -> Vec<EnvironmentView> {
    let line = |name: &str, value: String| [name.to_owned(), value];
    document
        .sources
        .iter()
        .map(|source| {
            let mut lines = vec![line("command", source.command.clone())];
            if !source.status.is_empty() {
                lines.push(line("status", source.status.clone()));
            }
            if let Some(env) = &source.environment {
                if let Some(accelerator) = &env.accelerator {
                    lines.push(line("accelerator", accelerator.clone()));
                }
                let torch = env.torch.clone().unwrap_or_else(|| "not a baseline".to_owned());
                lines.extend([
                    line("processor", format!("{}, {} cores, {} threads", env.cpu, env.cores, env.threads)),
                    line("instruction sets", env.isas.join(", ")),
                    line("system", env.system.clone()),
                    line("evosdpa", format!("{} at {} (dirty: {})", env.version, env.revision, env.dirty)),
                    line("compiler", env.compiler.clone()),
                    line("torch", torch),
                    line("started", env.started.clone()),
                ]);
                if let (Some(peak), Some(memory)) = (env.fma_peak_gflops, env.memory_gbps) {
                    lines.push(line(
                        "measured peaks",
                        format!("{} GFLOP/s, {} GB/s", short(peak), short(memory)),
                    ));
                }
            }
            lines.extend(source.notes.iter().map(|(name, value)| line(name, value.clone())));
            EnvironmentView { name: source.name.clone(), lines }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    /// Relative luminance, and contrast, as WCAG 2 defines them.
    fn luminance(colour: &str) -> f64 {
        let channel = |at: usize| f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
        let linear = |c: f64| if c <= 0.03928 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) };
        0.2126 * linear(channel(1)) + 0.7152 * linear(channel(3)) + 0.0722 * linear(channel(5))
    }

    fn contrast(a: &str, b: &str) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn words_and_marks_can_be_told_from_the_paper() {
        let css = super::STYLE;
        let mut palettes = 0;
        for block in css.split("--paper: ").skip(1) {
            let colour = |name: &str| {
                let named = block.split_once(&format!("--{name}: ")).unwrap().1;
                named[..7].to_owned()
            };
            for paper in [block[..7].to_owned(), colour("panel")] {
                for (name, least) in [
                    ("ink", 7.0),
                    ("soft", 4.5),
                    ("good", 4.5),
                    ("bad", 4.5),
                    ("warn", 4.5),
                    ("ours", 4.5),
                    ("baseline", 3.0),
                ] {
                    let seen = contrast(&colour(name), &paper);
                    assert!(seen >= least, "{name} on {paper}: {seen:.2}, and {least} is needed");
                }
            }
            palettes += 1;
        }
        assert_eq!(palettes, 3, "light, dark and print");
    }
}
