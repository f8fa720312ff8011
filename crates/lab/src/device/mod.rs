//! Devices: where kernels run. One set of gates and measurements works on all of them.

mod ahead;
mod arguments;
mod cpu;
mod cuda;
pub mod id;
mod lock;
mod sim;
mod simulation;
mod submission;
mod timed;

pub use cpu::{Body, Cpu, LoadedCpu};
pub use cuda::Cuda;
pub use id::DeviceId;
pub use lock::DeviceLock;
pub use sim::{SCHEDULES, Sim};
pub use simulation::Simulation;
pub use submission::{SUBMISSION, WithSubmission};

use std::{fmt, str::FromStr};

use evosdpa_core::{DType, Layout, Problem, Tensor};
use evosdpa_oracle::inputs::Inputs;

use crate::{
    Error,
    measure::{Reading, floor::Ceilings, roof::Roof},
};

/// The name that leaves the choice of a kernel to the library.
pub const AUTO: &str = "auto";

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
    /// Which one it is.
    fn id(&self) -> DeviceId;

    /// What it is, when it is not the machine's own processor.
    fn accelerator(&self) -> Option<String> {
        None
    }

    /// A name that all its users on this machine know it by, where one at a time may measure it: whatever number each of them
    /// sees it under.
    fn lock_name(&self) -> Option<String> {
        None
    }

    /// The kernels it has, the simplest first.
    fn kernels(&self) -> Vec<KernelInfo>;

    /// Refuses a name whose tunables mean nothing on any problem.
    fn check_name(&self, kernel: &str) -> Result<(), Error> {
        let _ = kernel;
        Ok(())
    }

    /// Why a kernel cannot solve a problem, if it cannot.
    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String>;

    /// Whether a kernel reads elements of this type at all.
    fn takes(&self, kernel: &str, dtype: DType) -> bool {
        let _ = (kernel, dtype);
        true
    }

    /// Compiles ahead what [`Device::load`] will be asked for, as many at once as there are workers. What does not compile
    /// says so when it is loaded. `go_on` is asked before each with how many were begun, and of how many.
    fn prepare(
        &self,
        work: &[(String, Problem)],
        workers: usize,
        go_on: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> Result<(), Error> {
        let _ = (work, workers, go_on);
        Ok(())
    }

    /// Every variant of a kernel for a problem, as names that [`Device::load`] takes; at most `cap`.
    fn variants(&self, kernel: &str, problem: &Problem, cap: usize) -> Result<Vec<String>, Error> {
        let _ = (problem, cap);
        Ok(vec![kernel.to_owned()])
    }

    /// Takes in another source for a kernel, under a name of its own; everything else stays as its manifest says.
    fn register_source(&self, of: &str, name: &str, source: &str) -> Result<(), Error> {
        let _ = (name, source);
        Err(Error::Tune(format!(
            "{of} is part of the program: only CUDA kernels can be given another source"
        )))
    }

    /// Prepares a kernel for a problem, with one or more sets of inputs.
    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error>;

    /// The same device with its clock, where it has one.
    fn timed(&self) -> Option<&dyn TimedDevice> {
        None
    }
}

/// A device on which calls can be timed.
pub trait TimedDevice: Device {
    /// How many sets of inputs to rotate through, so that no call finds its data in a cache by accident.
    fn input_sets(&self, problem: &Problem) -> usize;

    /// The most the device can do with a problem's bytes and operations, where that is known: measured anew whenever it is
    /// asked for.
    fn ceilings(&self, problem: &Problem) -> Result<Option<Ceilings>, Error> {
        let _ = problem;
        Ok(None)
    }

    /// The roof over the problem, where it is known.
    fn roof(&self, problem: &Problem) -> Option<Roof> {
        let _ = problem;
        None
    }

    /// What two clock readings with nothing between them say, where that is not nothing.
    fn clock_overhead_us(&self) -> Result<Option<f64>, Error> {
        Ok(None)
    }

    /// Prepares a kernel to be timed on a problem, with several sets of inputs to rotate through.
    fn load_timed<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error>;
}

