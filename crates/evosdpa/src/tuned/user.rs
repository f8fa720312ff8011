//! The user's own table: where it is, and how it is changed without ever being half written.

use std::{
    env,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use evosdpa_core::file::{self, Durability, write_whole};

use super::TunedTable;
use crate::Error;

/// Names the user's table; empty means that there is none.
pub const VARIABLE: &str = "EVOSDPA_TUNED";

/// Where the user's table is, whether it exists or not: `EVOSDPA_TUNED`, or `evosdpa/tuned.toml` in `XDG_CONFIG_HOME` or
/// `~/.config`. `None` when the user wants none, or has no home.
pub fn user_table_path() -> Option<PathBuf> {
    path_from(|name| env::var_os(name).map(PathBuf::from))
}

fn path_from(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if let Some(path) = variable(VARIABLE) {
        return (!path.as_os_str().is_empty()).then_some(path);
    }
    let absolute = |name: &str| variable(name).filter(|path| path.is_absolute());
    let base = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")))?;
    Some(base.join("evosdpa").join("tuned.toml"))
}

/// The user's table, if there is one. A table that cannot be read is an error, never silently left out.
pub fn user_table() -> Result<Option<TunedTable>, Error> {
    match user_table_path() {
        Some(path) => read_table(&path),
        None => Ok(None),
    }
}

/// The table in a file, if there is a file.
pub fn read_table(path: &Path) -> Result<Option<TunedTable>, Error> {
    match file::read_text(path, file::TEXT_BYTES_MAX) {
        Ok(text) => TunedTable::parse(&text, &path.display().to_string()).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::TableFile { doing: "read", path: path.to_owned(), source }),
    }
}

/// Changes a table on disk, one process at a time. The file is there as it was or as it will be, whatever happens in
/// between; a `change` that fails leaves it as it was.
pub fn update_table<T>(
    path: &Path,
    change: impl FnOnce(&mut TunedTable) -> Result<T, Error>,
) -> Result<T, Error> {
    let file_error =
        |doing: &'static str| move |source| Error::TableFile { doing, path: path.to_owned(), source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(file_error("make a folder for"))?;
    let lock = File::create(beside(path, "lock")).map_err(file_error("lock"))?;
    lock.lock().map_err(file_error("lock"))?;
    let mut table = read_table(path)?
        .unwrap_or_else(|| TunedTable { file: path.display().to_string(), devices: Vec::new() });
    let changed = change(&mut table)?;
    let text = format!("# Written by `evosdpa apply`; see docs/guide.md.\n{}", table.to_toml()?);
    // What is written must be readable: a table that is not would stop every later call.
    TunedTable::parse(&text, &table.file)?;
    write_whole(path, &[text.as_bytes()], Durability::Synced).map_err(file_error("write"))?;
    Ok(changed)
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(suffix);
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use evosdpa_kernels::Arch;

    use super::*;
    use crate::tuned::{TunedArch, TunedDevice};

    #[test]
    fn the_variable_comes_before_the_config_folder() {
        let with = |pairs: &[(&str, &str)]| {
            path_from(|name| Some(PathBuf::from(pairs.iter().find(|(key, _)| *key == name)?.1)))
        };
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(with(&[("HOME", "/h")]), path("/h/.config/evosdpa/tuned.toml"));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/c")]), path("/c/evosdpa/tuned.toml"));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "c")]), path("/h/.config/evosdpa/tuned.toml"));
        assert_eq!(with(&[("HOME", "/h"), (VARIABLE, "t.toml")]), path("t.toml"));
        assert_eq!(with(&[("HOME", "/h"), (VARIABLE, "")]), None);
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn a_table_is_changed_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/tuned.toml");
        assert!(read_table(&path).unwrap().is_none());
        let add = |table: &mut TunedTable| {
            table.devices.push(TunedDevice {
                arch: TunedArch::Gpu(Arch::Sm80),
                name: None,
                rows: Vec::new(),
            });
            Ok(table.devices.len())
        };
        assert_eq!(update_table(&path, add).unwrap(), 1);
        assert_eq!(update_table(&path, add).unwrap(), 2);
        let before = fs::read_to_string(&path).unwrap();
        let failed: Result<(), Error> = update_table(&path, |table| {
            table.devices.clear();
            Err(Error::Table { file: "x".to_owned(), problem: "y".to_owned() })
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), before);
        fs::write(&path, "schema = ").unwrap();
        let message = update_table(&path, add).unwrap_err().to_string();
        assert!(message.contains("tuned.toml"), "{message}");
        let left: Vec<_> = fs::read_dir(path.parent().unwrap())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.contains("tmp"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn two_at_once_lose_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuned.toml");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        update_table(&path, |table| {
                            table.devices.push(TunedDevice {
                                arch: TunedArch::Gpu(Arch::Sm80),
                                name: None,
                                rows: Vec::new(),
                            });
                            Ok(())
                        })
                        .unwrap();
                    }
                });
            }
        });
        assert_eq!(read_table(&path).unwrap().unwrap().devices.len(), 20);
    }
}
