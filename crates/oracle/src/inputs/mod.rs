//! Input data by family and seed: the same numbers on every machine.
//!
//! Each element is a pure function of (seed, family, tensor, logical index): no generator state, no dependence on
//! layout, strides or threads. Transcendentals come from `libm`, whose results do not depend on the platform.
//!
//! 8-bit tensors are drawn in f32 and then quantised, so that a family says how the numbers *before* quantisation lie; the
//! scales take care of their size.
//!
//! Where lengths or pages are data, an [`Arrangement`] says how they are drawn. Every place that belongs to no token is
//! poisoned with NaN, so that reading one key too many shows. The last key of a sequence has a large value, or, where
//! codes would lose all others beside it, is what some queries look for: so that reading one too few shows as well.

mod arrangement;
mod side;

use std::{borrow::Cow, f64::consts::TAU, fmt, str::FromStr};

use evosdpa_core::{CODE_MAX, DType, E4M3Code, Error, Float, Problem, SideInputs, Tensor, error::nearest};

use crate::{
    elements,
    quantize::{self, Groups, Scales},
    rng::mix,
};
use arrangement::Places;
pub use arrangement::{Arrangement, LengthFamily, PageOrder};
pub use side::Side;

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

    /// The families that are not plain noise, those first that are hardest for 16-bit weights.
    pub fn adversarial() -> Vec<Self> {
        let hardest = [Self::LargeLogits, Self::OneHot, Self::ConstantRows];
        let rest =
            Self::ALL.into_iter().filter(|family| family.is_adversarial() && !hardest.contains(family));
        hardest.into_iter().chain(rest).collect()
    }

    /// Whether it is made to go wrong: every family but independent noise.
    pub fn is_adversarial(self) -> bool {
        !matches!(self, Self::Normal | Self::Uniform)
    }

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
    /// Lengths, pages and what modifies scores.
    pub side: Side,
}

impl Inputs {
    /// Packed tensors in the problem's layout.
    pub fn generate(problem: &Problem, family: Family, seed: u64) -> Self {
        Self::arranged(problem, family, seed, None, Arrangement::of(family, seed))
    }

    /// What is timed: every sequence as long as the problem says.
    pub fn timed(problem: &Problem, seed: u64) -> Self {
        Self::arranged(problem, Family::Normal, seed, None, Arrangement::FULL)
    }

    /// The same numbers in buffers whose rows are further apart than needed, with `0xFF` in every gap: NaN, or the
    /// largest value of u8, which has no NaN.
    pub fn with_poisoned_gaps(problem: &Problem, family: Family, seed: u64, row_gap: usize) -> Self {
        Self::arranged(problem, family, seed, Some(row_gap), Arrangement::of(family, seed))
    }

    /// As [`Inputs::generate`], or with a gap [`Inputs::with_poisoned_gaps`], with lengths and pages of one's own choice.
    pub fn arranged(
        problem: &Problem,
        family: Family,
        seed: u64,
        row_gap: Option<usize>,
        arrangement: Arrangement,
    ) -> Self {
        let drawn = Drawn::new(problem, family, seed, arrangement);
        let make = |which: Which| {
            let (shape, dtype) = which.of(problem);
            match row_gap {
                None => Tensor::zeros(shape, dtype, problem.layout()),
                Some(gap) => Tensor::poisoned_gaps(shape, dtype, problem.layout(), gap),
            }
        };
        let side = Side::draw(problem, &drawn.source, &drawn.places);
        let mut scales = Scales { q: Vec::new(), k: Vec::new(), v: Vec::new() };
        let [q, k, v] = [(Which::Q, &mut scales.q), (Which::K, &mut scales.k), (Which::V, &mut scales.v)]
            .map(|(which, scales)| {
                let tensor = make(which);
                if !which.of(problem).1.is_eight_bit() {
                    return drawn.fill(which, tensor);
                }
                let original = drawn.original(which);
                let groups = Groups::new(problem, &side.views(None), which == Which::Q);
                let quantized = quantize::quantize_into(&original.view(), tensor, &groups);
                *scales = quantized.scales;
                quantized.codes
            });
        Self { q, k, v, scales: problem.has_codes().then_some(scales), side }
    }

    /// The numbers before they are quantised: packed f32 tensors in place of those with codes.
    pub fn original(problem: &Problem, family: Family, seed: u64, arrangement: Arrangement) -> Self {
        let drawn = Drawn::new(problem, family, seed, arrangement);
        let [q, k, v] = [Which::Q, Which::K, Which::V].map(|which| drawn.original(which));
        let side = Side::draw(problem, &drawn.source, &drawn.places);
        Self { q, k, v, scales: None, side }
    }

