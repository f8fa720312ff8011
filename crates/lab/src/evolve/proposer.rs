//! Proposers from outside: any program that reads a line of JSON and answers with one.
//!
//! It gets the task (I1), the elites with their sources (I2) and the insights (I3), and answers with tunables or a new
//! source, and why. One that crashes, hangs, never reads, answers junk or without end costs one evaluation: it is ended with its
//! whole process group, and started anew for the next.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{BufReader, Write},
    process::{Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    log::{Evaluation, Header},
    space::Point,
};
use crate::{
    process::{Group, next_line},
    profile::Insight,
};

/// The schema of a request.
pub const SCHEMA: &str = "evosdpa.proposal/1";

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
    /// The other files that make it, by name: its manifest, which is the contract that a new source keeps, and its headers.
    pub files: BTreeMap<&'a str, &'a str>,
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
    /// How the candidate was made, for the log; `proposer` where it is not said.
    #[serde(default)]
    pub operator: Option<String>,
    /// Evaluations it was made from; the best where they are not said.
    #[serde(default)]
    pub parents: Option<Vec<u64>>,
    /// Nothing is proposed this time, for this reason. It costs the evaluation.
    #[serde(default)]
    pub none: Option<String>,
    /// Nothing will be proposed any more, for this reason: the tune ends as it does when its budget is spent.
    #[serde(default)]
    pub end: Option<String>,
    /// Nothing can be proposed, for this reason: the tune ends with an error, and can be resumed.
    #[serde(default)]
    pub error: Option<String>,
}

/// The longest name of an operator.
const OPERATOR_CHARS_MAX: usize = 40;

impl Answer {
    /// What is wrong with it, for evaluation `number`.
    fn fault(&self, number: u64) -> Option<String> {
        let is_name = |name: &String| {
            let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
            letters && !name.is_empty() && name.len() <= OPERATOR_CHARS_MAX
        };
        if let Some(operator) = self.operator.as_ref().filter(|operator| !is_name(operator)) {
            let shown: String = operator.chars().take(OPERATOR_CHARS_MAX).collect();
            return Some(format!(
                "the operator `{}` is no name of at most {OPERATOR_CHARS_MAX} letters, digits, - and _",
                shown.escape_debug()
            ));
        }
        let later = self.parents.iter().flatten().find(|parent| **parent >= number);
        later.map(|parent| format!("{parent} cannot be a parent of evaluation {number}"))
    }
}

/// A proposer: a command and, while it runs, its process.
#[derive(Debug)]
pub struct Proposer {
    /// The program and its arguments.
    command: Vec<OsString>,
    limit: Duration,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    /// Written by a thread of its own, because a pipe that nobody reads blocks who writes to it.
    requests: SyncSender<String>,
    answers: Receiver<std::io::Result<String>>,
    /// Last, so that it is ended last; then both threads find their pipes closed.
    _group: Group,
}

/// How often one looks whether the answer is still wanted.
const PATIENCE: Duration = Duration::from_millis(50);

impl Proposer {
    /// A shell command, with this much time for each answer. It is started when first asked.
    pub fn new(command: &str, limit: Duration) -> Self {
        Self::program(["sh", "-c", command].map(OsString::from).to_vec(), limit)
    }

    /// A program with its arguments, which no shell reads.
    pub fn program(command: Vec<OsString>, limit: Duration) -> Self {
        Self { command, limit, running: None }
    }

    /// Asks once. Whatever goes wrong is the answer's fault and ends the process, never the tune. `stopped` ends the wait.
    pub fn ask(&mut self, request: &Request<'_>, stopped: &dyn Fn() -> bool) -> Result<Answer, String> {
        let answer = self.exchange(request, stopped);
        if answer.is_err() {
            self.running = None;
        }
        answer
    }

    fn exchange(&mut self, request: &Request<'_>, stopped: &dyn Fn() -> bool) -> Result<Answer, String> {
        let running = match &mut self.running {
            Some(running) => running,
            None => self.running.insert(start(&self.command)?),
        };
        let line = serde_json::to_string(request).map_err(|error| error.to_string())?;
        // One that is gone, or has not read the last one yet, shows itself in the answer that does not come.
        let _ = running.requests.try_send(line);
        let deadline = Instant::now() + self.limit;
        let line = loop {
            match running.answers.recv_timeout(PATIENCE.min(self.limit)) {
                Ok(Ok(line)) => break line,
                Ok(Err(error)) => return Err(format!("the proposer's answer cannot be read: {error}")),
                Err(RecvTimeoutError::Timeout) if stopped() => return Err("the tune was stopped".to_owned()),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("the proposer did not answer within {} s", self.limit.as_secs_f64()));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err("the proposer ended without an answer".to_owned());
                }
            }
        };
        let answer: Answer = serde_json::from_str(&line).map_err(|error| {
            let shown: String = line.chars().take(80).collect();
            format!("the proposer answered `{shown}`, which is no proposal: {error}")
        })?;
        match answer.fault(request.number) {
            Some(fault) => Err(format!("the proposer's answer is no proposal: {fault}")),
            None => Ok(answer),
        }
    }
}

