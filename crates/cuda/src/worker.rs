//! Compiling in worker processes.
//!
//! NVRTC compiles one source at a time within a process, and a source can make it crash or run for ever. So the program
//! starts itself again with a hidden argument; that process reads requests as lines of JSON and answers each with a line
//! of JSON and the code's bytes. A worker that dies or takes too long is replaced, and only its request fails.

use std::{
    ffi::OsString,
    io::{self, BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, ChildStdin, Stdio},
    sync::{
        Mutex, MutexGuard,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{
    CompileError, CompileRequest, Compiled, Compiler, Error, Result, nvrtc,
    program::Program,
    toolkit::{HOME_VARIABLE, Toolkit},
};

/// The hidden argument that makes a program a compile worker.
pub const ARGUMENT: &str = "__compile-worker";

/// To be called first in `main`: if this process was started as a compile worker, it works and never returns.
pub fn run_if_requested() {
    run_if_requested_by(&std::env::args_os().take(2).collect::<Vec<_>>());
}

/// The same for a program whose arguments are not the process's own: an interpreter runs it. The first is its name.
pub fn run_if_requested_by(arguments: &[OsString]) {
    if arguments.get(1).is_some_and(|argument| argument == ARGUMENT) {
        let code = match serve() {
            Ok(()) => 0,
            // The other side is gone; there is nobody to tell.
            Err(_) => 1,
        };
        std::process::exit(code);
    }
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
enum Answer {
    /// Followed by the code's bytes.
    Compiled { log: String, code_bytes: usize, time_us: u64 },
    /// The source does not compile.
    Rejected(Rejection),
    /// Something else went wrong.
    Failed { problem: String },
}

#[derive(Serialize, Deserialize)]
struct Rejection {
    label: String,
    target: String,
    log: String,
}

fn serve() -> io::Result<()> {
    let mut output = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let (answer, code) = answer(&line?);
        serde_json::to_writer(&mut output, &answer)?;
        output.write_all(b"\n")?;
        output.write_all(&code)?;
        output.flush()?;
    }
    Ok(())
}

fn answer(line: &str) -> (Answer, Vec<u8>) {
    let compiled = serde_json::from_str::<CompileRequest>(line)
        .map_err(|error| error.to_string())
        .map(|request| Compiler::open().and_then(|compiler| compiler.compile(&request)));
    match compiled {
        Err(problem) => (Answer::Failed { problem }, Vec::new()),
        Ok(Err(Error::Compile(CompileError { label, target, log }))) => {
            (Answer::Rejected(Rejection { label, target, log }), Vec::new())
        }
        Ok(Err(error)) => (Answer::Failed { problem: error.to_string() }, Vec::new()),
        Ok(Ok(Compiled { code, log, time })) => {
            let time_us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
            (Answer::Compiled { log, code_bytes: code.len(), time_us }, code)
        }
    }
}

/// Worker processes, started when first needed.
#[derive(Debug)]
pub struct CompilePool {
    program: Program,
    limit: Duration,
    slots: Vec<Mutex<Option<Worker>>>,
}

#[derive(Debug)]
struct Worker {
    child: Child,
    /// To the thread that writes: a worker that does not read must not block the one who waits for it.
    requests: Sender<String>,
    answers: Receiver<io::Result<(Answer, Vec<u8>)>>,
}

impl CompilePool {
    /// A pool of this many workers, each with this much time for one compilation. The program that calls this must call
    /// [`run_if_requested`] first in its `main`.
    pub fn new(workers: usize, limit: Duration) -> Result<Self> {
        Ok(Self::of(Program::running()?, workers, limit))
    }

    /// A pool whose workers are another program that calls [`run_if_requested`].
    pub fn with_program(program: PathBuf, workers: usize, limit: Duration) -> Self {
        Self::of(Program { path: program, arguments: Vec::new() }, workers, limit)
    }

    fn of(program: Program, workers: usize, limit: Duration) -> Self {
        let slots = (0..workers.max(1)).map(|_| Mutex::new(None)).collect();
        Self { program, limit, slots }
    }

    /// How many compilations can run at once.
    pub fn workers(&self) -> usize {
        self.slots.len()
    }

    /// Compiles in a free worker, waiting for one if all are busy.
    pub fn compile(&self, request: &CompileRequest) -> Result<Compiled> {
        let mut slot = self.free_slot();
        let outcome = match slot.take() {
            Some(worker) => self.ask(worker, request),
            None => self.start(request).and_then(|worker| self.ask(worker, request)),
        };
        outcome.and_then(|(worker, answer, code)| {
            *slot = Some(worker);
            match answer {
                Answer::Compiled { log, time_us, .. } => {
                    Ok(Compiled { code, log, time: Duration::from_micros(time_us) })
                }
                Answer::Rejected(Rejection { label, target, log }) => {
                    Err(Error::Compile(CompileError { label, target, log }))
                }
                Answer::Failed { problem } => {
                    let label = request.label.clone();
                    Err(nvrtc::Error::Call { operation: "compile worker", label, problem }.into())
                }
            }
        })
    }

    fn free_slot(&self) -> MutexGuard<'_, Option<Worker>> {
        loop {
            for slot in &self.slots {
                match slot.try_lock() {
                    Ok(guard) => return guard,
                    // A thread panicked while it held the worker: whatever state that is in, start anew.
                    Err(std::sync::TryLockError::Poisoned(poisoned)) => {
                        let mut guard = poisoned.into_inner();
                        *guard = None;
                        return guard;
                    }
                    Err(std::sync::TryLockError::WouldBlock) => {}
                }
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn start(&self, request: &CompileRequest) -> Result<Worker> {
        let died = |problem: String| Error::WorkerDied { label: request.label.clone(), problem };
        let mut child = self
            .program
            .command()
            .arg(ARGUMENT)
            // The search is done once, here, and errors of it are this process's own.
            .env(HOME_VARIABLE, &Toolkit::find()?.root)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| died(format!("{} cannot be started: {error}", self.program.path.display())))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(died("it has no pipes".to_owned()));
        };
        let (sender, answers) = mpsc::channel();
        let (requests, lines) = mpsc::channel();
        thread::spawn(move || write_requests(input, &lines));
        thread::spawn(move || {
            let mut output = BufReader::new(output);
            loop {
                let answer = read_answer(&mut output);
                let last = answer.is_err();
                if sender.send(answer).is_err() || last {
                    break;
                }
            }
        });
        Ok(Worker { child, requests, answers })
    }

    /// On any error the worker is dropped, which ends its process.
    fn ask(&self, mut worker: Worker, request: &CompileRequest) -> Result<(Worker, Answer, Vec<u8>)> {
        let died = |problem: String| Error::WorkerDied { label: request.label.clone(), problem };
        let line = serde_json::to_string(request).map_err(|error| died(error.to_string()))?;
        if worker.requests.send(line).is_err() {
            return Err(died(worker.how_it_ended()));
        }
        match worker.answers.recv_timeout(self.limit) {
            Ok(Ok((answer, code))) => Ok((worker, answer, code)),
            Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => Err(died(worker.how_it_ended())),
            Err(RecvTimeoutError::Timeout) => {
                Err(Error::CompileTimeout { label: request.label.clone(), limit: self.limit })
            }
        }
    }
}

impl Worker {
    /// Its pipes are closed, so it has ended or is about to.
    fn how_it_ended(&mut self) -> String {
        let deadline = Instant::now() + Duration::from_secs(1);
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.to_string(),
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
                Ok(None) => return "it closed its pipes".to_owned(),
                Err(error) => return error.to_string(),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already; either way there must be no zombie.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Until the pool lets go of the worker or the worker stops reading.
fn write_requests(mut input: ChildStdin, lines: &Receiver<String>) {
    for mut line in lines {
        line.push('\n');
        if input.write_all(line.as_bytes()).and_then(|()| input.flush()).is_err() {
            break;
        }
    }
}

fn read_answer(output: &mut impl io::BufRead) -> io::Result<(Answer, Vec<u8>)> {
    let mut line = String::new();
    if output.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let answer: Answer = serde_json::from_str(&line)?;
    let mut code = Vec::new();
    if let Answer::Compiled { code_bytes, .. } = &answer {
        code = vec![0; *code_bytes];
        output.read_exact(&mut code)?;
    }
    Ok((answer, code))
}
