//! `cargo xtask gpu`: everything that only a GPU can show, in one command that can be stopped and started again.
//!
//! Each step is one program run and one document. A document is written when its step has ended, under a temporary name that
//! is then renamed: whatever kills the command, the folder holds whole documents. A document says which revision made it, so
//! the next run passes over what this revision has already.

mod plan;
mod run;
mod table;

#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde_json::Value;

use plan::Step;
use run::Ended;
use table::{Line, State, exit_code, page};

pub(crate) const USAGE: &str = "usage: cargo xtask gpu [OPTIONS]

  --budget TIME    stop after this long: 90s, 10m, 1h [default: 10m]
  --out FOLDER     where documents lie [default: results/h200]
  --binary PATH    a release build of evosdpa [default: built now, or, where this program was not started by cargo, the one
                   beside it]; the examples are looked for in examples/ beside it
  --python PATH    Python with torch and the evosdpa package [default: python3]
  --only NAMES     only these steps, separated by commas
  --list           say what is fresh, stale and missing and how long each step takes, and run nothing

On a machine without Rust, carry the repository along with what was built elsewhere by
  cargo build --release -p xtask -p evosdpa-cli
  cargo build --release -p evosdpa --example device_pointers
  cargo build --release -p evosdpa-lab --example sim_agreement
and run target/release/xtask gpu in it. compute-sanitizer, ncu and NVRTC are looked for as `evosdpa doctor` says.
";

/// What was asked for.
#[derive(Debug)]
pub(crate) struct Options {
    budget: Duration,
    out: PathBuf,
    binary: Option<PathBuf>,
    python: String,
    only: Vec<String>,
    list: bool,
}

impl Options {
    pub(crate) fn parse(args: &[&str]) -> anyhow::Result<Self> {
        let mut options = Self {
            budget: Duration::from_secs(600),
            out: PathBuf::from("results/h200"),
            binary: None,
            python: "python3".to_owned(),
            only: Vec::new(),
            list: false,
        };
        let mut args = args.iter();
        while let Some(&flag) = args.next() {
            let mut value = || args.next().copied().with_context(|| format!("{flag} needs a value\n{USAGE}"));
            match flag {
                "--budget" => options.budget = duration(value()?)?,
                "--out" => options.out = value()?.into(),
                "--binary" => options.binary = Some(value()?.into()),
                "--python" => options.python = value()?.to_owned(),
                "--only" => options.only = value()?.split(',').map(str::to_owned).collect(),
                "--list" => options.list = true,
                other => bail!("unknown option `{other}`\n{USAGE}"),
            }
        }
        Ok(options)
    }
}

/// `90s`, `10m`, `1h`.
fn duration(text: &str) -> anyhow::Result<Duration> {
    let refuse = || format!("`{text}` is not a time such as 90s, 10m or 1h");
    let (number, unit) = text.split_at(text.len().saturating_sub(1));
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => bail!(refuse()),
    };
    let number: u64 =
        number.parse().ok().filter(|number| (1..=10_000).contains(number)).with_context(refuse)?;
    Ok(Duration::from_secs(number * seconds))
}

/// How the command ends: 0 everything is fresh and passed, 1 a gate failed, 2 something is stale or missing.
pub(crate) fn gpu(args: &[&str]) -> anyhow::Result<u8> {
    let options = Options::parse(args)?;
    let steps = plan::steps();
    let lines = walk(&options, &steps)?;
    print!("{}", page(&lines));
    Ok(exit_code(&lines))
}

/// Runs what is not fresh, in the order of its worth, until the budget is spent.
fn walk(options: &Options, steps: &[Step]) -> anyhow::Result<Vec<Line>> {
    let known: Vec<&str> = steps.iter().map(|step| step.name.as_str()).collect();
    if let Some(unknown) = options.only.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("no step `{unknown}`; there are {}", known.join(", "));
    }
    let start = Instant::now();
    let binary = match &options.binary {
        Some(path) => path.canonicalize().with_context(|| format!("no program at {}", path.display()))?,
        // Started by hand, with what was built elsewhere.
        None if std::env::var_os("CARGO").is_none() => beside_this_program()?,
        None => build()?,
    };
    let revision = revision(&binary)?;
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot make {}", options.out.display()))?;
    let mut lines = Vec::new();
    for step in steps {
        let path = options.out.join(format!("{}.json", step.name));
        let mut line = table::look(step, &path, &revision);
        let asked_for = options.only.is_empty() || options.only.contains(&step.name);
        let left = options.budget.saturating_sub(start.elapsed());
        if line.state != State::Fresh && asked_for && !options.list {
            if left < step.about {
                line.note = "the budget is spent".to_owned();
            } else {
                eprintln!("== {}: about {} s of {} s", step.name, step.about.as_secs(), left.as_secs());
                let place = run::Place { binary: &binary, python: &options.python, out: &options.out };
                match run::run(step, &place, &revision, left.min(step.limit))? {
                    Ended::Written => line = table::look(step, &path, &revision),
                    Ended::Not(why) => line.note = why,
                }
            }
        }
        lines.push(line);
    }
    Ok(lines)
}

/// The program that was carried along with this one.
fn beside_this_program() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("evosdpa");
    path.canonicalize()
        .with_context(|| format!("no program at {}: build it, or name one with --binary", path.display()))
}

/// Builds what the steps run.
fn build() -> anyhow::Result<PathBuf> {
    crate::step("build", &["build", "--release", "--package", "evosdpa-cli"], &[])?;
    for (package, example) in plan::EXAMPLES {
        crate::step("build", &["build", "--release", "--package", package, "--example", example], &[])?;
    }
    Path::new("target/release/evosdpa").canonicalize().context("target/release/evosdpa was not built")
}

/// What the program was built from, as it says itself. A build of changed sources is not the revision it came from, so it is
/// known by its time as well.
fn revision(binary: &Path) -> anyhow::Result<String> {
    let output = Command::new(binary)
        .args(["kernels", "--device", "cpu", "--json"])
        .output()
        .with_context(|| format!("cannot run {}", binary.display()))?;
    let document: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("`{} kernels --json` printed no document", binary.display()))?;
    let environment = &document["environment"];
    let revision = environment["revision"].as_str().context("the program does not say its revision")?;
    if environment["dirty"] == "false" {
        return Ok(revision.to_owned());
    }
    let modified = std::fs::metadata(binary).and_then(|metadata| metadata.modified());
    let seconds = modified.ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    Ok(format!("{revision}+{}", seconds.map_or(0, |time| time.as_secs())))
}
