//! Files that are there whole or not at all.

use std::{fs::Permissions, io::Write, os::unix::fs::PermissionsExt, path::Path};

use crate::{Error, error::IoContext};

const HINT: &str = "choose another folder with --out, or free some space";

/// Writes to a temporary file beside `path`, flushes it to the disk and renames it.
pub(crate) fn write(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let put = || {
        // For everyone to read, as far as the system's mask lets them.
        let mode = Permissions::from_mode(0o666);
        let mut file = tempfile::Builder::new().permissions(mode).tempfile_in(folder)?;
        file.write_all(contents)?;
        file.as_file().sync_all()?;
        file.persist(path).map(drop).map_err(|error| error.error)
    };
    put().doing("write", path, HINT)
}

/// Makes a folder that must not exist yet, with all above it.
pub(crate) fn create_folder(path: &Path) -> Result<(), Error> {
    let parent = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).and_then(|()| std::fs::create_dir(path)).doing("create", path, HINT)
}
