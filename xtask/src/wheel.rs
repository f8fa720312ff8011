//! The wheels that users install: optimised, for this machine or for others, with their metadata checked.

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
        ensure!(bytes < WHEEL_LIMIT_BYTES, "the wheel has {bytes} bytes, more than {WHEEL_LIMIT_BYTES}");
    }
    Ok(())
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
