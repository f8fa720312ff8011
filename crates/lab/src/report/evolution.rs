//! A tune's log: one evaluation per line, appended as they end.

use std::{collections::BTreeMap, path::Path};

use evosdpa_core::file;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Error,
    error::IoContext,
    evolve::{insight::Diagnosis, span::Span},
};

/// Elites shown.
const ELITES: usize = 3;

/// One candidate and what became of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Its name in the log.
    pub id: String,
    /// What it was made from.
    pub parents: Vec<String>,
    /// How: initial, mutation, crossover, neighbour, proposer.
    pub operator: String,
    /// The kernel.
    pub kernel: String,
    /// Its tunables.
    pub tunables: BTreeMap<String, String>,
    /// The first gate that did not pass, with its reason.
    pub stopped_by: Option<String>,
    /// Gates: name and word.
    pub gates: Vec<(String, String)>,
    /// Speed-up and median time by shape.
    pub shapes: BTreeMap<String, ShapeOutcome>,
    /// What selection goes by; absent where a gate stopped it.
    pub fitness: Option<f64>,
    /// Whether it entered the lineage.
    pub accepted: bool,
    /// The insight that led to it.
    pub insight: Option<String>,
    /// Insights that it put to the test: id, and whether that helped.
    pub trials: Vec<(String, bool)>,
    /// When it began, in microseconds since 1970, where the log says.
    pub began_us: Option<f64>,
    /// How long it took, where the log says.
    pub took_us: Option<f64>,
    /// Its parts, and what was done ahead.
    pub spans: Vec<Span>,
}

/// What was measured on a shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ShapeOutcome {
    /// Times as fast as the reference.
    pub speedup: Option<f64>,
    /// Median time.
    pub p50_us: Option<f64>,
}

/// A whole tune.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evolution {
    /// Where it was read from.
    pub source: String,
    /// Evaluations in the order they ended.
    pub evaluations: Vec<Evaluation>,
    /// What was said of those that were the best at their time.
    pub diagnoses: Vec<Diagnosis>,
    /// The winner, measured again; the last that the log has.
    pub confirmation: Option<Confirmed>,
    /// Lines that could not be read: the last one of a killed tune is cut short.
    pub unreadable_lines: usize,
}

/// What a second measurement said of a winner.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Confirmed {
    /// The evaluation.
    pub number: u64,
    /// Geometric mean of the speed-ups.
    pub fitness: f64,
    /// Whether it is still shown to be faster.
    pub confirmed: bool,
}

impl Confirmed {
    /// In plain words.
    pub fn sentence(&self) -> String {
        let Self { number, fitness, confirmed } = self;
        if *confirmed {
            format!(
                "confirmed: #{number} is {fitness:.3}× as fast as the default, measured again on other inputs"
            )
        } else {
            format!(
                "NOT confirmed: measured again on other inputs, #{number} is {fitness:.3}× as fast as the default"
            )
        }
    }
}

