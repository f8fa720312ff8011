//! Compiling, gating and sanitizing CUDA kernels as users meet them. No GPU is needed: only the compiler, which
//! `cargo xtask setup` installs.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use assert_cmd::cargo::cargo_bin;
use evosdpa_cuda::toolkit::{HOME_VARIABLE, Toolkit};
use evosdpa_oracle::inputs::Family;
use serde_json::Value;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/custom-kernel");
const LOGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../cuda/tests/logs");

/// Runs the program with a cache of its own, in `home`.
fn evosdpa(home: &Path, args: &[&str]) -> Output {
    let toolkit = Toolkit::find().expect("`cargo xtask setup` installs the compiler");
    with_toolkit(home, &toolkit.root, args)
}

/// Runs the program with the user's cache, which other tests fill with the same kernels.
fn with_shared_cache(home: &Path, args: &[&str]) -> Output {
    Command::new(cargo_bin!("evosdpa")).args(args).current_dir(home).env("NO_COLOR", "1").output().unwrap()
}

fn with_toolkit(home: &Path, toolkit: &Path, args: &[&str]) -> Output {
    Command::new(cargo_bin!("evosdpa"))
        .args(args)
        .current_dir(home)
        .env("NO_COLOR", "1")
        .env("XDG_CACHE_HOME", home.join("cache"))
        .env(HOME_VARIABLE, toolkit)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The same with its broken lines joined again.
fn joined(bytes: &[u8]) -> String {
    text(bytes).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", text(&output.stdout), joined(&output.stderr)))
}

/// The example kernel with its manifest and source changed.
fn changed(folder: &Path, manifest: &dyn Fn(&str) -> String, source: &dyn Fn(&str) -> String) -> String {
    let read = |name: &str| fs::read_to_string(Path::new(EXAMPLE).join(name)).unwrap();
    let kernels = folder.join("kernels");
    fs::create_dir_all(&kernels).unwrap();
    fs::write(kernels.join("my_sdpa.toml"), manifest(&read("my_sdpa.toml"))).unwrap();
    fs::write(kernels.join("my_sdpa.cu"), source(&read("my_sdpa.cu"))).unwrap();
    kernels.display().to_string()
}

fn same(text: &str) -> String {
    text.to_owned()
}

#[test]
fn build_compiles_gates_and_caches_a_users_kernel() {
    let home = tempfile::tempdir().unwrap();
    let output = evosdpa(home.path(), &["build", "--kernel-path", EXAMPLE]);
    let page = text(&output.stdout);
    assert!(output.status.success(), "{page}{}", joined(&output.stderr));
    assert_eq!(page.lines().filter(|line| line.contains("PASS")).count(), 6, "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 100), "{page}");
    assert!(output.stderr.is_empty(), "{}", joined(&output.stderr));

    let output = evosdpa(home.path(), &["build", "--kernel-path", EXAMPLE, "--arch", "sm_90a", "--json"]);
    let document = json(&output);
    assert_eq!(document["schema"], "evosdpa.build/1");
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!((&row["kernel"], &row["arch"]), (&"my_sdpa".into(), &"sm_90a".into()));
        assert_eq!(row["from_cache"], true, "the first build has left it there");
        assert!((8..=64).contains(&row["usage"]["registers"].as_u64().unwrap()), "{row}");
        assert_eq!(row["usage"]["smem_dynamic_bytes"], 0);
        assert_eq!(row["usage"]["occupancy"]["threads_per_block"], 128);
        assert_eq!(row["limits"]["registers"], 80);
        assert_eq!(row["gates"][1]["gate"], "resources");
    }

    let listed = json(&evosdpa(home.path(), &["cache", "--json"]));
    assert_eq!(listed["rows"].as_array().unwrap().len(), 6);
    assert!(text(&evosdpa(home.path(), &["cache"]).stdout).contains("my_sdpa[UNROLL=2 WARPS=4] sm_89"));
    assert!(text(&evosdpa(home.path(), &["cache", "--clear"]).stdout).starts_with("removed 6 kernels"));
    assert!(text(&evosdpa(home.path(), &["cache"]).stdout).starts_with("0 kernels"));
}

/// On a disk that cannot be written, or is full: what cannot be kept is compiled each time.
#[test]
fn without_a_cache_kernels_are_compiled_anew() {
    let toolkit = Toolkit::find().expect("`cargo xtask setup` installs the compiler");
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("file"), "no folder").unwrap();
    // Where nobody, the administrator included, can make a folder; and where the folder is a file.
    for cache in [Path::new("/proc/nobody"), &home.path().join("file")] {
        let args = ["build", "--kernel-path", EXAMPLE, "--arch", "sm_90a", "--dtype", "f16", "--json"];
        let output = Command::new(cargo_bin!("evosdpa"))
            .args(args)
            .current_dir(home.path())
            .env("XDG_CACHE_HOME", cache)
            .env(HOME_VARIABLE, &toolkit.root)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}: {}", cache.display(), joined(&output.stderr));
        assert_eq!(json(&output)["rows"].as_array().map(Vec::len), Some(1));
    }
    assert_eq!(fs::read_to_string(home.path().join("file")).unwrap(), "no folder");
}

