//! `evosdpa tune` as its users meet it: killed, resumed, fooled by proposers, replayed.

use std::{
    collections::HashSet,
    path::Path,
    process::{Command, Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use assert_cmd::cargo::cargo_bin;
use evosdpa_oracle::rng::Rng;
use serde_json::Value;

fn evosdpa(folder: &Path, args: &[&str]) -> Output {
    Command::new(cargo_bin!("evosdpa")).args(args).current_dir(folder).env("NO_COLOR", "1").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Tunes measure: one at a time, so that they are not measured against each other.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A tune of a small problem with few blocks.
const QUICK: [&str; 11] =
    ["tune", "--device", "cpu", "--shapes", "tiny", "--blocks", "12", "--evaluations", "14", "--out", "t"];

/// The whole lines of a log.
fn lines(folder: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("t/log.jsonl")).unwrap_or_default();
    text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(str::to_owned).collect()
}

fn evaluations(folder: &Path) -> Vec<Value> {
    let parsed = lines(folder).into_iter().map(|line| serde_json::from_str::<Value>(&line).unwrap());
    parsed.filter(|line| line["kind"] == "evaluation").collect()
}

fn elite_file(folder: &Path) -> Option<Value> {
    let text = std::fs::read_to_string(folder.join("t/elite.json")).ok()?;
    Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("half an elite.json: {error}")))
}

#[test]
fn killed_at_any_moment_and_resumed_nothing_is_lost_or_repeated() {
    let _turn = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let mut seen: Vec<String> = Vec::new();
    let mut kills = 0;
    // Moments that no two runs share.
    let mut moments = Rng::new(Rng::entropy());
    loop {
        let resume: &[&str] = if path.join("t/log.jsonl").exists() { &["--resume"] } else { &[] };
        let mut child = Command::new(cargo_bin!("evosdpa"))
            .args([&QUICK[..], resume].concat())
            .current_dir(path)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let until_killed = Duration::from_millis(500 + moments.below(1_200) as u64);
        let started = std::time::Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if kills < 6 && started.elapsed() > until_killed {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        // What was on the disk is still there, in the same order.
        let now = lines(path);
        assert!(now.starts_with(&seen), "{} lines were {}", seen.len(), now.len());
        seen = now;
        let _ = elite_file(path);
        match status {
            None => kills += 1,
            Some(status) => {
                let mut message = String::new();
                std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut message).unwrap();
                assert!(status.success(), "{message}");
                break;
            }
        }
    }
    let all = evaluations(path);
    let numbers: Vec<u64> = all.iter().map(|line| line["number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..14).collect::<Vec<u64>>(), "after {kills} kills");
    let points: HashSet<String> = all.iter().map(|line| line["point"].to_string()).collect();
    assert_eq!(points.len(), 14, "a point was evaluated twice");
    let elites = elite_file(path).unwrap();
    assert_eq!(elites["schema"], "evosdpa.elite/1");
    assert!((1..=3).contains(&elites["elites"].as_array().unwrap().len()));
    // One more resume has nothing to do.
    let output = evosdpa(path, &[&QUICK[..], &["--resume"]].concat());
    assert!(
        output.status.success() && text(&output.stdout).contains("(0 of them now)"),
        "{}",
        text(&output.stdout)
    );
}

/// Whether it wins is the machine's to say; that a winner is found and confirmed is shown on a simulated clock, in the lab's tests.
#[test]
fn a_tune_says_what_it_found_and_its_log_compares_strategies() {
    let _turn = alone();
    let folder = tempfile::tempdir().unwrap();
    let output = evosdpa(folder.path(), &[&QUICK[..], &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let elites = &document["rows"][0]["elites"];
    assert!(elites["elites"][0]["fitness"].as_f64().unwrap() >= 1.0, "{elites}");
    let confirmed = &elites["confirmation"];
    assert!(confirmed.is_null() || confirmed["confirmed"].is_boolean(), "{elites}");

    // The log of it compares strategies without measuring anything.
    let output = evosdpa(
        folder.path(),
        &["tune", "--simulate", "t/log.jsonl", "--evaluations", "10", "--replays", "20"],
    );
    let page = text(&output.stdout);
    assert!(
        output.status.success()
            && ["evo", "random", "grid", "hill-climb"].iter().all(|name| page.contains(name)),
        "{page}"
    );
}

#[test]
fn a_proposer_that_misbehaves_costs_evaluations_and_not_the_tune() {
    let _turn = alone();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("proposer.sh");
    // Crashes, answers junk, hangs, proposes something impossible, then something good.
    std::fs::write(
        &program,
        r#"while read -r line; do
n=$(cat count 2>/dev/null || echo 0); echo $((n+1)) > count
case $n in
0) exit 1;; 1) echo junk;; 2) exec sleep 30;; 3) echo '{"tunables":{"BLOCK_Q":7}}';; 4) echo '{"source":"int main;"}';;
*) echo '{"tunables":{"BLOCK_Q":96,"BLOCK_KV":32},"rationale":"smaller"}';;
esac
done
"#,
    )
    .unwrap();
    let args = [
        "tune",
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--blocks",
        "12",
        "--evaluations",
        "7",
        "--out",
        "t",
        "--proposer",
        "sh proposer.sh",
        "--proposer-timeout",
        "0.5",
    ];
    let output = evosdpa(folder.path(), &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let all = evaluations(folder.path());
    assert_eq!(all.len(), 7);
    for (evaluation, why) in all[1..6].iter().zip([
        "ended without",
        "no proposal",
        "did not answer",
        "BLOCK_Q is 7",
        "part of the program",
    ]) {
        let detail = evaluation["gates"][0]["detail"].as_str().unwrap();
        assert!(detail.contains(why) && evaluation["status"] == "rejected", "{why}: {detail}");
    }
    assert_eq!(
        (all[6]["operator"].as_str(), all[6]["rationale"].as_str()),
        (Some("proposer"), Some("smaller"))
    );
    assert!(all[6]["fitness"].is_number() || all[6]["status"] == "out", "{}", all[6]);
}

