//! Files that are there whole or not at all, whatever crashes and whoever else writes.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// What the names of files that are being written begin with.
pub(crate) const STAGING_PREFIX: &str = ".writing-";

/// Whether a file has to survive a loss of power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// It is on the disk when the call returns.
    Synced,
    /// It can be made again: the system writes it when it likes.
    Lazy,
}

/// Writes the parts, one after the other, to a temporary name beside `path` and renames it. On an error nothing is left behind,
/// and what was at `path` is still there.
///
/// A link stays a link: the file that it leads to is replaced. What is no file, such as `/dev/null` or a pipe, cannot be
/// replaced, and must not be: it is written to.
pub fn write_whole(path: &Path, parts: &[&[u8]], durability: Durability) -> io::Result<()> {
    let there = fs::metadata(path).ok();
    if there.as_ref().is_some_and(|there| !there.is_file() && !there.is_dir()) {
        let mut device = File::options().write(true).open(path)?;
        return parts.iter().try_for_each(|part| device.write_all(part));
    }
    let linked = there.and_then(|_| fs::canonicalize(path).ok());
    let path = linked.as_deref().unwrap_or(path);
    let staging = staging(path);
    let write = || {
        let mut file = File::create(&staging)?;
        parts.iter().try_for_each(|part| file.write_all(part))?;
        if durability == Durability::Synced {
            file.sync_all()?;
        }
        drop(file);
        fs::rename(&staging, path)
    };
    write().inspect_err(|_| {
        // Best effort: the error that matters is the one returned.
        let _ = fs::remove_file(&staging);
    })
}

/// A name beside `path` that no other writer has, of this process or another.
fn staging(path: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    // Without the file's own extension: whoever lists a folder must not take it for one of its files.
    path.with_file_name(format!("{STAGING_PREFIX}{}-{count}", std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_is_replaced_whole_or_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.toml");
        write_whole(&path, &[b"one ", b"two"], Durability::Synced).unwrap();
        write_whole(&path, &[b"three"], Durability::Lazy).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        // A folder cannot be replaced by a file: the rename fails, and nothing is left of the attempt.
        let occupied = folder.path().join("occupied");
        fs::create_dir_all(occupied.join("inside")).unwrap();
        assert!(write_whole(&occupied, &[b"four"], Durability::Lazy).is_err());
        let mut left = files(folder.path());
        left.sort();
        assert_eq!(left, ["occupied", "table.toml"]);
    }

    /// Who may write to `/dev` would otherwise put a file in place of `/dev/null`.
    #[cfg(unix)]
    #[test]
    fn links_stay_links_and_devices_devices() {
        use std::os::unix::fs::{FileTypeExt, symlink};

        let folder = tempfile::tempdir().unwrap();
        let (file, link, pipe) =
            (folder.path().join("file"), folder.path().join("link"), folder.path().join("pipe"));
        fs::write(&file, "old").unwrap();
        symlink("file", &link).unwrap();
        write_whole(&link, &[b"new"], Durability::Lazy).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");

        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        write_whole(&pipe, &[b"through ", b"it"], Durability::Synced).unwrap();
        assert_eq!(reader.join().unwrap(), b"through it");
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(files(folder.path()).len(), 3);
    }

    #[test]
    fn writers_at_the_same_time_never_mix() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("entry");
        std::thread::scope(|scope| {
            for letter in [b'a', b'b', b'c', b'd'] {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..50 {
                        let half = vec![letter; 4096];
                        write_whole(path, &[&half, &half], Durability::Lazy).unwrap();
                    }
                });
            }
        });
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() == 8192 && bytes.iter().all(|byte| *byte == bytes[0]), "{}", bytes.len());
        assert_eq!(files(folder.path()), ["entry"]);
    }
}
