//! What a user of the crates gets: each feature alone, and packages that stand by themselves.

use std::process::Command;

use anyhow::{Context, ensure};

use crate::step;

/// What must not be compiled for a library that has only the CPU, and only the GPU.
const LEFT_OUT: [(&str, &[&str]); 2] =
    [("cpu", &["cudarc", "evosdpa-cuda", "evosdpa-kernels", "toml"]), ("cuda", &["evosdpa-cpu"])];

/// What users build by itself. Together with the rest of the workspace each has the features that others ask for.
const BY_ITSELF: [(&str, &[&str]); 2] = [
    ("the program", &["--package", "evosdpa-cli", "--bins"]),
    ("ptxsan without features", &["--package", "ptxsan", "--no-default-features"]),
];

/// Every feature of the library builds alone, and leaves the other's dependencies out. Nobody but the lab needs the oracle.
pub(crate) fn features() -> anyhow::Result<()> {
    for (what, package) in BY_ITSELF {
        step(
            &format!("{what} by itself"),
            &[&["clippy", "--quiet"], package, &["--", "-D", "warnings"]].concat(),
            &[],
        )?;
    }
    for (feature, absent) in LEFT_OUT {
        let alone = ["--package", "evosdpa", "--no-default-features", "--features", feature];
        step(
            &format!("feature {feature} alone"),
            &[&["clippy", "--quiet"], &alone[..], &["--", "-D", "warnings"]].concat(),
            &[],
        )?;
        let names = dependencies(&alone)?;
        for name in absent.iter().chain(&["evosdpa-oracle"]) {
            ensure!(
                !names.iter().any(|found| found == name),
                "feature {feature} alone still compiles {name}"
            );
        }
    }
    Ok(())
}

/// The names of everything that is compiled.
fn dependencies(of: &[&str]) -> anyhow::Result<Vec<String>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let tree = ["tree", "--edges", "normal,build", "--prefix", "none", "--format", "{p}"];
    let output = Command::new(cargo).args(tree).args(of).output().context("cannot run cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).context("cargo tree")?;
    let names: Vec<String> =
        text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect();
    ensure!(names.iter().any(|name| name == "evosdpa-core"), "cargo tree lists no evosdpa-core: {text}");
    Ok(names)
}

/// Packages every crate that is published. They are not built from their packages: cargo unpacks those by version and would
/// build what an earlier run of the same version left in its registry, not what is packaged now.
pub(crate) fn package() -> anyhow::Result<()> {
    let all = ["package", "--quiet", "--allow-dirty", "--workspace", "--no-verify"];
    step("packages", &[&all[..], &["--exclude", "evosdpa-py", "--exclude", "xtask"]].concat(), &[])
}
