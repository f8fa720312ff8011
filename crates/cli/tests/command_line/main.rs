//! The program as its users meet it: arguments, exit status, what is printed and what is left on disk.

mod stopping;

use std::{
    path::Path,
    process::{Command, Output},
};

use assert_cmd::cargo::cargo_bin;
use serde_json::Value;

fn evosdpa(folder: &Path, args: &[&str]) -> Output {
    Command::new(cargo_bin!("evosdpa")).args(args).current_dir(folder).env("NO_COLOR", "1").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The same with its broken lines joined again.
fn joined(bytes: &[u8]) -> String {
    text(bytes).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)))
}

/// A quick benchmark: small shape, few calls, no baseline.
const QUICK: [&str; 8] =
    ["bench", "--no-baselines", "--shapes", "tiny,tiny:causal", "--iters", "20", "--warmup", "2"];

#[test]
fn bench_prints_a_table_and_records_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let output = evosdpa(folder.path(), &QUICK);
    let page = text(&output.stdout);
    assert!(output.status.success(), "{page}{}", joined(&output.stderr));
    assert!(page.contains("tiny:causal f32  auto → cpu_flash  PASS"), "{page}");
    assert!(page.contains("torch: UNAVAILABLE"), "{page}");
    assert!(
        page.lines().filter(|line| line.contains("cpu_")).all(|line| line.chars().count() <= 100),
        "{page}"
    );
    assert!(output.stderr.is_empty(), "no progress bar off a terminal: {}", joined(&output.stderr));

    let run = std::fs::read_dir(folder.path().join("runs")).unwrap().next().unwrap().unwrap().path();
    let mut names: Vec<_> = std::fs::read_dir(run)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["result_tiny.causal.json", "result_tiny.json", "run.md", "summary.json"]);
}

#[test]
fn bench_json_is_one_document_with_every_field() {
    let folder = tempfile::tempdir().unwrap();
    let output = evosdpa(folder.path(), &[&QUICK[..], &["--kernels", "all", "--json"]].concat());
    let document = json(&output);
    assert_eq!(document["schema"], "evosdpa.bench/1");
    assert!(document["environment"]["fma_peak_gflops"].as_f64().unwrap() > 0.1);
    let rows = document["rows"].as_array().unwrap();
    // Two kernels, what the library would run, and two absent baselines on each of two shapes.
    assert_eq!(rows.len(), 10);
    for row in rows {
        if row["peer"] == true {
            assert_eq!(row["gates"][0]["verdict"], "UNAVAILABLE");
            assert_eq!((row["p50_us"].as_f64(), row["samples_us"].as_array().unwrap().len()), (None, 0));
            continue;
        }
        assert_eq!(row["gates"][0]["gate"], "correctness");
        assert!(row["gates"].as_array().unwrap().iter().all(|gate| gate["verdict"] == "PASS"), "{row}");
        assert_eq!(row["samples_us"].as_array().unwrap().len(), 20);
        let (p50, p90, p99) = (row["p50_us"].as_f64(), row["p90_us"].as_f64(), row["p99_us"].as_f64());
        assert!(p50.unwrap() > 0.0 && p50 <= p90 && p90 <= p99);
        assert!(row["gflops"].as_f64().unwrap() > 0.0);
    }
    assert!(rows[1]["speedup"]["cpu_naive"]["ratio"].as_f64().unwrap() > 0.0);
    assert_eq!((&rows[2]["kernel"], &rows[2]["variant"]), (&"auto".into(), &"cpu_flash".into()));
    assert!(rows[1]["variant"].is_null(), "{}", rows[1]);
}

