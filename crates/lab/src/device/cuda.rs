//! An NVIDIA GPU: kernels are compiled for it on demand and run between canaries. How they are timed is in `timed`.

use std::{cell::OnceCell, sync::Arc, time::Duration};

use evosdpa::{
    Attention, DeviceTensors, Options,
    choose::{self, Planner, assumed_tensors},
    gpu::{CacheWrite, Gpu},
};
use evosdpa_core::{DType, Problem};
use evosdpa_cuda::{
    ArtifactKind, Builder, ClockProbe, DeviceBuffer, ForeignKernel, GuardedBuffer, L2Flush, Stream,
};
use evosdpa_kernels::{ProblemFacts, Registry, Target, Variant, VariantId};
use evosdpa_oracle::inputs::Inputs;

use super::{
    AUTO, Device, DeviceId, KernelInfo, Loaded, Output, TimedDevice, TimedKernel, Turned, ahead, arguments,
    blank_output, fresh_output, timed::LoadedCuda,
};
use crate::{
    Error,
    measure::{floor::Ceilings, roof::Roof},
};

/// No launch of ours takes this long; one that does hangs. The device can be given another limit.
const LIMIT: Duration = Duration::from_secs(20);

/// Small problems rotate through as many sets of inputs; large ones drive each other out of the cache anyway.
const INPUT_SETS: usize = 8;
const ROTATE_BELOW_BYTES: u64 = 64 << 20;

/// A GPU with the kernels that can be compiled for it.
pub struct Cuda {
    gpu: Arc<Gpu>,
    stream: Stream,
    probe: ClockProbe,
    flush: OnceCell<L2Flush>,
    foreign: OnceCell<ForeignKernel>,
    limit: Duration,
}

impl Cuda {
    /// Opens a GPU by its number.
    pub fn open(ordinal: usize, registry: Registry) -> Result<Self, Error> {
        let gpu = Arc::new(Gpu::open(ordinal, Planner::with_tables(registry)?, Builder::new()?)?);
        let (stream, probe) = (gpu.device().stream()?, ClockProbe::new(gpu.device())?);
        Ok(Self { gpu, stream, probe, flush: OnceCell::new(), foreign: OnceCell::new(), limit: LIMIT })
    }

    /// With another limit for one launch, or for one replay of a graph of them.
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// The kernels it has.
    pub fn registry(&self) -> Registry {
        self.gpu.registry()
    }

    /// What is compiled for.
    pub fn target(&self) -> &Target {
        self.gpu.target()
    }

    /// The device itself.
    pub fn handle(&self) -> &evosdpa_cuda::Device {
        self.gpu.device()
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn probe(&self) -> &ClockProbe {
        &self.probe
    }

    /// What drives everything out of L2, made when first needed.
    pub(super) fn flush(&self) -> Result<&L2Flush, Error> {
        if let Some(flush) = self.flush.get() {
            return Ok(flush);
        }
        let made = L2Flush::new(self.handle())?;
        Ok(self.flush.get_or_init(|| made))
    }

    /// What runs before every launch where times between foreign kernels are asked for, made when first needed.
    pub(super) fn foreign(&self) -> Result<&ForeignKernel, Error> {
        if let Some(foreign) = self.foreign.get() {
            return Ok(foreign);
        }
        let made = ForeignKernel::new(self.handle())?;
        Ok(self.foreign.get_or_init(|| made))
    }

    /// Writes to a cache and waits for it.
    ///
    /// # Safety
    /// As [`Gpu::write_cache`] says.
    pub(crate) unsafe fn write_cache(&self, write: &CacheWrite) -> Result<(), Error> {
        // SAFETY: the caller's memory; the stream is this device's.
        unsafe { self.gpu.write_cache(self.stream.number(), write) }?;
        Ok(self.stream.synchronize()?)
    }

    /// The variant that a name means for a problem.
    pub fn variant(&self, kernel: &str, problem: &Problem) -> Result<Variant, Error> {
        if kernel == AUTO {
            return Ok(self.gpu.explain(problem, &assumed_tensors(problem))?.variant);
        }
        variant(&self.registry(), kernel, &ProblemFacts::try_from(problem)?, self.target())
    }

    /// The library's own plan for such tensors, with the variant that a name means.
    pub(super) fn plan(
        &self,
        kernel: &str,
        problem: &Problem,
        tensors: &DeviceTensors,
    ) -> Result<Attention, Error> {
        let variant = if kernel == AUTO { None } else { Some(kernel.parse()?) };
        let options = Options { variant, isolated: true, ..Options::default() };
        Ok(self.gpu.plan(problem, tensors, &options)?)
    }
}

/// The variant that a name means: `sdpa_v2c` as it is chosen for the problem, or `sdpa_v2c[STAGES=3]`.
pub(super) fn variant(
    registry: &Registry,
    name: &str,
    facts: &ProblemFacts,
    target: &Target,
) -> Result<Variant, Error> {
    let VariantId { kernel, tunables } = name.parse()?;
    let kernel = registry.kernel(&kernel)?;
    Ok(choose::variant(kernel, facts, target, &tunables)?)
}

/// The kernels of a registry, as they are listed.
pub(super) fn listed(registry: &Registry) -> Vec<KernelInfo> {
    let describe = |kernel: &evosdpa_kernels::Kernel| KernelInfo {
        name: kernel.name().to_owned(),
        summary: kernel.manifest.summary.clone(),
        parent: kernel.manifest.parent.clone(),
        changed: kernel.manifest.changed.clone().unwrap_or_default(),
    };
    registry.kernels().map(describe).collect()
}

/// The variants of a kernel for a problem, by name.
pub(super) fn variant_names(
    registry: &Registry,
    kernel: &str,
    facts: &ProblemFacts,
    target: &Target,
    cap: usize,
) -> Result<Vec<String>, Error> {
    let kernel = registry.kernel(kernel)?;
    kernel.supports(facts, target)?;
    let names = kernel.variants(facts, target).take(cap).map(|variant| Ok(variant?.label()));
    names.collect()
}

impl Device for Cuda {
    fn id(&self) -> DeviceId {
        DeviceId::Cuda(self.handle().info().ordinal)
    }

