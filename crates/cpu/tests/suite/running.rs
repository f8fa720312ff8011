//! Running every kernel in every way.

use evosdpa_core::{Problem, Tensor};
use evosdpa_cpu::{CpuKernel, CpuOptions, Isa, attention};
use evosdpa_oracle::inputs::Inputs;
use std::sync::Once;

/// Every way a problem can be computed here: both kernels, every instruction set.
pub(crate) fn ways() -> Vec<(CpuKernel, CpuOptions)> {
    let mut ways = vec![(CpuKernel::Naive, CpuOptions { threads: Some(2), ..CpuOptions::default() })];
    let mut isas = isas();
    if MODEL_IS_SLOW {
        isas.push(Isa::AmxModel);
    }
    for isa in isas {
        let options = CpuOptions { threads: Some(2), isa: Some(isa), tiles: None };
        ways.push((CpuKernel::Flash, options));
    }
    ways
}

/// Where tests are emulated the model of matrix tiles is left to those that ask each way once.
const MODEL_IS_SLOW: bool = cfg!(target_arch = "aarch64");

/// The instruction sets of this machine and, where it has no matrix tiles, a model of them.
pub(crate) fn isas() -> Vec<Isa> {
    static TOLD: Once = Once::new();
    let mut isas = Isa::available();
    if !Isa::Amx.is_available() && !MODEL_IS_SLOW {
        isas.push(Isa::AmxModel);
    }
    TOLD.call_once(|| {
        eprintln!(
            "instruction sets run: {}",
            isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
        );
        for isa in Isa::ALL {
            if let Some(lacks) = isa.lacks() {
                eprintln!("UNAVAILABLE: {isa}; this machine lacks {lacks}");
            }
        }
    });
    isas
}

/// Runs a kernel into an output full of NaN.
pub(crate) fn run(
    problem: &Problem,
    inputs: &Inputs,
    kernel: CpuKernel,
    options: &CpuOptions,
) -> (Tensor, Vec<f32>) {
    run_gapped(problem, inputs, kernel, options, 0)
}

/// Runs a kernel into an output full of NaN whose rows are `gap` elements further apart than needed.
pub(crate) fn run_gapped(
    problem: &Problem,
    inputs: &Inputs,
    kernel: CpuKernel,
    options: &CpuOptions,
    gap: usize,
) -> (Tensor, Vec<f32>) {
    let mut o = Tensor::poisoned_gaps(problem.o_shape(), problem.output_dtype(), problem.layout(), gap);
    let mut lse = vec![f32::NAN; problem.rows()];
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    attention(kernel, problem, q, k, v, &inputs.side(), o.view_mut(), Some(&mut lse), options).unwrap();
    (o, lse)
}

/// All output elements, row by row.
pub(crate) fn elements(problem: &Problem, o: &Tensor) -> Vec<f64> {
    let sizes = problem.sizes();
    let (mut row, mut all) = (Vec::new(), Vec::new());
    for b in 0..sizes.batch {
        for h in 0..sizes.heads_q {
            for i in 0..sizes.seq_q {
                o.view().row_f64(b, h, i, &mut row);
                all.extend_from_slice(&row);
            }
        }
    }
    all
}
