//! The roofline: how far a launch is from what the machine could do with its operations and bytes.

use evosdpa_core::Problem;
use evosdpa_kernels::Arch;
use serde::{Deserialize, Serialize};

use super::{metric::Metric, values::Values};
use crate::measure::roof::tensor_flops_per_sm_cycle;

/// What a problem needs, whatever the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Operations.
    pub flops: f64,
    /// Bytes that must move: every input read once, every output written once.
    pub compulsory_bytes: f64,
}

impl From<&Problem> for Work {
    fn from(problem: &Problem) -> Self {
        Self { flops: problem.flops(), compulsory_bytes: problem.bytes() as f64 }
    }
}

/// Where a launch stands under the roof.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    /// Operations of the problem over the launch's time.
    pub achieved_tflops: f64,
    /// What the tensor cores could do at the clock of the launch.
    pub tensor_peak_tflops: f64,
    /// What the memory could move; absent where the capture does not say.
    pub dram_peak_gbps: Option<f64>,
    /// Bytes that went through device memory.
    pub dram_bytes: f64,
    /// Bytes that had to.
    pub compulsory_bytes: f64,
    /// Operations per byte moved.
    pub intensity: f64,
    /// The roof over that intensity.
    pub roof_tflops: f64,
    /// Achieved, of the roof.
    pub of_roof: f64,
}

impl Roofline {
    /// Derives the roofline; `None` where the capture does not say how many SMs there are or how fast they ran.
    pub fn derive(values: &Values, arch: Arch, work: &Work) -> Option<Self> {
        let (sms, clock) = (values.value(Metric::SmCount)?, values.value(Metric::SmClock)?);
        let duration = values.required(Metric::Duration);
        if duration <= 0.0 {
            return None;
        }
        let tensor_peak_tflops = sms * clock * tensor_flops_per_sm_cycle(arch) / 1e12;
        let dram_bytes = values.required(Metric::DramReadBytes) + values.required(Metric::DramWriteBytes);
        let per_cycle = values.value(Metric::DramPeakPerCycle).zip(values.value(Metric::DramClock));
        let dram_peak_gbps = per_cycle.map(|(bytes, clock)| bytes * clock / 1e9).filter(|gbps| *gbps > 0.0);
        let intensity = work.flops / dram_bytes.max(1.0);
        let under_memory = dram_peak_gbps.map(|gbps| intensity * gbps / 1e3);
        let roof_tflops = under_memory.map_or(tensor_peak_tflops, |memory| memory.min(tensor_peak_tflops));
        let achieved_tflops = work.flops / duration / 1e12;
        Some(Self {
            achieved_tflops,
            tensor_peak_tflops,
            dram_peak_gbps,
            dram_bytes,
            compulsory_bytes: work.compulsory_bytes,
            intensity,
            roof_tflops,
            of_roof: achieved_tflops / roof_tflops,
        })
    }
}
