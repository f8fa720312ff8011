//! A submission in Python beside the kernels of a device: called in a process of its own, and put through the same gates.
//!
//! Its inputs are changed at their addresses, its outputs poisoned and judged, its times held against the floor, as a kernel's are. Its
//! process has the clock, which code in it could change; so the lab looks at its own, too.

use std::{
    cell::RefCell,
    io::ErrorKind,
    time::{Duration, Instant},
};

use evosdpa_core::{Mask, Problem, file};
use evosdpa_oracle::inputs::Inputs;
use serde_json::{Value, json};

use super::{
    Device, DeviceId, KernelInfo, Loaded, Output, TimedDevice, TimedKernel, Timing, Turned, fresh_output,
};
use crate::{
    Error,
    baseline::python::Python,
    exchange::Submission,
    measure::{audit::Finding, floor::Ceilings, roof::Roof},
};

/// The name of the submission among a device's kernels.
pub const SUBMISSION: &str = "submission";

const PROGRAM: &str = include_str!("submission.py");

/// A device with a submission beside its kernels.
pub struct WithSubmission<'a> {
    inner: &'a dyn TimedDevice,
    python: RefCell<Python>,
    submission: Submission,
}

impl<'a> WithSubmission<'a> {
    /// Starts Python with torch. No answer of the submission may take longer than `limit`.
    pub fn start(
        inner: &'a dyn TimedDevice,
        submission: Submission,
        python: &str,
        threads: usize,
        limit: Duration,
    ) -> Result<Self, Error> {
        let wrong = |why| Error::Baseline { baseline: "python", why };
        let mut child = Python::start(python, PROGRAM, limit).map_err(wrong)?;
        child.ask(&json!({"op": "hello", "threads": threads})).map_err(wrong)?;
        Ok(Self { inner, python: RefCell::new(child), submission })
    }

    fn ask(&self, request: &Value) -> Result<Value, Error> {
        self.python.borrow_mut().ask(request).map_err(Error::Submission)
    }

    fn hand_over(&self, set: usize, inputs: &Inputs, turned: Turned) -> Result<Vec<Value>, Error> {
        let python = self.python.borrow();
        let tensors = [("q", &inputs.q), ("k", &inputs.k), ("v", &inputs.v)];
        let described = tensors.into_iter().enumerate().map(|(i, (name, tensor))| {
            python.hand_over(&format!("{name}{set}"), tensor, &turned.pieces(i, tensor.bytes()))
        });
        described.collect::<Result<_, _>>().map_err(Error::MachineFault)
    }
}

impl Device for WithSubmission<'_> {
    fn id(&self) -> DeviceId {
        self.inner.id()
    }

    fn accelerator(&self) -> Option<String> {
        self.inner.accelerator()
    }

    fn lock_name(&self) -> Option<String> {
        self.inner.lock_name()
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        self.inner.kernels()
    }

    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String> {
        if kernel != SUBMISSION {
            return self.inner.refuses(kernel, problem);
        }
        let is_plain = problem.features().is_empty() && !problem.dtype().is_eight_bit() && !problem.lse();
        let is_causal =
            matches!(problem.mask(), Mask::Causal(_)) && problem.sizes().seq_q == problem.sizes().seq_kv;
        let is_asked = is_plain && (problem.mask() == Mask::Full || is_causal);
        (!is_asked).then(|| {
            format!("tasks for other tools are plain, full or causal, in f32, f16 or bf16; {problem} is not")
        })
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        if kernel != SUBMISSION {
            return self.inner.load(kernel, problem, inputs);
        }
        Ok(Box::new(LoadedSubmission::new(self, problem, inputs)?))
    }

    fn timed(&self) -> Option<&dyn TimedDevice> {
        Some(self)
    }
}

impl TimedDevice for WithSubmission<'_> {
    fn input_sets(&self, problem: &Problem) -> usize {
        self.inner.input_sets(problem)
    }

    fn ceilings(&self, problem: &Problem) -> Result<Option<Ceilings>, Error> {
        self.inner.ceilings(problem)
    }

    fn roof(&self, problem: &Problem) -> Option<Roof> {
        self.inner.roof(problem)
    }

    fn clock_overhead_us(&self) -> Result<Option<f64>, Error> {
        self.inner.clock_overhead_us()
    }

    fn load_timed<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
        if kernel != SUBMISSION {
            return self.inner.load_timed(kernel, problem, inputs);
        }
        Ok(Box::new(LoadedSubmission::new(self, problem, inputs)?))
    }
}

/// A process whose clock says less than this share of what is seen from outside is not believed.
const BELIEVED_FROM: f64 = 0.5;
/// How often the outside is looked at again before that is said.
const DOUBTS: usize = 5;
/// Calls are repeated for at least this long to be seen from outside.
const SEEN_FOR: Duration = Duration::from_millis(20);
const SEEN_CALLS_MAX: usize = 1024;

struct LoadedSubmission<'a> {
    of: &'a WithSubmission<'a>,
    problem: Problem,
    given: Vec<(Inputs, Turned)>,
    /// The least that a call was seen to take from outside.
    seen_us: f64,
    has_output: bool,
}

