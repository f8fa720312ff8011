//! One compiled variant on the simulator, with the findings and counters of its runs.

use evosdpa_core::{DType, Problem};
use evosdpa_cuda::TensorMapRequest;
use evosdpa_kernels::{Swizzle, Variant, WORKSPACE_COUNTER_BYTES};
use evosdpa_oracle::inputs::Inputs;
use ptxsan::{Arg, Launch, Module, Options, Outcome, TensorElement, TensorMap, tensor::wgmma};

use super::{Output, arguments, fresh_output};
use crate::Error;

/// A variant compiled for the simulator, and the problem it was compiled for.
pub struct Simulation {
    problem: Problem,
    variant: Variant,
    module: Module,
}

/// The same request that a GPU's driver gets, for the simulator. Rules are checked as for a GPU.
fn tensor_map(request: &TensorMapRequest<'_>) -> Result<TensorMap, Error> {
    request.check()?;
    let bytes = request.dtype.bytes() as u64;
    let element = match request.dtype {
        DType::F16 => TensorElement::F16,
        DType::BF16 => TensorElement::Bf16,
        DType::F32 => TensorElement::F32,
        DType::U8 | DType::E4M3 | DType::I8 => TensorElement::U8,
    };
    let swizzle = match request.swizzle {
        Swizzle::None => wgmma::Swizzle::None,
        Swizzle::Bytes32 => wgmma::Swizzle::Bytes32,
        Swizzle::Bytes64 => wgmma::Swizzle::Bytes64,
        Swizzle::Bytes128 => wgmma::Swizzle::Bytes128,
    };
    Ok(TensorMap {
        address: request.address,
        element,
        sizes: request.sizes.to_vec(),
        strides_bytes: request.strides.iter().map(|stride| stride * bytes).collect(),
        box_sizes: request.box_sizes.to_vec(),
        element_strides: vec![1; 4],
        swizzle,
        is_nan_outside: false,
    })
}

impl Simulation {
    pub(super) fn new(problem: Problem, variant: Variant, ptx: &str) -> Result<Self, Error> {
        Ok(Self { problem, variant, module: Module::parse(ptx)? })
    }

    /// The same with at most so many blocks, for a kernel that walks its work with as many as there are: on a GPU a small problem has
    /// a block for each piece of work, and code for the next piece would not be reached.
    pub fn on_blocks(mut self, most: u32) -> Self {
        let grid = &mut self.variant.launch.grid[0];
        *grid = (*grid).min(most);
        self
    }

    /// The same without a workspace, as where there is no memory left for one.
    pub fn without_workspace(mut self) -> Self {
        self.variant.launch.workspace_bytes = 0;
        self
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
        let mut placed = Vec::new();
        for (name, bytes) in arguments::buffers(inputs) {
            let buffer = device.upload(name, bytes)?;
            device.set_read_only(buffer, true)?;
            placed.push((name, buffer.address()));
        }
        let place =
            |wanted: &str| placed.iter().find(|(name, _)| *name == wanted).map(|(_, address)| *address);
        let o = device.upload("O", output.o.bytes())?;
        let lse =
            output.lse.as_ref().map(|lse| device.upload("LSE", bytemuck::cast_slice(lse))).transpose()?;
        let written = (output.o.view(), o.address());
        let tensors =
            arguments::tensors(&self.problem, inputs, &place, written, lse.map(|lse| lse.address()));
        tensors.check(&self.problem)?;
        let mut params = tensors.params(&self.problem);
        let geometry = &self.variant.launch;
        let counter = geometry.counter.then(|| device.upload("work counter", &[0; 4])).transpose()?;
        params.counter = counter.map_or(0, |counter| counter.address());
        let workspace = match geometry.workspace_bytes as usize {
            0 => None,
            bytes => Some(device.upload("workspace", &vec![0; bytes])?),
        };
        params.workspace = workspace.map_or(0, |workspace| workspace.address());
        let mut args = vec![Arg::Bytes(bytemuck::bytes_of(&params).to_vec())];
        for wanted in &self.variant.tensor_maps {
            let map = tensor_map(&tensors.tensor_map(&self.problem, wanted)?)?;
            args.push(Arg::Bytes(map.encode()?.to_vec()));
        }
        let (grid, block, shared) = (geometry.grid, geometry.block, geometry.dynamic_smem_bytes);
        let mut launch = Launch::new(&self.variant.entry, grid, block, shared, args);
        launch.cluster = geometry.cluster;
        launch.options = Options { programmatic: geometry.programmatic, ..options.clone() };
        let outcome = device.launch(id, &launch)?;
        if let Some(counter) = counter.filter(|_| outcome.is_clean())
            && device.read(counter)? != [0; 4]
        {
            let findings =
                vec!["the work counter is not left at 0, where the next launch needs it".to_owned()];
            return Err(Error::Findings { kernel: self.label(), findings });
        }
        if let Some(workspace) = workspace.filter(|_| outcome.is_clean())
            && device.read(workspace)?[..WORKSPACE_COUNTER_BYTES as usize].iter().any(|byte| *byte != 0)
        {
            let findings = vec![
                "the workspace's counters are not left at 0, where the next launch needs them".to_owned(),
            ];
            return Err(Error::Findings { kernel: self.label(), findings });
        }
        output.o.bytes_mut().copy_from_slice(&device.read(o)?);
        if let (Some(buffer), Some(values)) = (lse, &mut output.lse) {
            bytemuck::cast_slice_mut::<f32, u8>(values).copy_from_slice(&device.read(buffer)?);
        }
        Ok((output, outcome))
    }
}
