//! A kernel against itself: how often does the accept rule see a difference that is not there?

use evosdpa_core::Problem;
use evosdpa_oracle::{
    Case,
    inputs::{Family, Inputs},
};
use serde::Serialize;

use crate::{
    Error,
    device::{TimedDevice, Timing},
    evolve::gates::KernelArm,
    measure::{
        audit::Audited,
        compare::Outcome,
        duel::{Rule, duel},
        samples::median,
    },
};
use evosdpa_oracle::rng::Rng;

/// What came of many duels of a kernel with itself.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SelfTest {
    /// The kernel.
    pub kernel: String,
    /// The problem.
    pub problem: String,
    /// How calls were timed.
    pub timing: String,
    /// The rule's level: FAST and SLOW together may be at most this share.
    pub alpha: f64,
    /// Blocks a duel may have.
    pub most_blocks: usize,
    /// Duels.
    pub duels: usize,
    /// Called FAST.
    pub fast: usize,
    /// Called SLOW.
    pub slow: usize,
    /// Called SAME.
    pub same: usize,
    /// Left open.
    pub ambiguous: usize,
    /// Blocks of all duels.
    pub blocks: usize,
    /// Blocks set aside because the clock had sunk.
    pub throttled: usize,
    /// Blocks set aside because it moved.
    pub unsteady: usize,
    /// Whether time and cycles had to agree, or there was time alone.
    pub in_cycles_too: bool,
    /// Median time.
    pub p50_us: f64,
    /// Median clock, where it can be read.
    pub clock_ghz: Option<f64>,
    /// The medians of all duels' ratios lie between these.
    pub ratios: [f64; 2],
}

impl SelfTest {
    /// Share of duels that saw a difference.
    pub fn false_positives(&self) -> f64 {
        (self.fast + self.slow) as f64 / self.duels.max(1) as f64
    }
}

/// Lets a kernel run against itself this many times, its calls timed this way. `proceed` is asked before every duel.
pub fn against_itself(
    device: &dyn TimedDevice,
    kernel: &str,
    problem: &Problem,
    timing: Timing,
    duels: usize,
    rule: &Rule,
    mut proceed: impl FnMut(usize) -> bool,
) -> Result<SelfTest, Error> {
    if let Some(why) = device.refuses(kernel, problem) {
        return Err(Error::Tune(format!("{kernel} cannot take {problem}: {why}")));
    }
    let sets = device.input_sets(problem);
    let seed = Rng::entropy();
    let inputs: Vec<Inputs> =
        (0..sets).map(|i| Inputs::timed(problem, seed.wrapping_add(i as u64))).collect();
    // Nothing is gained by cheating against oneself, but audits are part of every duel, and so of what may be unfair.
    let cases = [0, 1].map(|i| Case::in_bounded_time(*problem, Family::Normal, seed.wrapping_add(i), None));
    let mut sides = [0, 1]
        .map(|_| Audited::load(device, kernel, problem, &inputs, &cases, seed))
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    sides.iter_mut().try_for_each(|side| side.loaded.set_timing(timing))?;
    let [a, b] = sides.as_mut_slice() else { unreachable!("two were loaded") };
    let (mut a, mut b) = (KernelArm::new(a)?, KernelArm::new(b)?);
    let mut test = SelfTest {
        kernel: kernel.to_owned(),
        problem: problem.to_string(),
        timing: timing.to_string(),
        alpha: rule.alpha,
        most_blocks: rule.most_blocks,
        duels: 0,
        fast: 0,
        slow: 0,
        same: 0,
        ambiguous: 0,
        blocks: 0,
        throttled: 0,
        unsteady: 0,
        in_cycles_too: false,
        p50_us: 0.0,
        clock_ghz: None,
        ratios: [f64::INFINITY, 0.0],
    };
    let (mut times, mut clocks) = (Vec::new(), Vec::new());
    for number in 0..duels {
        if !proceed(number) {
            break;
        }
        let seed = Rng::of_series(seed, number as u64).below(usize::MAX >> 1) as u64;
        let Some(duel) = duel(&mut a, &mut b, rule, seed, || true)? else { continue };
        test.duels += 1;
        match duel.verdict {
            Outcome::Fast => test.fast += 1,
            Outcome::Slow => test.slow += 1,
            Outcome::Same => test.same += 1,
            Outcome::Ambiguous => test.ambiguous += 1,
        }
        test.blocks += duel.blocks.len();
        test.throttled += duel.throttled;
        test.unsteady += duel.unsteady;
        test.in_cycles_too |= duel.cycles.is_some();
        test.ratios = [test.ratios[0].min(duel.time.ratio), test.ratios[1].max(duel.time.ratio)];
        times.push(duel.candidate_p50_us());
        clocks.extend(
            duel.blocks.iter().flat_map(|block| block.readings).filter_map(|reading| reading.clock_ghz),
        );
    }
    if !times.is_empty() {
        test.p50_us = median(&times);
    }
    if !clocks.is_empty() {
        test.clock_ghz = Some(median(&clocks));
    }
    Ok(test)
}

#[cfg(test)]
mod tests {
    use evosdpa_core::DType;

    use super::*;
    use crate::device::Cpu;

    fn tested(shape: &str, duels: usize) -> SelfTest {
        let problem = Problem::new(shape.parse().unwrap(), DType::F32).unwrap();
        let cpu = Cpu { threads: Some(1), isa: None };
        let rule = Rule { most_blocks: 24, ..Rule::default() };
        let test =
            against_itself(&cpu, "cpu_flash", &problem, Timing::Graph, duels, &rule, |_| true).unwrap();
        println!("{test:?}");
        assert_eq!(test.duels, duels);
        assert!(!test.in_cycles_too && test.p50_us > 0.0);
        test
    }

    /// The accept rule on a real machine with everything that goes on there: at most 1 % may be called different.
    #[test]
    fn a_real_kernel_is_not_faster_than_itself() {
        let test = tested("tiny", 300);
        assert!(test.false_positives() <= 0.01, "{test:?}");
    }

    /// Here a reading is one call or two, and the tensors are moved before every block.
    #[test]
    fn nor_where_a_reading_is_one_call() {
        let test = tested("b1h4s128d64:causal", 100);
        assert!(test.false_positives() <= 0.01, "{test:?}");
    }
}
