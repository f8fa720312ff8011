//! Audits: does a kernel do all of its work in the calls that are timed?
//!
//! Between timed calls, at moments drawn by chance, a kernel's inputs are replaced by others *at the same addresses*, and its
//! outputs are poisoned or left as they were. Then the very same timed path runs once, and every output it was to write is
//! judged. Before and after, nothing tells the kernel that this call is another than the last.

use std::fmt;

use evosdpa_core::Problem;
use evosdpa_oracle::{Case, inputs::Inputs};

use super::novelty;
use crate::{
    Error,
    device::{Output, TimedDevice, TimedKernel, Turned},
    gate::correctness,
};
use evosdpa_oracle::rng::Rng;

/// What a kernel was caught at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Nothing but zeros.
    Zeros,
    /// A call that wrote nothing, or only part.
    WorkSkipped {
        /// Elements that still are what they were set to before the call.
        unwritten: usize,
        /// All elements.
        of: usize,
    },
    /// The answer to inputs that lay at the same addresses before.
    StaleAnswer,
    /// The inputs changed, and the output is bit for bit what it was.
    StaleOutput,
    /// Inputs that were seen before take less time than new ones.
    CachedByContent {
        /// A call on new inputs, in nanoseconds.
        new_ns: u64,
        /// A call on inputs that were seen before, in nanoseconds.
        seen_ns: u64,
    },
    /// An input is not what it was before the call.
    InputChanged(String),
    /// A write outside the output.
    StrayWrite(String),
    /// Anything else that is wrong.
    WrongAnswer(String),
    /// A clock that is not the lab's says less than the lab's own.
    ForeignClock {
        /// What the call's own process says it took, in nanoseconds.
        said_ns: u64,
        /// What the lab sees it take from outside, at best, in nanoseconds.
        seen_ns: u64,
    },
    /// Less time than bytes and operations allow.
    TooFast {
        /// The time, in nanoseconds.
        time_ns: u64,
        /// The least that is possible, in nanoseconds.
        floor_ns: u64,
    },
}

impl Finding {
    /// A short name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::WorkSkipped { .. } => "work-skipped",
            Self::StaleAnswer => "stale-answer",
            Self::StaleOutput => "stale-output",
            Self::CachedByContent { .. } => "cached-by-content",
            Self::InputChanged(_) => "input-changed",
            Self::StrayWrite(_) => "stray-write",
            Self::WrongAnswer(_) => "wrong-answer",
            Self::ForeignClock { .. } => "foreign-clock",
            Self::TooFast { .. } => "too-fast",
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name())?;
        match self {
            Self::Zeros => f.write_str("the output is nothing but zeros"),
            Self::WorkSkipped { unwritten, of } => {
                write!(f, "the call left {unwritten} of {of} elements of its output unwritten")
            }
            Self::StaleAnswer => f.write_str(
                "the output answers inputs that lay at the same addresses before: it was kept by address, not computed",
            ),
            Self::StaleOutput => f.write_str(
                "the inputs changed and the output is bit for bit what lay there before: a finished output was taken for granted",
            ),
            Self::CachedByContent { new_ns, seen_ns } => write!(
                f,
                "a call takes {:.3} µs on new inputs and {:.3} µs on inputs that were seen before: outputs are kept, not computed",
                *new_ns as f64 / 1e3,
                *seen_ns as f64 / 1e3
            ),
            Self::InputChanged(which) => write!(f, "{which} is not what it was before the call"),
            Self::StrayWrite(where_) => f.write_str(where_),
            Self::WrongAnswer(why) => f.write_str(why),
            Self::ForeignClock { said_ns, seen_ns } => write!(
                f,
                "its own process says {:.3} µs a call, and from outside it takes {:.3} µs at best",
                *said_ns as f64 / 1e3,
                *seen_ns as f64 / 1e3
            ),
            Self::TooFast { time_ns, floor_ns } => write!(
                f,
                "{:.3} µs is less than the {:.3} µs that its bytes and operations take at the device's best",
                *time_ns as f64 / 1e3,
                *floor_ns as f64 / 1e3
            ),
        }
    }
}

