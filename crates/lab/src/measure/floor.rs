//! The floor under every time: what bytes and operations allow. A sample below it was not taken of the whole work.

use std::cell::RefCell;

use evosdpa_core::Problem;
use evosdpa_kernels::Arch;
use serde::{Deserialize, Serialize};

use super::{audit::Finding, roof::tensor_flops_per_sm_cycle, work::Work};
use crate::{Error, ErrorKind, device::TimedDevice};

/// The most a device can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Operations, 10⁹ a second.
    pub gflops: Option<f64>,
    /// Bytes, 10⁹ a second, from wherever the inputs may lie: the largest cache that holds them.
    pub gbps: Option<f64>,
    /// Where the numbers come from.
    pub source: String,
}

/// A call may meet a better moment than the best that was measured: the clock of a processor rises and falls.
const CPU_TURBO: f64 = 1.5;
/// Bytes that a core can read for each operation that it can do: two or three loads beside two multiply-adds of the same width,
/// or beside a multiplication and an addition.
const CPU_BYTES_PER_FLOP: f64 = 4.0;
/// A copy reaches half of what reading alone does, at worst.
const GPU_READ_OVER_COPY: f64 = 2.0;

impl Ceilings {
    /// From the best burst of multiply-adds that a CPU showed. Neither number follows the load of the machine: a burst is far
    /// shorter than a scheduler's slice.
    pub fn of_cpu(fma_ceiling_gflops: f64) -> Self {
        let gflops = fma_ceiling_gflops * CPU_TURBO;
        Self {
            gflops: Some(gflops),
            gbps: Some(gflops * CPU_BYTES_PER_FLOP),
            source: format!(
                "the best burst of fused multiply-adds times {CPU_TURBO}, and {CPU_BYTES_PER_FLOP} bytes for each of its \
                 operations"
            ),
        }
    }

    /// From a GPU's shape and the rate at which it copies what fits its L2.
    pub fn of_gpu(arch: Arch, sm_count: u32, clock_khz: u32, copy_gbps: Option<f64>) -> Self {
        let per_cycle = 2.0 * tensor_flops_per_sm_cycle(arch);
        Self {
            gflops: Some(per_cycle * f64::from(sm_count) * f64::from(clock_khz) * 1e-6),
            gbps: copy_gbps.map(|gbps| gbps * GPU_READ_OVER_COPY),
            source: format!(
                "8-bit tensor cores of {sm_count} SMs at their highest clock, {GPU_READ_OVER_COPY} times the measured \
                 rate of copies within the cache"
            ),
        }
    }

    /// With the better of each number.
    fn best_of(self, other: Self) -> Self {
        let better = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a.max(b)).or(a).or(b);
        Self { gflops: better(self.gflops, other.gflops), gbps: better(self.gbps, other.gbps), ..self }
    }

    /// No call on the problem can be shorter.
    pub fn floor_us(&self, work: impl Into<Work>) -> f64 {
        let Work { flops, bytes } = work.into();
        let of = |amount: f64, rate: Option<f64>| rate.map_or(0.0, |rate| amount / rate / 1e3);
        of(flops, self.gflops).max(of(bytes, self.gbps))
    }
}

/// How often a device is measured again before a kernel is called faster than possible.
const DOUBTS: usize = 25;

/// The floor of one problem on one device: from the best that was seen of the device so far.
#[derive(Debug, Default)]
pub struct Floor {
    best: RefCell<Option<Ceilings>>,
}

impl Floor {
    /// Measures the device once.
    pub fn look(device: &dyn TimedDevice, problem: &Problem) -> Result<Self, Error> {
        Ok(Self { best: RefCell::new(unless_the_machine_failed(device.ceilings(problem))?) })
    }

    /// No call can be shorter, as far as it is known.
    pub fn time_us(&self, work: impl Into<Work>) -> Option<f64> {
        self.best.borrow().as_ref().map(|best| best.floor_us(work))
    }

    /// Where the numbers come from.
    pub fn source(&self) -> String {
        self.best.borrow().as_ref().map(|best| best.source.clone()).unwrap_or_default()
    }

    /// What is wrong with a time, if it is too short. A doubt is first a reason to measure the device again, which may have
    /// been busy when it was measured last, and never a reason to think less of it.
    pub fn refuses(
        &self,
        device: &dyn TimedDevice,
        problem: &Problem,
        work: Work,
        time_us: f64,
    ) -> Result<Option<Finding>, Error> {
        for _ in 0..DOUBTS {
            if self.time_us(work).is_none_or(|floor_us| time_us >= floor_us) {
                return Ok(None);
            }
            if let Some(again) = unless_the_machine_failed(device.ceilings(problem))? {
                let best = self.best.take();
                self.best.replace(Some(best.map_or(again.clone(), |best| best.best_of(again))));
            }
        }
        let ns = |us: f64| (us * 1e3).round() as u64;
        let floor_us = self.time_us(work).unwrap_or(0.0);
        let finding = Finding::TooFast { time_ns: ns(time_us), floor_ns: ns(floor_us) };
        Ok((time_us < floor_us).then_some(finding))
    }
}

/// What is not known because the machine failed is left out: the rows that are there are worth more than it.
pub(crate) fn unless_the_machine_failed<T>(known: Result<Option<T>, Error>) -> Result<Option<T>, Error> {
    match known {
        Err(error) if error.kind() == ErrorKind::Machine => Ok(None),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use evosdpa_core::DType;

    use super::*;

    #[test]
    fn the_floor_is_the_larger_of_both_times() {
        let problem = Problem::new("long".parse().unwrap(), DType::BF16).unwrap();
        let ceilings = |gflops, gbps| Ceilings { gflops, gbps, source: String::new() };
        // 17.2 GFLOP at 1 TFLOP/s, and 16.8 MB at 1 GB/s.
        assert!((ceilings(Some(1e3), None).floor_us(&problem) - 17_180.0).abs() < 1.0);
        assert!((ceilings(Some(1e3), Some(1.0)).floor_us(&problem) - 17_180.0).abs() < 1.0);
        assert!((ceilings(None, Some(0.5)).floor_us(&problem) - 33_554.0).abs() < 1.0);
        assert_eq!(ceilings(None, None).floor_us(&problem), 0.0);
        // An H200's best attention, about 700 TFLOP/s, is well above its floor.
        let h200 = Ceilings::of_gpu(Arch::Sm90a, 132, 1_980_000, Some(4000.0));
        assert!((5.0..25.0).contains(&h200.floor_us(&problem)), "{}", h200.floor_us(&problem));
    }
}
