//! `profile` and `report` as their users meet them.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
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

/// A quick benchmark, and the JSON of its one result.
fn bench(folder: &Path) -> Value {
    let args = [
        "bench",
        "--device",
        "cpu",
        "--no-baselines",
        "--shapes",
        "tiny:causal",
        "--kernels",
        "cpu_naive",
        "--iters",
        "20",
        "--warmup",
        "2",
    ];
    let output = evosdpa(folder, &args);
    assert!(output.status.success(), "{}", joined(&output.stderr));
    let run = fs::read_dir(folder.join("runs")).unwrap().next().unwrap().unwrap().path();
    serde_json::from_slice(&fs::read(run.join("result_tiny.causal.json")).unwrap()).unwrap()
}

fn report(folder: &Path, format: &str) -> String {
    let output = evosdpa(folder, &["report", "latest", "--format", format, "--out", "-"]);
    assert!(output.status.success(), "{format}: {}", joined(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_run_is_reported_in_every_format_with_the_numbers_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let result = bench(folder.path());
    let rows: Vec<&Value> =
        result["rows"].as_array().unwrap().iter().filter(|row| row["p50_us"].is_f64()).collect();
    assert_eq!(rows.len(), 2);

    let html = report(folder.path(), "html");
    assert!(
        !html.contains("http://")
            || html.matches("http://").count() == html.matches("http://www.w3.org/2000/svg").count()
    );
    assert!(!html.contains("https://") && !html.contains("src="), "nothing comes from elsewhere");
    assert!(html.contains(">PASS</span> all"), "the verdict comes first");
    for row in &rows {
        for field in ["p50_us", "gflops"] {
            assert!(html.contains(&format!("data-value=\"{}\"", row[field])), "{field} of {}", row["kernel"]);
        }
    }
    let markdown = report(folder.path(), "md");
    for section in ["Environment", "Correctness", "Baseline", "Profile", "Variants", "Elites", "Next steps"] {
        assert!(markdown.contains(&format!("\n## {section}\n")), "{section}");
    }
    for row in &rows {
        let share = 100.0 * row["roofline"].as_f64().unwrap();
        let start =
            format!("| {} | {} | ", row["problem"].as_str().unwrap(), row["kernel"].as_str().unwrap());
        let line = markdown.lines().find(|line| line.starts_with(&start)).unwrap();
        assert!(line.contains(&format!(" | {share:.1} | 20 | ")), "{line}");
        assert!(html.contains(&format!("<td class=\"n\">{share:.0}</td><td class=\"n\">20</td>")), "{share}");
    }
    let csv = report(folder.path(), "csv");
    let p50 = rows[0]["p50_us"].to_string();
    let line = csv.lines().find(|line| line.contains(rows[0]["kernel"].as_str().unwrap())).unwrap();
    assert!(line.contains(&format!(",{p50},")), "{line}");
    assert!(csv.lines().all(|line| line.matches(',').count() == 20), "{csv}");

    let t4: Value = serde_json::from_str(&report(folder.path(), "t4")).unwrap();
    assert_eq!(t4["schema_version"], "1.0.0");
    for (result, row) in t4["results"].as_array().unwrap().iter().zip(&rows) {
        assert_eq!((&result["invalidity"], &result["correctness"]), (&"correct".into(), &1.0.into()));
        let runtimes = result["times"]["runtimes"].as_array().unwrap();
        assert_eq!(runtimes.len(), 20);
        let first_us = row["samples_us"][0].as_f64().unwrap();
        assert!((runtimes[0].as_f64().unwrap() * 1e3 / first_us - 1.0).abs() < 1e-12);
    }
    let trace: Value = serde_json::from_str(&report(folder.path(), "perfetto")).unwrap();
    let spans = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
    let drawn: f64 = spans.clone().map(|event| event["dur"].as_f64().unwrap()).sum();
    let samples = rows.iter().flat_map(|row| row["samples_us"].as_array().unwrap());
    let measured: f64 = samples.map(|us| us.as_f64().unwrap()).sum();
    assert!((drawn / measured - 1.0).abs() < 1e-9 && spans.clone().count() == 40, "{drawn} {measured}");
    for row in &rows {
        let own = spans.clone().filter(|event| event["name"] == row["kernel"]);
        let starts: Vec<f64> = own.map(|event| event["ts"].as_f64().unwrap()).collect();
        let began: Vec<f64> =
            row["samples_began_ns"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
        assert!(began.is_sorted() && began.len() == 20, "{began:?}");
        let apart = |(start, began): (&f64, &f64)| (start * 1e3 - began).abs();
        assert!(starts.iter().zip(&began).map(apart).all(|ns| ns < 1.0), "{starts:?} {began:?}");
    }
}

#[test]
fn a_report_goes_into_the_runs_folder_and_bad_input_is_named() {
    let folder = tempfile::tempdir().unwrap();
    bench(folder.path());
    let output = evosdpa(folder.path(), &["report", "latest"]);
    let said = text(&output.stdout);
    let path = said.lines().last().unwrap().split_whitespace().nth(2).unwrap();
    assert!(path.ends_with("report.html") && folder.path().join(path).is_file(), "{said}");

    fs::write(folder.path().join("other.json"), r#"{"hello": 1}"#).unwrap();
    fs::write(folder.path().join("cut.json"), r#"{"rows": ["#).unwrap();
    for (args, expected) in [
        (&["report", "nothing"][..], "no such run"),
        (&["report", "other.json"], "has no `rows`"),
        (&["report", "cut.json"], "EOF"),
        (&["report", "latest", "--format", "htm"], "did you mean `html`"),
        (&["report", "latest", "--out", "/nowhere/at/all.html"], "--out"),
        (&["report"], "RUN"),
    ] {
        let output = evosdpa(folder.path(), args);
        let message = joined(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(expected), "{args:?}: {message}");
    }
}

fn captures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../lab/tests/ncu")
}

#[test]
fn a_saved_capture_is_diagnosed_without_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let capture = captures().join("mission.csv");
    let capture = capture.to_str().unwrap();
    let args = ["profile", "--import", capture, "--shape", "mission", "--kernels", "sdpa_v2b", "--json"];
    let output = evosdpa(folder.path(), &args);
    assert!(output.status.success(), "{}", joined(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["schema"], "evosdpa.profile/1");
    let [row] = document["rows"].as_array().unwrap().as_slice() else { panic!("{document}") };
    assert_eq!(row["kernel"], "sdpa_v2b");
    let insight = &row["insights"][0];
    assert!(
        insight["confidence"].as_f64().unwrap() > 0.0 && !insight["evidence"].as_array().unwrap().is_empty()
    );
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none(), "an import leaves nothing behind");
}

#[test]
fn a_profiler_that_works_is_recorded_and_one_that_does_not_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let capture = captures().join("mission-v2c.csv");
    let ncu = folder.path().join("ncu");
    let stand_in = |profile: &str| {
        let script = format!(
            "#!/bin/sh\ncase \"$1\" in\n--version) echo 'Version 2025.3.1.0';;\n--import) cat {};;\n*) {profile};;\nesac\n",
            capture.display()
        );
        fs::write(&ncu, script).unwrap();
        fs::set_permissions(&ncu, fs::Permissions::from_mode(0o755)).unwrap();
    };
    let args = ["profile", "--shape", "mission", "--kernels", "sdpa_v2c", "--ncu", ncu.to_str().unwrap()];

    stand_in("while [ \"$1\" != --export ]; do shift; done; echo report > \"$2\"");
    let output = evosdpa(folder.path(), &args);
    assert!(output.status.success(), "{}{}", text(&output.stdout), joined(&output.stderr));
    let run = fs::read_dir(folder.path().join("runs")).unwrap().next().unwrap().unwrap().path();
    let insights: Value = serde_json::from_slice(&fs::read(run.join("insights.json")).unwrap()).unwrap();
    assert_eq!(insights["rows"][0]["gates"][0]["gate"], "profile");
    for ending in ["csv", "details.csv", "log", "ncu-rep"] {
        assert!(run.join(format!("profile_sdpa_v2c_mission_bf16.{ending}")).is_file(), "{ending}");
    }
    let report = evosdpa(folder.path(), &["report", "latest", "--out", "-"]);
    assert!(text(&report.stdout).contains("What holds kernels back"), "{}", joined(&report.stderr));

    stand_in("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1");
    let output = evosdpa(folder.path(), &[&args[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", joined(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &document["rows"][0];
    assert_eq!(row["gates"][0]["verdict"], "UNAVAILABLE");
    assert!(row["gates"][0]["detail"].as_str().unwrap().contains("NVreg_RestrictProfilingToAdminUsers"));
    // The static view takes its place.
    assert!(row["statics"]["registers"].as_u64().unwrap() > 16, "{row}");
    assert!(row["simulated"]["shared_wavefronts"].as_u64().unwrap() > 0, "{row}");
}

#[test]
fn bad_profiles_exit_2_and_say_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let whole = fs::read_to_string(captures().join("mission-v2c.csv")).unwrap();
    let header = whole.lines().find(|line| line.contains("\"ID\"")).unwrap();
    let write = |name: &str, contents: &str| fs::write(folder.path().join(name), contents).unwrap();
    write("cut.csv", &whole[..whole.len() - 200]);
    write("renamed.csv", &whole.replace(header, &header.replace("gpu__time_duration.sum", "gpu__time.sum")));
    write("refused.csv", "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n");
    for (args, expected) in [
        (&["profile"][..], "--kernels"),
        (&["profile", "--kernels", "sdpa_v2x"], "did you mean `sdpa_v2"),
        (&["profile", "--kernels", "sdpa_v2c", "--device", "gpu"], "--device"),
        (&["profile", "--import", "nowhere.csv"], "nowhere.csv"),
        (&["profile", "--import", "cut.csv"], "cut short"),
        (&["profile", "--import", "renamed.csv"], "gpu__time_duration.sum"),
        (&["profile", "--import", "refused.csv"], "ERR_NVGPUCTRPERM"),
        (&["profile", "--import", "launch.ncu-rep", "--ncu", "/nowhere/ncu"], "/nowhere/ncu"),
    ] {
        let output = evosdpa(folder.path(), args);
        let message = joined(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}{}", text(&output.stdout));
        assert!(message.contains(expected), "{args:?}: {message}");
        assert!(!folder.path().join("runs").exists(), "{args:?} left a run behind");
    }
}

#[test]
fn the_simulator_counts_by_source_line() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["profile", "--device", "sim", "--shape", "tiny", "--kernels", "sdpa_v2b", "--json"];
    let output = evosdpa(folder.path(), &args);
    assert!(output.status.success(), "{}", joined(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let counted = &document["rows"][0]["simulated"];
    assert_eq!(counted["problem"], "tiny bf16");
    assert_eq!(counted["tensor_ops"], 0, "v2b is scalar");
    let worst = &counted["conflict_lines"][0];
    assert!(worst["source"].as_str().unwrap().contains("sdpa_v2b.cu:"), "{counted}");
    assert!(worst["conflicts"].as_u64().unwrap() > 0, "{counted}");
    assert!(counted["flops"].as_f64().unwrap() >= 4.0 * 32.0 * 32.0 * 64.0);
    let insights = document["rows"][0]["insights"].as_array().unwrap();
    assert!(insights.iter().any(|insight| insight["id"] == "3c-scalar"), "{insights:?}");
}
