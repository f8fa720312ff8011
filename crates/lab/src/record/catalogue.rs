//! Reading runs back: whole ones, and what else lies in the folder.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::{
    Row,
    run::{RESULT_SCHEMA, RUN_SCHEMA, Summary},
};
use crate::{Error, error::IoContext};

/// An entry of the runs folder.
pub enum Entry {
    /// A run.
    Run(Box<Summary>),
    /// Something else, and why it is not a run.
    Unreadable {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// Everything in the runs folder, oldest first; an absent folder is an empty one. One bad entry does not hide the others.
pub fn list(runs: &Path) -> Result<Vec<Entry>, Error> {
    if !runs.exists() {
        return Ok(Vec::new());
    }
    let hint = "name the folder that holds the runs with --out";
    let folder = std::fs::read_dir(runs).doing("list", runs, hint)?;
    let mut paths: Vec<PathBuf> = folder.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths
        .into_iter()
        .map(|path| match summary(&path) {
            Ok(summary) => Entry::Run(Box::new(summary)),
            Err(why) => Entry::Unreadable { path, why },
        })
        .collect())
}

/// Finds a run by path, by name in the runs folder, or by the end of its name; `latest` is the newest whole one.
pub fn find(runs: &Path, name: &str) -> Result<PathBuf, Error> {
    let direct = Path::new(name);
    if direct.join("summary.json").is_file() {
        return Ok(direct.to_owned());
    }
    let whole: Vec<String> = list(runs)?
        .into_iter()
        .filter_map(|entry| match entry {
            Entry::Run(summary) => Some(summary.id),
            Entry::Unreadable { .. } => None,
        })
        .collect();
    let found: Vec<&String> = if name == "latest" {
        whole.last().into_iter().collect()
    } else {
        whole.iter().filter(|id| id.as_str() == name || (!name.is_empty() && id.ends_with(name))).collect()
    };
    match found.as_slice() {
        [id] => Ok(runs.join(id)),
        [] => Err(Error::NotARun { path: runs.join(name), why: "there is no such run".to_owned() }),
        _ => Err(Error::NotARun { path: runs.join(name), why: format!("{} runs end in that", found.len()) }),
    }
}

/// A run's measured rows with all their samples, by kernel and problem.
pub fn rows(run: &Path) -> Result<BTreeMap<(String, String), Row>, Error> {
    #[derive(Deserialize)]
    struct ResultFile {
        schema: String,
        rows: Vec<Row>,
    }

    let not_a_run = |why: String| Error::NotARun { path: run.to_owned(), why };
    summary(run).map_err(not_a_run)?;
    let hint = "check that the run is still there";
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(run).doing("list", run, hint)? {
        let path = entry.doing("list", run, hint)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !(name.starts_with("result_") && name.ends_with(".json")) {
            continue;
        }
        let text = std::fs::read_to_string(&path).doing("read", &path, hint)?;
        let file: ResultFile =
            serde_json::from_str(&text).map_err(|error| not_a_run(format!("{name} is damaged: {error}")))?;
        if file.schema != RESULT_SCHEMA {
            return Err(not_a_run(format!("{name} has schema {}, not {RESULT_SCHEMA}", file.schema)));
        }
        all.extend(file.rows.into_iter().map(|row| ((row.kernel.clone(), row.problem.clone()), row)));
    }
    Ok(all)
}

fn summary(folder: &Path) -> Result<Summary, String> {
    let path = folder.join("summary.json");
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("no readable summary.json ({error})"))?;
    let summary: Summary = serde_json::from_str(&text).map_err(|error| format!("summary.json: {error}"))?;
    if summary.schema != RUN_SCHEMA {
        return Err(format!("summary.json has schema {}, not {RUN_SCHEMA}", summary.schema));
    }
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        machine::Environment,
        measure::interleave::Times,
        record::{Run, RunStatus},
    };

    fn row(kernel: &str, mean: f64) -> Row {
        let mut row = Row::new(kernel, false, crate::device::DeviceId::Cpu, "mission f32");
        let times = Times { rounds: vec![vec![mean; 4]; 3], began_ns: Vec::new() };
        row.measured(&times, 1e9, 1 << 20, Some(100.0));
        row
    }

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let environment = Environment::look(Some(2));
        let mut run = Run::create(folder.path(), "bench", &environment).unwrap();
        run.add("mission:causal", &[row("cpu_flash", 100.0), row("cpu_naive", 300.0)], &["fast".into()])
            .unwrap();
        run.finish(RunStatus::Complete).unwrap();
        let id = run.summary().id.clone();

        assert!(run.folder().join("result_mission.causal.json").is_file());
        let found = find(folder.path(), &id[id.len() - 6..]).unwrap();
        assert_eq!(found, find(folder.path(), "latest").unwrap());
        let rows = rows(&found).unwrap();
        assert_eq!(rows[&("cpu_flash".into(), "mission f32".into())], row("cpu_flash", 100.0));
        let text = std::fs::read_to_string(found.join("run.md")).unwrap();
        assert!(text.contains("| cpu_naive | mission f32 | 300.0 |"), "{text}");
    }

    #[test]
    fn a_run_that_was_killed_keeps_its_finished_shapes() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = Run::create(folder.path(), "bench", &Environment::look(None)).unwrap();
        run.add("mission", &[row("cpu_flash", 1.0)], &[]).unwrap();
        let path = run.folder().to_owned();
        drop(run);
        assert_eq!(rows(&path).unwrap().len(), 1);
        assert!(
            matches!(&list(folder.path()).unwrap()[0], Entry::Run(run) if run.status == RunStatus::Running)
        );
    }

    #[test]
    fn foreign_and_truncated_entries_are_named_and_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let whole = Run::create(folder.path(), "bench", &Environment::look(None)).unwrap();
        std::fs::write(folder.path().join("notes.txt"), "hello").unwrap();
        let cut = folder.path().join("cut");
        std::fs::create_dir(&cut).unwrap();
        let text = std::fs::read_to_string(whole.folder().join("summary.json")).unwrap();
        std::fs::write(cut.join("summary.json"), &text[..text.len() / 2]).unwrap();

        let entries = list(folder.path()).unwrap();
        let unreadable = entries.iter().filter(|entry| matches!(entry, Entry::Unreadable { .. })).count();
        assert_eq!((entries.len(), unreadable), (3, 2));
        assert!(matches!(rows(&cut), Err(Error::NotARun { .. })));
        assert!(find(folder.path(), "cut").is_err());
    }

    #[test]
    fn an_unwritable_place_is_refused_before_anything_is_measured() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Run::create(file.path(), "bench", &Environment::look(None)).err().unwrap().to_string();
        assert!(error.contains("--out"), "{error}");
    }
}
