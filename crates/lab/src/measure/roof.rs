//! The roofline: how much of what a device could do with a problem's operations and bytes a time is.

use evosdpa_core::DType;
use evosdpa_kernels::Arch;

use super::work::Work;

/// The roof over a problem on a device. Unlike the floor, which no honest time can be below, it is what people compare with: the
/// rate of the units that the problem's type runs on, and the memory's.
#[derive(Clone, Debug, PartialEq)]
pub struct Roof {
    /// Operations, 10⁹ a second.
    pub gflops: f64,
    /// Bytes, 10⁹ a second, where the inputs must come from memory; those that stay in a cache have no such roof.
    pub gbps: Option<f64>,
}

impl Roof {
    /// Of a GPU: its tensor cores at their highest clock, for the type of the inputs, and its memory.
    pub fn of_gpu(arch: Arch, dtype: DType, sm_count: u32, clock_khz: u32, gbps: Option<f64>) -> Self {
        let of_type = match dtype {
            // As TF32, which tensor cores multiply half as fast.
            DType::F32 => 0.5,
            DType::F16 | DType::BF16 => 1.0,
            DType::U8 | DType::E4M3 | DType::I8 => 2.0,
        };
        let per_cycle = of_type * tensor_flops_per_sm_cycle(arch);
        Self { gflops: per_cycle * f64::from(sm_count) * f64::from(clock_khz) * 1e-6, gbps }
    }

    /// The share of the roof that a call of this length reaches.
    pub fn share(&self, work: impl Into<Work>, time_us: f64) -> f64 {
        let Work { flops, bytes } = work.into();
        let at_best = |amount: f64, rate: f64| amount / rate / 1e3;
        let operations_us = at_best(flops, self.gflops);
        let bytes_us = self.gbps.map_or(0.0, |gbps| at_best(bytes, gbps));
        operations_us.max(bytes_us) / time_us
    }
}

/// Dense fp16 operations of one SM in one cycle (NVIDIA's architecture whitepapers: the peak rate over SMs and boost clock; H100
/// 989 TFLOP/s over 132 at 1.83 GHz, A100 312 over 108 at 1.41, A10 125 over 72 at 1.70, L4 121 over 58 at 2.04). 8-bit types run
/// at twice this.
pub(crate) fn tensor_flops_per_sm_cycle(arch: Arch) -> f64 {
    match arch {
        Arch::Sm80 => 2048.0,
        Arch::Sm86 | Arch::Sm89 => 1024.0,
        Arch::Sm90a => 4096.0,
    }
}

#[cfg(test)]
mod tests {
    use evosdpa_core::Problem;

    use super::*;

    fn problem(text: &str) -> Problem {
        Problem::new(text.parse().unwrap(), DType::BF16).unwrap()
    }

    #[test]
    fn the_steeper_side_of_the_roof_counts() {
        let roof = |gbps| Roof::of_gpu(Arch::Sm90a, DType::BF16, 132, 1_830_000, gbps);
        // The data sheet's 989 TFLOP/s.
        assert!((roof(None).gflops - 989_000.0).abs() < 1_000.0, "{roof:?}", roof = roof(None));
        let dense = problem("long128");
        let at_best_us = dense.flops() / roof(None).gflops / 1e3;
        assert!((roof(Some(4_800.0)).share(&dense, 2.0 * at_best_us) - 0.5).abs() < 1e-9);
        // One query against a long cache: bytes.
        let decode = problem("b64h32/8s1/8192d128");
        let bytes_us = decode.bytes() as f64 / 4_800.0 / 1e3;
        assert!((roof(Some(4_800.0)).share(&decode, bytes_us) - 1.0).abs() < 1e-9);
        assert!(roof(None).share(&decode, bytes_us) < 0.1);
        let eight_bit = Roof::of_gpu(Arch::Sm90a, DType::E4M3, 132, 1_830_000, None);
        assert_eq!(eight_bit.gflops, 2.0 * roof(None).gflops);
    }
}
