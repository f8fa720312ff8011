//! A command of the lab within limits of time, memory, files and network.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    io::Read,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process_group};

use super::Lab;

/// Bytes of one file, output included.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Bytes of a document that are read.
const DOCUMENT_BYTES_MAX: u64 = 64 << 20;
/// Characters of messages that are kept.
const WORDS_CHARS_MAX: usize = 4000;
/// Variables of the environment that an evaluation sees, beside those whose names begin like [`SEEN_PREFIXES`].
const SEEN: [&str; 8] = ["PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "XDG_CACHE_HOME", "LD_LIBRARY_PATH"];
const SEEN_PREFIXES: [&str; 3] = ["CUDA_", "NVIDIA_", "EVOSDPA_"];
/// Endings of those it does not see.
const UNSEEN_ENDINGS: [&str; 3] = ["_KEY", "_TOKEN", "_SECRET"];

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Exited(i32),
    /// By a signal, of its own making or of a limit's.
    Signalled(i32),
    TimedOut(Duration),
    Cancelled,
}

/// What a process left.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) ended: Ended,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: String,
}

impl Output {
    /// Its messages, in short.
    pub(super) fn words(&self) -> String {
        let said = self.stderr.trim().trim_start_matches("error: ");
        match self.ended {
            Ended::Exited(_) if !said.is_empty() => said.to_owned(),
            Ended::Exited(code) => format!("it ended with status {code} and said nothing"),
            Ended::Signalled(signal) => {
                format!("it was ended by signal {signal}: a crash, or a limit of memory or time. {said}")
            }
            Ended::TimedOut(limit) => format!("it took longer than {} s", limit.as_secs_f64()),
            Ended::Cancelled => "it was cancelled".to_owned(),
        }
    }
}

/// Runs a command to its end, or ends it with everything it started.
pub(super) fn run(
    lab: &Lab,
    name: &str,
    command: Vec<OsString>,
    on_gpu: bool,
    folder: &Path,
    cancelled: &AtomicBool,
) -> anyhow::Result<Output> {
    let file = |ending: &str| folder.join(format!("{name}.{ending}"));
    let [output, errors] = ["out", "err"].map(file);
    let create = |path: &Path| File::create(path).with_context(|| path.display().to_string());
    let mut confined = Command::new(&lab.agent);
    confined.arg("confine").arg(format!("--cpu-s={}", 8 * lab.step_limit.as_secs().max(1)));
    confined.arg(format!("--file-bytes={FILE_BYTES_MAX}"));
    // The driver of a GPU maps more than any limit that would mean something.
    if !on_gpu {
        confined.arg(format!("--memory-bytes={}", lab.memory_bytes));
    }
    let cache = cache_folder();
    let writable = [Some(folder.to_owned()), cache, Some(env::temp_dir()), Some("/dev".into())];
    for place in writable.into_iter().flatten() {
        let mut argument = OsString::from("--writable=");
        argument.push(place);
        confined.arg(argument);
    }
    confined.arg("--").args(command);
    confined.env_clear().envs(env::vars_os().filter(|(name, _)| is_seen(&name.to_string_lossy())));
    confined.env("NO_COLOR", "1").current_dir(folder).process_group(0);
    confined.stdin(Stdio::null()).stdout(create(&output)?).stderr(create(&errors)?);
    let mut child = confined.spawn().with_context(|| lab.agent.display().to_string())?;
    let ended = wait(&mut child, lab.step_limit, cancelled)?;
    let mut stdout = Vec::new();
    File::open(&output)?.take(DOCUMENT_BYTES_MAX).read_to_end(&mut stdout)?;
    let mut stderr = Vec::new();
    File::open(&errors)?.take(4 * WORDS_CHARS_MAX as u64).read_to_end(&mut stderr)?;
    let stderr = String::from_utf8_lossy(&stderr).chars().take(WORDS_CHARS_MAX).collect();
    Ok(Output { ended, stdout, stderr })
}

fn wait(child: &mut Child, limit: Duration, cancelled: &AtomicBool) -> anyhow::Result<Ended> {
    let deadline = Instant::now() + limit;
    let ended = loop {
        if let Some(status) = child.try_wait()? {
            break how(status);
        }
        if cancelled.load(Ordering::Relaxed) {
            break Ended::Cancelled;
        }
        if Instant::now() >= deadline {
            break Ended::TimedOut(limit);
        }
        thread::sleep(Duration::from_millis(20));
    };
    // Whatever it started goes with it. A group that is empty is no longer there.
    if let Some(group) = Pid::from_raw(child.id() as i32) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    child.wait()?;
    Ok(ended)
}

fn how(status: ExitStatus) -> Ended {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Exited(code),
        (None, signal) => Ended::Signalled(signal.unwrap_or(0)),
    }
}

fn is_seen(name: &str) -> bool {
    let known = SEEN.contains(&name) || SEEN_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    known && !UNSEEN_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Where the lab keeps compiled kernels; made here, because what does not exist cannot be made writable.
fn cache_folder() -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    let folder = base.join("evosdpa");
    fs::create_dir_all(&folder).ok()?;
    Some(folder)
}
