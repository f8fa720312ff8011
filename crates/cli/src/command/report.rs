//! `evosdpa report`: stored runs as a page, or as another tool's file.

use std::path::{Path, PathBuf};

use anyhow::Context;
use evosdpa_core::file::{Durability, write_whole};
use evosdpa_lab::{record::catalogue, report::Document};

use crate::{Status, args::Report, output};

pub(crate) fn run(args: Report) -> anyhow::Result<Status> {
    let document = Document::load(&args.runs, &args.inputs)?;
    let text = args.format.render(&document)?;
    let path = match &args.out {
        Some(path) if path == Path::new("-") => {
            output::print_whole(&text)?;
            return Ok(Status::Passed);
        }
        Some(path) => path.clone(),
        None => beside_the_run(&args)?,
    };
    // Whole or not at all: over a full disk the page that was there stays.
    write_whole(&path, &[text.as_bytes()], Durability::Synced)
        .with_context(|| format!("cannot write {}; choose another with --out", path.display()))?;
    let (word, why) = document.verdict();
    output::print(&format!(
        "{word}: {why}\nwritten to {} ({} KB)\n",
        path.display(),
        text.len().div_ceil(1024)
    ))?;
    Ok(Status::Passed)
}

/// In the first run's folder; beside the current folder's files when the first is a file.
fn beside_the_run(args: &Report) -> anyhow::Result<PathBuf> {
    let name = args.format.file_name();
    let first = Path::new(&args.inputs[0]);
    if first.is_dir() {
        return Ok(first.join(name));
    }
    Ok(if first.exists() { name.into() } else { catalogue::find(&args.runs, &args.inputs[0])?.join(name) })
}
