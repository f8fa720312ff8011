//! What a log of compute-sanitizer says.

use std::fmt;

use serde::Serialize;

use super::{Ran, Tool};
use crate::gate::GateResult;

/// Something a tool found; the same thing at the same place in many threads is one incident.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Incident {
    /// What happened: `Invalid __global__ write of size 2 bytes`.
    pub what: String,
    /// The kernel or device function.
    pub kernel: Option<String>,
    /// Source file and line, where the tool knows them.
    pub location: Option<String>,
    /// The first thread it happened in: `thread (32,0,0) in block (1,0,0)`.
    pub thread: Option<String>,
    /// The other side of a race, and whatever else was said.
    pub detail: Vec<String>,
    /// How often it was reported.
    pub times: usize,
}

impl fmt::Display for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if let Some(kernel) = &self.kernel {
            write!(f, " in {kernel}")?;
        }
        if let Some(location) = &self.location {
            write!(f, " at {location}")?;
        }
        if let Some(thread) = &self.thread {
            write!(f, " by {thread}")?;
        }
        if let Some(detail) = self.detail.first() {
            write!(f, ", {detail}")?;
        }
        if self.times > 1 {
            write!(f, " ({} times)", self.times)?;
        }
        Ok(())
    }
}

/// What a log of compute-sanitizer says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// What was found.
    pub incidents: Vec<Incident>,
    /// The summary lines: how many errors or hazards each reports, and its text.
    pub summaries: Vec<(u64, String)>,
    /// What went wrong with the tool itself, or kept it from checking.
    pub troubles: Vec<String>,
}

impl Log {
    /// Reads a log. Lines of the checked program, which do not start with the prefix, are left out.
    pub fn read(text: &str) -> Self {
        let mut log = Self::default();
        // Whether indented lines belong to the last incident.
        let mut open = false;
        for line in text.lines() {
            let Some(line) = line.trim_start().strip_prefix("=========") else { continue };
            let line = line.strip_prefix(' ').unwrap_or(line).trim_end();
            if line.is_empty() {
                open = false;
            } else if let Some(detail) = line.strip_prefix("    ") {
                if open && let Some(incident) = log.incidents.last_mut() {
                    incident.add(detail);
                }
            } else if line.contains("SUMMARY: ") {
                open = false;
                // Leaks are counted apart and only on request; allocations of a killed kernel are no finding.
                if !line.starts_with("LEAK SUMMARY") {
                    log.summaries.push((count(line), line.to_owned()));
                }
            } else if is_trouble(line) {
                open = false;
                log.troubles.push(line.to_owned());
            } else if !is_noise(line) {
                open = true;
                log.incidents.push(Incident::begin(line));
            }
        }
        log.merge();
        log
    }

    /// The verdict. `ran` is the checked program's own word.
    pub fn verdict(&self, tool: Tool, ran: &Ran) -> GateResult {
        let gate = tool.name();
        let found = || {
            let incidents: Vec<String> = self.incidents.iter().map(Incident::to_string).collect();
            incidents.join("\n")
        };
        match self.summaries.as_slice() {
            // Whatever else happened, what was found was found.
            [(n, summary), ..] if *n > 0 => {
                let incidents = found();
                GateResult::fail(
                    gate,
                    format!("{summary}{}{incidents}", if incidents.is_empty() { "" } else { "\n" }),
                )
            }
            [_, _, ..] => GateResult::fail(
                gate,
                format!("{} summary lines where one is expected", self.summaries.len()),
            ),
            [(_, summary)] if !self.incidents.is_empty() => {
                GateResult::fail(gate, format!("the log says `{summary}` and yet reports:\n{}", found()))
            }
            [] if !self.incidents.is_empty() => {
                GateResult::fail(gate, format!("no summary line; reported before the end:\n{}", found()))
            }
            [] => {
                let why = match (ran, self.troubles.first()) {
                    (Ran::No(why), _) => why.clone(),
                    (_, Some(trouble)) => trouble.clone(),
                    _ => "the log is empty".to_owned(),
                };
                GateResult::unavailable(gate, format!("compute-sanitizer wrote no summary: {why}"))
            }
            [(_, summary)] => match ran {
                Ran::Yes => GateResult::pass(gate, summary.clone()),
                Ran::Wrong(why) => {
                    GateResult::pass(gate, format!("{summary}; but its answer is wrong: {why}"))
                }
                Ran::No(why) => GateResult::unavailable(gate, format!("the kernel did not run: {why}")),
            },
        }
    }

