//! Tensors in device memory, and what a kernel is told of them.

use evosdpa_core::{DType, Layout, Problem};
use evosdpa_cuda::TensorMapRequest;
use evosdpa_kernels::{SdpaParams, TensorMapUse, TensorName};

use super::DeviceSide;
use crate::Error;

/// A tensor in device memory: where it starts and how it is strided. Its head dimension is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    /// The device address of its first element.
    pub address: u64,
    /// Strides in elements: batch, head, sequence. An input's may be 0, which repeats it.
    pub strides: [i64; 3],
}

impl DeviceTensor {
    /// A packed tensor of this shape (batch, heads, sequence, head dimension).
    pub fn packed(address: u64, shape: [usize; 4], layout: Layout) -> Self {
        let [batch, head, seq, _] = layout.strides(shape);
        Self { address, strides: [batch as i64, head as i64, seq as i64] }
    }
}

/// Where the log-sum-exp goes: one `f32` for each row of the softmax, contiguous over the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLse {
    /// The device address of its first value.
    pub address: u64,
    /// Strides in elements: batch, head.
    pub strides: [i64; 2],
}

impl DeviceLse {
    /// A packed `[batch, query heads, queries]`; `[query heads, tokens]` where queries are packed, with room for sequences
    /// that are all of the longest.
    pub fn packed(address: u64, problem: &Problem) -> Self {
        let [_, heads, rows, _] = problem.o_shape().map(|size| size as i64);
        Self { address, strides: [heads * rows, rows] }
    }
}

/// The scales of 8-bit inputs: device addresses of one `f32` for each (batch, head), contiguous; 0 for a tensor without codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceScales {
    /// Scales of Q.
    pub q: u64,
    /// Scales of K.
    pub k: u64,
    /// Scales of V.
    pub v: u64,
}

impl DeviceScales {
    /// Which of Q, K and V have some.
    pub(super) fn are_there(self) -> [bool; 3] {
        [self.q, self.k, self.v].map(|address| address != 0)
    }
}

/// Everything a call reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensors {
    /// Queries.
    pub q: DeviceTensor,
    /// Keys.
    pub k: DeviceTensor,
    /// Values.
    pub v: DeviceTensor,
    /// Output.
    pub o: DeviceTensor,
    /// The log-sum-exp of each row, where it is wanted.
    pub lse: Option<DeviceLse>,
    /// Scales, of 8-bit inputs and only of those.
    pub scales: Option<DeviceScales>,
    /// Lengths, pages and what modifies scores, where the problem asks for them.
    pub side: DeviceSide,
}

impl DeviceTensors {
    /// Contiguous tensors in the problem's layout, with nothing beside them.
    pub fn packed(problem: &Problem, [q, k, v, o]: [u64; 4], lse: Option<u64>) -> Self {
        let layout = problem.layout();
        Self {
            q: DeviceTensor::packed(q, problem.q_shape(), layout),
            k: DeviceTensor::packed(k, problem.k_shape(), layout),
            v: DeviceTensor::packed(v, problem.v_shape(), layout),
            o: DeviceTensor::packed(o, problem.o_shape(), layout),
            lse: lse.map(|address| DeviceLse::packed(address, problem)),
            scales: None,
            side: DeviceSide::default(),
        }
    }

    /// A tensor's shape. How many tokens are packed, and how many pages or blocks a cache has, the call says.
    fn shape(&self, problem: &Problem, tensor: TensorName) -> [usize; 4] {
        let mut shape = match tensor {
            TensorName::Q => problem.q_shape(),
            TensorName::K => problem.k_shape(),
            TensorName::V => problem.v_shape(),
            TensorName::O => problem.o_shape(),
        };
        let [tokens, blocks] = self.said(tensor);
        shape[2] = tokens.unwrap_or(shape[2]);
        shape[0] = blocks.unwrap_or(shape[0]);
        shape
    }

    /// How many tokens, and how many pages or blocks, a tensor has, where the call says it.
    fn said(&self, tensor: TensorName) -> [Option<usize>; 2] {
        let DeviceSide { queries, keys, pages, indices, .. } = &self.side;
        match tensor {
            TensorName::Q | TensorName::O => [queries.map(|queries| queries.tokens), None],
            TensorName::K | TensorName::V => {
                let blocks = pages.map(|pages| pages.pages).or(indices.map(|indices| indices.rows));
                [keys.map(|keys| keys.tokens), blocks]
            }
        }
    }

