//! One device and the launches on it, one after the other.

use crate::arguments;
use crate::npy::{self, About};
use crate::options::{LaunchArgs, RunArgs};
use crate::values;
use anyhow::{Context, Result, bail};
use ptxsan::{Arg, Buffer, Device, Kind, Launch, Module, ModuleId, Options, Outcome};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A buffer to be written to a file after the launches.
pub(crate) struct Output {
    pub(crate) buffer: Buffer,
    pub(crate) path: PathBuf,
    pub(crate) about: About,
}

/// A variable as a launch has left it.
#[derive(Serialize)]
pub(crate) struct Shown {
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) values: Vec<serde_json::Value>,
}

/// A device with a module, and the buffers that have names.
pub(crate) struct Session<'m> {
    pub(crate) device: Device,
    pub(crate) named: BTreeMap<String, Buffer>,
    pub(crate) outputs: Vec<Output>,
    /// Buffers that launches were given.
    passed: Vec<Buffer>,
    module: &'m Module,
    id: ModuleId,
}

impl<'m> Session<'m> {
    pub(crate) fn new(module: &'m Module) -> Result<Self> {
        let mut device = Device::new();
        let id = device.load(module)?;
        Ok(Session { device, named: BTreeMap::new(), outputs: Vec::new(), passed: Vec::new(), module, id })
    }

    /// A buffer that was given a name.
    pub(crate) fn buffer(&self, name: &str) -> Result<Buffer> {
        self.named.get(name).copied().with_context(|| {
            let names: Vec<&str> = self.named.keys().map(String::as_str).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            format!("no buffer `{name}`; there are: {names}. {name}=zeros:64K makes one")
        })
    }

    /// Sets variables, launches, and reads variables.
    pub(crate) fn launch(
        &mut self,
        run: &RunArgs,
        args: &LaunchArgs,
        options: &Options,
    ) -> Result<(Outcome, Vec<Shown>)> {
        for text in &args.set {
            self.set(text).with_context(|| format!("--set {text}"))?;
        }
        for text in &args.buffer {
            let buffer = arguments::buffer(self, text).with_context(|| format!("--buffer {text}"))?;
            self.passed.push(buffer);
        }
        let bound = arguments::bind(self, &args.args)?;
        self.passed.extend(bound.iter().filter_map(|arg| match arg {
            Arg::Buffer(buffer) => Some(*buffer),
            _ => None,
        }));
        let entry = entry_of(self.module, args)?;
        let mut launch = Launch::new(&entry, args.grid, args.block, args.shared, bound);
        launch.cluster = args.cluster;
        launch.cooperative = args.cooperative;
        launch.options = options.clone();
        launch.options.seed = run.seed;
        launch.options.programmatic = args.programmatic;
        launch.options.strict_proxies = run.strict_proxies;
        launch.options.collectives_order_memory = run.collectives_order_memory;
        launch.options.check_races = !run.no_races;
        launch.options.instruction_budget = run.budget;
        launch.options.max_shared_bytes = run.max_shared.unwrap_or(launch.options.max_shared_bytes);
        let outcome = self.device.launch(self.id, &launch)?;
        let mut shown = Vec::new();
        for text in &args.read {
            shown.push(self.read(text).with_context(|| format!("--read {text}"))?);
        }
        Ok((outcome, shown))
    }

    fn variable(&self, name: &str) -> Result<(String, Buffer)> {
        let symbol = self.module.variable_named(name)?;
        let buffer = self.device.variable(self.id, &symbol);
        Ok((symbol, buffer.with_context(|| format!("no variable `{name}`"))?))
    }

    /// `NAME=KIND:VALUE`.
    fn set(&mut self, text: &str) -> Result<()> {
        let form = "expected NAME=f32:1.5, NAME=i32:1,2,3, NAME=in:FILE.npy or NAME=bytes:HEX";
        let (name, value) = text.split_once('=').context(form)?;
        let (kind, value) = value.split_once(':').context(form)?;
        let bytes = match (values::parse(kind, value), kind) {
            (Some(bytes), _) => bytes?,
            (None, "in") => npy::read(value)?.bytes,
            (None, "bytes") => values::hex(value)?,
            (None, _) => bail!("`{kind}` is no kind of value; there are {}, in and bytes", values::TYPES),
        };
        let (_, buffer) = self.variable(name)?;
        if bytes.len() != buffer.len() {
            bail!("`{name}` has {} bytes, {} were given", buffer.len(), bytes.len());
        }
        Ok(self.device.write(buffer, 0, &bytes)?)
    }

    /// `NAME:TYPE[:FILE.npy]`; a C++ name may have colons of its own.
    fn read(&mut self, text: &str) -> Result<Shown> {
        let mut parts: Vec<&str> = text.split(':').collect();
        let file = parts.last().filter(|part| part.ends_with(".npy")).copied();
        if file.is_some() {
            parts.pop();
        }
        let kind = parts.pop().filter(|_| !parts.is_empty());
        let kind = kind.context("expected NAME:TYPE or NAME:TYPE:FILE.npy, such as table:f32")?;
        let name = parts.join(":");
        let (_, buffer) = self.variable(&name)?;
        let bytes = self.device.read(buffer)?;
        let values = values::show(kind, &bytes)?;
        if let Some(file) = file {
            let (about, _) = About::new(kind, vec![values.len() as u64])?;
            npy::write(file.as_ref(), &about, &bytes)?;
        }
        Ok(Shown { name, kind: kind.to_owned(), values })
    }

    /// The bytes of every buffer that the launches were given.
    pub(crate) fn contents(&mut self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        for buffer in std::mem::take(&mut self.passed) {
            all.extend(self.device.read(buffer)?);
        }
        Ok(all)
    }

    /// Writes the output buffers to their files.
    pub(crate) fn save(&mut self) -> Result<()> {
        for output in &self.outputs {
            npy::write(&output.path, &output.about, &self.device.read(output.buffer)?)?;
        }
        Ok(())
    }
}

/// The entry that a launch means.
pub(crate) fn entry_of(module: &Module, args: &LaunchArgs) -> Result<String> {
    Ok(match &args.entry {
        Some(name) => module.entry_named(name)?,
        None => module.only_entry()?,
    })
}

/// Whether a launch came to no end of its own, so that nothing may follow it.
pub(crate) fn is_stopped(outcome: &Outcome) -> bool {
    let ends = [Kind::Deadlock, Kind::Budget, Kind::Trap, Kind::Assertion];
    outcome.findings.iter().any(|finding| ends.contains(&finding.kind))
}