#[test]
fn bench_times_lengths_of_a_family() {
    let folder = tempfile::tempdir().unwrap();
    let rated = |shape: &str, lengths: &str| {
        let output = evosdpa(
            folder.path(),
            &[
                "bench",
                "--shapes",
                shape,
                "--lengths",
                lengths,
                "--iters",
                "4",
                "--warmup",
                "1",
                "--device",
                "cpu",
                "--no-baselines",
                "--json",
            ],
        );
        assert!(output.status.success(), "{}", joined(&output.stderr));
        let row = json(&output)["rows"][0].clone();
        assert!(row["gates"].as_array().unwrap().iter().all(|gate| gate["verdict"] == "PASS"), "{row}");
        let number = |name: &str| row[name].as_f64().unwrap();
        // Operations in thousands: what rates are counted by.
        let work = (number("gflops") * number("p50_us")).round();
        (row["problem"].as_str().unwrap().to_owned(), work)
    };
    // 64 tokens each, or 64, 32, 16 and 8: pairs of queries and keys, two heads, and 128 operations a pair.
    let packed = "b4h2s64d32:varlen";
    assert_eq!(
        rated(packed, "equal"),
        (format!("{packed} f32"), (4.0 * 4096.0 * 2.0 * 128.0 / 1e3_f64).round())
    );
    let skewed = (4096.0 + 1024.0 + 256.0 + 64.0) * 2.0 * 128.0 / 1e3_f64;
    assert_eq!(rated(packed, "skewed"), (format!("{packed} f32, skewed lengths"), skewed.round()));
    // Of a cache with room for 64 keys one, and all 64 of the last.
    let used = "b4h2s1/64d32:used";
    let one = (3.0 + 64.0) * 2.0 * 128.0 / 1e3_f64;
    assert_eq!(rated(used, "one-token"), (format!("{used} f32, one-token lengths"), one.round()));
    assert!(rated("b6h2s16d32:varlen", "zeros").0.ends_with("zeros lengths"));
    let listed = (4096.0 + 3.0 * 4.0) * 2.0 * 128.0 / 1e3_f64;
    assert_eq!(rated(packed, "64,3x2"), (format!("{packed} f32, 64,3x2 lengths"), listed.round()));

    for (shape, lengths, words) in [
        ("tiny", "skewed", "has no lengths of its own"),
        (packed, "skewd", "skewed"),
        (packed, "3x64", "are of 3 sequences, and the problem has 4"),
        (packed, "4x65", "one of 65 keys, and the problem's longest has 64"),
        (packed, "4x", "COUNTxLENGTH"),
    ] {
        let output = evosdpa(folder.path(), &["bench", "--shapes", shape, "--lengths", lengths]);
        assert!(
            !output.status.success() && joined(&output.stderr).contains(words),
            "{}",
            joined(&output.stderr)
        );
    }
}

#[test]
fn lengths_are_given_once_or_for_each_shape() {
    let folder = tempfile::tempdir().unwrap();
    let asked = |lengths: &[&str]| {
        let shapes = "b2h2s9d16:varlen,b3h1s1/9d16:used";
        let check = [
            "check",
            "--shapes",
            shapes,
            "--kernels",
            "cpu_flash",
            "--dtype",
            "f32",
            "--seeds",
            "1",
            "--json",
        ];
        let lengths = lengths.iter().flat_map(|lengths| ["--lengths", lengths]);
        evosdpa(folder.path(), &check.into_iter().chain(lengths).collect::<Vec<_>>())
    };
    let output = asked(&["9,1", "3x2-9"]);
    assert!(output.status.success(), "{}", joined(&output.stderr));
    let rows = json(&output)["rows"].as_array().unwrap().clone();
    for (at, problem) in
        [(0, "b2h2s9d16:varlen f32, 9,1 lengths"), (rows.len() - 1, "b3h1s1/9d16:used f32, 3x2-9 lengths")]
    {
        assert_eq!(rows[at]["problem"], problem);
    }
    let output = asked(&["equal", "skewed", "zeros"]);
    assert!(joined(&output.stderr).contains("--lengths is given 3 times: once for all shapes, or 2 times"));
    assert!(asked(&["skewed"]).status.success());
}

