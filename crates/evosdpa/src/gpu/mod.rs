//! Attention on an NVIDIA GPU: device pointers and a stream in, a launch out.
//!
//! The first call for a problem plans it: it chooses a kernel, compiles it or takes it from the cache on disk, loads it
//! and raises its limits. Every later call fills in the parameters, moves the tensor maps to its pointers and launches:
//! no allocation, no synchronisation, a few microseconds of the host's time.
//!
//! ```no_run
//! use evosdpa::{Attention, DType, Device, DeviceTensors, Problem, gpu::RawStream};
//!
//! # fn main() -> Result<(), evosdpa::Error> {
//! # let (q, k, v, o, stream) = (0, 0, 0, 0, 0);
//! let problem = Problem::new("b2h32/8s4096d128:causal".parse()?, DType::BF16)?;
//! let attention = Attention::plan(problem, Device::Cuda(0))?;
//! // Device addresses of your own tensors; strides of your own are as good.
//! let tensors = DeviceTensors::packed(&problem, [q, k, v, o], None);
//! // SAFETY: the addresses are device memory of these sizes until the stream has come past the launch.
//! unsafe { attention.run_on(RawStream(stream), &tensors) }?;
//! # Ok(())
//! # }
//! ```

mod cache_write;
mod maps;
mod open;
mod plan;
mod side;
mod tensors;

pub use cache_write::{CacheWrite, DeviceNewTokens, DeviceQueries, DeviceRotary, DeviceTable};
pub use evosdpa_cuda::RawStream;
pub use open::{Gpu, shared};
pub use plan::OnGpu;
pub use side::{DeviceDense, DeviceIndices, DevicePages, DeviceSide, DeviceTokens};
pub use tensors::{DeviceLse, DeviceScales, DeviceTensor, DeviceTensors};

/// The largest head dimension that a kernel takes, of queries and keys or of values.
pub const HEAD_DIM_MAX: usize = 512;

/// The same where tensors are f32.
pub const HEAD_DIM_MAX_F32: usize = 256;

#[cfg(test)]
mod tests {
    use evosdpa_core::DType;
    use evosdpa_kernels::{Range, Registry};

    #[test]
    fn the_largest_head_dimension_is_that_of_the_kernels() {
        let registry = Registry::embedded().unwrap();
        let largest = |range: &Range| match range {
            Range::Between { max, .. } => max.unwrap_or(u32::MAX),
            Range::OneOf(sizes) => sizes.iter().copied().max().unwrap_or(0),
        };
        for (dtype, expected) in [(DType::BF16, super::HEAD_DIM_MAX), (DType::F32, super::HEAD_DIM_MAX_F32)] {
            let reading = registry.kernels().filter(|kernel| kernel.manifest.dtypes.contains(&dtype));
            let of_all = reading.map(|kernel| largest(&kernel.manifest.head_dim)).max();
            assert_eq!(of_all, Some(expected as u32), "{dtype}");
        }
    }
}