/// Audits one loaded kernel; remembers what lies where.
pub struct Auditor<'a> {
    cases: &'a [Case],
    /// The case at each set; `None` where the set holds something without a known answer.
    at: Vec<Option<usize>>,
    /// The case whose answer may still lie in each set's outputs.
    answered: Vec<Option<usize>>,
    /// The set that the last audit timed.
    last_set: usize,
    /// How long the last audited call took.
    last_us: f64,
    rng: Rng,
    audits: usize,
    /// Calls whose outputs were judged.
    calls: usize,
}

/// Consecutive calls that are audited at the end: what works only every so often is met. And as many audits at least, one with
/// poisoned outputs and one without.
const FINAL_CALLS: usize = 8;
const FINAL_AUDITS: usize = 2;

/// Of calls that last longer than this, only so many: enough to meet what works on every third call.
const SLOW_CALL_US: f64 = 200_000.0;
const FINAL_SLOW_CALLS: usize = 3;

/// Calls that are made by themselves at the end.
const SINGLE_CALLS: usize = 5;

impl<'a> Auditor<'a> {
    /// With at least two solved cases of one problem, for a kernel loaded with `sets` sets of inputs.
    pub fn new(cases: &'a [Case], sets: usize, seed: u64) -> Self {
        Self {
            cases,
            at: vec![None; sets],
            answered: vec![None; sets],
            last_set: 0,
            last_us: 0.0,
            rng: Rng::new(seed),
            audits: 0,
            calls: 0,
        }
    }

    /// How many sets of inputs there are.
    pub fn sets(&self) -> usize {
        self.at.len()
    }

    /// How many audits there were.
    pub fn audits(&self) -> usize {
        self.audits
    }

    /// One audit. Poisoned and untouched outputs take turns: what looks for a finished output is met by the second kind.
    pub fn audit(&mut self, loaded: &mut dyn TimedKernel) -> Result<Option<Finding>, Error> {
        let poisoned = self.audits.is_multiple_of(2);
        self.audits += 1;
        let finding = self.look(loaded, poisoned)?;
        if matches!(finding, Some(Finding::StaleOutput)) {
            // Who trusted a finished output works on a poisoned one; who does nothing at all is found out there.
            for _ in 0..FINAL_CALLS {
                if let Some(skipped @ Finding::WorkSkipped { .. }) = self.look(loaded, true)? {
                    return Ok(Some(skipped));
                }
            }
        }
        Ok(finding)
    }

    /// Fills every set with another case, times one call and judges its outputs.
    fn look(&mut self, loaded: &mut dyn TimedKernel, poisoned: bool) -> Result<Option<Finding>, Error> {
        for set in 0..self.at.len() {
            // Another case than the one before, so that yesterday's answer is wrong today.
            let case = match self.answered[set] {
                Some(before) => (before + 1 + self.rng.below(self.cases.len() - 1)) % self.cases.len(),
                None => self.rng.below(self.cases.len()),
            };
            loaded.refill(set, &self.cases[case].inputs, Turned::NOT)?;
            self.at[set] = Some(case);
            self.answered[set] = Some(case);
        }
        // An output that was left alone must be a finished one, to tempt who trusts it.
        let set = if poisoned { self.rng.below(self.at.len()) } else { self.last_set };
        self.last_set = set;
        let before = if poisoned {
            loaded.poison()?;
            Vec::new()
        } else {
            match written(loaded, set)? {
                Ok(outputs) => outputs,
                Err(finding) => return Ok(Some(finding)),
            }
        };
        self.last_us = loaded.time_us(set)?;
        let outputs = match written(loaded, set)? {
            Ok(outputs) => outputs,
            Err(finding) => return Ok(Some(finding)),
        };
        self.calls += outputs.len().max(1);
        // First: with an input that was changed on the way, no later output is right.
        if let Some(input) = loaded.changed_input()? {
            return Ok(Some(Finding::InputChanged(input)));
        }
        Ok(self.judge(&outputs, &before))
    }

