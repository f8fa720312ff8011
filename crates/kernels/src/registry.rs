//! Which kernels there are.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    Arch, Error, Header, Manifest, ProblemFacts, Refusal, Result, Target, embedded, foreign,
    include::{Files, folder, headers, join},
    names::nearest,
    reads::{self, Identifiers, names_read},
    support,
};
use evosdpa_core::{Features, file};

/// Where a kernel came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Shipped with this crate.
    Embedded,
    /// Found in a user's folder.
    Folder(PathBuf),
}

/// A named way to answer a problem: a source and its manifest.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// What the manifest says.
    pub manifest: Manifest,
    /// The manifest's path, as errors name it.
    pub manifest_file: String,
    /// The manifest's text.
    pub manifest_text: String,
    /// The source's path: below `cuda/` for embedded kernels, the file's name for a user's.
    pub source_file: String,
    /// The source's text.
    pub source: Arc<str>,
    /// The headers it includes.
    pub headers: Arc<[Header]>,
    /// The compile-time names of the manifest that they read.
    pub reads: BTreeSet<String>,
    /// What it knows about beyond sizes and a mask. It follows from the manifest, and is asked for at every choice.
    pub(crate) features: Features,
    /// Where it came from.
    pub origin: Origin,
}

impl Kernel {
    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// The files that make this kernel, by name: in a folder of their own, [`Registry::add_folder`] reads it from them.
    /// Headers that are included through a folder (`../x.cuh`) stay with those that are shipped.
    pub fn files(&self) -> Vec<(&str, &str)> {
        let of_source = self.source_file.rsplit('/').next().unwrap_or(&self.source_file);
        let flat = self.headers.iter().filter(|header| !header.name.contains('/'));
        let headers = flat.map(|header| (header.name.as_str(), header.text.as_str()));
        let manifest_name = self.manifest_file.rsplit('/').next().unwrap_or(&self.manifest_file);
        let own = [(manifest_name, self.manifest_text.as_str()), (of_source, &*self.source)];
        own.into_iter().chain(headers).collect()
    }
}

/// The kernels that can be chosen, and apart from them the known-bad ones that tests are made of.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    kernels: BTreeMap<String, Kernel>,
    mutants: BTreeMap<String, Kernel>,
}

/// A kernel in the order of its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineageEntry<'a> {
    /// The kernel.
    pub name: &'a str,
    /// How many ancestors it has here.
    pub depth: usize,
    /// The kernel it was developed from.
    pub parent: Option<&'a str>,
    /// What changed, and why.
    pub changed: Option<&'a str>,
    /// One line about it.
    pub summary: &'a str,
}

impl Registry {
    /// The kernels shipped with this crate.
    pub fn embedded() -> Result<Self> {
        let files = embedded::files();
        let mut registry = Self::default();
        registry.add(&files, &files, &|path| format!("cuda/{path}"), &Origin::Embedded)?;
        for kernel in registry.kernels.values().chain(registry.mutants.values()) {
            let Manifest { parent, mutant, .. } = &kernel.manifest;
            let of = mutant.as_ref().map(|mutant| ("mutant.of", &mutant.of));
            let relatives = parent.as_ref().map(|parent| ("parent", parent)).into_iter().chain(of);
            for (key, relative) in relatives {
                if !registry.kernels.contains_key(relative) {
                    return Err(Error::ManifestValue {
                        file: kernel.manifest_file.clone(),
                        key: key.to_owned(),
                        problem: format!("there is no kernel `{relative}`"),
                    });
                }
            }
        }
        Ok(registry)
    }

