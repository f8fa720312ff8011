//! Every CUDA kernel runs here, on the CPU, under the correctness gate and the race detector: no GPU needed.

use evosdpa_core::{DType, Problem, inputs::Family};
use evosdpa_kernels::Registry;
use evosdpa_lab::{
    device::{Device, Sim},
    gate::{
        Verdict, correctness,
        suite::{self, CaseSpec, Group},
    },
};

fn sim() -> Sim {
    // The compiler comes from `cargo xtask setup`; without it there is nothing to test, and that is a failure.
    Sim::open(Registry::embedded().unwrap()).unwrap()
}

/// Passed cases by kernel and dtype; panics with every failure.
fn check_all(device: &Sim, specs: &[CaseSpec], kernels: &[String]) -> usize {
    let mut passed = 0;
    let mut failures = Vec::new();
    for spec in specs {
        let case = spec.build();
        for kernel in kernels {
            let result = correctness::check(device, kernel, &case, None).unwrap();
            match result.verdict {
                Verdict::Pass => passed += 1,
                Verdict::Fail(why) => failures.push(format!("{kernel} on {}: {why}", spec.label())),
                Verdict::Unavailable(_) => {}
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    passed
}

#[test]
fn sixteen_bit_kernels_are_right_and_free_of_races() {
    let device = sim();
    let kernels: Vec<String> = device.kernels().into_iter().map(|kernel| kernel.name).collect();
    for dtype in [DType::F16, DType::BF16] {
        let passed = check_all(&device, &suite::simulated(dtype).unwrap(), &kernels);
        // v1, v2b, v2c and ampere_fwd take all six cases, fa_s512_v3 its one length.
        assert!(passed >= 25, "only {passed} cases ran for {dtype}");
    }
}

#[test]
fn every_toggle_of_the_eight_bit_kernel_is_right() {
    let device = sim();
    let case = |text: &str, dtype| CaseSpec {
        group: Group::Simulated,
        problem: Problem::new(text.parse().unwrap(), dtype).unwrap().with_lse(true),
        family: Family::Normal,
        seed: 1,
        row_gap: Some(16),
    };
    for (dtype, text) in [(DType::U8, "b1h1s40/33d64:causal-br"), (DType::E4M3, "b1h1s33d64")] {
        let spec = case(text, dtype);
        let variants = device.variants("sdpa_fp8_stage_c", &spec.problem, 4096).unwrap();
        assert!(variants.len() > 50, "only {} variants", variants.len());
        assert_eq!(check_all(&device, &[spec], &variants), variants.len());
    }
}
