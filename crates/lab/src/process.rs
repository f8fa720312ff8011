//! Programs of others: run with a limit, in a folder that is cleared away.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{Error, error::IoContext};

/// A program of somebody else's with a process group of its own. When this is dropped the whole group is ended: the program
/// and whatever it started, unless that left the group.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) child: Child,
}

/// The groups that are there now, for [`end_all`].
static LIVE: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

impl Group {
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        use std::os::unix::process::CommandExt;
        // Registered while the lock is held: who is about to end everything does not miss the newest.
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let child = command.process_group(0).spawn()?;
        live.insert(child.id());
        Ok(Self { child })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Before the child is waited for: until then its number is nobody else's.
        end_group(self.child.id());
        let _ = self.child.wait();
        LIVE.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.child.id());
    }
}

fn end_group(leader: u32) {
    // A group whose processes have all ended is no longer there, which is just as well.
    let _ = Command::new("kill").args(["-KILL", "--", &format!("-{leader}")]).stderr(Stdio::null()).status();
}

/// Ends every program of somebody else's that is running: for a process that is about to exit without cleaning up.
pub fn end_all() {
    let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.iter().for_each(|leader| end_group(*leader));
}

/// The exit status, or `None` when the limit was reached and the process and its children were ended.
pub(crate) fn run_within(mut command: Command, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let mut group = Group::spawn(&mut command)?;
    let deadline = Instant::now() + limit;
    loop {
        match group.child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            None => return Ok(None),
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