    /// The same as numbers, for what is kept by them; 0 where the problem says it.
    pub(super) fn counts(&self, tensor: TensorName) -> [u64; 2] {
        self.said(tensor).map(|count| count.map_or(0, |count| count as u64))
    }

    /// Refuses what no kernel could take. Costs a few dozen nanoseconds.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        if problem.scale() < 0.0 {
            return Err(Error::NegativeScale { scale: problem.scale() });
        }
        for name in TensorName::ALL {
            let (what, tensor) = self.named(name);
            check_address(what, tensor.address, dtype_of(problem, name).bytes() as u64)?;
            check_strides(what, &tensor.strides, &self.shape(problem, name)[..3])?;
        }
        let [batch, heads, rows, dim] = self.shape(problem, TensorName::O);
        check_apart("O", &self.o.strides, &[batch, heads, rows], dim)?;
        if let Some(lse) = &self.lse {
            check_address("LSE", lse.address, 4)?;
            check_strides("LSE", &lse.strides, &[batch, heads])?;
            check_apart("LSE", &lse.strides, &[batch, heads], rows)?;
        }
        self.check_scales(problem)?;
        self.side.check(problem)
    }

    fn check_scales(&self, problem: &Problem) -> Result<(), Error> {
        let (dtype, kv) = (problem.dtype(), problem.kv_dtype());
        let codes = if kv.is_eight_bit() { kv } else { dtype };
        let Some(scales) = &self.scales else {
            return if problem.has_codes() { Err(Error::ScalesMissing { dtype: codes }) } else { Ok(()) };
        };
        if !problem.has_codes() {
            return Err(Error::ScalesNotWanted { dtype });
        }
        let named =
            [("scales of Q", scales.q, dtype), ("scales of K", scales.k, kv), ("scales of V", scales.v, kv)];
        named
            .into_iter()
            .filter(|(_, _, dtype)| dtype.is_eight_bit())
            .try_for_each(|(name, address, _)| check_address(name, address, 4))
    }

    /// The parameter struct of a launch.
    pub fn params(&self, problem: &Problem) -> SdpaParams {
        let sizes = problem.sizes();
        let band = problem.band();
        let scales = self.scales.unwrap_or_default();
        let scale = kernel_scale(problem.scale());
        let mut params = SdpaParams {
            q: self.q.address,
            k: self.k.address,
            v: self.v.address,
            o: self.o.address,
            lse: self.lse.map_or(0, |lse| lse.address),
            q_scale: scales.q,
            k_scale: scales.k,
            v_scale: scales.v,
            q_stride: self.q.strides,
            k_stride: self.k.strides,
            v_stride: self.v.strides,
            o_stride: self.o.strides,
            lse_stride: self.lse.map_or([0; 2], |lse| lse.strides),
            // Sizes are below 2^30 by construction of a shape, and so are the band's bounds.
            batch: sizes.batch as i32,
            heads_q: sizes.heads_q as i32,
            heads_kv: sizes.heads_kv as i32,
            seq_q: sizes.seq_q as i32,
            seq_kv: sizes.seq_kv as i32,
            dim_qk: sizes.dim_qk as i32,
            dim_v: sizes.dim_v as i32,
            band_lo: band.lo as i32,
            band_hi: band.hi as i32,
            scale,
            scale_log2: scale * std::f32::consts::LOG2_E,
            // A launch has its own counter.
            ..SdpaParams::default()
        };
        self.side.fill(problem, &mut params);
        params
    }

    /// What a tensor map that a kernel asks for is made of. A dimension of one element has no stride to speak of: it gets
    /// one that TMA accepts.
    pub fn tensor_map(
        &self,
        problem: &Problem,
        wanted: &TensorMapUse,
    ) -> evosdpa_kernels::Result<TensorMapRequest<'static>> {
        let (name, tensor) = self.named(wanted.tensor);
        let dtype = dtype_of(problem, wanted.tensor);
        let [batch, heads, seq, dim] = self.shape(problem, wanted.tensor).map(|size| size as u64);
        let any = dim.next_multiple_of(16);
        let stride = |size: u64, stride: i64| if size == 1 { any } else { stride as u64 };
        Ok(TensorMapRequest {
            name,
            address: tensor.address,
            dtype,
            sizes: [dim, seq, heads, batch],
            strides: [
                stride(seq, tensor.strides[2]),
                stride(heads, tensor.strides[1]),
                stride(batch, tensor.strides[0]),
            ],
            box_sizes: wanted.box_sizes,
            swizzle: wanted.swizzle,
        })
    }

    /// A tensor by its name, and what errors call it.
    pub(crate) fn named(&self, name: TensorName) -> (&'static str, &DeviceTensor) {
        match name {
            TensorName::Q => ("Q", &self.q),
            TensorName::K => ("K", &self.k),
            TensorName::V => ("V", &self.v),
            TensorName::O => ("O", &self.o),
        }
    }

    /// Which of Q, K, V and O TMA could reach, as four bits: what the choice of a kernel depends on.
    pub(crate) fn alignment_class(&self, problem: &Problem) -> u8 {
        let mut class = 0;
        for (bit, name) in TensorName::ALL.into_iter().enumerate() {
            let (_, tensor) = self.named(name);
            let bytes = dtype_of(problem, name).bytes() as i64;
            let strides = tensor.strides.iter().zip(self.shape(problem, name));
            let reached = tensor.address.is_multiple_of(16)
                && strides.filter(|(_, size)| *size > 1).all(|(stride, _)| {
                    *stride > 0
                        && stride.checked_mul(bytes).is_some_and(|bytes| bytes % 16 == 0 && bytes < 1 << 40)
                });
            class |= u8::from(reached) << bit;
        }
        class
    }
}

