//! What is asked: an attention problem, whole.

use std::fmt;

use std::ops::Range;

use crate::{
    Alignment, DType, Error, Features, Float, Granularity, Kinds, Layout, Lengths, Precision, Scores, Shape,
    Sizes,
    mask::{Band, Mask},
    tensor::{TensorView, TensorViewMut},
};

/// An attention problem: `O = softmax(modified(Q·Kᵀ·scale) + mask)·V`.
///
/// A small value that names *kinds*, so that plans can be kept by it: the numbers that differ from call to call (lengths,
/// pages, slopes, …) travel beside the tensors ([`crate::SideInputs`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    shape: Shape,
    dtype: DType,
    layout: Layout,
    scale: f32,
    scale_given: bool,
    lse: bool,
    /// Queries and keys that packed tensors have room for; `None` for sequences that are all of the longest.
    tokens: Option<[usize; 2]>,
}

impl Problem {
    /// A problem in BHSD layout with the usual scale `1/√d`, without LSE. Refuses sizes past what memory can address.
    pub fn new(shape: Shape, dtype: DType) -> Result<Self, Error> {
        let scale = (1.0 / (shape.sizes().dim_qk as f64).sqrt()) as f32;
        let (layout, scale_given, lse, tokens) = (Layout::Bhsd, false, false, None);
        let problem = Self { shape, dtype, layout, scale, scale_given, lse, tokens };
        problem.checked_bytes()?;
        let (granularity, kv) = (problem.scale_granularity(), problem.kv_dtype());
        if granularity != Granularity::default() && !problem.has_codes() {
            return Err(Error::ScalesWithoutCodes { granularity, q: dtype, kv });
        }
        Ok(problem)
    }

    /// Another softmax scale.
    pub fn with_scale(self, scale: f32) -> Result<Self, Error> {
        if !scale.is_finite() {
            return Err(Error::Scale(scale));
        }
        Ok(Self { scale, scale_given: true, ..self })
    }

    /// Another layout for all four tensors.
    pub fn with_layout(self, layout: Layout) -> Self {
        Self { layout, ..self }
    }

    /// Asks for the log-sum-exp of each row as well.
    pub fn with_lse(self, lse: bool) -> Self {
        Self { lse, ..self }
    }

    /// Room for so many queries and keys in packed tensors, for who knows the lengths: at most as many as sequences have that are all
    /// of the longest, which is what there is room for otherwise. No kernel is chosen by it.
    pub fn with_tokens(self, queries: usize, keys: usize) -> Self {
        let sizes = self.sizes();
        let most = [sizes.seq_q, sizes.seq_kv].map(|longest| sizes.batch.saturating_mul(longest));
        Self { tokens: Some([queries.min(most[0]), keys.min(most[1])]), ..self }
    }

    /// The same question under another mask.
    pub fn with_mask(self, mask: Mask) -> Self {
        Self { shape: self.shape.with_mask(mask), ..self }
    }

    /// The same sizes and mask with other kinds of lengths, scores and types.
    pub fn with_kinds(self, kinds: Kinds) -> Result<Self, Error> {
        let (scale, scale_given) = (self.scale, self.scale_given);
        let asked = Self::new(self.shape.with_kinds(kinds)?, self.dtype)?;
        Ok(Self { scale, scale_given, layout: self.layout, lse: self.lse, tokens: self.tokens, ..asked })
    }

    /// The same for one head alone.
    pub fn of_one_head(self) -> Self {
        Self { shape: self.shape.of_one_head(), ..self }
    }

    /// Sizes and mask.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The sizes alone.
    pub fn sizes(&self) -> Sizes {
        self.shape.sizes()
    }

    /// The mask.
    pub fn mask(&self) -> Mask {
        self.shape.mask()
    }

    /// The mask as a band, which is all that kernels know of it.
    pub fn band(&self) -> Band {
        let sizes = self.sizes();
        self.mask().band(sizes.seq_q, sizes.seq_kv)
    }

