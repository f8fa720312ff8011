//! Input data by family and seed: the same numbers on every machine.
//!
//! Each element is a pure function of (seed, family, tensor, logical index): no generator state, no dependence on
//! layout, strides or threads. Transcendentals come from `libm`, whose results do not depend on the platform.

use std::{f64::consts::TAU, fmt, str::FromStr};

use crate::{DType, Error, Problem, Tensor, error::nearest};

/// A way of drawing Q, K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// Independent N(0, 1): what every gate is first judged on.
    Normal,
    /// Independent, uniform in [-1, 1).
    Uniform,
    /// Normal with Q forty times as large: scores reach past ±80, where a softmax without its maximum overflows.
    LargeLogits,
    /// Each query points at one key, whose weight is then nearly one.
    OneHot,
    /// Keys repeat with period four, so that the maximum of every row is reached several times.
    Ties,
    /// Every row of Q, K and V holds one value.
    ConstantRows,
    /// Normal, with every other element denormal in the tensors' dtype.
    Denormals,
    /// All zeros.
    Zeros,
    /// V at ± the dtype's largest value, as far as an fp32 accumulator of unnormalised weights can hold it.
    MaxValues,
}

impl Family {
    /// Every family, the plain one first.
    pub const ALL: [Self; 9] = [
        Self::Normal,
        Self::Uniform,
        Self::LargeLogits,
        Self::OneHot,
        Self::Ties,
        Self::ConstantRows,
        Self::Denormals,
        Self::Zeros,
        Self::MaxValues,
    ];

