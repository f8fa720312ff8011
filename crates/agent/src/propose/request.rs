//! The lab's request, as far as a prompt is made of it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// What the lab asks.
#[derive(Debug, Deserialize)]
pub(crate) struct Request {
    pub(crate) number: u64,
    pub(crate) left: u64,
    pub(crate) task: Task,
    pub(crate) source: Option<String>,
    #[serde(default)]
    pub(crate) files: BTreeMap<String, String>,
    pub(crate) elites: Vec<Candidate>,
    pub(crate) insights: Vec<Insight>,
    pub(crate) history: Vec<Candidate>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Task {
    pub(crate) space: Space,
    pub(crate) device_name: String,
    pub(crate) arch: String,
    pub(crate) problems: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Space {
    pub(crate) kernel: String,
    pub(crate) dimensions: Vec<Dimension>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Dimension {
    pub(crate) name: String,
    pub(crate) layer: String,
    pub(crate) values: Vec<i64>,
    pub(crate) default: i64,
    pub(crate) why: String,
}

/// An evaluation; elites have their source, where it is not the kernel's own.
#[derive(Debug, Deserialize)]
pub(crate) struct Candidate {
    pub(crate) number: u64,
    pub(crate) kernel: Option<String>,
    pub(crate) point: BTreeMap<String, i64>,
    #[serde(default)]
    pub(crate) rationale: Option<String>,
    pub(crate) gates: Vec<Gate>,
    #[serde(default)]
    pub(crate) resources: Value,
    pub(crate) shapes: BTreeMap<String, Shape>,
    pub(crate) fitness: Option<f64>,
    pub(crate) status: String,
    #[serde(default)]
    pub(crate) source: Option<String>,
}

impl Candidate {
    pub(crate) fn is_rejected(&self) -> bool {
        self.status == "rejected"
    }

    /// The gate that turned it away, and its words.
    pub(crate) fn failure(&self) -> Option<&Gate> {
        self.gates.iter().find(|gate| gate.verdict == "FAIL")
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Gate {
    pub(crate) gate: String,
    pub(crate) verdict: String,
    pub(crate) detail: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Shape {
    pub(crate) speedup: f64,
    pub(crate) interval: [f64; 2],
    pub(crate) p50_us: f64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Insight {
    pub(crate) id: String,
    pub(crate) bottleneck: String,
    pub(crate) confidence: f64,
    pub(crate) evidence: Vec<Evidence>,
    pub(crate) suggestion: String,
    pub(crate) tunables: Vec<Hint>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Evidence {
    pub(crate) metric: String,
    pub(crate) value: f64,
    pub(crate) unit: String,
    pub(crate) says: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Hint {
    pub(crate) name: String,
    pub(crate) direction: String,
}
