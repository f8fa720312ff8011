//! The wheels that users install: optimised, for this machine or for others, with the GPU kernels of common problems compiled, and with
//! their metadata checked.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail, ensure};

use crate::python::{Base, MATURIN, interpreter, passed, prepared, root, target_folder};

/// What links for other processors, and for Linux with an old C library.
const ZIG: &str = "ziglang==0.15.1";
/// What reads a wheel's metadata as PyPI does.
const TWINE: &str = "twine==7.0.0";
/// The largest wheel that is still pleasant to install.
const WHEEL_LIMIT_BYTES: u64 = 20_000_000;

/// What wheels are built for, with zig's linker and C library. Not macOS: linking asks for Apple's SDK (libobjc, Foundation), which
/// only Apple gives. Not Windows: the cache of compiled kernels (`evosdpa-cuda`) relies on Unix's owners and permissions.
pub(crate) const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

/// The GPUs whose kernels come along. An installation on others compiles its own.
const ARCHS: &str = "sm_80,sm_86,sm_89,sm_90a";

/// Kernels compiled for the wheels, beside the package's Python files while wheels are built. Left there, they would grow old.
struct Kernels {
    folder: PathBuf,
}

impl Kernels {
    fn compile(root: &Path) -> anyhow::Result<Self> {
        let kernels = Self { folder: root.join("crates/python/python/evosdpa/kernels") };
        let _ = fs::remove_dir_all(&kernels.folder);
        let mut evosdpa = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        evosdpa.args(["run", "--release", "--quiet", "--package", "evosdpa-cli", "--", "precompile"]);
        evosdpa.arg(&kernels.folder).args(["--arch", ARCHS]).current_dir(root);
        passed(&mut evosdpa, "compile the kernels of common problems")?;
        Ok(kernels)
    }

    fn count(&self) -> anyhow::Result<usize> {
        Ok(fs::read_dir(&self.folder)?.count())
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Builds a wheel for each target, or for this machine where none is named.
pub(crate) fn build(targets: &[&str]) -> anyhow::Result<()> {
    if let Some(unknown) = targets.iter().find(|target| !TARGETS.contains(target)) {
        bail!("no wheel is built for {unknown}; use {}, or no name for this machine", TARGETS.join(" or "));
    }
    let root = root();
    let (python, version) = interpreter()?;
    let zig = Base { name: "zig", installs: &[&[MATURIN, ZIG]], finish: None };
    let tools = prepared(&zig, &python, &version, &root)?;
    let twine = Base { name: "twine", installs: &[&[TWINE]], finish: None };
    let twine = prepared(&twine, &python, &version, &root)?;
    let kernels = Kernels::compile(&root)?;
    let wheels = target_folder(&root)?.join("wheels");
    let _ = fs::remove_dir_all(&wheels);
    if targets.is_empty() {
        one(&root, &tools, &wheels, None)?;
    }
    for target in targets {
        one(&root, &tools, &wheels, Some(target)).with_context(|| format!("no wheel for {target}"))?;
    }
    let mut built: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(&wheels)? {
        built.push(entry?.path());
    }
    built.sort();
    let mut check = Command::new(twine.join("bin/twine"));
    passed(check.args(["check", "--strict"]).args(&built), "pass PyPI's checks of metadata")?;
    for wheel in &built {
        let bytes = fs::metadata(wheel)?.len();
        println!("{} ({:.1} MB)", wheel.display(), bytes as f64 / 1e6);
        let (with, expected) = (kernels_in(wheel, &tools)?, kernels.count()?);
        ensure!(with == expected, "{} has {with} of {expected} kernels", wheel.display());
        ensure!(bytes < WHEEL_LIMIT_BYTES, "the wheel has {bytes} bytes, more than {WHEEL_LIMIT_BYTES}");
    }
    Ok(())
}

/// How many compiled kernels a wheel has.
fn kernels_in(wheel: &Path, tools: &Path) -> anyhow::Result<usize> {
    let mut list = Command::new(tools.join("bin/python"));
    let listed = list.args(["-m", "zipfile", "-l"]).arg(wheel).output().context("cannot list a wheel")?;
    let text = String::from_utf8_lossy(&listed.stdout);
    Ok(text.lines().filter(|line| line.starts_with("evosdpa/kernels/") && line.contains(".kernel ")).count())
}

fn one(root: &Path, tools: &Path, wheels: &Path, target: Option<&str>) -> anyhow::Result<()> {
    let path = env::join_paths(
        std::iter::once(tools.join("bin")).chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())),
    )?;
    let mut maturin = Command::new(tools.join("bin/maturin"));
    maturin.args(["build", "--release", "--zig", "--interpreter"]).arg(tools.join("bin/python"));
    if let Some(target) = target {
        maturin.args(["--target", target]);
    }
    if target.map_or(cfg!(target_os = "linux"), |target| target.contains("linux")) {
        maturin.args(["--compatibility", "manylinux2014"]);
    }
    maturin.arg("--out").arg(wheels).env("PATH", path).current_dir(root);
    passed(&mut maturin, "build the wheel")
}
