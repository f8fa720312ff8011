//! Rows whose weights do not come as a kernel expects them: tiles are run again for these, and for these alone.

use crate::correctness::check;
use crate::promises::set;
use crate::running::{elements, run, ways};
use evosdpa_core::{DType, Float, Layout, Problem, Tensor};
use evosdpa_oracle::inputs::{Family, Inputs};
use evosdpa_oracle::{Question, solve_output};

fn problem(shape: &str, dtype: DType) -> Problem {
    Problem::new(shape.parse().unwrap(), dtype).unwrap()
}

/// A bias of zeros but for some keys of some rows.
fn bias(problem: &Problem, of: impl Fn(usize, usize) -> f32) -> Tensor {
    let sizes = problem.sizes();
    let mut bias = Tensor::zeros([1, 1, sizes.seq_q, sizes.seq_kv], problem.dtype(), Layout::Bhsd);
    for row in 0..sizes.seq_q {
        for key in 0..sizes.seq_kv {
            set(&mut bias, [0, 0, row, key], of(row, key));
        }
    }
    bias
}

/// The first keys hold a row's weight, each so little that far more would make it negligible; and nothing more comes.
#[test]
fn weights_that_all_come_first_are_not_rounded() {
    let problem = problem("b1h1s240/1000d64:bias", DType::BF16);
    for first in [1, 4, 6, 7, 12] {
        let mut inputs = Inputs::generate(&problem, Family::Normal, 3);
        inputs.side.bias = Some(bias(&problem, |_, key| if key < first { 10.0 } else { 0.0 }));
        let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
        let wanted = solve_output(&Question::new(&problem, [q, k, v], &inputs.side()).unwrap());
        for (kernel, options) in ways() {
            let got = elements(&problem, &run(&problem, &inputs, kernel, &options).0);
            for (at, (got, want)) in got.iter().zip(&wanted).enumerate() {
                let allowed = 1e-3 + Float::BF16.rounding_error(*want);
                let error = (got - want).abs();
                assert!(error <= allowed, "{first} keys, {kernel:?} {options:?} {at}: {got}, not {want}");
            }
        }
    }
}

/// Rows of some sixty equal weights, of which rounding all would move a few elements in ten million by more than 1e-3: these seeds have one each.
#[test]
fn rounding_stays_within_the_tolerance_where_weights_are_neither_few_nor_many() {
    for seed in [2, 11, 15, 25] {
        check(&problem("b1h8s160d64:o=f32", DType::BF16), Family::Normal, seed);
        check(&problem("b1h4s300d64:causal:o=f32", DType::BF16), Family::Normal, seed);
    }
}

/// Whatever makes a tile run again, a row keeps its bits.
#[test]
fn a_row_knows_nothing_of_its_neighbours_bias() {
    const ODD: usize = 21;
    for dtype in [DType::F32, DType::BF16] {
        let problem = problem("b1h1s60/700d40:bias", dtype);
        let plain = |row: usize, key: usize| ((row * 7 + key * 13) % 31) as f32 * 0.1;
        let mut inputs = Inputs::generate(&problem, Family::Normal, 5);
        for (kernel, options) in ways() {
            let mut answer = |odd: &dyn Fn(usize) -> f32| {
                inputs.side.bias =
                    Some(bias(&problem, |row, key| if row == ODD { odd(key) } else { plain(row, key) }));
                let o = elements(&problem, &run(&problem, &inputs, kernel, &options).0);
                o.chunks(40).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect::<Vec<Vec<u64>>>()
            };
            let wanted = answer(&|key| plain(ODD, key));
            let odd: [&dyn Fn(usize) -> f32; 5] = [
                &|key| if key < 7 { 10.0 } else { 0.0 },
                &|_| f32::NEG_INFINITY,
                &|_| f32::MIN,
                &|key| if key == 3 { f32::MAX } else { 0.0 },
                &|_| f32::NAN,
            ];
            for (number, odd) in odd.iter().enumerate() {
                let got = answer(odd);
                for row in 0..60 {
                    let same = got[row] == wanted[row];
                    assert_eq!(same, row != ODD, "{number} {dtype} {kernel:?} {options:?} row {row}");
                }
            }
        }
    }
}
