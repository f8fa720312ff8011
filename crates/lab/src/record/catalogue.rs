//! Reading runs back: whole ones, and what else lies in the folder.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use evosdpa_core::file;
use serde::Deserialize;

use super::{
    Row,
    run::{RESULT_SCHEMA, RUN_SCHEMA, Summary},
};
use crate::{Error, error::IoContext};

/// An entry of the runs folder.
pub enum Entry {
    /// A run.
    Run {
        /// Where it is: its folder may have been given another name than the run has.
        path: PathBuf,
        /// What it says of itself.
        summary: Box<Summary>,
    },
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
            Ok(summary) => Entry::Run { path, summary: Box::new(summary) },
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
    let whole: Vec<(PathBuf, Box<Summary>)> = list(runs)?
        .into_iter()
        .filter_map(|entry| match entry {
            Entry::Run { path, summary } => Some((path, summary)),
            Entry::Unreadable { .. } => None,
        })
        .collect();
    let is_meant = |(path, summary): &&(PathBuf, Box<Summary>)| {
        let folder = path.file_name().map(|folder| folder.to_string_lossy()).unwrap_or_default();
        !name.is_empty() && (folder.ends_with(name) || summary.id.ends_with(name))
    };
    let found: Vec<_> = if name == "latest" {
        // Times are what ids begin with; folders may have other names.
        whole.iter().max_by(|a, b| a.1.id.cmp(&b.1.id)).into_iter().collect()
    } else {
        let exact = |(path, summary): &&(PathBuf, Box<Summary>)| {
            path.file_name().is_some_and(|folder| folder == name) || summary.id == name
        };
        let exact: Vec<_> = whole.iter().filter(exact).collect();
        if exact.is_empty() { whole.iter().filter(is_meant).collect() } else { exact }
    };
    match found.as_slice() {
        [(path, _)] => Ok(path.clone()),
        [] => Err(Error::NotARun { path: runs.join(name), why: "there is no such run".to_owned() }),
        _ => Err(Error::NotARun { path: runs.join(name), why: format!("{} runs end in that", found.len()) }),
    }
}

/// The runs that are meant by a name: one run; all runs of the set that it is one of; or several names separated by commas.
/// Oldest first.
pub fn find_set(runs: &Path, names: &str) -> Result<Vec<PathBuf>, Error> {
    if names.contains(',') {
        let found =
            names.split(',').map(|name| find_set(runs, name.trim())).collect::<Result<Vec<_>, _>>()?;
        let mut all = found.concat();
        all.sort();
        all.dedup();
        return Ok(all);
    }
    let of_set = |name: &str| -> Result<Vec<PathBuf>, Error> {
        let members = list(runs)?.into_iter().filter_map(|entry| match entry {
            Entry::Run { path, summary } if summary.set.as_deref() == Some(name) => Some(path),
            _ => None,
        });
        Ok(members.collect())
    };
    let named = if names.is_empty() { Vec::new() } else { of_set(names)? };
    if !named.is_empty() {
        return Ok(named);
    }
    let run = find(runs, names)?;
    match summary(&run).ok().and_then(|summary| summary.set) {
        Some(set) => Ok(of_set(&set)?).map(|members| if members.is_empty() { vec![run] } else { members }),
        None => Ok(vec![run]),
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
    let entries = std::fs::read_dir(run).doing("list", run, hint)?;
    let paths: Result<Vec<PathBuf>, _> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut paths = paths.doing("list", run, hint)?;
    paths.sort();
    for path in paths {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !(name.starts_with("result_") && name.ends_with(".json")) {
            continue;
        }
        let text = read(&path).doing("read", &path, hint)?;
        let file: ResultFile =
            serde_json::from_str(&text).map_err(|error| not_a_run(format!("{name} is damaged: {error}")))?;
        if file.schema != RESULT_SCHEMA {
            return Err(not_a_run(format!("{name} has schema {}, not {RESULT_SCHEMA}", file.schema)));
        }
        all.extend(file.rows.into_iter().map(|row| ((row.kernel.clone(), row.problem.clone()), row)));
    }
    Ok(all)
}

/// The text of a record's file. What is no file, such as a pipe that nobody writes to, is not waited for.
fn read(path: &Path) -> std::io::Result<String> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is no file"));
    }
    file::read_text(path, file::RECORD_BYTES_MAX)
}

