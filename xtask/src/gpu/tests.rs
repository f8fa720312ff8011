//! Against a program that only pretends to be `evosdpa`.

use std::{fs, os::unix::fs::PermissionsExt};

use super::{plan::Program, *};

/// Says which revision it is, counts its calls and answers by its first argument.
const FAKE: &str = r#"#!/bin/sh
here=$(dirname "$0")
case "$1" in
  kernels) echo "{\"environment\": {\"revision\": \"$(cat "$here/revision")\", \"dirty\": \"false\"}}"; exit ;;
esac
echo "$1" >> "$here/calls"
case "$1" in
  slow) sleep 60 ;;
  fail) echo '{"rows": [{"gates": [{"verdict": "FAIL"}, {"verdict": "PASS"}]}]}'; exit 1 ;;
  broken) echo '{"rows": []}'; echo 'error: no CUDA driver' >&2; exit 2 ;;
  junk) echo 'Welcome' ;;
  *) echo '{"rows": [{"gates": [{"verdict": "PASS"}, {"verdict": "UNAVAILABLE"}], "mistake": [{"verdict": "FAIL"}]}]}' ;;
esac
"#;

struct Scene {
    folder: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("evosdpa");
        fs::write(&program, FAKE).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let scene = Self { folder };
        scene.revision("aaaa");
        scene
    }

    fn revision(&self, revision: &str) {
        fs::write(self.folder.path().join("revision"), revision).unwrap();
    }

    fn options(&self) -> Options {
        let binary = Some(self.folder.path().join("evosdpa"));
        Options {
            binary,
            out: self.folder.path().join("out"),
            ..Options::parse(&["--budget", "1h"]).unwrap()
        }
    }

    fn walk(&self, steps: &[Step]) -> Vec<Line> {
        walk(&self.options(), steps).unwrap()
    }

    /// What was run since this was last asked.
    fn calls(&self) -> String {
        let path = self.folder.path().join("calls");
        let calls = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(&path);
        calls.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path().join("out")).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn step(name: &str) -> Step {
    let program = Program::Evosdpa(vec![name.to_owned()]);
    let (about, limit) = (Duration::ZERO, Duration::from_secs(20));
    Step { name: name.to_owned(), asks: "is it?", program, about, limit, expected: 0 }
}

fn states(lines: &[Line]) -> Vec<State> {
    lines.iter().map(|line| line.state).collect()
}

#[test]
fn what_this_revision_has_is_not_run_again() {
    let scene = Scene::new();
    let steps = [step("one"), step("two")];
    // The first run is cut off after one step.
    assert_eq!(states(&scene.walk(&steps[..1])), [State::Fresh]);
    assert_eq!(scene.calls(), "one");
    let lines = scene.walk(&steps);
    assert_eq!((states(&lines), scene.calls().as_str()), (vec![State::Fresh; 2], "two"));
    assert_eq!((scene.walk(&steps).len(), scene.calls().as_str()), (2, ""));
    assert_eq!(exit_code(&lines), 0);
    assert_eq!(scene.files(), ["one.json", "two.json"]);
    let document: Value =
        serde_json::from_slice(&fs::read(scene.folder.path().join("out/one.json")).unwrap()).unwrap();
    assert_eq!((&document["step"]["revision"], &document["step"]["exit"]), (&"aaaa".into(), &0.into()));
    assert_eq!(document["step"]["command"], serde_json::json!(["evosdpa", "one", "--json"]));
    assert!(document["rows"].is_array());
}

#[test]
fn another_revision_makes_everything_stale_and_is_measured_again() {
    let scene = Scene::new();
    let steps = [step("one"), step("two")];
    scene.walk(&steps);
    scene.calls();
    scene.revision("bbbb");
    let listed = walk(&Options { list: true, ..scene.options() }, &steps).unwrap();
    assert_eq!((states(&listed), scene.calls().as_str()), (vec![State::Stale; 2], ""));
    assert_eq!(exit_code(&listed), 2);
    assert!(
        page(&listed).contains("0 fresh, 2 stale, 0 missing; what is not fresh takes about 0 min"),
        "{}",
        page(&listed)
    );
    let only = Options { only: vec!["two".to_owned()], ..scene.options() };
    assert_eq!(states(&walk(&only, &steps).unwrap()), [State::Stale, State::Fresh]);
    assert_eq!(scene.calls(), "two");
    assert_eq!(states(&scene.walk(&steps)), [State::Fresh; 2]);
    let unknown = Options { only: vec!["three".to_owned()], ..scene.options() };
    assert!(walk(&unknown, &steps).unwrap_err().to_string().contains("there are one, two"));
}

