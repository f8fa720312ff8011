//! The device of these tests.

use std::{cell::RefCell, collections::HashSet};

use evosdpa_core::Problem;
use evosdpa_lab::{
    Error,
    device::{
        Cpu, Device, DeviceId, KernelInfo, Loaded, LoadedCpu, Output, TimedDevice, TimedKernel, Timing,
        Turned,
    },
};
use evosdpa_oracle::inputs::Inputs;

/// Kernels that attend on the CPU. What their clock shows is written: those with this text in their name are four times as
/// fast as the others, however busy the machine is.
pub(crate) struct Stage {
    fast: &'static str,
    registered: RefCell<HashSet<String>>,
}

impl Stage {
    pub(crate) fn new(fast: &'static str) -> Self {
        Self { fast, registered: RefCell::default() }
    }
}

impl Device for Stage {
    fn id(&self) -> DeviceId {
        DeviceId::Cpu
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        Cpu::default().kernels()
    }

    fn refuses(&self, _: &str, _: &Problem) -> Option<String> {
        None
    }

    fn register_source(&self, _: &str, name: &str, _: &str) -> Result<(), Error> {
        self.registered.borrow_mut().insert(name.to_owned());
        Ok(())
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        Ok(self.load_timed(kernel, problem, inputs)?)
    }

    fn timed(&self) -> Option<&dyn TimedDevice> {
        Some(self)
    }
}

impl TimedDevice for Stage {
    fn input_sets(&self, _: &Problem) -> usize {
        2
    }

    fn load_timed<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
        let name = evosdpa_kernels::VariantId::kernel_of(kernel);
        assert!(
            !name.contains("_p") || self.registered.borrow().contains(name),
            "{name} was never registered"
        );
        let attention = evosdpa::Attention::plan(*problem, evosdpa::Device::Cpu)?;
        let body = move |inputs: &mut Inputs, output: &mut Output| {
            let Inputs { q, k, v, .. } = inputs;
            let lse = output.lse.as_deref_mut();
            Ok(attention.run(q.view(), k.view(), v.view(), output.o.view_mut(), lse)?)
        };
        let time_us = if kernel.contains(self.fast) { 100.0 } else { 400.0 };
        Ok(Box::new(Written { kernel: LoadedCpu::new(problem, inputs, Box::new(body)), time_us, calls: 0 }))
    }
}

/// A kernel that does its work and says that it took a time of the test's choice, give or take a thousandth.
struct Written {
    kernel: LoadedCpu,
    time_us: f64,
    calls: u32,
}

impl Loaded for Written {
    fn run(&mut self, set: usize) -> Result<Output, Error> {
        self.kernel.run(set)
    }

    fn changed_input(&mut self) -> Result<Option<String>, Error> {
        self.kernel.changed_input()
    }
}

impl TimedKernel for Written {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        self.kernel.time_us(set)?;
        self.calls += 1;
        Ok(self.time_us * (1.0 + f64::from(self.calls % 7) * 1e-3 / 7.0))
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), Error> {
        self.kernel.set_timing(timing)
    }

    fn refill(&mut self, set: usize, inputs: &Inputs, turned: Turned) -> Result<(), Error> {
        self.kernel.refill(set, inputs, turned)
    }

    fn poison(&mut self) -> Result<(), Error> {
        self.kernel.poison()
    }

    fn timed_outputs(&mut self, set: usize) -> Result<Vec<(usize, Output)>, Error> {
        self.kernel.timed_outputs(set)
    }
}
