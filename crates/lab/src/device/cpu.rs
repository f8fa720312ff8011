//! The machine's own processor.

use evosdpa::{Attention, CpuKernel, Isa, Options};
use evosdpa_core::{DType, Problem, inputs::Inputs};

use super::{Device, KernelInfo, Loaded, Output, fresh_output};
use crate::Error;

/// Inputs below this size fit a last-level cache, so two sets of them take turns.
const ROTATE_BELOW_BYTES: u64 = 32 << 20;

/// The machine's own processor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    /// Threads to use; all when `None`.
    pub threads: Option<usize>,
    /// Instruction set; the best when `None`.
    pub isa: Option<Isa>,
}

impl Cpu {
    const KERNELS: [CpuKernel; 2] = [CpuKernel::Naive, CpuKernel::Flash];
}

fn describe(kernel: CpuKernel) -> KernelInfo {
    let (summary, parent, changed) = match kernel {
        CpuKernel::Naive => (
            "writes the scores of a row out, then reads them back: the baseline",
            None,
            "nothing: it is where the line starts",
        ),
        CpuKernel::Flash => (
            "streaming softmax over packed tiles, AVX-512, AVX2 or portable",
            Some(CpuKernel::Naive),
            "scores live in registers and the first-level cache only; masked tiles are skipped; heads that share keys \
             are packed together",
        ),
    };
    KernelInfo {
        name: kernel.name().to_owned(),
        summary: summary.to_owned(),
        parent: parent.map(|parent| parent.name().to_owned()),
        changed: changed.to_owned(),
    }
}

impl Device for Cpu {
    fn name(&self) -> String {
        "cpu".to_owned()
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        Self::KERNELS.map(describe).to_vec()
    }

    fn refuses(&self, _kernel: &str, problem: &Problem) -> Option<String> {
        let dtype = problem.dtype();
        dtype.is_eight_bit().then(|| format!("no CPU kernel for {dtype}; use f32, f16 or bf16"))
    }

    fn takes(&self, _kernel: &str, dtype: DType) -> bool {
        !dtype.is_eight_bit()
    }

    fn input_sets(&self, problem: &Problem) -> usize {
        if problem.bytes() < ROTATE_BELOW_BYTES { 2 } else { 1 }
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        let Some(kernel) = Self::KERNELS.into_iter().find(|known| known.name() == kernel) else {
            return Err(crate::unknown_kernel(self, kernel));
        };
        let options = Options { kernel: Some(kernel), threads: self.threads, isa: self.isa, tiles: None };
        let attention = Attention::plan_with(*problem, options)?;
        let outputs = inputs.iter().map(|_| fresh_output(problem)).collect();
        Ok(Box::new(LoadedCpu { attention, inputs, outputs }))
    }
}

struct LoadedCpu<'a> {
    attention: Attention,
    inputs: &'a [Inputs],
    outputs: Vec<Output>,
}

impl Loaded for LoadedCpu<'_> {
    fn run(&mut self, set: usize) -> Result<Output, Error> {
        let mut output = fresh_output(self.attention.problem());
        call(&self.attention, &self.inputs[set], &mut output)?;
        Ok(output)
    }

    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        let start = std::time::Instant::now();
        call(&self.attention, &self.inputs[set], &mut self.outputs[set])?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    fn timed_output(&mut self, set: usize) -> Result<Output, Error> {
        Ok(self.outputs[set].clone())
    }
}

fn call(attention: &Attention, Inputs { q, k, v, .. }: &Inputs, output: &mut Output) -> Result<(), Error> {
    Ok(attention.run(q.view(), k.view(), v.view(), output.o.view_mut(), output.lse.as_deref_mut())?)
}
