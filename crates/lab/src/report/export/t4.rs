//! Kernel Tuner's results: the open autotuning schema T4, version 1.0.0
//! (<https://github.com/KernelTuner/kernel_tuner>, `kernel_tuner/schema/T4`). Times are in milliseconds there.

use std::collections::BTreeMap;

use evosdpa_kernels::VariantId;
use serde_json::{Value, json};

use super::super::{
    document::Document,
    evolution::{Evaluation, Evolution},
};
use crate::record::Row;

pub(crate) fn render(document: &Document) -> String {
    let rows = document.rows.iter().filter(|row| !row.baseline).map(of_row);
    let evaluations = document.evolutions.iter().flat_map(Evolution::t4_results);
    let results: Vec<Value> = rows.chain(evaluations).collect();
    format!("{:#}\n", json!({ "schema_version": "1.0.0", "results": results }))
}

fn of_row(row: &Row) -> Value {
    // A row may name what is no variant: it is then all name.
    let id = row.kernel.parse().unwrap_or_else(|_| VariantId::new(&row.kernel, []));
    let mut configuration: BTreeMap<String, Value> =
        id.tunables.iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    configuration.insert("kernel".to_owned(), id.kernel.into());
    configuration.insert("problem".to_owned(), row.problem.as_str().into());
    configuration.insert("device".to_owned(), row.device.to_string().into());
    let gates: Vec<(String, String)> =
        row.gates.iter().map(|gate| (gate.gate.clone(), gate.verdict.word().to_owned())).collect();
    let invalidity = invalidity(&gates);
    let runtimes_ms: Vec<f64> = row.samples_us.iter().map(|us| us / 1e3).collect();
    let mut measurements = Vec::new();
    if let Some(p50_us) = row.p50_us {
        measurements.push(json!({ "name": "time", "value": p50_us / 1e3, "unit": "ms" }));
    }
    if let Some(gflops) = row.gflops {
        measurements.push(json!({ "name": "GFLOP/s", "value": gflops, "unit": "GFLOP/s" }));
    }
    json!({
        "configuration": configuration,
        "objectives": ["time"],
        "times": { "runtimes": runtimes_ms },
        "invalidity": invalidity,
        "correctness": f64::from(u8::from(invalidity == "correct")),
        "measurements": measurements,
    })
}

impl Evolution {
    fn t4_results(&self) -> Vec<Value> {
        let of = |evaluation: &Evaluation| {
            let mut configuration: BTreeMap<String, Value> = evaluation
                .tunables
                .iter()
                .map(|(name, value)| (name.clone(), number_or_text(value)))
                .collect();
            configuration.insert("kernel".to_owned(), evaluation.kernel.as_str().into());
            let invalidity = invalidity(&evaluation.gates);
            let mut measurements: Vec<Value> = Vec::new();
            if let Some(fitness) = evaluation.fitness {
                measurements.push(json!({ "name": "fitness", "value": fitness, "unit": "" }));
            }
            for (shape, outcome) in &evaluation.shapes {
                if let Some(p50_us) = outcome.p50_us {
                    measurements.push(
                        json!({ "name": format!("time {shape}"), "value": p50_us / 1e3, "unit": "ms" }),
                    );
                }
            }
            let runtimes_ms: Vec<f64> =
                evaluation.shapes.values().filter_map(|outcome| outcome.p50_us).map(|us| us / 1e3).collect();
            json!({
                "configuration": configuration,
                "objectives": ["fitness"],
                "times": { "runtimes": runtimes_ms },
                "invalidity": invalidity,
                "correctness": f64::from(u8::from(invalidity == "correct")),
                "measurements": measurements,
            })
        };
        self.evaluations.iter().map(of).collect()
    }
}

/// The schema's word for the first gate that did not pass.
fn invalidity(gates: &[(String, String)]) -> &'static str {
    let Some((gate, _)) = gates.iter().find(|(_, word)| word != "PASS") else { return "correct" };
    match gate.as_str() {
        "constraints" | "manifest" | "available" => "constraints",
        "compile" | "resources" => "compile",
        "performance" => "timeout",
        "correctness" | "timed output" => "correctness",
        _ => "runtime",
    }
}

fn number_or_text(text: &str) -> Value {
    text.parse::<i64>().map_or_else(|_| text.into(), Into::into)
}
