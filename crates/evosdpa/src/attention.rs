//! One API over the backends.

use evosdpa_core::{Problem, TensorView, TensorViewMut};
use evosdpa_cpu::{CpuKernel, CpuOptions, FlashTiles, Isa};

use crate::Error;

/// How attention is to be computed, where the planner is not to choose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The kernel; the planner takes the fastest when this is `None`.
    pub kernel: Option<CpuKernel>,
    /// Threads on a CPU; all of them when this is `None`.
    pub threads: Option<usize>,
    /// Instruction set on a CPU; the best there is when this is `None`.
    pub isa: Option<Isa>,
    /// Tile sizes of the streaming CPU kernel; chosen from the head dimensions when this is `None`.
    pub tiles: Option<FlashTiles>,
}

/// A problem with the decision how to compute it.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    problem: Problem,
    kernel: CpuKernel,
    cpu: CpuOptions,
}

impl Attention {
    /// Chooses how to compute a problem on this machine.
    pub fn plan(problem: Problem) -> Result<Self, Error> {
        Self::plan_with(problem, Options::default())
    }

    /// Chooses what `options` leave open.
    pub fn plan_with(problem: Problem, options: Options) -> Result<Self, Error> {
        let cpu = CpuOptions { threads: options.threads, isa: options.isa, tiles: options.tiles };
        // Checks the options now rather than at the first call.
        evosdpa_cpu::workspace_bytes(&problem, &cpu)?;
        Ok(Self { problem, kernel: options.kernel.unwrap_or(CpuKernel::Flash), cpu })
    }

    /// What is asked.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The kernel that was chosen.
    pub fn kernel(&self) -> &'static str {
        self.kernel.name()
    }

    /// Computes attention. `lse`, when given, receives the natural log-sum-exp of each row, `[batch, query heads,
    /// queries]`. Tensors that do not fit the problem are refused before anything is written.
    ///
    /// Rows that see no key give O = 0 and LSE = −∞. A visible score that is NaN or +∞ makes its row NaN.
    pub fn run(
        &self,
        q: TensorView<'_>,
        k: TensorView<'_>,
        v: TensorView<'_>,
        o: TensorViewMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        Ok(evosdpa_cpu::attention(self.kernel, &self.problem, q, k, v, o, lse, &self.cpu)?)
    }
}
