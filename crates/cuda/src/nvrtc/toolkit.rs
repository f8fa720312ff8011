//! Where the CUDA compiler library and its headers are.
//!
//! Looked for in this order: `$EVOSDPA_CUDA_HOME`; the packages of the Python that runs in this process, if one does
//! ([`suggest_packages`]); the active virtual environment's packages (`nvidia/cu13` is where the PyPI wheels and PyTorch
//! put it; `nvidia/cuda_nvrtc` it was for CUDA 12); `/usr/local/cuda*`; the private folder that `evosdpa doctor --fix` fills; the packages of
//! whatever `python3` is, last because asking it costs a process.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use super::{Error, Result, toolchain};

/// Says where the toolkit is, before anything else is tried.
pub const HOME_VARIABLE: &str = "EVOSDPA_CUDA_HOME";

/// Package folders that somebody knows of, searched first.
static SUGGESTED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Names a folder of Python packages to look in before all others. Without effect once a toolkit was looked for.
pub fn suggest_packages(folder: PathBuf) {
    SUGGESTED.lock().unwrap_or_else(PoisonError::into_inner).push(folder);
}

/// CUDA 12 is the first that knows `sm_90a`.
const OLDEST_MAJOR: u32 = 12;

/// A place with NVRTC and the headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolkit {
    /// The folder that has `include` and `lib` or `lib64`.
    pub root: PathBuf,
    /// Why it was looked at.
    pub found_by: &'static str,
    /// The compiler library.
    pub nvrtc: PathBuf,
    /// The compiler's second half, which it opens by name: it must be opened first.
    pub builtins: PathBuf,
    /// Folders with the toolkit's headers.
    pub include: Vec<PathBuf>,
}

impl Toolkit {
    /// The first toolkit in the order of this module's documentation.
    pub fn find() -> Result<&'static Self> {
        static FOUND: OnceLock<Result<Toolkit, Vec<String>>> = OnceLock::new();
        FOUND.get_or_init(search).as_ref().map_err(|searched| Error::Missing {
            searched: searched.clone(),
            hint: format!(
                "install it (no GPU, no root): {}\n`evosdpa doctor --fix` does the same; or set {HOME_VARIABLE} to a CUDA toolkit",
                toolchain::by_hand()
            ),
        })
    }

    /// The toolkit below `root`, or what is missing there.
    pub fn at(root: &Path, found_by: &'static str) -> Result<Self, String> {
        if !root.is_dir() {
            return Err(format!("{} ({found_by}): no such folder", root.display()));
        }
        let mut missing = Vec::new();
        // Toolkits have lib64, wheels lib, and some systems keep it per architecture. The wheels of CUDA 12 have a folder each.
        let folders =
            ["lib", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "cuda_nvrtc/lib"];
        for folder in folders {
            let folder = root.join(folder);
            match (library(&folder, "libnvrtc.so."), library(&folder, "libnvrtc-builtins.so.")) {
                (Some(nvrtc), _) if major_version(&nvrtc) < OLDEST_MAJOR => missing.push("NVRTC 12 or newer"),
                (Some(nvrtc), Some(builtins)) => {
                    let include = include_folders(root);
                    if include.is_empty() {
                        missing.push("include/cuda_fp16.h");
                        break;
                    }
                    return Ok(Self { root: root.to_owned(), found_by, nvrtc, builtins, include });
                }
                (Some(_), None) => missing.push("libnvrtc-builtins.so.*"),
                (None, _) => {}
            }
        }
        let missing = if missing.is_empty() { "lib/libnvrtc.so.*".to_owned() } else { missing.join(", ") };
        Err(format!("{} ({found_by}): {missing} is not there", root.display()))
    }

    /// What identifies the compiler in cache keys: names and sizes of its libraries and headers, never a path or date.
    pub fn fingerprint(&self) -> String {
        let headers =
            ["cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h", "cuda_fp8.hpp"];
        let headers = headers.iter().filter_map(|name| self.include.first().map(|folder| folder.join(name)));
        let mut parts = Vec::new();
        for path in [self.nvrtc.clone(), self.builtins.clone()].into_iter().chain(headers) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let bytes = fs::metadata(&path).map_or(0, |metadata| metadata.len());
            parts.push(format!("{name}:{bytes}"));
        }
        parts.join(" ")
    }
}