    /// The values that the tensors stand for: packed f32 tensors for 8-bit codes, the tensors themselves otherwise. They must
    /// be of this problem, family and seed.
    pub fn dequantized(&self, problem: &Problem) -> Cow<'_, Self> {
        let Some(scales) = &self.scales else { return Cow::Borrowed(self) };
        let side = self.side.views(None);
        let value = |codes: &Tensor, scales: &[f32], which: Which| {
            if scales.is_empty() {
                return codes.clone();
            }
            let groups = Groups::new(problem, &side, which == Which::Q);
            quantize::dequantize(codes, scales, &groups)
        };
        Cow::Owned(Self {
            q: value(&self.q, &scales.q, Which::Q),
            k: value(&self.k, &scales.k, Which::K),
            v: value(&self.v, &scales.v, Which::V),
            scales: None,
            side: self.side.clone(),
        })
    }

    /// What is read besides Q, K and V.
    pub fn side(&self) -> SideInputs<'_> {
        self.side.views(self.scales.as_ref())
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Which {
    Q,
    K,
    V,
}

impl Which {
    /// Its shape and element type.
    fn of(self, problem: &Problem) -> ([usize; 4], DType) {
        match self {
            Self::Q => (problem.q_shape(), problem.dtype()),
            Self::K => (problem.k_shape(), problem.kv_dtype()),
            Self::V => (problem.v_shape(), problem.kv_dtype()),
        }
    }
}

/// Numbers and where they go.
struct Drawn {
    source: Source,
    places: Places,
    /// For each place of K, whether no query sees the key there; empty where that does not matter.
    unseen: Vec<bool>,
}

impl Drawn {
    fn new(problem: &Problem, family: Family, seed: u64, arrangement: Arrangement) -> Self {
        let places = Places::new(problem, arrangement, seed);
        let hides = family == Family::HiddenKeys && !problem.kv_dtype().is_eight_bit();
        let unseen = if hides { places.unseen(problem) } else { Vec::new() };
        Self { source: Source { problem: *problem, family, seed }, places, unseen }
    }

    /// The numbers in a tensor of their own; in f32 where the problem's holds codes.
    fn original(&self, which: Which) -> Tensor {
        let (shape, dtype) = which.of(&self.source.problem);
        let dtype = if dtype.is_eight_bit() { DType::F32 } else { dtype };
        self.fill(which, Tensor::zeros(shape, dtype, self.source.problem.layout()))
    }

    fn fill(&self, which: Which, mut tensor: Tensor) -> Tensor {
        let rows = tensor.view().shape()[2];
        elements::fill(&mut tensor, |index| self.value(which, index, rows));
        tensor
    }

    fn value(&self, which: Which, [block, h, row, d]: [usize; 4], rows: usize) -> f64 {
        let owner = match which {
            Which::Q => self.places.query(block, row, rows),
            Which::K | Which::V => self.places.key(block, row, rows),
        };
        // A place of nobody's.
        let Some((b, s)) = owner else { return f64::NAN };
        if which == Which::K && self.is_hidden(block * rows + row, s) {
            return f64::INFINITY;
        }
        let keys = self.places.keys_of(b);
        let value = self.source.value(which, [b, h, s, d], keys);
        if self.places.are_plain() || keys == 0 {
            return value;
        }
        match which {
            Which::V if s + 1 == keys => value * self.source.last_value_size(keys),
            Which::Q if s % 4 == 0 => value + self.source.look_for_last_key([b, h, d], keys),
            _ => value,
        }
    }

    fn is_hidden(&self, place: usize, key: usize) -> bool {
        let by_mask = || self.source.problem.scores().mask.is_some() && side::is_hidden_by_mask(key);
        !self.unseen.is_empty() && (self.unseen[place] || by_mask())
    }
}

struct Source {
    problem: Problem,
    family: Family,
    seed: u64,
}

