//! Devices: where kernels run. One set of gates and measurements works on all of them.

use evosdpa::{Attention, CpuKernel, Isa, Options};
use evosdpa_core::{Problem, Tensor, inputs::Inputs};

use crate::Error;

/// A kernel as `evosdpa kernels` lists it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct KernelInfo {
    /// Its name.
    pub name: &'static str,
    /// What it is, in a line.
    pub summary: &'static str,
    /// The kernel it grew from.
    pub parent: Option<&'static str>,
    /// What it changed against its parent, and why.
    pub changed: &'static str,
}

/// A place to run kernels.
pub trait Device {
    /// Its name on the command line.
    fn name(&self) -> String;

    /// The kernels it has, the baseline first.
    fn kernels(&self) -> Vec<KernelInfo>;

    /// Why a kernel cannot solve a problem, if it cannot.
    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String>;

    /// Prepares a kernel for a problem, with several sets of inputs to rotate through.
    fn load<'a>(
        &self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error>;
}

/// A kernel ready to run on its inputs.
pub trait Loaded {
    /// Runs once on input set `set` into a buffer poisoned with NaN.
    fn run(&mut self, set: usize) -> Result<Output, Error>;

    /// Runs once on input set `set` and says how long the call took, in microseconds.
    fn time_us(&mut self, set: usize) -> Result<f64, Error>;

    /// What the last timed call on `set` left in its buffer.
    fn timed_output(&mut self, set: usize) -> Result<Output, Error>;
}

/// What a run left behind.
#[derive(Clone, Debug)]
pub struct Output {
    /// The output, in a buffer with gaps around each row.
    pub o: Tensor,
    /// The log-sum-exp of each row.
    pub lse: Vec<f32>,
}

/// The machine's own processor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    /// Threads to use; all when `None`.
    pub threads: Option<usize>,
    /// Instruction set; the best when `None`.
    pub isa: Option<Isa>,
}

impl Cpu {
    const KERNELS: [(CpuKernel, KernelInfo); 2] = [
        (
            CpuKernel::Naive,
            KernelInfo {
                name: "cpu_naive",
                summary: "writes the scores of a row out, then reads them back: the baseline",
                parent: None,
                changed: "nothing: it is where the line starts",
            },
        ),
        (
            CpuKernel::Flash,
            KernelInfo {
                name: "cpu_flash",
                summary: "streaming softmax over packed tiles, AVX-512, AVX2 or portable",
                parent: Some("cpu_naive"),
                changed: "scores live in registers and the first-level cache only; masked tiles are skipped; heads that \
                          share keys are packed together",
            },
        ),
    ];
}

impl Device for Cpu {
    fn name(&self) -> String {
        "cpu".to_owned()
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        Self::KERNELS.map(|(_, info)| info).to_vec()
    }

    fn refuses(&self, _kernel: &str, problem: &Problem) -> Option<String> {
        let dtype = problem.dtype();
        dtype.is_eight_bit().then(|| format!("no CPU kernel for {dtype}; use f32, f16 or bf16"))
    }

    fn load<'a>(
        &self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        let known = Self::KERNELS.iter().find(|(_, info)| info.name == kernel);
        let Some((kernel, _)) = known else {
            return Err(crate::kernel_names(self).unknown(kernel));
        };
        let options = Options { kernel: Some(*kernel), threads: self.threads, isa: self.isa, tiles: None };
        let attention = Attention::plan_with(*problem, options)?;
        let outputs = inputs.iter().map(|_| fresh_output(problem)).collect();
        Ok(Box::new(LoadedCpu { attention, inputs, outputs }))
    }
}

/// Gap in elements between the rows of an output: canaries that a stray write would overwrite.
pub const OUTPUT_ROW_GAP: usize = 16;

/// An output buffer full of NaN, with gaps around each row.
pub fn fresh_output(problem: &Problem) -> Output {
    let o =
        Tensor::poisoned_gaps(problem.o_shape(), problem.output_dtype(), problem.layout(), OUTPUT_ROW_GAP);
    Output { o, lse: vec![f32::NAN; problem.rows()] }
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
    Ok(attention.run(q.view(), k.view(), v.view(), output.o.view_mut(), Some(&mut output.lse))?)
}
