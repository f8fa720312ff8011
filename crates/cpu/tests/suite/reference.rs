//! An attention computed in the plainest way in f64, and the comparison with it.

use evosdpa_core::inputs::Inputs;
use evosdpa_core::{DType, Problem, Tensor};
use evosdpa_cpu::{CpuKernel, CpuOptions, Isa, attention};

/// Every way a problem can be computed here: both kernels, every instruction set.
pub(crate) fn ways() -> Vec<(CpuKernel, CpuOptions)> {
    let mut ways = vec![(CpuKernel::Naive, CpuOptions { threads: Some(2), ..CpuOptions::default() })];
    for isa in Isa::available() {
        let options = CpuOptions { threads: Some(2), isa: Some(isa), tiles: None };
        ways.push((CpuKernel::Flash, options));
    }
    ways
}

/// Output rows widened to f64, and the LSE.
pub(crate) struct Answer {
    pub(crate) o: Vec<f64>,
    pub(crate) lse: Vec<f64>,
    /// Per output element, the weighted mean of |V|: what rounding errors are proportional to.
    pub(crate) magnitude: Vec<f64>,
}

/// The reference answer for inputs as rounded to their dtype.
pub(crate) fn reference(problem: &Problem, inputs: &Inputs) -> Answer {
    let (sizes, band) = (problem.sizes(), problem.band());
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let (mut query, mut key, mut value) = (Vec::new(), Vec::new(), Vec::new());
    let mut answer = Answer { o: Vec::new(), lse: Vec::new(), magnitude: Vec::new() };
    for b in 0..sizes.batch {
        for h in 0..sizes.heads_q {
            let kv_head = h / problem.group();
            for i in 0..sizes.seq_q {
                q.row_f64(b, h, i, &mut query);
                let visible = band.visible(i, sizes.seq_kv);
                let mut scores = Vec::new();
                for j in visible.clone() {
                    k.row_f64(b, kv_head, j, &mut key);
                    let dot: f64 = query.iter().zip(&key).map(|(x, y)| x * y).sum();
                    scores.push(dot * f64::from(problem.scale()));
                }
                let maximum = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
                let sum: f64 = scores.iter().map(|s| (s - maximum).exp()).sum();
                let (mut row, mut size) = (vec![0.0; sizes.dim_v], vec![0.0; sizes.dim_v]);
                for (j, score) in visible.zip(&scores) {
                    v.row_f64(b, kv_head, j, &mut value);
                    let weight = (score - maximum).exp() / sum;
                    for d in 0..sizes.dim_v {
                        row[d] += weight * value[d];
                        size[d] += weight * value[d].abs();
                    }
                }
                answer.o.extend(row);
                answer.magnitude.extend(size);
                answer.lse.push(if scores.is_empty() { f64::NEG_INFINITY } else { maximum + sum.ln() });
            }
        }
    }
    answer
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
    let mut o = Tensor::poisoned_gaps(problem.o_shape(), problem.dtype(), problem.layout(), gap);
    let mut lse = vec![f32::NAN; problem.rows()];
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    attention(kernel, problem, q, k, v, o.view_mut(), Some(&mut lse), options).unwrap();
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

/// Bytes of an output, for bit-for-bit comparison.
pub(crate) fn bytes(o: &Tensor) -> Vec<u8> {
    o.bytes().to_vec()
}

/// Asserts that an output is right: f32 arithmetic's error on the scores (largest |score| `reach`) turned into a relative error of
/// the weights, plus the output format's rounding.
pub(crate) fn assert_right(
    problem: &Problem,
    what: &str,
    answer: &Answer,
    o: &Tensor,
    lse: &[f32],
    reach: f64,
) {
    let f32_round = f64::powi(2.0, -24);
    let sizes = problem.sizes();
    // A score is a sum of dim_qk products, a weight's exponent inherits its absolute error; sums over the keys add theirs.
    let score_error = f32_round * (reach + 1.0) * (4.0 + (sizes.dim_qk as f64).sqrt() * 2.0);
    let relative = 2.0 * score_error + f32_round * (16.0 + 2.0 * (sizes.seq_kv as f64).sqrt());
    let got = elements(problem, o);
    for (at, (x, want)) in got.iter().zip(&answer.o).enumerate() {
        let rounding =
            if problem.dtype() == DType::F32 { 0.0 } else { problem.dtype().rounding_error(*want) };
        let bound = relative * answer.magnitude[at] + 1.01 * rounding + 1e-37;
        assert!(
            (x - want).abs() <= bound,
            "{what} {problem}: element {at} is {x}, not {want} (bound {bound:e})"
        );
    }
    for (row, (x, want)) in lse.iter().zip(&answer.lse).enumerate() {
        let x = f64::from(*x);
        let bound = relative + f32_round * 4.0 * (want.abs() + 1.0);
        assert!(x == *want || (x - want).abs() <= bound, "{what} {problem}: LSE {row} is {x}, not {want}");
    }
}