impl Source {
    /// The element of a sequence's token, in a sequence of so many keys.
    fn value(&self, which: Which, index: [usize; 4], keys: usize) -> f64 {
        let [b, h, s, d] = index;
        match (self.family, which) {
            (Family::Zeros, _) => 0.0,
            (Family::Uniform, _) => 2.0 * self.uniform(which, index) - 1.0,
            (Family::LargeLogits, Which::Q) => 40.0 * self.normal(which, index),
            (Family::OneHot, Which::Q) if keys > 0 => {
                let heads_kv = h / self.problem.group();
                let target = (s * 7 + 3) % keys;
                8.0 * self.normal(Which::K, [b, heads_kv, target, d])
            }
            (Family::Ties, Which::K) => self.normal(which, [b, h, s % 4, d]),
            (Family::ConstantRows, _) => self.normal(which, [b, h, s, 0]),
            (Family::Denormals, _) if d % 2 == 1 => {
                denormal_size(which.of(&self.problem).1) * self.normal(which, index)
            }
            (Family::MaxValues, Which::V) => {
                let sign = if self.uniform(which, index) < 0.5 { -1.0 } else { 1.0 };
                sign * max_value(&self.problem)
            }
            (_, Which::Q) => self.query_size() * self.normal(which, index),
            _ => self.normal(which, index),
        }
    }

    /// Scores reach well into the bend of a softcap.
    fn query_size(&self) -> f64 {
        self.problem.scores().softcap.map_or(1.0, |cap| (f64::from(cap.value()) / 2.0).clamp(1.0, 20.0))
    }

    /// What is added to a query of N(0, 1) to give the last key a third of all weight.
    fn look_for_last_key(&self, [b, h, d]: [usize; 3], keys: usize) -> f64 {
        if self.family != Family::Normal || !self.problem.has_codes() {
            return 0.0;
        }
        let key = self.normal(Which::K, [b, h / self.problem.group(), keys - 1, d]);
        (keys as f64).ln() / (self.problem.sizes().dim_qk as f64).sqrt() * key
    }

    /// How large the last value of a sequence is: its weight is about `1 / keys`, and without it the answer must change by
    /// more than any tolerance. Codes would lose all other values beside it.
    fn last_value_size(&self, keys: usize) -> f64 {
        let bounded = matches!(self.family, Family::MaxValues) || self.problem.kv_dtype().is_eight_bit();
        if bounded { 1.0 } else { (keys as f64 / 128.0).clamp(1.0, 256.0) }
    }

    /// N(0, 1) by Box and Muller's transform.
    fn normal(&self, which: Which, index: [usize; 4]) -> f64 {
        self.normal_of(which as u64 + 1, index)
    }

    fn normal_of(&self, stream: u64, index: [usize; 4]) -> f64 {
        let bits = self.bits(stream, index);
        // (0, 1], so that the logarithm is finite.
        let radius = ((bits >> 32) as f64 + 1.0) * f64::powi(2.0, -32);
        let angle = (bits & 0xFFFF_FFFF) as f64 * f64::powi(2.0, -32);
        libm::sqrt(-2.0 * libm::log(radius)) * libm::cos(TAU * angle)
    }

    /// Uniform in [0, 1).
    fn uniform(&self, which: Which, index: [usize; 4]) -> f64 {
        self.uniform_of(which as u64 + 1, index)
    }

    fn uniform_of(&self, stream: u64, index: [usize; 4]) -> f64 {
        (self.bits(stream, index) >> 11) as f64 * f64::powi(2.0, -53)
    }

    fn bits(&self, stream: u64, index: [usize; 4]) -> u64 {
        // Normal data is shared by the families that only rearrange it.
        let stream = mix(self.seed ^ mix(stream));
        index.into_iter().fold(stream, |state, i| mix(state ^ i as u64))
    }
}

/// The standard deviation of [`Family::Denormals`]'s small elements.
fn denormal_size(dtype: DType) -> f64 {
    // The largest of a head of N(0, 1) is about 4, which becomes 448.
    match dtype.float() {
        Some(float) => float.min_normal() / 8.0,
        None => E4M3Code::MIN_NORMAL / 2.0 * 4.0 / CODE_MAX,
    }
}

/// Streaming softmax sums up to `seq_kv` unnormalised weights of at most one in fp32. For f16 (and 8-bit, whose output is
/// f16) that never overflows; for f32 and bf16 the largest safe value is that many times below the type's maximum.
fn max_value(problem: &Problem) -> f64 {
    let of = |float: Float| match float {
        Float::F16 => Float::F16.max_finite(),
        float => float.round(f64::powi(2.0, 126) / problem.sizes().seq_kv.next_power_of_two() as f64),
    };
    problem.kv_dtype().float().map_or(f64::INFINITY, of).min(of(problem.output_float()))
}

#[cfg(test)]
mod tests;
