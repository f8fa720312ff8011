//! The floor under every time: what bytes and operations allow. A sample below it was not taken of the whole work.

use evosdpa_core::Problem;
use evosdpa_kernels::Arch;
use serde::{Deserialize, Serialize};

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
/// Caches are faster than memory by at most about this much.
const CPU_CACHE_OVER_MEMORY: f64 = 40.0;
/// A copy reaches half of what reading alone does, at worst.
const GPU_READ_OVER_COPY: f64 = 2.0;

impl Ceilings {
    /// From what a CPU run measures at its start. The median of a busy machine is no ceiling: an undisturbed call is faster.
    pub fn of_cpu(fma_ceiling_gflops: Option<f64>, memory_gbps: Option<f64>) -> Self {
        Self {
            gflops: fma_ceiling_gflops.map(|peak| peak * CPU_TURBO),
            gbps: memory_gbps.map(|gbps| gbps * CPU_CACHE_OVER_MEMORY),
            source: format!(
                "the best burst of fused multiply-adds times {CPU_TURBO}, memory bandwidth times {CPU_CACHE_OVER_MEMORY}"
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

    /// No call on the problem can be shorter.
    pub fn floor_us(&self, problem: &Problem) -> f64 {
        let of = |amount: f64, rate: Option<f64>| rate.map_or(0.0, |rate| amount / rate / 1e3);
        of(problem.flops(), self.gflops).max(of(problem.bytes() as f64, self.gbps))
    }
}

/// Dense fp16 operations of one SM in one cycle (NVIDIA's architecture whitepapers: the peak rate over
/// SMs and boost clock). 8-bit types run at twice this.
fn tensor_flops_per_sm_cycle(arch: Arch) -> f64 {
    match arch {
        Arch::Sm80 => 2048.0,
        Arch::Sm86 | Arch::Sm89 => 1024.0,
        Arch::Sm90a => 4096.0,
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
