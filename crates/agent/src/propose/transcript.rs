//! Every prompt and every answer of a tune, one line of JSON each, on the disk before anything follows from it.

use std::{
    fs::{File, OpenOptions},
    path::{Path, PathBuf},
};

use anyhow::Context;
use evosdpa_core::file;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    budget::Spent,
    request::{Candidate, Request},
};
use crate::llm::{Stop, Turn};

/// Its name in the tune's folder.
pub(crate) const FILE: &str = "llm.jsonl";

/// One line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Line {
    /// A question, before it is asked.
    Asked {
        number: u64,
        attempt: u32,
        operator: String,
        model: String,
        turns: Vec<Turn>,
        input_tokens_estimate: u64,
    },
    /// Its answer.
    Answered {
        number: u64,
        attempt: u32,
        text: String,
        stop: Stop,
        input_tokens: u64,
        output_tokens: u64,
        /// Whether the tokens are estimates: the service did not count them.
        is_estimate: bool,
        cost: Option<f64>,
        seconds: f64,
        #[serde(default)]
        is_replay: bool,
    },
    /// Or why there is none.
    Failed { number: u64, attempt: u32, why: String },
    /// What the lab was told.
    Proposed { number: u64, answer: Value },
}

/// What a transcript holds.
pub(crate) struct Contents {
    pub(crate) lines: Vec<Line>,
    /// Bytes of whole lines.
    whole_bytes: u64,
}

/// The transcript of the running tune.
pub(crate) struct Transcript {
    path: PathBuf,
    file: File,
    lines: Vec<Line>,
}

impl Transcript {
    /// Goes on with the one in the folder, or begins it. A line that was cut off is removed.
    pub(crate) fn open(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join(FILE);
        let contents = match path.exists() {
            true => read(&path)?,
            false => Contents { lines: Vec::new(), whole_bytes: 0 },
        };
        let file = OpenOptions::new().append(true).create(true).open(&path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        file.set_len(contents.whole_bytes).with_context(|| format!("cannot repair {}", path.display()))?;
        Ok(Self { path, file, lines: contents.lines })
    }

    /// Adds a line; when this returns it is on the disk.
    pub(crate) fn add(&mut self, line: Line) -> anyhow::Result<()> {
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        file::append(&self.file, &text)
            .with_context(|| format!("cannot write {}: free some space", self.path.display()))?;
        self.lines.push(line);
        Ok(())
    }

    /// What has been spent. A question without an answer counts by its estimate: the service may have worked on it.
    pub(crate) fn spent(&self) -> Spent {
        let mut spent = Spent::default();
        let mut open = 0;
        for line in &self.lines {
            match line {
                Line::Asked { input_tokens_estimate, .. } => {
                    spent.input_tokens += open;
                    open = *input_tokens_estimate;
                }
                Line::Answered { input_tokens, output_tokens, .. } => {
                    spent.input_tokens += input_tokens;
                    spent.output_tokens += output_tokens;
                    open = 0;
                }
                Line::Failed { .. } | Line::Proposed { .. } => {}
            }
        }
        spent.input_tokens += open;
        spent
    }

    /// What was proposed for an evaluation when the same was asked.
    pub(crate) fn proposed(&self, number: u64, question: &[Turn]) -> Option<&Value> {
        let of_number = |line: &&Line| match line {
            Line::Asked { number: of, attempt, .. } => *of == number && *attempt == 0,
            Line::Proposed { number: of, .. } => *of == number,
            _ => false,
        };
        let mut last = self.lines.iter().rev().filter(of_number);
        match (last.next()?, last.next()?) {
            (Line::Proposed { answer, .. }, Line::Asked { turns, .. }) if turns == question => Some(answer),
            _ => None,
        }
    }

    /// The last candidate and what the model had answered for it, when a gate turned it away and it is still to be repaired.
    pub(crate) fn to_repair<'a>(&self, request: &'a Request, repairs: u32) -> Option<ToRepair<'a>> {
        let candidate = request.history.last().filter(|last| last.number + 1 == request.number)?;
        if !candidate.is_rejected() || candidate.failure().is_none() {
            return None;
        }
        let answer = |number: u64| {
            self.lines.iter().rev().find_map(|line| match line {
                Line::Proposed { number: of, answer } if *of == number => Some(answer),
                _ => None,
            })
        };
        let is_repair = |number: u64| {
            answer(number)
                .and_then(|answer| answer["operator"].as_str())
                .is_some_and(|op| op.ends_with("-repair"))
        };
        let before = (0..=candidate.number).rev().take_while(|number| is_repair(*number)).count();
        if before as u32 >= repairs {
            return None;
        }
        let source = answer(candidate.number)?.get("source").and_then(Value::as_str).map(str::to_owned);
        Some(ToRepair { candidate, source })
    }
}

/// A candidate to repair.
pub(crate) struct ToRepair<'a> {
    pub(crate) candidate: &'a Candidate,
    pub(crate) source: Option<String>,
}

/// Reads a transcript; a last line that was cut off does not count.
pub(crate) fn read(path: &Path) -> anyhow::Result<Contents> {
    let bytes = file::read(path, file::RECORD_BYTES_MAX)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
    let mut lines = Vec::new();
    for (index, line) in bytes[..whole].split_inclusive(|byte| *byte == b'\n').enumerate() {
        let line = serde_json::from_slice(line).with_context(|| {
            format!(
                "{}, line {}, is no line of a transcript: restore the file or move it away",
                path.display(),
                index + 1
            )
        })?;
        lines.push(line);
    }
    Ok(Contents { lines, whole_bytes: whole as u64 })
}
