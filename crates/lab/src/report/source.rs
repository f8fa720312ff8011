//! Reading what a report is asked for: a run's folder, a document of `--json`, or a tune.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use evosdpa_core::file;
use serde_json::Value;

use super::{
    document::{Document, Resource, Source},
    evolution::Evolution,
};
use crate::{
    Error,
    error::IoContext,
    gate::GateResult,
    machine::Environment,
    profile::ProfileRow,
    record::{Row, catalogue},
};

impl Document {
    /// Reads all of `names`: paths of runs, documents and tunes, or names of runs in the folder `runs`.
    pub fn load(runs: &Path, names: &[String]) -> Result<Self, Error> {
        let mut document = Self::default();
        for name in names {
            let path = Path::new(name);
            if path.is_file() && path.extension().is_some_and(|ending| ending == "jsonl") {
                document.add_tune(path)?;
            } else if std::fs::metadata(path).is_ok_and(|there| !there.is_dir()) {
                // A file, or what can be read once, as `<(evosdpa bench --json)` and `/dev/stdin` can.
                document.add_file(path)?;
            } else if let Some(log) = tune_log(path) {
                document.add_tune(&log)?;
                if path.join("summary.json").is_file() {
                    document.add_run(path)?;
                }
            } else {
                document.add_run(&catalogue::find(runs, name)?)?;
            }
        }
        Ok(document)
    }

    fn add_tune(&mut self, log: &Path) -> Result<(), Error> {
        let evolution = Evolution::read(log)?;
        let status = match evolution.unreadable_lines {
            0 => String::new(),
            lines => format!("{lines} lines unreadable"),
        };
        self.sources.push(Source {
            name: log.display().to_string(),
            command: "tune".to_owned(),
            status,
            environment: None,
            notes: BTreeMap::new(),
        });
        self.evolutions.push(evolution);
        Ok(())
    }

