//! Writing a run.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Row, atomic, markdown};
use crate::{Error, machine::Environment};

/// Schema of `summary.json`.
pub const RUN_SCHEMA: &str = "evosdpa.run/1";
/// Schema of `result_<shape>.json`.
pub const RESULT_SCHEMA: &str = "evosdpa.result/1";

/// How far a run came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunStatus {
    /// Still going, or killed: what is there is whole.
    Running,
    /// Stopped by the user; finished shapes are there.
    Interrupted,
    /// Everything that was asked for.
    Complete,
}

/// `summary.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// [`RUN_SCHEMA`].
    pub schema: String,
    /// The run's folder name.
    pub id: String,
    /// The set that it is one of: runs of one command, made one after the other to be compared with another set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
    /// What was asked for.
    pub command: String,
    /// How far it came.
    pub status: RunStatus,
    /// Where it ran.
    pub environment: Environment,
    /// Rows without samples.
    pub rows: Vec<Row>,
    /// A verdict per problem, in plain words.
    pub words: Vec<String>,
}

/// A run being recorded.
#[derive(Clone)]
pub struct Run {
    folder: PathBuf,
    summary: Summary,
}

impl Run {
    /// Makes the run's folder, so that an unwritable place is known before anything is measured.
    pub fn create(runs: &Path, command: &str, environment: &Environment) -> Result<Self, Error> {
        let time: String = environment.started.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
        let id = format!("{time}-{}", short_id());
        let folder = runs.join(&id);
        atomic::create_folder(&folder)?;
        let summary = Summary {
            schema: RUN_SCHEMA.to_owned(),
            id,
            set: None,
            command: command.to_owned(),
            status: RunStatus::Running,
            environment: environment.clone(),
            rows: Vec::new(),
            words: Vec::new(),
        };
        let run = Self { folder, summary };
        run.write_summary()?;
        Ok(run)
    }

    /// Makes it one of a set.
    pub fn join(&mut self, set: &str) -> Result<(), Error> {
        self.summary.set = Some(set.to_owned());
        self.write_summary()
    }

    /// Where the run is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What has been recorded so far.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Records a finished shape: its samples first, then the summary that names them.
    pub fn add(&mut self, shape: &str, rows: &[Row], words: &[String]) -> Result<(), Error> {
        let result = json!({
            "schema": RESULT_SCHEMA,
            "shape": shape,
            "environment": self.summary.environment,
            "rows": rows,
        });
        atomic::write(&result_file(&self.folder, shape), &pretty(&result))?;
        self.summary.rows.extend(rows.iter().map(Row::without_samples));
        self.summary.words.extend_from_slice(words);
        self.write_summary()
    }

    /// Closes the run.
    pub fn finish(&mut self, status: RunStatus) -> Result<(), Error> {
        self.summary.status = status;
        self.write_summary()
    }

    fn write_summary(&self) -> Result<(), Error> {
        atomic::write(&self.folder.join("run.md"), markdown::render(&self.summary).as_bytes())?;
        atomic::write(&self.folder.join("summary.json"), &pretty(&self.summary))
    }
}

/// Bytes of a shape in the name of its file: systems end names at 255.
const NAME_BYTES_MAX: usize = 200;

/// A file for a shape's samples that is not there yet: a run may ask for a shape twice, with other lengths say. Characters that
/// file systems dislike become others that shapes do not use.
fn result_file(folder: &Path, shape: &str) -> PathBuf {
    let name: String = shape
        .chars()
        .take(NAME_BYTES_MAX)
        .map(|c| match c {
            '/' => '_',
            ':' => '.',
            '=' => '-',
            other => other,
        })
        .collect();
    let path = |number: usize| match number {
        1 => folder.join(format!("result_{name}.json")),
        number => folder.join(format!("result_{name}.{number}.json")),
    };
    let mut number = 1;
    while path(number).exists() {
        number += 1;
    }
    path(number)
}

fn pretty(value: &impl Serialize) -> Vec<u8> {
    // Our records hold only strings, numbers and lists of them, which always serialise.
    let mut text = serde_json::to_vec_pretty(value).expect("records are plain data");
    text.push(b'\n');
    text
}

/// Six hexadecimal digits that differ between runs started in the same second.
pub fn short_id() -> String {
    use std::hash::{BuildHasher, RandomState};
    // Each RandomState is seeded anew.
    format!("{:06x}", RandomState::new().hash_one(std::process::id()) & 0xFF_FFFF)
}
