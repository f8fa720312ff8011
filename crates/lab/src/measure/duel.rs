//! Duels: two kernels timed in blocks of four readings, until the sequential test decides.
//!
//! A block is four readings in the order ABBA or BAAB, drawn by a coin: a drift within the block cancels, and under "no
//! difference" the sign of the block's log-ratio *is* the coin. So is everything else that one side gets first: the warm-up,
//! audits, and moving to other addresses. Swapping the two labels flips the sign and changes nothing else, which is all that
//! the evidence rests on. A block whose clock sank below three quarters of the best seen, or moved by more than 2 % between two readings of the same side, is set aside and counted. After every block the
//! evidence is looked at ([`super::sequence`]), in time and, where the device has a clock to read, in cycles: both must
//! agree.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{
    Reading, Resampler,
    compare::{Comparison, Outcome},
    samples::{interval as middle_95, median, resampled},
    sequence::{self, Evidence},
};
use crate::Error;
use evosdpa_oracle::rng::Rng;

/// One side of a duel.
pub trait Arm {
    /// One reading.
    fn read(&mut self) -> Result<Reading, Error>;

    /// Called before every block: an arm whose memory can be elsewhere moves, because where it lies must not decide.
    fn relocate(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Called at moments that nobody can foresee: an arm that can be checked is checked now.
    fn audit(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// When a duel ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Probability, at most, of a wrong FAST or SLOW.
    pub alpha: f64,
    /// Effects below this share say nothing of a kernel: FAST and SLOW are beyond it, SAME is within.
    pub margin: f64,
    /// Blocks, at most.
    pub most_blocks: usize,
    /// Time, at most.
    pub limit: Option<Duration>,
    /// A candidate whose best reading is slower than the other's worst by this ratio, in each of its first blocks, is hopeless;
    /// 0 never gives up early.
    pub hopeless_below: f64,
    /// Rest before each reading, for thread pools that spin after their last call.
    pub settle: Duration,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            alpha: 0.01,
            margin: MARGIN,
            most_blocks: 120,
            limit: None,
            hopeless_below: 0.0,
            settle: Duration::ZERO,
        }
    }
}

/// Two copies of one kernel differ steadily for where their code and buffers happen to lie: by 0.2 to 0.9 %, measured on an
/// H200. Only what is beyond that is about the kernel.
pub const MARGIN: f64 = 0.01;

/// Blocks that must all be hopeless before a duel is given up.
const HOPELESS_BLOCKS: usize = 4;
/// A clock below this share of the best seen is throttled.
const THROTTLED_BELOW: f64 = 0.75;
/// Two readings of one side whose clocks differ by more than this share were not taken at one speed.
const STEADY_WITHIN: f64 = 0.02;
/// One in so many blocks is preceded by an audit.
const AUDIT_ONE_IN: usize = 8;

/// Four readings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Whether the candidate had the outer places.
    pub candidate_outside: bool,
    /// The four readings in the order they were taken.
    pub readings: [Reading; 4],
}

impl Block {
    /// The candidate's two readings, then the other's.
    fn sides(&self) -> [[&Reading; 2]; 2] {
        let [a, b, c, d] = &self.readings;
        if self.candidate_outside { [[a, d], [b, c]] } else { [[b, c], [a, d]] }
    }

    /// Whether even the candidate's best reading is slower than the other's worst, by this ratio.
    fn is_hopeless(&self, ratio: f64) -> bool {
        let [[a, b], [c, d]] = self.sides();
        a.time_us.min(b.time_us) * ratio > c.time_us.max(d.time_us)
    }

    /// Log of how many times as fast the candidate was, in time and in cycles.
    fn logs(&self) -> (f64, Option<f64>) {
        let [candidate, other] = self.sides();
        let log = |side: [&Reading; 2]| 0.5 * (side[0].time_us.ln() + side[1].time_us.ln());
        let cycles =
            |side: [&Reading; 2]| Some(0.5 * (side[0].kilocycles()?.ln() + side[1].kilocycles()?.ln()));
        (log(other) - log(candidate), cycles(other).zip(cycles(candidate)).map(|(other, own)| other - own))
    }
}

/// Why a duel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The evidence suffices.
    Decided,
    /// Every block so far was far slower.
    Hopeless,
    /// As many blocks as were allowed.
    Blocks,
    /// As much time as was allowed.
    Time,
    /// Too many blocks were set aside.
    Throttled,
    /// Someone asked to stop.
    Stopped,
}

/// How many times as fast the candidate is, in one unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Median over blocks.
    pub ratio: f64,
    /// 95 % bootstrap interval of that median.
    pub bootstrap: [f64; 2],
    /// What is not excluded at the rule's level, however often one looked; 0 and infinity are no bound.
    pub sequence: [f64; 2],
}

