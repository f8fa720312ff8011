//! Driving Nsight Compute: one launch of one kernel, profiled into a report that both CSV forms are exported from.

use std::{
    ffi::OsString,
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use evosdpa_core::file;

use super::metric::Registry;
use crate::{
    Error,
    error::IoContext,
    process::{Scratch, run_within, text_of},
    tool::{self, CudaTool},
};

/// Reading a report back never takes long.
const EXPORT_LIMIT: Duration = Duration::from_secs(60);

/// The profiler.
#[derive(Clone, Debug)]
pub struct Ncu {
    program: PathBuf,
    /// What it says its version is.
    pub version: String,
}

/// Why there is no profile, with what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unprofiled(pub String);

/// What to profile.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// A program that launches the kernel once.
    pub program: &'a Path,
    /// Its arguments.
    pub arguments: &'a [OsString],
    /// The kernel's entry point.
    pub entry: &'a str,
    /// What to collect.
    pub registry: &'a Registry,
    /// How long it may take.
    pub limit: Duration,
}

/// A profile, as files' contents.
#[derive(Clone, Debug)]
pub struct Collected {
    /// A row per launch (`--page raw`).
    pub wide: String,
    /// A row per metric, and the profiler's own rules (`--page details`).
    pub long: String,
    /// What the profiler said.
    pub log: String,
    /// Its own format, for its own window.
    pub report: Vec<u8>,
}

impl Ncu {
    /// The profiler that was named, or the one on `PATH` or in a CUDA toolkit.
    pub fn find(named: Option<&Path>) -> Result<Self, Unprofiled> {
        let program = match named {
            Some(path) => path.to_owned(),
            None => CudaTool::Ncu.find().map_err(Unprofiled)?,
        };
        let version = tool::version(&program).map_err(Unprofiled)?;
        Ok(Self { program, version })
    }

    /// Profiles one launch. An error is about files and processes of this machine.
    pub fn collect(&self, request: &Request<'_>) -> Result<Result<Collected, Unprofiled>, Error> {
        let scratch = Scratch::create("profile")?;
        let (report, log) = (scratch.file("launch.ncu-rep"), scratch.file("ncu.log"));
        let metrics: Vec<&str> = request.registry.asked_for().collect();
        let mut command = self.command();
        command
            .args(["--set", "full", "--metrics", &metrics.join(",")])
            .args(["--kernel-name", request.entry, "--launch-count", "1"])
            // Compile workers of the program never touch a GPU.
            .args(["--target-processes", "application-only", "--replay-mode", "kernel"])
            // Clocks are left as they are: setting them needs rights and outlasts a crash. Caches are cold, so that a
            // second pass does not find what the first has fetched.
            .args(["--clock-control", "none", "--cache-control", "all"])
            .args(["--force-overwrite", "--export"])
            .arg(&report)
            .arg("--log-file")
            .arg(&log)
            .arg(request.program)
            .args(request.arguments);
        let said = match self.run(command, &scratch, request.limit)? {
            Ok(said) => said,
            Err(why) => return Ok(Err(why)),
        };
        let log = text_of(&log);
        if !report.is_file() {
            return Ok(Err(Unprofiled(explain(&format!("{log}\n{said}")))));
        }
        let exported = |page: &str| self.export(&report, page, &scratch);
        let (wide, long) = match (exported("raw")?, exported("details")?) {
            (Ok(wide), Ok(long)) => (wide, long),
            (Err(why), _) | (_, Err(why)) => return Ok(Err(why)),
        };
        let report = file::read(&report, file::RECORD_BYTES_MAX).doing(
            "read",
            &report,
            "is the temporary folder full?",
        )?;
        Ok(Ok(Collected { wide, long, log, report }))
    }

    /// Reads a `.ncu-rep` file: its wide form.
    pub fn import(&self, report: &Path) -> Result<Result<String, Unprofiled>, Error> {
        self.export(report, "raw", &Scratch::create("profile")?)
    }

    fn export(
        &self,
        report: &Path,
        page: &str,
        scratch: &Scratch,
    ) -> Result<Result<String, Unprofiled>, Error> {
        let mut command = self.command();
        command.arg("--import").arg(report).args(["--csv", "--page", page]);
        // No rounding to a unit that reads well, and identifiers rather than labels: the raw page has no others.
        command.args(["--print-units", "base"]);
        if page == "details" {
            command.args(["--print-metric-name", "name"]);
        }
        let printed = self.run(command, scratch, EXPORT_LIMIT)?;
        Ok(printed.and_then(
            |text| {
                if text.contains("\"ID\"") { Ok(text) } else { Err(Unprofiled(explain(&text))) }
            },
        ))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        // Numbers with a decimal point, whatever the user's language.
        command.env("LC_ALL", "C").stdin(Stdio::null());
        command
    }