#[test]
fn bench_times_what_the_library_would_run_unless_told_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let tiny =
        ["bench", "--shapes", "tiny", "--iters", "4", "--warmup", "1", "--device", "cpu", "--no-baselines"];
    let rows = |more: &[&str]| -> Vec<String> {
        let output = evosdpa(folder.path(), &[&tiny[..], more].concat());
        assert!(output.status.success(), "{}", joined(&output.stderr));
        let document = json(&output);
        let ours = document["rows"].as_array().unwrap().iter().filter(|row| row["peer"] == false);
        ours.map(|row| row["kernel"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(rows(&["--json"]), ["auto"]);
    assert_eq!(rows(&["--json", "--kernels", "cpu_naive"]), ["cpu_naive", "auto"]);
    assert_eq!(rows(&["--json", "--kernels", "auto"]), ["auto"]);
    let output = evosdpa(folder.path(), &tiny);
    assert!(text(&output.stdout).contains("auto → cpu_flash"), "{}", text(&output.stdout));
}

#[test]
fn bad_input_exits_2_names_the_value_and_leaves_nothing() {
    for (args, expected) in [
        (&["bench", "--shapes", "misson"][..], "did you mean `mission`"),
        (&["bench", "--shapes", "b0h1s1d1"], "batch is 0"),
        (&["bench", "--shapes", "b1h-1s1d1"], "positive whole number after `h`"),
        (&["bench", "--shapes", "b1h8/3s512d64"], "multiple"),
        (&["bench", "--shapes", "b1h1s1d513"], "from 1 to 512"),
        (&["bench", "--shapes", "b900000000h1000s900000000d512"], "2^63"),
        (&["bench", "--shapes", "b64h128s1000000d128"], "available"),
        (&["bench", "--kernels", "cpu_flsh"], "did you mean `cpu_flash`"),
        (&["bench", "--dtype", "fp16"], "did you mean `f16`"),
        (&["bench", "--device", "cp"], "did you mean `cpu`"),
        (&["bench", "--isa", "avx513"], "did you mean `avx512`"),
        (&["bench", "--iters", "0"], "0 is not in 1..=1000000"),
        (&["bench", "--device", "cpu", "--timing", "between"], "`between` needs a GPU"),
        (&["bench", "--peers", "cudnn"], "unknown baseline `cudnn`; allowed: torch"),
        (&["bench", "--device", "cpu", "--kernels", "hopper_fwd"], "needs a GPU: `evosdpa doctor`"),
        (&["tune", "--device", "cpu", "--kernel", "sdpa_v2c", "--shapes", "tiny"], "--device sim"),
        (&["bench", "--repeat", "0"], "0 is not in 1..=10000"),
        (&["compare", "a"], "required"),
        (&["bench", "--threads", "0"], "0 is not in 1..=4096"),
        (&["bench", "--budget", "-3"], "must be above 0"),
        (&["check", "--force", "zeroes"], "did you mean `zeros`"),
        (&["check", "--shapes", "tiny", "--families", "nromal"], "did you mean `normal`"),
        (&["check", "--families", "normal"], "--shapes"),
        (&["compare", "nothing", "here"], "no such run"),
        (&["compare", "a", "b", "--margin", "7"], "below 1"),
        (&["bnech"], "bench"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let output = evosdpa(folder.path(), args);
        let message = joined(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(expected), "{args:?}: {message}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "{args:?} left something behind");
    }
}

/// A message that cannot be written is lost, and the exit status still tells.
#[cfg(target_os = "linux")]
#[test]
fn errors_that_nobody_can_read_end_as_others_do() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&["bench", "--shapes", "misson"][..], &["compare", "a", "b"], &["nonsense"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(cargo_bin!("evosdpa"));
        let status = command.args(args).current_dir(folder.path()).stderr(full).status().unwrap();
        assert_eq!(status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_long_word_does_not_hide_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(50_000);
    for args in [&["plan", &long][..], &["bench", "--kernels", &long], &["report", &long]] {
        let output = evosdpa(folder.path(), args);
        assert_eq!(output.status.code(), Some(2));
        assert!(output.stderr.len() < 3000, "{} bytes", output.stderr.len());
    }
    assert!(joined(&evosdpa(folder.path(), &["plan", &long]).stderr).contains("there is no shape named"));
}

/// A kernel of one's own is known to the lab, and cannot run on a CPU: not its name is wrong.
#[test]
fn a_kernel_of_ones_own_needs_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let own = concat!("--kernel-path=", env!("CARGO_MANIFEST_DIR"), "/../../examples/custom-kernel");
    for args in [
        &["tune", "--device", "cpu", "--shapes", "tiny", "--kernel", "my_sdpa", own][..],
        &["bench", "--device", "cpu", "--shapes", "tiny", "--kernels", "my_sdpa", own],
        &["check", "--device", "cpu", "--shapes", "tiny", "--kernels", "my_sdpa[WARPS=8]", own],
    ] {
        let output = evosdpa(folder.path(), args);
        let message = joined(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains("my_sdpa is a CUDA kernel, which needs a GPU"), "{args:?}: {message}");
    }
}

#[test]
fn auto_says_why_there_is_no_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(cargo_bin!("evosdpa"));
        // Where there is a GPU, it is hidden.
        command.args(args).current_dir(folder.path()).env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap()
    };
    let explains = |text: &str| text.contains("no CUDA driver") || text.contains("sees no device");
    for args in [
        &["check", "--shapes", "tiny", "--seeds", "1"][..],
        &["plan", "tiny"],
        &["bench", "--shapes", "tiny", "--no-baselines", "--iters", "3"],
    ] {
        let page = text(&run(args).stdout);
        assert!(page.contains("no GPU, so on the CPU:") && explains(&page), "{page}");
        let document = json(&run(&[args, &["--json"]].concat()));
        let why = document["environment"]["no_accelerator"].as_str().unwrap();
        assert!(explains(why), "{why}");
        // Who asks for the CPU is not told.
        let page = text(&run(&[args, &["--device", "cpu"]].concat()).stdout);
        assert!(!page.contains("no GPU"), "{page}");
    }
}

#[test]
fn an_unwritable_folder_is_refused_before_measuring() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("occupied"), "a file").unwrap();
    let output = evosdpa(folder.path(), &[&QUICK[..], &["--out", "occupied"]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(joined(&output.stderr).contains("--out"), "{}", joined(&output.stderr));
}

#[test]
fn a_python_that_hangs_dies_or_prints_junk_costs_only_the_baseline() {
    use std::os::unix::fs::PermissionsExt;

    for (name, script, expected) in [
        ("hangs", "#!/bin/sh\nsleep 600\n", "no answer within 1 s"),
        ("dies", "#!/bin/sh\nexit 3\n", "python ended without an answer"),
        ("junk", "#!/bin/sh\necho 'Welcome to Python'\nsleep 5\n", "python printed `Welcome to Python`"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let python = path.to_str().unwrap();
        let args = [
            "bench",
            "--shapes",
            "tiny",
            "--iters",
            "5",
            "--python",
            python,
            "--baseline-timeout",
            "1",
            "--json",
        ];
        let output = evosdpa(folder.path(), &args);
        assert!(output.status.success(), "{name}: {}", joined(&output.stderr));
        let document = json(&output);
        let baseline = document["rows"].as_array().unwrap().last().unwrap();
        let detail = baseline["gates"][0]["detail"].as_str().unwrap();
        assert!(detail.contains(expected), "{name}: {detail}");
        assert_eq!(document["rows"][0]["samples_us"].as_array().unwrap().len(), 5);
    }
}

#[test]
fn runs_and_compare_work_from_what_is_stored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert!(text(&evosdpa(path, &["runs"]).stdout).contains("no runs"));
    assert!(evosdpa(path, &QUICK).status.success());
    assert!(evosdpa(path, &QUICK).status.success());
    std::fs::write(path.join("runs/stray.txt"), "not a run").unwrap();

    let listed = json(&evosdpa(path, &["runs", "--json"]));
    let rows = listed["rows"].as_array().unwrap();
    assert_eq!(rows.iter().filter(|row| row["status"] == "complete").count(), 2);
    assert_eq!(rows.iter().filter(|row| row["unreadable"].is_string()).count(), 1);

    let id = rows[0]["id"].as_str().unwrap();
    let compared = json(&evosdpa(path, &["compare", &id[id.len() - 6..], "latest", "--json"]));
    assert_eq!(compared["rows"].as_array().unwrap().len(), 2);
    // One run each says nothing, and a script is told so.
    assert_eq!(compared["rows"][0]["comparison"]["verdict"], "AMBIGUOUS");
    assert_eq!(compared["rows"][0]["comparison"]["runs"], serde_json::json!([1, 1]));
    let output = evosdpa(path, &["compare", id, "latest", "--fail-on-regression"]);
    assert_eq!(output.status.code(), Some(2));
    for said in [text(&output.stdout), joined(&output.stderr)] {
        assert!(said.contains("cannot know") && said.contains("bench --repeat 5"), "{said}");
    }
    let itself = evosdpa(path, &["compare", id, id]);
    assert!(joined(&itself.stderr).contains("on both sides"), "{}", joined(&itself.stderr));
}

/// A set made by `--repeat`, and the same set with every time multiplied.
#[test]
fn a_regression_fails_when_asked_to() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let quick =
        ["bench", "--no-baselines", "--device", "cpu", "--shapes", "tiny", "--iters", "4", "--warmup", "1"];
    let made = json(&evosdpa(path, &[&quick[..], &["--repeat=5", "--json"]].concat()));
    assert_eq!(made["schema"], "evosdpa.bench-set/1");
    assert_eq!(made["rows"][0]["p50_us"].as_array().unwrap().len(), 5);
    let set = made["rows"][0]["set"].as_str().unwrap().to_owned();
    let runs: Vec<_> = std::fs::read_dir(path.join("runs")).unwrap().map(|run| run.unwrap().path()).collect();
    assert_eq!(runs.len(), 5);
    // What the machine did meanwhile is not the matter: every run gets the same samples, and the slower ones twice those.
    for (number, run) in runs.iter().enumerate() {
        let slower = path.join(format!("runs/slower-{number}"));
        std::fs::create_dir(&slower).unwrap();
        for file in ["summary.json", "result_tiny.json"] {
            let mut document: Value =
                serde_json::from_str(&std::fs::read_to_string(run.join(file)).unwrap()).unwrap();
            let mut write = |factor: f64, to: &Path| {
                if document["set"].is_string() && factor > 1.0 {
                    document["set"] = "slower".into();
                }
                for row in document["rows"].as_array_mut().unwrap() {
                    let samples = row["samples_us"].as_array_mut().unwrap();
                    for (i, sample) in samples.iter_mut().enumerate() {
                        *sample = (factor * (10.0 + 0.01 * (i + number) as f64)).into();
                    }
                }
                std::fs::write(to.join(file), document.to_string()).unwrap();
            };
            write(1.0, run);
            write(2.0, &slower);
        }
    }
    let compare = |a: &str, b: &str| evosdpa(path, &["compare", a, b, "--fail-on-regression"]);
    let slow = compare(&set, "slower");
    assert_eq!(slow.status.code(), Some(1), "{}{}", text(&slow.stdout), joined(&slow.stderr));
    assert!(text(&slow.stdout).contains("1 SLOW"), "{}", text(&slow.stdout));
    assert_eq!(evosdpa(path, &["compare", &set, "slower"]).status.code(), Some(0));
    assert_eq!(compare("slower", &set).status.code(), Some(0));
    // Ten runs, half of them twice as slow, are no runs of one program: the test of the rule says so.
    let mixed = evosdpa(path, &["compare", &format!("{set},slower"), "--self-test"]);
    assert_eq!(mixed.status.code(), Some(1), "{}", text(&mixed.stdout));
    let short = evosdpa(path, &["compare", &set, "--self-test"]);
    assert!(joined(&short.stderr).contains("has 5 runs"), "{}", joined(&short.stderr));
}

#[test]
fn kernels_doctor_completions_and_help_say_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = json(&evosdpa(folder.path(), &["kernels", "--json"]));
    let flash = kernels["rows"].as_array().unwrap().iter().find(|row| row["name"] == "cpu_flash").unwrap();
    assert_eq!(flash["parent"], "cpu_naive");

    let doctor = evosdpa(folder.path(), &["doctor", "--python", "/nowhere/python", "--json"]);
    assert!(doctor.status.success());
    let probes = json(&doctor);
    let torch = probes["rows"].as_array().unwrap().iter().find(|row| row["gate"] == "torch").unwrap();
    assert_eq!(torch["verdict"], "UNAVAILABLE");
    assert!(torch["detail"].as_str().unwrap().contains("pip install torch"));

    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&evosdpa(folder.path(), &["completions", shell]).stdout).contains("evosdpa"));
    }
    for command in ["bench", "check", "compare"] {
        let help = text(&evosdpa(folder.path(), &[command, "--help"]).stdout);
        assert!(help.contains("Examples:"), "{help}");
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
        // An example that is broken cannot be copied.
        let mut examples = help.split("Examples:").nth(1).unwrap().lines().filter(|line| !line.is_empty());
        assert!(examples.all(|line| line.starts_with("  evosdpa ")), "{help}");
    }
}

