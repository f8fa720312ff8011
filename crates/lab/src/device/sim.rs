//! The simulator: the same compiled kernels, run on this machine's processor by ptxsan, which watches every access.

use std::sync::atomic::{AtomicUsize, Ordering};

use evosdpa_core::{DType, Problem};
use evosdpa_cuda::{Artifact, ArtifactKind, Builder};
use evosdpa_kernels::{Arch, Kernel, ProblemFacts, Registry, Target, Variant, VariantId};
use evosdpa_oracle::inputs::Inputs;
use ptxsan::{Module, Options, Schedule, count::Counters};

use super::{
    Device, DeviceId, KernelInfo, Loaded, Output, Simulation, ahead,
    cuda::{listed, variant, variant_names},
};
use crate::Error;

/// The machines that are simulated, the one that most kernels are for first: a kernel runs on the first that it was written for.
const ARCHS: [Arch; 2] = [Arch::Sm89, Arch::Sm90a];

/// In how many orders warps are run: as many launches as that see all of them.
pub const SCHEDULES: usize = Schedule::ALL.len();

/// Kernels compiled to PTX and run by ptxsan.
pub struct Sim {
    builder: Builder,
    registry: Registry,
    /// Kernels loaded so far: each starts with another schedule, so that a sweep goes through all of them.
    loads: AtomicUsize,
    /// What to simulate first, where a kernel was written for it.
    first: Arch,
}

impl Sim {
    /// Finds the compiler; nothing else is needed.
    pub fn open(registry: Registry) -> Result<Self, Error> {
        Ok(Self::with_builder(registry, Builder::new()?))
    }

    /// With a builder of the caller's.
    pub fn with_builder(registry: Registry, builder: Builder) -> Self {
        Self { builder, registry, loads: AtomicUsize::new(0), first: ARCHS[0] }
    }

    /// The same, with another machine before the others.
    pub fn preferring(self, first: Arch) -> Self {
        Self { first, ..self }
    }

    /// The kernels it knows, and the mutants.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Compiles a kernel by name, to be run with all that ptxsan has to say.
    pub fn simulation(&self, kernel: &str, problem: &Problem) -> Result<Simulation, Error> {
        self.compiled(self.variant(kernel, problem)?, problem)
    }

    /// Compiles a kernel by name, and no more.
    pub fn compile(&self, kernel: &str, problem: &Problem) -> Result<(Variant, Artifact), Error> {
        let variant = self.variant(kernel, problem)?;
        let artifact = self.builder.ptx(&variant)?;
        Ok((variant, artifact))
    }

    /// As [`Sim::simulation`], for a kernel that cannot be chosen by name: a mutant.
    pub fn simulation_of(
        &self,
        kernel: &Kernel,
        tunables: &[(&str, i64)],
        problem: &Problem,
    ) -> Result<Simulation, Error> {
        let facts = ProblemFacts::try_from(problem)?;
        self.compiled(kernel.variant(&facts, &self.target_of(kernel), tunables.iter().copied())?, problem)
    }

    fn target_of(&self, kernel: &Kernel) -> Target {
        let has = |arch: &Arch| kernel.manifest.archs.contains(arch);
        Target::nominal([self.first].into_iter().chain(ARCHS).find(has).unwrap_or(self.first))
    }

    fn compiled(&self, variant: Variant, problem: &Problem) -> Result<Simulation, Error> {
        let artifact = self.builder.ptx(&variant)?;
        Simulation::new(*problem, variant, artifact.ptx())
    }

    /// The machine that a kernel is run on.
    pub fn target(&self, kernel: &str) -> Target {
        let known = self.registry.kernel(VariantId::kernel_of(kernel));
        known.map_or_else(|_| Target::nominal(self.first), |kernel| self.target_of(kernel))
    }

    /// Whether the simulator understands every instruction of a variant.
    pub fn understands(&self, variant: &Variant) -> Result<(), Error> {
        let module = Module::parse(self.builder.ptx(variant)?.ptx())?;
        module.parameters(&variant.entry)?;
        ptxsan::Device::new().load(&module)?;
        Ok(())
    }

    /// What a kernel executes on a problem: exact counts, whoever runs them. What a kernel does wrong is the hazard
    /// gate's to say; what it executed is counted all the same.
    pub fn count(&self, kernel: &str, problem: &Problem, inputs: &Inputs) -> Result<Counters, Error> {
        let (_, outcome) = self.simulation(kernel, problem)?.run(inputs, &Options::default())?;
        Ok(outcome.counters)
    }

    pub(crate) fn variant(&self, kernel: &str, problem: &Problem) -> Result<Variant, Error> {
        variant(&self.registry, kernel, &ProblemFacts::try_from(problem)?, &self.target(kernel))
    }
}

impl Device for Sim {
    fn id(&self) -> DeviceId {
        DeviceId::Sim
    }

    fn accelerator(&self) -> Option<String> {
        Some(format!("ptxsan simulating {}", ARCHS.map(Arch::name).join(" and ")))
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        listed(&self.registry)
    }

    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String> {
        self.variant(kernel, problem).err().map(|error| error.to_string())
    }

    fn takes(&self, kernel: &str, dtype: DType) -> bool {
        ahead::reads(&self.registry, kernel, dtype)
    }

    fn prepare(
        &self,
        work: &[(String, Problem)],
        workers: usize,
        go_on: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> Result<(), Error> {
        let variants = work.iter().filter_map(|(kernel, problem)| self.variant(kernel, problem).ok());
        ahead::compile(variants, ArtifactKind::Ptx, workers, go_on)
    }

    fn variants(&self, kernel: &str, problem: &Problem, cap: usize) -> Result<Vec<String>, Error> {
        variant_names(&self.registry, kernel, &ProblemFacts::try_from(problem)?, &self.target(kernel), cap)
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        let runs = self.loads.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(LoadedSim { inputs, simulation: self.simulation(kernel, problem)?, runs }))
    }
}

struct LoadedSim<'a> {
    inputs: &'a [Inputs],
    simulation: Simulation,
    runs: usize,
}

impl Loaded for LoadedSim<'_> {
    /// Each run takes another schedule: what depends on the order in which warps run shows as a difference.
    fn run(&mut self, set: usize) -> Result<Output, Error> {
        let schedule = Schedule::ALL[self.runs % Schedule::ALL.len()];
        self.runs += 1;
        let options = Options { schedule, ..Options::default() };
        let (output, outcome) = self.simulation.run(&self.inputs[set], &options)?;
        if !outcome.is_clean() {
            return Err(Error::Findings {
                kernel: format!("{} under schedule {}", self.simulation.label(), schedule.name()),
                findings: outcome.failures().map(ToString::to_string).collect(),
            });
        }
        Ok(output)
    }
}