    /// Several audits in a row.
    pub fn final_audits(&mut self, loaded: &mut dyn TimedKernel) -> Result<Option<Finding>, Error> {
        let calls_before = self.calls;
        let mut audits = 0;
        while audits < FINAL_AUDITS || self.calls - calls_before < self.final_calls() {
            if let Some(finding) = self.audit(loaded)? {
                return Ok(Some(finding));
            }
            audits += 1;
        }
        if let Some(finding) = self.one_by_one(loaded)? {
            return Ok(Some(finding));
        }
        let (cases, rng) = (self.cases, &mut self.rng);
        let unseen = || {
            let inputs = &cases[rng.below(cases.len())].inputs;
            (inputs, by_chance(inputs, rng))
        };
        novelty::look(loaded, self.last_us, unseen)
    }

    /// Calls by themselves, each judged: what works for several at once leaves the others undone.
    fn one_by_one(&mut self, loaded: &mut dyn TimedKernel) -> Result<Option<Finding>, Error> {
        for _ in 0..self.final_calls().min(SINGLE_CALLS) {
            let (set, case) = (self.rng.below(self.at.len()), self.rng.below(self.cases.len()));
            loaded.refill(set, &self.cases[case].inputs, Turned::NOT)?;
            self.at[set] = Some(case);
            let output = loaded.run(set)?;
            if let Some(finding) = self.judge(&[(set, output)], &[]) {
                return Ok(Some(finding));
            }
        }
        Ok(None)
    }

    fn final_calls(&self) -> usize {
        if self.last_us > SLOW_CALL_US { FINAL_SLOW_CALLS } else { FINAL_CALLS }
    }

    /// Puts inputs into every set that no call has seen: rows of a case, moved round by a random distance.
    pub fn refresh(&mut self, loaded: &mut dyn TimedKernel) -> Result<(), Error> {
        for set in 0..self.at.len() {
            let from = self.rng.below(self.cases.len());
            let inputs = &self.cases[from].inputs;
            loaded.refill(set, inputs, by_chance(inputs, &mut self.rng))?;
            self.at[set] = None;
        }
        Ok(())
    }

    /// Each output against the case of its set. Outputs that are bit for bit a right one need no second look.
    fn judge(&self, outputs: &[(usize, Output)], before: &[(usize, Output)]) -> Option<Finding> {
        let mut right: Vec<Option<&Output>> = vec![None; self.cases.len()];
        for (i, (set, output)) in outputs.iter().enumerate() {
            // Every set was filled with a case when the audit began.
            let case = self.at[*set]?;
            if right[case].is_some_and(|right| same_bits(right, output)) {
                continue;
            }
            let judgement = self.cases[case].judge(&output.o.view(), output.lse.as_deref());
            if judgement.passed() {
                if let Some(at) = correctness::first_broken_canary(&output.o) {
                    return Some(Finding::StrayWrite(format!(
                        "byte {at} between the output's rows was written"
                    )));
                }
                right[case] = Some(output);
                continue;
            }
            let unchanged = before.get(i).is_some_and(|(_, before)| same_bits(before, output));
            if unchanged {
                return Some(Finding::StaleOutput);
            }
            let mut others = (0..self.cases.len()).filter(|other| *other != case);
            let is_stale =
                |other: usize| self.cases[other].judge(&output.o.view(), output.lse.as_deref()).passed();
            if others.any(is_stale) {
                return Some(Finding::StaleAnswer);
            }
            return Some(describe(output).unwrap_or_else(|| Finding::WrongAnswer(judgement.summary())));
        }
        None
    }
}

