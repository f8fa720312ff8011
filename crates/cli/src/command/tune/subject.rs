//! What is tuned: kernel, problems and device, as the command line says.

use std::time::Duration;

use anyhow::Context;
use evosdpa::choose;
use evosdpa_core::{DType, Problem};
use evosdpa_cuda::worker::CompilePool;
use evosdpa_kernels::{ProblemFacts, Registry, Target};
use evosdpa_lab::{
    device::{Cpu, Device, DeviceId, TimedDevice},
    evolve::{
        Point, Space,
        ahead::{Ahead, Compiling, Nothing},
    },
    machine::Environment,
    profile::{Ncu, Session},
};

use crate::{
    args::{Place, Tune},
    command::{chosen_kernel, refused_device},
};

/// Seconds one compilation may take.
const COMPILE_LIMIT: Duration = Duration::from_secs(120);

/// What is tuned.
pub(super) struct Subject {
    pub(super) device: Box<dyn TimedDevice>,
    /// Why it is not a GPU, where the choice was left open.
    pub(super) no_gpu: Option<String>,
    pub(super) space: Space,
    pub(super) problems: Vec<Problem>,
    pub(super) ahead: Box<dyn Ahead>,
    pub(super) constraints: Option<Constraints>,
    pub(super) device_name: String,
    pub(super) arch: String,
}

/// A CUDA kernel's constraints on every problem.
pub(super) struct Constraints {
    pub(super) registry: Registry,
    pub(super) kernel: String,
    pub(super) target: Target,
    facts: Vec<ProblemFacts>,
}

impl Constraints {
    pub(super) fn new(
        registry: Registry,
        kernel: &str,
        target: Target,
        problems: &[Problem],
    ) -> anyhow::Result<Self> {
        let facts = problems.iter().map(ProblemFacts::try_from).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { registry, kernel: kernel.to_owned(), target, facts })
    }

    pub(super) fn broken(&self, point: &Point) -> Option<String> {
        let kernel = self.registry.kernel(&self.kernel).ok()?;
        let chosen = point.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        let broken = |facts| {
            choose::variant(kernel, facts, &self.target, &chosen).err().map(|error| error.to_string())
        };
        self.facts.iter().find_map(broken)
    }

    /// What the same kernels are profiled with.
    pub(super) fn session(&self, device: DeviceId, args: &Tune) -> anyhow::Result<Session> {
        let limit = Duration::from_secs_f64(args.profile_timeout);
        let ncu = Ncu::find(args.ncu.as_deref());
        let session = Session::open(self.registry.clone(), self.target, device, ncu, limit)?;
        Ok(session.with_kernel_path(&args.common.kernel_path))
    }
}

/// The problems of a tune on a device that takes `dtype` when nothing is said.
pub(super) fn problems(args: &Tune, dtype: DType) -> anyhow::Result<Vec<Problem>> {
    let of = |shape| Problem::new(shape, args.dtype.unwrap_or(dtype));
    args.shapes.iter().map(|shape| of(*shape)).collect::<Result<Vec<_>, _>>().context("--shapes")
}

/// The element type of a CUDA kernel when nothing is said.
pub(super) fn first_dtype(registry: &Registry, kernel: &str) -> anyhow::Result<DType> {
    Ok(registry.kernel(kernel)?.manifest.dtypes.first().copied().unwrap_or(DType::BF16))
}

pub(super) fn workers(args: &Tune) -> usize {
    let cores = || std::thread::available_parallelism().map_or(2, |n| n.get());
    args.workers.map_or_else(cores, |workers| workers as usize)
}

impl Subject {
    /// `ordinal` is the GPU that stands for `cuda` and `auto`.
    pub(super) fn find(args: &Tune, ordinal: usize) -> anyhow::Result<Self> {
        let mut no_gpu = None;
        let cuda = match args.common.device {
            Place::On(DeviceId::Cpu) => None,
            Place::On(DeviceId::Sim) => {
                anyhow::bail!("the simulator has no clock: use --device cuda or cpu to tune")
            }
            // A CPU kernel is tuned on the CPU, GPU or not.
            Place::Auto if args.kernel.as_deref() == Some("cpu_flash") => None,
            Place::Auto => {
                args.common.open_cuda(ordinal).map_err(|why| no_gpu = Some(format!("{why:#}"))).ok()
            }
            Place::On(DeviceId::Cuda(0)) => Some(args.common.open_cuda(ordinal)?),
            Place::On(DeviceId::Cuda(ordinal)) => Some(args.common.open_cuda(ordinal)?),
            Place::None => {
                return Err(refused_device(args.common.device, &["auto", "cpu", "cuda", "cuda:N"]));
            }
        };
        let Some(cuda) = cuda else {
            let name = args.kernel.as_deref().unwrap_or("cpu_flash");
            let isa = args.common.forced_isa()?;
            let cpu = Cpu { threads: args.common.thread_count(), isa };
            chosen_kernel(&cpu, name, &args.common.kernel_path)?;
            anyhow::ensure!(name == "cpu_flash", "{name} has nothing to tune on a CPU; cpu_flash has");
            let environment = Environment::look(args.common.thread_count());
            let problems = problems(args, DType::F32)?;
            return Ok(Self {
                space: Space::of_cpu(&problems[0], environment.threads)?,
                device: Box::new(cpu),
                no_gpu,
                problems,
                ahead: Box::new(Nothing),
                constraints: None,
                device_name: environment.cpu,
                arch: isa.unwrap_or_else(evosdpa::Isa::best).name().to_owned(),
            });
        };
        let Some(name) = &args.kernel else {
            let names: Vec<String> = cuda.kernels().into_iter().map(|kernel| kernel.name).collect();
            anyhow::bail!("name the kernel to tune with --kernel: {}", names.join(", "));
        };
        let registry = cuda.registry();
        let problems = problems(args, first_dtype(&registry, name)?)?;
        let target = *cuda.target();
        let space = Space::of_kernel(registry.kernel(name)?, &problems[0], &target)?;
        let pool = CompilePool::new(workers(args), COMPILE_LIMIT)?;
        let ahead = Compiling::new(registry.clone(), target, &problems, pool, !args.no_sim)?;
        Ok(Self {
            space,
            ahead: Box::new(ahead),
            constraints: Some(Constraints::new(registry.clone(), name, target, &problems)?),
            problems,
            device_name: cuda.handle().info().name.clone(),
            arch: target.arch.name().to_owned(),
            device: Box::new(cuda),
            no_gpu: None,
        })
    }
}
