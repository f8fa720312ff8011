//! One evaluation: a submission, put through the lab's commands one after the other, each in a process of its own.
//!
//! The order keeps the machine safe: a source is looked at before it is compiled, and runs on the simulator before it runs
//! anywhere else. The first gate that fails ends it.

mod process;
pub(crate) mod record;
mod verdict;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    time::Duration,
};

use anyhow::Context;
use evosdpa_core::{DType, Shape};
use evosdpa_kernels::Registry;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use self::verdict::{Outcome, Word};
use self::{process::Output, verdict::Stage};

/// Kernels of the CPU that can be asked for.
pub(crate) const CPU_KERNELS: [&str; 2] = ["cpu_flash", "cpu_naive"];

/// The longest source that is taken.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// The most problems of one order.
const PROBLEMS_MAX: usize = 16;

/// Where it is to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Place {
    /// On a GPU, after the simulator; CPU kernels on the CPU.
    #[default]
    Auto,
    /// On the simulator alone.
    Sim,
}

/// What is to be evaluated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Order {
    /// The kernel whose contract is kept.
    pub(crate) kernel: String,
    /// Another source for it.
    #[serde(default)]
    pub(crate) source: Option<String>,
    /// Its tunables.
    #[serde(default)]
    pub(crate) tunables: BTreeMap<String, i64>,
    /// Shapes as the command line spells them.
    pub(crate) problems: Vec<String>,
    /// The element type; the kernel's first where it is not said.
    #[serde(default)]
    pub(crate) dtype: Option<String>,
    /// Where.
    #[serde(default)]
    pub(crate) device: Place,
    /// Whether to profile it as well.
    #[serde(default)]
    pub(crate) profile: bool,
}

impl Order {
    /// What is wrong with it.
    pub(crate) fn fault(&self, registry: &Registry) -> Option<String> {
        let is_cpu = self.is_cpu();
        if !is_cpu && let Err(error) = registry.kernel(&self.kernel) {
            return Some(format!("{error}; on the CPU there are {}", CPU_KERNELS.join(", ")));
        }
        if is_cpu && self.source.is_some() {
            return Some(format!(
                "{} is part of the program: only CUDA kernels can be given another source",
                self.kernel
            ));
        }
        if is_cpu && self.profile {
            return Some(format!("{} has no profile: only CUDA kernels are profiled", self.kernel));
        }
        if is_cpu && self.device == Place::Sim {
            return Some(format!("{} runs on the CPU, not on the simulator of GPUs", self.kernel));
        }
        if self.problems.is_empty() || self.problems.len() > PROBLEMS_MAX {
            return Some(format!(
                "{} problems were given; 1 to {PROBLEMS_MAX} are taken",
                self.problems.len()
            ));
        }
        if let Some(why) = self.problems.iter().find_map(|problem| problem.parse::<Shape>().err()) {
            return Some(why.to_string());
        }
        if let Some(why) = self.dtype.as_ref().and_then(|dtype| dtype.parse::<DType>().err()) {
            return Some(why.to_string());
        }
        if self.source.as_ref().is_some_and(|source| source.len() > SOURCE_BYTES_MAX) {
            return Some("the source is longer than 1 MiB".to_owned());
        }
        if is_cpu {
            return None;
        }
        let known = registry.kernel(&self.kernel).ok()?.space();
        known
            .assign(self.tunables.iter().map(|(name, value)| (name.as_str(), *value)))
            .err()
            .map(|e| e.to_string())
    }

    fn is_cpu(&self) -> bool {
        CPU_KERNELS.contains(&self.kernel.as_str())
    }

    /// The name with its tunables, as the command line takes it.
    fn label(&self, name: &str) -> String {
        let pairs: Vec<String> =
            self.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if pairs.is_empty() { name.to_owned() } else { format!("{name}[{}]", pairs.join(" ")) }
    }
}

/// What evaluations run with.
#[derive(Clone, Debug)]
pub(crate) struct Lab {
    /// This program, which confines the other.
    pub(crate) agent: PathBuf,
    /// `evosdpa`, and what comes before its arguments.
    pub(crate) program: Vec<OsString>,
    /// Time of one step.
    pub(crate) step_limit: Duration,
    /// Memory of a step that runs on the CPU or the simulator.
    pub(crate) memory_bytes: u64,
}

/// The program that `--lab` names, or the one beside this one, or that on PATH.
pub(crate) fn lab_program(named: &[OsString]) -> anyhow::Result<Vec<OsString>> {
    if !named.is_empty() {
        return Ok(named.to_vec());
    }
    let beside = std::env::current_exe()?.with_file_name("evosdpa");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places =
        [beside].into_iter().chain(std::env::split_paths(&path).map(|folder| folder.join("evosdpa")));
    let found = places.into_iter().find(|place| place.is_file());
    Ok(vec![found.context("evosdpa is neither beside this program nor on PATH; name it with --lab")?.into()])
}

