//! Running one step.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use serde_json::{Value, json};

use super::plan::{Program, Step};

/// What the steps run with.
pub(super) struct Place<'a> {
    pub(super) binary: &'a Path,
    pub(super) python: &'a str,
    pub(super) out: &'a Path,
}

/// What became of a step.
pub(super) enum Ended {
    /// Its document is there.
    Written,
    /// There is none, for this reason.
    Not(String),
}

/// Time a program has to end once it was asked to.
const GRACE: Duration = Duration::from_secs(10);

/// Runs a step for at most `limit` and writes its document. An error is about the disk.
pub(super) fn run(step: &Step, place: &Place<'_>, revision: &str, limit: Duration) -> anyhow::Result<Ended> {
    let scratch = tempfile::tempdir_in(place.out).context("cannot make a folder beside the documents")?;
    let (said, log) = (scratch.path().join("said"), scratch.path().join("log"));
    let mut command = match command(step, place, &said) {
        Ok(command) => command,
        Err(why) => return Ok(Ended::Not(why)),
    };
    // Where the document is written meanwhile is nobody's business.
    let named = |word: String| if Path::new(&word) == said { "DOCUMENT".to_owned() } else { word };
    let line: Vec<_> = words(&command).into_iter().map(named).collect();
    // A Python program writes its document itself.
    let output =
        if matches!(step.program, Program::Python(_)) { Stdio::null() } else { File::create(&said)?.into() };
    let start = Instant::now();
    let child = command.stdin(Stdio::null()).stdout(output).stderr(File::create(&log)?).spawn();
    let status = match child {
        Ok(child) => within(child, limit)?,
        Err(error) => return Ok(Ended::Not(format!("cannot run {}: {error}", line[0]))),
    };
    let complaint = || {
        let text = fs::read_to_string(&log).unwrap_or_default();
        text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").trim().to_owned()
    };
    let Some(status) = status else {
        return Ok(Ended::Not(format!("ended after {:.0} s", limit.as_secs_f64())));
    };
    let document = fs::read(&said).ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    // 0 passed, 1 a gate failed: both are facts. Anything else is no document, but may say why.
    let (Some(code @ (0 | 1)), Some(Value::Object(fields))) = (status.code(), &document) else {
        let why = document.as_ref().and_then(first_detail).map_or_else(complaint, str::to_owned);
        return Ok(Ended::Not(format!("{status}: {why}")));
    };
    let made = json!({
        "name": step.name,
        "revision": revision,
        "command": line,
        "exit": code,
        "expected": step.expected,
        "seconds": (start.elapsed().as_secs_f64() * 10.0).round() / 10.0,
    });
    let mut document = fields.clone();
    document.insert("step".to_owned(), made);
    // For everyone to read, as far as the system's mask lets them.
    let mode = fs::Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new().permissions(mode).tempfile_in(place.out)?;
    writeln!(file, "{:#}", Value::Object(document))?;
    file.as_file().sync_all()?;
    file.persist(place.out.join(format!("{}.json", step.name)))?;
    Ok(Ended::Written)
}

/// What the first gate of a document says that could not run.
fn first_detail(document: &Value) -> Option<&str> {
    let gates =
        document["rows"].as_array()?.iter().flat_map(|row| row["gates"].as_array().into_iter().flatten());
    gates.into_iter().find(|gate| gate["verdict"] == "UNAVAILABLE")?["detail"].as_str()
}

fn command(step: &Step, place: &Place<'_>, said: &Path) -> Result<Command, String> {
    match &step.program {
        Program::Evosdpa(arguments) => {
            let mut command = Command::new(place.binary);
            command.args(arguments).arg("--json");
            // Records of the runs are not wanted beside the documents.
            let name = arguments.first().map_or("", String::as_str);
            if ["bench", "profile", "import"].contains(&name) {
                command.arg("--out").arg(std::env::temp_dir().join("evosdpa-runs"));
            }
            if ["bench", "import"].contains(&name) {
                command.args(["--python", place.python]);
            }
            Ok(command)
        }
        Program::Example(name) => {
            let path = place.binary.with_file_name("examples").join(name);
            if !path.is_file() {
                return Err(format!("{} is not there: build it, and carry it along", path.display()));
            }
            Ok(Command::new(path))
        }
        Program::Python(file) => {
            if !Path::new(file).is_file() {
                return Err(format!("{file} is not there: run this from the repository"));
            }
            let mut command = Command::new(place.python);
            command.arg(file).arg(said);
            Ok(command)
        }
    }
}

fn words(command: &Command) -> Vec<String> {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let parts = std::iter::once(program).chain(command.get_args());
    parts.map(|part| part.to_string_lossy().into_owned()).collect()
}

/// Waits at most this long, then asks the program to end and, if it does not, ends it. `None`: it ran out of time.
fn within(mut child: Child, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
    if let Some(status) = wait(&mut child, limit)? {
        return Ok(Some(status));
    }
    // As `timeout` does: programs it has started itself are then ended by it.
    let _ = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    if wait(&mut child, GRACE)?.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(None)
}

fn wait(child: &mut Child, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() > limit {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}