#[test]
fn a_spent_budget_leaves_the_rest_for_the_next_run() {
    let scene = Scene::new();
    let long = Step { about: Duration::from_secs(7200), ..step("long") };
    let lines = scene.walk(&[long, step("one")]);
    // What is too long for what is left is passed over; what fits is still run.
    assert_eq!((states(&lines), scene.calls().as_str()), (vec![State::Missing, State::Fresh], "one"));
    assert_eq!(lines[0].note, "the budget is spent");
    assert_eq!(exit_code(&lines), 2);
}

#[test]
fn what_does_not_end_or_does_not_work_leaves_no_document_and_keeps_the_old_one() {
    let scene = Scene::new();
    let short = |name: &str| Step { limit: Duration::from_millis(300), ..step(name) };
    let old = r#"{"step": {"revision": "old", "exit": 0, "expected": 0}}"#;
    fs::create_dir(scene.folder.path().join("out")).unwrap();
    fs::write(scene.folder.path().join("out/slow.json"), old).unwrap();
    // As a run leaves it that was killed while a foreign program wrote.
    fs::write(scene.folder.path().join("out/cut.json"), r#"{"step": {"revi"#).unwrap();
    let lines = scene.walk(&[short("slow"), step("broken"), step("junk"), step("cut")]);
    assert_eq!(states(&lines), [State::Stale, State::Missing, State::Missing, State::Fresh]);
    assert!(lines[0].note.starts_with("ended after"), "{}", lines[0].note);
    assert!(lines[1].note.contains("no CUDA driver"), "{}", lines[1].note);
    assert_eq!(fs::read_to_string(scene.folder.path().join("out/slow.json")).unwrap(), old);
    assert_eq!(scene.files(), ["cut.json", "slow.json"]);
    assert_eq!(exit_code(&lines), 2);
}

#[test]
fn a_failed_gate_is_a_fact_and_fails_the_command_unless_it_was_to_fail() {
    let scene = Scene::new();
    let lines = scene.walk(&[step("one"), step("fail")]);
    assert_eq!((states(&lines), exit_code(&lines)), (vec![State::Fresh; 2], 1));
    let shown = page(&lines);
    assert!(shown.contains("FAILED") && shown.contains("1 PASS, 1 FAIL, 0 UNAVAILABLE"), "{shown}");
    assert!(shown.contains("1 PASS, 0 FAIL, 1 UNAVAILABLE"), "{shown}");
    fs::remove_file(scene.folder.path().join("out/fail.json")).unwrap();
    assert_eq!(exit_code(&scene.walk(&[Step { expected: 1, ..step("fail") }])), 0);
}

#[test]
fn the_plan_has_every_step_once_and_the_grid_whole() {
    let steps = plan::steps();
    let mut names: Vec<&str> = steps.iter().map(|step| step.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), steps.len());
    let all: Duration = steps.iter().map(|step| step.about).sum();
    assert!(all <= Duration::from_secs(40 * 60), "everything takes {all:?}");
    let shapes = |step: &Step| match &step.program {
        Program::Evosdpa(arguments) => {
            let at = arguments.iter().position(|argument| argument == "--shapes");
            at.map(|at| arguments[at + 1].clone())
        }
        _ => None,
    };
    let grid: Vec<String> =
        steps.iter().filter(|step| step.name.starts_with("grid-")).filter_map(shapes).collect();
    let rows: Vec<&str> = grid.iter().flat_map(|shapes| shapes.split(',')).collect();
    assert_eq!(rows.len(), 36);
    for row in ["b32h32s512d64", "b1h8s16384d256:causal", "b8h16s2048d128:causal"] {
        assert!(rows.contains(&row), "{rows:?}");
    }
}

#[test]
fn times_are_read() {
    assert_eq!(duration("10m").unwrap(), Duration::from_secs(600));
    assert_eq!(duration("90s").unwrap(), Duration::from_secs(90));
    for wrong in ["", "10", "m", "-1m", "0s", "1d", "10.5m"] {
        assert!(duration(wrong).is_err(), "{wrong}");
    }
}