impl Lab {
    /// Evaluates an order that has no fault, with its files in `folder`. `cancelled` ends it. An error is about this machine.
    pub(crate) fn evaluate(
        &self,
        order: &Order,
        name: &str,
        folder: &Path,
        cancelled: &AtomicBool,
    ) -> anyhow::Result<Outcome> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let mut outcome = Outcome::default();
        let name = match &order.source {
            Some(source) => match self.write_kernel(order, source, name, folder) {
                Ok(()) => name,
                Err(why) => return Ok(outcome.failed("source", &why.to_string())),
            },
            None => &order.kernel,
        };
        for stage in self.stages(order, name, folder) {
            if stage.stops_without_pass && !outcome.may_go_on() {
                break;
            }
            let output = self.step(&stage, folder, cancelled)?;
            outcome.add(&stage, &output);
            if outcome.has_failed() {
                break;
            }
        }
        Ok(outcome.finished(order))
    }

    /// The files of a kernel with another source.
    fn write_kernel(&self, order: &Order, source: &str, name: &str, folder: &Path) -> anyhow::Result<()> {
        let mut registry = Registry::embedded()?;
        registry.register_source(&order.kernel, name, source)?;
        let place = folder.join("kernel");
        fs::create_dir_all(&place)?;
        for (file, text) in registry.kernel(name)?.files() {
            fs::write(place.join(file), text)?;
        }
        Ok(())
    }

    /// The commands of an order.
    fn stages(&self, order: &Order, name: &str, folder: &Path) -> Vec<Stage> {
        let label = order.label(name);
        let own = order.source.as_ref().map(|_| format!("--kernel-path={}", folder.join("kernel").display()));
        let dtype = order.dtype.as_ref().map(|dtype| format!("--dtype={dtype}"));
        let with = |words: &[&str], with_dtype: bool| -> Vec<String> {
            let more = own.clone().into_iter().chain(dtype.clone().filter(|_| with_dtype));
            words.iter().map(|word| (*word).to_owned()).chain(more).chain(["--json".to_owned()]).collect()
        };
        let kernel = format!("--kernels={label}");
        let shapes = format!("--shapes={}", order.problems.join(","));
        let first = format!("--shape={}", order.problems.first().map_or("tiny", String::as_str));
        let out = format!("--out={}", folder.join("runs").display());
        let stage = |name, arguments, on_gpu| Stage { name, arguments, on_gpu, stops_without_pass: false };
        let check = |device: &str, shapes: &str| {
            with(&["check", device, &kernel, shapes, "--seeds=1", "--time-limit=20"], true)
        };
        let bench = |device: &str| with(&["bench", device, &kernel, &shapes, "--no-baselines", &out], true);
        let profile = |device: &str| with(&["profile", device, &kernel, &first], true);
        let mut stages = Vec::new();
        if order.is_cpu() {
            stages.push(stage("correctness", check("--device=cpu", &shapes), false));
            stages.push(stage("performance", bench("--device=cpu"), false));
            return stages;
        }
        let on_sim = if order.device == Place::Sim { &*shapes } else { "--shapes=tiny,tiny:causal" };
        // The variant that was asked for, on each problem: others may need other registers.
        let named = format!("--kernels={name}");
        let settings: Vec<String> =
            order.tunables.iter().map(|(name, value)| format!("--set={name}={value}")).collect();
        for problem in &order.problems {
            let problem = format!("--problem={problem}");
            let own = ["build", &*named, &*problem].into_iter().chain(settings.iter().map(String::as_str));
            stages.push(stage("compile", with(&own.collect::<Vec<_>>(), true), false));
        }
        stages.push(stage("sim", check("--device=sim", on_sim), false));
        let sanitize = ["sanitize", "--device=sim", &*kernel, "--shapes=tiny"];
        stages.push(stage("races", with(&sanitize, true), false));
        if order.device == Place::Sim {
            stages.extend(order.profile.then(|| stage("profile", profile("--device=sim"), false)));
            return stages;
        }
        let on_gpu = |name, arguments| Stage { stops_without_pass: true, ..stage(name, arguments, true) };
        stages.push(on_gpu("correctness", check("--device=cuda", &shapes)));
        stages.push(on_gpu("performance", bench("--device=cuda")));
        stages.extend(order.profile.then(|| on_gpu("profile", profile("--device=cuda"))));
        stages
    }

    fn step(&self, stage: &Stage, folder: &Path, cancelled: &AtomicBool) -> anyhow::Result<Output> {
        let command =
            self.program.iter().cloned().chain(stage.arguments.iter().map(OsString::from)).collect();
        process::run(self, stage.name, command, stage.on_gpu, folder, cancelled)
    }

    /// One of the lab's commands, outside any evaluation: its document.
    pub(crate) fn document(&self, arguments: &[&str], folder: &Path) -> anyhow::Result<Value> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let own = arguments.iter().map(OsString::from);
        let command = self.program.iter().cloned().chain(own).collect();
        let output = process::run(self, "command", command, false, folder, &AtomicBool::new(false))?;
        serde_json::from_slice(&output.stdout).with_context(|| output.words())
    }
}