    /// Adds the kernels of a user's folder: every `*.toml` in it, with its source. The shared headers are found
    /// from there too.
    pub fn add_folder(&mut self, path: &Path) -> Result<()> {
        let read = |path: &Path| {
            file::read_text(path, file::TEXT_BYTES_MAX)
                .map_err(|source| Error::Read { path: path.to_owned(), source })
        };
        let entries = fs::read_dir(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let mut own = Files::new();
        for entry in entries {
            let entry = entry.map_err(|source| Error::Read { path: path.to_owned(), source })?.path();
            let extension = entry.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
            let name = entry.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            if ["toml", "cu", "cuh", "h"].contains(&extension) && entry.is_file() {
                own.insert(name, read(&entry)?);
            }
        }
        let mut all = embedded::files();
        all.extend(own.clone());
        let display = |name: &str| path.join(name).display().to_string();
        self.add(&own, &all, &display, &Origin::Folder(path.to_owned()))
    }

    /// Adds a kernel that is another one with a new source: its headers are found in the same places, and its manifest
    /// differs only in the name, the source's name and the descent. The source may be anybody's: it is refused when it would
    /// have the compiler read any other file than headers.
    pub fn register_source(&mut self, of: &str, name: &str, source: &str) -> Result<()> {
        let parent = self.kernel(of)?.clone();
        if let Some(first) = self.kernels.get(name) {
            return Err(Error::DuplicateKernel {
                name: name.to_owned(),
                first: first.manifest_file.clone(),
                second: parent.manifest_file,
            });
        }
        let mut all = embedded::files();
        // Headers of a user's own folder are known by the names they were found under.
        all.extend(parent.headers.iter().map(|header| (header.name.clone(), header.text.clone())));
        if let Some(why) = foreign::refusal(source, &all) {
            return Err(Error::ForeignSource { name: name.to_owned(), why });
        }
        let beside = |file: &str, ending: &str| match file.rfind('/') {
            Some(slash) => format!("{}{name}.{ending}", &file[..=slash]),
            None => format!("{name}.{ending}"),
        };
        let manifest_file = beside(&parent.manifest_file, "toml");
        let manifest_text = renamed(&parent, name)?;
        let source_file = beside(&parent.source_file, "cu");
        let manifest = Manifest::parse(&manifest_text, &manifest_file)?;
        let headers = headers(&source_file, source, &all);
        let kernel = Kernel {
            features: support::features(&manifest),
            reads: names_read(&manifest, source, &headers, &mut Identifiers::default()),
            manifest,
            manifest_file,
            manifest_text,
            headers: headers.into(),
            source_file,
            source: source.into(),
            origin: parent.origin,
        };
        self.kernels.insert(name.to_owned(), kernel);
        Ok(())
    }

    fn add(
        &mut self,
        own: &Files,
        all: &Files,
        display: &dyn Fn(&str) -> String,
        origin: &Origin,
    ) -> Result<()> {
        let mut known = Identifiers::default();
        for (path, text) in own.iter().filter(|(path, _)| path.ends_with(".toml")) {
            let manifest_file = display(path);
            let manifest = Manifest::parse(text, &manifest_file)?;
            let in_mutants = folder(path) == "mutants";
            if *origin == Origin::Embedded && in_mutants != manifest.mutant.is_some() {
                return Err(Error::ManifestValue {
                    file: manifest_file,
                    key: "mutant".to_owned(),
                    problem: "mutants, and only mutants, live in `mutants/` and have a [mutant] table"
                        .to_owned(),
                });
            }
            let source_file = join(folder(path), &manifest.source);
            let Some(source) = all.get(&source_file) else {
                return Err(Error::SourceMissing { file: manifest_file, wanted: manifest.source });
            };
            let shelf = if manifest.mutant.is_some() { &mut self.mutants } else { &mut self.kernels };
            if let Some(first) = shelf.get(&manifest.name) {
                return Err(Error::DuplicateKernel {
                    name: manifest.name,
                    first: first.manifest_file.clone(),
                    second: manifest_file,
                });
            }
            let headers = headers(&source_file, source, all);
            let reads = names_read(&manifest, source, &headers, &mut known);
            reads::check(&manifest, &manifest_file, &reads)?;
            let origin = origin.clone();
            let name = manifest.name.clone();
            let manifest_text = text.clone();
            let kernel = Kernel {
                features: support::features(&manifest),
                manifest,
                manifest_file,
                manifest_text,
                source_file,
                source: source.as_str().into(),
                headers: headers.into(),
                reads,
                origin,
            };
            shelf.insert(name, kernel);
        }
        Ok(())
    }

    /// The kernels that can be chosen, by name.
    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.values()
    }