    /// How lengths and the cache are given.
    pub fn lengths(&self) -> Lengths {
        self.shape.kinds().lengths
    }

    /// What happens to scores.
    pub fn scores(&self) -> Scores {
        self.shape.kinds().scores
    }

    /// How exact the answer must be.
    pub fn precision(&self) -> Precision {
        self.shape.kinds().precision
    }

    /// What is asked for beyond equal lengths, one dtype and a mask: what a kernel must know about.
    pub fn features(&self) -> Features {
        self.shape.kinds().features()
    }

    /// Element type of Q, and of K and V unless they have their own ([`Problem::kv_dtype`]).
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Element type of K and V.
    pub fn kv_dtype(&self) -> DType {
        self.shape.kinds().types.kv.unwrap_or(self.dtype)
    }

    /// Element type of O: that of the queries, or f16 when they are 8-bit codes, unless the problem says another.
    pub fn output_dtype(&self) -> DType {
        self.output_float().dtype()
    }

    /// The format that O is rounded to.
    pub fn output_float(&self) -> Float {
        self.shape.kinds().types.output.unwrap_or(self.compute_float())
    }

    /// The format that a computation in the problem's own types rounds scores and weights to: that of the queries, or f16
    /// when they are 8-bit codes.
    pub fn compute_float(&self) -> Float {
        self.dtype.float().unwrap_or(Float::F16)
    }

    /// Whether any of Q, K and V holds 8-bit codes.
    pub fn has_codes(&self) -> bool {
        self.dtype.is_eight_bit() || self.kv_dtype().is_eight_bit()
    }

    /// How far a scale of 8-bit codes reaches.
    pub fn scale_granularity(&self) -> Granularity {
        self.shape.kinds().types.scales
    }

    /// The position of query `i` among the keys of a sequence with these lengths: what chunks and ALiBi count from. It is
    /// aligned as the mask is, and with the last key where there is none.
    pub fn position(&self, i: usize, queries: usize, keys: usize) -> i64 {
        let alignment = match self.mask() {
            Mask::Full => Alignment::BottomRight,
            Mask::Causal(alignment) | Mask::Window { alignment, .. } => alignment,
        };
        i as i64 + alignment.offset(queries, keys)
    }

    /// The keys that query `i` of a sequence with these lengths sees, as far as mask and chunks say.
    pub fn visible(&self, i: usize, queries: usize, keys: usize) -> Range<usize> {
        let seen = self.mask().band(queries, keys).visible(i, keys);
        let Some(chunk) = self.scores().chunk else { return seen };
        let chunk = chunk.keys() as i64;
        let first = self.position(i, queries, keys).div_euclid(chunk) * chunk;
        let clamp = |x: i64| x.clamp(seen.start as i64, seen.end as i64) as usize;
        clamp(first)..clamp(first + chunk)
    }

