//! One compiled variant on the simulator, with all that ptxsan has to say about a run of it.

use evosdpa_core::Problem;
use evosdpa_kernels::Variant;
use evosdpa_oracle::inputs::Inputs;
use ptxsan::{Arg, Launch, Module, Options, Outcome};

use super::{Output, arguments, fresh_output};
use crate::Error;

/// A variant compiled for the simulator, and the problem it was compiled for.
pub struct Simulation {
    problem: Problem,
    variant: Variant,
    module: Module,
}

impl Simulation {
    pub(super) fn new(problem: Problem, variant: Variant, ptx: &str) -> Result<Self, Error> {
        Ok(Self { problem, variant, module: Module::parse(ptx)? })
    }

    /// The variant, as it is called: `sdpa_v2b[MAX_BLOCK_N=64]`.
    pub fn label(&self) -> String {
        self.variant.label()
    }

    /// The variant, with its launch geometry.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// The decoded PTX.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// Runs on these inputs: the output, and the findings and counters of the run. Findings are no error here.
    pub fn run(&self, inputs: &Inputs, options: &Options) -> Result<(Output, Outcome), Error> {
        self.run_module(&self.module, inputs, options)
    }

    /// As [`Simulation::run`], with another module in place of the compiled one: for what was changed on purpose.
    pub fn run_module(
        &self,
        module: &Module,
        inputs: &Inputs,
        options: &Options,
    ) -> Result<(Output, Outcome), Error> {
        let mut device = ptxsan::Device::new();
        let id = device.load(module)?;
        let mut output = fresh_output(&self.problem);
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
            let named = [("Q scales", &given.q), ("K scales", &given.k), ("V scales", &given.v)];
            for (address, (name, scale)) in scales.iter_mut().zip(named) {
                *address = read_only(name, bytemuck::cast_slice(scale))?;
            }
        }
        let o = device.upload("O", output.o.bytes())?;
        let lse =
            output.lse.as_ref().map(|lse| device.upload("LSE", bytemuck::cast_slice(lse))).transpose()?;
        let addresses = [q, k, v, o.address()];
        let mut params = arguments::params(&self.problem, &views, addresses, lse.map(|lse| lse.address()));
        [params.q_scale, params.k_scale, params.v_scale] = scales;

        let geometry = &self.variant.launch;
        let args = vec![Arg::Bytes(bytemuck::bytes_of(&params).to_vec())];
        let (grid, block, shared) = (geometry.grid, geometry.block, geometry.dynamic_smem_bytes);
        let mut launch = Launch::new(&self.variant.entry, grid, block, shared, args);
        launch.options = options.clone();
        let outcome = device.launch(id, &launch)?;
        output.o.bytes_mut().copy_from_slice(&device.read(o)?);
        if let (Some(buffer), Some(values)) = (lse, &mut output.lse) {
            bytemuck::cast_slice_mut::<f32, u8>(values).copy_from_slice(&device.read(buffer)?);
        }
        Ok((output, outcome))
    }
}
