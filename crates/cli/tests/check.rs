//! `check` as its users meet it: what passes, what a forced control does, which cases are asked for; and how wide any command prints.

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

#[test]
fn what_is_printed_is_no_wider_than_a_table() {
    let folder = tempfile::tempdir().unwrap();
    for args in [
        &["plan", "--explain", "b2h32/8s4096d128:causal,mission", "--arch", "sm_90a"][..],
        &["check", "--shapes", "mission:causal:causal"],
        &["check", "--force", "zeros", "--shapes", "tiny", "--seeds", "1", "--kernels", "cpu_naive"],
        &["report", "nothing-of-that-name"],
        &["build", "--parse", "/etc/passwd"],
    ] {
        let output = evosdpa(folder.path(), args);
        let page = text(&output.stdout) + &text(&output.stderr);
        let wide: Vec<&str> = page.lines().filter(|line| line.chars().count() > 100).collect();
        // A word stays whole, whatever its length.
        assert!(wide.iter().all(|line| !line.trim().contains(' ')), "{args:?}: {wide:#?}");
        assert!(page.lines().count() > 1, "{args:?}: {page}");
    }
    // Documents for programs are as they are.
    let output = evosdpa(folder.path(), &["plan", "mission", "--arch", "sm_90a", "--json"]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(document["rows"].is_array());
}

#[test]
fn a_folder_without_a_kernel_and_a_file_without_winners_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("helper.cuh"), "").unwrap();
    std::fs::write(folder.path().join("elite.json"), "root:x:0:0").unwrap();
    for (args, words) in [
        (
            &["build", "--kernel-path", "."][..],
            "there is no kernel in .: expected NAME.toml with its NAME.cu",
        ),
        (&["apply", "/dev/zero"], "/dev/zero is larger than 256 MiB"),
        (&["profile", "--import", "/dev/zero", "--shape", "tiny"], "/dev/zero is larger than 256 MiB"),
        (&["apply", "elite.json"], "expected the elite.json that `evosdpa tune` leaves"),
    ] {
        let output = evosdpa(folder.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stdout));
        let said = text(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(words), "{args:?}: {said}");
    }
    // A line of any length is not quoted whole.
    std::fs::write(folder.path().join("table.toml"), format!("a={}", "[".repeat(50_000))).unwrap();
    let plan = Command::new(cargo_bin!("evosdpa"))
        .args(["plan", "tiny", "--arch", "sm_90a"])
        .env("EVOSDPA_TUNED", folder.path().join("table.toml"))
        .output()
        .unwrap();
    assert_eq!(plan.status.code(), Some(2));
    assert!((100..3000).contains(&plan.stderr.len()), "{}", plan.stderr.len());
}