    /// The known-bad kernels, by name. They are test fixtures and can never be chosen.
    pub fn mutants(&self) -> impl Iterator<Item = &Kernel> {
        self.mutants.values()
    }

    /// With the known-bad kernels among those that can be chosen: for a program that tries the gates on them.
    pub fn with_mutants(mut self) -> Self {
        self.kernels.append(&mut self.mutants);
        self
    }

    /// The kernel of this name; mutants are not among them.
    pub fn kernel(&self, name: &str) -> Result<&Kernel> {
        self.kernels.get(name).ok_or_else(|| Error::UnknownKernel {
            name: name.to_owned(),
            known: self.kernels.keys().cloned().collect::<Vec<_>>().join(", "),
            nearest: nearest(name, self.kernels.keys().map(String::as_str)),
        })
    }

    /// The kernels that support a problem on an architecture; if none does, which comes closest and why it does not.
    pub fn supporting(&self, facts: &ProblemFacts, target: &Target) -> Result<Vec<&Kernel>> {
        let mut supporting = Vec::new();
        let mut closest: Option<Refusal> = None;
        for kernel in self.kernels.values() {
            match kernel.supports(facts, target) {
                Ok(()) => supporting.push(kernel),
                Err(Error::Unsupported { refusal, .. }) => {
                    if closest.as_ref().is_none_or(|best| refusal.reasons.len() < best.reasons.len()) {
                        closest = Some(refusal);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        match closest {
            _ if !supporting.is_empty() => Ok(supporting),
            Some(closest) => Err(Error::NoKernel { problem: facts.to_string(), arch: target.arch, closest }),
            None => Err(Error::Empty),
        }
    }

    /// Kernels after their parents, each line of descent together.
    pub fn lineage(&self) -> Vec<LineageEntry<'_>> {
        let mut entries = Vec::new();
        let is_root = |kernel: &Kernel| {
            kernel.manifest.parent.as_ref().is_none_or(|parent| !self.kernels.contains_key(parent))
        };
        for kernel in self.kernels.values().filter(|kernel| is_root(kernel)) {
            self.descend(kernel, 0, &mut entries);
        }
        entries
    }

    fn descend<'a>(&'a self, kernel: &'a Kernel, depth: usize, entries: &mut Vec<LineageEntry<'a>>) {
        let manifest = &kernel.manifest;
        entries.push(LineageEntry {
            name: &manifest.name,
            depth,
            parent: manifest.parent.as_deref(),
            changed: manifest.changed.as_deref(),
            summary: &manifest.summary,
        });
        for child in self.kernels.values() {
            if child.manifest.parent.as_deref() == Some(kernel.name()) {
                self.descend(child, depth + 1, entries);
            }
        }
    }
}

impl Kernel {
    /// What it knows about beyond sizes and a mask.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Whether the kernel is built for an architecture.
    pub fn compiles_for(&self, arch: Arch) -> bool {
        support::compiles_for(&self.manifest, arch)
    }
}

/// A kernel's manifest for a relative of this name with a source of its own.
fn renamed(parent: &Kernel, name: &str) -> Result<String> {
    let unreadable = |problem: String| Error::ManifestValue {
        file: parent.manifest_file.clone(),
        key: "name".to_owned(),
        problem,
    };
    let mut table: toml::Table =
        parent.manifest_text.parse().map_err(|error: toml::de::Error| unreadable(error.to_string()))?;
    for (key, value) in [
        ("name", name.to_owned()),
        ("parent", parent.name().to_owned()),
        ("changed", format!("another source than that of {}", parent.name())),
        ("source", format!("{name}.cu")),
    ] {
        table.insert(key.to_owned(), toml::Value::String(value));
    }
    toml::to_string(&table).map_err(|error| unreadable(error.to_string()))
}
