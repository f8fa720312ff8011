//! Does the simulator give what a GPU gives? The same kernels on the same inputs, output against output.
//!
//! Two kinds of numbers answer two questions.
//!
//! - **Whole numbers**: everything that a kernel computes is exact, so that both outputs must be *the same bits*. Scores are small whole numbers and
//!   the scale is `ln 2`: weights are powers of two, their sums and the sums of weighted values have few bits. The one rounding left is
//!   that of `sum / weights`, whose numerator and denominator are whole numbers, the latter below 2¹⁰: it is at least `2⁻²²` of itself away from
//!   the middle between two f16 numbers, further than what a division or reciprocal in fp32 is wrong by. Values are positive: kernels that
//!   divide each part before they add it round both, and parts of opposite signs would leave that rounding alone. What differs is a wrong
//!   address, mask, order or merge on one side.
//! - **Normal numbers**: PTX leaves open how tensor cores round their sums, and what the last bits of `ex2.approx` are. Each output is within the
//!   forward error bound of [`error_bound`] of the oracle, so that they are at most twice the bound apart.

use evosdpa_core::{DType, Problem, Sequences};
use evosdpa_oracle::{
    Question, Reference, elements,
    inputs::{Family, Inputs},
    rng::mix,
    solve,
    tolerance::error_bound,
};
use serde::{Deserialize, Serialize};

use crate::{
    Error,
    device::{Device, Output, Sim},
};

pub mod cache_write;
mod questions;
pub use questions::QUESTIONS;

/// Log-sum-exps of both machines, up to a dozen in size, may be so far apart: `lg2.approx` and `ex2.approx` differ in their last bits.
pub const LSE_DISTANCE: f64 = 1e-5;

/// What inputs are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Numbers {
    /// Whole ones: outputs are the same bits.
    Whole,
    /// N(0, 1): outputs are within a bound of each other.
    Normal,
}

/// One kernel on one problem.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The kernel, with tunables where another form than the default is meant.
    pub kernel: &'static str,
    /// The problem.
    pub shape: &'static str,
    /// Its inputs' type.
    pub dtype: DType,
    /// What they are.
    pub numbers: Numbers,
    /// Which numbers, lengths and pages are drawn.
    pub seed: u64,
}

impl Asked {
    /// The problem, with LSE.
    pub fn problem(&self) -> Result<Problem, Error> {
        let problem = Problem::new(self.shape.parse()?, self.dtype)?.with_lse(true);
        Ok(match self.numbers {
            Numbers::Normal => problem,
            // Times log2(e), in fp32, that is one.
            Numbers::Whole => problem.with_scale(std::f32::consts::LN_2)?,
        })
    }

    /// The inputs, with NaN between the rows.
    pub fn inputs(&self, problem: &Problem) -> Inputs {
        let mut inputs = Inputs::with_poisoned_gaps(problem, Family::Normal, self.seed, 8);
        if self.numbers == Numbers::Whole {
            let drawn = |which: u64, [b, h, s, d]: [usize; 4]| {
                [b, h, s, d].iter().fold(mix(self.seed ^ which), |hash, at| mix(hash ^ *at as u64))
            };
            // One in √d is 1, the others 0: a score is 1 on average.
            let rate = f64::from(problem.shape().sizes().dim_qk as u32).sqrt() as u64;
            let sparse = |hash: u64| if hash.is_multiple_of(rate.max(1)) { 1.0 } else { 0.0 };
            elements::fill(&mut inputs.q, |at| sparse(drawn(1 << 32, at)));
            elements::fill(&mut inputs.k, |at| sparse(drawn(2 << 32, at)));
            elements::fill(&mut inputs.v, |at| (drawn(3 << 32, at) % 8) as f64 + 1.0);
        }
        inputs
    }

    /// What the simulator makes of it. The variant that ran is returned by its whole name, so that a GPU runs the same.
    pub fn simulate(&self, sim: &Sim) -> Result<(String, Output), Error> {
        let problem = self.problem()?;
        let simulation = sim.simulation(self.kernel, &problem)?;
        let (output, outcome) = simulation.run(&self.inputs(&problem), &ptxsan::Options::default())?;
        if !outcome.is_clean() {
            let findings = outcome.failures().map(ToString::to_string).collect();
            return Err(Error::Findings { kernel: simulation.label(), findings });
        }
        Ok((simulation.label(), output))
    }

    /// What a device makes of it with a variant.
    pub fn run_on(&self, device: &dyn Device, variant: &str) -> Result<Output, Error> {
        let problem = self.problem()?;
        let inputs = [self.inputs(&problem)];
        device.load(variant, &problem, &inputs)?.run(0)
    }

