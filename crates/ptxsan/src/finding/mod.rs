//! Findings: what a kernel did wrong, how bad it is, where, and what would help. Plain data that can be shown anywhere.

mod group;
mod kind;
mod suppress;

pub use group::merge;
pub use kind::Kind;
pub use suppress::{SuppressionError, Suppressions};

use crate::machine::Schedule;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// How bad a finding is, in the words of compute-sanitizer's racecheck.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Severity {
    /// Benign on the hardware there is: several threads store the same value.
    Info,
    /// A likely bug: allowed by the letter of the memory model, and almost never what was meant.
    Warning,
    /// Wrong.
    Error,
}

impl Severity {
    /// All, the mildest first.
    pub const ALL: [Severity; 3] = [Severity::Info, Severity::Warning, Severity::Error];

    /// Its name in JSON and on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Severity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Severity::ALL.into_iter().find(|severity| severity.name() == text);
        found.ok_or_else(|| format!("no severity `{text}`; there are info, warning and error"))
    }
}

/// A line of the CUDA source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[non_exhaustive]
pub struct Frame {
    /// The file as the compiler names it.
    pub file: String,
    /// Its line, from 1.
    pub line: u32,
}

impl Frame {
    pub(crate) fn new(file: String, line: u32) -> Self {
        Frame { file, line }
    }

    /// The file without its folders.
    pub fn file_name(&self) -> &str {
        self.file.rsplit(['/', '\\']).next().unwrap_or(&self.file)
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file_name(), self.line)
    }
}

/// An inline stack in one line, the outermost frame first: `kernel.cu:34 (inlined from tile.cuh:8 from copy.cuh:12)`.
pub(crate) fn one_line(stack: &[Frame]) -> Option<String> {
    let (outer, inner) = stack.split_last()?;
    let mut text = outer.to_string();
    if !inner.is_empty() {
        let inner: Vec<String> = inner.iter().rev().map(|frame| format!("from {frame}")).collect();
        text += &format!(" (inlined {})", inner.join(" "));
    }
    Some(text)
}

/// A place in the code, and who was there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Site {
    /// `file:line` in the CUDA source with its inline stack in one line, when the module has line information.
    pub source: Option<String>,
    /// The same as data: the line itself, then the line that it was inlined into, and so on.
    pub stack: Vec<Frame>,
    /// Line in the PTX text.
    pub ptx_line: u32,
    /// The instruction, without operands.
    pub opcode: String,
    /// Block indices x, y, z.
    pub block: [u64; 3],
    /// Thread indices x, y, z.
    pub thread: [u64; 3],
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [bx, by, bz] = self.block;
        let [tx, ty, tz] = self.thread;
        match &self.source {
            Some(source) => write!(f, "{source}")?,
            None => write!(f, "PTX")?,
        }
        write!(
            f,
            " (PTX line {}, {}) by block ({bx},{by},{bz}) thread ({tx},{ty},{tz})",
            self.ptx_line, self.opcode
        )
    }
}

/// The variable or buffer that a finding is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Variable {
    /// Its name: a buffer's, or a shared variable's as the source has it.
    pub name: String,
    /// `shared` or `global`.
    pub space: &'static str,
    /// Where in it the access starts.
    pub offset_bytes: u64,
    /// Its size.
    pub size_bytes: u64,
}

impl Variable {
    pub(crate) fn new(name: String, space: &'static str, offset_bytes: u64, size_bytes: u64) -> Self {
        Variable { name, space, offset_bytes, size_bytes }
    }
}

/// One mistake: what showed at one pair of source lines, in however many instructions, threads and schedules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// What kind of mistake.
    pub kind: Kind,
    /// How bad it is.
    pub severity: Severity,
    /// The access or instruction at which it showed.
    pub site: Site,
    /// The other access of a race, or where an uninitialised value comes from. Never the same thread's for a race between threads.
    pub other: Option<Site>,
    /// What was accessed, where there is one such thing.
    pub variable: Option<Variable>,
    /// What happened, with addresses and sizes.
    pub detail: String,
    /// What is missing or would help.
    pub advice: Option<String>,
    /// How often it was seen.
    pub count: u64,
    /// Under which schedules.
    pub schedules: Vec<Schedule>,
    /// How far apart the two threads of a race are: lanes, warps, blocks.
    #[serde(skip)]
    pub(crate) reach: u32,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}: {}", self.severity, self.kind.title(), self.detail)?;
        write!(f, "    at {}", self.site)?;
        if let Some(other) = &self.other {
            write!(f, "\n   and {other}")?;
        }
        if let Some(advice) = &self.advice {
            write!(f, "\n  {advice}")?;
        }
        let schedules: Vec<&str> = self.schedules.iter().map(|schedule| schedule.name()).collect();
        match (self.count, schedules.len()) {
            (0 | 1, 0 | 1) => Ok(()),
            (count, 0 | 1) => write!(f, "\n  seen {count} times"),
            (count, _) => write!(f, "\n  seen {count} times under {}", schedules.join(", ")),
        }
    }
}
