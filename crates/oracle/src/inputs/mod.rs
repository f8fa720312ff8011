//! Input data by family and seed: the same numbers on every machine.
//!
//! Each element is a pure function of (seed, family, tensor, logical index): no generator state, no dependence on
//! layout, strides or threads. Transcendentals are our own (`noise`), whose results do not depend on the platform.
//!
//! 8-bit tensors are drawn in f32 and then quantised, so that a family says how the numbers *before* quantisation lie; the
//! scales take care of their size.
//!
//! Where lengths or pages are data, an [`Arrangement`] says how they are drawn. Every place that belongs to no token is
//! poisoned with NaN, so that reading one key too many shows. The last key of a sequence has a large value, or, where
//! codes would lose all others beside it, is what some queries look for: so that reading one too few shows as well.

mod arrangement;
mod listed;
mod noise;
mod side;

use std::{borrow::Cow, fmt, str::FromStr};

use evosdpa_core::{CODE_MAX, DType, E4M3Code, Error, Float, Problem, SideInputs, Tensor, error::nearest};

use crate::{
    elements,
    quantize::{self, Groups, Scales},
    rng::mix,
};
use arrangement::Places;
pub use arrangement::{Arrangement, LengthFamily, PageOrder};
pub use listed::Listed;
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
    /// against their head's largest that e4m3 holds them as subnormal codes, and u8 and i8, which have none, as zeros.
    Denormals,
    /// All zeros.
    Zeros,
    /// V at ± the dtype's largest value, as far as an fp32 accumulator of unnormalised weights can hold it. In 8-bit
    /// problems, whose scales have no such limit, the largest value of the f16 output.
    MaxValues,
    /// Normal, with infinite keys where no query sees them: a hidden score must not matter, whatever it is. In 8-bit problems, which
    /// have no infinity, plain normal.
    HiddenKeys,
    /// Normal, with a first key a hundred times as large. It is all of the rows whose queries lie its way, and a kernel that goes from the last
    /// key to the first meets it when it has seen everything else.
    FirstKey,
}

impl Family {
    /// Every family, the plain one first.
    pub const ALL: [Self; 11] = [
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
        Self::FirstKey,
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
            Self::FirstKey => "first-key",
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

    /// The same in memory of its own.
    pub fn copied(&self) -> Self {
        let (scales, side) = (self.scales.clone(), self.side.clone());
        Self { q: self.q.copied(), k: self.k.copied(), v: self.v.copied(), scales, side }
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
        elements::fill_rows(&mut tensor, |index, out| self.row(which, index, rows, out));
        tensor
    }

    fn row(&self, which: Which, [block, h, row]: [usize; 3], rows: usize, out: &mut [f64]) {
        let owner = match which {
            Which::Q => self.places.query(block, row, rows),
            Which::K | Which::V => self.places.key(block, row, rows),
        };
        // A place of nobody's.
        let Some((b, s)) = owner else { return out.fill(f64::NAN) };
        if which == Which::K && self.is_hidden(block * rows + row, s) {
            return out.fill(f64::INFINITY);
        }
        let keys = self.places.keys_of(b);
        self.source.row(which, [b, h, s], keys, out);
        if self.places.are_plain() || keys == 0 {
            return;
        }
        match which {
            Which::V if s + 1 == keys => {
                let size = self.source.last_value_size(keys);
                out.iter_mut().for_each(|x| *x *= size);
            }
            Which::Q if s % 4 == 0 => self.source.look_for_last_key([b, h], keys, out),
            _ => {}
        }
    }

    fn is_hidden(&self, place: usize, key: usize) -> bool {
        let scores = self.source.problem.scores();
        let by_mask = || scores.mask.is_some() && side::is_hidden_by_mask(key);
        let by_table = || scores.blocks.is_some_and(|blocks| side::is_hidden_by_table(key / blocks.keys()));
        !self.unseen.is_empty() && (self.unseen[place] || by_mask() || by_table())
    }
}

struct Source {
    problem: Problem,
    family: Family,
    seed: u64,
}

impl Source {
    /// The row of a sequence's token, in a sequence of so many keys.
    fn row(&self, which: Which, at: [usize; 3], keys: usize, out: &mut [f64]) {
        let [b, h, s] = at;
        let scaled = |by: f64, out: &mut [f64]| out.iter_mut().for_each(|x| *x *= by);
        match (self.family, which) {
            (Family::Zeros, _) => out.fill(0.0),
            (Family::Uniform, _) => {
                noise::uniforms(self.hash(which, at), out);
                out.iter_mut().for_each(|x| *x = 2.0 * *x - 1.0);
            }
            (Family::LargeLogits, Which::Q) => {
                self.normals(which, at, out);
                scaled(40.0, out);
            }
            (Family::OneHot, Which::Q) if keys > 0 => {
                let target = (s * 7 + 3) % keys;
                self.normals(Which::K, [b, h / self.problem.group(), target], out);
                scaled(8.0, out);
            }
            (Family::FirstKey, Which::K) if s == 0 => {
                self.normals(which, at, out);
                scaled(100.0, out);
            }
            (Family::Ties, Which::K) => self.normals(which, [b, h, s % 4], out),
            (Family::ConstantRows, _) => {
                let mut first = [0.0];
                self.normals(which, at, &mut first);
                out.fill(first[0]);
            }
            (Family::Denormals, _) => {
                self.normals(which, at, out);
                let size = denormal_size(which.of(&self.problem).1);
                out.iter_mut().skip(1).step_by(2).for_each(|x| *x *= size);
                if which == Which::Q {
                    let query_size = self.query_size();
                    out.iter_mut().step_by(2).for_each(|x| *x *= query_size);
                }
            }
            (Family::MaxValues, Which::V) => {
                noise::uniforms(self.hash(which, at), out);
                let most = max_value(&self.problem);
                out.iter_mut().for_each(|x| *x = if *x < 0.5 { -most } else { most });
            }
            (_, Which::Q) => {
                self.normals(which, at, out);
                scaled(self.query_size(), out);
            }
            _ => self.normals(which, at, out),
        }
    }