impl Effect {
    fn of(logs: &[f64], alpha: f64) -> Self {
        let [low, high] = middle_95(&resampled(&mut Resampler::new(), logs));
        let [below, above] = sequence::interval(logs, alpha);
        Self {
            ratio: median(logs).exp(),
            bootstrap: [low.exp(), high.exp()],
            // JSON has no infinity.
            sequence: [below.exp(), above.exp().min(f64::MAX)],
        }
    }
}

/// A finished duel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Duel {
    /// What it says of the candidate.
    pub verdict: Outcome,
    /// Why it ended.
    pub ended: Ended,
    /// In time.
    pub time: Effect,
    /// In cycles, where the device's clock can be read.
    pub cycles: Option<Effect>,
    /// Seed of the orders.
    pub seed: u64,
    /// Blocks set aside because the clock had sunk.
    pub throttled: usize,
    /// Blocks set aside because the clock moved within them.
    pub unsteady: usize,
    /// All blocks that count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<Block>,
}

impl Duel {
    /// The candidate's median time.
    pub fn candidate_p50_us(&self) -> f64 {
        self.p50_us(0)
    }

    /// The other's median time.
    pub fn other_p50_us(&self) -> f64 {
        self.p50_us(1)
    }

    fn p50_us(&self, side: usize) -> f64 {
        let times: Vec<f64> =
            self.blocks.iter().flat_map(|block| block.sides()[side].map(|reading| reading.time_us)).collect();
        if times.is_empty() { f64::NAN } else { median(&times) }
    }

    /// In the form that rows record.
    pub fn comparison(&self) -> Comparison {
        Comparison {
            ratio: self.time.ratio,
            interval: self.time.bootstrap,
            rounds: self.blocks.len(),
            verdict: self.verdict,
            sequence: Some(self.time.sequence),
            cycles: self.cycles.map(|cycles| cycles.bootstrap),
            discarded: self.throttled + self.unsteady,
            of_medians: None,
        }
    }
}

/// The evidence in one unit.
struct Watch {
    faster: Evidence,
    slower: Evidence,
    not_much_slower: Evidence,
    not_much_faster: Evidence,
    logs: Vec<f64>,
}

impl Watch {
    fn new(margin: f64) -> Self {
        let margin = (1.0 + margin).ln();
        Self {
            faster: Evidence::above(margin),
            slower: Evidence::below(-margin),
            not_much_slower: Evidence::above(-margin),
            not_much_faster: Evidence::below(margin),
            logs: Vec::new(),
        }
    }

    fn add(&mut self, log: f64) {
        for evidence in
            [&mut self.faster, &mut self.slower, &mut self.not_much_slower, &mut self.not_much_faster]
        {
            evidence.add(log);
        }
        self.logs.push(log);
    }

    fn outcome(&self, alpha: f64) -> Outcome {
        match () {
            () if self.not_much_slower.suffices(alpha) && self.not_much_faster.suffices(alpha) => {
                Outcome::Same
            }
            () if self.faster.suffices(alpha) => Outcome::Fast,
            () if self.slower.suffices(alpha) => Outcome::Slow,
            () => Outcome::Ambiguous,
        }
    }
}

/// What both units say together.
fn together(time: &Watch, cycles: Option<&Watch>, alpha: f64) -> Outcome {
    let outcome = time.outcome(alpha);
    match cycles {
        Some(cycles) if cycles.outcome(alpha) != outcome => Outcome::Ambiguous,
        _ => outcome,
    }
}

/// What log-ratios whose signs are a coin's under "no difference" say, by the rule of duels.
pub(crate) fn outcome_of(logs: &[f64], margin: f64, alpha: f64) -> Outcome {
    let mut watch = Watch::new(margin);
    logs.iter().for_each(|log| watch.add(*log));
    watch.outcome(alpha)
}

/// What chance decides in a duel.
trait Draws {
    /// Which side is first: 0 is the candidate.
    fn first(&mut self) -> usize;

    /// True once in so many times.
    fn one_in(&mut self, times: usize) -> bool;
}

impl Draws for Rng {
    fn first(&mut self) -> usize {
        usize::from(self.coin())
    }

    fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// Both sides, the candidate first.
struct Pair<'a>([&'a mut dyn Arm; 2]);

impl Pair<'_> {
    /// Something that both go through, one after the other.
    fn each(
        &mut self,
        first: usize,
        mut of: impl FnMut(&mut dyn Arm) -> Result<(), Error>,
    ) -> Result<(), Error> {
        of(self.0[first])?;
        of(self.0[1 - first])
    }

    /// Four readings, `outside` taking the first and the last.
    fn block(&mut self, outside: usize, settle: Duration) -> Result<Block, Error> {
        let mut readings = [Reading { time_us: 0.0, clock_ghz: None }; 4];
        for (reading, side) in readings.iter_mut().zip([outside, 1 - outside, 1 - outside, outside]) {
            std::thread::sleep(settle);
            *reading = self.0[side].read()?;
        }
        Ok(Block { candidate_outside: outside == 0, readings })
    }
}

