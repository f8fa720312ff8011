//! Programs of others: run with a limit, in a folder that is cleared away.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{Error, error::IoContext};

/// The exit status, or `None` when the limit was reached and the process and its children were ended.
pub(crate) fn run_within(mut command: Command, limit: Duration) -> io::Result<Option<ExitStatus>> {
    use std::os::unix::process::CommandExt;
    let mut child = command.process_group(0).spawn()?;
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            None => {
                // The group, because a tool's child is the one that hangs.
                let group = format!("-{}", child.id());
                let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
                let _ = child.wait();
                return Ok(None);
            }
        }
    }
}

/// A folder for one run's files, removed at the end.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Makes the folder; `purpose` is part of its name.
    pub(crate) fn create(purpose: &str) -> Result<Self, Error> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("evosdpa-{purpose}-{}-{count}", std::process::id()));
        fs::create_dir_all(&folder).doing(
            "make",
            &folder,
            "set TMPDIR to a folder that can be written to",
        )?;
        Ok(Self(folder))
    }

    /// A file in it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Left-overs in a temporary folder harm nobody.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A file as text. An absent file is empty: a tool that did not get as far as opening it has said nothing.
pub(crate) fn text_of(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}