impl Evolution {
    /// Reads a log. Lines that are no evaluation are counted, never fatal.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = file::read_text(path, file::RECORD_BYTES_MAX).doing(
            "read",
            path,
            "name a tune's folder or its log",
        )?;
        Ok(Self { source: path.display().to_string(), ..Self::parse(&text) })
    }

    pub(crate) fn parse(text: &str) -> Self {
        let mut evolution = Self::default();
        let mut kernel = String::new();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            match serde_json::from_str::<Value>(line) {
                Ok(value) => {
                    // The log's first line says what is tuned.
                    if let Some(of_space) = value.pointer("/space/kernel").and_then(Value::as_str) {
                        kernel = of_space.to_owned();
                    }
                    evolution.evaluations.extend(evaluation(&value, &kernel));
                    if value.get("kind").is_some_and(|kind| kind == "confirmation") {
                        evolution.confirmation = serde_json::from_value(value.clone()).ok();
                    }
                    if value.get("kind").is_some_and(|kind| kind == "diagnosis") {
                        evolution.diagnoses.extend(serde_json::from_value::<Diagnosis>(value));
                    }
                }
                Err(_) => evolution.unreadable_lines += 1,
            }
        }
        evolution
    }

    /// Evaluations with their best fitness so far, those without one included.
    pub fn best_so_far(&self) -> Vec<Option<f64>> {
        let mut best: Option<f64> = None;
        let mut take = |evaluation: &Evaluation| {
            let passed =
                evaluation.fitness.filter(|fitness| fitness.is_finite() && evaluation.stopped_by.is_none());
            if let Some(fitness) = passed {
                best = Some(best.map_or(fitness, |best| best.max(fitness)));
            }
            best
        };
        self.evaluations.iter().map(&mut take).collect()
    }

    /// Insights that candidates put to the test: how often, and how often they helped.
    pub fn insights(&self) -> Vec<(String, usize, usize)> {
        let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for (insight, has_helped) in self.evaluations.iter().flat_map(|evaluation| &evaluation.trials) {
            let (tried, helped) = counts.entry(insight).or_default();
            *tried += 1;
            *helped += usize::from(*has_helped);
        }
        counts.into_iter().map(|(id, (tried, helped))| (id.to_owned(), tried, helped)).collect()
    }

    /// What is to be believed of the winner, in plain words.
    pub fn verdict(&self) -> Option<String> {
        let winner = self.elites().first().map(|winner| winner.id.clone())?;
        match &self.confirmation {
            Some(confirmed) if confirmed.number.to_string() == winner => Some(confirmed.sentence()),
            _ => Some(format!("not confirmed: nobody has measured #{winner} again")),
        }
    }

    /// Whether the winner was measured again, and was still faster.
    pub fn is_confirmed(&self) -> bool {
        let winner = self.elites().first().map(|winner| winner.id.as_str());
        let said = self.confirmation.as_ref().filter(|said| winner == Some(&said.number.to_string()));
        said.is_some_and(|said| said.confirmed)
    }

    /// The best evaluations that passed their gates, the best first, each set of tunables once.
    pub fn elites(&self) -> Vec<&Evaluation> {
        let passed = |e: &&Evaluation| e.stopped_by.is_none() && e.fitness.is_some_and(f64::is_finite);
        let mut all: Vec<&Evaluation> = self.evaluations.iter().filter(passed).collect();
        all.sort_by(|a, b| b.fitness.unwrap_or_default().total_cmp(&a.fitness.unwrap_or_default()));
        let mut elites: Vec<&Evaluation> = Vec::new();
        for evaluation in all {
            let known = |e: &&Evaluation| e.kernel == evaluation.kernel && e.tunables == evaluation.tunables;
            if elites.len() < ELITES && !elites.iter().any(known) {
                elites.push(evaluation);
            }
        }
        elites
    }
}

/// An evaluation, whatever else the line holds; nothing for a line of another kind (a header, a confirmation).
fn evaluation(value: &Value, of_header: &str) -> Option<Evaluation> {
    if value.get("kind").is_some_and(|kind| kind != "evaluation") {
        return None;
    }
    let id = text(value.get("number").or_else(|| value.get("id"))?)?;
    let list = |key: &str| value.get(key).and_then(Value::as_array).into_iter().flatten();
    let gates: Vec<(String, String, String)> = list("gates")
        .filter_map(|gate| {
            let of = |key: &str| gate.get(key).and_then(text).unwrap_or_default();
            Some((text(gate.get("gate")?)?, of("verdict"), of("detail")))
        })
        .collect();
    let stopped = gates.iter().find(|(_, word, _)| word == "FAIL");
    let shapes = value.get("shapes").and_then(Value::as_object).into_iter().flatten();
    let tunables = value.get("point").or_else(|| value.get("tunables"));
    let tunables = tunables.and_then(Value::as_object).into_iter().flatten();
    let number = |key: &str| value.get(key).and_then(Value::as_f64);
    let status = value.get("status").and_then(Value::as_str).unwrap_or_default();
    let accepted = value.get("accepted").and_then(Value::as_bool);
    let insight = value.get("insight").and_then(text);
    let is_true = |value: &Value, key: &str| value.get(key).and_then(Value::as_bool) == Some(true);
    let mut trials: Vec<(String, bool)> = list("trials")
        .filter_map(|trial| Some((text(trial.get("insight")?)?, is_true(trial, "helped"))))
        .collect();
    if trials.is_empty() {
        // A log without trials says only which insight led to a candidate.
        trials.extend(insight.clone().map(|insight| (insight, is_true(value, "helped"))));
    }
    Some(Evaluation {
        id,
        parents: list("parents").filter_map(text).collect(),
        operator: value.get("operator").and_then(text).unwrap_or_default(),
        kernel: value.get("kernel").and_then(text).unwrap_or_else(|| of_header.to_owned()),
        tunables: tunables.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect(),
        stopped_by: stopped.map(|(gate, word, detail)| format!("{gate} {word}: {detail}")),
        gates: gates.iter().map(|(gate, word, _)| (gate.clone(), word.clone())).collect(),
        shapes: shapes
            .filter_map(|(shape, outcome)| {
                Some((shape.clone(), serde_json::from_value(outcome.clone()).ok()?))
            })
            .collect(),
        fitness: number("fitness"),
        accepted: accepted.unwrap_or(matches!(status, "accepted" | "promoted")),
        insight,
        trials,
        began_us: number("began_us"),
        took_us: number("seconds").map(|seconds| seconds * 1e6),
        spans: list("spans").filter_map(|span| serde_json::from_value(span.clone()).ok()).collect(),
    })
}

