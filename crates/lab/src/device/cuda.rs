//! An NVIDIA GPU: kernels are compiled for it on demand, run between canaries and timed by graph replay.

use std::time::Duration;

use evosdpa::{DeviceScales, gpu};
use evosdpa_core::{Problem, inputs::Inputs};
use evosdpa_cuda::{Builder, DeviceBuffer, Event, Graph, GuardedBuffer, PreparedLaunch, Stream, TensorMap};
use evosdpa_kernels::{ProblemFacts, Registry, SdpaParams, Target, Variant};

use super::{Device, KernelInfo, Loaded, Output, arguments, fresh_output};
use crate::Error;

/// No launch of ours takes this long; one that does hangs.
const LIMIT: Duration = Duration::from_secs(20);

/// A timed graph holds launches for about this long, so that the clock's grain does not show.
const GRAPH_US: f64 = 400.0;
/// And no more launches than this.
const GRAPH_LAUNCHES_MAX: usize = 40;

/// Small problems rotate through as many sets of inputs; large ones drive each other out of the cache anyway.
const INPUT_SETS: usize = 8;
const ROTATE_BELOW_BYTES: u64 = 64 << 20;

/// A GPU with the kernels that can be compiled for it.
pub struct Cuda {
    device: evosdpa_cuda::Device,
    target: Target,
    stream: Stream,
    builder: Builder,
    registry: Registry,
}

impl Cuda {
    /// Opens a GPU by its number.
    pub fn open(ordinal: usize, registry: Registry) -> Result<Self, Error> {
        let device = evosdpa_cuda::Device::open(ordinal)?;
        let target = device.target()?;
        let stream = device.stream()?;
        Ok(Self { device, target, stream, builder: Builder::new()?, registry })
    }

    fn variant(&self, kernel: &str, problem: &Problem) -> Result<Variant, Error> {
        variant(&self.registry, kernel, &ProblemFacts::try_from(problem)?, &self.target)
    }
}

/// The variant that a name means: `sdpa_v2c` with its defaults, or `sdpa_v2c[STAGES=3]`.
pub(super) fn variant(
    registry: &Registry,
    name: &str,
    facts: &ProblemFacts,
    target: &Target,
) -> Result<Variant, Error> {
    let Some((kernel, rest)) = name.split_once('[') else {
        return Ok(registry.kernel(name)?.default_variant(facts, target)?);
    };
    let unreadable = || Error::Tunables { text: name.to_owned() };
    let chosen = rest
        .strip_suffix(']')
        .ok_or_else(unreadable)?
        .split_whitespace()
        .map(|pair| {
            let (tunable, value) = pair.split_once('=')?;
            Some((tunable, value.parse().ok()?))
        })
        .collect::<Option<Vec<(&str, i64)>>>()
        .ok_or_else(unreadable)?;
    Ok(registry.kernel(kernel)?.variant(facts, target, chosen)?)
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
    fn name(&self) -> String {
        "cuda".to_owned()
    }

    fn accelerator(&self) -> Option<String> {
        let info = self.device.info();
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
        listed(&self.registry)
    }

    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String> {
        self.variant(kernel, problem).err().map(|error| error.to_string())
    }

    fn variants(&self, kernel: &str, problem: &Problem, cap: usize) -> Result<Vec<String>, Error> {
        variant_names(&self.registry, kernel, &ProblemFacts::try_from(problem)?, &self.target, cap)
    }

    fn input_sets(&self, problem: &Problem) -> usize {
        if problem.bytes() < ROTATE_BELOW_BYTES { INPUT_SETS } else { 2 }
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        let variant = self.variant(kernel, problem)?;
        let function = gpu::load(&self.device, &self.builder, &variant)?;
        let prepared = PreparedLaunch::new(&function, variant.launch)?;
        let sets = inputs
            .iter()
            .map(|inputs| Set::upload(&self.device, problem, inputs, &variant))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Box::new(LoadedCuda { problem: *problem, stream: &self.stream, prepared, sets, timed: None }))
    }
}

/// One set of tensors on the GPU, with the arguments that describe them.
struct Set {
    // Q, K, V and their scales: held for as long as the arguments point at them.
    _inputs: Vec<DeviceBuffer>,
    o: GuardedBuffer,
    lse: Option<GuardedBuffer>,
    params: SdpaParams,
    maps: Vec<TensorMap>,
}