/// The scale as kernels take it. They multiply it into exponents, where a hidden score, −∞, times 0 would be NaN. Times the smallest
/// number above 0 every finite score is 0 as well, but for less than 1e-6.
fn kernel_scale(scale: f32) -> f32 {
    if scale == 0.0 { f32::from_bits(1) } else { scale }
}

fn dtype_of(problem: &Problem, tensor: TensorName) -> DType {
    match tensor {
        TensorName::Q => problem.dtype(),
        TensorName::K | TensorName::V => problem.kv_dtype(),
        TensorName::O => problem.output_dtype(),
    }
}

pub(super) fn check_address(tensor: &'static str, address: u64, element_bytes: u64) -> Result<(), Error> {
    if address == 0 {
        return Err(Error::NullPointer { tensor });
    }
    if !address.is_multiple_of(element_bytes) {
        return Err(Error::Misaligned { tensor, address, element_bytes });
    }
    Ok(())
}

pub(super) fn check_strides(tensor: &'static str, strides: &[i64], sizes: &[usize]) -> Result<(), Error> {
    match strides.iter().zip(sizes).find(|(stride, size)| **stride < 0 && **size > 1) {
        Some((stride, _)) => Err(Error::NegativeStride { tensor, stride: *stride }),
        None => Ok(()),
    }
}

