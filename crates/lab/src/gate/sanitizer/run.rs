//! Running a program under compute-sanitizer.

use std::{
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
    pub arguments: &'a [String],
    /// How long it may take under a tool.
    pub limit: Duration,
}

impl Checked<'_> {
    /// Runs the program under a tool. An error is about files and processes of this machine.
    pub fn under(&self, tool: Tool) -> Result<GateResult, Error> {
        let folder = Scratch::create("sanitize")?;
        let log_path = folder.file("sanitizer.log");
        let (said, complained) = (folder.file("stdout"), folder.file("stderr"));
        let create = |path: &Path| File::create(path).doing("write", path, "is the temporary folder full?");
        let mut command = Command::new(self.sanitizer);
        command
            .args(["--tool", tool.name(), "--log-file"])
            .arg(&log_path)
            // Compile workers and other helpers of the program never touch a GPU.
            .args(["--target-processes", "application-only"])
            // A wrong answer ends the program with 1, which is not a finding of the tool.
            .args(["--check-exit-code", "no", "--error-exitcode", "1"])
            .arg(self.program)
            .args(self.arguments)
            .stdin(Stdio::null())
            .stdout(create(&said)?)
            .stderr(create(&complained)?);
        let hint = "name another with --sanitizer";
        let Some(status) = run_within(command, self.limit).doing("run", self.sanitizer, hint)? else {
            let limit = self.limit.as_secs_f64();
            return Ok(GateResult::fail(
                tool.name(),
                format!("did not finish within {limit} s and was ended"),
            ));
        };
        let ran = ran(&text_of(&said), &text_of(&complained), status);
        Ok(Log::read(&text_of(&log_path)).verdict(tool, &ran))
    }
}

/// What `evosdpa check --json` says of the one kernel it was asked about.
fn ran(said: &str, complained: &str, status: ExitStatus) -> Ran {
    let document: Option<Value> = serde_json::from_str(said).ok();
    let Some(rows) = document.as_ref().and_then(|document| document["rows"].as_array()) else {
        let last = complained.trim().lines().last().unwrap_or("it said nothing");
        return Ran::No(format!("the checked program ended with {status}: {last}"));
    };
    if rows.is_empty() {
        // With `--once` nobody looks at the answer, and a launch that fails is an error.
        return if status.success() {
            Ran::Yes
        } else {
            Ran::No(format!("the checked program ended with {status}"))
        };
    }
    let gates = rows.iter().flat_map(|row| row["gates"].as_array().into_iter().flatten());
    let of = |word: &str| {
        let mut gates = gates.clone().filter(|gate| gate["verdict"] == word);
        gates.next().map(|gate| gate["detail"].as_str().unwrap_or_default().to_owned())
    };
    match (of("FAIL"), of("PASS"), of("UNAVAILABLE")) {
        (Some(why), ..) => Ran::Wrong(why),
        (None, Some(_), _) => Ran::Yes,
        (None, None, Some(why)) => Ran::No(why),
        (None, None, None) => Ran::No("the checked program names no verdict".to_owned()),
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
        let arguments = ["check".to_owned()];
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
        let once = r#"echo '{"rows": []}'"#;
        assert!(under(CLEAN, once, SECOND).verdict.is_pass());
        assert!(!under(CLEAN, &format!("{once}; exit 2"), SECOND).verdict.is_pass());
        let dead = under("", "echo 'no CUDA driver' >&2; exit 2", SECOND);
        assert!(dead.detail.contains("no CUDA driver") && !dead.verdict.is_fail(), "{dead:?}");
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
