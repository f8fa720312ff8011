//! Programs of the CUDA toolkit that the lab can use but does not need.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use evosdpa_cuda::toolkit::Toolkit;

/// A program the lab can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaTool {
    /// Finds memory errors, races and wrong synchronisation on a GPU.
    ComputeSanitizer,
    /// Nsight Compute, the profiler.
    Ncu,
}

impl CudaTool {
    /// The program's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::ComputeSanitizer => "compute-sanitizer",
            Self::Ncu => "ncu",
        }
    }

    /// How to get it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::ComputeSanitizer => {
                "install a CUDA toolkit, or `python3 -m pip install --target DIR nvidia-cuda-sanitizer-api` and add \
                 DIR/nvidia/cu13/bin to PATH"
            }
            Self::Ncu => "install Nsight Compute, which CUDA toolkits include",
        }
    }

    /// Where it is: on `PATH`, in the toolkit that the compiler is from, or below `/usr/local`.
    pub fn find(self) -> Result<PathBuf, String> {
        let path = env::var_os("PATH").unwrap_or_default();
        let on_path = env::split_paths(&path).map(|folder| folder.join(self.name()));
        let elsewhere = toolkit_folders().into_iter().flat_map(|root| {
            [root.join("bin"), root.join("compute-sanitizer")].map(|folder| folder.join(self.name()))
        });
        on_path.chain(elsewhere).find(|candidate| is_program(candidate)).ok_or_else(|| {
            format!("{} is neither on PATH nor in a CUDA toolkit; {}", self.name(), self.remedy())
        })
    }
}

/// The line of `program --version` that names a version.
pub fn version(program: &Path) -> Result<String, String> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{} cannot be started: {error}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = said.lines().find(|line| line.contains("ersion")).map(|line| line.trim().to_owned());
    line.ok_or_else(|| {
        format!("{} --version ended with {} and names no version", program.display(), output.status)
    })
}

fn toolkit_folders() -> Vec<PathBuf> {
    let of_compiler = Toolkit::find().ok().map(|toolkit| toolkit.root.clone());
    let starts_with_cuda = |name: &OsStr| name.to_string_lossy().starts_with("cuda");
    let local = fs::read_dir("/usr/local").into_iter().flatten().flatten();
    let local = local.filter(|entry| starts_with_cuda(&entry.file_name())).map(|entry| entry.path());
    of_compiler.into_iter().chain(local).collect()
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_or_its_absence_explained() {
        assert!(version(Path::new("/bin/sh")).is_err(), "sh has no --version or names none");
        assert!(version(Path::new("/nowhere/ncu")).unwrap_err().contains("cannot be started"));
        assert!(!is_program(Path::new("/")) && !is_program(Path::new("/etc/passwd")));
        assert!(is_program(Path::new("/bin/sh")));
    }
}