/// A string, or a number as one.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"kind":"header","schema":"evosdpa.tune/1","space":{"kernel":"k","dimensions":[]}}
{"kind":"evaluation","number":0,"point":{"A":1},"operator":"default","parents":[],"gates":[{"gate":"compile","verdict":"PASS","detail":""}],"shapes":{"mission bf16":{"speedup":1.1,"p50_us":9.5,"blocks":12}},"fitness":1.1,"status":"accepted","seconds":0.5}
{"kind":"evaluation","number":1,"parents":[0],"operator":"insight","insight":"4-grid","helped":false,"point":{"A":2},"gates":[{"gate":"compile","verdict":"PASS"},{"gate":"correctness","verdict":"FAIL","detail":"NaN"}],"shapes":{},"fitness":null,"status":"rejected","seconds":0.1}
{"id":"x","parents":[0,1],"operator":"crossover","kernel":"other","tunables":{"A":3},"fitness":1.3,"accepted":true}
{"kind":"confirmation","number":0,"fitness":1.1,"confirmed":true}
{"kind":"diagnosis","number":0,"view":"counters","insights":[{"id":"4-grid","bottleneck":"grid","confidence":0.7,"evidence":[],"suggestion":"Smaller blocks.","tunables":[{"name":"A","direction":"down"}]}]}
{"kind":"evaluation","number":3,"parents":[0],"operator":"mutation","trials":[{"insight":"4-grid","of":0,"speedup":1.7,"accepted":false,"helped":false},{"insight":"4-issue","of":0,"speedup":1.7,"accepted":false,"helped":true}],"point":{"A":4},"gates":[{"gate":"profile","verdict":"FAIL","detail":"DRAM"}],"shapes":{},"fitness":1.9,"status":"rejected"}
{"kind":"evaluation","number":4,"parents":[3],"operator":"muta"#;

    #[test]
    fn a_log_is_read_up_to_where_it_was_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        std::fs::write(&path, LOG).unwrap();
        let evolution = Evolution::read(&path).unwrap();
        assert_eq!((evolution.evaluations.len(), evolution.unreadable_lines), (4, 1));
        // The last is fast, but a gate stopped it.
        assert_eq!(evolution.best_so_far(), [Some(1.1), Some(1.1), Some(1.3), Some(1.3)]);
        assert_eq!(evolution.diagnoses[0].insights[0].tunables[0].name, "A");
        assert_eq!(evolution.evaluations[2].parents, ["0", "1"]);
        assert_eq!(evolution.evaluations[1].stopped_by.as_deref(), Some("correctness FAIL: NaN"));
        assert_eq!(evolution.evaluations[0].shapes["mission bf16"].p50_us, Some(9.5));
        let elites: Vec<&str> = evolution.elites().iter().map(|e| e.id.as_str()).collect();
        assert_eq!(elites, ["x", "0"]);
        // Another than the winner was measured again.
        assert_eq!(evolution.verdict().unwrap(), "not confirmed: nobody has measured #x again");
        let confirmed = LOG.replace("\"fitness\":1.3", "\"fitness\":1.05");
        assert!(Evolution::parse(&confirmed).verdict().unwrap().starts_with("confirmed: #0 is 1.100×"));
        // A page of tunes alone says it first.
        let page = |logs: &[&str]| {
            let evolutions = logs.iter().map(|log| Evolution::parse(log)).collect();
            crate::report::Document { evolutions, ..Default::default() }.verdict()
        };
        let (word, why) = page(&[&confirmed]);
        assert!(word == "PASS" && why.starts_with("confirmed: #0"), "{word} {why}");
        let (word, why) = page(&[&confirmed, LOG]);
        assert!(word == "UNAVAILABLE" && why.contains("nobody has measured #x again"), "{word} {why}");
        assert_eq!(page(&[]).1, "no gate ran");
        let denied = confirmed.replace("\"confirmed\":true", "\"confirmed\":false");
        assert!(Evolution::parse(&denied).verdict().unwrap().starts_with("NOT confirmed"), "{denied}");
        assert_eq!(evolution.insights(), [("4-grid".to_owned(), 2, 0), ("4-issue".to_owned(), 1, 1)]);
        let kernels: Vec<&str> = evolution.evaluations.iter().map(|e| e.kernel.as_str()).collect();
        assert_eq!(kernels, ["k", "k", "other", "k"]);
    }
}
