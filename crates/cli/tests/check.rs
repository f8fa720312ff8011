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
        (&["apply", "elite.json"], "expected the elite.json that `evosdpa tune` leaves"),
    ] {
        let output = evosdpa(folder.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stdout));
        let said = text(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(words), "{args:?}: {said}");
    }
    // A table that has no end is no table.
    let plan = |table: &Path| {
        let args = ["plan", "tiny", "--arch", "sm_90a"];
        Command::new(cargo_bin!("evosdpa")).args(args).env("EVOSDPA_TUNED", table).output().unwrap()
    };
    let endless = plan(Path::new("/dev/zero"));
    assert_eq!(endless.status.code(), Some(2));
    assert!(text(&endless.stderr).contains("larger than 256 MiB"), "{}", text(&endless.stderr));
    // A line of any length is not quoted whole.
    std::fs::write(folder.path().join("table.toml"), format!("a={}", "[".repeat(50_000))).unwrap();
    let plan = plan(&folder.path().join("table.toml"));
    assert_eq!(plan.status.code(), Some(2));
    assert!((100..3000).contains(&plan.stderr.len()), "{}", plan.stderr.len());
}

/// Each would be read until the memory ends, or be waited for without end.
#[test]
fn files_without_an_end_and_pipes_without_a_writer_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reads: [(&[&str], &str); 7] = [
        (&["tune", "--simulate"], "1 GiB"),
        (&["tune", "--device", "cpu", "--shapes", "tiny", "--evaluations", "1", "--prior"], "256 MiB"),
        (&["build", "--parse"], "256 MiB"),
        (&["apply"], "256 MiB"),
        (&["report"], "1 GiB"),
        (&["import", "openevolve", "--kernel", "sdpa_v1", "--shape", "tiny"], "1 MiB"),
        (&["profile", "--shape", "tiny", "--import"], "256 MiB"),
    ];
    std::thread::scope(|scope| {
        for (args, limit) in reads {
            let pipe = pipe.to_str().unwrap();
            let folder = folder.path();
            scope.spawn(move || {
                for (file, words) in [("/dev/zero", limit), (pipe, "nobody writes"), ("/", "it is a folder")]
                {
                    // A folder is a run's for `report`.
                    if (file, args) == ("/", &["report"]) {
                        continue;
                    }
                    let output = evosdpa(folder, &[args, &[file]].concat());
                    let said = text(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
                    assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
                    assert!(said.contains(file) && said.contains(words), "{args:?} {file}: {said}");
                }
            });
        }
    });
}

/// File names are bytes: what is shown or recorded of them may lose some, what is opened may not.
#[test]
fn names_that_are_no_text_are_names() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    let folder = tempfile::tempdir().unwrap();
    let named = folder.path().join(OsStr::from_bytes(b"k\xff"));
    let run = |args: &[&str], last: &Path| {
        let mut command = Command::new(cargo_bin!("evosdpa"));
        command.args(args).arg(last).current_dir(folder.path()).env("NO_COLOR", "1");
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let bench = ["bench", "--device", "cpu", "--shapes", "tiny", "--iters", "3", "--no-baselines", "--out"];
    let (status, _, said) = run(&bench, &named.join("runs"));
    assert_eq!(status, Some(0), "{said}");
    let (status, listed, said) = run(&["runs", "--json", "--out"], &named.join("runs"));
    assert_eq!(status, Some(0), "{said}");
    assert_eq!(serde_json::from_str::<Value>(&listed).unwrap()["rows"].as_array().unwrap().len(), 1);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/cuda/line/sdpa_v1.cu");
    std::fs::copy(source, named.join("a.cu")).unwrap();
    let import =
        ["import", "openevolve", "--kernel", "sdpa_v1", "--shape", "tiny", "--dtype", "f16", "--out"];
    let mut command = Command::new(cargo_bin!("evosdpa"));
    let output = command.args(import).args([&named.join("made"), &named.join("a.cu")]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(named.join("made/imported.toml").is_file());
    // Python is asked in JSON, which has text alone.
    std::fs::write(named.join("a.py"), "def custom_kernel(data): ...").unwrap();
    let (status, _, said) = run(&["import", "gpumode", "--shape", "tiny"], &named.join("a.py"));
    assert!(status == Some(2) && said.contains("no UTF-8"), "{said}");
}

#[test]
fn a_killed_export_leaves_a_whole_folder_or_none() {
    let folder = tempfile::tempdir().unwrap();
    let export = |out: &str| {
        let mut command = Command::new(cargo_bin!("evosdpa"));
        command.args(["export", "openevolve", "--kernel", "sdpa_v1", "--shape", "tiny", "--out", out]);
        command.current_dir(folder.path()).stdout(std::process::Stdio::null());
        command
    };
    let count = |out: &str| std::fs::read_dir(folder.path().join(out)).map_or(0, Iterator::count);
    let began = std::time::Instant::now();
    assert!(export("whole").status().unwrap().success());
    let (whole, took) = (count("whole"), began.elapsed());
    assert!(whole > 3, "{whole}");
    for number in 0..30 {
        let out = format!("out-{number}");
        let mut child = export(&out).spawn().unwrap();
        std::thread::sleep(took * number / 25);
        let _ = child.kill();
        child.wait().unwrap();
        let left = count(&out);
        assert!(left == 0 || left == whole, "killed after {number}/25 of its time: {left} of {whole}");
    }
}
