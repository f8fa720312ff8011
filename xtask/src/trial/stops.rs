//! Seconds from Ctrl-C to the end.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::Trial;

/// What is promised, with some room for a busy machine.
const LIMIT: Duration = Duration::from_secs(4);
/// Where each is stopped: while it sets out, and in the middle.
const AFTER: [Duration; 2] = [Duration::from_millis(400), Duration::from_millis(3000)];

const COMMANDS: [&[&str]; 10] = [
    &["bench", "--device", "cpu", "--shapes", "long", "--no-baselines"],
    &["bench", "--device", "cpu", "--shapes", "b1h8s8192d128", "--kernels", "cpu_naive", "--no-baselines"],
    &["bench", "--device", "cpu", "--shapes", "tiny", "--self-test", "100000"],
    &["bench", "--device", "cpu", "--shapes", "mission", "--repeat", "50", "--no-baselines"],
    &["check", "--device", "cpu", "--shapes", "long128"],
    &["check", "--device", "sim", "--kernels", "sdpa_v2c", "--shapes", "b1h8s512d64"],
    &["sanitize", "--device", "sim", "--kernels", "sdpa_v2c", "--shapes", "b1h2s256d64"],
    &["sanitize", "--device", "sim", "--mutants"],
    &["tune", "--device", "cpu", "--shapes", "mission", "--evaluations", "1000"],
    &["tune", "--device", "cpu", "--shapes", "tiny", "--evaluations", "1000", "--proposer", "sleep 1000"],
];

pub(super) fn run(trial: &Trial) -> anyhow::Result<(Value, bool)> {
    let (mut rows, mut kept) = (Vec::new(), true);
    for words in COMMANDS {
        for after in AFTER {
            let folder = tempfile::tempdir()?;
            let mut command = trial.command(folder.path(), words);
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            std::thread::sleep(after);
            if child.try_wait()?.is_some() {
                // A fast machine is done by then.
                continue;
            }
            let start = Instant::now();
            Command::new("kill").args(["-INT", &child.id().to_string()]).status()?;
            let status = child.wait()?;
            let took = start.elapsed();
            kept &= took < LIMIT;
            let seconds = (took.as_secs_f64() * 100.0).round() / 100.0;
            eprintln!("{seconds:.2} s, status {:?}: {}", status.code(), words.join(" "));
            rows.push(json!({"command": words.join(" "), "after_s": after.as_secs_f64(), "seconds": seconds, "status": status.code()}));
        }
    }
    let most = rows.iter().filter_map(|row| row["seconds"].as_f64()).fold(0.0, f64::max);
    Ok((json!({"stopped": rows.len(), "most_seconds": most, "rows": rows}), kept))
}