/// How calls are timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// On a GPU, one launch's share of a graph replay that rotates through all sets of inputs; on a CPU, one call.
    #[default]
    Graph,
    /// The same with one set of inputs, which is then in the caches.
    Warm,
    /// Each launch by itself between two clock readings, rotating through all sets.
    Single,
    /// Each launch by itself, its inputs driven out of the caches before.
    Cold,
    /// As by graph, with a small foreign kernel before every launch whose own time is subtracted: what a model feels. Only
    /// a GPU has it.
    Between,
}

impl Timing {
    /// Every way.
    pub const ALL: [Self; 5] = [Self::Graph, Self::Warm, Self::Single, Self::Cold, Self::Between];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Graph => "graph",
            Self::Warm => "warm",
            Self::Single => "single",
            Self::Cold => "cold",
            Self::Between => "between",
        }
    }
}

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Timing {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|timing| timing.name() == text).ok_or_else(|| {
            Error::Problem(evosdpa_core::Error::UnknownName {
                kind: "timing",
                name: text.to_owned(),
                nearest: evosdpa_core::error::nearest(text, Self::ALL.iter().map(|timing| timing.name())),
                allowed: Self::ALL.map(Self::name).join(", "),
            })
        })
    }
}

/// A kernel ready to run on its inputs.
pub trait Loaded {
    /// Runs once on input set `set` into a buffer poisoned with NaN.
    fn run(&mut self, set: usize) -> Result<Output, Error>;

    /// The variant that runs, where that is more than the name it was loaded by.
    fn variant(&self) -> Option<String> {
        None
    }

    /// The first input, by name, that is not what was put there. A device whose inputs cannot be written has none.
    fn changed_input(&mut self) -> Result<Option<String>, Error> {
        Ok(None)
    }
}

/// A kernel that can be timed and, between timed calls, audited.
pub trait TimedKernel: Loaded {
    /// Runs once on input set `set` and says how long the call took, in microseconds.
    fn time_us(&mut self, set: usize) -> Result<f64, Error>;

    /// The same for one call by itself, however calls are timed otherwise.
    fn time_alone_us(&mut self, set: usize) -> Result<f64, Error> {
        self.time_us(set)
    }

    /// As [`TimedKernel::time_us`], with the device's clock around it where that can be read.
    fn read(&mut self, set: usize) -> Result<Reading, Error> {
        Ok(Reading { time_us: self.time_us(set)?, clock_ghz: None })
    }

    /// Chooses how calls are timed from now on.
    fn set_timing(&mut self, timing: Timing) -> Result<(), Error>;

    /// Moves its tensors to other addresses, where that is cheap, and makes a call there.
    fn relocate(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Puts other inputs where those of a set are, turned so far. Outputs stay as they are.
    fn refill(&mut self, set: usize, inputs: &Inputs, turned: Turned) -> Result<(), Error>;

    /// Fills every output that timed calls write with NaN.
    fn poison(&mut self) -> Result<(), Error>;

    /// What lies in the outputs that a timed call on `set` writes, each with the set it belongs to.
    fn timed_outputs(&mut self, set: usize) -> Result<Vec<(usize, Output)>, Error>;
}

/// By how many bytes Q, K and V are moved round in their buffers: the same numbers in other places, without a copy of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turned(pub [usize; 3]);

impl Turned {
    /// Where they are.
    pub const NOT: Self = Self([0; 3]);

    /// The bytes of a buffer in the order in which they are put into it; Q, K and V are the first three.
    fn pieces(self, buffer: usize, bytes: &[u8]) -> [&[u8]; 2] {
        let (last, first) = bytes.split_at(self.0.get(buffer).copied().unwrap_or(0).min(bytes.len()));
        [first, last]
    }
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
    output_in(Tensor::poisoned_gaps, problem)
}

/// The same without the NaN: for a copy of another.
pub(super) fn blank_output(problem: &Problem) -> Output {
    output_in(Tensor::with_gaps, problem)
}

fn output_in(make: fn([usize; 4], DType, Layout, usize) -> Tensor, problem: &Problem) -> Output {
    let o = make(problem.o_shape(), problem.output_dtype(), problem.layout(), OUTPUT_ROW_GAP);
    Output { o, lse: problem.lse().then(|| vec![f32::NAN; problem.rows()]) }
}
