//! The verdict of an evaluation, read from the JSON documents of the lab's commands.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    Order, Place,
    process::{Ended, Output},
};

/// One command of an evaluation.
pub(super) struct Stage {
    pub(super) name: &'static str,
    pub(super) arguments: Vec<String>,
    pub(super) on_gpu: bool,
    /// Whether it is left out unless all before it ran and passed.
    pub(super) stops_without_pass: bool,
}

/// PASS, FAIL or UNAVAILABLE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Word {
    Pass,
    Fail,
    #[default]
    Unavailable,
}

/// A gate's word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gate {
    /// The command that it is part of: source, compile, sim, races, correctness, performance, profile.
    pub(crate) stage: String,
    pub(crate) gate: String,
    pub(crate) verdict: Word,
    /// Why, or the evidence.
    pub(crate) detail: String,
    #[serde(default)]
    pub(crate) problem: Option<String>,
}

/// A time, and how it stands to what the library would run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Speed {
    pub(crate) problem: String,
    pub(crate) p50_us: f64,
    /// 95 % interval of the median.
    pub(crate) interval_us: Option<[f64; 2]>,
    pub(crate) percent_of_peak: Option<f64>,
    /// The share of the roof over the problem's operations and bytes, from 0 to 1.
    #[serde(default)]
    pub(crate) roofline: Option<f64>,
    /// What the library would run.
    pub(crate) reference: Option<String>,
    pub(crate) reference_p50_us: Option<f64>,
    /// How many times as fast as that, from paired readings.
    pub(crate) speedup: Option<f64>,
    pub(crate) speedup_interval: Option<[f64; 2]>,
}

/// What an evaluation came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) verdict: Word,
    /// The first gate that is not PASS, in words.
    pub(crate) why: Option<String>,
    pub(crate) gates: Vec<Gate>,
    pub(crate) performance: Vec<Speed>,
    /// Greatest error against the oracle, by problem.
    pub(crate) max_error: Vec<(String, f64)>,
    /// The profiler's rows, where they were asked for.
    pub(crate) profile: Option<Value>,
    pub(crate) environment: Option<Value>,
}

/// Whether a row is of what was sent, and not of what it is compared with.
fn is_own(row: &Value) -> bool {
    row["kernel"] != "auto" && row["peer"] != true
}

impl Outcome {
    /// A gate of this program failed.
    pub(super) fn failed(mut self, stage: &str, why: &str) -> Self {
        self.say(stage, stage, Word::Fail, why, None);
        self.verdict = Word::Fail;
        self.why = Some(why.to_owned());
        self
    }

    pub(super) fn has_failed(&self) -> bool {
        self.gates.iter().any(|gate| gate.verdict == Word::Fail)
    }

    /// Whether every stage so far ran and passed.
    pub(super) fn may_go_on(&self) -> bool {
        let stages = |word: Option<Word>| {
            let of = self.gates.iter().filter(move |gate| word.is_none_or(|word| gate.verdict == word));
            of.map(|gate| gate.stage.as_str()).collect::<std::collections::BTreeSet<_>>()
        };
        !self.has_failed() && stages(None) == stages(Some(Word::Pass))
    }

    /// Takes in what a command left.
    pub(super) fn add(&mut self, stage: &Stage, output: &Output) {
        let document: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        let rows = document.as_ref().and_then(|document| document["rows"].as_array());
        let Some(rows) = rows.filter(|_| matches!(output.ended, Ended::Exited(0..=2))) else {
            // What crashed or hung did so because of what was sent; what was refused was not run.
            let word = match output.ended {
                Ended::Exited(2) | Ended::Cancelled => Word::Unavailable,
                Ended::Exited(_) | Ended::Signalled(_) | Ended::TimedOut(_) => Word::Fail,
            };
            return self.say(stage.name, stage.name, word, &output.words(), None);
        };
        if self.environment.is_none() || stage.name == "performance" {
            self.environment = document.as_ref().map(|document| document["environment"].clone());
        }
        if stage.name == "profile" {
            self.profile = Some(rows.clone().into());
            return self.say(stage.name, stage.name, Word::Pass, "see profile", None);
        }
        // Beside the kernel stands what the library would run, which is not judged here.
        for row in rows.iter().filter(|row| is_own(row)) {
            self.add_gates(stage.name, row);
            if stage.name == "correctness" || stage.name == "sim" {
                self.add_error(row);
            }
        }
        if stage.name == "performance" {
            self.add_speeds(rows);
        }
        if !self.gates.iter().any(|gate| gate.stage == stage.name) {
            self.say(stage.name, stage.name, Word::Unavailable, &output.words(), None);
        }
    }

