//! What is asked: an attention problem, whole.

use std::fmt;

use crate::{
    DType, Error, Float, Layout, Shape, Sizes,
    mask::{Band, Mask},
    tensor::{TensorView, TensorViewMut},
};

/// An attention problem: `O = softmax(Q·Kᵀ·scale + mask)·V`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    shape: Shape,
    dtype: DType,
    layout: Layout,
    scale: f32,
    scale_given: bool,
    lse: bool,
}

impl Problem {
    /// A problem in BHSD layout with the usual scale `1/√d`, without LSE. Refuses sizes past what memory can address.
    pub fn new(shape: Shape, dtype: DType) -> Result<Self, Error> {
        let scale = (1.0 / (shape.sizes().dim_qk as f64).sqrt()) as f32;
        let problem = Self { shape, dtype, layout: Layout::Bhsd, scale, scale_given: false, lse: false };
        problem.checked_bytes()?;
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

    /// The same question under another mask.
    pub fn with_mask(self, mask: Mask) -> Self {
        Self { shape: self.shape.with_mask(mask), ..self }
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

    /// Element type of Q, K and V.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Element type of O: that of the inputs, or f16 when they are 8-bit codes.
    pub fn output_dtype(&self) -> DType {
        self.output_float().dtype()
    }

    /// The format that O is rounded to.
    pub fn output_float(&self) -> Float {
        self.dtype.float().unwrap_or(Float::F16)
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

    /// Shape of Q.
    pub fn q_shape(&self) -> [usize; 4] {
        let s = self.sizes();
        [s.batch, s.heads_q, s.seq_q, s.dim_qk]
    }

    /// Shape of K.
    pub fn k_shape(&self) -> [usize; 4] {
        let s = self.sizes();
        [s.batch, s.heads_kv, s.seq_kv, s.dim_qk]
    }

    /// Shape of V.
    pub fn v_shape(&self) -> [usize; 4] {
        let s = self.sizes();
        [s.batch, s.heads_kv, s.seq_kv, s.dim_v]
    }

    /// Shape of O.
    pub fn o_shape(&self) -> [usize; 4] {
        let s = self.sizes();
        [s.batch, s.heads_q, s.seq_q, s.dim_v]
    }

    /// Rows of the softmax: values in the LSE output, `[batch, query heads, queries]`.
    pub fn rows(&self) -> usize {
        let s = self.sizes();
        s.batch * s.heads_q * s.seq_q
    }

    /// Floating-point operations that the mask leaves to be done: two products of two operations a pair and element.
    pub fn flops(&self) -> f64 {
        let s = self.sizes();
        let pairs = self.band().visible_pairs(s.seq_q, s.seq_kv) as f64;
        2.0 * (s.batch * s.heads_q) as f64 * pairs * (s.dim_qk + s.dim_v) as f64
    }

    /// The fewest bytes that must move: each input read once (8-bit ones with a scale per head), the output written once.
    pub fn bytes(&self) -> u64 {
        let elements = |shape: [usize; 4]| shape.iter().map(|&n| n as u64).product::<u64>();
        let inputs = [self.q_shape(), self.k_shape(), self.v_shape()];
        let heads = inputs.iter().map(|shape| (shape[0] * shape[1]) as u64).sum::<u64>();
        let scales = if self.dtype.is_eight_bit() { 4 * heads } else { 0 };
        let lse = if self.lse { 4 * self.rows() as u64 } else { 0 };
        inputs.into_iter().map(elements).sum::<u64>() * self.dtype.bytes() as u64
            + elements(self.o_shape()) * self.output_dtype().bytes() as u64
            + scales
            + lse
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
        let described = [
            ("Q", (q.shape(), q.dtype()), (self.q_shape(), self.dtype)),
            ("K", (k.shape(), k.dtype()), (self.k_shape(), self.dtype)),
            ("V", (v.shape(), v.dtype()), (self.v_shape(), self.dtype)),
            ("O", (o.shape(), o.dtype()), (self.o_shape(), self.output_dtype())),
        ];
        for (tensor, (shape, dtype), (expected_shape, expected_dtype)) in described {
            if shape != expected_shape {
                return Err(Error::TensorShape { tensor, got: shape, expected: expected_shape });
            }
            if dtype != expected_dtype {
                return Err(Error::TensorDType { tensor, got: dtype, expected: expected_dtype });
            }
        }
        match lse {
            Some(got) if got != self.rows() => Err(Error::LseLength { got, expected: self.rows() }),
            _ => Ok(()),
        }
    }

    /// `bytes()` without the risk of overflow.
    fn checked_bytes(&self) -> Result<u64, Error> {
        let elements = |shape: [usize; 4]| shape.iter().try_fold(1u64, |n, &size| n.checked_mul(size as u64));
        let total = || {
            let tensors = [self.q_shape(), self.k_shape(), self.v_shape(), self.o_shape()];
            let elements =
                tensors.into_iter().try_fold(0u64, |sum, shape| sum.checked_add(elements(shape)?))?;
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
        for dtype in DType::ALL {
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
