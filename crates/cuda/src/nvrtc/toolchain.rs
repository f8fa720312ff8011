//! A private copy of the CUDA compiler, from the wheels on PyPI.
//!
//! It lives in a folder of its own, so that no Python environment changes: a second CUDA version in an environment that
//! has PyTorch would overwrite PyTorch's.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Error, Nvrtc, Result, toolkit::Toolkit};

/// The pinned version. Other pins mix versions that do not work together.
pub const VERSION: &str = "13.0.3";

/// What pip is asked for.
pub const REQUIREMENT: &str = "cuda-toolkit[nvcc,cccl,nvrtc,cudart]==13.0.3";

/// Everything this project keeps outside its checkout: `${XDG_CACHE_HOME:-~/.cache}/evosdpa`.
pub fn cache_root() -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(base.join("evosdpa"))
}

/// The folder that pip fills.
pub fn private_folder() -> Option<PathBuf> {
    Some(cache_root()?.join(format!("cuda-{VERSION}")))
}

/// The toolkit inside the private folder, whether or not it is there yet.
pub fn private_root() -> Option<PathBuf> {
    Some(private_folder()?.join("nvidia/cu13"))
}

/// The command that fills the private folder, for a terminal.
pub fn by_hand() -> String {
    let folder = private_folder().map_or_else(|| "FOLDER".to_owned(), |folder| folder.display().to_string());
    format!("python3 -m pip install --target {folder} \"{REQUIREMENT}\"")
}

/// Fills the private folder, unless it is there and works; then opens the compiler once to be sure.
///
/// Downloads about 200 MB. Safe to run twice at once: the folder appears complete or not at all.
pub fn install_private() -> Result<Toolkit> {
    let folder = private_folder().ok_or_else(|| Error::Install {
        problem: "neither XDG_CACHE_HOME nor HOME is an absolute path".to_owned(),
        hint: "set HOME".to_owned(),
    })?;
    install_into(&folder, &pip())
}

fn pip() -> Vec<String> {
    let command =
        ["python3", "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--quiet"];
    command.map(str::to_owned).to_vec()
}

fn install_into(folder: &Path, pip: &[String]) -> Result<Toolkit> {
    if let Ok(toolkit) = verify(folder) {
        return Ok(toolkit);
    }
    let parent = folder.parent().unwrap_or(Path::new("."));
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { path, source }
    };
    fs::create_dir_all(parent).map_err(io(parent))?;
    let staging = parent.join(format!(".cuda-{VERSION}.{}", std::process::id()));
    let _ = fs::remove_dir_all(&staging);
    let outcome = run_pip(pip, &staging).and_then(|()| verify(&staging)).and_then(|_| {
        // What is there did not verify, so it is of no use to anyone.
        let _ = fs::remove_dir_all(folder);
        match fs::rename(&staging, folder) {
            Ok(()) => Ok(()),
            // Another process was faster; its copy must verify below.
            Err(_) if folder.is_dir() => Ok(()),
            Err(source) => Err(Error::Io { path: folder.to_owned(), source }),
        }
    });
    let _ = fs::remove_dir_all(&staging);
    outcome.and_then(|()| verify(folder))
}

fn run_pip(pip: &[String], target: &Path) -> Result<()> {
    let (program, arguments) =
        pip.split_first().map_or(("python3", &[][..]), |(first, rest)| (first.as_str(), rest));
    let output = Command::new(program).args(arguments).arg("--target").arg(target).arg(REQUIREMENT).output();
    let by_hand = format!("by hand: python3 -m pip install --target {} \"{REQUIREMENT}\"", target.display());
    let output = output.map_err(|error| Error::Install {
        problem: format!("`{program}` cannot be started: {error}"),
        hint: "install Python 3 with pip (Debian: apt install python3-pip)".to_owned(),
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let hint = if said.contains("No module named pip") {
        "install pip (Debian: apt install python3-pip; else: python3 -m ensurepip)".to_owned()
    } else {
        by_hand
    };
    Err(Error::Install { problem: format!("pip ended with {}: {said}", output.status), hint })
}

/// The toolkit in the folder, if its compiler can be opened.
fn verify(folder: &Path) -> Result<Toolkit> {
    let toolkit = Toolkit::at(&folder.join("nvidia/cu13"), "private folder").map_err(|missing| {
        Error::Install { problem: missing, hint: format!("remove {} and try again", folder.display()) }
    })?;
    Nvrtc::open(&toolkit)?;
    Ok(toolkit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(program: &[&str]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("cuda");
        let pip: Vec<String> = program.iter().map(|part| (*part).to_owned()).collect();
        let message = install_into(&target, &pip).unwrap_err().to_string();
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert!(left.is_empty(), "nothing half-installed may stay: {left:?}");
        message
    }

    #[test]
    fn says_what_to_install_when_pip_is_missing() {
        assert!(failing(&["no-such-python-here"]).contains("install Python 3 with pip"));
        let message = failing(&["sh", "-c", "echo 'python3: No module named pip' >&2; exit 1"]);
        assert!(message.contains("apt install python3-pip"), "{message}");
        let message = failing(&["sh", "-c", "echo 'no route to host' >&2; exit 1"]);
        assert!(message.contains("no route to host") && message.contains("by hand"), "{message}");
    }

    #[test]
    fn an_installation_without_a_compiler_is_refused() {
        let message = failing(&["true"]);
        assert!(message.contains("no such folder"), "{message}");
    }
}
