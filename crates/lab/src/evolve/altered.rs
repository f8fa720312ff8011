//! A CPU device for tests, with one part replaced by a fake.

use evosdpa_core::Problem;
use evosdpa_oracle::inputs::Inputs;

use crate::{
    Error,
    device::{Cpu, Device, DeviceId, KernelInfo, Loaded, TimedDevice, TimedKernel},
    measure::floor::Ceilings,
};

/// One thread: what tests tune takes microseconds.
pub(crate) const CPU: Cpu = Cpu { threads: Some(1), isa: None };

/// What a test is about; the rest is the CPU's.
pub(crate) trait Alteration {
    fn lock_name(&self) -> Option<String> {
        None
    }

    fn ceilings(&self, problem: &Problem) -> Result<Option<Ceilings>, Error>;

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error>;
}

/// A device that is the CPU but for what `T` does.
pub(crate) struct Altered<T>(pub(crate) T);

impl<T: Alteration> Device for Altered<T> {
    fn id(&self) -> DeviceId {
        CPU.id()
    }

    fn lock_name(&self) -> Option<String> {
        self.0.lock_name()
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        CPU.kernels()
    }

    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String> {
        CPU.refuses(kernel, problem)
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        Ok(self.0.load(kernel, problem, inputs)?)
    }
}

impl<T: Alteration> TimedDevice for Altered<T> {
    fn input_sets(&self, problem: &Problem) -> usize {
        CPU.input_sets(problem)
    }

    fn ceilings(&self, problem: &Problem) -> Result<Option<Ceilings>, Error> {
        self.0.ceilings(problem)
    }

    fn load_timed<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
        self.0.load(kernel, problem, inputs)
    }
}
