//! Proposers from outside: any program that reads a line of JSON and answers with one.
//!
//! It gets the task (I1), the elites with their sources (I2) and the insights (I3), and answers with tunables or a new
//! source, and why. One that crashes, hangs or answers junk costs one evaluation; it is started anew for the next.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    log::{Evaluation, Header},
    space::Point,
};
use crate::profile::Insight;

/// The schema of a request.
pub const SCHEMA: &str = "evosdpa.proposal/1";

/// The longest answer that is read; a source is shorter.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// What a proposer is asked.
#[derive(Clone, Debug, Serialize)]
pub struct Request<'a> {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// What is tuned, where and for which problems.
    pub task: &'a Header,
    /// Number of the evaluation that the answer will be.
    pub number: u64,
    /// Evaluations left, this one included.
    pub left: u64,
    /// Source of the kernel that is tuned, where it has one.
    pub source: Option<&'a str>,
    /// Elites, best first.
    pub elites: Vec<EliteView<'a>>,
    /// Advice on the best.
    pub insights: &'a [Insight],
    /// What became of the last candidates, oldest first.
    pub history: &'a [Evaluation],
}

/// An elite as proposers see it.
#[derive(Clone, Debug, Serialize)]
pub struct EliteView<'a> {
    /// The evaluation, with times by problem.
    #[serde(flatten)]
    pub evaluation: &'a Evaluation,
    /// Its source, where it is not the kernel's own.
    pub source: Option<&'a str>,
}

/// What a proposer answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Tunables; those not named keep their defaults.
    #[serde(default)]
    pub tunables: Point,
    /// A new source for the kernel, which keeps its manifest.
    #[serde(default)]
    pub source: Option<String>,
    /// Why.
    #[serde(default)]
    pub rationale: Option<String>,
}

/// A proposer: a command and, while it runs, its process.
#[derive(Debug)]
pub struct Proposer {
    command: String,
    limit: Duration,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<std::io::Result<String>>,
}

impl Proposer {
    /// A shell command, with this much time for each answer. It is started when first asked.
    pub fn new(command: &str, limit: Duration) -> Self {
        Self { command: command.to_owned(), limit, running: None }
    }

    /// Asks once. Whatever goes wrong is the answer's fault and ends the process, never the tune.
    pub fn ask(&mut self, request: &Request<'_>) -> Result<Answer, String> {
        let answer = self.exchange(request);
        if answer.is_err() {
            self.running = None;
        }
        answer
    }

    fn exchange(&mut self, request: &Request<'_>) -> Result<Answer, String> {
        let running = match &mut self.running {
            Some(running) => running,
            None => self.running.insert(start(&self.command)?),
        };
        let line = serde_json::to_string(request).map_err(|error| error.to_string())?;
        // A process that is gone shows itself in the answer that does not come.
        let _ = writeln!(running.requests, "{line}").and_then(|()| running.requests.flush());
        let line = match running.answers.recv_timeout(self.limit) {
            Ok(Ok(line)) => line,
            Ok(Err(error)) => return Err(format!("the proposer's answer cannot be read: {error}")),
            Err(RecvTimeoutError::Timeout) => {
                return Err(format!("the proposer did not answer within {} s", self.limit.as_secs_f64()));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err("the proposer ended without an answer".to_owned());
            }
        };
        serde_json::from_str(&line).map_err(|error| {
            let shown: String = line.chars().take(80).collect();
            format!("the proposer answered `{shown}`, which is no proposal: {error}")
        })
    }
}

fn start(command: &str) -> Result<Running, String> {
    let mut child = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("the proposer cannot be started: {error}"))?;
    // Both were asked for above.
    let (Some(requests), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("the proposer has no standard input or output".to_owned());
    };
    let (sender, answers) = channel();
    std::thread::spawn(move || {
        let mut output = BufReader::new(output);
        loop {
            let mut line = String::new();
            let read = output.by_ref().take(ANSWER_BYTES_MAX).read_line(&mut line);
            let sent = match read {
                Ok(0) => break,
                Ok(_) if !line.ends_with('\n') && line.len() as u64 >= ANSWER_BYTES_MAX => {
                    let _ = sender.send(Err(std::io::Error::other("it is longer than 4 MiB")));
                    break;
                }
                read => sender.send(read.map(|_| line)),
            };
            if sent.is_err() {
                break;
            }
        }
    });
    Ok(Running { child, requests, answers })
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already; either way there must be no zombie.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::evolve::log::tests::{evaluation, header};

    fn ask(command: &str, times: usize) -> Vec<Result<Answer, String>> {
        let header = header();
        let history = [evaluation(0, 1, 1.0)];
        let mut proposer = Proposer::new(command, Duration::from_millis(400));
        (0..times)
            .map(|number| {
                proposer.ask(&Request {
                    schema: SCHEMA,
                    task: &header,
                    number: number as u64,
                    left: 5,
                    source: None,
                    elites: vec![EliteView { evaluation: &history[0], source: None }],
                    insights: &[],
                    history: &history,
                })
            })
            .collect()
    }

    #[test]
    fn answers_are_read_and_requests_hold_the_task() {
        let echo = r#"while read -r line; do case "$line" in *'"elites":[{'*'"problems":["tiny f32"]'*|*'"problems":["tiny f32"]'*'"elites":[{'*) echo '{"tunables":{"A":2},"rationale":"why not"}';; *) echo no;; esac; done"#;
        for answer in ask(echo, 2) {
            let answer = answer.unwrap();
            assert_eq!((answer.tunables["A"], answer.rationale.as_deref()), (2, Some("why not")));
        }
    }

    #[test]
    fn a_bad_proposer_costs_its_answer_and_is_started_anew() {
        for (command, expected) in [
            ("exit 3", "ended without an answer"),
            ("echo junk; sleep 5", "is no proposal"),
            ("echo '{\"tunable\":{}}'; sleep 5", "unknown field"),
            ("head -c 5000000 /dev/zero; sleep 5", "longer than 4 MiB"),
            ("/nowhere/proposer", "ended without an answer"),
        ] {
            let message = ask(command, 1)[0].clone().unwrap_err();
            assert!(message.contains(expected), "{command}: {message}");
        }
        let start = Instant::now();
        assert!(ask("sleep 60", 1)[0].clone().unwrap_err().contains("did not answer within 0.4 s"));
        assert!(start.elapsed() < Duration::from_secs(20));
        // The first process crashes, the second answers.
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark").display().to_string();
        let command = format!(
            "if [ -e {mark} ]; then read x; echo '{{\"tunables\":{{\"A\":0}}}}'; sleep 9; else touch {mark}; fi"
        );
        let answers = ask(&command, 2);
        assert!(answers[0].is_err() && answers[1].is_ok(), "{answers:?}");
    }
}