#[test]
fn the_example_is_right_under_the_simulator() {
    let home = tempfile::tempdir().unwrap();
    let shapes = "b1h2s5d64,b1h2/1s9/13d40:causal-br,b1h1s6/3d33:window=2/0";
    let base = ["check", "--device", "sim", "--kernels", "my_sdpa", "--seeds", "1", "--dtype", "f16,bf16"];
    let args = [&base[..], &["--shapes", shapes, "--json", "--kernel-path"]].concat();
    let check = |folder: &str| evosdpa(home.path(), &[&args[..], &[folder]].concat());
    let output = check(EXAMPLE);
    assert!(output.status.success(), "{}{}", text(&output.stdout), joined(&output.stderr));
    let rows = json(&output)["rows"].as_array().unwrap().clone();
    // Three shapes and all input families in two types.
    assert_eq!(rows.len(), 3 * Family::ALL.len() * 2);
    assert!(rows.iter().all(|row| row["gates"][0]["verdict"] == "PASS"), "{rows:?}");

    let unscaled = changed(home.path(), &same, &|text| text.replace(" * p.scale_log2", ""));
    assert_eq!(check(&unscaled).status.code(), Some(1));
}

/// What docs/adding-a-kernel.md says that every kernel promises is what the simulator's own cases ask for.
#[test]
fn promises_that_are_not_kept_fail_the_simulated_cases() {
    let home = tempfile::tempdir().unwrap();
    for (kept, broken, said) in [
        ("total > 0.f ? 1.f / total : 0.f", "1.f / total", "b1h2s13/9d64:causal-br"),
        ("if (p.lse && lane == 0)", "if (lane == 0)", "out-of-bounds"),
    ] {
        let folder = changed(home.path(), &same, &|text| {
            assert!(text.contains(kept));
            text.replace(kept, broken)
        });
        let args =
            ["check", "--device", "sim", "--dtype", "f16", "--kernels", "my_sdpa", "--kernel-path", &folder];
        let output = with_shared_cache(home.path(), &args);
        assert_eq!(output.status.code(), Some(1), "{broken}: {}", text(&output.stdout));
        assert!(joined(&output.stdout).contains(said), "{broken}: {}", text(&output.stdout));
    }
}

/// Every problem that the example takes, and every variant of it, keeps the limits that its manifest sets.
#[test]
fn the_example_keeps_its_limits_for_every_problem() {
    let home = tempfile::tempdir().unwrap();
    for problem in ["b1h8s2048d128:causal", "b1h8s512d64", "b1h1s64d1"] {
        let args = ["build", "--kernel-path", EXAMPLE, "--problem", problem, "--all-variants"];
        let output = with_shared_cache(home.path(), &args);
        assert!(output.status.success(), "{problem}: {}", text(&output.stdout));
    }
}

