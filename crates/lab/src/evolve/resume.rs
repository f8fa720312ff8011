//! Beginning a tune, or going on with one.

use std::{
    fs::{File, TryLockError},
    path::Path,
};

use super::log::{Contents, Header, Log};
use crate::{Error, error::IoContext};

/// A tune's folder, held by this process alone. The system lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub struct Held {
    _lock: File,
}

/// Makes the folder if it is not there, and takes hold of it.
pub fn hold(folder: &Path) -> Result<Held, Error> {
    let hint = "choose another folder with --out";
    std::fs::create_dir_all(folder).doing("create", folder, hint)?;
    let path = folder.join("lock");
    let lock = File::create(&path).doing("create", &path, hint)?;
    match lock.try_lock() {
        Ok(()) => Ok(Held { _lock: lock }),
        Err(TryLockError::WouldBlock) => Err(Error::Tune(format!(
            "another tune is at work in {}: wait for it, or choose another folder with --out",
            folder.display()
        ))),
        Err(TryLockError::Error(source)) => Err(Error::Io { doing: "lock", path, hint, source }),
    }
}

/// The log to write to, and what it already holds.
pub fn begin(folder: &Path, header: &Header, resume: bool) -> Result<(Log, Contents), Error> {
    let path = folder.join(super::log::FILE);
    if !path.exists() {
        if resume {
            return Err(Error::Tune(format!("there is no tune to resume in {}", folder.display())));
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
    ];
    for (what, was, is) in pairs {
        if was != is {
            return Some(format!("its {what} was {was}, now {is} is asked for"));
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
    }

    #[test]
    fn an_unwritable_place_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(hold(&file.path().join("x")).unwrap_err().to_string().contains("--out"));
    }
}
