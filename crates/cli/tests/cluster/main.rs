//! `evosdpa tune --evaluators`: several processes measure for one tune. They are lost, slow, mad, or under a real Slurm whose node
//! dies; the log is that of a tune alone.

mod slurm;

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use assert_cmd::cargo::cargo_bin;
use serde_json::Value;

/// What each tune here evaluates: points drawn by chance, which do not depend on what was measured.
const TUNE: [&str; 15] = [
    "tune",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--shapes",
    "tiny",
    "--blocks",
    "8",
    "--strategy",
    "random",
    "--seed",
    "5",
    "--evaluations",
    "40",
];

/// What starts evaluators under Slurm.
const LAUNCHER: &str = "srun -N1 -n1 --exact";

fn command(folder: &Path, out: &str, more: &[&str]) -> Command {
    let mut command = Command::new(cargo_bin!("evosdpa"));
    command.args(TUNE).args(["--out", out]).args(more).current_dir(folder).env("NO_COLOR", "1");
    command
}

fn run(folder: &Path, out: &str, more: &[&str]) -> Output {
    command(folder, out, more).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Tunes measure: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn evaluations(folder: &Path, out: &str) -> Vec<Value> {
    let log = fs::read_to_string(folder.join(out).join("log.jsonl")).unwrap_or_default();
    let whole = log.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let parsed = whole.map(|line| serde_json::from_str::<Value>(line).unwrap());
    parsed.filter(|line| line["kind"] == "evaluation").collect()
}

/// Which points in which order, and that nothing is missing or doubled.
fn points(evaluations: &[Value]) -> Vec<String> {
    for (number, evaluation) in evaluations.iter().enumerate() {
        assert_eq!(evaluation["number"], number, "{evaluation}");
    }
    evaluations.iter().map(|evaluation| evaluation["point"].to_string()).collect()
}

/// How many each evaluator did.
fn shares(evaluations: &[Value]) -> BTreeMap<String, usize> {
    let mut shares = BTreeMap::new();
    for evaluation in evaluations {
        *shares.entry(evaluation["by"].as_str().unwrap_or("nobody").to_owned()).or_default() += 1;
    }
    shares
}

fn assert_like_one_alone(folder: &Path, out: &str, output: &Output) {
    assert!(output.status.success(), "{out}: {}", text(&output.stderr));
    assert_eq!(points(&evaluations(folder, out)), points(&evaluations(folder, "alone")), "{out}");
}

/// A launcher of the test: what it does before it becomes the evaluator, or instead.
fn launcher(folder: &Path, name: &str, script: &str) -> String {
    fs::write(folder.join(name), script).unwrap();
    format!("sh {}", folder.join(name).display())
}

/// One that lives, however the others fare.
const ONE_LIVES: &str = "[ \"$EVOSDPA_EVALUATOR\" = 0 ] && exec \"$@\"\n";

#[test]
fn several_evaluators_evaluate_what_one_does_whatever_becomes_of_them() {
    let _turn = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert!(run(path, "alone", &[]).status.success());
    assert_eq!(evaluations(path, "alone").len(), 40);

    let plain = run(path, "plain", &["--evaluators", "2"]);
    assert_like_one_alone(path, "plain", &plain);
    let shares = shares(&evaluations(path, "plain"));
    assert_eq!(shares.len(), 2, "{shares:?}");

    // Each is lost in the middle of its work: killed, stopped without a word, gone mad, or never there.
    let once_it_has_worked = |out: &str, deed: &str| {
        let wait = format!("until grep -q '#1\"' {}/{out}/log.jsonl; do sleep 0.01; done", path.display());
        // A shell gives what it starts in the background no input.
        let start = "exec 3<&0\n\"$@\" <&3 & evaluator=$!";
        format!("{ONE_LIVES}{start}\n({wait}; {deed} $evaluator) > /dev/null 2>&1 &\nwait $evaluator")
    };
    for (name, script, said) in [
        ("killed", once_it_has_worked("killed", "kill -9"), "is lost (it ended"),
        ("stopped", once_it_has_worked("stopped", "kill -STOP"), "is lost (nothing was heard of it for 5 s)"),
        (
            "mad",
            format!("{ONE_LIVES}echo hello; echo '\"alive\"'; echo mad; sleep 60"),
            "it said `mad`, which is no answer",
        ),
        ("absent", format!("{ONE_LIVES}echo no such partition >&2; exit 1"), "no such partition"),
    ] {
        let launcher = launcher(path, &format!("{name}.sh"), &script);
        let silence = if name == "stopped" { "5" } else { "60" };
        let output =
            run(path, name, &["--evaluators", "2", "--launcher", &launcher, "--evaluator-silence", silence]);
        assert_like_one_alone(path, name, &output);
        let told = text(&output.stderr);
        assert!(told.contains(said), "{name}: {told}");
    }
}

/// The page's example is run as it stands, and its table names the launcher that is tested.
#[test]
fn the_examples_of_the_page_work() {
    let _turn = alone();
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/clusters.md")).unwrap();
    assert!(page.contains(&format!("--launcher '{LAUNCHER}'")));
    let example = page.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let programs = Path::new(cargo_bin!("evosdpa")).parent().unwrap().to_owned();
    let path = std::env::join_paths(
        [programs].into_iter().chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    let output = Command::new("sh")
        .args(["-ec", example])
        .current_dir(folder.path())
        .env("PATH", path.unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(points(&evaluations(folder.path(), "tunes/two")).len(), 8);
}

#[test]
fn a_tune_without_evaluators_ends_with_the_reasons() {
    let _turn = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for (launcher, why) in [
        ("false", "it ended"),
        ("/nowhere/srun", "/nowhere/srun"),
        ("env EVOSDPA_EVALUATOR=0 sh -c 'echo busy >&2; exit 1'", "busy"),
    ] {
        let output = run(path, "t", &["--evaluators", "2", "--launcher", launcher]);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{launcher}: {told}");
        let error = told.lines().find(|line| line.starts_with("error:")).unwrap_or_default().to_owned();
        assert!(told.contains("no evaluator is left") && told.contains(why), "{launcher}: {error}");
        assert!(!path.join("t").exists(), "{launcher} leaves a folder");
    }
    // What no evaluator could do is said once, in its own words.
    let output = run(path, "t", &["--evaluators", "2", "--kernel", "cpu_naive"]);
    assert!(text(&output.stderr).contains("cpu_naive has nothing to tune"), "{}", text(&output.stderr));
    let output = Command::new(cargo_bin!("evosdpa")).args(["tune", "--evaluators", "2"]).output().unwrap();
    assert!(text(&output.stderr).contains("--device cpu or --device cuda"), "{}", text(&output.stderr));
}

/// The tune itself is killed, with evaluators at work; resumed it goes on, and no evaluator is left behind.
#[test]
fn a_killed_tune_leaves_no_evaluators_and_goes_on() {
    let _turn = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert!(run(path, "alone", &[]).status.success());
    let mut killed = command(path, "t", &["--evaluators", "2"])
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("four evaluations", || evaluations(path, "t").len() >= 4);
    let evaluators = children(killed.id());
    assert_eq!(evaluators.len(), 2);
    killed.kill().unwrap();
    killed.wait().unwrap();
    wait_for("the evaluators to end", || {
        evaluators.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    });
    let before = evaluations(path, "t");
    let output = run(path, "t", &["--evaluators", "2", "--resume"]);
    assert_like_one_alone(path, "t", &output);
    assert!(evaluations(path, "t").starts_with(&before));
}

fn children(parent: u32) -> Vec<u32> {
    let of = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        fields.get(1).and_then(|field| field.parse::<u32>().ok()) == Some(parent)
    };
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(of).collect()
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends a child that a failed assertion would leave behind.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn under_slurm_a_node_dies_in_the_middle() {
    let _turn = alone();
    let cluster = match slurm::Cluster::start() {
        Ok(cluster) => cluster,
        Err(why) => {
            println!("UNAVAILABLE: under_slurm_a_node_dies_in_the_middle: {why}");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert!(run(path, "alone", &[]).status.success());
    let arguments = ["--evaluators", "2", "--launcher", LAUNCHER, "--evaluator-silence", "5"];
    let mut tune = Ended(
        command(path, "t", &arguments)
            .env("SLURM_CONF", cluster.configuration())
            .stderr(fs::File::create(path.join("stderr")).unwrap())
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    // Both have worked; then the second node is gone, with all that ran on it.
    let worked =
        |node: &str| evaluations(path, "t").iter().any(|e| e["by"].as_str().unwrap_or("").starts_with(node));
    wait_for("work from both nodes", || {
        (worked("n1") && worked("n2")) || tune.0.try_wait().unwrap().is_some()
    });
    cluster.kill_node("n2");
    let status = tune.0.wait().unwrap();
    let told = fs::read_to_string(path.join("stderr")).unwrap();
    assert!(status.success(), "{told}");
    let all = evaluations(path, "t");
    assert_eq!(points(&all), points(&evaluations(path, "alone")), "{told}");
    println!("PASS: under Slurm, with a node killed: {:?}", shares(&all));
}
