//! Programs of others: run with a limit, in a folder that is cleared away.

mod family;

pub use family::adopt_orphans;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufRead, Read},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use evosdpa_core::file;

use crate::{Error, error::IoContext};

/// A program of somebody else's with a process group of its own. When this is dropped it is ended with whatever it started, also what
/// left the group or the session ([`family`]).
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) child: Child,
}

/// The groups that are there now, for [`end_all`]: their leaders, and the marks of what they start.
static LIVE: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

impl Group {
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        use std::os::unix::process::CommandExt;
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}-{count}", std::process::id());
        // Registered while the lock is held: who is about to end everything does not miss the newest.
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let child = command.env(MARK, &mark).process_group(0).spawn()?;
        live.insert(child.id(), mark);
        Ok(Self { child })
    }

    /// Asks it to end, and gives it some time before it is ended: what starts work elsewhere ends that first.
    pub(crate) fn end_within(mut self, limit: Duration) {
        if !self.ends_within(limit / 2) {
            signal_group(self.child.id(), "-TERM");
            self.ends_within(limit / 2);
        }
    }

    fn ends_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
                ended => return !matches!(ended, Ok(None)),
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let leader = self.child.id();
        let (mark, others) = {
            let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
            (live.get(&leader).cloned().unwrap_or_default(), live.len() > 1)
        };
        // Before the child is waited for: until then its number is nobody else's. Orphans may be those of another.
        end_group(leader, &mark, !others);
        let _ = self.child.wait();
        LIVE.lock().unwrap_or_else(PoisonError::into_inner).remove(&leader);
    }
}

/// The variable that tells what a group has started from everybody else's.
const MARK: &str = "EVOSDPA_STARTED_BY";

/// What forks while it is being ended is met in the next pass.
const PASSES_MAX: usize = 5;

fn end_group(leader: u32, mark: &str, with_orphans: bool) {
    let mark = format!("{MARK}={mark}");
    for _ in 0..PASSES_MAX {
        let strays = family::strays(leader, &mark, with_orphans);
        signal_group(leader, "-KILL");
        if strays.is_empty() {
            break;
        }
        let pids = strays.iter().map(ToString::to_string);
        let _ = Command::new("kill").arg("-KILL").args(pids).stderr(Stdio::null()).status();
    }
}

fn signal_group(leader: u32, signal: &str) {
    // A group whose processes have all ended is no longer there, which is just as well.
    let _ = Command::new("kill").args([signal, "--", &format!("-{leader}")]).stderr(Stdio::null()).status();
}

/// Ends every program of somebody else's that is running: for a process that is about to exit without cleaning up.
pub fn end_all() {
    let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.iter().for_each(|(leader, mark)| end_group(*leader, mark, true));
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

/// Bytes at most of a line that another program writes: one without an end would fill the memory.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// The next line that another program has written, with its end; `None` where there is no more.
pub(crate) fn next_line(output: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    output.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
    if line.len() as u64 >= LINE_BYTES_MAX && !line.ends_with(b"\n") {
        let why = format!("it wrote a line that is longer than {} MiB", LINE_BYTES_MAX >> 20);
        return Err(io::Error::other(why));
    }
    Ok((!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned()))
}

/// A file as text. An absent file is empty: a tool that did not get as far as opening it has said nothing.
pub(crate) fn text_of(path: &Path) -> String {
    file::read(path, file::TEXT_BYTES_MAX)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default()
}