    /// Scores reach well into the bend of a softcap.
    fn query_size(&self) -> f64 {
        self.problem.scores().softcap.map_or(1.0, |cap| (f64::from(cap.value()) / 2.0).clamp(1.0, 20.0))
    }

    /// Adds to a query of N(0, 1) what gives the last key a third of all weight.
    fn look_for_last_key(&self, [b, h]: [usize; 2], keys: usize, out: &mut [f64]) {
        if self.family != Family::Normal || !self.problem.has_codes() {
            return;
        }
        let mut key = vec![0.0; out.len()];
        self.normals(Which::K, [b, h / self.problem.group(), keys - 1], &mut key);
        let share = (keys as f64).ln() / (self.problem.sizes().dim_qk as f64).sqrt();
        out.iter_mut().zip(key).for_each(|(x, key)| *x += share * key);
    }

    /// How large the last value of a sequence is: its weight is about `1 / keys`, and without it the answer must change by
    /// more than any tolerance. Codes would lose all other values beside it.
    fn last_value_size(&self, keys: usize) -> f64 {
        let bounded = matches!(self.family, Family::MaxValues) || self.problem.kv_dtype().is_eight_bit();
        if bounded { 1.0 } else { (keys as f64 / 128.0).clamp(1.0, 256.0) }
    }

    /// A row of N(0, 1).
    fn normals(&self, which: Which, at: [usize; 3], out: &mut [f64]) {
        noise::normals(self.hash(which, at), out);
    }

    fn hash(&self, which: Which, at: [usize; 3]) -> u64 {
        self.hash_of(which as u64 + 1, at)
    }

    /// What the numbers of a row are made from. Normal data is shared by the families that only rearrange it.
    fn hash_of(&self, stream: u64, at: [usize; 3]) -> u64 {
        at.into_iter().fold(mix(self.seed ^ mix(stream)), |state, i| mix(state ^ i as u64))
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
    let kv = problem.kv_dtype().float();
    let most = kv.map_or(f64::INFINITY, of).min(of(problem.output_float()));
    match kv {
        // The largest f16 is no bf16, and the next one is past what an output of f16 holds.
        Some(float) if float.round(most) > most => float.round(most - float.rounding_error(most)),
        _ => most,
    }
}

#[cfg(test)]
mod tests;