    /// The same thing at the same place is one incident.
    fn merge(&mut self) {
        let mut merged: Vec<Incident> = Vec::new();
        for incident in self.incidents.drain(..) {
            let same = |other: &&mut Incident| {
                (&other.what, &other.kernel, &other.location)
                    == (&incident.what, &incident.kernel, &incident.location)
            };
            match merged.iter_mut().find(same) {
                Some(first) => first.times += 1,
                None => merged.push(incident),
            }
        }
        self.incidents = merged;
    }
}

impl Incident {
    fn begin(line: &str) -> Self {
        // Racecheck names the first place on the first line.
        let (what, place) = match line.split_once(" access at ") {
            Some((what, place)) => (format!("{what} access"), Some(Place::parse(place))),
            None => (line.to_owned(), None),
        };
        let place = place.unwrap_or_default();
        Self {
            what,
            kernel: place.kernel,
            location: place.location,
            thread: None,
            detail: Vec::new(),
            times: 1,
        }
    }

    fn add(&mut self, detail: &str) {
        let is_backtrace = detail.starts_with(' ')
            || detail.starts_with("Saved host backtrace")
            || detail.starts_with("Host Frame");
        if is_backtrace {
            return;
        }
        if let Some(place) = detail.strip_prefix("at ")
            && self.kernel.is_none()
        {
            let place = Place::parse(place);
            (self.kernel, self.location) = (place.kernel, place.location);
        } else if let Some(thread) = detail.strip_prefix("by ")
            && self.thread.is_none()
        {
            self.thread = Some(thread.to_owned());
        } else {
            self.detail.push(detail.to_owned());
        }
    }
}

/// Where something happened: `kernel(int*)+0x70 in file.cu:12`, or as older versions write it
/// `0x70 in file.cu:12:kernel(int*)` and `0x70 in kernel(int*)`.
#[derive(Default)]
struct Place {
    kernel: Option<String>,
    location: Option<String>,
}

impl Place {
    fn parse(text: &str) -> Self {
        // `[4 hazards]` may follow.
        let text = text.split(" [").next().unwrap_or(text).trim();
        let (first, second) = match text.rsplit_once(" in ") {
            Some((first, second)) => (first, Some(second)),
            None => (text, None),
        };
        let without_offset = first.rsplit_once("+0x").map_or(first, |(kernel, _)| kernel);
        if !without_offset.starts_with("0x") {
            return Self { kernel: Some(without_offset.to_owned()), location: second.map(str::to_owned) };
        }
        let Some(second) = second else { return Self::default() };
        // `file.cu:12:kernel(int*)`: the file, its line, then whatever the kernel is called.
        let mut parts = second.splitn(3, ':');
        match (parts.next(), parts.next(), parts.next()) {
            (Some(file), Some(line), Some(kernel)) if line.bytes().all(|byte| byte.is_ascii_digit()) => {
                Self { kernel: Some(kernel.to_owned()), location: Some(format!("{file}:{line}")) }
            }
            _ => Self { kernel: Some(second.to_owned()), location: None },
        }
    }
}

/// The number after `SUMMARY: `; a summary without one cannot be clean.
fn count(line: &str) -> u64 {
    let number = line.split("SUMMARY: ").nth(1).and_then(|rest| rest.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(u64::MAX)
}

fn is_noise(line: &str) -> bool {
    line == "COMPUTE-SANITIZER"
        || line.contains("were not printed. Use --print-limit")
        || line.starts_with("Maximum number of hazards reached")
        || line.starts_with("Warning: Maximum number of hazards reached")
}

/// What keeps the tool from checking, as opposed to what it finds.
fn is_trouble(line: &str) -> bool {
    const TROUBLES: [&str; 9] = [
        "Target application terminated before first instrumented API call",
        "Target application returned an error",
        "Tracking kernels launched by child processes requires",
        "couldn't find exit code",
        "process didn't terminate successfully",
        "Internal Sanitizer",
        "Device not supported",
        "Could not connect to target",
        "No attachable process found",
    ];
    TROUBLES.iter().any(|trouble| line.contains(trouble))
}