    fn add_gates(&mut self, stage: &str, row: &Value) {
        let problem = row["problem"].as_str().or(row["shape"].as_str()).map(str::to_owned);
        for gate in row["gates"].as_array().into_iter().flatten() {
            let text = |name: &str| gate[name].as_str().unwrap_or_default();
            let word = match text("verdict") {
                "PASS" => Word::Pass,
                "FAIL" => Word::Fail,
                _ => Word::Unavailable,
            };
            self.say(stage, text("gate"), word, text("detail"), problem.clone());
        }
    }

    fn add_error(&mut self, row: &Value) {
        let (Some(problem), Some(error)) = (row["problem"].as_str(), row["max_error"].as_f64()) else {
            return;
        };
        match self.max_error.iter_mut().find(|(known, _)| known == problem) {
            Some((_, most)) => *most = most.max(error),
            None => self.max_error.push((problem.to_owned(), error)),
        }
    }

    fn add_speeds(&mut self, rows: &[Value]) {
        let pair = |value: &Value| -> Option<[f64; 2]> { Some([value[0].as_f64()?, value[1].as_f64()?]) };
        for row in rows.iter().filter(|row| is_own(row)) {
            let fields = (row["kernel"].as_str(), row["problem"].as_str(), row["p50_us"].as_f64());
            let (Some(label), Some(problem), Some(p50_us)) = fields else { continue };
            let auto = rows.iter().find(|row| row["kernel"] == "auto" && row["problem"] == problem);
            // The table says how many times as fast the library is.
            let paired = auto.map(|auto| &auto["speedup"][label]);
            let inverse = |value: f64| 1.0 / value;
            self.performance.push(Speed {
                problem: problem.to_owned(),
                p50_us,
                interval_us: pair(&row["p50_interval_us"]),
                percent_of_peak: row["percent_of_peak"].as_f64(),
                roofline: row["roofline"].as_f64(),
                reference: auto.and_then(|auto| auto["variant"].as_str()).map(str::to_owned),
                reference_p50_us: auto.and_then(|auto| auto["p50_us"].as_f64()),
                speedup: paired.and_then(|paired| paired["ratio"].as_f64()).map(inverse),
                speedup_interval: paired
                    .and_then(|paired| pair(&paired["interval"]))
                    .map(|[low, high]| [inverse(high), inverse(low)]),
            });
        }
    }

    /// Adds a gate's word. Inputs differ and words do not: each is said once, and one that passed once for each problem.
    fn say(&mut self, stage: &str, gate: &str, verdict: Word, detail: &str, problem: Option<String>) {
        let is_said = |known: &Gate| {
            let is_same = known.stage == stage && known.gate == gate && known.problem == problem;
            is_same && known.verdict == verdict && (verdict == Word::Pass || known.detail == detail)
        };
        if !self.gates.iter().any(is_said) {
            let (stage, gate, detail) = (stage.to_owned(), gate.to_owned(), detail.to_owned());
            self.gates.push(Gate { stage, gate, verdict, detail, problem });
        }
    }

    /// With its verdict.
    pub(super) fn finished(mut self, order: &Order) -> Self {
        let of = |word: Word| self.gates.iter().find(move |gate| gate.verdict == word);
        let is_complete = match order.device {
            Place::Sim => self.may_go_on() && !self.gates.is_empty(),
            Place::Auto => self.performance.len() == order.problems.len(),
        };
        let (verdict, why) = match (of(Word::Fail), is_complete) {
            (Some(failed), _) => (Word::Fail, Some(failed)),
            (None, true) => (Word::Pass, None),
            (None, false) => (Word::Unavailable, of(Word::Unavailable)),
        };
        let why = why.map(|gate| format!("{}, {}: {}", gate.stage, gate.gate, gate.detail));
        (self.verdict, self.why) = (verdict, why);
        self
    }
}