fn search() -> Result<Toolkit, Vec<String>> {
    let mut searched = Vec::new();
    let mut attempt = |root: PathBuf, found_by: &'static str| match Toolkit::at(&root, found_by) {
        Ok(toolkit) => Some(toolkit),
        Err(missing) => {
            searched.push(missing);
            None
        }
    };
    if let Some(home) = env::var_os(HOME_VARIABLE).filter(|home| !home.is_empty()) {
        // Who names a folder wants that one or an error, not another one.
        return attempt(PathBuf::from(home), HOME_VARIABLE).ok_or(searched);
    }
    let suggested = SUGGESTED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let environment = env::var_os("VIRTUAL_ENV").map(|folder| site_packages(Path::new(&folder)));
    for (packages, found_by) in (suggested.iter().map(|packages| (packages, "this Python")))
        .chain(environment.iter().flatten().map(|packages| (packages, "VIRTUAL_ENV")))
    {
        for root in in_packages(packages) {
            if let Some(toolkit) = attempt(root, found_by) {
                return Ok(toolkit);
            }
        }
    }
    for root in local_toolkits() {
        if let Some(toolkit) = attempt(root, "/usr/local") {
            return Ok(toolkit);
        }
    }
    if let Some(toolkit) = toolchain::private_root().and_then(|root| attempt(root, "private folder")) {
        return Ok(toolkit);
    }
    for root in python_site_packages(Duration::from_secs(5)).iter().flat_map(|packages| in_packages(packages))
    {
        if let Some(toolkit) = attempt(root, "python3") {
            return Ok(toolkit);
        }
    }
    Err(searched)
}

/// The file in `folder` whose name starts with `prefix` and goes on with a version; the newest when there are several.
fn library(folder: &Path, prefix: &str) -> Option<PathBuf> {
    let names = fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let version = |name: &str| -> Option<Vec<u32>> {
        name.strip_prefix(prefix)?.split('.').map(|part| part.parse().ok()).collect()
    };
    // Fewer parts first: the soname `libnvrtc.so.12` rather than `libnvrtc.so.12.4.127`.
    let best = names.filter_map(|name| Some((version(&name)?, name))).max_by_key(|(version, _)| {
        (version.first().copied(), std::cmp::Reverse(version.len()), version.clone())
    });
    best.map(|(_, name)| folder.join(name))
}

/// The 13 of `libnvrtc.so.13`.
fn major_version(library: &Path) -> u32 {
    let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.split(".so.").nth(1).and_then(|version| version.split('.').next()?.parse().ok()).unwrap_or(0)
}

fn include_folders(root: &Path) -> Vec<PathBuf> {
    let folders = [root.join("include"), root.join("cuda_runtime/include")];
    let Some(include) = folders.into_iter().find(|folder| folder.join("cuda_fp16.h").is_file()) else {
        return Vec::new();
    };
    [include.clone(), include.join("cccl")].into_iter().filter(|folder| folder.is_dir()).collect()
}

/// Where the wheels of CUDA 13 and of CUDA 12 put themselves in a folder of packages.
fn in_packages(packages: &Path) -> [PathBuf; 2] {
    [packages.join("nvidia/cu13"), packages.join("nvidia")]
}

fn site_packages(environment: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(environment.join("lib")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path().join("site-packages")))
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found
}

/// `/usr/local/cuda` first, then versioned folders, newest first.
fn local_toolkits() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/usr/local") else { return Vec::new() };
    let mut roots: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda")))
        .collect();
    roots.sort_by_key(|path| (path.as_os_str() != "/usr/local/cuda", std::cmp::Reverse(path.clone())));
    roots
}

