//! Summary of a tune by a language model: candidates by strategy, tokens and cost.

use std::{collections::BTreeMap, path::Path};

use evosdpa_core::file;
use evosdpa_lab::evolve::{Evaluation, Standing};
use serde_json::Value;

use crate::output;

/// The names of a model's operators begin with this.
const PREFIX: &str = "llm-";

/// A table of the model's operators, where there are any.
pub(super) fn table(history: &[Evaluation]) -> Option<String> {
    let mut operators: BTreeMap<&str, Vec<&Evaluation>> = BTreeMap::new();
    for evaluation in history.iter().filter(|evaluation| evaluation.operator.starts_with(PREFIX)) {
        operators.entry(&evaluation.operator).or_default().push(evaluation);
    }
    let row = |(operator, of): (&str, Vec<&Evaluation>)| {
        let count = |least: Standing| of.iter().filter(|e| e.status >= least).count().to_string();
        let best = of.iter().filter_map(|evaluation| evaluation.fitness).fold(0.0, f64::max);
        vec![
            operator.to_owned(),
            of.len().to_string(),
            count(Standing::Out),
            count(Standing::Accepted),
            if best > 0.0 { format!("{best:.3}×") } else { "–".to_owned() },
        ]
    };
    let rows: Vec<Vec<String>> = operators.into_iter().map(row).collect();
    let header = ["operator", "proposed", "passed the gates", "accepted", "best over the default"];
    (!rows.is_empty()).then(|| output::table(&header, 1, rows))
}

/// Tokens and money that the transcript in a tune's folder counts.
pub(super) fn spent(folder: &Path) -> Option<String> {
    let text = file::read_text(&folder.join("llm.jsonl"), file::RECORD_BYTES_MAX).ok()?;
    let answered = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let answered: Vec<Value> = answered.filter(|line| line["kind"] == "answered").collect();
    let sum = |name: &str| answered.iter().filter_map(|line| line[name].as_u64()).sum::<u64>();
    let cost: f64 = answered.iter().filter_map(|line| line["cost"].as_f64()).sum();
    let cost = if cost > 0.0 { format!(", at a price of {cost:.4}") } else { String::new() };
    Some(format!(
        "{} answers, {} tokens of questions and {} of answers{cost}; llm.jsonl has all of them",
        answered.len(),
        sum("input_tokens"),
        sum("output_tokens"),
    ))
}
