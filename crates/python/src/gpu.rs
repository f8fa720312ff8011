//! A call on a GPU.

use evosdpa::{
    DType, DeviceLse, DeviceScales, DeviceTensor, DeviceTensors, Granularity, Problem,
    gpu::{self, DeviceDense, DeviceIndices, DevicePages, DeviceSide, DeviceTokens, RawStream},
};

use crate::{Call, Error, List, Operand, Side, call, side::broadcast};

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
        let tensors = self.on_device(&problem)?;
        // SAFETY: this function's contract is the same.
        Ok(unsafe { gpu::shared(ordinal)?.run(&problem, &tensors, RawStream(stream)) }?)
    }

    /// Its tensors in device memory, checked against each other.
    pub(crate) fn on_device(&self, problem: &Problem) -> Result<DeviceTensors, Error> {
        let [q, k, v, o] = self.shapes()?;
        // How many tokens are packed, and how many pages a cache has, the tensors say.
        problem.check_shapes(q, k, v).map_err(evosdpa::Error::from)?;
        let [_, heads, rows, _] = o.map(|size| size as i64);
        let (lse, kv_dtype, output) = (self.lse as u64, problem.kv_dtype(), problem.output_dtype());
        let side = self.side.copied().unwrap_or_default();
        Ok(DeviceTensors {
            q: self.q.on_device("Q", problem.dtype(), q)?,
            k: self.k.on_device("K", kv_dtype, k)?,
            v: self.v.on_device("V", kv_dtype, v)?,
            o: self.o.on_device("O", output, [q[0], q[1], q[2], v[3]])?,
            lse: (lse != 0).then_some(DeviceLse { address: lse, strides: [heads * rows, rows] }),
            scales: problem.has_codes().then(|| side.on_device_scales()),
            side: side.on_device(problem, q, k)?,
        })
    }

    fn shapes(&self) -> Result<[[usize; 4]; 4], Error> {
        Ok([
            call::sizes("Q", self.q.shape)?,
            call::sizes("K", self.k.shape)?,
            call::sizes("V", self.v.shape)?,
            call::sizes("O", self.o.shape)?,
        ])
    }
}

