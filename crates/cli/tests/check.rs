//! `check` as its users meet it: what passes, what a forced control does, which cases are asked for.

use std::{
    path::Path,
    process::{Command, Output},
};

use assert_cmd::cargo::cargo_bin;
use evosdpa_oracle::inputs::Family;
use serde_json::Value;

fn evosdpa(folder: &Path, args: &[&str]) -> Output {
    Command::new(cargo_bin!("evosdpa")).args(args).current_dir(folder).env("NO_COLOR", "1").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn check_passes_and_every_forced_control_fails() {
    let folder = tempfile::tempdir().unwrap();
    let base = ["check", "--shapes", "b1h4/2s33/65d24:causal-br", "--seeds", "1", "--dtype", "f32,bf16"];
    let output = evosdpa(folder.path(), &base);
    assert!(output.status.success(), "{}", text(&output.stdout));
    for control in ["zeros", "copy-of-v", "mean-of-v", "previous-output", "another-mask"] {
        let output = evosdpa(folder.path(), &[&base[..], &["--force", control]].concat());
        assert_eq!(output.status.code(), Some(1), "{control}: {}", text(&output.stdout));
        assert!(text(&output.stdout).contains("FAIL"), "{control}");
    }
}

#[test]
fn each_instruction_set_can_be_forced() {
    let folder = tempfile::tempdir().unwrap();
    for isa in evosdpa::Isa::available() {
        let args = [
            "check",
            "--shapes",
            "tiny:causal",
            "--seeds",
            "1",
            "--kernels",
            "cpu_flash",
            "--isa",
            isa.name(),
        ];
        assert!(evosdpa(folder.path(), &args).status.success(), "{isa}");
    }
}

/// The first kernel of the line reads no 8-bit codes, so nothing is left to do, and silence would look like success.
#[test]
fn nothing_checked_exits_2_with_each_reason() {
    let folder = tempfile::tempdir().unwrap();
    for json in [&[][..], &["--json"]] {
        let command =
            ["check", "--shapes", "tiny", "--seeds", "1", "--device", "sim", "--kernels", "sdpa_v1"];
        let args = [&command[..], &["--dtype", "u8,e4m3"], json].concat();
        let output = evosdpa(folder.path(), &args);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains("nothing could be checked:\n  sdpa_v1: "), "{args:?}: {message}");
        for dtype in ["u8", "e4m3"] {
            let reason = format!("not supported by `sdpa_v1`: it reads f16, bf16, not {dtype}");
            assert!(message.contains(&reason), "{args:?}: {message}");
        }
    }
    // With something that runs, what does not is no failure.
    let some = ["check", "--device", "cpu", "--shapes", "tiny", "--seeds", "1", "--dtype", "u8,f32"];
    assert_eq!(evosdpa(folder.path(), &some).status.code(), Some(0));
}

#[test]
fn families_are_those_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let base =
        ["check", "--json", "--device", "cpu", "--kernels", "cpu_naive", "--shapes", "tiny,tiny:causal"];
    let families = |asked: &[&str]| -> Vec<String> {
        let output =
            evosdpa(folder.path(), &[&base[..], &["--seeds", "1", "--dtype", "f32"], asked].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = document["rows"].as_array().unwrap();
        rows.iter().map(|row| row["family"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        families(&["--families", "large-logits,zeros"]),
        ["large-logits", "zeros", "large-logits", "zeros"]
    );
    assert_eq!(families(&[]).len(), 2 * Family::ALL.len());
}
