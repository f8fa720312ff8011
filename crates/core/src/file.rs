//! Files that are there whole or not at all, whatever crashes and whoever else writes; and files of others, which may have no end.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Bytes at most of what people write or name: sources, tables, logs of a compiler.
pub const TEXT_BYTES_MAX: u64 = 256 << 20;

/// Bytes at most of what the lab has recorded: a run of days has some hundred megabytes.
pub const RECORD_BYTES_MAX: u64 = 1 << 30;

/// How long somebody may take to begin to write into a pipe.
const PIPE_PATIENCE: Duration = Duration::from_secs(2);

/// How often one looks.
const PIPE_STEP: Duration = Duration::from_millis(5);

/// Bytes read in one go at most, so that what comes slowly is seen as it comes.
const READ_STEP_BYTES: u64 = 16 << 20;

/// What the names of files that are being written begin with.
pub const STAGING_PREFIX: &str = ".writing-";

/// Whether a file has to survive a loss of power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// It is on the disk when the call returns.
    Synced,
    /// It can be made again: the system writes it when it likes.
    Lazy,
}

/// A whole file. What goes on for ever, as `/dev/zero` does, is an error, and so are folders. Pipes may be read, as
/// `<(…)` and `/dev/stdin` are; one into which nobody writes is not waited for.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut file = open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::Error::new(ErrorKind::IsADirectory, "it is a folder, and a file is needed"));
    }
    let mut bytes = Vec::new();
    if !metadata.is_file() {
        await_first(&mut file, &mut bytes)?;
    }
    while bytes.len() as u64 <= bytes_max {
        let left = (bytes_max + 1 - bytes.len() as u64).min(READ_STEP_BYTES);
        match (&file).take(left).read_to_end(&mut bytes) {
            Ok(count) if (count as u64) < left => return Ok(bytes),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PIPE_STEP),
            Err(error) => return Err(error),
        }
    }
    let why = format!("it is larger than {}, the most that is read", size(bytes_max));
    Err(io::Error::new(ErrorKind::FileTooLarge, why))
}

/// The same, of text.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    String::from_utf8(read(path, bytes_max)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        io::Error::new(ErrorKind::InvalidData, format!("it is no UTF-8 text (from byte {at} on)"))
    })
}

/// Opens without waiting for somebody to write into a pipe.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;

        // `O_NONBLOCK`, which is one of two numbers wherever this runs.
        let is_linux = cfg!(any(target_os = "linux", target_os = "android"));
        options.custom_flags(if is_linux { 0o4000 } else { 4 });
    }
    options.open(path)
}

/// The first byte of what is no file: a pipe is as good as at its end until somebody writes.
fn await_first(file: &mut File, bytes: &mut Vec<u8>) -> io::Result<()> {
    let began = Instant::now();
    let mut first = [0];
    loop {
        match file.read(&mut first) {
            Ok(0) if is_pipe(file) && began.elapsed() < PIPE_PATIENCE => thread::sleep(PIPE_STEP),
            Ok(0) if is_pipe(file) => {
                let why = "it is a pipe into which nobody writes";
                return Err(io::Error::new(ErrorKind::TimedOut, why));
            }
            Ok(count) => {
                bytes.extend(&first[..count]);
                return Ok(());
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PIPE_STEP),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether it is a pipe, with a name or without.
fn is_pipe(file: &File) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;

        file.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo())
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        false
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
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
        fs::rename(&staging, path)?;
        if durability == Durability::Synced {
            sync_folder_of(path);
        }
        Ok(())
    };
    write().inspect_err(|_| {
        // Best effort: the error that matters is the one returned.
        let _ = fs::remove_file(&staging);
    })
}

/// Puts a new file's name on the disk, where the file's contents are already. Some systems sync no folders: the name then comes
/// there when they like.
fn sync_folder_of(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let _ = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
}

/// Adds to the end of a file that nobody else writes to; when this returns it is on the disk. On an error, a full disk say, no
/// part of it is left behind.
pub fn append(mut file: &File, bytes: &[u8]) -> io::Result<()> {
    let before = file.seek(SeekFrom::End(0))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_data());
    if written.is_err() {
        // Best effort: the error that matters is the one returned.
        let _ = file.set_len(before);
    }
    written
}

/// Removes what killed writers have left in a folder that no other process writes to.
pub fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(STAGING_PREFIX) {
            // It harms nobody where it stays.
            let _ = fs::remove_file(entry.path());
        }
    }
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

    #[test]
    fn what_has_no_end_is_not_read_to_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        fs::write(&path, "12345678").unwrap();
        assert_eq!(read_text(&path, 8).unwrap(), "12345678");
        let error = read(&path, 7).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("larger than 7 bytes"), "{error}");
        fs::write(&path, b"ab\xff").unwrap();
        assert!(read_text(&path, 8).unwrap_err().to_string().contains("from byte 2 on"));
        assert_eq!(read(folder.path(), 8).unwrap_err().kind(), ErrorKind::IsADirectory);
        assert_eq!(read(&folder.path().join("none"), 8).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(["7 bytes", "3 KiB", "2 MiB", "1 GiB"], [7, 3 << 10, 2 << 20, 1 << 30].map(size));
    }

    #[cfg(unix)]
    #[test]
    fn devices_and_pipes_are_read_as_far_as_they_go() {
        let error = read(Path::new("/dev/zero"), 1 << 20).unwrap_err().to_string();
        assert!(error.contains("larger than 1 MiB"), "{error}");
        assert!(read(Path::new("/dev/null"), 8).unwrap().is_empty());

        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let error = read(&pipe, 8).unwrap_err().to_string();
        assert!(error.contains("nobody writes"), "{error}");
        let writer = thread::spawn({
            let pipe = pipe.clone();
            move || {
                // Later than it is asked for, and in pieces.
                thread::sleep(Duration::from_millis(100));
                let mut open = OpenOptions::new().write(true).open(pipe).unwrap();
                for piece in ["one ", "two"] {
                    thread::sleep(Duration::from_millis(50));
                    open.write_all(piece.as_bytes()).unwrap();
                }
            }
        });
        assert_eq!(read(&pipe, 8).unwrap(), b"one two");
        writer.join().unwrap();
    }

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
    fn lines_are_added_whole_and_what_the_killed_left_is_swept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, "one\n").unwrap();
        let file = OpenOptions::new().append(true).open(&path).unwrap();
        append(&file, b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        #[cfg(target_os = "linux")]
        assert!(append(&OpenOptions::new().append(true).open("/dev/full").unwrap(), b"x").is_err());

        fs::write(folder.path().join(format!("{STAGING_PREFIX}1-0")), "half").unwrap();
        sweep(folder.path());
        assert_eq!(files(folder.path()), ["log"]);
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
