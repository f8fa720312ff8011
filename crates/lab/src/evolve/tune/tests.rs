//! A tune on a machine whose clock is simulated: a variant takes as long as its tunables say, so that two tunes can be held
//! against each other to the last digit.

use std::cell::{Cell, OnceCell};

use evosdpa_core::DType;
use evosdpa_oracle::inputs::Inputs;

use super::*;
use crate::{
    device::{Loaded, Output, TimedDevice, TimedKernel, Timing, Turned},
    evolve::{
        ahead::Nothing,
        altered::{Alteration, Altered, CPU},
        gates,
        insight::StaticView,
        work::{Here, Terms},
    },
    measure::{duel::Rule, floor::Ceilings},
};

struct Simulated;

impl Alteration for Simulated {
    fn ceilings(&self, _: &Problem) -> Result<Option<Ceilings>, Error> {
        Ok(None)
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
        // Any number that depends on the name alone; from half to one and a half times a millisecond.
        let hash = kernel.bytes().fold(7_u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        let time_us = 500.0 + 1000.0 * Rng::new(hash).unit();
        Ok(Box::new(OnASimulatedClock { kernel: CPU.load_timed(kernel, problem, inputs)?, time_us }))
    }
}

struct OnASimulatedClock<'a> {
    kernel: Box<dyn TimedKernel + 'a>,
    time_us: f64,
}

impl Loaded for OnASimulatedClock<'_> {
    fn run(&mut self, set: usize) -> Result<Output, Error> {
        self.kernel.run(set)
    }

    fn changed_input(&mut self) -> Result<Option<String>, Error> {
        self.kernel.changed_input()
    }
}

impl TimedKernel for OnASimulatedClock<'_> {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        self.kernel.time_us(set)?;
        Ok(self.time_us)
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), Error> {
        self.kernel.set_timing(timing)
    }

    fn refill(&mut self, set: usize, inputs: &Inputs, turned: Turned) -> Result<(), Error> {
        self.kernel.refill(set, inputs, turned)
    }

    fn poison(&mut self) -> Result<(), Error> {
        self.kernel.poison()
    }

    fn timed_outputs(&mut self, set: usize) -> Result<Vec<(usize, Output)>, Error> {
        self.kernel.timed_outputs(set)
    }
}

const EVALUATIONS: usize = 40;

/// Runs a tune until it ends, or until it has asked `patience` times whether it was stopped; `None` in that case. So many are under
/// way at once.
fn run(folder: &std::path::Path, seed: u64, resume: bool, patience: usize, depth: usize) -> Option<Finished> {
    let problem = Problem::new("b1h1s8d16".parse().unwrap(), DType::F32).unwrap();
    let left = Cell::new(patience);
    let interrupted = || {
        left.set(left.get().saturating_sub(1));
        left.get() == 0
    };
    let request = Request {
        folder: folder.to_owned(),
        problems: vec![problem],
        space: Space::of_cpu(&problem, 1).unwrap(),
        breaks: &|_| None,
        device: DeviceId::Cpu,
        device_name: "a simulated clock".to_owned(),
        arch: "none".to_owned(),
        strategy: "evo".to_owned(),
        seed,
        evaluations: EVALUATIONS,
        limit: None,
        top: 3,
        resume,
        prior: Prior::default(),
        has_profile_gate: false,
    };
    let terms = Terms {
        space: request.space.clone(),
        problems: vec![problem],
        seed,
        rule: Rule { most_blocks: 12, ..gates::rule(None) },
        sets: Some(1),
        last_gate: None,
        ahead: depth,
    };
    let (device, mut ahead, materials) = (Altered(Simulated), Nothing, OnceCell::new());
    let mut here =
        Here::new(&device, &mut ahead, &StaticView, terms, &materials).unwrap().that_takes_nothing_back();
    let finished = tune(&mut here, None, &request, |_| true, &interrupted).unwrap();
    (left.get() > 0).then_some(finished)
}

/// Everything of an evaluation but when it was made, to ten digits: reading a log back may be off in the last one.
fn kept(history: &[Evaluation]) -> Vec<String> {
    let timeless = |e: &Evaluation| Evaluation { began_us: None, seconds: 0.0, spans: vec![], ..e.clone() };
    history.iter().map(|e| rounded(serde_json::to_value(timeless(e)).unwrap()).to_string()).collect()
}

fn rounded(value: serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::Number(number) if number.is_f64() => format!("{:.9e}", number.as_f64().unwrap()).into(),
        Value::Array(values) => values.into_iter().map(rounded).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, rounded(value))).collect(),
        other => other,
    }
}

/// A thousand kills: after each the log is as a killed process may leave it, cut anywhere in the line that was being written, or
/// with lines that never came to the disk. What is evaluated in the end is what one undisturbed tune evaluates.
#[test]
fn a_tune_that_was_killed_a_thousand_times_ends_as_if_it_had_not_been() {
    let mut kills = 0;
    let mut seed = 0;
    while kills < 1000 {
        seed += 1;
        // One at a time, or as with several evaluators, each of which has some.
        let depth = if seed % 2 == 0 { 1 } else { 6 };
        let (whole, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let undisturbed = run(whole.path(), seed, false, usize::MAX, depth).unwrap();
        assert_eq!(undisturbed.history.len(), EVALUATIONS);
        // Of forty variants between half and one and a half times a millisecond some beat the default, and measured again still do.
        let confirmation = undisturbed.elites.confirmation.as_ref().unwrap();
        assert!(confirmation.confirmed && confirmation.fitness > 1.03, "{confirmation:?}");
        let path = killed.path().join(log::FILE);
        let mut rng = Rng::of_series(17, seed);
        let mut resume = false;
        let finished = loop {
            if let Some(finished) = run(killed.path(), seed, resume, 2 + rng.below(60), depth) {
                break finished;
            }
            kills += 1;
            resume = true;
            let log = std::fs::read(&path).unwrap();
            let last_line =
                log[..log.len() - 1].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            match rng.below(3) {
                // Between two lines.
                0 => {}
                // In the middle of the next line.
                1 => {
                    let next = &log[last_line..last_line + rng.below(log.len() - last_line)];
                    std::fs::write(&path, [&log, next].concat()).unwrap();
                }
                // In the middle of the last one, which is then lost.
                _ => std::fs::write(&path, &log[..last_line + rng.below(log.len() - last_line)]).unwrap(),
            }
        };
        for (number, (killed, whole)) in
            kept(&finished.history).iter().zip(&kept(&undisturbed.history)).enumerate()
        {
            assert_eq!(killed, whole, "seed {seed}, evaluation {number}");
        }
        assert_eq!(finished.history.len(), EVALUATIONS);
        let timeless =
            |file: &EliteFile| (file.elites.clone(), file.pareto.clone(), file.confirmation.clone());
        assert_eq!(timeless(&finished.elites), timeless(&undisturbed.elites), "seed {seed}");
    }
    println!("{kills} kills of {seed} tunes");
}