/// Refuses an output in which two elements could lie at one place.
///
/// `inner` elements are contiguous; then each dimension, by growing stride, must step past all that lies inside it.
pub(super) fn check_apart(
    tensor: &'static str,
    strides: &[i64],
    sizes: &[usize],
    inner: usize,
) -> Result<(), Error> {
    let mut steps = [(0_i64, 0_usize); 3];
    let mut count = 0;
    for (stride, size) in strides.iter().zip(sizes) {
        if *size > 1 {
            steps[count] = (*stride, *size);
            count += 1;
        }
    }
    steps[..count].sort_unstable();
    let mut extent = inner as i128;
    for (stride, size) in &steps[..count] {
        if i128::from(*stride) < extent {
            return Err(Error::Overlap { tensor, stride: *stride, extent: extent as u64 });
        }
        extent += i128::from(*stride) * (*size as i128 - 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use evosdpa_kernels::Swizzle;

    use super::*;

    fn problem(text: &str, dtype: DType) -> Problem {
        Problem::new(text.parse().unwrap(), dtype).unwrap()
    }

    fn tensors(problem: &Problem) -> DeviceTensors {
        DeviceTensors::packed(problem, [0x1000, 0x2000, 0x3000, 0x4000], None)
    }

    #[test]
    fn wrong_tensors_are_refused_by_name() {
        let problem = problem("b2h4/2s8d64", DType::BF16);
        let good = tensors(&problem);
        assert!(good.check(&problem).is_ok());
        type Change = fn(&mut DeviceTensors);
        let cases: [(Change, &str); 9] = [
            (|t| t.k.address = 0, "K has no memory"),
            (|t| t.v.address = 0x3001, "V: the address 0x3001 is no multiple of its elements' 2 bytes"),
            (|t| t.q.strides[1] = -64, "Q: the stride -64 is negative"),
            (|t| t.o.strides[2] = 63, "O: the stride 63 is smaller than the 64 elements it must step over"),
            (|t| t.o.strides[0] = 0, "O: the stride 0"),
            (|t| t.o.strides[1] = t.o.strides[2], "O: the stride 64 is smaller than the 256"),
            (|t| t.lse = Some(DeviceLse { address: 0x5002, strides: [32, 8] }), "LSE: the address 0x5002"),
            (|t| t.lse = Some(DeviceLse { address: 0x5000, strides: [32, 7] }), "LSE: the stride 7"),
            (|t| t.scales = Some(DeviceScales { q: 64, k: 64, v: 64 }), "bf16 inputs have no scales"),
        ];
        for (change, expected) in cases {
            let mut changed = good;
            change(&mut changed);
            let message = changed.check(&problem).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn scales_are_positive_for_kernels() {
        let problem = problem("tiny", DType::BF16);
        for zero in [0.0, -0.0] {
            let params = tensors(&problem).params(&problem.with_scale(zero).unwrap());
            assert!(params.scale > 0.0 && params.scale_log2 > 0.0 && params.scale * f32::MAX < 1e-6);
        }
        let refusal = tensors(&problem).check(&problem.with_scale(-0.5).unwrap()).unwrap_err().to_string();
        assert!(refusal.contains("-0.5 is negative") && refusal.contains("give 0.5"), "{refusal}");
    }

    #[test]
    fn eight_bit_inputs_need_scales() {
        let problem = problem("tiny", DType::U8);
        let mut tensors = tensors(&problem);
        assert!(tensors.check(&problem).unwrap_err().to_string().contains("u8 inputs need scales"));
        tensors.scales = Some(DeviceScales { q: 64, k: 66, v: 64 });
        assert!(tensors.check(&problem).unwrap_err().to_string().contains("scales of K: the address 0x42"));
        tensors.scales = Some(DeviceScales { q: 64, k: 68, v: 64 });
        assert!(tensors.check(&problem).is_ok());
    }

    #[test]
    fn inputs_may_repeat_and_single_elements_have_any_stride() {
        let problem = problem("b1h4s8d64", DType::F16);
        let mut tensors = tensors(&problem);
        tensors.k.strides[1] = 0;
        tensors.o.strides[0] = -5;
        assert!(tensors.check(&problem).is_ok());
    }

    #[test]
    fn the_alignment_class_is_what_the_copy_engine_accepts() {
        let problem = problem("b1h4s8d64", DType::F16);
        let good = tensors(&problem);
        assert_eq!(good.alignment_class(&problem), 0b1111);
        type Change = fn(&mut DeviceTensors);
        let cases: [(Change, TensorName, u8); 6] = [
            (|t| t.q.address += 2, TensorName::Q, 0b1110),
            (|t| t.k.strides[2] = 65, TensorName::K, 0b1101),
            (|t| t.v.strides[1] = 0, TensorName::V, 0b1011),
            (|t| t.o.strides[1] = 1 << 40, TensorName::O, 0b0111),
            // The batch is one sequence, so its stride does not matter.
            (|t| t.q.strides[0] = 3, TensorName::Q, 0b1111),
            (|t| t.q.strides[2] = 72, TensorName::Q, 0b1111),
        ];
        for (change, tensor, class) in cases {
            let mut changed = good;
            change(&mut changed);
            assert_eq!(changed.alignment_class(&problem), class, "{changed:?}");
            let wanted = TensorMapUse { tensor, box_sizes: [64, 64, 1, 1], swizzle: Swizzle::Bytes128 };
            let request = changed.tensor_map(&problem, &wanted).unwrap();
            assert_eq!(request.check().is_ok(), class == 0b1111, "{request:?}");
        }
    }
}
