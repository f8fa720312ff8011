//! The files under `cuda/`, as they were when this crate was built.

use crate::include::Files;

static FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/embedded_files.rs"));

/// Every embedded file by its path below `cuda/`.
pub(crate) fn files() -> Files {
    FILES.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
}