#[test]
fn all_variants_are_counted_and_the_cap_is_said() {
    let home = tempfile::tempdir().unwrap();
    let base = ["build", "--kernel-path", EXAMPLE, "--arch", "sm_80", "--dtype", "f16", "--all-variants"];
    let page = text(&evosdpa(home.path(), &[&base[..], &["--max-variants", "4"]].concat()).stdout);
    assert!(page.contains("my_sdpa sm_80 f16: built 4 of 6 variants"), "{page}");
    let output = evosdpa(home.path(), &[&base[..], &["--set", "WARPS=8", "--json"]].concat());
    let rows = json(&output)["rows"].as_array().unwrap().clone();
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row["tunables"]["WARPS"] == 8), "{rows:?}");
}

#[test]
fn a_kernel_past_its_limits_or_that_does_not_compile_exits_1() {
    let broken_line = |text: &str| text.replace("float largest = minus_infinity", "float largest = nothing");
    let spilling =
        |text: &str| text.replace("__launch_bounds__(WARPS* LANES, 1)", "__launch_bounds__(1024, 2)");
    let huge = |text: &str| text.replace("dynamic_smem = \"0\"", "dynamic_smem = \"200000\"");
    type Edit<'a> = &'a dyn Fn(&str) -> String;
    let cases: [(Edit<'_>, Edit<'_>, &str); 6] = [
        (
            &|text| text.replace("registers = 80", "registers = 16"),
            &same,
            "the kernel's limit on sm_80 is 16",
        ),
        (&|text| text.replace("max = 128", "max = 512"), &spilling, "bytes of spills"),
        (&same, &broken_line, "identifier \"nothing\" is undefined"),
        (&|text| text.replace("entry = \"my_sdpa\"", "entry = \"other\""), &same, "no entry point `other`"),
        (&huge, &same, "one block on sm_80 can have 166912"),
        (
            &|text| {
                text.replace(
                    "[limits.sm_80]",
                    "[[constraint]]\nexpr = \"WARPS > seq_q\"\nwhy = \"never\"\n[limits.sm_80]",
                )
            },
            &same,
            "no tunable values satisfy `WARPS > seq_q` (never)",
        ),
    ];
    for (manifest, source, expected) in cases {
        let home = tempfile::tempdir().unwrap();
        let folder = changed(home.path(), manifest, source);
        let problem: &[&str] = if expected.contains("spills") { &["--problem", "b1h1s64d512"] } else { &[] };
        let base = ["build", "--kernel-path", &folder, "--arch", "sm_80", "--dtype", "f16"];
        let output = evosdpa(home.path(), &[&base[..], problem].concat());
        let page = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{expected}: {page}{}", joined(&output.stderr));
        assert!(page.contains("FAIL") && page.contains(expected), "{expected}: {page}");
    }
}

#[test]
fn a_source_that_does_not_compile_is_shown_with_file_and_line() {
    let home = tempfile::tempdir().unwrap();
    let folder = changed(home.path(), &same, &|text| text.replace("return x;", "return x"));
    let page = text(&evosdpa(home.path(), &["build", "--kernel-path", &folder]).stdout);
    let line = fs::read_to_string(Path::new(EXAMPLE).join("my_sdpa.cu")).unwrap();
    let line = 2 + line.lines().position(|line| line.contains("return x;")).unwrap();
    assert!(page.contains(&format!("my_sdpa.cu({line}): error: expected a \";\"")), "{page}");
    // The same mistake for six targets is said once.
    assert_eq!(page.matches("does not compile").count(), 1, "{page}");
    assert!(page.contains("The same: my_sdpa sm_80 bf16"), "{page}");
}