/// Asks `python3` for its package folders, within a time limit.
fn python_site_packages(limit: Duration) -> Vec<PathBuf> {
    let script =
        "import site, sysconfig; print(sysconfig.get_paths()['purelib']); print(site.getusersitepackages())";
    let child = Command::new("python3")
        .args(["-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = child else { return Vec::new() };
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            _ => {
                // It hangs or cannot be waited for; nothing more is wanted from it.
                let _ = child.kill();
                let _ = child.wait();
                return Vec::new();
            }
        }
    }
    let output = child.wait_with_output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        folder
    }

    #[test]
    fn finds_the_layouts_of_wheels_and_toolkits() {
        let wheel = folder_with(&[
            "lib/libnvrtc.so.13",
            "lib/libnvrtc.alt.so.13",
            "lib/libnvrtc-builtins.so.13.0",
            "lib/libnvrtc-builtins.alt.so.13.0",
            "include/cuda_fp16.h",
            "include/cccl/nv/target",
        ]);
        let found = Toolkit::at(wheel.path(), "test").unwrap();
        assert!(found.nvrtc.ends_with("lib/libnvrtc.so.13"), "{found:?}");
        assert!(found.builtins.ends_with("lib/libnvrtc-builtins.so.13.0"), "{found:?}");
        assert_eq!(found.include.len(), 2);

        let toolkit = folder_with(&[
            "lib64/libnvrtc.so",
            "lib64/libnvrtc.so.12",
            "lib64/libnvrtc.so.12.4.127",
            "lib64/libnvrtc-builtins.so.12.4",
            "lib64/libnvrtc-builtins.so.12.4.127",
            "include/cuda_fp16.h",
        ]);
        let found = Toolkit::at(toolkit.path(), "test").unwrap();
        assert!(found.nvrtc.ends_with("lib64/libnvrtc.so.12"), "{found:?}");
        assert!(found.builtins.ends_with("lib64/libnvrtc-builtins.so.12.4"), "{found:?}");
        assert_eq!(found.include.len(), 1);

        let packages = folder_with(&[
            "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8",
            "nvidia/cuda_runtime/include/cuda_fp16.h",
        ]);
        let [of_13, of_12] = in_packages(packages.path());
        assert!(Toolkit::at(&of_13, "test").is_err());
        let found = Toolkit::at(&of_12, "test").unwrap();
        assert!(found.nvrtc.ends_with("cuda_nvrtc/lib/libnvrtc.so.12"), "{found:?}");
        assert!(found.include[0].ends_with("cuda_runtime/include"), "{found:?}");
    }

    #[test]
    fn says_what_is_missing() {
        let missing = |files: &[&str]| Toolkit::at(folder_with(files).path(), "test").unwrap_err();
        assert!(missing(&["include/cuda_fp16.h"]).contains("lib/libnvrtc.so.*"));
        assert!(missing(&["lib/libnvrtc.so.13"]).contains("libnvrtc-builtins"));
        assert!(missing(&["lib/libnvrtc.so.13", "lib/libnvrtc-builtins.so.13.0"]).contains("cuda_fp16.h"));
        let old = ["lib/libnvrtc.so.11.2", "lib/libnvrtc-builtins.so.11.2", "include/cuda_fp16.h"];
        assert!(missing(&old).contains("NVRTC 12 or newer"));
        assert!(Toolkit::at(Path::new("/nowhere/at/all"), "test").unwrap_err().contains("no such folder"));
    }

    #[test]
    fn a_fingerprint_tells_compilers_apart_but_not_places() {
        let files = ["lib/libnvrtc.so.13", "lib/libnvrtc-builtins.so.13.0", "include/cuda_fp16.h"];
        let (a, b, c) = (folder_with(&files), folder_with(&files), folder_with(&files));
        fs::write(c.path().join("lib/libnvrtc.so.13"), "another").unwrap();
        let print = |folder: &tempfile::TempDir| Toolkit::at(folder.path(), "test").unwrap().fingerprint();
        assert_eq!(print(&a), print(&b));
        assert_ne!(print(&a), print(&c));
    }
}
