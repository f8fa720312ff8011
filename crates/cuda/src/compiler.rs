//! A variant's source to PTX or a cubin.

use std::time::{Duration, Instant};

use evosdpa_kernels::Variant;
use serde::{Deserialize, Serialize};

use crate::{
    ArtifactKind, CompileError, Error, Result,
    nvrtc::{Nvrtc, Outcome, Output, Source},
    toolkit::Toolkit,
};

/// One compilation, as plain data: what a worker process is told and what a cache key is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompileRequest {
    /// What errors call it.
    pub label: String,
    /// The source file's name, as it appears in line information.
    pub file_name: String,
    /// The source.
    pub source: String,
    /// Names and texts of the headers it includes.
    pub headers: Vec<(String, String)>,
    /// The compiler's name of the target: `sm_90a` gives a cubin, `compute_90a` PTX.
    pub target: String,
    /// What to make.
    pub kind: ArtifactKind,
    /// The compiler's options, without the toolkit's own include folders.
    pub options: Vec<String>,
}

/// Says which source line each instruction is of. The instructions are the same without.
const LINES: &str = "-lineinfo";

impl CompileRequest {
    /// What compiling this variant means.
    pub fn new(variant: &Variant, kind: ArtifactKind) -> Self {
        let target = match kind {
            ArtifactKind::Cubin => variant.arch.name(),
            ArtifactKind::Ptx => variant.arch.virtual_name(),
        };
        let mut options =
            vec![format!("--gpu-architecture={target}"), "-std=c++17".to_owned(), LINES.to_owned()];
        if kind == ArtifactKind::Cubin {
            // The report that the resource gate reads.
            options.push("--ptxas-options=-v".to_owned());
            options.push("--ptxas-options=-warn-lmem-usage".to_owned());
        }
        options.extend(variant.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options.extend(variant.options.iter().cloned());
        Self {
            label: variant.label(),
            file_name: variant.source_file.clone(),
            source: variant.source.to_string(),
            headers: variant
                .headers
                .iter()
                .map(|header| (header.name.clone(), header.text.clone()))
                .collect(),
            target: target.to_owned(),
            kind,
            options,
        }
    }

    /// The same without source lines, which come with the PTX as text: four fifths of a cubin.
    pub fn without_lines(mut self) -> Self {
        self.options.retain(|option| option != LINES);
        self
    }

    /// A hash of what decides the instructions, whichever compiler makes them.
    pub fn source_key(&self) -> String {
        self.clone().without_lines().key("")
    }

    /// The cache key: a hash of everything that decides the result, and of nothing else.
    pub fn key(&self, compiler_fingerprint: &str) -> String {
        let mut hasher = blake3::Hasher::new();
        // Every part with its length, so that no two different requests are the same bytes.
        let mut part = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        part("evosdpa.jit/1");
        part(compiler_fingerprint);
        part(match self.kind {
            ArtifactKind::Cubin => "cubin",
            ArtifactKind::Ptx => "ptx",
        });
        part(&self.file_name);
        part(&self.source);
        part(&self.headers.len().to_string());
        for (name, text) in &self.headers {
            part(name);
            part(text);
        }
        self.options.iter().for_each(|option| part(option));
        hasher.finalize().to_hex().to_string()
    }
}

/// What the compiler made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// PTX text or a cubin.
    pub code: Vec<u8>,
    /// Everything the compiler said.
    pub log: String,
    /// How long it took.
    pub time: Duration,
}

/// The compiler in this process. One compilation runs at a time; see [`crate::worker`] for more.
pub struct Compiler {
    nvrtc: &'static Nvrtc,
    toolkit: &'static Toolkit,
}

impl Compiler {
    /// Finds and opens the compiler.
    pub fn open() -> Result<Self> {
        Ok(Self { nvrtc: Nvrtc::shared()?, toolkit: Toolkit::find()? })
    }

    /// The toolkit it belongs to.
    pub fn toolkit(&self) -> &Toolkit {
        self.toolkit
    }

    /// Its version, `13.0`.
    pub fn version(&self) -> String {
        self.nvrtc.version().map_or_else(|problem| problem, |(major, minor)| format!("{major}.{minor}"))
    }

    /// Compiles.
    pub fn compile(&self, request: &CompileRequest) -> Result<Compiled> {
        let start = Instant::now();
        let source = Source {
            label: &request.label,
            file_name: &request.file_name,
            text: &request.source,
            headers: request.headers.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect(),
            options: request.options.clone(),
            instances: Vec::new(),
        };
        let output = match request.kind {
            ArtifactKind::Cubin => Output::Cubin,
            ArtifactKind::Ptx => Output::Ptx,
        };
        match self.nvrtc.compile(&source, output)? {
            Outcome::Compiled { code, log } => Ok(Compiled { code, log, time: start.elapsed() }),
            Outcome::Rejected { log } => Err(Error::Compile(CompileError {
                label: request.label.clone(),
                target: request.target.clone(),
                log,
            })),
        }
    }
}