    /// Memory layout of all four tensors.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// What scores are multiplied with before the softmax.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Whether the log-sum-exp is asked for.
    pub fn lse(&self) -> bool {
        self.lse
    }

    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.sizes().heads_q / self.sizes().heads_kv
    }

    /// Shape of Q. Packed, it is `[1, heads, tokens, dim]` with room for sequences that are all of the longest.
    pub fn q_shape(&self) -> [usize; 4] {
        let s = self.sizes();
        self.query_shape(s.heads_q, s.dim_qk)
    }

    /// Shape of K. Packed, as [`Problem::q_shape`]; in pages `[pages, heads, page size, dim]`, with as many pages as
    /// sequences of the longest need that share none. A cache may have more pages, or fewer.
    pub fn k_shape(&self) -> [usize; 4] {
        self.key_shape(self.sizes().dim_qk)
    }

    /// Shape of V, as [`Problem::k_shape`].
    pub fn v_shape(&self) -> [usize; 4] {
        self.key_shape(self.sizes().dim_v)
    }

    /// Shape of O, as [`Problem::q_shape`].
    pub fn o_shape(&self) -> [usize; 4] {
        let s = self.sizes();
        self.query_shape(s.heads_q, s.dim_v)
    }

    /// Entries in a row of the page table: pages of the longest sequence. 0 where there are no pages.
    pub fn pages_per_sequence(&self) -> usize {
        self.lengths().page.map_or(0, |page| self.sizes().seq_kv.div_ceil(page.tokens()))
    }

    fn query_shape(&self, heads: usize, dim: usize) -> [usize; 4] {
        let s = self.sizes();
        if self.lengths().packed_queries {
            [1, heads, self.tokens.map_or(s.batch.saturating_mul(s.seq_q), |[queries, _]| queries), dim]
        } else {
            [s.batch, heads, s.seq_q, dim]
        }
    }

    fn key_shape(&self, dim: usize) -> [usize; 4] {
        let (s, lengths) = (self.sizes(), self.lengths());
        match lengths.page {
            Some(page) => [s.batch.saturating_mul(self.pages_per_sequence()), s.heads_kv, page.tokens(), dim],
            None if lengths.packed_keys => {
                [1, s.heads_kv, self.tokens.map_or(s.batch.saturating_mul(s.seq_kv), |[_, keys]| keys), dim]
            }
            None => [s.batch, s.heads_kv, s.seq_kv, dim],
        }
    }

    /// Rows of the softmax: values in the LSE output, the shape of O without its last dimension. `[batch, query heads,
    /// queries]`, or `[query heads, tokens]` where queries are packed.
    pub fn rows(&self) -> usize {
        self.o_shape()[..3].iter().product()
    }

    /// Floating-point operations that the mask leaves to be done: two GEMMs, QKᵀ and PV, of two operations a pair and element.
    pub fn flops(&self) -> f64 {
        let s = self.sizes();
        s.batch as f64 * self.flops_of(s.seq_q, s.seq_kv)
    }

    /// The same of one sequence with so many queries and keys.
    pub fn flops_of(&self, queries: usize, keys: usize) -> f64 {
        let s = self.sizes();
        let pairs = match self.scores().chunk {
            None => self.mask().band(queries, keys).visible_pairs(queries, keys),
            Some(_) => (0..queries).map(|i| self.visible(i, queries, keys).len() as u64).sum(),
        } as f64;
        2.0 * s.heads_q as f64 * pairs * (s.dim_qk + s.dim_v) as f64
    }

    /// Bytes of one sequence's queries, keys, values and output, each moved once.
    pub fn bytes_of(&self, queries: usize, keys: usize) -> u64 {
        let s = self.sizes();
        let row = s.dim_qk * self.dtype.bytes() + s.dim_v * self.output_dtype().bytes();
        let key = (s.dim_qk + s.dim_v) * self.kv_dtype().bytes();
        (queries * s.heads_q * row + keys * s.heads_kv * key) as u64
    }

    /// The fewest bytes that must move, for sequences of the longest: each input read once (8-bit ones with their scales,
    /// lengths and modifiers with theirs), the output written once.
    pub fn bytes(&self) -> u64 {
        let elements = |shape: [usize; 4]| shape.iter().map(|&n| n as u64).product::<u64>();
        let tensors = [
            (self.q_shape(), self.dtype),
            (self.k_shape(), self.kv_dtype()),
            (self.v_shape(), self.kv_dtype()),
        ];
        let inputs: u64 = tensors
            .into_iter()
            .map(|(shape, dtype)| elements(shape) * dtype.bytes() as u64 + self.scale_bytes(shape, dtype))
            .sum();
        let lse = if self.lse { 4 * self.rows() as u64 } else { 0 };
        let output = elements(self.o_shape()) * self.output_dtype().bytes() as u64;
        inputs + output + lse + self.side_bytes()
    }

    fn scale_bytes(&self, shape: [usize; 4], dtype: DType) -> u64 {
        if !dtype.is_eight_bit() {
            return 0;
        }
        let scales = match self.scale_granularity() {
            Granularity::Tensor => 1,
            Granularity::Head => self.sizes().batch * shape[1],
            Granularity::Token => shape[0] * shape[1] * shape[2],
        };
        4 * scales as u64
    }

    /// Bytes of lengths, pages and modifiers.
    fn side_bytes(&self) -> u64 {
        let (sizes, lengths, scores) = (self.sizes(), self.lengths(), self.scores());
        let count = |asked: bool, n: usize| if asked { n as u64 } else { 0 };
        let dense = |broadcast: Option<crate::Broadcast>, bytes: u64| {
            broadcast.map_or(0, |b| bytes * b.shape(sizes).iter().map(|&n| n as u64).product::<u64>())
        };
        let words = count(lengths.packed_queries, sizes.batch + 1)
            + count(lengths.packed_keys, sizes.batch + 1)
            + count(lengths.used, sizes.batch)
            + count(lengths.used_queries, sizes.batch)
            + count(lengths.left_padded, sizes.batch)
            + count(lengths.indexed, sizes.batch)
            + (sizes.batch * self.pages_per_sequence()) as u64
            + count(scores.alibi, sizes.heads_q)
            + count(scores.sinks, sizes.heads_q);
        let table = scores.blocks.map_or([0; 4], |blocks| blocks.shape(sizes));
        let table = table.iter().map(|&n| n as u64).product::<u64>();
        4 * words
            + dense(scores.bias, self.compute_float().dtype().bytes() as u64)
            + dense(scores.mask, 1)
            + table
    }

    /// Checks that four tensors and an LSE buffer are what this problem asks for.
    pub fn check(
        &self,
        q: &TensorView<'_>,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
        o: &TensorViewMut<'_>,
        lse: Option<usize>,
    ) -> Result<(), Error> {
        let types = [
            ("Q", q.dtype(), self.dtype),
            ("K", k.dtype(), self.kv_dtype()),
            ("V", v.dtype(), self.kv_dtype()),
            ("O", o.dtype(), self.output_dtype()),
        ];
        self.check_shapes(q.shape(), k.shape(), v.shape())?;
        let mut expected = self.o_shape();
        // How many tokens are packed, only the queries say.
        expected[2] = q.shape()[2];
        if o.shape() != expected {
            return Err(Error::TensorShape { tensor: "O", got: o.shape(), expected });
        }
        for (tensor, got, expected) in types {
            if got != expected {
                return Err(Error::TensorDType { tensor, got, expected });
            }
        }
        let rows = o.shape()[..3].iter().product();
        match lse {
            Some(got) if got != rows => Err(Error::LseLength { got, expected: rows }),
            _ => Ok(()),
        }
    }

    /// Checks the shapes of Q, K and V. How many tokens are packed, and how many pages a cache has, is theirs to say.
    pub fn check_shapes(&self, q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<(), Error> {
        let lengths = self.lengths();
        let (mut q_shape, mut k_shape, mut v_shape) = (self.q_shape(), self.k_shape(), self.v_shape());
        if lengths.packed_queries {
            q_shape[2] = q[2];
        }
        for shape in [&mut k_shape, &mut v_shape] {
            if lengths.packed_keys {
                shape[2] = k[2];
            }
            if lengths.page.is_some() || lengths.indexed {
                shape[0] = k[0];
            }
        }
        for (tensor, got, expected) in [("Q", q, q_shape), ("K", k, k_shape), ("V", v, v_shape)] {
            if got != expected {
                return Err(Error::TensorShape { tensor, got, expected });
            }
        }
        Ok(())
    }

    /// `bytes()` without the risk of overflow.
    fn checked_bytes(&self) -> Result<u64, Error> {
        let elements_of =
            |shape: [usize; 4]| shape.iter().try_fold(1u64, |n, &size| n.checked_mul(size as u64));
        let total = || {
            let tensors = [self.q_shape(), self.k_shape(), self.v_shape(), self.o_shape()];
            let elements =
                tensors.into_iter().try_fold(0u64, |sum, shape| sum.checked_add(elements_of(shape)?))?;
            let scores = self.scores();
            let table = scores.blocks.map(|blocks| blocks.shape(self.sizes()));
            let dense = [scores.bias, scores.mask].into_iter().flatten().map(|b| b.shape(self.sizes()));
            let dense = dense.chain(table);
            let elements =
                dense.into_iter().try_fold(elements, |sum, shape| sum.checked_add(elements_of(shape)?))?;
            elements.checked_mul(16).filter(|&bytes| bytes <= i64::MAX as u64)
        };
        total().ok_or_else(|| Error::Overflow { problem: self.to_string() })
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.shape, self.dtype)?;
        if self.layout != Layout::Bhsd {
            write!(f, " {}", self.layout)?;
        }
        if self.scale_given {
            write!(f, " scale={}", self.scale)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;

    fn problem(text: &str) -> Problem {
        Problem::new(text.parse().unwrap(), DType::F32).unwrap()
    }

    #[test]
    fn flops_and_bytes_count_what_is_done() {
        let mission = problem("mission");
        assert_eq!(mission.flops(), 4.0 * 8.0 * 512.0 * 512.0 * 64.0);
        assert_eq!(mission.bytes(), 4 * 8 * 512 * 64 * 4);
        // The triangle with its diagonal.
        assert_eq!(problem("mission:causal").flops(), 4.0 * 8.0 * 64.0 * (512.0 * 513.0 / 2.0));
        assert_eq!(problem("b2h32/8s1/8192d128").bytes(), 2 * (2 * 32 * 128 + 2 * 8 * 8192 * 128) * 4);
    }

    #[test]
    fn eight_bit_inputs_give_f16_outputs() {
        for dtype in DType::EIGHT_BIT {
            let problem = Problem::new("b2h4/2s3/5d8".parse().unwrap(), dtype).unwrap();
            assert_eq!(problem.output_dtype(), DType::F16);
            let (q, kv) = (2 * 4 * 3 * 8, 2 * 2 * 5 * 8);
            assert_eq!(problem.bytes(), q + 2 * kv + 2 * q + 4 * (8 + 4 + 4));
            let tensor = |shape, dtype| Tensor::zeros(shape, dtype, Layout::Bhsd);
            let (q, k) = (tensor(problem.q_shape(), dtype), tensor(problem.k_shape(), dtype));
            let mut right = tensor(problem.o_shape(), DType::F16);
            let mut wrong = tensor(problem.o_shape(), dtype);
            let check = |q: &Tensor, o: &mut Tensor| {
                problem.check(&q.view(), &k.view(), &k.view(), &o.view_mut(), None)
            };
            assert_eq!(check(&q, &mut right), Ok(()));
            let refused = Error::TensorDType { tensor: "O", got: dtype, expected: DType::F16 };
            assert_eq!(check(&q, &mut wrong), Err(refused));
            let halves = tensor(problem.q_shape(), DType::F16);
            let refused = Error::TensorDType { tensor: "Q", got: DType::F16, expected: dtype };
            assert_eq!(check(&halves, &mut right), Err(refused));
        }
        for dtype in DType::FLOATS {
            assert_eq!(Problem::new("tiny".parse().unwrap(), dtype).unwrap().output_dtype(), dtype);
        }
    }

    #[test]
    fn sizes_past_the_address_space_are_refused() {
        let shape: Shape = "b1000000000h1000000000s1000000000d512".parse().unwrap();
        let error = Problem::new(shape, DType::F32).unwrap_err();
        assert!(matches!(error, Error::Overflow { .. }), "{error}");
    }

    #[test]
    fn a_scale_must_be_a_number() {
        assert_eq!(problem("tiny").scale(), 0.125);
        assert!(matches!(problem("tiny").with_scale(f32::NAN), Err(Error::Scale(_))));
    }
}
