//! A compiled kernel in a file of its own: a line of JSON with sizes and a checksum, then the compiler's log, then the code.
//!
//! The checksum covers the key too, so that files that changed places are noticed.

use std::{
    borrow::Cow,
    fs, io,
    path::{Path, PathBuf},
};

use evosdpa_core::file::{Durability, write_whole};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

const EXTENSION: &str = "kernel";
const SCHEMA: u32 = 2;

#[derive(Serialize, Deserialize)]
struct Header<'a> {
    schema: u32,
    label: Cow<'a, str>,
    log_bytes: usize,
    code_bytes: usize,
    checksum: String,
}

/// What such a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    /// The variant it was made from.
    pub(crate) label: Cow<'a, str>,
    /// What the compiler said.
    pub(crate) log: &'a str,
    /// PTX text or a cubin.
    pub(crate) code: &'a [u8],
}

impl<'a> Entry<'a> {
    /// What the bytes of a file hold, if they are whole and were written under this key.
    pub(crate) fn decode(bytes: &'a [u8], key: &str) -> Option<Self> {
        let newline = bytes.iter().position(|byte| *byte == b'\n')?;
        let header: Header<'a> = serde_json::from_slice(&bytes[..newline]).ok()?;
        let body = &bytes[newline + 1..];
        if header.schema != SCHEMA || header.log_bytes.checked_add(header.code_bytes)? != body.len() {
            return None;
        }
        let (log, code) = body.split_at(header.log_bytes);
        if checksum(key, log, code) != header.checksum {
            return None;
        }
        Some(Self { label: header.label, log: std::str::from_utf8(log).ok()?, code })
    }

    /// Writes the file, whole or not at all.
    pub(crate) fn write(&self, path: &Path, key: &str, durability: Durability) -> Result<()> {
        let Self { label, log, code } = self;
        let header = Header {
            schema: SCHEMA,
            label: Cow::Borrowed(label),
            log_bytes: log.len(),
            code_bytes: code.len(),
            checksum: checksum(key, log.as_bytes(), code),
        };
        let header = serde_json::to_string(&header).map_err(|error| Error::Report {
            label: label.to_string(),
            problem: format!("the compiled kernel cannot be written: {error}"),
        })?;
        let parts = [header.as_bytes(), b"\n", log.as_bytes(), code];
        write_whole(path, &parts, durability).map_err(|source| Error::Io { path: path.to_owned(), source })
    }
}

/// Where the entry of a key lies in a folder.
pub(crate) fn path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.{EXTENSION}"))
}

/// The key of a file, if it is an entry's.
pub(crate) fn key_of(path: &Path) -> Option<String> {
    let is_entry = path.extension().is_some_and(|extension| extension == EXTENSION);
    is_entry.then(|| path.file_stem().map(|stem| stem.to_string_lossy().into_owned()))?
}

/// The files of a folder that are entries.
pub(crate) fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?;
    Ok(entries.flatten().map(|entry| entry.path()).filter(|path| key_of(path).is_some()).collect())
}

fn checksum(key: &str, log: &[u8], code: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(key.len() as u64).to_le_bytes()).update(key.as_bytes());
    hasher.update(&(log.len() as u64).to_le_bytes()).update(log).update(code);
    hasher.finalize().to_hex().to_string()
}
