//! Tunes that are killed at random moments and resumed.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    path::Path,
    process::Stdio,
    time::Duration,
};

use serde_json::{Value, json};

use super::Trial;

const EVALUATIONS: &str = "12";
const COMMAND: [&str; 13] = [
    "tune",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--shapes",
    "tiny",
    "--blocks",
    "9",
    "--evaluations",
    EVALUATIONS,
    "--out",
    "t",
];

/// Kills of one tune at most, and when the latest may come.
const ROUNDS: usize = 8;
const MOMENT_MS_MAX: u64 = 2500;

/// The ways of proposing, which tunes take in turn.
const WAYS: [&[&str]; 6] = [
    &[],
    &["--strategy", "random"],
    &["--strategy", "grid"],
    &["--strategy", "hill-climb"],
    &["--evaluators", "2"],
    &["--proposer", "python3 \"$EVOSDPA_EXAMPLES/proposer/proposer.py\""],
];

/// Documents in the tune's folder that are not whole.
fn torn(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder.join("t")).into_iter().flatten().flatten();
    let documents = entries.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "json"));
    let is_whole =
        |path: &Path| std::fs::read(path).is_ok_and(|bytes| serde_json::from_slice::<Value>(&bytes).is_ok());
    documents.filter(|entry| !is_whole(&entry.path())).count()
}

/// The evaluations in the log.
fn numbers(folder: &Path) -> anyhow::Result<Vec<u64>> {
    let text = std::fs::read_to_string(folder.join("t/log.jsonl")).unwrap_or_default();
    // The last line of a killed tune may be cut.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(lines.filter(|line| line["kind"] == "evaluation").filter_map(|line| line["number"].as_u64()).collect())
}

pub(super) fn run(trial: &Trial) -> anyhow::Result<(Value, bool)> {
    let wanted = trial.count.unwrap_or(40);
    let (mut kills, mut tunes, mut lost, mut twice, mut half) = (0, 0, 0, 0, 0);
    let examples = crate::python::root().join("examples");
    while kills < wanted {
        let folder = tempfile::tempdir()?;
        let mut known: Vec<u64> = Vec::new();
        for round in 0.. {
            let resumed = round > 0 && folder.path().join("t").exists();
            let words = COMMAND.into_iter().chain(WAYS[tunes % WAYS.len()].iter().copied());
            let words: Vec<&str> = words.chain(resumed.then_some("--resume")).collect();
            let mut command = trial.command(folder.path(), &words);
            command.env("EVOSDPA_EXAMPLES", &examples);
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
            // Sooner or later than the last time; after some rounds it is left to finish.
            if round < ROUNDS && kills < wanted {
                let moment_ms = RandomState::new().build_hasher().finish() % MOMENT_MS_MAX;
                std::thread::sleep(Duration::from_millis(moment_ms));
                if child.try_wait()?.is_none() {
                    child.kill()?;
                    kills += 1;
                }
            }
            let output = child.wait_with_output()?;
            let now = numbers(folder.path())?;
            lost += known.iter().filter(|number| !now.contains(number)).count();
            twice += now.len() - now.iter().collect::<std::collections::BTreeSet<_>>().len();
            half += torn(folder.path());
            known = now;
            if output.status.success() {
                break;
            }
            let words = String::from_utf8_lossy(&output.stderr);
            anyhow::ensure!(
                output.status.code().is_none(),
                "a resumed tune ended with {}: {words}",
                output.status
            );
        }
        anyhow::ensure!(
            known.len().to_string() == EVALUATIONS,
            "{} evaluations instead of {EVALUATIONS}",
            known.len()
        );
        tunes += 1;
        eprintln!("{kills} kills, {tunes} tunes finished");
    }
    let row = json!({
        "kills": kills, "tunes": tunes, "evaluations_lost": lost, "evaluations_twice": twice, "half_documents": half,
    });
    Ok((row, lost + twice + half == 0))
}