impl Side {
    /// The same in device memory.
    fn on_device(&self, problem: &Problem, q: [usize; 4], k: [usize; 4]) -> Result<DeviceSide, Error> {
        let address = |list: Option<List>| list.map(|list| list.address as u64);
        let lengths =
            |cu: Option<List>, tokens| cu.map(|cu| DeviceTokens { cu_seqlens: cu.address as u64, tokens });
        let dense = |what, dtype: DType, operand: Operand| -> Result<DeviceDense, Error> {
            let (got, expected) =
                (call::sizes(what, operand.shape)?, broadcast(&operand).shape(problem.sizes()));
            if got != expected {
                let wrong = evosdpa_core::Error::SideShape { what, got, expected };
                return Err(evosdpa::Error::from(wrong).into());
            }
            let DeviceTensor { address, strides } = operand.on_device(what, dtype, got)?;
            Ok(DeviceDense { address, dtype, strides })
        };
        let batch = problem.sizes().batch;
        if let Some(table) = self.page_table
            && table.shape[0] != batch as i64
            && self.cache_batch_idx.is_none()
        {
            let rows = usize::try_from(table.shape[0]).unwrap_or(0);
            return Err(Error::TableRows { rows, batch });
        }
        for (what, list, expected) in [
            ("cumulative query lengths", self.cu_seqlens_q, batch + 1),
            ("cumulative key lengths", self.cu_seqlens_kv, batch + 1),
            ("used key lengths", self.seqused_kv, batch),
            ("used query lengths", self.seqused_q, batch),
            ("left paddings", self.leftpad_kv, batch),
            ("cache batch indices", self.cache_batch_idx, batch),
            ("ALiBi slopes", self.alibi_slopes, problem.sizes().heads_q),
            ("sinks", self.sinks, problem.sizes().heads_q),
            ("scales of Q", self.scales[0], self.scale_count(batch, q)),
            ("scales of K", self.scales[1], self.scale_count(batch, k)),
            ("scales of V", self.scales[2], self.scale_count(batch, k)),
        ] {
            if let Some(List { len: got, .. }) = list
                && got != expected
            {
                let wrong = evosdpa_core::Error::SideLength { what, got, expected };
                return Err(evosdpa::Error::from(wrong).into());
            }
        }
        let blocks = match (self.blocks, problem.scores().blocks) {
            (Some(table), Some(blocks)) => {
                let (got, expected) =
                    (call::sizes("block table", table.shape)?, blocks.shape(problem.sizes()));
                if got != expected {
                    let wrong = evosdpa_core::Error::SideShape { what: "block table", got, expected };
                    return Err(evosdpa::Error::from(wrong).into());
                }
                Some(table.address as u64)
            }
            _ => None,
        };
        Ok(DeviceSide {
            queries: lengths(self.cu_seqlens_q, q[2]),
            keys: lengths(self.cu_seqlens_kv, k[2]),
            seqused_kv: address(self.seqused_kv),
            seqused_q: address(self.seqused_q),
            leftpad_kv: address(self.leftpad_kv),
            indices: self.cache_batch_idx.map(|list| DeviceIndices {
                address: list.address as u64,
                rows: self.page_table.map_or(k[0], |table| usize::try_from(table.shape[0]).unwrap_or(0)),
            }),
            pages: self.page_table.map(|table| DevicePages {
                table: table.address as u64,
                row_stride: table.row_stride,
                pages: k[0],
            }),
            alibi_slopes: address(self.alibi_slopes),
            bias: match self.bias {
                None => None,
                Some((code, bias)) => Some(dense("bias", call::dtype(code)?, bias)?),
            },
            mask: self.mask.map(|mask| dense("mask", DType::U8, mask)).transpose()?,
            blocks,
            sinks: address(self.sinks),
        })
    }

    /// How many scales a tensor of this shape has.
    fn scale_count(&self, batch: usize, shape: [usize; 4]) -> usize {
        match self.granularity {
            Granularity::Tensor => 1,
            Granularity::Head => batch * shape[1],
            Granularity::Token => shape[..3].iter().product(),
        }
    }

    fn on_device_scales(&self) -> DeviceScales {
        let [q, k, v] = self.scales.map(|list| list.map_or(0, |list| list.address as u64));
        DeviceScales { q, k, v }
    }
}

impl Operand {
    pub(crate) fn on_device(
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
    use crate::{Call, List, Operand, Place, Side, Table, Visible};

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
        let beside = |side: Side| {
            let call = Call { side: Some(&side), ..base };
            // SAFETY: as above.
            unsafe { call.run(Place::Cuda { ordinal: 0, stream: 0 }) }.unwrap_err().to_string()
        };
        let list = |len| Some(List { address: 4096, len });
        assert!(beside(Side { sinks: list(3), ..Side::default() }).contains("sinks: 3 values"));
        assert!(
            beside(Side { seqused_kv: list(2), ..Side::default() }).contains("used key lengths: 2 values")
        );
        let scales = [None, list(2), list(1)];
        assert!(
            beside(Side { kv_dtype: Some(3), scales, ..Side::default() }).contains("scales of V: 1 values")
        );
        let bias = Operand { shape: [1, 2, 3, 4], ..operand };
        assert!(
            beside(Side { bias: Some((0, bias)), ..Side::default() }).contains("bias has shape [1, 2, 3, 4]")
        );
        let page_table = Some(Table { address: 4096, shape: [2, 1], row_stride: 1 });
        assert!(beside(Side { page_table, ..Side::default() }).contains("2 rows, but there are 1"));
        let packed = Side { cu_seqlens_q: list(4), max_seqlen_q: Some(3), ..Side::default() };
        assert!(beside(packed).contains("K has shape"), "one cache for three sequences");
    }
}
