//! Compiled kernels by the hash of what they were made from.
//!
//! One [file](crate::entry) per kernel. Files appear by renaming, so a reader sees a whole entry or none. A damaged one is
//! noticed by its checksum, removed and made again. Readers touch what they use, and when the folder grows past its limit the
//! least recently used go first.
//!
//! What is loaded from here runs on the GPU with its user's rights. So the folder is its user's alone, and an entry that
//! somebody else has written is no entry.

use std::{
    fs::{self, DirBuilder, File, Metadata, Permissions},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use evosdpa_core::file::{self, Durability, STAGING_PREFIX};

use crate::{
    Error, Result,
    entry::{self, Entry},
    toolchain,
};

/// A writer that has not finished after this long has died.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// A folder of compiled kernels, shared between processes.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    limit_bytes: u64,
}

/// One entry, for a listing.
#[derive(Clone, Debug)]
pub struct CacheEntry {
    /// Its key.
    pub key: String,
    /// The variant it was made from.
    pub label: String,
    /// Its size on disk.
    pub bytes: u64,
    /// When it was last used.
    pub used: SystemTime,
}

/// Only the user reads, writes and lists.
const PRIVATE: u32 = 0o700;
const OTHERS_WRITE: u32 = 0o022;

/// Whether nobody but the user, or the machine's administrator, can have written it.
fn is_trusted(metadata: &Metadata) -> bool {
    let by_us = metadata.uid() == own_uid() || metadata.uid() == 0;
    by_us && metadata.mode() & OTHERS_WRITE == 0 && !metadata.is_symlink()
}

/// The user that this process runs as.
fn own_uid() -> u32 {
    // Without /proc nobody is taken for the user, and only the administrator is trusted.
    fs::metadata("/proc/self").map_or(u32::MAX, |metadata| metadata.uid())
}

impl Cache {
    /// How large the default cache may grow.
    pub const DEFAULT_LIMIT_BYTES: u64 = 1 << 30;

    /// The cache in `${XDG_CACHE_HOME:-~/.cache}/evosdpa/jit`.
    pub fn open_default() -> Result<Self> {
        let root = toolchain::cache_root().unwrap_or_else(|| std::env::temp_dir().join("evosdpa"));
        Self::open(&root.join("jit"), Self::DEFAULT_LIMIT_BYTES)
    }

