//! Running a program under compute-sanitizer, or on its own where it must not take this process with it.

use std::{
    ffi::OsString,
    fs::File,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use serde_json::Value;

use super::{Log, Ran, Tool};
use crate::{
    Error,
    error::IoContext,
    gate::GateResult,
    process::{Scratch, run_within, text_of},
};

/// A program to check: `evosdpa check … --json` on one kernel and one problem.
#[derive(Clone, Debug)]
pub struct Checked<'a> {
    /// compute-sanitizer.
    pub sanitizer: &'a Path,
    /// The program.
    pub program: &'a Path,
    /// Its arguments.
    pub arguments: &'a [OsString],
    /// How long it may take under a tool.
    pub limit: Duration,
}

impl Checked<'_> {
    /// Runs the program under a tool. An error is about files and processes of this machine.
    pub fn under(&self, tool: Tool) -> Result<GateResult, Error> {
        let folder = Scratch::create("sanitize")?;
        let log_path = folder.file("sanitizer.log");
        let mut command = Command::new(self.sanitizer);
        command
            .args(["--tool", tool.name(), "--log-file"])
            .arg(&log_path)
            // Compile workers and other helpers of the program never touch a GPU.
            .args(["--target-processes", "application-only"])
            // A wrong answer ends the program with 1, which is not a finding of the tool.
            .args(["--check-exit-code", "no", "--error-exitcode", "1"])
            .arg(self.program)
            .args(self.arguments);
        let Some(ran) = self.finish(&folder, command, self.sanitizer)? else {
            return Ok(GateResult::fail(tool.name(), self.too_long()));
        };
        Ok(Log::read(&text_of(&log_path)).verdict(tool, &ran))
    }

    /// Runs the program on its own: its word alone is the verdict, and whatever the kernel does to its GPU, this process
    /// and its own GPU are not touched.
    pub fn alone(&self, gate: &str) -> Result<GateResult, Error> {
        let mut command = Command::new(self.program);
        command.args(self.arguments);
        Ok(match self.finish(&Scratch::create("sanitize")?, command, self.program)? {
            None => GateResult::fail(gate, self.too_long()),
            Some(Ran::Yes) => GateResult::pass(gate, "right, and the same twice"),
            Some(Ran::Wrong(why)) => GateResult::fail(gate, why),
            Some(Ran::No(why)) => GateResult::unavailable(gate, why),
        })
    }

    fn too_long(&self) -> String {
        format!("did not finish within {} s and was ended", self.limit.as_secs_f64())
    }

    /// The program's word; `None` when the limit was reached.
    fn finish(&self, folder: &Scratch, mut command: Command, started: &Path) -> Result<Option<Ran>, Error> {
        let (said, complained) = (folder.file("stdout"), folder.file("stderr"));
        let create = |path: &Path| File::create(path).doing("write", path, "is the temporary folder full?");
        command.stdin(Stdio::null()).stdout(create(&said)?).stderr(create(&complained)?);
        let hint = "name another with --sanitizer";
        let status = run_within(command, self.limit).doing("run", started, hint)?;
        Ok(status.map(|status| ran(&text_of(&said), &text_of(&complained), status)))
    }
}