fn start(command: &[OsString]) -> Result<Running, String> {
    let Some((program, arguments)) = command.split_first() else {
        return Err("the proposer has no program".to_owned());
    };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut group =
        Group::spawn(&mut command).map_err(|error| format!("the proposer cannot be started: {error}"))?;
    // Both were asked for above.
    let (Some(mut input), Some(output)) = (group.child.stdin.take(), group.child.stdout.take()) else {
        return Err("the proposer has no standard input or output".to_owned());
    };
    // One of each at a time: what is not read yet stays with who wrote it.
    let (requests, to_write) = sync_channel::<String>(1);
    std::thread::spawn(move || {
        for line in to_write {
            if writeln!(input, "{line}").and_then(|()| input.flush()).is_err() {
                break;
            }
        }
    });
    let (sender, answers) = sync_channel(1);
    std::thread::spawn(move || {
        let mut output = BufReader::new(output);
        while let Some(line) = next_line(&mut output).transpose() {
            let is_last = line.is_err();
            if sender.send(line).is_err() || is_last {
                break;
            }
        }
    });
    Ok(Running { requests, answers, _group: group })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evolve::log::tests::{evaluation, header};

    fn ask(command: &str, times: usize) -> Vec<Result<Answer, String>> {
        let header = header();
        let history = [evaluation(0, 1, 1.0)];
        let mut proposer = Proposer::new(command, Duration::from_millis(400));
        (0..times)
            .map(|number| {
                let request = Request {
                    schema: SCHEMA,
                    task: &header,
                    number: number as u64,
                    left: 5,
                    source: None,
                    files: BTreeMap::new(),
                    elites: vec![EliteView { evaluation: &history[0], source: None }],
                    insights: &[],
                    history: &history,
                };
                proposer.ask(&request, &|| false)
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
            ("echo '{\"operator\":\"a b\"}'; sleep 5", "is no name"),
            ("echo '{\"parents\":[0]}'; sleep 5", "0 cannot be a parent of evaluation 0"),
            ("/nowhere/proposer", "ended without an answer"),
        ] {
            let message = ask(command, 1)[0].clone().unwrap_err();
            assert!(message.contains(expected), "{command}: {message}");
        }
        assert!(ask("sleep 600", 1)[0].clone().unwrap_err().contains("did not answer within 0.4 s"));
        // The first process crashes, the second answers.
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark").display().to_string();
        let command = format!(
            "if [ -e {mark} ]; then read x; echo '{{\"tunables\":{{\"A\":0}}}}'; sleep 9; else touch {mark}; fi"
        );
        let answers = ask(&command, 2);
        assert!(answers[0].is_err() && answers[1].is_ok(), "{answers:?}");
    }

    /// One that never reads what is longer than a pipe holds, one that answers without end, and one that leaves a child behind:
    /// none holds up the tune, and nothing of them is left.
    #[test]
    fn a_hostile_proposer_is_ended_with_its_whole_group() {
        let folder = tempfile::tempdir().unwrap();
        let pid_file = folder.path().join("pid");
        // In its group, in a session of its own, and there as an orphan.
        let pid = pid_file.display();
        let child = format!("sleep 1000 & echo $! > {pid}; ");
        let elsewhere = format!(
            "setsid sh -c 'echo $$ > {pid}; exec sleep 1000' & while [ ! -s {pid} ]; do sleep 0.01; done; "
        );
        let orphan = format!(
            "(setsid sh -c 'echo $$ > {pid}; exec sleep 1000' &); while [ ! -s {pid} ]; do sleep 0.01; done; "
        );
        for (child, command, expected) in [
            (&child, "sleep 1000", "did not answer"),
            (&child, "yes '{\"tunables\":{\"A\":1}}'", ""),
            (&child, "cat /dev/zero", "longer than 4 MiB"),
            (&child, "yes; sleep 1000", "is no proposal"),
            (&elsewhere, "yes; sleep 1000", "is no proposal"),
            (&orphan, "yes; sleep 1000", "is no proposal"),
        ] {
            let _ = std::fs::remove_file(&pid_file);
            let header = header();
            let history = [evaluation(0, 1, 1.0)];
            let source = "x".repeat(1 << 20);
            let mut proposer = Proposer::new(&format!("{child}{command}"), Duration::from_millis(400));
            for number in 0..2 {
                let answer = proposer.ask(
                    &Request {
                        schema: SCHEMA,
                        task: &header,
                        number,
                        left: 5,
                        source: Some(&source),
                        files: BTreeMap::new(),
                        elites: vec![],
                        insights: &[],
                        history: &history,
                    },
                    &|| false,
                );
                match answer {
                    Ok(_) => assert_eq!(expected, "", "{command}"),
                    Err(why) => {
                        assert!(!expected.is_empty() && why.contains(expected), "{command}: {why}")
                    }
                }
            }
            drop(proposer);
            let pid = std::fs::read_to_string(&pid_file).unwrap();
            assert!(is_gone(pid.trim()), "{command}: its child {pid} is still there");
        }
    }

    /// Ended, or a zombie that nobody has waited for yet.
    fn is_gone(pid: &str) -> bool {
        (0..500).any(|_| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            let gone = stat.map_or(true, |stat| stat.contains(") Z "));
            if !gone {
                std::thread::sleep(Duration::from_millis(20));
            }
            gone
        })
    }

    #[test]
    fn being_stopped_ends_the_wait() {
        let header = header();
        let mut proposer = Proposer::new("sleep 1000", Duration::from_secs(3600));
        let request = Request {
            schema: SCHEMA,
            task: &header,
            number: 0,
            left: 1,
            source: None,
            files: BTreeMap::new(),
            elites: vec![],
            insights: &[],
            history: &[],
        };
        assert!(proposer.ask(&request, &|| true).unwrap_err().contains("stopped"));
    }
}