    /// A cache in this folder, made if it is not there. A folder of the user's own that others can write to is closed to them;
    /// one that belongs to somebody else is refused.
    pub fn open(folder: &Path, limit_bytes: u64) -> Result<Self> {
        DirBuilder::new().recursive(true).mode(PRIVATE).create(folder).map_err(io(folder))?;
        let metadata = fs::metadata(folder).map_err(io(folder))?;
        if !is_trusted(&metadata) {
            if metadata.uid() != own_uid() {
                return Err(Error::ForeignCache { path: folder.to_owned(), owner: metadata.uid() });
            }
            fs::set_permissions(folder, Permissions::from_mode(PRIVATE)).map_err(io(folder))?;
        }
        Ok(Self { folder: folder.to_owned(), limit_bytes })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// How large it may grow.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Code and log of an entry. A damaged entry is removed and counts as absent.
    pub fn load(&self, key: &str) -> Option<(Vec<u8>, String)> {
        let path = self.path(key);
        let bytes = file::read(&path, file::TEXT_BYTES_MAX).ok()?;
        let trusted = fs::symlink_metadata(&path).is_ok_and(|metadata| is_trusted(&metadata));
        match Entry::decode(&bytes, key).filter(|_| trusted) {
            Some(Entry { log, code, .. }) => {
                // Last use decides who goes first; a failure here only makes the order worse.
                let touched = File::options().append(true).open(&path);
                let _ = touched.and_then(|file| file.set_modified(SystemTime::now()));
                Some((code.to_vec(), log.to_owned()))
            }
            None => {
                tracing::warn!("cache entry {} is damaged or not ours; it is made again", path.display());
                let _ = fs::remove_file(&path);
                None
            }
        }
    }

    /// Stores an entry, then removes the least recently used ones if the limit is passed.
    pub fn store(&self, key: &str, label: &str, code: &[u8], log: &str) -> Result<()> {
        let path = self.path(key);
        Entry { label: label.into(), log, code }.write(&path, key, Durability::Lazy)?;
        self.evict(key)
    }

    /// All entries, the most recently used first.
    pub fn entries(&self) -> Result<Vec<CacheEntry>> {
        let mut entries = Vec::new();
        for path in self.files()? {
            // An entry that another process has just removed is no error.
            let Ok(metadata) = fs::metadata(&path) else { continue };
            let Some(key) = entry::key_of(&path) else { continue };
            let label = file::read(&path, file::TEXT_BYTES_MAX)
                .ok()
                .and_then(|bytes| Some(Entry::decode(&bytes, &key)?.label.into_owned()));
            entries.push(CacheEntry {
                key,
                label: label.unwrap_or_else(|| "damaged".to_owned()),
                bytes: metadata.len(),
                used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            });
        }
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.used));
        Ok(entries)
    }

    /// What all entries take on disk.
    pub fn size_bytes(&self) -> Result<u64> {
        let sizes = self.files()?.into_iter().filter_map(|path| Some(fs::metadata(path).ok()?.len()));
        Ok(sizes.sum())
    }

    /// Removes everything; returns how many entries there were.
    pub fn clear(&self) -> Result<usize> {
        let mut count = 0;
        for path in self.files()? {
            count += usize::from(fs::remove_file(&path).is_ok());
        }
        self.sweep(Duration::ZERO)?;
        Ok(count)
    }

    /// Removes the least recently used entries until the limit is kept; the one just stored stays.
    fn evict(&self, keep: &str) -> Result<()> {
        let mut sized: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for path in self.files()? {
            if let Ok(metadata) = fs::metadata(&path) {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                sized.push((used, metadata.len(), path));
            }
        }
        let mut total: u64 = sized.iter().map(|(_, bytes, _)| bytes).sum();
        if total <= self.limit_bytes {
            return Ok(());
        }
        self.sweep(ABANDONED_AFTER)?;
        sized.sort();
        for (_, bytes, path) in sized {
            if total <= self.limit_bytes {
                break;
            }
            if entry::key_of(&path).is_none_or(|key| key != keep) {
                let _ = fs::remove_file(&path);
                total -= bytes;
            }
        }
        Ok(())
    }

    /// Removes what writers that died have left behind.
    fn sweep(&self, older_than: Duration) -> Result<()> {
        for entry in fs::read_dir(&self.folder).map_err(io(&self.folder))?.flatten() {
            let age = entry
                .metadata()
                .and_then(|metadata| metadata.modified())
                .ok()
                .and_then(|at| at.elapsed().ok());
            let is_staging = entry.file_name().to_string_lossy().starts_with(STAGING_PREFIX);
            if is_staging && age.is_some_and(|age| age >= older_than) {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(())
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        entry::files(&self.folder).map_err(io(&self.folder))
    }

    fn path(&self, key: &str) -> PathBuf {
        entry::path(&self.folder, key)
    }
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(limit_bytes: u64) -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(&folder.path().join("a/b"), limit_bytes).unwrap();
        (folder, cache)
    }

    fn age(cache: &Cache, key: &str, seconds: u64) {
        let file = File::options().append(true).open(cache.path(key)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
    }

    #[test]
    fn gives_back_what_was_stored() {
        let (_folder, cache) = cache(1 << 20);
        assert_eq!(cache.load("k"), None);
        cache.store("k", "a kernel", b"\x00\xffcode", "the log\nhas lines").unwrap();
        assert_eq!(cache.load("k"), Some((b"\x00\xffcode".to_vec(), "the log\nhas lines".to_owned())));
        let entries = cache.entries().unwrap();
        assert_eq!((entries.len(), entries[0].label.as_str(), entries[0].key.as_str()), (1, "a kernel", "k"));
        assert_eq!(cache.size_bytes().unwrap(), entries[0].bytes);
        assert_eq!(cache.clear().unwrap(), 1);
        assert_eq!(cache.load("k"), None);
    }

    #[test]
    fn a_damaged_entry_is_absent_and_removed() {
        let (_folder, cache) = cache(1 << 20);
        for damage in [
            &(|bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1) as &dyn Fn(&mut Vec<u8>),
            &|bytes| bytes.truncate(bytes.len() - 1),
            &|bytes| bytes.push(0),
            &|bytes| bytes.clear(),
            &|bytes| bytes[0] = b'x',
            &|bytes| *bytes = vec![0xff; 100],
        ] {
            cache.store("k", "a kernel", b"code", "log").unwrap();
            let mut bytes = fs::read(cache.path("k")).unwrap();
            damage(&mut bytes);
            fs::write(cache.path("k"), bytes).unwrap();
            assert_eq!(cache.load("k"), None);
            assert!(!cache.path("k").exists());
        }
    }

    /// Two entries that changed places are whole, each of them, and neither is what was asked for.
    #[test]
    fn entries_that_changed_places_are_noticed() {
        let (_folder, cache) = cache(1 << 20);
        cache.store("a", "the a", b"code of a", "").unwrap();
        cache.store("b", "the b", b"code of b", "").unwrap();
        let aside = cache.folder().join("aside");
        fs::rename(cache.path("a"), &aside).unwrap();
        fs::rename(cache.path("b"), cache.path("a")).unwrap();
        fs::rename(&aside, cache.path("b")).unwrap();
        assert_eq!((cache.load("a"), cache.load("b")), (None, None));
        cache.store("a", "the a", b"code of a", "").unwrap();
        assert_eq!(cache.load("a").unwrap().0, b"code of a");
    }

    #[test]
    fn the_folder_is_the_users_alone() {
        let (_folder, cache) = cache(1 << 20);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(cache.folder()), PRIVATE);
        cache.store("a", "a", b"code", "").unwrap();
        // One that others could write to is closed, and what others could change in it is not used.
        fs::set_permissions(cache.folder(), Permissions::from_mode(0o777)).unwrap();
        fs::set_permissions(cache.path("a"), Permissions::from_mode(0o666)).unwrap();
        let again = Cache::open(cache.folder(), 1 << 20).unwrap();
        assert_eq!((mode(again.folder()), again.load("a")), (PRIVATE, None));
        // Somebody else's is refused; only the administrator can make one for the test.
        if own_uid() == 0 {
            std::os::unix::fs::chown(again.folder(), Some(12345), None).unwrap();
            let message = Cache::open(again.folder(), 1 << 20).unwrap_err().to_string();
            assert!(message.contains("12345") && message.contains("XDG_CACHE_HOME"), "{message}");
        }
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let (_folder, cache) = cache(3500);
        for (key, seconds) in [("a", 30), ("b", 20), ("c", 10)] {
            cache.store(key, key, &[0; 900], "").unwrap();
            age(&cache, key, seconds);
        }
        // Using the oldest makes it the youngest.
        assert!(cache.load("a").is_some());
        cache.store("d", "d", &[0; 900], "").unwrap();
        let mut left: Vec<String> = cache.entries().unwrap().into_iter().map(|entry| entry.key).collect();
        left.sort();
        assert_eq!(left, ["a", "c", "d"]);
        assert!(cache.size_bytes().unwrap() <= 3500);
    }

    #[test]
    fn an_entry_larger_than_the_limit_is_still_usable_once() {
        let (_folder, cache) = cache(10);
        cache.store("a", "a", &[0; 900], "").unwrap();
        assert!(cache.load("a").is_some());
        cache.store("b", "b", &[0; 900], "").unwrap();
        assert!(cache.load("a").is_none() && cache.load("b").is_some());
    }

    #[test]
    fn what_dead_writers_left_is_swept() {
        let (_folder, cache) = cache(10);
        let left = cache.folder().join(".writing-1-1");
        fs::write(&left, "half").unwrap();
        let old = SystemTime::now() - 2 * ABANDONED_AFTER;
        File::options().append(true).open(&left).unwrap().set_modified(old).unwrap();
        let busy = cache.folder().join(".writing-2-1");
        fs::write(&busy, "half").unwrap();
        cache.store("a", "a", &[0; 900], "").unwrap();
        assert!(!left.exists() && busy.exists());
    }
}
