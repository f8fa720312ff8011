//! Proposed sources in a tune's folder: each in a folder of its own, complete, to be used with `--kernel-path`.

use std::path::{Path, PathBuf};

use evosdpa_core::file;

use super::{
    log::{Evaluation, Standing},
    work::Workplace,
};
use crate::{Error, error::IoContext, record::atomic};

const HINT: &str = "choose another folder with --out, or free some space";

/// The name that a proposed source is known by.
pub fn name(kernel: &str, number: u64) -> String {
    format!("{kernel}_p{number}")
}

/// Where a proposed source lies, from a tune's folder.
pub fn relative(name: &str) -> String {
    format!("sources/{name}")
}

/// Where a proposed source lies.
pub fn folder(tune: &Path, name: &str) -> PathBuf {
    tune.join(relative(name))
}

/// Makes a source known under a name, and puts its files on the disk. A source that no kernel can be made of is refused
/// with a reason; an error is about the disk.
pub fn register(
    tune: &Path,
    of: &str,
    name: &str,
    source: &str,
    place: &mut dyn Workplace,
) -> Result<Result<(), String>, Error> {
    if let Err(error) = place.register_source(of, name, source) {
        return Ok(Err(error.to_string()));
    }
    let folder = folder(tune, name);
    if folder.exists() {
        // Of a tune that was killed before this number was recorded.
        std::fs::remove_dir_all(&folder).doing("clear", &folder, HINT)?;
    }
    std::fs::create_dir_all(&folder).doing("create", &folder, HINT)?;
    for (file, text) in place.files(name) {
        atomic::write(&folder.join(file), text.as_bytes())?;
    }
    Ok(Ok(()))
}

/// Makes the sources of a resumed tune known again: those that may be parents, winners or examples.
pub fn register_again(
    tune: &Path,
    of: &str,
    history: &[Evaluation],
    place: &mut dyn Workplace,
) -> Result<(), Error> {
    let alive = history.iter().filter(|evaluation| evaluation.status >= Standing::Kept);
    for name in alive.filter_map(|evaluation| evaluation.kernel.as_deref()) {
        let path = folder(tune, name).join(format!("{name}.cu"));
        let source = file::read_text(&path, file::TEXT_BYTES_MAX).doing(
            "read",
            &path,
            "an elite of this tune was made from it: put it back, or begin another tune",
        )?;
        place.register_source(of, name, &source)?;
    }
    Ok(())
}
