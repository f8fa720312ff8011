//! A GPU is measured by one process at a time.

use std::{
    fs::{File, TryLockError},
    path::Path,
    thread,
    time::Duration,
};

use super::Device;
use crate::{Error, error::IoContext};

/// How often somebody who waits looks whether the device is free.
const LOOK: Duration = Duration::from_millis(20);

/// Held while a GPU is measured: one process at a time, whoever starts it.
#[derive(Debug)]
pub struct DeviceLock {
    _file: Option<File>,
}

impl DeviceLock {
    /// Waits until the device is free. While it is not, `go_on` is asked again and again; `None` when that says no. A CPU is not locked:
    /// its users see each other in the load.
    pub fn wait(
        device: &(impl Device + ?Sized),
        mut go_on: impl FnMut() -> bool,
    ) -> Result<Option<Self>, Error> {
        let Some(name) = device.lock_name() else { return Ok(Some(Self { _file: None })) };
        let path = std::env::temp_dir().join(format!("evosdpa-{name}.lock"));
        let hint = "make the folder of temporary files writable";
        let file = lock_file(&path).doing("open", &path, hint)?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Self { _file: Some(file) })),
                Err(TryLockError::WouldBlock) if !go_on() => return Ok(None),
                Err(TryLockError::WouldBlock) => thread::sleep(LOOK),
                Err(TryLockError::Error(error)) => return Err(error).doing("lock", &path, hint),
            }
        }
    }
}

/// A file that several users lock, whoever of them made it: to lock it is to read it, and a file that is there is not created,
/// which systems refuse in folders of temporary files when it is somebody else's.
fn lock_file(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::PermissionsExt;
    match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    match File::options().create_new(true).write(true).open(path) {
        Ok(made) => {
            // Whatever the user's mask hides: others have to open it.
            made.set_permissions(std::fs::Permissions::from_mode(0o444))?;
            Ok(made)
        }
        // Somebody was quicker.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => File::open(path),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use evosdpa_core::{DType, Problem};
    use evosdpa_oracle::inputs::{Inputs, LengthFamily};

    use super::*;
    use crate::{
        bench::{self, Request, Step},
        device::{TimedDevice, TimedKernel, Timing},
        evolve::altered::{Alteration, Altered, CPU},
        measure::floor::Ceilings,
    };

    /// The second user can only read the file, and must not be able to change it.
    #[test]
    fn a_lock_works_for_whoever_can_read_it() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpu.lock");
        let first = lock_file(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o444);
        first.lock().unwrap();
        let second = lock_file(&path).unwrap();
        assert!(second.try_lock().is_err(), "it is held");
        drop(first);
        second.try_lock().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }

    /// The CPU under a name that others may wait for.
    struct Named(String);

    impl Alteration for Named {
        fn lock_name(&self) -> Option<String> {
            Some(self.0.clone())
        }

        fn ceilings(&self, problem: &Problem) -> Result<Option<Ceilings>, Error> {
            CPU.ceilings(problem)
        }

        fn load<'a>(
            &'a self,
            kernel: &str,
            problem: &Problem,
            inputs: &'a [Inputs],
        ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
            CPU.load_timed(kernel, problem, inputs)
        }
    }

    /// A bench draws and solves while somebody else measures, then waits until they have ended.
    #[test]
    fn one_bench_at_a_time_measures_on_a_device() {
        let device = Altered(Named(format!("test-{}", std::process::id())));
        let problem = Problem::new("tiny".parse().unwrap(), DType::F32).unwrap();
        let request = Request {
            kernels: vec!["cpu_flash".to_owned()],
            baselines: Vec::new(),
            iters: 2,
            warmup: 1,
            seed: 0,
            lengths: LengthFamily::Equal,
            budget: None,
            timing: Timing::Graph,
            margin: 0.01,
            epoch: Instant::now(),
        };
        let free = || DeviceLock::wait(&device, || false).unwrap();
        let mut others = free();
        let (mut waited, mut timed) = (0, 0);
        let measured = bench::measure(&device, &problem, &request, Err("not asked for"), |step| {
            match step {
                Step::Solving => assert!(others.is_some()),
                Step::Waiting => {
                    waited += 1;
                    if waited == 3 {
                        others = None;
                    }
                }
                Step::Checking(_) | Step::Timing(_) => {
                    timed += 1;
                    assert!(waited == 3 && free().is_none(), "it is measured here");
                }
            }
            true
        });
        let measured = measured.unwrap();
        assert!(timed > 0 && !measured.interrupted && measured.rows[0].p50_us.is_some());
        let _held = free();
        let given_up = bench::measure(&device, &problem, &request, Err("not asked for"), |step| {
            !matches!(step, Step::Waiting)
        });
        assert!(given_up.unwrap().interrupted);
    }
}