impl Set {
    fn upload(
        device: &evosdpa_cuda::Device,
        problem: &Problem,
        inputs: &Inputs,
        variant: &Variant,
    ) -> Result<Self, Error> {
        let upload = |bytes: &[u8]| -> Result<DeviceBuffer, Error> {
            let mut buffer = device.alloc(bytes.len())?;
            buffer.copy_from(bytes)?;
            Ok(buffer)
        };
        let mut held = [&inputs.q, &inputs.k, &inputs.v]
            .into_iter()
            .map(|tensor| upload(tensor.bytes()))
            .collect::<Result<Vec<_>, _>>()?;
        let fresh = fresh_output(problem);
        let o = GuardedBuffer::new(device, "O", fresh.o.bytes().len())?;
        let lse = fresh.lse.map(|lse| GuardedBuffer::new(device, "LSE", lse.len() * 4)).transpose()?;
        let views = [inputs.q.view(), inputs.k.view(), inputs.v.view(), fresh.o.view()];
        let addresses = [held[0].address(), held[1].address(), held[2].address(), o.address()];
        let mut tensors =
            arguments::tensors(problem, &views, addresses, lse.as_ref().map(GuardedBuffer::address));
        if let Some(scales) = &inputs.scales {
            let mut on_device = |scales: &[f32]| -> Result<u64, Error> {
                held.push(upload(bytemuck::cast_slice(scales))?);
                Ok(held[held.len() - 1].address())
            };
            tensors.scales = Some(DeviceScales {
                q: on_device(&scales.q)?,
                k: on_device(&scales.k)?,
                v: on_device(&scales.v)?,
            });
        }
        let maps = variant
            .tensor_maps
            .iter()
            .map(|wanted| Ok(TensorMap::encode(device, &tensors.tensor_map(problem, wanted)?)?))
            .collect::<Result<_, Error>>()?;
        Ok(Self { _inputs: held, o, lse, params: tensors.params(problem), maps })
    }

    fn download(&self, problem: &Problem) -> Result<Output, Error> {
        let mut output = fresh_output(problem);
        self.o.check()?;
        self.o.copy_to(output.o.bytes_mut())?;
        if let (Some(buffer), Some(lse)) = (&self.lse, &mut output.lse) {
            buffer.check()?;
            buffer.copy_to(lse.as_mut_slice())?;
        }
        Ok(output)
    }
}

struct LoadedCuda<'a> {
    problem: Problem,
    stream: &'a Stream,
    prepared: PreparedLaunch,
    sets: Vec<Set>,
    timed: Option<TimedGraph>,
}

/// Several launches over all input sets, replayed at once.
struct TimedGraph {
    graph: Graph,
    launches: usize,
}

impl LoadedCuda<'_> {
    fn launch(&self, set: usize) -> Result<(), evosdpa_cuda::Error> {
        let Set { params, maps, .. } = &self.sets[set];
        // SAFETY: parameters and maps describe the buffers of this set, which live as long as `self`, and `LoadedCuda`
        // waits for every launch before it returns.
        unsafe { self.prepared.launch(self.stream, params, maps) }
    }

    fn elapsed_us(&self, work: impl FnOnce() -> Result<(), evosdpa_cuda::Error>) -> Result<f64, Error> {
        let (start, end) = (Event::new(self.stream)?, Event::new(self.stream)?);
        start.record(self.stream)?;
        work()?;
        end.record(self.stream)?;
        end.wait(LIMIT, &self.prepared.describe())?;
        Ok(end.elapsed_us(&start)?)
    }

    fn capture(&self) -> Result<TimedGraph, Error> {
        self.elapsed_us(|| self.launch(0))?;
        let once_us = self.elapsed_us(|| self.launch(0))?;
        let launches = ((GRAPH_US / once_us.max(1.0)) as usize).clamp(1, GRAPH_LAUNCHES_MAX);
        // Whole turns through the sets, so that every set is used equally often.
        let launches = launches.next_multiple_of(self.sets.len());
        let graph = Graph::capture(self.stream, || {
            (0..launches).try_for_each(|launch| self.launch(launch % self.sets.len()))
        })?;
        Ok(TimedGraph { graph, launches })
    }
}

impl Loaded for LoadedCuda<'_> {
    fn run(&mut self, set: usize) -> Result<Output, Error> {
        let buffers = &mut self.sets[set];
        buffers.o.poison()?;
        buffers.lse.as_mut().map(GuardedBuffer::poison).transpose()?;
        self.elapsed_us(|| self.launch(set))?;
        self.sets[set].download(&self.problem)
    }

    /// One launch's share of a graph replay over all sets.
    fn time_us(&mut self, _set: usize) -> Result<f64, Error> {
        if self.timed.is_none() {
            self.timed = Some(self.capture()?);
        }
        // Just put there.
        let Some(TimedGraph { graph, launches }) = &self.timed else { unreachable!("captured above") };
        let total_us = self.elapsed_us(|| graph.launch(self.stream))?;
        Ok(total_us / *launches as f64)
    }

    fn timed_output(&mut self, set: usize) -> Result<Output, Error> {
        self.sets[set].download(&self.problem)
    }
}