/// Python of this machine; where there is none, the files are still written and looked at.
fn python(folder: &Path, code: &str) -> Option<Output> {
    let program = cargo_bin!("evosdpa").display().to_string();
    Command::new("python3")
        .args(["-c", code])
        .current_dir(folder)
        .env("EVOSDPA_PROGRAM", program)
        .output()
        .ok()
}

#[test]
fn export_writes_what_other_tools_take() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let export = |tool: &str, more: &[&str]| {
        let own = ["export", tool, "--shape", "b2h8/2s64d32:causal", "--dtype", "f16", "--out", tool];
        evosdpa(path, &[&own[..], more].concat())
    };
    for (tool, more, expected) in [
        ("kernelbench", &[][..], &["1_attention.py", "solution.py"][..]),
        ("gpumode", &[], &["task.yml", "task.py", "reference.py", "submission.py"]),
        ("openevolve", &["--kernel", "sdpa_v1"], &["initial_program.cu", "evaluator.py", "config.yaml"]),
    ] {
        let output = export(tool, more);
        assert!(output.status.success(), "{tool}: {}", joined(&output.stderr));
        for name in expected {
            let written = std::fs::read_to_string(path.join(tool).join(name)).unwrap();
            let unfilled = written.replace("\"@SUBMISSION@\"", "");
            let is_word =
                |word: &&str| word.len() > 2 && word.chars().all(|c| c.is_ascii_uppercase() || c == '_');
            assert_eq!(unfilled.split('@').skip(1).step_by(2).find(is_word), None, "{tool}/{name}");
            if name.ends_with(".py")
                && let Some(done) =
                    python(path, &format!("compile(open('{tool}/{name}').read(), '{name}', 'exec')"))
            {
                assert!(done.status.success(), "{tool}/{name}: {}", joined(&done.stderr));
            }
        }
        // Nothing is written over, and nothing is left of an attempt that cannot end.
        std::fs::remove_file(path.join(tool).join(expected[0])).unwrap();
        assert!(!export(tool, more).status.success());
        assert!(!path.join(tool).join(expected[0]).exists(), "{tool}");
        std::fs::remove_dir_all(path.join(tool)).unwrap();
        assert!(export(tool, more).status.success());
        let again = export(tool, more);
        assert!(!again.status.success() && joined(&again.stderr).contains("is there already"));
    }
    // OpenEvolve's evaluator judges its own program right and a spoiled one wrong, by the simulator.
    let stage = "import sys, types, re
