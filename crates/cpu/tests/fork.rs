//! A forked child has none of its parent's threads: calls there must neither wait for them nor run on one thread ever after.
#![cfg(target_os = "linux")]

use evosdpa_core::{DType, Problem, SideInputs, Tensor};
use evosdpa_cpu::{CpuKernel, CpuOptions, attention};
use evosdpa_oracle::inputs::{Family, Inputs};

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(code: i32) -> !;
}

fn compute(problem: &Problem, inputs: &Inputs) -> Vec<u8> {
    let mut output = Tensor::zeros(problem.o_shape(), problem.dtype(), problem.layout());
    let options = CpuOptions { threads: Some(3), ..CpuOptions::default() };
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let side = SideInputs::default();
    attention(CpuKernel::Flash, problem, q, k, v, &side, output.view_mut(), None, &options).unwrap();
    output.view().bytes().to_vec()
}

fn threads_of_this_process() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

#[test]
fn a_forked_child_has_a_pool_of_its_own() {
    let problem = Problem::new("b1h8s256d64".parse().unwrap(), DType::F32).unwrap();
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let expected = compute(&problem, &inputs);
    // SAFETY: the child only computes and leaves without running anything of the parent's.
    let child = unsafe { fork() };
    if child == 0 {
        let alone = threads_of_this_process();
        let right = compute(&problem, &inputs) == expected;
        let code = if !right { 1 } else { i32::from(alone != 1 || threads_of_this_process() != 3) * 2 };
        // SAFETY: ends this process at once.
        unsafe { _exit(code) };
    }
    assert!(child > 0, "fork failed");
    let mut status = -1;
    // SAFETY: `status` is valid, and the child is this process's own.
    let ended = unsafe { waitpid(child, &raw mut status, 0) };
    assert_eq!((ended, status), (child, 0), "1 << 8: another result; 2 << 8: no workers");
}
