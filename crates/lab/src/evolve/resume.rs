//! Beginning a tune, or going on with one.

use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
    time::Duration,
};

use evosdpa_core::file;

use super::log::{self, Contents, Header, Log};
use crate::{Error, error::IoContext};

/// A tune's folder, held by this process alone. The system lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub struct Held {
    _lock: File,
    folder: PathBuf,
    /// The uppermost folder that was not there before.
    made: Option<PathBuf>,
}

impl Drop for Held {
    /// A tune that was refused leaves nothing behind.
    fn drop(&mut self) {
        let Some(made) = &self.made else { return };
        if log::has_begun(&self.folder.join(log::FILE)).unwrap_or(true) {
            return;
        }
        let _ = std::fs::remove_file(self.folder.join(log::FILE));
        let _ = std::fs::remove_file(self.folder.join(LOCK));
        // Folders with something in them stay.
        for folder in self.folder.ancestors().take_while(|folder| folder.starts_with(made)) {
            if std::fs::remove_dir(folder).is_err() {
                break;
            }
        }
    }
}

const LOCK: &str = "lock";
/// How often a folder that is held is asked for again, and the pause before each time.
const LOCK_TRIES: u32 = 40;
const LOCK_PAUSE: Duration = Duration::from_millis(25);

/// Makes the folder if it is not there, and takes hold of it.
pub fn hold(folder: &Path) -> Result<Held, Error> {
    let hint = "choose another folder with --out";
    let absent = folder.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists());
    let made = absent.last().map(Path::to_owned);
    std::fs::create_dir_all(folder).doing("create", folder, hint)?;
    let path = folder.join(LOCK);
    let lock = File::create(&path).doing("create", &path, hint)?;
    let mut held = lock.try_lock();
    // A process that is just being started holds the files of the one that starts it for a moment.
    for _ in 0..LOCK_TRIES {
        if !matches!(held, Err(TryLockError::WouldBlock)) {
            break;
        }
        std::thread::sleep(LOCK_PAUSE);
        held = lock.try_lock();
    }
    match held {
        Ok(()) => {
            file::sweep(folder);
            Ok(Held { _lock: lock, folder: folder.to_owned(), made })
        }
        Err(TryLockError::WouldBlock) => Err(Error::Tune(format!(
            "another tune is at work in {}: wait for it, or choose another folder with --out",
            folder.display()
        ))),
        Err(TryLockError::Error(source)) => Err(Error::Io { doing: "lock", path, hint, source }),
    }
}

/// The log to write to, and what it already holds. A log that was cut off in its first line holds nothing: whoever began it was
/// killed, or met a full disk, before there was anything to keep.
pub fn begin(folder: &Path, header: &Header, resume: bool) -> Result<(Log, Contents), Error> {
    let path = folder.join(log::FILE);
    if !log::has_begun(&path)? {
        let was_begun = path.exists();
        if resume && !was_begun {
            return Err(Error::Tune(format!("there is no tune to resume in {}", folder.display())));
        }
        if was_begun {
            let hint = "remove it, or choose another folder with --out";
            std::fs::remove_file(&path).doing("remove", &path, hint)?;
        }
        Log::create(folder, header)?;
        return Log::open(folder);
    }
    if !resume {
        return Err(Error::Tune(format!(
            "{} already holds a tune: --resume goes on with it, --out chooses another folder",
            folder.display()
        )));
    }
    let (log, contents) = Log::open(folder)?;
    if let Some(difference) = difference(&contents.header, header) {
        return Err(Error::Tune(format!(
            "{} holds another tune: {difference}; give the same as before, or choose another folder with --out",
            folder.display()
        )));
    }
    Ok((log, contents))
}

/// What makes two tunes different ones. Strategy and seed may change on the way.
fn difference(was: &Header, is: &Header) -> Option<String> {
    let pairs = [
        ("kernel", was.space.kernel.clone(), is.space.kernel.clone()),
        ("problems", was.problems.join(", "), is.problems.join(", ")),
        ("device", was.device_name.clone(), is.device_name.clone()),
        // Of a CPU its instruction set: what one is fast with says nothing of another.
        ("instruction set or architecture", was.arch.clone(), is.arch.clone()),
    ];
    for (what, was, is) in pairs {
        if was != is {
            return Some(format!("{what}: {was} then, {is} now"));
        }
    }
    (was.space != is.space).then(|| "the kernel's tunables have changed since".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evolve::log::tests::{evaluation, header};

    #[test]
    fn one_tune_at_a_time_and_only_the_same_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let held = hold(&path).unwrap();
        assert!(hold(&path).unwrap_err().to_string().contains("another tune is at work"));
        drop(held);
        let _held = hold(&path).unwrap();

        assert!(begin(&path, &header(), true).unwrap_err().to_string().contains("no tune to resume"));
        let (mut log, contents) = begin(&path, &header(), false).unwrap();
        assert!(contents.evaluations.is_empty());
        log.add(&evaluation(0, 1, 1.0)).unwrap();
        assert!(begin(&path, &header(), false).unwrap_err().to_string().contains("already holds a tune"));
        assert_eq!(begin(&path, &header(), true).unwrap().1.evaluations.len(), 1);
        let other = Header { problems: vec!["long f32".into()], ..header() };
        let message = begin(&path, &other, true).unwrap_err().to_string();
        assert!(message.contains("tiny f32") && message.contains("long f32"), "{message}");
        // Two instruction sets in one log would make a winner of one the other's.
        let other = Header { arch: "portable".into(), ..header() };
        let message = begin(&path, &other, true).unwrap_err().to_string();
        assert!(message.contains("portable now"), "{message}");
    }

    /// Killed, or out of disk, in the middle of the first line: the next start begins, with or without `--resume`.
    #[test]
    fn a_log_cut_in_its_first_line_is_begun_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(log::FILE);
        Log::create(folder.path(), &header()).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for (cut, resume) in
            [(0, false), (0, true), (1, true), (whole.len() - 1, false), (whole.len() - 1, true)]
        {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut log, contents) = begin(folder.path(), &header(), resume).unwrap();
            assert!(contents.evaluations.is_empty());
            log.add(&evaluation(0, 1, 1.0)).unwrap();
            assert_eq!(begin(folder.path(), &header(), true).unwrap().1.evaluations.len(), 1, "cut at {cut}");
        }
    }

    #[test]
    fn what_was_refused_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let (path, entries) =
            (folder.path().join("a/b"), || std::fs::read_dir(folder.path()).unwrap().count());
        let held = hold(&path).unwrap();
        assert!(begin(&path, &header(), true).is_err());
        drop(held);
        assert_eq!(entries(), 0);
        // A folder that was there stays, and so does a tune.
        std::fs::create_dir_all(&path).unwrap();
        drop(hold(&path).unwrap());
        assert!(path.is_dir());
        let held = hold(&folder.path().join("c")).unwrap();
        begin(&folder.path().join("c"), &header(), false).unwrap();
        drop(held);
        assert!(folder.path().join("c").join(log::FILE).is_file());
    }

    #[test]
    fn an_unwritable_place_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(hold(&file.path().join("x")).unwrap_err().to_string().contains("--out"));
    }
}
