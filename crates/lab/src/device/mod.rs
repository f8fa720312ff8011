//! Devices: where kernels run. One set of gates and measurements works on all of them.

mod arguments;
mod cpu;
mod cuda;
mod sim;
mod simulation;

pub use cpu::Cpu;
pub use cuda::Cuda;
pub use sim::Sim;
pub use simulation::Simulation;

use evosdpa_core::{Problem, Tensor, inputs::Inputs};

use crate::Error;

/// A kernel as `evosdpa kernels` lists it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct KernelInfo {
    /// Its name.
    pub name: String,
    /// What it is, in a line.
    pub summary: String,
    /// The kernel it grew from.
    pub parent: Option<String>,
    /// What it changed against its parent, and why.
    pub changed: String,
}

/// A place to run kernels.
pub trait Device {
    /// Its name on the command line.
    fn name(&self) -> String;

    /// What it is, when it is not the machine's own processor.
    fn accelerator(&self) -> Option<String> {
        None
    }

    /// The kernels it has, the baseline first.
    fn kernels(&self) -> Vec<KernelInfo>;

    /// Why a kernel cannot solve a problem, if it cannot.
    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String>;

    /// Every variant of a kernel for a problem, as names that [`Device::load`] takes; at most `cap`.
    fn variants(&self, kernel: &str, problem: &Problem, cap: usize) -> Result<Vec<String>, Error> {
        let _ = (problem, cap);
        Ok(vec![kernel.to_owned()])
    }

    /// How many sets of inputs to rotate through, so that no call finds its data in a cache by accident.
    fn input_sets(&self, problem: &Problem) -> usize;

    /// Prepares a kernel for a problem, with several sets of inputs to rotate through.
    fn load<'a>(
        &'a self,
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
    /// The log-sum-exp of each row, when the problem asks for it.
    pub lse: Option<Vec<f32>>,
}

/// Gap in elements between the rows of an output: canaries that a stray write would overwrite.
pub const OUTPUT_ROW_GAP: usize = 16;

/// An output buffer full of NaN, with gaps around each row.
pub fn fresh_output(problem: &Problem) -> Output {
    let o =
        Tensor::poisoned_gaps(problem.o_shape(), problem.output_dtype(), problem.layout(), OUTPUT_ROW_GAP);
    Output { o, lse: problem.lse().then(|| vec![f32::NAN; problem.rows()]) }
}
