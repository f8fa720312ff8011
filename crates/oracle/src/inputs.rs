//! Input data by family and seed: the same numbers on every machine.
//!
//! Each element is a pure function of (seed, family, tensor, logical index): no generator state, no dependence on
//! layout, strides or threads. Transcendentals come from `libm`, whose results do not depend on the platform.
//!
//! For 8-bit problems the family is drawn in f32 and then quantised head by head, so that a family says how the numbers
//! *before* quantisation lie; the scales take care of their size.

use std::{borrow::Cow, f64::consts::TAU, fmt, str::FromStr};

use evosdpa_core::{CODE_MAX, DType, E4M3Code, Error, Float, Layout, Problem, Tensor, error::nearest};

use crate::{
    elements,
    quantize::{self, Quantized, Scales},
};

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
    /// Normal, with every other element denormal in the tensors' dtype. In 8-bit problems these elements are so small
    /// against their head's largest that e4m3 holds them as subnormal codes, and u8, which has none, as zeros.
    Denormals,
    /// All zeros.
    Zeros,
    /// V at ± the dtype's largest value, as far as an fp32 accumulator of unnormalised weights can hold it. In 8-bit
    /// problems, whose scales have no such limit, the largest value of the f16 output.
    MaxValues,
    /// Normal, with infinite keys where no query sees them: a hidden score must not matter, whatever it is. In 8-bit problems, which
    /// have no infinity, plain normal.
    HiddenKeys,
}

impl Family {
    /// Every family, the plain one first.
    pub const ALL: [Self; 10] = [
        Self::Normal,
        Self::Uniform,
        Self::LargeLogits,
        Self::OneHot,
        Self::Ties,
        Self::ConstantRows,
        Self::Denormals,
        Self::Zeros,
        Self::MaxValues,
        Self::HiddenKeys,
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
            Self::HiddenKeys => "hidden-keys",
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
    /// What the tensors' values are to be multiplied with when they are 8-bit codes; `None` when they are not.
    pub scales: Option<Scales>,
}

impl Inputs {
    /// Packed tensors in the problem's layout.
    pub fn generate(problem: &Problem, family: Family, seed: u64) -> Self {
        Self::fill(problem, family, seed, |shape| Tensor::zeros(shape, problem.dtype(), problem.layout()))
    }

    /// The same numbers in buffers whose rows are further apart than needed, with `0xFF` in every gap: NaN, or the
    /// largest value of u8, which has no NaN.
    pub fn with_poisoned_gaps(problem: &Problem, family: Family, seed: u64, row_gap: usize) -> Self {
        Self::fill(problem, family, seed, |shape| {
            Tensor::poisoned_gaps(shape, problem.dtype(), problem.layout(), row_gap)
        })
    }

    /// The numbers before they are quantised: packed f32 tensors. For floating-point problems, what
    /// [`Inputs::generate`] gives.
    pub fn original(problem: &Problem, family: Family, seed: u64) -> Self {
        let dtype = if problem.dtype().is_eight_bit() { DType::F32 } else { problem.dtype() };
        let [q, k, v] = draw(problem, family, seed, |shape| Tensor::zeros(shape, dtype, problem.layout()));
        Self { q, k, v, scales: None }
    }

    /// The values that the tensors stand for: packed f32 tensors for 8-bit codes, the tensors themselves otherwise.
    pub fn dequantized(&self) -> Cow<'_, Self> {
        let Some(scales) = &self.scales else { return Cow::Borrowed(self) };
        let value = |codes, scales| quantize::dequantize(codes, scales, Layout::Bhsd);
        Cow::Owned(Self {
            q: value(&self.q, &scales.q),
            k: value(&self.k, &scales.k),
            v: value(&self.v, &scales.v),
            scales: None,
        })
    }

    fn fill(problem: &Problem, family: Family, seed: u64, make: impl Fn([usize; 4]) -> Tensor) -> Self {
        if !problem.dtype().is_eight_bit() {
            let [q, k, v] = draw(problem, family, seed, make);
            return Self { q, k, v, scales: None };
        }
        let Self { q, k, v, .. } = Self::original(problem, family, seed);
        let [q, k, v]: [Quantized; 3] = [q, k, v].map(|tensor| {
            let view = tensor.view();
            quantize::quantize_into(&view, make(view.shape()))
        });
        let scales = Scales { q: q.scales, k: k.scales, v: v.scales };
        Self { q: q.codes, k: k.codes, v: v.codes, scales: Some(scales) }
    }
}