    /// The name used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Uniform => "uniform",
            Self::LargeLogits => "large-logits",
            Self::OneHot => "one-hot",
            Self::Ties => "ties",
            Self::ConstantRows => "constant-rows",
            Self::Denormals => "denormals",
            Self::Zeros => "zeros",
            Self::MaxValues => "max-values",
        }
    }

    /// How large V's elements are. Attention is linear in V, so an absolute tolerance stated for V ~ N(0, 1) is this
    /// many times as large for the family.
    pub fn value_scale(self, problem: &Problem) -> f64 {
        match self {
            Self::MaxValues => max_value(problem),
            _ => 1.0,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Family {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|family| family.name() == text).ok_or_else(|| Error::UnknownName {
            kind: "input family",
            name: text.to_owned(),
            nearest: nearest(text, Self::ALL.iter().map(|family| family.name())),
            allowed: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// Q, K and V for one problem.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

impl Inputs {
    /// Packed tensors in the problem's layout.
    pub fn generate(problem: &Problem, family: Family, seed: u64) -> Self {
        Self::fill(problem, family, seed, |shape| Tensor::zeros(shape, problem.dtype(), problem.layout()))
    }

    /// The same numbers in buffers whose rows are further apart than needed, with NaN in every gap.
    pub fn with_poisoned_gaps(problem: &Problem, family: Family, seed: u64, row_gap: usize) -> Self {
        Self::fill(problem, family, seed, |shape| {
            Tensor::poisoned_gaps(shape, problem.dtype(), problem.layout(), row_gap)
        })
    }

    fn fill(problem: &Problem, family: Family, seed: u64, make: impl Fn([usize; 4]) -> Tensor) -> Self {
        let source = Source { problem: *problem, family, seed };
        let filled = |which: Which, shape| {
            let mut tensor = make(shape);
            tensor.fill_with(|index| source.value(which, index));
            tensor
        };
        Self {
            q: filled(Which::Q, problem.q_shape()),
            k: filled(Which::K, problem.k_shape()),
            v: filled(Which::V, problem.v_shape()),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Which {
    Q,
    K,
    V,
}

struct Source {
    problem: Problem,
    family: Family,
    seed: u64,
}

impl Source {
    fn value(&self, which: Which, index: [usize; 4]) -> f64 {
        let [b, h, s, d] = index;
        match (self.family, which) {
            (Family::Zeros, _) => 0.0,
            (Family::Uniform, _) => 2.0 * self.uniform(which, index) - 1.0,
            (Family::LargeLogits, Which::Q) => 40.0 * self.normal(which, index),
            (Family::OneHot, Which::Q) => {
                let heads_kv = h / self.problem.group();
                let target = (s * 7 + 3) % self.problem.sizes().seq_kv;
                8.0 * self.normal(Which::K, [b, heads_kv, target, d])
            }
            (Family::Ties, Which::K) => self.normal(which, [b, h, s % 4, d]),
            (Family::ConstantRows, _) => self.normal(which, [b, h, s, 0]),
            (Family::Denormals, _) if d % 2 == 1 => {
                self.problem.dtype().min_normal() / 8.0 * self.normal(which, index)
            }
            (Family::MaxValues, Which::V) => {
                let sign = if self.uniform(which, index) < 0.5 { -1.0 } else { 1.0 };
                sign * max_value(&self.problem)
            }
            _ => self.normal(which, index),
        }
    }

    /// N(0, 1) by Box and Muller's transform.
    fn normal(&self, which: Which, index: [usize; 4]) -> f64 {
        let bits = self.bits(which, index);
        // (0, 1], so that the logarithm is finite.
        let radius = ((bits >> 32) as f64 + 1.0) * f64::powi(2.0, -32);
        let angle = (bits & 0xFFFF_FFFF) as f64 * f64::powi(2.0, -32);
        libm::sqrt(-2.0 * libm::log(radius)) * libm::cos(TAU * angle)
    }

    /// Uniform in [0, 1).
    fn uniform(&self, which: Which, index: [usize; 4]) -> f64 {
        (self.bits(which, index) >> 11) as f64 * f64::powi(2.0, -53)
    }

    fn bits(&self, which: Which, index: [usize; 4]) -> u64 {
        // Normal data is shared by the families that only rearrange it.
        let stream = split_mix(self.seed ^ split_mix(which as u64 + 1));
        index.into_iter().fold(stream, |state, i| split_mix(state ^ i as u64))
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection that mixes all bits.
fn split_mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Streaming softmax sums up to `seq_kv` unnormalised weights of at most one in fp32. For f16 that never overflows; for
/// f32 and bf16 the largest safe value is that many times below the type's maximum.
fn max_value(problem: &Problem) -> f64 {
    let dtype = problem.dtype();
    match dtype {
        DType::F16 => dtype.max_finite(),
        _ => dtype.round(f64::powi(2.0, 126) / problem.sizes().seq_kv.next_power_of_two() as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Shape};

    fn problem(text: &str, dtype: DType) -> Problem {
        Problem::new(text.parse::<Shape>().unwrap(), dtype).unwrap()
    }

    fn values(tensor: &Tensor) -> Vec<f64> {
        let view = tensor.view();
        let [batch, heads, seq, _] = view.shape();
        let mut all = Vec::new();
        let mut row = Vec::new();
        for b in 0..batch {
            for h in 0..heads {
                for s in 0..seq {
                    view.row_f64(b, h, s, &mut row);
                    all.extend_from_slice(&row);
                }
            }
        }
        all
    }

    #[test]
    fn normal_data_is_normal() {
        let inputs = Inputs::generate(&problem("mission", DType::F32), Family::Normal, 1);
        for tensor in [&inputs.q, &inputs.k, &inputs.v] {
            let data = values(tensor);
            let n = data.len() as f64;
            let mean = data.iter().sum::<f64>() / n;
            let variance = data.iter().map(|x| x * x).sum::<f64>() / n;
            let fourth = data.iter().map(|x| x.powi(4)).sum::<f64>() / n;
            assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02 && (fourth - 3.0).abs() < 0.2);
        }
    }

    #[test]
    fn numbers_depend_on_the_seed_and_not_on_the_layout() {
        let plain = problem("b2h2s5d8", DType::BF16);
        let other = plain.with_layout(Layout::Bshd);
        let first = Inputs::generate(&plain, Family::Normal, 7);
        assert_eq!(values(&first.k), values(&Inputs::generate(&other, Family::Normal, 7).k));
        assert_eq!(values(&first.k), values(&Inputs::with_poisoned_gaps(&other, Family::Normal, 7, 3).k));
        assert_ne!(values(&first.k), values(&Inputs::generate(&plain, Family::Normal, 8).k));
        assert_ne!(values(&first.k), values(&first.q));
    }

    /// The numbers themselves, so that a change of generator or platform is noticed.
    #[test]
    fn numbers_are_the_same_on_every_machine() {
        let inputs = Inputs::generate(&problem("tiny", DType::F32), Family::Normal, 0);
        let bits: Vec<u32> = values(&inputs.q)[..4].iter().map(|&x| (x as f32).to_bits()).collect();
        assert_eq!(bits, GOLDEN, "{bits:#010x?}");
    }

    const GOLDEN: [u32; 4] = [0x3be7_113d, 0x3f1e_3b8d, 0xbf95_6bba, 0x3edb_d409];

    #[test]
    fn families_are_what_they_say() {
        let problem = problem("b1h2s33d16", DType::F16);
        let draw = |family| Inputs::generate(&problem, family, 3);
        assert!(values(&draw(Family::Zeros).v).iter().all(|&x| x == 0.0));
        assert!(values(&draw(Family::MaxValues).v).iter().all(|&x| x.abs() == 65504.0));
        assert!(values(&draw(Family::Uniform).q).iter().all(|&x| (-1.0..=1.0).contains(&x)));
        assert!(values(&draw(Family::LargeLogits).q).iter().any(|&x| x > 80.0));
        let denormal = draw(Family::Denormals);
        assert!(values(&denormal.k).iter().any(|&x| x != 0.0 && x.abs() < DType::F16.min_normal()));
        let tied = values(&draw(Family::Ties).k);
        assert_eq!(tied[..16], tied[4 * 16..5 * 16]);
    }
}