#[test]
fn wrong_use_exits_2_and_says_what_is_allowed() {
    let example = ["build", "--kernel-path", EXAMPLE];
    for (args, expected) in [
        (&["--set", "WARP=4"][..], "did you mean `WARPS`"),
        (&["--set", "WARPS=5"], "[4, 8]"),
        (&["--set", "WARPS"], "NAME=VALUE"),
        (&["--arch", "sm_75"], "sm_80, sm_86, sm_89, sm_90a"),
        (&["--dtype", "fp16"], "did you mean `f16`"),
        (&["--kernels", "my_spda"], "did you mean `my_sdpa`"),
        (&["--problem", "misson"], "did you mean `mission`"),
        (&["--device", "gpu"], "auto, none, cuda, cuda:N, sim"),
        (&["--kernel-path", "/nowhere"], "cannot read /nowhere"),
        (&["--kernel-path", EXAMPLE], "defined twice"),
        (&["--max-variants", "0"], "0 is not in 1.."),
    ] {
        let home = tempfile::tempdir().unwrap();
        let output = evosdpa(home.path(), &[&example[..], args].concat());
        let message = joined(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(expected), "{args:?}: {message}");
    }
    let home = tempfile::tempdir().unwrap();
    let output = evosdpa(home.path(), &[&example[..], &["--problem", "b1h1s1d300"]].concat());
    assert_eq!(output.status.code(), Some(2), "nothing could be built");
    assert!(text(&output.stdout).contains("head_dim is 300, it takes 1 to 128"));

    for (added, expected) in [
        ("[problm]", "did you mean `problem`"),
        (
            "[[constraint]]\nexpr = \"WARPS > 9\"\nwhy = \"never\"",
            "no tunable values satisfy `WARPS > 9` (never)",
        ),
    ] {
        let folder = changed(home.path(), &|text| format!("{text}\n{added}\n"), &same);
        let output = evosdpa(home.path(), &["build", "--kernel-path", &folder]);
        let message = joined(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(expected) && message.contains("my_sdpa.toml"), "{message}");
    }
}

#[test]
fn without_a_compiler_build_says_how_to_get_one() {
    let home = tempfile::tempdir().unwrap();
    let nowhere = PathBuf::from("/nowhere");
    let output = with_toolkit(home.path(), &nowhere, &["build", "--kernel-path", EXAMPLE]);
    let message = joined(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("evosdpa doctor --fix") && message.contains("/nowhere"), "{message}");

    let doctor = ["doctor", "--python", "/nowhere/python", "--json"];
    let probe = |document: &Value, name: &str| {
        let rows = document["rows"].as_array().unwrap();
        rows.iter().find(|row| row["gate"] == name).unwrap_or_else(|| panic!("no {name}")).clone()
    };
    let document = json(&with_toolkit(home.path(), &nowhere, &doctor));
    assert_eq!(probe(&document, "CUDA compiler")["verdict"], "UNAVAILABLE");
    assert!(probe(&document, "CUDA compiler")["detail"].as_str().unwrap().contains("doctor --fix"));
    let document = json(&evosdpa(home.path(), &doctor));
    assert_eq!(probe(&document, "CUDA compiler")["verdict"], "PASS");
    assert!(probe(&document, "CUDA compiler")["detail"].as_str().unwrap().contains("loaded from"));
    for name in ["CUDA driver", "compute-sanitizer", "ncu", "kernel cache"] {
        assert!(!probe(&document, name)["detail"].as_str().unwrap().is_empty());
    }
    // There is nothing to fix.
    assert_eq!(json(&evosdpa(home.path(), &["doctor", "--fix", "--json"]))["rows"][0]["verdict"], "PASS");
}

