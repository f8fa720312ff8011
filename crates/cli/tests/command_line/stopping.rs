//! Being asked to stop: what is finished stays, and nothing is waited for.

use std::{
    fs,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use assert_cmd::cargo::cargo_bin;
use serde_json::Value;

use crate::{evosdpa, json, text};

#[test]
fn ctrl_c_keeps_the_finished_shapes() {
    stopping_keeps_the_finished_shapes("-INT", 1);
}

/// What `timeout`, a scheduler or a shutdown sends; `timeout` sends it twice, to the program and to its process group.
#[test]
fn being_asked_to_end_keeps_the_finished_shapes() {
    stopping_keeps_the_finished_shapes("-TERM", 2);
}

fn stopping_keeps_the_finished_shapes(signal: &str, times: usize) {
    let folder = tempfile::tempdir().unwrap();
    let args = ["bench", "--no-baselines", "--shapes", "tiny,b4h8s1024d64", "--iters", "10000", "--json"];
    let child = Command::new(cargo_bin!("evosdpa"))
        .args(args)
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let finished = |name: &str| {
        let runs = fs::read_dir(folder.path().join("runs")).ok()?;
        runs.flatten().find(|run| run.path().join(name).is_file())
    };
    let start = Instant::now();
    while finished("result_tiny.json").is_none() {
        assert!(start.elapsed().as_secs() < 120, "the first shape never finished");
        thread::sleep(Duration::from_millis(50));
    }
    for _ in 0..times {
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(json(&output)["rows"].as_array().unwrap().len(), 3);
    let run = finished("summary.json").unwrap().path();
    let summary: Value =
        serde_json::from_str(&fs::read_to_string(run.join("summary.json")).unwrap()).unwrap();
    assert_eq!(summary["status"], "interrupted");
    assert!(!run.join("result_b4h8s1024d64.json").exists());
}

/// A step that would take minutes is not waited for.
#[test]
fn being_asked_to_stop_ends_a_long_step() {
    let folder = tempfile::tempdir().unwrap();
    for args in [
        &["check", "--device", "cpu", "--shapes", "b8h16s4096d128", "--kernels", "cpu_naive"][..],
        &[
            "bench",
            "--device",
            "cpu",
            "--shapes",
            "b8h16s4096d128",
            "--no-baselines",
            "--iters",
            "1000",
            "--json",
        ],
        &["bench", "--device", "cpu", "--shapes", "b8h16s4096d128", "--no-baselines", "--repeat", "3"],
    ] {
        let runs = || fs::read_dir(folder.path().join("runs")).map_or(0, Iterator::count);
        let before = runs();
        let child = Command::new(cargo_bin!("evosdpa"))
            .args(args)
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // A run has its folder once it has something to say when it ends; on a busy machine that takes longer than a sleep.
        let start = Instant::now();
        while args[0] == "bench" && runs() == before {
            assert!(start.elapsed().as_secs() < 120, "{args:?} never began");
            thread::sleep(Duration::from_millis(50));
        }
        // Whether it has begun its long step shows nowhere; before that it is not harder to stop.
        thread::sleep(Duration::from_secs(2));
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        let asked = Instant::now();
        let output = child.wait_with_output().unwrap();
        // Two seconds, were the machine this test's alone.
        assert!(asked.elapsed().as_secs() < 60, "{args:?} took {:?}", asked.elapsed());
        assert_eq!(output.status.code(), Some(130), "{args:?}: {}", text(&output.stdout));
        if args.contains(&"--json") {
            assert_eq!(json(&output)["rows"].as_array().unwrap().len(), 0);
        }
    }
    let listed = json(&evosdpa(folder.path(), &["runs", "--json"]));
    for run in listed["rows"].as_array().unwrap() {
        assert_eq!(run["status"], "interrupted", "{run}");
    }
}