fn summary(folder: &Path) -> Result<Summary, String> {
    let path = folder.join("summary.json");
    let text = read(&path).map_err(|error| format!("no readable summary.json ({error})"))?;
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
        measure::{interleave::Times, roof::Roof},
        record::{Run, RunStatus},
    };

    fn row(kernel: &str, mean: f64) -> Row {
        let mut row = Row::new(kernel, false, crate::device::DeviceId::Cpu, "mission f32");
        let times = Times { rounds: vec![vec![mean; 4]; 3], began_ns: Vec::new() };
        let problem = evosdpa_core::Problem::new("tiny".parse().unwrap(), evosdpa_core::DType::F32).unwrap();
        row.measured(&times, &problem, Some(&Roof { gflops: 10.48576, gbps: None }));
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
    fn a_set_is_found_by_its_name_and_by_any_of_its_runs() {
        let folder = tempfile::tempdir().unwrap();
        let make = |set: Option<&str>| {
            let mut run = Run::create(folder.path(), "bench", &Environment::look(None)).unwrap();
            if let Some(set) = set {
                run.join(set).unwrap();
            }
            run.folder().to_owned()
        };
        let (a, b, alone) = (make(Some("set-x")), make(Some("set-x")), make(None));
        let mut both = vec![a.clone(), b.clone()];
        both.sort();
        assert_eq!(find_set(folder.path(), "set-x").unwrap(), both);
        assert_eq!(find_set(folder.path(), &a.file_name().unwrap().to_string_lossy()).unwrap(), both);
        let name = alone.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(find_set(folder.path(), &name).unwrap(), std::slice::from_ref(&alone));
        let mut all = vec![a, b, alone];
        all.sort();
        assert_eq!(find_set(folder.path(), &format!("set-x, {name}")).unwrap(), all);
        assert!(find_set(folder.path(), "").is_err() && find_set(folder.path(), "set-y").is_err());
    }

    #[test]
    fn a_run_whose_folder_was_renamed_is_found_by_either_name() {
        let folder = tempfile::tempdir().unwrap();
        let run = Run::create(folder.path(), "bench", &Environment::look(None)).unwrap();
        let (id, renamed) = (run.summary().id.clone(), folder.path().join("before-the-change"));
        std::fs::rename(run.folder(), &renamed).unwrap();
        for name in ["before-the-change", "change", &id, "latest"] {
            assert_eq!(find(folder.path(), name).unwrap(), renamed, "{name}");
            assert_eq!(find_set(folder.path(), name).unwrap(), std::slice::from_ref(&renamed), "{name}");
        }
        assert!(rows(&renamed).unwrap().is_empty());
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
            matches!(&list(folder.path()).unwrap()[0], Entry::Run { summary, .. } if summary.status == RunStatus::Running)
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

    /// `mkfifo runs/x/summary.json` must not make every command that lists runs wait for ever.
    #[test]
    fn what_is_no_file_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        std::fs::create_dir(&pipe).unwrap();
        let made = std::process::Command::new("mkfifo").arg(pipe.join("summary.json")).status();
        assert!(made.unwrap().success());
        std::fs::create_dir_all(folder.path().join("folder/summary.json")).unwrap();
        let entries = list(folder.path()).unwrap();
        for entry in &entries {
            assert!(matches!(entry, Entry::Unreadable { why, .. } if why.contains("it is no file")));
        }
        assert_eq!(entries.len(), 2);
    }

    #[test]
    fn a_shape_that_comes_twice_has_two_files() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = Run::create(folder.path(), "bench", &Environment::look(None)).unwrap();
        let mut other = row("cpu_flash", 2.0);
        other.problem += ", skewed lengths";
        run.add("tiny", &[row("cpu_flash", 1.0)], &[]).unwrap();
        run.add("tiny", &[other], &[]).unwrap();
        assert_eq!(rows(run.folder()).unwrap().len(), 2);
        // Names of files end at 255 bytes; shapes do not.
        let long = format!("b1h1s4d8:softcap=0.{}1", "0".repeat(300));
        run.add(&long, &[row("cpu_naive", 1.0)], &[]).unwrap();
        run.add(&long, &[row("cpu_flash", 3.0)], &[]).unwrap();
        assert!(rows(run.folder()).unwrap().len() >= 3);
    }

    #[test]
    fn an_unwritable_place_is_refused_before_anything_is_measured() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Run::create(file.path(), "bench", &Environment::look(None)).err().unwrap().to_string();
        assert!(error.contains("--out"), "{error}");
    }
}
