//! The one entrance: a problem, planned for a device, run as often as you like.

use std::fmt;

use evosdpa_core::Problem;
#[cfg(feature = "cpu")]
use evosdpa_core::{SideInputs, TensorView, TensorViewMut};
#[cfg(feature = "cpu")]
use evosdpa_cpu::{CpuKernel, CpuOptions, FlashTiles, Isa};
#[cfg(feature = "cuda")]
use evosdpa_kernels::VariantId;

use crate::Error;
#[cfg(feature = "cuda")]
use crate::{
    DeviceTensors,
    gpu::{self, OnGpu, RawStream},
};

/// Where attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// This machine's processor.
    #[cfg(feature = "cpu")]
    Cpu,
    /// The NVIDIA GPU of this number, as the driver counts them from 0.
    #[cfg(feature = "cuda")]
    Cuda(usize),
}

/// `cpu`, `cuda:0`.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            #[cfg(feature = "cpu")]
            Self::Cpu => f.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What a plan is not to choose by itself. Start from the default:
///
/// ```
/// # #[cfg(feature = "cpu")]
/// let options = evosdpa::Options { threads: Some(2), ..evosdpa::Options::default() };
/// ```
#[derive(Clone, Debug, Default)]
#[allow(clippy::manual_non_exhaustive, reason = "a field that exists with a feature only is no such marker")]
pub struct Options {
    /// The kernel on a CPU; the fastest that takes the problem when this is `None`.
    #[cfg(feature = "cpu")]
    pub kernel: Option<CpuKernel>,
    /// Threads on a CPU; all of them when this is `None`.
    #[cfg(feature = "cpu")]
    pub threads: Option<usize>,
    /// Instruction set on a CPU; the best there is when this is `None`.
    #[cfg(feature = "cpu")]
    pub isa: Option<Isa>,
    /// Tile sizes of the streaming CPU kernel; chosen from the head dimensions when this is `None`.
    #[cfg(feature = "cpu")]
    pub tiles: Option<FlashTiles>,
    /// The kernel on a GPU, with tunables or without; chosen by measured tables and rules when this is `None`.
    #[cfg(feature = "cuda")]
    pub variant: Option<VariantId>,
    /// On a GPU: plans, loaded code and work counters of its own, which go when the last clone of the [`Attention`] goes.
    /// For who measures. A forced variant has its own in any case.
    #[cfg(feature = "cuda")]
    pub isolated: bool,
}

/// A problem with the decision how to compute it. Cheap to clone; use it from any thread.
#[derive(Clone, Debug)]
pub struct Attention {
    problem: Problem,
    backend: Backend,
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "finding a plan again allocates nothing")]
enum Backend {
    #[cfg(feature = "cpu")]
    Cpu(CpuKernel, CpuOptions),
    #[cfg(feature = "cuda")]
    Gpu(OnGpu),
}

impl Attention {
    /// Decides how to compute a problem on a device.
    ///
    /// On a GPU this is for packed tensors in the problem's layout: the kernel is compiled or taken from the cache on disk,
    /// and loaded. Tensors with other strides are planned when they first come; [`Gpu::plan`](crate::gpu::Gpu::plan) takes
    /// them beforehand.
    pub fn plan(problem: Problem, device: Device) -> Result<Self, Error> {
        Self::plan_with(problem, device, &Options::default())
    }

    /// Decides what `options` leave open.
    pub fn plan_with(problem: Problem, device: Device, options: &Options) -> Result<Self, Error> {
        match device {
            #[cfg(feature = "cpu")]
            Device::Cpu => {
                let Options { kernel, threads, isa, tiles, .. } = *options;
                #[cfg_attr(
                    not(feature = "cuda"),
                    allow(unused_mut, reason = "tables come with that feature")
                )]
                let mut cpu = CpuOptions { threads, isa, tiles };
                #[cfg(feature = "cuda")]
                if kernel.is_none() && tiles.is_none() {
                    crate::tuned::settle(&problem, &mut cpu)?;
                }
                // Now rather than at the first call.
                cpu.check(&problem)?;
                Ok(Self { problem, backend: Backend::Cpu(kernel.unwrap_or(CpuKernel::Flash), cpu) })
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                let tensors = crate::choose::assumed_tensors(&problem);
                gpu::shared(ordinal)?.plan(&problem, &tensors, options)
            }
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(problem: Problem, plan: OnGpu) -> Self {
        Self { problem, backend: Backend::Gpu(plan) }
    }

    /// What is asked.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Where it is computed.
    pub fn device(&self) -> Device {
        match &self.backend {
            #[cfg(feature = "cpu")]
            Backend::Cpu(..) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Backend::Gpu(plan) => Device::Cuda(plan.gpu().device().info().ordinal),
        }
    }

