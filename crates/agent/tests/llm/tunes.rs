//! Whole tunes: the commands of docs/llm.md, literally, with a model that is scripted.

use std::{
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

use crate::server::{Server, completion};

const PAGE: &str = include_str!("../../../../docs/llm.md");

/// The commands of the page that begin like this, a line each, with their options.
fn commands(start: &str) -> Vec<Vec<String>> {
    let joined = PAGE.replace("\\\n", " ");
    let lines = joined.lines().filter(|line| line.starts_with(start));
    lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
}

fn evosdpa(folder: &Path, arguments: &[String], path: &Path) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_evosdpa-agent")).with_file_name("examples").join("evosdpa");
    let mut command = Command::new(program);
    command.args(&arguments[1..]).current_dir(folder).env("NO_COLOR", "1").env("PATH", path);
    command.output().unwrap()
}

fn evaluations(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("log.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["kind"] == "evaluation" && line["number"] != 0).collect()
}

#[test]
fn the_page_works_literally() {
    let answers = [
        "```json\n{\"tunables\": {\"BLOCK_KV\": 32}, \"rationale\": \"scores stay in L1\"}\n```",
        "```json\n{\"tunables\": {\"BLOCK_KV\": 33}}\n```",
        "```json\n{\"tunables\": {\"BLOCK_KV\": 128, \"THREADS\": 1}}\n```",
        "no",
        "no",
        "no",
        "```json\n{\"tunables\": {\"BLOCK_KV\": 16}}\n```",
    ];
    let server = Server::start(answers.map(completion).to_vec());
    let folder = tempfile::tempdir().unwrap();
    let agent = Path::new(env!("CARGO_BIN_EXE_evosdpa-agent")).parent().unwrap();
    let [tune, replay] = &commands("evosdpa tune --device cpu")[..] else { panic!("the page's commands") };
    let tune: Vec<String> =
        tune.iter().map(|word| word.replace("http://localhost:8000/v1", &server.url())).collect();

    // Without the program the lab says how to get it.
    let output = evosdpa(folder.path(), &tune, Path::new("/nowhere"));
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("cargo build --release --package evosdpa-agent"), "{words}");

    // One of other sources is refused, with both versions.
    let old = folder.path().join("old");
    std::fs::create_dir(&old).unwrap();
    let program = old.join("evosdpa-agent");
    std::fs::write(&program, "#!/bin/sh\necho 'evosdpa-agent 0.0.9 (0123456789ab)'\n").unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = evosdpa(folder.path(), &tune, &old);
    // Its lines are broken at 100 columns.
    let words = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(output.status.code(), Some(2), "{words}");
    let own = format!("this program is {} (", env!("CARGO_PKG_VERSION"));
    assert!(words.contains("is 0.0.9 (0123456789ab) and") && words.contains(&own), "{words}");

    let output = evosdpa(folder.path(), &tune, agent);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown = String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["llm-full-mutation", "7 answers, 7000 tokens of questions and 700 of answers", "llm.jsonl"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let first = evaluations(&folder.path().join("tunes/llm"));
    let points = |evaluations: &[Value]| -> Vec<String> {
        // What the machine measures may differ.
        let text = |line: &Value| format!("{} {}", line["point"], line["gates"][0]["gate"] == "proposal");
        evaluations.iter().map(text).collect()
    };
    assert_eq!(first.len(), 4);
    assert_eq!(first[0]["rationale"], "scores stay in L1");
    assert_eq!((&first[0]["point"]["BLOCK_KV"], &first[1]["point"]["BLOCK_KV"]), (&32.into(), &128.into()));
    let why = first[2]["gates"][0]["detail"].as_str().unwrap();
    assert!(first[2]["status"] == "rejected" && why.contains("no json block"), "{}", first[2]);

    // The same tune without the model.
    let output = evosdpa(folder.path(), replay, agent);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let again = evaluations(&folder.path().join("tunes/again"));
    assert_eq!(points(&again), points(&first));
    assert_eq!(server.seen().len(), answers.len(), "the model was asked");
}