/// Lets a candidate run against another until the rule ends it; `proceed` is asked before every block. `None` when not one
/// block could be read.
pub fn duel(
    candidate: &mut dyn Arm,
    other: &mut dyn Arm,
    rule: &Rule,
    seed: u64,
    proceed: impl FnMut() -> bool,
) -> Result<Option<Duel>, Error> {
    let Fought { verdict, ended, time, cycles, throttled, unsteady, blocks } =
        fight(Pair([candidate, other]), rule, &mut Rng::new(seed), proceed)?;
    if blocks.is_empty() {
        return Ok(None);
    }
    Ok(Some(Duel {
        verdict,
        ended,
        time: Effect::of(&time.logs, rule.alpha),
        cycles: cycles.map(|watch| Effect::of(&watch.logs, rule.alpha)),
        seed,
        throttled,
        unsteady,
        blocks,
    }))
}

/// A duel before its effects are estimated.
struct Fought {
    verdict: Outcome,
    ended: Ended,
    time: Watch,
    cycles: Option<Watch>,
    throttled: usize,
    unsteady: usize,
    blocks: Vec<Block>,
}

fn fight(
    mut pair: Pair<'_>,
    rule: &Rule,
    draws: &mut impl Draws,
    mut proceed: impl FnMut() -> bool,
) -> Result<Fought, Error> {
    let start = Instant::now();
    // Once untimed each: code, caches and clocks.
    let untimed = |arm: &mut dyn Arm| arm.read().map(drop);
    pair.each(draws.first(), untimed)?;
    let (mut time, mut cycles) = (Watch::new(rule.margin), None::<Watch>);
    let (mut blocks, mut best_clock) = (Vec::new(), 0.0_f64);
    let (mut throttled, mut unsteady) = (0, 0);
    let ended = loop {
        match () {
            () if blocks.len() >= rule.most_blocks => break Ended::Blocks,
            () if rule.limit.is_some_and(|limit| start.elapsed() > limit) && !blocks.is_empty() => {
                break Ended::Time;
            }
            () if throttled + unsteady > rule.most_blocks => break Ended::Throttled,
            () if !proceed() => break Ended::Stopped,
            () => {}
        }
        if draws.one_in(AUDIT_ONE_IN) {
            pair.each(draws.first(), |arm| arm.audit())?;
            pair.each(draws.first(), untimed)?;
        }
        pair.each(draws.first(), |arm| arm.relocate())?;
        let block = pair.block(draws.first(), rule.settle)?;
        match clock_of(&block, &mut best_clock) {
            Clock::Fine => {}
            Clock::Throttled => {
                throttled += 1;
                continue;
            }
            Clock::Unsteady => {
                unsteady += 1;
                continue;
            }
        }
        let (in_time, in_cycles) = block.logs();
        time.add(in_time);
        if blocks.is_empty() {
            cycles = in_cycles.map(|_| Watch::new(rule.margin));
        }
        // A block without a clock among blocks with one would unpair the two units.
        if let (Some(watch), Some(log)) = (&mut cycles, in_cycles) {
            watch.add(log);
        }
        blocks.push(block);
        if rule.hopeless_below > 0.0
            && (HOPELESS_BLOCKS..2 * HOPELESS_BLOCKS).contains(&blocks.len())
            && blocks.iter().all(|block| block.is_hopeless(rule.hopeless_below))
        {
            break Ended::Hopeless;
        }
        if together(&time, cycles.as_ref(), rule.alpha) != Outcome::Ambiguous {
            break Ended::Decided;
        }
    };
    let verdict = match ended {
        Ended::Decided => together(&time, cycles.as_ref(), rule.alpha),
        Ended::Hopeless => Outcome::Slow,
        _ => Outcome::Ambiguous,
    };
    Ok(Fought { verdict, ended, time, cycles, throttled, unsteady, blocks })
}

enum Clock {
    Fine,
    Throttled,
    Unsteady,
}

fn clock_of(block: &Block, best: &mut f64) -> Clock {
    let [a, b, c, d] = block.readings.map(|reading| reading.clock_ghz);
    let (Some(a), Some(b), Some(c), Some(d)) = (a, b, c, d) else { return Clock::Fine };
    *best = [a, b, c, d].into_iter().fold(*best, f64::max);
    if [a, b, c, d].into_iter().any(|clock| clock < THROTTLED_BELOW * *best) {
        return Clock::Throttled;
    }
    let apart = |x: f64, y: f64| (x / y).ln().abs() > STEADY_WITHIN;
    if apart(a, d) || apart(b, c) { Clock::Unsteady } else { Clock::Fine }
}

#[cfg(test)]
mod tests;