    /// What a run of the profiler printed.
    fn run(
        &self,
        mut command: Command,
        scratch: &Scratch,
        limit: Duration,
    ) -> Result<Result<String, Unprofiled>, Error> {
        let (said, complained) = (scratch.file("stdout"), scratch.file("stderr"));
        let create = |path: &Path| File::create(path).doing("write", path, "is the temporary folder full?");
        command.stdout(create(&said)?).stderr(create(&complained)?);
        let ended = run_within(command, limit).doing("run", &self.program, "name another with --ncu")?;
        if ended.is_none() {
            let limit = limit.as_secs_f64();
            return Ok(Err(Unprofiled(format!("ncu did not finish within {limit} s and was ended"))));
        }
        Ok(Ok(text_of(&said) + &text_of(&complained)))
    }
}

/// Why the profiler gave nothing, from what it said.
fn explain(said: &str) -> String {
    let complaints: Vec<&str> = said
        .lines()
        .filter(|line| {
            line.contains("==ERROR==") || line.contains("==WARNING==") || line.starts_with("error:")
        })
        .map(str::trim)
        .collect();
    if said.contains("ERR_NVGPUCTRPERM") {
        return "ncu may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run as root, or load the driver with \
                NVreg_RestrictProfilingToAdminUsers=0"
            .to_owned();
    }
    if complaints.is_empty() {
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
        return format!("ncu wrote no report; it said: {}", last.trim());
    }
    format!("ncu wrote no report: {}", complaints.join(" "))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use evosdpa_kernels::Arch;

    use super::*;

    /// A stand-in for ncu: a script that answers `--version`, and else does what it is told.
    fn stand_in(folder: &Path, profile: &str, import: &str) -> Ncu {
        let path = folder.join("ncu");
        let script = format!(
            "#!/bin/sh\ncase \"$1\" in\n--version) echo 'Version 2025.3.1.0 (build 1)';;\n--import) {import};;\n*) {profile};;\nesac\n"
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Ncu::find(Some(&path)).unwrap()
    }

    fn collect(ncu: &Ncu, limit: Duration) -> Result<Collected, Unprofiled> {
        let registry = Registry::of(Arch::Sm90a);
        let (program, arguments) = (Path::new("evosdpa"), ["profile".into()]);
        let request =
            Request { program, arguments: &arguments, entry: "sdpa_v2b", registry: &registry, limit };
        ncu.collect(&request).unwrap()
    }

    const LIMIT: Duration = Duration::from_secs(20);
    /// Writes a report to the path after `--export`.
    const WRITES_REPORT: &str =
        "while [ \"$1\" != --export ]; do shift; done; echo report > \"$2\"; echo fine > \"$4\"";
    const PRINTS_TABLE: &str = "printf '\"ID\",\"Kernel Name\"\\n\"0\",\"%s\"\\n' \"$5\"";

    #[test]
    fn a_report_is_exported_in_both_forms() {
        let folder = tempfile::tempdir().unwrap();
        let ncu = stand_in(folder.path(), WRITES_REPORT, PRINTS_TABLE);
        assert!(ncu.version.contains("2025.3.1"));
        let collected = collect(&ncu, LIMIT).unwrap();
        assert!(
            collected.wide.contains("\"raw\"") && collected.long.contains("\"details\""),
            "{collected:?}"
        );
        assert_eq!((collected.report.as_slice(), collected.log.as_str()), (&b"report\n"[..], "fine\n"));
    }

    #[test]
    fn what_went_wrong_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let why = |profile: &str, limit: Duration| {
            collect(&stand_in(folder.path(), profile, PRINTS_TABLE), limit).unwrap_err().0
        };
        let refused = why("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission' >&2", LIMIT);
        assert!(refused.contains("NVreg_RestrictProfilingToAdminUsers=0"), "{refused}");
        let nothing = why("echo '==WARNING== No kernels were profiled.'; echo 'error: no GPU' >&2", LIMIT);
        assert!(nothing.contains("No kernels were profiled") && nothing.contains("no GPU"), "{nothing}");
        let unknown = why("echo '==ERROR== Failed to find metric foo.sum'; exit 1", LIMIT);
        assert!(unknown.contains("foo.sum"), "{unknown}");
        let silent = why("exit 0", LIMIT);
        assert!(silent.contains("no report"), "{silent}");
        let hung = why("sleep 60", Duration::from_millis(200));
        assert!(hung.contains("0.2 s"), "{hung}");
    }

    #[test]
    fn an_absent_profiler_is_a_reason_not_an_error() {
        let why = Ncu::find(Some(Path::new("/nowhere/ncu"))).unwrap_err().0;
        assert!(why.contains("/nowhere/ncu"), "{why}");
    }
}
