//! Kernels that were compiled elsewhere and came along: a program starts with them at once, and needs no compiler.
//!
//! A folder of the files that the [cache](crate::Cache) has, under keys that leave the compiler out. So a changed source, header
//! or option is never answered by old code. The folder is what [`VARIABLE`] names, or else the first [suggested](suggest) one
//! that is there. It is read and never written, and trusted as the program is that it came with.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use evosdpa_core::file::{self, Durability};

use crate::{
    Artifact, CompileRequest, Error, Result,
    entry::{self, Entry},
};

/// Names the folder, before any other.
pub const VARIABLE: &str = "EVOSDPA_PRECOMPILED";

/// Folders that somebody knows of.
static SUGGESTED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Names a folder to use if it is there. Builders that were made before do not know of it.
pub fn suggest(folder: PathBuf) {
    SUGGESTED.lock().unwrap_or_else(PoisonError::into_inner).push(folder);
}

/// A folder of kernels that were compiled elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Precompiled {
    folder: PathBuf,
}

impl Precompiled {
    /// The folder of this module's documentation, if there is one. One that is named and not there is an error.
    pub fn find() -> Result<Option<Self>> {
        if let Some(named) = env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
            return Self::at(Path::new(&named)).map(Some);
        }
        let suggested = SUGGESTED.lock().unwrap_or_else(PoisonError::into_inner);
        let found = suggested.iter().find(|folder| folder.is_dir());
        Ok(found.map(|folder| Self { folder: folder.clone() }))
    }

    /// This folder.
    pub fn at(folder: &Path) -> Result<Self> {
        if folder.is_dir() {
            Ok(Self { folder: folder.to_owned() })
        } else {
            Err(Error::NotPrecompiled { path: folder.to_owned() })
        }
    }

    /// This folder, made if it is not there.
    pub fn create(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
        Self::at(folder)
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// How many kernels it has, and what they take on disk.
    pub fn size(&self) -> Result<(usize, u64)> {
        let io = |source| Error::Io { path: self.folder.clone(), source };
        let files = entry::files(&self.folder).map_err(io)?;
        let bytes = files.iter().filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum();
        Ok((files.len(), bytes))
    }

    /// Code and log of what was compiled from the source of this [key](CompileRequest::source_key).
    pub fn load(&self, source_key: &str) -> Option<(Vec<u8>, String)> {
        let path = entry::path(&self.folder, source_key);
        let bytes = file::read(&path, file::TEXT_BYTES_MAX).ok()?;
        let Some(Entry { log, code, .. }) = Entry::decode(&bytes, source_key) else {
            tracing::warn!("{} is damaged; the kernel is compiled here", path.display());
            return None;
        };
        Some((code.to_vec(), log.to_owned()))
    }

    /// Adds what the compiler made of a request.
    pub fn store(&self, request: &CompileRequest, artifact: &Artifact) -> Result<()> {
        let key = request.source_key();
        let label = format!("{} {}", request.label, request.target);
        Entry { label: label.into(), log: &artifact.log, code: &artifact.code }.write(
            &entry::path(&self.folder, &key),
            &key,
            Durability::Synced,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_folder_that_is_not_there_says_what_to_do() {
        let message = Precompiled::at(Path::new("/no/such/folder")).unwrap_err().to_string();
        assert!(message.contains("/no/such/folder") && message.contains(VARIABLE), "{message}");
        assert!(message.contains("evosdpa precompile"), "{message}");
    }

    #[test]
    fn the_first_suggested_folder_that_is_there_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        suggest(folder.path().join("not there"));
        suggest(folder.path().to_owned());
        // Of a test program that somebody runs with the variable set, nothing can be said.
        if env::var_os(VARIABLE).is_none() {
            assert_eq!(Precompiled::find().unwrap().unwrap().folder(), folder.path());
        }
    }
}
