//! `precompile`: kernels for machines without a compiler. No GPU is needed, only the compiler that `cargo xtask setup` installs.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use assert_cmd::cargo::cargo_bin;
use evosdpa_cuda::{precompiled::VARIABLE, toolkit::HOME_VARIABLE};
use serde_json::Value;

fn evosdpa(folder: &Path, args: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(cargo_bin!("evosdpa"));
    command.args(args).current_dir(folder).env("NO_COLOR", "1").envs(environment.iter().copied());
    command.output().unwrap()
}

fn joined(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn document(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", joined(&output.stdout), joined(&output.stderr)))
}

fn refusal(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{}", joined(&output.stdout));
    joined(&output.stderr)
}

const MADE: [&str; 9] = [
    "precompile",
    "kernels",
    "--arch",
    "sm_89",
    "--shapes",
    "mission,long:causal",
    "--dtype",
    "bf16",
    "--json",
];

#[test]
fn what_was_precompiled_needs_no_compiler() {
    let folder = tempfile::tempdir().unwrap();
    let made = evosdpa(folder.path(), &MADE, &[]);
    let made = document(&made);
    assert_eq!(made["schema"], "evosdpa.precompile/1");
    let rows = made["rows"].as_array().unwrap();
    // Two problems of one kernel with masks and without, and three that write to caches.
    assert_eq!(rows.len(), 5, "{made}");
    assert!(rows.iter().all(|row| row["verdict"] == "PASS" && row["arch"] == "sm_89"), "{made}");
    let files = |folder: &Path| fs::read_dir(folder.join("kernels")).unwrap().count();
    assert_eq!(files(folder.path()), 5);
    // Another time adds what is not there.
    let more = ["precompile", "kernels", "--arch", "sm_89", "--shapes", "mission", "--dtype", "f16"];
    let page = joined(&evosdpa(folder.path(), &more, &[]).stdout);
    assert!(page.contains("6 kernels,") && page.contains(&format!("{VARIABLE}=")), "{page}");

    let named = folder.path().join("kernels");
    let there = (VARIABLE, named.to_str().unwrap());
    let plan = evosdpa(folder.path(), &["plan", "--arch", "sm_89", "mission", "--json"], &[]);
    let plan = &document(&plan)["rows"][0];
    let mut build = vec!["build", "--arch", "sm_89", "--problem", "mission", "--dtype", "bf16", "--json"];
    build.extend(["--kernels", plan["kernel"].as_str().unwrap()]);
    let built = document(&evosdpa(folder.path(), &build, &[there]));
    let gate = &built["rows"][0]["gates"][0];
    assert!(gate["detail"].as_str().unwrap().starts_with("precompiled, read in"), "{built}");
    let doctor = evosdpa(folder.path(), &["doctor", "--python", "/nowhere/python", "--json"], &[there]);
    let doctor = document(&doctor);
    let probes = doctor["rows"].as_array().unwrap();
    let probe = probes.iter().find(|probe| probe["gate"] == "precompiled").unwrap();
    assert!(probe["detail"].as_str().unwrap().starts_with("6 kernels"), "{probe}");
}

#[test]
fn wrong_use_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str], environment: &[(&str, &str)]| evosdpa(folder.path(), args, environment);
    let no_arch = refusal(&run(&["precompile", "kernels"], &[]));
    assert!(no_arch.contains("--arch"), "{no_arch}");
    let refused = ["precompile", "kernels", "--arch", "sm_89", "--shapes", "b1h8s512d512", "--dtype", "f32"];
    let why = refusal(&run(&refused, &[]));
    assert!(why.contains("ampere_f32") && why.contains("head_dim is 512"), "{why}");
    let no_compiler = refusal(&run(&MADE, &[(HOME_VARIABLE, "/no/such/folder")]));
    assert!(no_compiler.contains("/no/such/folder"), "{no_compiler}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

    fs::write(folder.path().join("kernels"), "a file").unwrap();
    let occupied = refusal(&run(&MADE, &[]));
    assert!(occupied.contains("kernels"), "{occupied}");
    let not_there = refusal(&run(&["build", "--kernels", "sdpa_v1"], &[(VARIABLE, "/no/such/folder")]));
    assert!(not_there.contains("/no/such/folder") && not_there.contains("evosdpa precompile"), "{not_there}");
}
