//! The workspace's tests: built by one command, then two test programs at a time.
//!
//! `cargo test` runs one program after the other, and the last tests of each leave processors idle.

use std::{
    collections::VecDeque,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

/// Programs at once. Each has a thread per processor already: this is for their ends, and for tests that wait.
const AT_ONCE: usize = 2;

/// Programs that take minutes, the longest first: they begin, and the short ones fill what they leave idle at their ends.
const LONGEST: [&str; 9] = [
    "evosdpa/tests/limits.rs",
    "lab/tests/kinds.rs",
    "lab/tests/simulated.rs",
    "lab/tests/decode.rs",
    "cli/tests/cuda_kernels.rs",
    "lab/src/lib.rs",
    "cli/tests/command_line/main.rs",
    "lab/tests/hopper.rs",
    "cli/tests/cluster/main.rs",
];

/// What one build of all tests made.
pub(crate) struct Built {
    /// The program `evosdpa`, with the features that tests have.
    pub(crate) evosdpa: PathBuf,
    tests: Vec<Program>,
}

/// A test program.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    /// Its package and source, for people.
    name: String,
    executable: PathBuf,
    /// Where cargo runs it.
    folder: PathBuf,
}

/// Builds every test and the programs that tests start.
pub(crate) fn build() -> anyhow::Result<Built> {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let args = ["test", "--workspace", "--no-run", "--quiet", "--message-format", "json-render-diagnostics"];
    eprintln!("== tests, built: cargo {}", args.join(" "));
    let start = Instant::now();
    let output =
        Command::new(cargo).args(args).stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "the tests do not compile");
    let built = read(&String::from_utf8(output.stdout).context("what cargo says")?)?;
    eprintln!("== tests, built: passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(built)
}

/// Reads what cargo says it has made.
fn read(messages: &str) -> anyhow::Result<Built> {
    let (mut tests, mut evosdpa) = (Vec::new(), None);
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).with_context(|| format!("cargo says `{line}`"))?;
        let Some(executable) = message["executable"].as_str().map(PathBuf::from) else { continue };
        let text = |value: &Value| value.as_str().map(str::to_owned).context("cargo's messages have changed");
        let (target, manifest) = (&message["target"], text(&message["manifest_path"])?);
        let folder = Path::new(&manifest).parent().unwrap_or(Path::new(".")).to_owned();
        if message["profile"]["test"] == true {
            let source = text(&target["src_path"])?;
            let package = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let source =
                Path::new(&source).strip_prefix(&folder).unwrap_or(Path::new(&source)).display().to_string();
            tests.push(Program { name: format!("{package}/{source}"), executable, folder });
        } else if target["name"] == "evosdpa" && target["kind"][0] == "bin" {
            evosdpa = Some(executable);
        }
    }
    ensure!(!tests.is_empty(), "cargo built no tests");
    Ok(Built { evosdpa: evosdpa.context("cargo built no program evosdpa")?, tests })
}