#[test]
fn saved_logs_of_three_cuda_versions_are_read() {
    let home = tempfile::tempdir().unwrap();
    let parse = |name: &str| evosdpa(home.path(), &["build", "--parse", &format!("{LOGS}/{name}")]);
    for (name, expected) in [
        ("nvcc11_sm80.txt", "984/1012"),
        ("nvcc12_hopper.txt", "note hopper_fwd sm_90a: ptxas C7508: 'setmaxnreg' ignored"),
        ("nvcc13_callee_sm90a.txt", "4612/4596"),
    ] {
        let output = parse(name);
        let page = text(&output.stdout);
        assert!(page.contains(expected), "{name}: {page}");
        assert!(
            page.lines().take_while(|line| !line.is_empty()).all(|line| line.chars().count() <= 100),
            "{page}"
        );
    }
    fs::write(home.path().join("empty"), "").unwrap();
    for (path, expected) in
        [("empty", "it is empty"), ("absent", "cannot be read"), (EXAMPLE, "cannot be read")]
    {
        let output = evosdpa(home.path(), &["build", "--parse", path]);
        let message = joined(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(expected) && message.contains("nvcc -Xptxas -v"), "{message}");
    }
}

#[test]
fn kernels_of_both_devices_are_listed_with_their_line() {
    let home = tempfile::tempdir().unwrap();
    let list = |args: &[&str]| evosdpa(home.path(), &[&["kernels", "--kernel-path", EXAMPLE], args].concat());
    let page = text(&list(&[]).stdout);
    assert!(page.contains("└ cpu_flash") && page.contains("my_sdpa"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 100), "{page}");
    let rows = json(&list(&["--device", "cuda", "--json"]))["rows"].as_array().unwrap().clone();
    assert!(rows.iter().all(|row| row["device"] == "cuda"), "{rows:?}");
    let own = rows.iter().find(|row| row["name"] == "my_sdpa").unwrap();
    assert_eq!(own["archs"], serde_json::json!(["sm_80", "sm_89", "sm_90a"]));
    assert!(!text(&list(&["--device", "cpu"]).stdout).contains("my_sdpa"));
    assert_eq!(list(&["--device", "tpu"]).status.code(), Some(2));
}