    /// Of the bytes of an output, the rows that belong to no sequence as they are before a call.
    pub fn digest(&self, output: &Output) -> Result<String, Error> {
        let problem = self.problem()?;
        let inputs = self.inputs(&problem);
        let (q, k) = (inputs.q.view().shape(), inputs.k.view().shape());
        let sequences = Sequences::new(&problem, &inputs.side(), q, k)?;
        let mut o = output.o.clone();
        let ([_, heads, rows, dim], [block_stride, head_stride, row_stride, _]) =
            (o.view().shape(), o.view().strides());
        let size = o.view().dtype().bytes();
        for (block, unowned) in sequences.unowned(rows) {
            for (head, row) in (0..heads).flat_map(|head| unowned.clone().map(move |row| (head, row))) {
                let start = block * block_stride + head * head_stride + row * row_stride;
                o.bytes_mut()[start * size..(start + dim) * size].fill(0xFF);
            }
        }
        Ok(blake3::hash(o.bytes()).to_hex()[..32].to_owned())
    }

    /// Two outputs beside each other.
    pub fn compare(&self, variant: &str, simulated: &Output, real: &Output) -> Result<AgreementRow, Error> {
        let problem = self.problem()?;
        let inputs = self.inputs(&problem);
        let values = inputs.dequantized(&problem);
        let tensors = [values.q.view(), values.k.view(), values.v.view()];
        let reference = solve(&Question::new(&problem, tensors, &values.side())?);
        let mut row = AgreementRow {
            kernel: variant.to_owned(),
            problem: problem.to_string(),
            shape: self.shape.to_owned(),
            dtype: self.dtype,
            numbers: self.numbers,
            seed: self.seed,
            elements: 0,
            same_bits: 0,
            max_distance: 0.0,
            of_bound: 0.0,
            lse_max_distance: lse_distance(&reference, simulated, real),
            gpu_blake3: self.digest(real)?,
            agrees: false,
        };
        row.count(&problem, &reference, [simulated, real]);
        row.agrees = match self.numbers {
            Numbers::Whole => row.same_bits == row.elements && self.digest(simulated)? == row.gpu_blake3,
            Numbers::Normal => row.of_bound <= 1.0,
        };
        row.agrees &= row.lse_max_distance.is_some_and(|distance| distance <= LSE_DISTANCE);
        Ok(row)
    }
}

/// A kernel on a problem, on both machines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AgreementRow {
    /// The variant that ran on both.
    pub kernel: String,
    /// The problem in words.
    pub problem: String,
    /// As it is spelled.
    pub shape: String,
    /// Its inputs' type.
    pub dtype: DType,
    /// What its inputs were made of.
    pub numbers: Numbers,
    /// The seed they were drawn with.
    pub seed: u64,
    /// Elements of O that belong to a sequence.
    pub elements: usize,
    /// Those that are the same bits.
    pub same_bits: usize,
    /// The largest distance of two elements.
    pub max_distance: f64,
    /// The largest distance as a share of what is allowed: twice the forward error bound of that element.
    pub of_bound: f64,
    /// The largest distance of two log-sum-exps; `None` where one of them is no number.
    pub lse_max_distance: Option<f64>,
    /// Of the GPU's O: of whole numbers, what every right kernel gives.
    pub gpu_blake3: String,
    /// Same bits, or within the bound, as the numbers ask for; log-sum-exps no further apart than [`LSE_DISTANCE`].
    pub agrees: bool,
}

impl AgreementRow {
    fn count(&mut self, problem: &Problem, reference: &Reference, [simulated, real]: [&Output; 2]) {
        let [_, heads, seq, dim] = problem.o_shape();
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for row in (0..problem.rows()).filter(|row| reference.is_owned(*row)) {
            let at = (row / (heads * seq), row / seq % heads, row % seq);
            simulated.o.view().row_f64(at.0, at.1, at.2, &mut a);
            real.o.view().row_f64(at.0, at.1, at.2, &mut b);
            for column in 0..dim {
                let (a, b) = (a[column], b[column]);
                self.elements += 1;
                if a.to_bits() == b.to_bits() {
                    self.same_bits += 1;
                    continue;
                }
                // A NaN on one side is infinitely far away.
                let distance = if (a - b).is_nan() { f64::INFINITY } else { (a - b).abs() };
                self.max_distance = self.max_distance.max(distance);
                self.of_bound =
                    self.of_bound.max(distance / (2.0 * error_bound(problem, reference, row, column)));
            }
        }
    }
}

fn lse_distance(reference: &Reference, simulated: &Output, real: &Output) -> Option<f64> {
    let pairs = simulated.lse.iter().flatten().zip(real.lse.iter().flatten()).enumerate();
    let apart = pairs.filter(|(row, (a, b))| reference.is_owned(*row) && a.to_bits() != b.to_bits());
    apart
        .map(|(_, (a, b))| f64::from((a - b).abs()))
        .try_fold(0.0, |worst: f64, distance| distance.is_finite().then(|| worst.max(distance)))
}
