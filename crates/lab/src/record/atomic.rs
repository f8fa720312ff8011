//! Files that are there whole or not at all.

use std::{fs::File, io::Write, path::Path};

use crate::{Error, error::IoContext};

const HINT: &str = "choose another folder with --out, or free some space";

/// Writes to a temporary name beside `path`, flushes it to the disk and renames it.
pub(crate) fn write(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
    let written = File::create(&temporary)
        .and_then(|mut file| file.write_all(contents).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        // Best effort: the error that matters is the one returned.
        let _ = std::fs::remove_file(&temporary);
    }
    written.doing("write", path, HINT)
}

/// Makes a folder that must not exist yet, with all above it.
pub(crate) fn create_folder(path: &Path) -> Result<(), Error> {
    let parent = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).and_then(|()| std::fs::create_dir(path)).doing("create", path, HINT)
}
