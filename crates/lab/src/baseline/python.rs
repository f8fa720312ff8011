//! A Python program in a child process that answers requests: JSON lines both ways, tensors through files. A child that hangs,
//! dies or prints something else costs its own answers and nothing more.

use std::{
    io::{self, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    time::Duration,
};

use evosdpa_core::{Problem, Tensor, file};
use serde_json::{Value, json};

use crate::process::next_line;

/// What every program begins with: how it is asked, and how it answers.
const REQUESTS: &str = include_str!("requests.py");

/// A running child.
pub(crate) struct Python {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<io::Result<String>>,
    limit: Duration,
    /// Where tensors are handed over.
    pub(crate) folder: PathBuf,
}

impl Python {
    /// Starts `python` with a program. No answer may take longer than `limit`. What goes wrong, here and below, is said in words.
    pub(crate) fn start(python: &str, program: &str, limit: Duration) -> Result<Self, String> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        // Requests are JSON, and name it.
        let temporary = std::env::temp_dir();
        if temporary.to_str().is_none() {
            return Err(format!(
                "the name of the temporary folder {} is no UTF-8 text; name another with TMPDIR",
                temporary.display()
            ));
        }
        let mut child = Command::new(python)
            .args(["-c", &format!("{REQUESTS}\n\n{program}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("cannot start `{python}`: {error}; name another with --python"))?;
        // Both were asked for above.
        let (Some(requests), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("`{python}` has no standard input or output"));
        };
        // One at a time: what is not read yet stays with who wrote it.
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
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = temporary.join(format!("evosdpa-python-{}-{number}", std::process::id()));
        Ok(Self { child, requests, answers, limit, folder })
    }

    /// One request and its answer.
    pub(crate) fn ask(&mut self, request: &Value) -> Result<Value, String> {
        // A child that is gone shows itself in the answer that does not come.
        let _ = writeln!(self.requests, "{request}").and_then(|()| self.requests.flush());
        let line = match self.answers.recv_timeout(self.limit) {
            Ok(Ok(line)) => line,
            Ok(Err(error)) => return Err(format!("python's output cannot be read: {error}")),
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                return Err(format!("no answer within {} s", self.limit.as_secs_f64()));
            }
            Err(RecvTimeoutError::Disconnected) => return Err("python ended without an answer".to_owned()),
        };
        let answer: Value = serde_json::from_str(&line).map_err(|_| {
            let shown: String = line.trim_end().chars().take(80).collect();
            format!("python printed `{shown}` where an answer was due")
        })?;
        match answer["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(answer),
        }
    }

    /// Writes a tensor's bytes, in the pieces in which they are to lie, and describes it.
    pub(crate) fn hand_over(&self, name: &str, tensor: &Tensor, pieces: &[&[u8]]) -> Result<Value, String> {
        std::fs::create_dir_all(&self.folder)
            .map_err(|error| format!("cannot make {}: {error}", self.folder.display()))?;
        let path = self.folder.join(name);
        std::fs::write(&path, pieces.concat())
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        let view = tensor.view();
        Ok(json!({"path": path, "dtype": view.dtype(), "shape": view.shape(), "strides": view.strides()}))
    }

    /// Reads an output that the child has written, packed.
    pub(crate) fn read_output(&self, path: &Path, problem: &Problem) -> Result<Tensor, String> {
        let mut tensor = Tensor::zeros(problem.o_shape(), problem.output_dtype(), evosdpa_core::Layout::Bhsd);
        let bytes = file::read(path, tensor.bytes().len() as u64);
        let bytes = bytes.map_err(|error| format!("cannot read its output: {error}"))?;
        if bytes.len() != tensor.bytes().len() {
            return Err(format!("its output has {} bytes, not {}", bytes.len(), tensor.bytes().len()));
        }
        tensor.bytes_mut().copy_from_slice(&bytes);
        Ok(tensor)
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Nothing is lost when temporary files stay behind.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