#[test]
fn the_example_proposer_proposes() {
    let _turn = alone();
    let folder = tempfile::tempdir().unwrap();
    let program = concat!("python3 ", env!("CARGO_MANIFEST_DIR"), "/../../examples/proposer/proposer.py");
    let args = [&QUICK[..7], &["--evaluations", "4", "--out", "t", "--proposer", program]].concat();
    let output = evosdpa(folder.path(), &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let all = evaluations(folder.path());
    assert_eq!(all.len(), 4);
    assert!(all[1..].iter().all(|e| e["rationale"].is_string() && e["status"] != "rejected"), "{all:?}");
}

#[test]
fn bad_input_exits_2_and_says_what_to_do() {
    let _turn = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let tune = |args: &[&str]| evosdpa(path, &[&["tune", "--device", "cpu"], args].concat());
    std::fs::create_dir(path.join("held")).unwrap();
    let lock = std::fs::File::create(path.join("held/lock")).unwrap();
    lock.lock().unwrap();
    std::fs::write(path.join("cut.jsonl"), "{\"kind\":\"head").unwrap();
    for (args, expected) in [
        (&["--strategy", "evoo", "--out", "a"][..], "did you mean `evo`"),
        (&["--kernel", "cpu_naive", "--out", "a"], "nothing to tune"),
        (&["--kernel", "cpu_flsh", "--out", "a"], "did you mean `cpu_flash`"),
        (&["--resume", "--out", "a"], "no tune to resume"),
        (&["--shapes", "tiny", "--out", "held"], "another tune is at work"),
        (&["--prior", "nothing.json", "--out", "a"], "--prior"),
        (&["--simulate", "nothing.jsonl"], "nothing.jsonl"),
        (&["--simulate", "cut.jsonl"], "line 1 is damaged"),
        (&["--simulate", "x", "--kernel", "y"], "cannot be used with"),
    ] {
        let output = tune(args);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(expected), "{args:?}: {message}");
    }
    let help = text(&evosdpa(path, &["tune", "--help"]).stdout);
    assert!(help.contains("Examples:") && help.lines().all(|line| line.chars().count() <= 100), "{help}");
}

/// The winner of a tune on a CPU is what the library then plans with, there and for problems like it.
#[test]
fn a_tune_on_a_cpu_can_be_applied() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("tuned.toml");
    let run = |args: &[&str]| {
        let output = Command::new(cargo_bin!("evosdpa"))
            .args(args)
            .current_dir(folder.path())
            .env("EVOSDPA_TUNED", &table)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let planned = |shape: &str| -> Value {
        let document: Value =
            serde_json::from_str(&run(&["plan", shape, "--device", "cpu", "--json"])).unwrap();
        document["rows"][0].clone()
    };
    let plain = planned("tiny");
    let isa = plain["device"].as_str().unwrap().trim_start_matches("cpu (").trim_end_matches(')').to_owned();
    let environment: Value = serde_json::from_str(&run(&["kernels", "--json"])).unwrap();
    let shapes = serde_json::json!({"tiny": {"speedup": 1.2, "p50_us": 3.0, "dtype": "f32"}});
    let elites = serde_json::json!({
        "schema": "evosdpa.elite/1",
        "device": {"name": environment["environment"]["cpu"], "arch": isa},
        "elites": [{
            "kernel": "cpu_flash", "evaluation": 4, "shapes": shapes,
            "tunables": {"BLOCK_Q": 16, "BLOCK_KV": 32, "THREADS": 1},
        }],
        "confirmation": {"number": 4, "confirmed": true, "shapes": shapes},
    });
    std::fs::write(folder.path().join("elite.json"), elites.to_string()).unwrap();
    assert!(run(&["apply", "elite.json"]).contains("1 rows for"));
    let row = planned("tiny");
    assert_eq!(row["tunables"], serde_json::json!({"BLOCK_Q": 16, "BLOCK_KV": 32, "THREADS": 1}));
    assert!(row["from"].as_str().unwrap().starts_with("row 1 of "), "{row}");
    // Of the same class, and of another.
    assert_eq!(planned("b1h1s40d64")["tunables"]["BLOCK_KV"], 32);
    assert_eq!(planned("mission")["tunables"], plain["tunables"]);
    // What is benchmarked is what is shipped.
    let bench: Value = serde_json::from_str(&run(&[
        "bench",
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--iters",
        "3",
        "--no-baselines",
        "--json",
    ]))
    .unwrap();
    assert_eq!(bench["rows"][0]["variant"], "cpu_flash[BLOCK_KV=32 BLOCK_Q=16 THREADS=1]");
    assert!(bench["rows"][0]["roofline"].as_f64().unwrap() > 0.0);
}