impl<'a> LoadedSubmission<'a> {
    fn new(of: &'a WithSubmission<'a>, problem: &Problem, inputs: &[Inputs]) -> Result<Self, Error> {
        let Submission { path, entry } = &of.submission;
        let is_causal = problem.mask() != Mask::Full;
        of.ask(
            &json!({"op": "open", "path": path, "entry": entry, "is_causal": is_causal, "device": of.id()}),
        )?;
        let sets = inputs.iter().enumerate().map(|(set, inputs)| of.hand_over(set, inputs, Turned::NOT));
        of.ask(&json!({"op": "load", "sets": sets.collect::<Result<Vec<_>, _>>()?}))?;
        let given = inputs.iter().map(|inputs| (inputs.clone(), Turned::NOT)).collect();
        Ok(Self { of, problem: *problem, given, seen_us: f64::INFINITY, has_output: false })
    }

    /// What so many calls take from outside, with the way there and back.
    fn seen(&self, calls: usize) -> Result<f64, Error> {
        let start = Instant::now();
        self.of.ask(&json!({"op": "repeat", "calls": calls}))?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    /// One call seen from outside: what twice as many calls take longer.
    fn look_from_outside(&mut self) -> Result<(), Error> {
        let mut calls = 1;
        let once_us = loop {
            let us = self.seen(calls)?;
            if us >= SEEN_FOR.as_secs_f64() * 1e6 || calls >= SEEN_CALLS_MAX {
                break us;
            }
            calls *= 2;
        };
        let share_us = (self.seen(2 * calls)? - once_us) / calls as f64;
        // A disturbed pair can say anything, nothing included.
        if share_us > 0.0 {
            self.seen_us = self.seen_us.min(share_us);
        }
        Ok(())
    }

    fn call(&mut self, set: usize) -> Result<f64, Error> {
        let answer = self.of.ask(&json!({"op": "call", "set": set}))?;
        self.has_output = true;
        answer["time_us"]
            .as_f64()
            .ok_or_else(|| Error::Submission(format!("an answer without a time: {answer}")))
    }

    fn output(&self) -> Result<Output, Error> {
        if !self.has_output {
            return Ok(fresh_output(&self.problem));
        }
        let path = self.of.python.borrow().folder.join("o");
        self.of.ask(&json!({"op": "save", "path": path, "shape": self.problem.o_shape()}))?;
        let o = self.of.python.borrow().read_output(&path, &self.problem).map_err(Error::Submission)?;
        Ok(Output { o, lse: None })
    }
}

impl Loaded for LoadedSubmission<'_> {
    fn run(&mut self, set: usize) -> Result<Output, Error> {
        self.call(set)?;
        self.output()
    }

    fn changed_input(&mut self) -> Result<Option<String>, Error> {
        let folder = self.of.python.borrow().folder.clone();
        for (set, (given, turned)) in self.given.iter().enumerate() {
            let paths = ["q", "k", "v"].map(|name| folder.join(format!("now-{name}")));
            self.of.ask(&json!({"op": "inputs", "set": set, "paths": paths}))?;
            for (i, (name, tensor)) in
                [("Q", &given.q), ("K", &given.k), ("V", &given.v)].into_iter().enumerate()
            {
                let given = turned.pieces(i, tensor.bytes()).concat();
                match file::read(&paths[i], given.len() as u64) {
                    Ok(now) if now == given => {}
                    Err(error) if error.kind() != ErrorKind::FileTooLarge => {
                        return Err(Error::MachineFault(error.to_string()));
                    }
                    _ => return Ok(Some(name.to_owned())),
                }
            }
        }
        Ok(None)
    }
}

impl TimedKernel for LoadedSubmission<'_> {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        // Calls that are seen from outside leave outputs of their own: the last one is always that on `set`.
        if self.seen_us.is_infinite() {
            self.look_from_outside()?;
        }
        let mut said_us = self.call(set)?;
        for _ in 0..DOUBTS {
            if self.seen_us.is_infinite() || said_us >= BELIEVED_FROM * self.seen_us {
                return Ok(said_us);
            }
            self.look_from_outside()?;
            said_us = self.call(set)?;
        }
        let [said_ns, seen_ns] = [said_us, self.seen_us].map(|us| (us * 1e3) as u64);
        let finding = Finding::ForeignClock { said_ns, seen_ns };
        Err(Error::Caught { kernel: SUBMISSION.to_owned(), finding })
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), Error> {
        match timing {
            Timing::Graph | Timing::Single => Ok(()),
            other => Err(Error::Submission(format!("submissions are timed call by call, not by `{other}`"))),
        }
    }

    fn refill(&mut self, set: usize, inputs: &Inputs, turned: Turned) -> Result<(), Error> {
        let tensors = self.of.hand_over(set, inputs, turned)?;
        self.of.ask(&json!({"op": "refill", "set": set, "tensors": tensors}))?;
        self.given[set] = (inputs.clone(), turned);
        Ok(())
    }

    fn poison(&mut self) -> Result<(), Error> {
        self.of.ask(&json!({"op": "poison"})).map(drop)
    }

    fn timed_outputs(&mut self, set: usize) -> Result<Vec<(usize, Output)>, Error> {
        Ok(vec![(set, self.output()?)])
    }
}