    fn add_run(&mut self, folder: &Path) -> Result<(), Error> {
        let summary = read_json(&folder.join("summary.json"))?;
        self.add_source(folder, &summary);
        let rows = catalogue::rows(folder)?;
        // In the order of the summary, with the samples of the results.
        for value in array(&summary, "rows") {
            let Ok(row) = serde_json::from_value::<Row>(value.clone()) else { continue };
            let key = (row.kernel.clone(), row.problem.clone());
            self.add_row(rows.get(&key).cloned().unwrap_or(row));
        }
        self.words.extend(array(&summary, "words").filter_map(Value::as_str).map(str::to_owned));
        let insights = folder.join("insights.json");
        if insights.is_file() {
            // Its gates are in the summary's rows already.
            for value in array(&read_json(&insights)?, "rows") {
                self.add_profile(value, false);
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: &Path) -> Result<(), Error> {
        let document = read_json(path)?;
        if !document["rows"].is_array() {
            let why = "it has no `rows`: expected a run's folder or what `--json` prints".to_owned();
            return Err(Error::NotARun { path: path.to_owned(), why });
        }
        self.add_source(path, &document);
        for value in array(&document, "rows") {
            if value.get("insights").is_some() {
                self.add_profile(value, true);
            } else if let Ok(row) = serde_json::from_value::<Row>(value.clone()) {
                self.add_row(row);
            } else {
                self.add_other(value);
            }
        }
        Ok(())
    }

    fn add_source(&mut self, path: &Path, document: &Value) {
        let environment = &document["environment"];
        let known: Option<Environment> = serde_json::from_value(environment.clone()).ok();
        let of = |key: &str| document[key].as_str().unwrap_or_default().to_owned();
        let command = if document["command"].is_string() { of("command") } else { of("schema") };
        let fields = environment.as_object().into_iter().flatten();
        let notes = match &known {
            Some(_) => BTreeMap::new(),
            None => fields.map(|(name, value)| (name.clone(), plain(value))).collect(),
        };
        let name = match document["id"].as_str() {
            Some(id) => id.to_owned(),
            None => path.display().to_string(),
        };
        self.sources.push(Source { name, command, status: of("status"), environment: known, notes });
    }

    fn add_row(&mut self, row: Row) {
        for gate in &row.gates {
            self.add_gate(&row.kernel, &row.problem, gate);
        }
        self.rows.push(row);
    }

    fn add_profile(&mut self, value: &Value, with_gates: bool) {
        let Ok(row) = serde_json::from_value::<ProfileRow>(value.clone()) else { return };
        if with_gates {
            for gate in &row.gates {
                self.add_gate(&row.kernel, row.problem.as_deref().unwrap_or("–"), gate);
            }
        }
        if let Some(statics) = &row.statics {
            self.resources.push(Resource {
                kernel: row.kernel.clone(),
                arch: statics.arch.clone(),
                dtype: row
                    .problem
                    .as_deref()
                    .and_then(|p| p.split_whitespace().nth(1))
                    .unwrap_or("–")
                    .to_owned(),
                registers: statics.registers.into(),
                smem_bytes: statics.smem_bytes.into(),
                stack_bytes: statics.stack_bytes.into(),
                spill_bytes: statics.spill_bytes.into(),
                blocks_per_sm: Some(statics.blocks_per_sm.into()),
                occupancy_percent: Some(100.0 * statics.occupancy),
                limited_by: statics.limited_by.clone(),
            });
        }
        self.profiles.push(row);
    }

    /// Rows of `check`, `build` and `sanitize`: their gates, and resources where there are any.
    fn add_other(&mut self, value: &Value) {
        let of = |key: &str| value[key].as_str().unwrap_or_default();
        let kernel = of("kernel");
        let problem = [of("problem"), of("shape"), of("arch"), of("dtype")]
            .into_iter()
            .filter(|text| !text.is_empty())
            .collect::<Vec<_>>()
            .join(" ");
        for gate in array(value, "gates") {
            if let Ok(gate) = serde_json::from_value::<GateResult>(gate.clone()) {
                self.add_gate(kernel, &problem, &gate);
            }
        }
        let usage = &value["usage"];
        if usage.is_object() {
            let number = |key: &str| usage[key].as_u64().unwrap_or_default();
            let filling = &usage["occupancy"];
            self.resources.push(Resource {
                kernel: kernel.to_owned(),
                arch: of("arch").to_owned(),
                dtype: of("dtype").to_owned(),
                registers: number("registers"),
                smem_bytes: number("smem_static_bytes") + number("smem_dynamic_bytes"),
                stack_bytes: number("stack_bytes"),
                spill_bytes: number("spill_store_bytes") + number("spill_load_bytes"),
                blocks_per_sm: filling["blocks_per_sm"].as_u64(),
                occupancy_percent: filling["fraction"].as_f64().map(|fraction| 100.0 * fraction),
                limited_by: filling["limited_by"].as_str().unwrap_or_default().to_owned(),
            });
        }
    }
}

/// The log of a tune, if the folder is one's.
fn tune_log(folder: &Path) -> Option<PathBuf> {
    // A tune that a language model proposed for has llm.jsonl beside it.
    let log = folder.join("log.jsonl");
    if log.is_file() {
        return Some(log);
    }
    let entries = std::fs::read_dir(folder).ok()?;
    let mut logs: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ending| ending == "jsonl"))
        .collect();
    logs.sort();
    logs.into_iter().next()
}

fn read_json(path: &Path) -> Result<Value, Error> {
    let text = file::read_text(path, file::RECORD_BYTES_MAX).doing(
        "read",
        path,
        "name a run's folder or a document of --json",
    )?;
    serde_json::from_str(&text)
        .map_err(|error| Error::NotARun { path: path.to_owned(), why: error.to_string() })
}

fn array<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_of_a_tune_is_not_what_a_model_said() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        assert_eq!(tune_log(folder.path()), None);
        std::fs::write(place("llm.jsonl"), "{}\n").unwrap();
        std::fs::write(place("log.jsonl"), "{}\n").unwrap();
        assert_eq!(tune_log(folder.path()), Some(place("log.jsonl")));
        std::fs::rename(place("log.jsonl"), place("evaluations.jsonl")).unwrap();
        std::fs::remove_file(place("llm.jsonl")).unwrap();
        assert_eq!(tune_log(folder.path()), Some(place("evaluations.jsonl")));
    }
}
