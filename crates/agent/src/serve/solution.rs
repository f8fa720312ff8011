//! The shapes of FlashInfer-Bench's documents: what a solution says, and a trace of each problem.
//!
//! A definition is a kernel's contract, a workload a problem in the lab's spelling. Solutions are CUDA sources for that contract: what is
//! written against PyTorch or Triton is refused by name.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::tasks::Task;
use crate::evaluate::{Order, Place, Word};

/// A request to evaluate: a solution, or an order in this service's own words.
#[derive(Debug, Deserialize)]
pub(crate) struct Evaluate {
    #[serde(default)]
    solution: Option<Solution>,
    #[serde(default)]
    workload_uuids: Option<Vec<String>>,
    #[serde(default)]
    order: Option<Order>,
}

#[derive(Debug, Deserialize)]
struct Solution {
    name: String,
    definition: String,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    sources: Vec<Source>,
    /// Ours: a variant, with or without another source.
    #[serde(default)]
    tunables: BTreeMap<String, i64>,
}

#[derive(Debug, Default, Deserialize)]
struct Spec {
    #[serde(default)]
    language: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Source {
    path: String,
    content: String,
}

/// Workloads of every definition; any other problem can be asked for by its spelling.
pub(crate) const WORKLOADS: [&str; 4] = ["mission", "mission:causal", "long", "long:causal"];

impl Evaluate {
    /// What it asks for, and the name the client gave it.
    pub(crate) fn order(self, profile: bool) -> Result<(Order, String), String> {
        let mut order = match (self.order, self.solution) {
            (Some(order), None) => (order, String::new()),
            (None, Some(solution)) => solution.order(self.workload_uuids)?,
            _ => return Err("give either `solution` or `order`".to_owned()),
        };
        order.0.profile |= profile;
        Ok(order)
    }
}

impl Solution {
    fn order(self, workloads: Option<Vec<String>>) -> Result<(Order, String), String> {
        let language = self.spec.language.as_deref().unwrap_or("cuda");
        if !language.eq_ignore_ascii_case("cuda") {
            return Err(format!(
                "solutions in {language} are not evaluated here; CUDA sources for a kernel's contract are"
            ));
        }
        let mut sources = self.sources.into_iter();
        let source = match (sources.next(), sources.next()) {
            (None, _) => None,
            (Some(source), None) if source.path.ends_with(".cu") => Some(source.content),
            (Some(source), None) => return Err(format!("`{}` is no .cu file", source.path)),
            _ => {
                return Err(
                    "a solution has one source, with the kernel's headers; there are several".to_owned()
                );
            }
        };
        let problems =
            workloads.unwrap_or_else(|| WORKLOADS[..2].iter().map(|name| (*name).to_owned()).collect());
        let order = Order {
            kernel: self.definition,
            source,
            tunables: self.tunables,
            problems,
            dtype: None,
            device: Place::Auto,
            profile: false,
        };
        Ok((order, self.name))
    }
}

/// What a client sees of a task.
pub(crate) fn view(task: &Task) -> Value {
    let is_over = task.outcome.is_some();
    json!({
        "task_id": task.id,
        "status": task.status,
        "definition": task.order.kernel,
        "solution": task.name,
        "traces": is_over.then(|| traces(task)),
        "outcome": task.outcome,
        "error": task.error,
        "submitted_s": task.submitted_s,
    })
}

/// One trace for each problem.
fn traces(task: &Task) -> Vec<Value> {
    let Some(outcome) = &task.outcome else { return Vec::new() };
    let trace = |problem: &String| {
        let of = |text: &str| text.split(' ').next() == Some(problem.as_str());
        let speed = outcome.performance.iter().find(|speed| of(&speed.problem));
        let error = outcome.max_error.iter().find(|(problem, _)| of(problem)).map(|(_, error)| error);
        let failed = outcome.gates.iter().find(|gate| gate.verdict == Word::Fail);
        let status = match failed.map(|gate| gate.stage.as_str()) {
            Some("source" | "compile") => "COMPILE_ERROR",
            // What the simulator found is a fault of another kind than a wrong number.
            Some(_)
                if failed
                    .is_some_and(|gate| gate.gate == "correctness" && !gate.detail.contains(" findings")) =>
            {
                "INCORRECT_NUMERICAL"
            }
            Some(_) => "RUNTIME_ERROR",
            None if speed.is_some() => "PASSED",
            None => "RUNTIME_ERROR",
        };
        let environment = outcome.environment.as_ref();
        let hardware = environment.map(|environment| match &environment["accelerator"] {
            Value::Null => environment["cpu"].clone(),
            accelerator => accelerator.clone(),
        });
        json!({
            "definition": task.order.kernel,
            "workload": {"uuid": problem, "axes": {}, "inputs": {}},
            "solution": task.name,
            "evaluation": {
                "status": status,
                "log": outcome.why.clone().unwrap_or_default(),
                // The nullable fields of the schema: only what passed has a performance.
                "correctness": error.map(|error| json!({"max_absolute_error": error, "max_relative_error": null})),
                "performance": speed.filter(|_| status == "PASSED").map(|speed| json!({
                    "latency_ms": speed.p50_us / 1e3,
                    "reference_latency_ms": speed.reference_p50_us.map(|time| time / 1e3),
                    "speedup_factor": speed.speedup,
                })),
                "environment": {"hardware": hardware, "libs": {"evosdpa": env!("CARGO_PKG_VERSION")}},
            },
        })
    };
    task.order.problems.iter().map(trace).collect()
}
