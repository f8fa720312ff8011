//! A library of the driver's name that answers as it is told to and says what it was asked. The C compiler that links Rust
//! programs makes it.

use std::{collections::HashMap, env, mem::offset_of, path::Path, process::Command, sync::OnceLock};

use evosdpa_kernels::SdpaParams;

/// What the fake answers; every function not named here says success.
const ANSWERS: &str = include_str!("driver.c");

/// The functions that the guard looks for, as the source lists them.
fn used_functions() -> Vec<&'static str> {
    let source = include_str!("../../src/driver.rs");
    let list = source.split("USED_FUNCTIONS: &[&str] = &[").nth(1).unwrap().split(']').next().unwrap();
    list.split('"').skip(1).step_by(2).collect()
}

/// Makes the fake; without the function `missing` if one is named.
fn make(folder: &Path, missing: Option<&str>) {
    let mut source = ANSWERS.to_owned();
    for name in used_functions() {
        if Some(name) != missing && !ANSWERS.contains(&format!("int {name}(")) {
            source += &format!("int {name}(void) {{ return 0; }}\n");
        }
    }
    let file = folder.join("driver.c");
    std::fs::write(&file, source).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        let made = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-o"])
            .arg(folder.join(name))
            .arg(format!("-DCOUNTER_AT={}", offset_of!(SdpaParams, counter) / 8))
            .arg(format!("-DWORKSPACE_AT={}", offset_of!(SdpaParams, workspace) / 8))
            .arg(&file)
            .status();
        assert!(made.unwrap().success());
    }
}

/// What the step `inner` prints in a process that has the fake for its driver. The loader's answer is kept for a
/// process's life, so that each question needs one of its own. The test program must have a test `inner` that does the step
/// named by `FAKE_STEP`.
pub(crate) fn with_fake(inner: &str, told: &[(&str, &str)], missing: Option<&str>) -> String {
    static WHOLE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let own;
    let folder = if missing.is_none() {
        WHOLE.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            make(folder.path(), None);
            folder
        })
    } else {
        own = tempfile::tempdir().unwrap();
        make(own.path(), missing);
        &own
    };
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "inner", "--nocapture", "--test-threads", "1"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("FAKE_STEP", inner)
        .envs(told.iter().copied().collect::<HashMap<_, _>>())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{inner}: {} {text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// What the fake was asked, in order. The first word comes after what the test harness says, on one line.
pub(crate) fn asked(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| Some(line.split_once("asked: ")?.1)).collect()
}

pub(crate) fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}