/// What `evosdpa check --json` says of the one kernel it was asked about.
fn ran(said: &str, complained: &str, status: ExitStatus) -> Ran {
    let document: Option<Value> = serde_json::from_str(said).ok();
    let Some(rows) = document.as_ref().and_then(|document| document["rows"].as_array()) else {
        let last = complained.trim().lines().last().unwrap_or("it said nothing");
        return Ran::No(format!("the checked program ended with {status}: {last}"));
    };
    let gates = rows.iter().flat_map(|row| row["gates"].as_array().into_iter().flatten());
    let of = |word: &str| {
        let mut gates = gates.clone().filter(|gate| gate["verdict"] == word);
        gates.next().map(|gate| gate["detail"].as_str().unwrap_or_default().to_owned())
    };
    match (of("FAIL"), of("PASS"), of("UNAVAILABLE")) {
        (Some(why), ..) => Ran::Wrong(why),
        (None, Some(_), _) => Ran::Yes,
        (None, None, Some(why)) => Ran::No(why),
        (None, None, None) => Ran::No("the checked program launched nothing".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, time::Instant};

    use super::*;
    use crate::gate::Verdict;

    /// A stand-in for compute-sanitizer: writes `log` to the file after `--log-file`, then runs the program.
    fn stand_in(folder: &Path, log: &str, then: &str) -> PathBuf {
        let path = folder.join("compute-sanitizer");
        let script = format!("#!/bin/sh\ncat > \"$4\" <<'END'\n{log}END\n{then}\n");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn under(log: &str, then: &str, limit: Duration) -> GateResult {
        let folder = tempfile::tempdir().unwrap();
        let sanitizer = stand_in(folder.path(), log, then);
        let arguments = ["check".into()];
        let checked =
            Checked { sanitizer: &sanitizer, program: Path::new("evosdpa"), arguments: &arguments, limit };
        checked.under(Tool::Memcheck).unwrap()
    }

    const CLEAN: &str = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n";
    const SECOND: Duration = Duration::from_secs(20);

    fn answer(verdict: &str) -> String {
        format!(r#"echo '{{"rows": [{{"gates": [{{"verdict": "{verdict}", "detail": "why"}}]}}]}}'"#)
    }

    #[test]
    fn log_and_answer_together_decide() {
        assert!(under(CLEAN, &answer("PASS"), SECOND).verdict.is_pass());
        assert!(under(CLEAN, &answer("FAIL"), SECOND).detail.contains("its answer is wrong: why"));
        let verdict = under(CLEAN, &answer("UNAVAILABLE"), SECOND).verdict;
        assert_eq!(verdict, Verdict::Unavailable("the kernel did not run: why".to_owned()));
        let dirty = CLEAN.replace("0 errors", "1 error");
        assert!(under(&dirty, &answer("PASS"), SECOND).verdict.is_fail());
        let nothing = under(CLEAN, r#"echo '{"rows": []}'"#, SECOND);
        assert!(!nothing.verdict.is_pass() && nothing.detail.contains("launched nothing"), "{nothing:?}");
        let dead = under("", "echo 'no CUDA driver' >&2; exit 2", SECOND);
        assert!(dead.detail.contains("no CUDA driver") && !dead.verdict.is_fail(), "{dead:?}");
    }

    #[test]
    fn a_program_alone_is_judged_by_its_own_word() {
        let alone = |then: &str, limit| {
            let folder = tempfile::tempdir().unwrap();
            let program = stand_in(folder.path(), "", then);
            let arguments: Vec<OsString> =
                ["--tool", "none", "--log-file", "/dev/null"].map(OsString::from).to_vec();
            let checked =
                Checked { sanitizer: Path::new("/none"), program: &program, arguments: &arguments, limit };
            checked.alone("correctness").unwrap().verdict
        };
        assert!(alone(&answer("PASS"), SECOND).is_pass());
        assert_eq!(alone(&answer("FAIL"), SECOND), Verdict::Fail("why".to_owned()));
        let crashed = alone("echo 'no CUDA driver' >&2; exit 2", SECOND);
        assert!(matches!(&crashed, Verdict::Unavailable(why) if why.contains("no CUDA driver")), "{crashed}");
        assert!(alone("sleep 60", Duration::from_millis(300)).is_fail());
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let start = Instant::now();
        let result = under(CLEAN, "sleep 60", Duration::from_millis(300));
        assert!(result.verdict.is_fail() && result.detail.contains("0.3 s"), "{result:?}");
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_sanitizer_that_is_not_there_is_an_error() {
        let checked = Checked {
            sanitizer: Path::new("/nowhere/compute-sanitizer"),
            program: Path::new("evosdpa"),
            arguments: &[],
            limit: SECOND,
        };
        let message = checked.under(Tool::Memcheck).unwrap_err().to_string();
        assert!(
            message.contains("/nowhere/compute-sanitizer") && message.contains("--sanitizer"),
            "{message}"
        );
    }
}
