//! What docs/promises.md says, measured again: bad input, stopping, kills, and the rates of wrong words.

mod inputs;
mod kills;
mod rates;
mod stops;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde_json::{Value, json};

pub(crate) const USAGE: &str = "usage: cargo xtask trial [PART…] [OPTIONS]

  inputs   bad command lines and files: each is refused with a message, none panics, nothing is left behind
  stops    seconds from Ctrl-C to the end of commands that are in the middle of something
  kills    tunes killed at random moments and resumed: no evaluation lost, none twice
  duels    kernels against themselves: how often a difference is seen that is not there
  runs     sets of runs of one program compared with each other: the same

Without parts, all of them.

  --binary PATH   the evosdpa program [default: built here, in release mode]
  --count N       kills, duels of each kernel, and runs [default: 40, 100 and 40]
  --out FILE      where the document goes [default: standard output]
";

const PARTS: [&str; 5] = ["inputs", "stops", "kills", "duels", "runs"];

/// How the program is started.
pub(crate) struct Trial {
    binary: PathBuf,
    count: Option<usize>,
}

/// What a command came to.
pub(crate) struct Ended {
    /// Its status, where no signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Trial {
    /// The command, with nothing to read and none of the user's own settings.
    pub(crate) fn command(&self, folder: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::null())
            .env("NO_COLOR", "1")
            .env("EVOSDPA_TUNED", "");
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, folder: &Path, arguments: &[&str]) -> anyhow::Result<Ended> {
        ended(&mut self.command(folder, arguments))
    }
}

/// Runs a command to its end.
pub(crate) fn ended(command: &mut Command) -> anyhow::Result<Ended> {
    let start = Instant::now();
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Ended {
        code: output.status.code(),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
        took: start.elapsed(),
    })
}

/// Runs the parts that are asked for; whether every promise was kept.
pub(crate) fn trial(options: &[&str]) -> anyhow::Result<bool> {
    let (mut parts, mut binary, mut count, mut out) = (Vec::new(), None, None, None);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let mut value = || options.next().with_context(|| format!("{option} needs a value\n{USAGE}"));
        match *option {
            "--binary" => binary = Some(PathBuf::from(value()?)),
            "--count" => count = Some(value()?.parse().context("--count")?),
            "--out" => out = Some(PathBuf::from(value()?)),
            part if PARTS.contains(&part) => parts.push(part),
            other => bail!("unknown `{other}`\n{USAGE}"),
        }
    }
    if parts.is_empty() {
        parts = PARTS.to_vec();
    }
    let binary = match binary {
        Some(binary) => binary.canonicalize().with_context(|| binary.display().to_string())?,
        None => built()?,
    };
    let trial = Trial { binary, count };
    let (mut rows, mut kept) = (Vec::new(), true);
    for part in parts {
        eprintln!("== {part}");
        let (row, fine) = match part {
            "inputs" => inputs::run(&trial)?,
            "stops" => stops::run(&trial)?,
            "kills" => kills::run(&trial)?,
            "duels" => rates::duels(&trial)?,
            _ => rates::runs(&trial)?,
        };
        kept &= fine;
        rows.push(json!({"part": part, "kept": fine, "load": load(), "figures": row}));
    }
    let text = format!("{:#}\n", json!({"schema": "evosdpa.trial/1", "machine": machine(), "rows": rows}));
    match out {
        Some(path) => std::fs::write(&path, text).with_context(|| path.display().to_string())?,
        None => print!("{text}"),
    }
    Ok(kept)
}

/// How busy the machine was in the last minute: figures mean little without.
fn load() -> Option<String> {
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    load.split(' ').next().map(str::to_owned)
}

/// The processor.
fn machine() -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim());
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    json!({"cpu": cpu, "cores": cores})
}

fn built() -> anyhow::Result<PathBuf> {
    crate::step("build", &["build", "--release", "--quiet", "--package", "evosdpa-cli"], &[])?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    target.join("release/evosdpa").canonicalize().context("target/release/evosdpa")
}
