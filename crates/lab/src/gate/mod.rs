//! Gates: what turns an artifact or an output into a verdict.

pub mod correctness;
pub mod hazards;
pub mod mutants;
pub mod resources;
pub mod sanitizer;
pub mod suite;

use std::fmt;

use serde::{Deserialize, Serialize};

/// A gate's word.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The gate ran and found nothing wrong.
    Pass,
    /// The gate ran and this is wrong.
    Fail(String),
    /// The gate could not run, for this reason.
    Unavailable(String),
}

impl Verdict {
    /// PASS, FAIL or UNAVAILABLE.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Pass => "PASS",
            Self::Fail(_) => "FAIL",
            Self::Unavailable(_) => "UNAVAILABLE",
        }
    }

    /// Whether the gate ran and found something wrong.
    pub fn is_fail(&self) -> bool {
        matches!(self, Self::Fail(_))
    }

    /// Whether nothing could be said.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    /// Whether the gate ran and found nothing wrong.
    pub fn is_pass(&self) -> bool {
        *self == Self::Pass
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("PASS"),
            Self::Fail(why) | Self::Unavailable(why) => write!(f, "{}: {why}", self.word()),
        }
    }
}

/// A gate's verdict, as it is recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Line", try_from = "Line")]
pub struct GateResult {
    /// Which gate.
    pub gate: String,
    /// Its word.
    pub verdict: Verdict,
    /// The evidence.
    pub detail: String,
}

impl GateResult {
    /// A gate that passed, with its evidence.
    pub fn pass(gate: &str, detail: impl Into<String>) -> Self {
        Self { gate: gate.to_owned(), verdict: Verdict::Pass, detail: detail.into() }
    }

    /// A gate that failed.
    pub fn fail(gate: &str, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { gate: gate.to_owned(), verdict: Verdict::Fail(why.clone()), detail: why }
    }

    /// A gate that could not run.
    pub fn unavailable(gate: &str, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { gate: gate.to_owned(), verdict: Verdict::Unavailable(why.clone()), detail: why }
    }
}

/// The recorded form: three plain strings.
#[derive(Serialize, Deserialize)]
struct Line {
    gate: String,
    verdict: String,
    detail: String,
}

impl From<GateResult> for Line {
    fn from(result: GateResult) -> Self {
        Self { gate: result.gate, verdict: result.verdict.word().to_owned(), detail: result.detail }
    }
}

impl TryFrom<Line> for GateResult {
    type Error = String;

    fn try_from(line: Line) -> Result<Self, String> {
        let Line { gate, verdict, detail } = line;
        let verdict = match verdict.as_str() {
            "PASS" => Verdict::Pass,
            "FAIL" => Verdict::Fail(detail.clone()),
            "UNAVAILABLE" => Verdict::Unavailable(detail.clone()),
            other => return Err(format!("unknown verdict `{other}`: PASS, FAIL or UNAVAILABLE")),
        };
        Ok(Self { gate, verdict, detail })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_survive_json() {
        for result in [
            GateResult::pass("correctness", "25 of 25"),
            GateResult::fail("correctness", "NaN"),
            GateResult::unavailable("available", "torch not importable"),
        ] {
            let text = serde_json::to_string(&result).unwrap();
            assert_eq!(serde_json::from_str::<GateResult>(&text).unwrap(), result);
        }
        assert!(serde_json::from_str::<GateResult>(r#"{"gate":"x","verdict":"MAYBE","detail":""}"#).is_err());
    }
}
