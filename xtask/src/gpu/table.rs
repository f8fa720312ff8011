//! What is fresh, what is stale, what is missing.

use std::{fmt::Write, fs, path::Path, time::Duration};

use serde_json::Value;

use super::plan::Step;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// There is a document of this revision.
    Fresh,
    /// There is a document of another.
    Stale,
    /// There is none that can be read.
    Missing,
}

/// One step, as its document has it.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) asks: &'static str,
    about: Duration,
    pub(super) state: State,
    /// The document's revision.
    revision: Option<String>,
    /// The verdicts in it: passed, failed, not available.
    verdicts: [usize; 3],
    failed: bool,
    /// Why it is not fresh.
    pub(super) note: String,
}

/// What a step's document says.
pub(super) fn look(step: &Step, path: &Path, revision: &str) -> Line {
    let document: Option<Value> = fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let made = document.as_ref().map(|document| &document["step"]);
    let of = made.and_then(|made| made["revision"].as_str()).map(str::to_owned);
    let state = match &of {
        Some(of) if of == revision => State::Fresh,
        Some(_) => State::Stale,
        None => State::Missing,
    };
    let mut verdicts = [0; 3];
    if let Some(document) = &document {
        count(document, &mut verdicts);
    }
    let failed = made.is_some_and(|made| made["exit"] != made["expected"]);
    let name = step.name.clone();
    Line {
        name,
        asks: step.asks,
        about: step.about,
        state,
        revision: of,
        verdicts,
        failed,
        note: String::new(),
    }
}

/// Every `verdict` of a document. A row that has gates is what they say: verdicts beside them are their evidence, like the
/// failures of a kernel that is wrong on purpose.
fn count(value: &Value, verdicts: &mut [usize; 3]) {
    match value {
        Value::Object(fields) if fields.contains_key("gates") => count(&fields["gates"], verdicts),
        Value::Object(fields) => {
            match fields.get("verdict").and_then(Value::as_str) {
                Some("PASS") => verdicts[0] += 1,
                Some("FAIL") => verdicts[1] += 1,
                Some("UNAVAILABLE") => verdicts[2] += 1,
                _ => {}
            }
            fields.values().for_each(|value| count(value, verdicts));
        }
        Value::Array(values) => values.iter().for_each(|value| count(value, verdicts)),
        _ => {}
    }
}

pub(super) fn page(lines: &[Line]) -> String {
    let mut page = String::new();
    let width = lines.iter().map(|line| line.name.len()).max().unwrap_or(0);
    for line in lines {
        let state = match line.state {
            State::Fresh if line.failed => "FAILED",
            State::Fresh => "fresh",
            State::Stale => "stale",
            State::Missing => "missing",
        };
        let revision: String = line.revision.as_deref().unwrap_or("–").chars().take(12).collect();
        let [passed, failed, unavailable] = line.verdicts;
        let verdicts = format!("{passed} PASS, {failed} FAIL, {unavailable} UNAVAILABLE");
        let what = if line.note.is_empty() { line.asks } else { &line.note };
        let seconds = line.about.as_secs();
        let _ = writeln!(
            page,
            "{:width$}  {state:7}  {revision:12}  {seconds:4} s  {verdicts:38}  {what}",
            line.name
        );
    }
    let of = |state: State| lines.iter().filter(|line| line.state == state).count();
    let counts = [of(State::Fresh), of(State::Stale), of(State::Missing)];
    let to_run = lines.iter().filter(|line| line.state != State::Fresh).map(|line| line.about);
    let minutes = to_run.sum::<Duration>().as_secs().div_ceil(60);
    let _ = writeln!(
        page,
        "{} fresh, {} stale, {} missing; what is not fresh takes about {minutes} min on an H200 with 16 cores",
        counts[0], counts[1], counts[2]
    );
    page
}

/// 1 when a fresh document has a failed gate, 2 when something is stale or missing, else 0.
pub(super) fn exit_code(lines: &[Line]) -> u8 {
    let fresh = |line: &Line| line.state == State::Fresh;
    match () {
        () if lines.iter().any(|line| fresh(line) && line.failed) => 1,
        () if !lines.iter().all(fresh) => 2,
        () => 0,
    }
}