/// A kernel under the clock, and who watches it.
pub struct Audited<'a> {
    /// What errors call it.
    pub name: String,
    /// The kernel.
    pub loaded: Box<dyn TimedKernel + 'a>,
    /// Who watches it.
    pub auditor: Auditor<'a>,
}

impl<'a> Audited<'a> {
    /// Loads a kernel, with solved cases of the same problem to audit it with.
    pub fn load(
        device: &'a dyn TimedDevice,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
        cases: &'a [Case],
        seed: u64,
    ) -> Result<Self, Error> {
        let loaded = device.load_timed(kernel, problem, inputs)?;
        Ok(Self { name: kernel.to_owned(), loaded, auditor: Auditor::new(cases, inputs.len(), seed) })
    }

    /// One audit, then inputs that no call has seen.
    pub fn audit(&mut self) -> Result<(), Error> {
        let finding = self.auditor.audit(self.loaded.as_mut())?;
        self.caught(finding)?;
        self.auditor.refresh(self.loaded.as_mut())
    }

    /// Several audits in a row.
    pub fn final_audit(&mut self) -> Result<(), Error> {
        let finding = self.auditor.final_audits(self.loaded.as_mut())?;
        self.caught(finding)
    }

    fn caught(&self, finding: Option<Finding>) -> Result<(), Error> {
        match finding {
            None => Ok(()),
            Some(finding) => Err(Error::Caught { kernel: self.name.clone(), finding }),
        }
    }
}

/// What the sample's calls wrote, or the stray write that was found on the way.
#[allow(clippy::type_complexity)]
fn written(loaded: &mut dyn TimedKernel, set: usize) -> Result<Result<Vec<(usize, Output)>, Finding>, Error> {
    match loaded.timed_outputs(set) {
        Ok(outputs) => Ok(Ok(outputs)),
        Err(Error::Cuda(error @ evosdpa_cuda::Error::StrayWrite { .. })) => {
            Ok(Err(Finding::StrayWrite(error.to_string())))
        }
        Err(error) => Err(error),
    }
}

/// A name for a wrong output that needs no reference: zeros, or what was never written.
pub fn describe(output: &Output) -> Option<Finding> {
    let view = output.o.view();
    let ([batch, heads, seq, dim], [sb, sh, ss, _], size) =
        (view.shape(), view.strides(), view.dtype().bytes());
    let bytes = view.bytes();
    let (mut zero, mut unwritten, mut of) = (0, 0, 0);
    for b in 0..batch {
        for h in 0..heads {
            for s in 0..seq {
                let start = (b * sb + h * sh + s * ss) * size;
                for element in bytes[start..start + dim * size].chunks_exact(size) {
                    of += 1;
                    zero += usize::from(element.iter().all(|byte| *byte == 0));
                    unwritten += usize::from(element.iter().all(|byte| *byte == 0xFF));
                }
            }
        }
    }
    match () {
        () if unwritten > 0 => Some(Finding::WorkSkipped { unwritten, of }),
        () if zero == of => Some(Finding::Zeros),
        () => None,
    }
}

fn same_bits(a: &Output, b: &Output) -> bool {
    let bits =
        |output: &Output| output.lse.as_ref().map(|lse| lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    a.o.bytes() == b.o.bytes() && bits(a) == bits(b)
}

/// Whole rows of each tensor, moved round.
fn by_chance(inputs: &Inputs, rng: &mut Rng) -> Turned {
    Turned([&inputs.q, &inputs.k, &inputs.v].map(|tensor| {
        let view = tensor.view();
        let [_, heads, seq, _] = view.shape();
        let [_, sh, ss, _] = view.strides();
        // In both layouts rows are a whole number of the smaller of the two strides apart.
        let row_bytes = sh.min(ss).max(1) * view.dtype().bytes();
        let by = rng.below((heads * seq).max(1)) * row_bytes;
        if by < tensor.bytes().len() { by } else { 0 }
    }))
}
