//! How often a difference is seen that is not there.

use anyhow::Context;
use serde_json::{Value, json};

use super::Trial;

/// Sizes at which a reading is many calls, and one.
const DUELS: [&str; 2] = ["tiny", "b1h4s128d64:causal"];

/// Kernels against themselves, audits on; at most 1 %.
pub(super) fn duels(trial: &Trial) -> anyhow::Result<(Value, bool)> {
    let count = trial.count.unwrap_or(100).to_string();
    let (mut rows, mut kept) = (Vec::new(), true);
    for shape in DUELS {
        let folder = tempfile::tempdir()?;
        let words = [
            "bench",
            "--device",
            "cpu",
            "--kernels",
            "cpu_flash",
            "--shapes",
            shape,
            "--self-test",
            &count,
            "--json",
        ];
        let ended = trial.run(folder.path(), &words)?;
        kept &= ended.code == Some(0);
        let document: Value = serde_json::from_str(&ended.stdout).with_context(|| ended.stderr.clone())?;
        for row in document["rows"].as_array().into_iter().flatten() {
            eprintln!(
                "{} {}: {} duels, {} FAST, {} SLOW",
                row["problem"], row["kernel"], row["duels"], row["fast"], row["slow"]
            );
            rows.push(row.clone());
        }
    }
    Ok((json!(rows), kept))
}

/// Sets of runs of one program compared with each other; at most 2 %.
pub(super) fn runs(trial: &Trial) -> anyhow::Result<(Value, bool)> {
    let folder = tempfile::tempdir()?;
    let count = trial.count.unwrap_or(40).max(10).to_string();
    let words = [
        "bench",
        "--device",
        "cpu",
        "--kernels",
        "cpu_naive",
        "--shapes",
        "tiny,b1h4s128d64:causal,b1h8s256d64",
        "--no-baselines",
        "--iters",
        "30",
        "--repeat",
        &count,
        "--set",
        "trial",
    ];
    let made = trial.run(folder.path(), &words)?;
    anyhow::ensure!(made.code == Some(0), "the runs ended with {:?}: {}", made.code, made.stderr);
    let ended = trial.run(folder.path(), &["compare", "trial", "--self-test", "--json"])?;
    let document: Value = serde_json::from_str(&ended.stdout).with_context(|| ended.stderr.clone())?;
    eprintln!("{} runs: {}", count, document["rows"]);
    Ok((document["rows"].clone(), ended.code == Some(0)))
}
