//! Machines other than this one: the CPU kernels' tests on 64-bit ARM under qemu, and the library checked for macOS and Windows.

use std::{
    env,
    process::{Command, Stdio},
};

use crate::{step, tool_is_on_path};

const ARM: &str = "aarch64-unknown-linux-gnu";
const ARM_LINKER: &str = "aarch64-linux-gnu-gcc";
const ARM_EMULATOR: &str = "qemu-aarch64";
/// Where Debian keeps the ARM C library that the linker above links with.
const ARM_ROOT: &str = "/usr/aarch64-linux-gnu";

/// Checked, not run: nothing here can.
const OTHERS: [&str; 3] = ["aarch64-apple-darwin", "x86_64-apple-darwin", "x86_64-pc-windows-msvc"];

/// The tests that meet every instruction of a path, by name. An emulator takes ten times as long, so the random ones are left out; and so is
/// the peak beside busy threads, since an emulator's has no clock cycles that work beside it would leave alone.
const ARM_TESTS: [&str; 12] = [
    "--package",
    "evosdpa-cpu",
    "--lib",
    "--test",
    "suite",
    "--quiet",
    "--",
    "named_shapes",
    "promises",
    "::tests::",
    "--skip",
    "a_busy_machine_has_the_same_peak",
];

/// Gets what CI may install; [`check`] says what was not to be had.
pub(crate) fn fetch() {
    if on_ci() {
        fetch_targets();
    }
    let _ = arm_is_there();
}

pub(crate) fn check() -> anyhow::Result<()> {
    if on_ci() {
        fetch_targets();
    }
    match arm_is_there() {
        Ok(()) => {
            let emulator = format!("{ARM_EMULATOR} -L {ARM_ROOT}");
            let environment = [
                ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", ARM_LINKER),
                ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", emulator.as_str()),
            ];
            step(
                "tests on ARM (qemu)",
                &[&["test", "--target", ARM], &ARM_TESTS[..]].concat(),
                &environment,
            )?;
        }
        Err(why) => eprintln!("== tests on ARM (qemu): UNAVAILABLE, {why}"),
    }
    for target in OTHERS {
        let name = format!("library on {target}");
        if !target_is_there(target) {
            eprintln!("== {name}: UNAVAILABLE, `rustup target add {target}` to check it");
            continue;
        }
        let cpu = ["--package", "evosdpa", "--no-default-features", "--features", "cpu"];
        step(&name, &[&["check", "--quiet", "--target", target], &cpu[..]].concat(), &[])?;
    }
    Ok(())
}

/// Whether everything that ARM tests need is there, or why not.
fn arm_is_there() -> Result<(), String> {
    if !target_is_there(ARM) {
        return Err(format!("`rustup target add {ARM}` to compile for it"));
    }
    let tools = [(ARM_LINKER, "gcc-aarch64-linux-gnu"), (ARM_EMULATOR, "qemu-user")];
    for (tool, package) in tools {
        if !tool_is_on_path(tool) && !installed(&[package, "libc6-dev-arm64-cross"]) {
            return Err(format!("no {tool}; Debian's package is {package}"));
        }
    }
    Ok(())
}

/// Adds the targets that are missing, all at once: without a network this waits once.
fn fetch_targets() {
    let missing: Vec<&str> =
        [ARM].into_iter().chain(OTHERS).filter(|target| !target_is_there(target)).collect();
    if !missing.is_empty() {
        // Those that are still missing are said to be so.
        succeeds(Command::new("timeout").args(["90", "rustup", "target", "add"]).args(missing));
    }
}

/// Whether the compiler has a target's standard library.
fn target_is_there(target: &str) -> bool {
    let output = Command::new("rustup").args(["target", "list", "--installed"]).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).lines().any(|line| line == target))
}

/// Installs Debian packages where CI allows it.
fn installed(packages: &[&str]) -> bool {
    let apt = |args: &[&str]| succeeds(Command::new("timeout").args(["90", "apt-get"]).args(args));
    let install = [&["install", "-y", "-q", "--no-install-recommends"], packages].concat();
    on_ci() && (apt(&install) || (apt(&["update", "-q"]) && apt(&install)))
}

fn on_ci() -> bool {
    env::var_os("CI").is_some()
}

fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
