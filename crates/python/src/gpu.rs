//! A call on a GPU.

use evosdpa::{
    DType, DeviceLse, DeviceTensor, DeviceTensors, Options, Problem,
    gpu::{self, DeviceSide, RawStream},
};

use crate::{Call, Error, Operand, Side};

impl Call<'_> {
    /// Queues attention on the caller's stream of `cuda:N`; addresses are device memory.
    ///
    /// # Safety
    /// As for [`evosdpa::Attention::run_on`].
    pub(crate) unsafe fn queue_on_gpu(
        &self,
        problem: Problem,
        ordinal: usize,
        stream: u64,
    ) -> Result<(), Error> {
        if self.side.is_some_and(Side::has_data) {
            return Err(Error::NotOnGpu { features: problem.features() });
        }
        let (lse, kv_dtype) = (self.lse as u64, problem.kv_dtype());
        let tensors = DeviceTensors {
            q: self.q.on_device("Q", problem.dtype(), problem.q_shape())?,
            k: self.k.on_device("K", kv_dtype, problem.k_shape())?,
            v: self.v.on_device("V", kv_dtype, problem.v_shape())?,
            o: self.o.on_device("O", problem.output_dtype(), problem.o_shape())?,
            lse: (lse != 0).then(|| DeviceLse::packed(lse, &problem)),
            scales: None,
            side: DeviceSide::default(),
        };
        // Planned for these very strides: a look-up after the first call.
        let attention = gpu::shared(ordinal)?.plan(&problem, &tensors, &Options::default())?;
        // SAFETY: this function's contract is the same.
        Ok(unsafe { attention.run_on(RawStream(stream), &tensors) }?)
    }
}

impl Operand {
    fn on_device(
        &self,
        tensor: &'static str,
        dtype: DType,
        expected: [usize; 4],
    ) -> Result<DeviceTensor, Error> {
        let (shape, strides, _) = self.extent(tensor, dtype)?;
        if shape != expected {
            let wrong = evosdpa_core::Error::TensorShape { tensor, got: shape, expected };
            return Err(evosdpa::Error::from(wrong).into());
        }
        if strides[3] != 1 && shape[3] > 1 {
            let wrong = evosdpa_core::Error::InnerStride { stride: strides[3] };
            return Err(evosdpa::Error::from(wrong).into());
        }
        // Checked to fit: they came from i64.
        Ok(DeviceTensor { address: self.address as u64, strides: [0, 1, 2].map(|i| strides[i] as i64) })
    }
}

#[cfg(test)]
mod tests {
    use crate::{Call, List, Operand, Place, Side, Visible};

    #[test]
    fn wrong_tensors_are_refused_before_a_gpu_is_looked_for() {
        let operand = Operand { address: 4096, shape: [1, 2, 3, 8], strides: [48, 24, 8, 1] };
        let visible = Visible { left: -1, right: -1, bottom_right: false };
        let precision = evosdpa::Precision::Default;
        let base = Call {
            dtype: 2,
            q: operand,
            k: operand,
            v: operand,
            o: operand,
            lse: 0,
            scale: None,
            visible,
            precision,
            side: None,
        };
        let refused = |change: &dyn Fn(&mut Call<'_>)| {
            let mut call = base;
            change(&mut call);
            // SAFETY: refused before anything is queued.
            unsafe { call.run(Place::Cuda { ordinal: 0, stream: 0 }) }.unwrap_err().to_string()
        };
        assert!(refused(&|call| call.v.shape[2] = 4).contains("V has shape [1, 2, 4, 8]"));
        assert!(refused(&|call| call.k.strides[3] = 2).contains("stride 2"));
        assert!(refused(&|call| call.q.strides[1] = -24).contains("negative stride"));
        assert!(refused(&|call| call.o.shape[3] = 4).contains("O has shape"));
        let side = Side { sinks: Some(List { address: 4096, len: 2 }), ..Side::default() };
        let with_sinks = Call { side: Some(&side), ..base };
        // SAFETY: as above.
        let said = unsafe { with_sinks.run(Place::Cuda { ordinal: 0, stream: 0 }) }.unwrap_err();
        assert!(said.to_string().contains("sinks"), "{said}");
    }
}