    fn lock_name(&self) -> Option<String> {
        Some(format!("gpu-{}", self.handle().info().pci_bus_id.replace(':', "-")))
    }

    fn accelerator(&self) -> Option<String> {
        let info = self.handle().info();
        let driver = evosdpa_cuda::loader::driver()
            .map(|driver| {
                format!(
                    ", driver for CUDA {}.{}",
                    driver.cuda_version / 1000,
                    driver.cuda_version % 1000 / 10
                )
            })
            .unwrap_or_default();
        Some(format!("{}, {} SMs{driver}", info.name, info.sm_count))
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        listed(&self.registry())
    }

    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String> {
        self.variant(kernel, problem).err().map(|error| error.to_string())
    }

    fn takes(&self, kernel: &str, dtype: DType) -> bool {
        // What is chosen is not known before the problem is.
        kernel == AUTO || ahead::reads(&self.registry(), kernel, dtype)
    }

    fn prepare(
        &self,
        work: &[(String, Problem)],
        workers: usize,
        go_on: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> Result<(), Error> {
        let variants = work.iter().filter_map(|(kernel, problem)| self.variant(kernel, problem).ok());
        ahead::compile(variants, ArtifactKind::Cubin, workers, go_on)
    }

    fn variants(&self, kernel: &str, problem: &Problem, cap: usize) -> Result<Vec<String>, Error> {
        variant_names(&self.registry(), kernel, &ProblemFacts::try_from(problem)?, self.target(), cap)
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        Ok(self.load_timed(kernel, problem, inputs)?)
    }

    fn timed(&self) -> Option<&dyn TimedDevice> {
        Some(self)
    }

    fn register_source(&self, of: &str, name: &str, source: &str) -> Result<(), Error> {
        Ok(self.gpu.register_source(of, name, source)?)
    }
}

impl TimedDevice for Cuda {
    fn input_sets(&self, problem: &Problem) -> usize {
        if problem.bytes() < ROTATE_BELOW_BYTES { INPUT_SETS } else { 2 }
    }

    fn ceilings(&self, problem: &Problem) -> Result<Option<Ceilings>, Error> {
        // Inputs that fit the cache are read from there.
        let info = self.handle().info();
        let bytes = (problem.bytes() * INPUT_SETS as u64).clamp(4 << 20, info.l2_bytes.max(4 << 20) / 4);
        let gbps = evosdpa_cuda::copy_gbps(self.handle(), &self.stream, bytes as usize, self.limit)?;
        Ok(Some(Ceilings::of_gpu(self.target().arch, info.sm_count, info.clock_khz, Some(gbps))))
    }

    fn roof(&self, problem: &Problem) -> Option<Roof> {
        let info = self.handle().info();
        // Sets that take turns and together do not fit L2 twice come from memory.
        let turns = problem.bytes() * self.input_sets(problem) as u64;
        let from_memory = turns > 2 * info.l2_bytes && info.memory_gbps > 0;
        let gbps = from_memory.then_some(f64::from(info.memory_gbps));
        Some(Roof::of_gpu(self.target().arch, problem.dtype(), info.sm_count, info.clock_khz, gbps))
    }

