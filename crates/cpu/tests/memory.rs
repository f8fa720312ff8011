//! How much memory the streaming kernel really takes, as the operating system sees it. A process of its own, because
//! the peak of a process is that of all its tests.
#![cfg(target_os = "linux")]

use evosdpa_core::{DType, Problem, SideInputs, Tensor};
use evosdpa_cpu::{CpuKernel, CpuOptions, attention};
use evosdpa_oracle::inputs::{Family, Inputs};

/// The largest resident set of this process so far.
fn peak_resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn flash_stays_under_twice_the_tensors() {
    let problem = Problem::new("b1h8s16384d64".parse().unwrap(), DType::F32).unwrap();
    let tensors_bytes = problem.bytes();
    let Inputs { q, k, v, .. } = Inputs::generate(&problem, Family::Uniform, 1);
    let mut o = Tensor::zeros(problem.o_shape(), DType::F32, problem.layout());
    let options = CpuOptions { threads: Some(2), ..CpuOptions::default() };
    attention(
        CpuKernel::Flash,
        &problem,
        q.view(),
        k.view(),
        v.view(),
        &SideInputs::default(),
        o.view_mut(),
        None,
        &options,
    )
    .unwrap();
    let peak_bytes = peak_resident_bytes();
    assert!(peak_bytes < 2 * tensors_bytes, "{peak_bytes} of {tensors_bytes} bytes of tensors");
}
