//! Files that are there whole or not at all.

use std::path::Path;

use evosdpa_core::file::{Durability, write_whole};

use crate::{Error, error::IoContext};

const HINT: &str = "choose another folder with --out, or free some space";

/// Writes to a temporary file beside `path`, flushes it to the disk and renames it.
pub(crate) fn write(path: &Path, contents: &[u8]) -> Result<(), Error> {
    write_whole(path, &[contents], Durability::Synced).doing("write", path, HINT)
}

/// Makes a folder that must not exist yet, with all above it.
pub(crate) fn create_folder(path: &Path) -> Result<(), Error> {
    let parent = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).and_then(|()| std::fs::create_dir(path)).doing("create", path, HINT)
}