/// Runs them all, and the examples in the documentation; what fails is shown whole, at the end too.
pub(crate) fn run(built: Built) -> anyhow::Result<()> {
    let start = Instant::now();
    let count = built.tests.len();
    eprintln!("== tests: {count} programs, {AT_ONCE} at a time");
    let waiting = Mutex::new(VecDeque::from(in_order(built.tests)));
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                // A panic elsewhere in xtask is a panic here.
                while let Some(program) = { waiting.lock().unwrap().pop_front() } {
                    if let Err(why) = one(&program) {
                        eprintln!("{why:#}");
                        failed.lock().unwrap().push(program.name);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if !failed.is_empty() {
        bail!("tests failed: {}", failed.join(", "));
    }
    eprintln!("== tests: passed in {:.0} s", start.elapsed().as_secs_f64());
    crate::step("tests in documentation", &["test", "--workspace", "--doc", "--quiet"], &[])
}

fn in_order(mut programs: Vec<Program>) -> Vec<Program> {
    let place = |program: &Program| LONGEST.iter().position(|name| *name == program.name);
    programs.sort_by_key(|program| place(program).unwrap_or(LONGEST.len()));
    programs
}

fn one(program: &Program) -> anyhow::Result<()> {
    let start = Instant::now();
    // Both streams into one file, in the order in which they were written.
    let mut said = tempfile::NamedTempFile::new()?;
    let mut command = Command::new(&program.executable);
    command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder).stdin(Stdio::null());
    command.stdout(said.as_file().try_clone()?).stderr(said.as_file_mut().try_clone()?);
    let status = command.status().with_context(|| format!("{} cannot be started", program.name))?;
    let text = String::from_utf8_lossy(&fs::read(said.path())?).into_owned();
    ensure!(status.success(), "{text}\n== {} FAILED ({status})", program.name);
    let passed = text
        .lines()
        .find_map(|line| line.strip_prefix("test result: ok. "))
        .and_then(|rest| rest.split(';').next());
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("   {}: {} in {seconds:.1} s", program.name, passed.unwrap_or("passed"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGES: &str = r#"
{"reason":"compiler-artifact","manifest_path":"/w/crates/cli/Cargo.toml","target":{"kind":["bin"],"name":"evosdpa","src_path":"/w/crates/cli/src/bin/evosdpa.rs"},"profile":{"test":true},"executable":"/t/evosdpa-1"}
{"reason":"compiler-artifact","manifest_path":"/w/crates/cli/Cargo.toml","target":{"kind":["bin"],"name":"evosdpa","src_path":"/w/crates/cli/src/bin/evosdpa.rs"},"profile":{"test":false},"executable":"/t/evosdpa"}
{"reason":"compiler-artifact","manifest_path":"/w/crates/cpu/Cargo.toml","target":{"kind":["lib"],"name":"evosdpa_cpu","src_path":"/w/crates/cpu/src/lib.rs"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/w/crates/cpu/Cargo.toml","target":{"kind":["test"],"name":"suite","src_path":"/w/crates/cpu/tests/suite/main.rs"},"profile":{"test":true},"executable":"/t/suite-2"}
{"reason":"build-finished","success":true}
"#;

    #[test]
    fn cargos_messages_name_the_tests_and_the_program() {
        let built = read(MESSAGES).unwrap();
        assert_eq!(built.evosdpa, Path::new("/t/evosdpa"));
        let names: Vec<&str> = built.tests.iter().map(|program| program.name.as_str()).collect();
        assert_eq!(names, ["cli/src/bin/evosdpa.rs", "cpu/tests/suite/main.rs"]);
        assert_eq!(built.tests[1].folder, Path::new("/w/crates/cpu"));
        assert!(read("{\"reason\":\"build-finished\"}").is_err());
    }

    fn program(name: &str, executable: &str) -> Program {
        Program { name: name.to_owned(), executable: executable.into(), folder: ".".into() }
    }

    #[test]
    fn the_longest_begin_and_the_others_keep_their_order() {
        let names = ["cpu/src/lib.rs", LONGEST[3], "agent/src/main.rs", LONGEST[0]];
        let programs = in_order(names.iter().map(|name| program(name, "true")).collect());
        let ordered: Vec<&str> = programs.iter().map(|program| program.name.as_str()).collect();
        assert_eq!(ordered, [LONGEST[0], LONGEST[3], "cpu/src/lib.rs", "agent/src/main.rs"]);
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
        for name in LONGEST {
            assert!(crates.join(name).is_file(), "{name} is no test any more");
        }
    }

    #[test]
    fn a_program_that_fails_is_shown_whole() {
        let program = |executable: &str| program("some/test.rs", executable);
        assert!(one(&program("true")).is_ok());
        let why = one(&program("false")).unwrap_err().to_string();
        assert!(why.contains("some/test.rs FAILED"), "{why}");
        assert!(one(&program("/no/such/program")).is_err());
    }
}
