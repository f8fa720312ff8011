//! What became of an evaluation, in its folder: there whole or not at all, whenever the service ends.

use std::{fs, io, path::Path};

use evosdpa_core::file::{self, Durability, write_whole};
use serde_json::{Value, json};

use super::{Order, Outcome};

const FILE: &str = "task.json";
const SCHEMA: &str = "evosdpa.serve-task/1";

/// The record of a task.
pub(crate) fn of(id: &str, order: &Order, outcome: Option<&Outcome>) -> Value {
    json!({"schema": SCHEMA, "task_id": id, "order": order, "outcome": outcome})
}

/// Writes it; when this returns it is on the disk.
pub(crate) fn write(folder: &Path, record: &Value) -> io::Result<()> {
    let path = folder.join(FILE);
    // What was evaluated may write into its folder: a link or a pipe of its making is not followed.
    if fs::symlink_metadata(&path).is_ok_and(|there| !there.is_file()) {
        fs::remove_file(&path)?;
    }
    write_whole(&path, &[record.to_string().as_bytes()], Durability::Synced)
}

/// The record in a folder, if there is one that can be read.
pub(crate) fn read(folder: &Path) -> Option<Value> {
    let path = folder.join(FILE);
    let is_file = fs::symlink_metadata(&path).is_ok_and(|there| there.is_file());
    is_file.then(|| file::read(&path, file::TEXT_BYTES_MAX).ok()).flatten().and_then(|bytes| {
        let record: Value = serde_json::from_slice(&bytes).ok()?;
        (record["schema"] == SCHEMA).then_some(record)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_record_is_replaced_whole_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join(FILE), folder.path().join("other"));
        let record = |id: &str| of(id, &Order::default(), None);
        assert_eq!(read(folder.path()), None);

        // Another name for the first record: it keeps what it was, as nothing is written into the file itself.
        write(folder.path(), &record("first")).unwrap();
        fs::hard_link(&path, &other).unwrap();
        write(folder.path(), &record("second")).unwrap();
        assert_eq!(read(folder.path()).unwrap()["task_id"], "second");
        assert!(fs::read_to_string(&other).unwrap().contains("first"));

        fs::write(&other, "somebody's").unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&other, &path).unwrap();
        assert_eq!(read(folder.path()), None);
        write(folder.path(), &record("third")).unwrap();
        assert_eq!(read(folder.path()).unwrap()["task_id"], "third");
        assert_eq!(fs::read_to_string(&other).unwrap(), "somebody's");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
