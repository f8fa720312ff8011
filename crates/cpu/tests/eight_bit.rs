//! 8-bit problems are refused by name, and nothing is written.

use evosdpa_core::{DType, Problem, Tensor};
use evosdpa_cpu::{CpuKernel, CpuOptions, Error, attention};
use evosdpa_oracle::inputs::{Family, Inputs};

#[test]
fn eight_bit_problems_are_refused() {
    for dtype in DType::EIGHT_BIT {
        let problem = Problem::new("tiny".parse().unwrap(), dtype).unwrap();
        let inputs = Inputs::generate(&problem, Family::Normal, 1);
        for kernel in [CpuKernel::Naive, CpuKernel::Flash] {
            let mut o = Tensor::poisoned_gaps(problem.o_shape(), problem.output_dtype(), problem.layout(), 0);
            let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
            let error = attention(kernel, &problem, q, k, v, o.view_mut(), None, &CpuOptions::default());
            assert!(matches!(error, Err(Error::DType { given }) if given == dtype), "{error:?}");
            assert!(o.bytes().iter().all(|&byte| byte == 0xFF));
        }
    }
}
