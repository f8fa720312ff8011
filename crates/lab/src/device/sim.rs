//! The simulator: the same compiled kernels, run on this machine's processor by ptxsan, which watches every access.

use evosdpa_core::{Problem, inputs::Inputs};
use evosdpa_cuda::Builder;
use evosdpa_kernels::{Arch, ProblemFacts, Registry, Target, Variant};
use ptxsan::{Arg, Launch, Module, ModuleId, Schedule};

use super::{
    Device, KernelInfo, Loaded, Output, arguments,
    cuda::{listed, variant, variant_names},
    fresh_output,
};
use crate::Error;

/// The machine that is simulated: everything up to asynchronous copies and `mma.sync`.
const ARCH: Arch = Arch::Sm89;

/// Kernels compiled to PTX and run by ptxsan.
pub struct Sim {
    builder: Builder,
    registry: Registry,
    target: Target,
}

impl Sim {
    /// Finds the compiler; nothing else is needed.
    pub fn open(registry: Registry) -> Result<Self, Error> {
        Ok(Self::with_builder(registry, Builder::new()?))
    }

    /// With a builder of the caller's.
    pub fn with_builder(registry: Registry, builder: Builder) -> Self {
        Self { builder, registry, target: Target::nominal(ARCH) }
    }

    fn variant(&self, kernel: &str, problem: &Problem) -> Result<Variant, Error> {
        variant(&self.registry, kernel, &ProblemFacts::try_from(problem)?, &self.target)
    }
}

impl Device for Sim {
    fn name(&self) -> String {
        "sim".to_owned()
    }

    fn accelerator(&self) -> Option<String> {
        Some(format!("ptxsan simulating {}", self.target.arch))
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

    fn input_sets(&self, _problem: &Problem) -> usize {
        1
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        let variant = self.variant(kernel, problem)?;
        let artifact = self.builder.ptx(&variant)?;
        let module = Module::parse(artifact.ptx())?;
        Ok(Box::new(LoadedSim { problem: *problem, inputs, variant, module, runs: 0 }))
    }
}

struct LoadedSim<'a> {
    problem: Problem,
    inputs: &'a [Inputs],
    variant: Variant,
    module: Module,
    runs: usize,
}

impl Loaded for LoadedSim<'_> {
    /// Each run takes another schedule: what depends on the order in which warps run shows as a difference.
    fn run(&mut self, set: usize) -> Result<Output, Error> {
        let schedule = Schedule::ALL[self.runs % Schedule::ALL.len()];
        self.runs += 1;
        let mut device = ptxsan::Device::new();
        let id = device.load(&self.module)?;
        simulate(&mut device, id, &self.problem, &self.inputs[set], &self.variant, schedule)
    }

    fn time_us(&mut self, _set: usize) -> Result<f64, Error> {
        Err(Error::NoClock)
    }
}

fn simulate(
    device: &mut ptxsan::Device,
    id: ModuleId,
    problem: &Problem,
    inputs: &Inputs,
    variant: &Variant,
    schedule: Schedule,
) -> Result<Output, Error> {
    let mut output = fresh_output(problem);
    let views = [inputs.q.view(), inputs.k.view(), inputs.v.view(), output.o.view()];
    let mut read_only = |name: &str, bytes: &[u8]| -> Result<u64, Error> {
        let buffer = device.upload(name, bytes)?;
        device.set_read_only(buffer, true)?;
        Ok(buffer.address())
    };
    let (q, k, v) = (
        read_only("Q", inputs.q.bytes())?,
        read_only("K", inputs.k.bytes())?,
        read_only("V", inputs.v.bytes())?,
    );
    let mut scales = [0; 3];
    if let Some(given) = &inputs.scales {
        for (address, (name, scale)) in
            scales.iter_mut().zip([("Q scales", &given.q), ("K scales", &given.k), ("V scales", &given.v)])
        {
            *address = read_only(name, bytemuck::cast_slice(scale))?;
        }
    }
    let o = device.upload("O", output.o.bytes())?;
    let lse = output.lse.as_ref().map(|lse| device.upload("LSE", bytemuck::cast_slice(lse))).transpose()?;
    let mut params = arguments::params(problem, &views, [q, k, v, o.address()], lse.map(|lse| lse.address()));
    [params.q_scale, params.k_scale, params.v_scale] = scales;

    let geometry = &variant.launch;
    let args = vec![Arg::Bytes(bytemuck::bytes_of(&params).to_vec())];
    let launch =
        Launch::new(&variant.entry, geometry.grid, geometry.block, geometry.dynamic_smem_bytes, args)
            .with_schedule(schedule, 0);
    let outcome = device.launch(id, &launch)?;
    if !outcome.is_clean() {
        return Err(Error::Findings {
            kernel: variant.label(),
            findings: outcome.findings.iter().map(ToString::to_string).collect(),
        });
    }
    output.o.bytes_mut().copy_from_slice(&device.read(o)?);
    if let (Some(buffer), Some(values)) = (lse, &mut output.lse) {
        bytemuck::cast_slice_mut::<f32, u8>(values).copy_from_slice(&device.read(buffer)?);
    }
    Ok(output)
}
