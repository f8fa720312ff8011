//! `evosdpa runs`: what has been recorded.

use evosdpa_lab::{
    machine::Environment,
    record::catalogue::{self, Entry},
};
use serde_json::json;

use crate::{Status, args::Runs, output};

pub(crate) fn run(args: Runs) -> anyhow::Result<Status> {
    let entries = catalogue::list(&args.out)?;
    if args.json {
        let rows: Vec<_> = entries.iter().map(as_json).collect();
        output::print_json("runs", &Environment::look(None), &rows)?;
        return Ok(Status::Passed);
    }
    if entries.is_empty() {
        output::print(&format!("no runs in {}: `evosdpa bench` makes one\n", args.out.display()))?;
        return Ok(Status::Passed);
    }
    let rows = entries.iter().map(|entry| match entry {
        Entry::Run { path, summary: run } => {
            let status = format!("{:?}", run.status).to_lowercase();
            let failed = run.rows.iter().filter(|row| row.failed()).count();
            vec![file_name(path), status, run.rows.len().to_string(), failed.to_string(), run.command.clone()]
        }
        Entry::Unreadable { path, why } => {
            vec![file_name(path), "unreadable".to_owned(), "–".to_owned(), "–".to_owned(), why.clone()]
        }
    });
    output::print(&output::table(&["run", "status", "rows", "failed", "command"], 9, rows.collect()))?;
    Ok(Status::Passed)
}

/// What `compare` and `report` take.
fn file_name(path: &std::path::Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn as_json(entry: &Entry) -> serde_json::Value {
    match entry {
        Entry::Run { path, summary: run } => {
            json!({"id": run.id, "set": run.set, "path": path.display().to_string(), "status": run.status, "command": run.command, "rows": run.rows})
        }
        Entry::Unreadable { path, why } => json!({"path": path.display().to_string(), "unreadable": why}),
    }
}