    fn clock_overhead_us(&self) -> Result<Option<f64>, Error> {
        Ok(Some(evosdpa_cuda::event_overhead_us(&self.stream, self.limit)?))
    }

    fn load_timed<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
        Ok(Box::new(LoadedCuda::new(self, kernel, problem, inputs)?))
    }
}

/// Inputs are compared in pieces that stay in a processor's cache.
const COMPARED_BYTES: usize = 4 << 20;

/// One set of inputs on the GPU, and what was put there.
pub(super) struct Set {
    given: Inputs,
    turned: Turned,
    /// One for each of [`arguments::buffers`].
    buffers: Vec<DeviceBuffer>,
}

impl Set {
    pub(super) fn upload(device: &evosdpa_cuda::Device, inputs: &Inputs) -> Result<Self, Error> {
        let buffers = arguments::buffers(inputs)
            .into_iter()
            .map(|(_, bytes)| {
                let mut buffer = device.alloc(bytes.len())?;
                buffer.copy_from(bytes)?;
                Ok(buffer)
            })
            .collect::<Result<Vec<_>, Error>>()?;
        Ok(Self { given: inputs.clone(), turned: Turned::NOT, buffers })
    }

    pub(super) fn refill(&mut self, inputs: &Inputs, turned: Turned) -> Result<(), Error> {
        let pairs = self.buffers.iter_mut().zip(arguments::buffers(inputs));
        for (i, (buffer, (_, bytes))) in pairs.enumerate() {
            let [first, last] = turned.pieces(i, bytes);
            buffer.copy_part_from(0, first)?;
            buffer.copy_part_from(first.len(), last)?;
        }
        (self.given, self.turned) = (inputs.clone(), turned);
        Ok(())
    }

    pub(super) fn changed(&self) -> Result<Option<String>, Error> {
        let mut now = Vec::new();
        let pairs = self.buffers.iter().zip(arguments::buffers(&self.given));
        for (i, (buffer, (name, given))) in pairs.enumerate() {
            let mut from = 0;
            for piece in
                self.turned.pieces(i, given).into_iter().flat_map(|piece| piece.chunks(COMPARED_BYTES))
            {
                now.resize(piece.len(), 0);
                buffer.copy_part_to(from, &mut now)?;
                if now != piece {
                    return Ok(Some(name.to_owned()));
                }
                from += piece.len();
            }
        }
        Ok(None)
    }

    /// Where the buffer of this name is.
    fn place(&self, wanted: &str) -> Option<u64> {
        let at = arguments::buffers(&self.given).iter().position(|(name, _)| *name == wanted)?;
        Some(self.buffers[at].address())
    }
}

/// One launch: outputs of its own between canaries, and the tensors that are they and a set's inputs.
pub(super) struct Slot {
    pub(super) set: usize,
    o: GuardedBuffer,
    lse: Option<GuardedBuffer>,
    pub(super) tensors: DeviceTensors,
}

impl Slot {
    pub(super) fn new(
        device: &evosdpa_cuda::Device,
        problem: &Problem,
        sets: &[Set],
        set: usize,
    ) -> Result<Self, Error> {
        let inputs = &sets[set];
        let fresh = fresh_output(problem);
        let o = GuardedBuffer::new(device, "O", fresh.o.bytes().len())?;
        let lse = fresh.lse.map(|lse| GuardedBuffer::new(device, "LSE", lse.len() * 4)).transpose()?;
        let tensors = arguments::tensors(
            problem,
            &inputs.given,
            &|name| inputs.place(name),
            (fresh.o.view(), o.address()),
            lse.as_ref().map(GuardedBuffer::address),
        );
        Ok(Self { set, o, lse, tensors })
    }

    pub(super) fn poison(&mut self) -> Result<(), Error> {
        self.o.poison()?;
        self.lse.as_mut().map(GuardedBuffer::poison).transpose()?;
        Ok(())
    }

    pub(super) fn download(&self, problem: &Problem) -> Result<Output, Error> {
        let mut output = blank_output(problem);
        self.o.check()?;
        self.o.copy_to(output.o.bytes_mut())?;
        if let (Some(buffer), Some(lse)) = (&self.lse, &mut output.lse) {
            buffer.check()?;
            buffer.copy_to(lse.as_mut_slice())?;
        }
        Ok(output)
    }

    pub(super) fn output_bytes(&self) -> usize {
        self.o.bytes()
    }
}