    /// The kernel that was chosen, with its tunables: `cpu_flash`, `hopper_small[WG_N=2 …]`.
    pub fn variant(&self) -> String {
        match &self.backend {
            #[cfg(feature = "cpu")]
            Backend::Cpu(kernel, CpuOptions { tiles: Some(tiles), threads, .. }) => {
                let threads = threads.map_or(String::new(), |threads| format!(" THREADS={threads}"));
                let FlashTiles { block_q, block_kv } = tiles;
                format!("{}[BLOCK_KV={block_kv} BLOCK_Q={block_q}{threads}]", kernel.name())
            }
            #[cfg(feature = "cpu")]
            Backend::Cpu(kernel, _) => kernel.name().to_owned(),
            #[cfg(feature = "cuda")]
            Backend::Gpu(plan) => plan.variant().to_string(),
        }
    }

    /// The plan on a GPU; `None` on a CPU.
    #[cfg(feature = "cuda")]
    pub fn gpu_plan(&self) -> Option<&OnGpu> {
        match &self.backend {
            #[cfg(feature = "cpu")]
            Backend::Cpu(..) => None,
            Backend::Gpu(plan) => Some(plan),
        }
    }

    /// Computes attention of tensors in this process's memory. `lse`, when given, receives the natural log-sum-exp of each
    /// row, `[batch, query heads, queries]`. Tensors that do not fit the problem are refused before anything is written.
    ///
    /// Rows that see no key give O = 0 and LSE = −∞. A visible score that is NaN or +∞ makes its row NaN.
    #[cfg(feature = "cpu")]
    pub fn run(
        &self,
        q: TensorView<'_>,
        k: TensorView<'_>,
        v: TensorView<'_>,
        o: TensorViewMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        self.run_with([q, k, v], &SideInputs::default(), o, lse)
    }

    /// As [`Attention::run`], with what the problem asks for beside Q, K and V: lengths, pages, modifiers, scales. Where
    /// queries are packed, `lse` is `[query heads, tokens]`. With sinks, a row that sees no key has its sink as LSE.
    ///
    /// ```
    /// use evosdpa::{Attention, DType, Device, Layout, Problem, SideInputs, TensorView, TensorViewMut};
    ///
    /// # fn main() -> Result<(), evosdpa::Error> {
    /// // Three sequences, packed: 5, 0 and 4 tokens of two heads.
    /// let problem = Problem::new("b3h2s5d8:causal-br:varlen".parse()?, DType::F32)?;
    /// let attention = Attention::plan(problem, Device::Cpu)?;
    /// let shape = [1, 2, 9, 8];
    /// let (x, mut o) = (vec![0.5f32; 144], vec![0f32; 144]);
    /// let tensor = TensorView::from_slice(&x, shape, Layout::Bhsd)?;
    /// let cu_seqlens = [0, 5, 5, 9];
    /// let side = SideInputs {
    ///     cu_seqlens_q: Some(&cu_seqlens),
    ///     cu_seqlens_kv: Some(&cu_seqlens),
    ///     ..SideInputs::default()
    /// };
    /// let out = TensorViewMut::from_slice(&mut o, shape, Layout::Bhsd)?;
    /// attention.run_with([tensor; 3], &side, out, None)?;
    /// assert!(o.iter().all(|x| (x - 0.5).abs() < 1e-6));
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "cpu")]
    pub fn run_with(
        &self,
        [q, k, v]: [TensorView<'_>; 3],
        side: &SideInputs<'_>,
        o: TensorViewMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        match &self.backend {
            Backend::Cpu(kernel, options) => {
                Ok(evosdpa_cpu::attention(*kernel, &self.problem, q, k, v, side, o, lse, options)?)
            }
            #[cfg(feature = "cuda")]
            Backend::Gpu(_) => Err(Error::PlannedForGpu { device: self.device() }),
        }
    }

    /// Queues attention of tensors in device memory on the caller's stream. The log-sum-exp is written when the tensors
    /// have a place for it.
    ///
    /// Returns when the launch is queued: nothing is allocated and nothing waited for. Tensors that do not fit the problem
    /// are refused before anything is queued; tensors that a fast kernel cannot read (unaligned, repeated) go to one that
    /// can. Calls may come from any thread and may be captured into CUDA graphs.
    ///
    /// Rows that see no key, and rows that belong to no sequence, give O = 0 and LSE = −∞. A visible score that is NaN or +∞ makes
    /// its row NaN.
    ///
    /// # Safety
    /// Every address must be memory of this device that is valid for the problem's sizes and the given strides, and stay
    /// so until the stream has come past the launch; outputs must not overlap inputs or each other. The stream must be a
    /// live one of the device's primary context, or 0.
    #[cfg(feature = "cuda")]
    pub unsafe fn run_on(&self, stream: RawStream, tensors: &DeviceTensors) -> Result<(), Error> {
        match &self.backend {
            #[cfg(feature = "cpu")]
            Backend::Cpu(..) => Err(Error::PlannedForCpu),
            // SAFETY: this function's contract is the same.
            Backend::Gpu(plan) => unsafe { plan.launch(&self.problem, tensors, stream) },
        }
    }
}