result = types.ModuleType('openevolve.evaluation_result')
class EvaluationResult:
    def __init__(self, metrics, artifacts): self.metrics, self.artifacts = metrics, artifacts
result.EvaluationResult = EvaluationResult
sys.modules['openevolve'], sys.modules['openevolve.evaluation_result'] = types.ModuleType('openevolve'), result
sys.path.insert(0, 'openevolve')
import evaluator
good = evaluator.evaluate_stage1('openevolve/initial_program.cu')
text = open('openevolve/initial_program.cu').read()
open('wrong.cu', 'w').write(text.replace('__global__', '__global__ garbage', 1))
wrong = evaluator.evaluate_stage1('wrong.cu')
print(good.metrics['correct'], wrong.metrics['correct'], good.artifacts, wrong.artifacts)";
    if let Some(done) = python(path, stage) {
        let said = text(&done.stdout);
        assert!(said.starts_with("1.0 0.0 "), "{said}{}", joined(&done.stderr));
    }
    // What comes back is a kernel of its own, by the same gates.
    let program = "openevolve/initial_program.cu";
    let output = evosdpa(path, &["import", "openevolve", program, "--name", "mine", "--out", "mine"]);
    assert!(output.status.success(), "{}{}", text(&output.stdout), joined(&output.stderr));
    assert!(
        text(&output.stdout)
            .contains("mine is in mine; on a GPU: evosdpa bench --device cuda --kernel-path mine")
    );
    let wrong = std::fs::read_to_string(path.join(program)).unwrap();
    std::fs::write(path.join("wrong.cu"), wrong.replace("= exp2f(score", "= 0.01f + exp2f(score")).unwrap();
    let output = evosdpa(
        path,
        &[
            "import",
            "openevolve",
            "wrong.cu",
            "--kernel",
            "sdpa_v1",
            "--shape",
            "tiny",
            "--dtype",
            "f16",
            "--out",
            "y",
        ],
    );
    assert_eq!(output.status.code(), Some(1), "{}{}", text(&output.stdout), joined(&output.stderr));
    use std::os::unix::fs::PermissionsExt;
    let python = path.join("without-torch");
    std::fs::write(&python, "#!/bin/sh\necho '{\"error\": \"torch not importable: no such module\"}'\n")
        .unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (arguments, why) in [
        (&["export", "kernelbench", "--shape", "tiny:causal", "--dtype", "u8", "--out", "x"][..], "u8"),
        (&["export", "gpumode", "--shape", "tiny:window8", "--out", "x"], "window"),
        (&["export", "openevolve", "--shape", "tiny", "--out", "x"], "--kernel"),
        (&["export", "kernelbanch", "--shape", "tiny", "--out", "x"], "did you mean `kernelbench`"),
        (
            &["import", "kernelbench", "kernelbench/1_attention.py", "--out", "x"],
            "this is the task, not an answer",
        ),
        (
            &["import", "gpumode", "openevolve/initial_program.cu", "--out", "x"],
            "does not say how it is launched",
        ),
        (&["import", "openevolve", "wrong.cu", "--out", "x"], "say its shape with --shape"),
        (&["import", "openevolve", "wrong.cu", "--shape", "tiny", "--out", "x"], "with --kernel"),
        (&["import", "openevolve", "no.cu", "--shape", "tiny", "--out", "x"], "no.cu"),
        (
            &[
                "import",
                "kernelbench",
                "kernelbench/solution.py",
                "--device",
                "cpu",
                "--python",
                "./without-torch",
            ],
            "./without-torch -m pip install torch",
        ),
    ] {
        let output = evosdpa(path, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(joined(&output.stderr).contains(why), "{arguments:?}: {}", joined(&output.stderr));
        assert!(!path.join("x").exists());
    }
}