/// A stand-in for compute-sanitizer that writes this log and says what `evosdpa check` would.
fn stand_in(folder: &Path, summary: &str) -> String {
    let path = folder.join("sanitizer");
    let script = format!(
        "#!/bin/sh\necho \"$@\" >> {}\nprintf '========= COMPUTE-SANITIZER\\n%s\\n' '{summary}' > \"$4\"\necho '{{\"rows\": [{{\"gates\": [{{\"verdict\": \"PASS\", \"detail\": \"\"}}]}}]}}'\n",
        folder.join("called").display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn sanitize_runs_each_tool_and_exits_by_what_it_finds() {
    let home = tempfile::tempdir().unwrap();
    let run = |summary: &str, more: &[&str]| {
        let sanitizer = stand_in(home.path(), summary);
        let base = ["sanitize", "--kernel-path", EXAMPLE, "--shapes", "tiny", "--sanitizer", &sanitizer];
        let base = [&base[..], &["--workers", "1"]].concat();
        evosdpa(home.path(), &[&base[..], more].concat())
    };
    let clean = run("========= ERROR SUMMARY: 0 errors", &[]);
    assert_eq!(clean.status.code(), Some(0), "{}", text(&clean.stdout));
    let called = fs::read_to_string(home.path().join("called")).unwrap();
    let tools: Vec<&str> = called.lines().map(|line| line.split(' ').nth(1).unwrap()).collect();
    assert_eq!(tools, ["memcheck", "racecheck", "initcheck", "synccheck"]);
    assert!(
        called.contains("check --device cuda --seeds 1 --once --json --shapes tiny --kernels my_sdpa"),
        "{called}"
    );

    let dirty = run("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", &["--json"]);
    assert_eq!(dirty.status.code(), Some(1));
    assert_eq!(json(&dirty)["schema"], "evosdpa.sanitize/1");
    assert_eq!(json(&dirty)["rows"][1]["gates"][0]["verdict"], "FAIL");
    let silent = run("", &[]);
    assert_eq!(silent.status.code(), Some(2), "silence is not a pass: {}", text(&silent.stdout));
    assert!(text(&silent.stdout).contains("wrote no summary"));
    let refused = run("========= ERROR SUMMARY: 0 errors", &["--dtype", "e4m3"]);
    assert_eq!(refused.status.code(), Some(2), "a kernel that does not run is not clean");
    assert!(joined(&refused.stdout).contains("it reads f16, bf16, not e4m3"));
    let wrong = run("", &["--tools", "racechek"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(joined(&wrong.stderr).contains("did you mean `racecheck`"));
}

#[test]
fn once_prints_one_row_for_each_launch() {
    let home = tempfile::tempdir().unwrap();
    let base =
        ["check", "--device", "sim", "--kernel-path", EXAMPLE, "--kernels", "my_sdpa", "--once", "--json"];
    let more = ["--shapes", "b1h1s5d16,b1h1s3d300", "--seeds", "2", "--dtype", "f16"];
    let output = evosdpa(home.path(), &[&base[..], &more].concat());
    assert!(output.status.success(), "{}", joined(&output.stderr));
    let document = json(&output);
    let words: Vec<(&str, &str)> = document["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["gates"][0]["gate"].as_str().unwrap(), row["gates"][0]["verdict"].as_str().unwrap()))
        .collect();
    // A problem that the kernel does not take is no launch, and says so.
    assert_eq!(
        words,
        [("launch", "PASS"), ("launch", "PASS"), ("launch", "UNAVAILABLE"), ("launch", "UNAVAILABLE")]
    );
}

#[test]
fn the_simulator_runs_every_variant_and_scores_deletions() {
    let home = tempfile::tempdir().unwrap();
    let sweep = ["sanitize", "--device", "sim", "--all-variants", "--kernels", "sdpa_v2c", "--dtype", "bf16"];
    let output =
        with_shared_cache(home.path(), &[&sweep[..], &["--shapes", "tiny:causal", "--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let document = json(&output);
    assert_eq!(document["schema"], "evosdpa.sanitize.variants/1");
    let row = &document["rows"][0];
    assert_eq!((row["variants"].as_u64(), row["runs"].as_u64()), (Some(4), Some(24)), "{row}");
    assert_eq!(row["gates"][0]["verdict"], "PASS");
    // A problem that no kernel takes is no pass.
    let output = with_shared_cache(home.path(), &[&sweep[..], &["--shapes", "b1h1s8d200"]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stdout));

    // The simulator is also what is meant where no device is named.
    let score = ["sanitize", "--mutation-score", "--kernels", "sdpa_v1"];
    for device in [&["--device", "sim"][..], &[]] {
        let output = with_shared_cache(home.path(), &[&score[..], device].concat());
        assert_eq!(output.status.code(), Some(0));
        let page = text(&output.stdout);
        assert!(page.contains("mutation score 100.0 %: 0 of 0"), "{page}");
    }
    // A GPU that was asked for is refused, not replaced.
    for mode in ["--all-variants", "--mutation-score"] {
        for (device, expected) in [
            ("cuda", "the allowed device is sim; use --device sim or leave --device out"),
            ("cuda:1", "not on --device cuda:1"),
            ("simm", "did you mean `sim`"),
        ] {
            let output = with_shared_cache(
                home.path(),
                &["sanitize", mode, "--kernels", "sdpa_v1", "--device", device],
            );
            let message = joined(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{mode} {device}: {message}");
            assert!(message.contains(expected) && output.stdout.is_empty(), "{mode} {device}: {message}");
        }
    }
}

#[test]
fn the_simulator_sanitizes_builds_and_knows_the_mutants() {
    let home = tempfile::tempdir().unwrap();
    let base = ["--kernel-path", EXAMPLE, "--device", "sim"];
    let clean = with_shared_cache(
        home.path(),
        &[&["sanitize", "--shapes", "b1h2s5/9d40:causal-br", "--json"], &base[..]].concat(),
    );
    assert!(clean.status.success(), "{}{}", text(&clean.stdout), joined(&clean.stderr));
    let document = json(&clean);
    assert_eq!(document["rows"].as_array().unwrap().len(), 1);
    assert_eq!(document["rows"][0]["tool"], "ptxsan");
    let stray = changed(home.path(), &same, &|text| text.replace("o[column] =", "o[column + (1 << 20)] ="));
    let dirty = with_shared_cache(
        home.path(),
        &["sanitize", "--shapes", "tiny", "--device", "sim", "--kernel-path", &stray],
    );
    assert_eq!(dirty.status.code(), Some(1), "{}{}", text(&dirty.stdout), joined(&dirty.stderr));
    assert!(text(&dirty.stdout).contains("my_sdpa.cu:75"), "{}", text(&dirty.stdout));
    let accepted = home.path().join("accepted.txt");
    std::fs::write(&accepted, "out_of_bounds my_sdpa.cu:75  # known\n").unwrap();
    let accepted = accepted.display().to_string();
    let stray_base = ["sanitize", "--shapes", "tiny", "--device", "sim", "--kernel-path", &stray];
    for (more, code) in [
        (&["--fail-on", "never"][..], 0),
        (&["--fail-on", "error"], 1),
        (&["--suppressions", &accepted], 0),
        (&["--fail-on", "fatal"], 2),
        (&["--suppressions", "/nonexistent"], 2),
    ] {
        let output = with_shared_cache(home.path(), &[&stray_base[..], more].concat());
        assert_eq!(output.status.code(), Some(code), "{more:?}: {}", joined(&output.stderr));
    }

    let built = json(&with_shared_cache(home.path(), &[&["build", "--json"], &base[..]].concat()));
    for row in built["rows"].as_array().unwrap() {
        assert_eq!(row["arch"], "sm_89");
        assert_eq!(
            (&row["gates"][2]["gate"], &row["gates"][2]["verdict"]),
            (&"sim".into(), &"PASS".into()),
            "{row}"
        );
    }

    let output = with_shared_cache(home.path(), &["sanitize", "--mutants", "--device", "sim", "--json"]);
    assert!(output.status.success(), "{}{}", text(&output.stdout), joined(&output.stderr));
    let document = json(&output);
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 12);
    for row in rows {
        assert_eq!(row["gates"][0]["verdict"], "PASS", "{row}");
        assert_eq!(row["caught_by"][0], row["expected"], "{row}");
        assert!(row["repair"].as_array().unwrap().iter().all(|gate| gate["verdict"] == "PASS"), "{row}");
    }
    let hung = rows.iter().find(|row| row["mutant"] == "nobody_begins").unwrap();
    assert!(hung["mistake"].to_string().contains("deadlock"), "{hung}");
}

#[test]
fn without_a_gpu_every_command_that_needs_one_says_so_and_exits_2() {
    let home = tempfile::tempdir().unwrap();
    if Command::new("nvidia-smi").output().is_ok_and(|output| output.status.success()) {
        // With a GPU, the one that is not there.
        let output = evosdpa(home.path(), &["check", "--device", "cuda:99", "--quick"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(joined(&output.stderr).contains("no device cuda:99"), "{}", joined(&output.stderr));
        return;
    }
    for args in [
        &["check", "--device", "cuda", "--shapes", "tiny"][..],
        &["bench", "--device", "cuda:1", "--shapes", "tiny", "--no-baselines"],
        &["build", "--device", "cuda", "--kernel-path", EXAMPLE],
        &["sanitize", "--mutants"],
    ] {
        let output = evosdpa(home.path(), args);
        let message = joined(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains("driver") || message.contains("compute-sanitizer"), "{args:?}: {message}");
        assert!(output.stdout.is_empty(), "{args:?}: {}", text(&output.stdout));
    }
}
