//! A compiled variant.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Result, ptxas};

/// What the compiler makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArtifactKind {
    /// Machine code for one architecture.
    Cubin,
    /// PTX text, for the simulator.
    Ptx,
}

/// Where an artifact came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// Compiled just now.
    Compiled,
    /// Compiled here before, and kept.
    Cache,
    /// Compiled elsewhere; see [`crate::precompiled`].
    Precompiled,
}

/// A compiled variant.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// The variant it was made from.
    pub label: String,
    /// The entry point.
    pub entry: String,
    /// What it is.
    pub kind: ArtifactKind,
    /// PTX text or a cubin.
    pub code: Vec<u8>,
    /// Everything the compiler said.
    pub log: String,
    /// Its key there.
    pub key: String,
    /// Where it came from.
    pub origin: Origin,
    /// How long it took to get: to compile, or to read from a file.
    pub time: Duration,
}

impl Artifact {
    /// The compiler's resource report on it; only cubins have one.
    pub fn report(&self) -> Result<ptxas::Report> {
        ptxas::Report::parse(&self.log)
    }

    /// The PTX as text; empty for a cubin.
    pub fn ptx(&self) -> &str {
        match self.kind {
            ArtifactKind::Ptx => std::str::from_utf8(&self.code).unwrap_or_default(),
            ArtifactKind::Cubin => "",
        }
    }
}