/// Fills the three tensors that `make` makes.
fn draw(problem: &Problem, family: Family, seed: u64, make: impl Fn([usize; 4]) -> Tensor) -> [Tensor; 3] {
    let source = Source { problem: *problem, family, seed };
    [(Which::Q, problem.q_shape()), (Which::K, problem.k_shape()), (Which::V, problem.v_shape())].map(
        |(which, shape)| {
            let mut tensor = make(shape);
            elements::fill(&mut tensor, |index| source.value(which, index));
            tensor
        },
    )
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
            (Family::Denormals, _) if d % 2 == 1 => denormal_size(&self.problem) * self.normal(which, index),
            (Family::MaxValues, Which::V) => {
                let sign = if self.uniform(which, index) < 0.5 { -1.0 } else { 1.0 };
                sign * max_value(&self.problem)
            }
            (Family::HiddenKeys, Which::K) if self.is_hidden(s) => f64::INFINITY,
            _ => self.normal(which, index),
        }
    }

    /// Whether no query sees a key of a floating-point problem.
    fn is_hidden(&self, key: usize) -> bool {
        let (band, key) = (self.problem.band(), key as i64);
        let (first, last) =
            ((key - band.hi).max(0), (key - band.lo).min(self.problem.sizes().seq_q as i64 - 1));
        !self.problem.dtype().is_eight_bit() && first > last
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

/// The standard deviation of [`Family::Denormals`]'s small elements.
fn denormal_size(problem: &Problem) -> f64 {
    // The largest of a head of N(0, 1) is about 4, which becomes 448.
    match problem.dtype().float() {
        Some(float) => float.min_normal() / 8.0,
        None => E4M3Code::MIN_NORMAL / 2.0 * 4.0 / CODE_MAX,
    }
}

/// Streaming softmax sums up to `seq_kv` unnormalised weights of at most one in fp32. For f16 (and 8-bit, whose output is
/// f16) that never overflows; for f32 and bf16 the largest safe value is that many times below the type's maximum.
fn max_value(problem: &Problem) -> f64 {
    match problem.output_float() {
        Float::F16 => Float::F16.max_finite(),
        float => float.round(f64::powi(2.0, 126) / problem.sizes().seq_kv.next_power_of_two() as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evosdpa_core::{Layout, Shape};

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
        assert!(values(&denormal.k).iter().any(|&x| x != 0.0 && x.abs() < Float::F16.min_normal()));
        let tied = values(&draw(Family::Ties).k);
        assert_eq!(tied[..16], tied[4 * 16..5 * 16]);
    }

    #[test]
    fn keys_that_nobody_sees_are_infinite_and_no_others() {
        for text in [
            "b1h1s3/7d8",
            "b1h1s3/7d8:causal",
            "b1h1s3/7d8:causal-br",
            "b1h1s9/7d8:window-tl=1/0",
            "b1h1s2/7d8:window=1/0",
        ] {
            let problem = problem(text, DType::BF16);
            let keys = values(&Inputs::generate(&problem, Family::HiddenKeys, 1).k);
            let sizes = problem.sizes();
            for (key, row) in keys.chunks(8).enumerate() {
                let seen = (0..sizes.seq_q).any(|i| problem.band().visible(i, sizes.seq_kv).contains(&key));
                assert!(row.iter().all(|x| x.is_finite() == seen), "{text} {key}");
            }
        }
    }

    #[test]
    fn eight_bit_inputs_are_the_originals_quantised() {
        for dtype in DType::EIGHT_BIT {
            let problem = problem("b2h4/2s9/33d16", dtype).with_layout(Layout::Bshd);
            for family in Family::ALL {
                let inputs = Inputs::generate(&problem, family, 3);
                let gapped = Inputs::with_poisoned_gaps(&problem, family, 3, 5);
                let scales = inputs.scales.as_ref().unwrap();
                assert_eq!((scales.q.len(), scales.k.len(), scales.v.len()), (8, 4, 4));
                assert_eq!(gapped.scales.as_ref(), Some(scales));
                let original = Inputs::original(&problem, family, 3);
                let (back, gapped) = (inputs.dequantized(), gapped.dequantized());
                for (original, back, gapped, scales, heads) in [
                    (&original.q, &back.q, &gapped.q, &scales.q, 4),
                    (&original.k, &back.k, &gapped.k, &scales.k, 2),
                    (&original.v, &back.v, &gapped.v, &scales.v, 2),
                ] {
                    assert_eq!(values(back), values(gapped));
                    let [batch, _, seq, dim] = original.view().shape();
                    assert_eq!(scales.len(), batch * heads);
                    for (i, (x, y)) in values(original).iter().zip(values(back)).enumerate() {
                        // Half a step of u8, or of the last binade of e4m3.
                        let half_step = if dtype == DType::U8 { 448.0 / 254.0 } else { 16.0 };
                        let allowed = half_step * scales[i / (seq * dim)] as f64;
                        assert!((x - y).abs() <= allowed * 1.000_001, "{dtype} {family} {x} {y}");
                    }
                }
            }
        }
        let plain = Inputs::generate(&problem("tiny", DType::F16), Family::Normal, 1);
        assert!(plain.scales.is_none() && matches!(plain.dequantized(), Cow::Borrowed(_)));
    }

    #[test]
    fn eight_bit_denormals_are_subnormal_codes() {
        let codes = |dtype| Inputs::generate(&problem("mission", dtype), Family::Denormals, 3).k;
        let small = |codes: &Tensor| codes.bytes().iter().skip(1).step_by(2).copied().collect::<Vec<u8>>();
        let e4m3 = small(&codes(DType::E4M3));
        assert!((1..8).all(|code| e4m3.contains(&code) && e4m3.contains(&(0x80 | code))));
        assert!(small(&codes(DType::U8)).iter().all(|&code| code == 128));
    }
}
