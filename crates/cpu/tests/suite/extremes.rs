//! Sizes at the ends of what a problem can say.

use crate::correctness::check;
use crate::running::{isas, run};
use evosdpa_core::{DType, Layout, Problem, SideInputs, Tensor, TensorView};
use evosdpa_cpu::{CpuKernel, CpuOptions, attention};
use evosdpa_oracle::inputs::{Family, Inputs};

fn problem(shape: &str, dtype: DType) -> Problem {
    Problem::new(shape.parse().unwrap(), dtype).unwrap()
}

/// Every head dimension around a register's width, and both ends; few queries and more than a tile of them.
#[test]
fn every_head_dimension() {
    for (seed, dim) in (1..=33).chain([63, 65, 127, 129, 191, 193, 255, 257, 320, 321, 511, 512]).enumerate()
    {
        let other = if dim % 3 == 0 { dim } else { 1 + (dim * 7) % 60 };
        for (queries, dtype) in [(2, DType::F32), (19, DType::BF16), (9, DType::F16), (1, DType::BF16)] {
            let shape = format!("b1h2/1s{queries}/23d{dim}/{other}:causal-br");
            check(&problem(&shape, dtype), Family::Normal, seed as u64);
        }
    }
}

/// Every pair of short lengths, and windows that reach beyond both.
#[test]
fn every_short_length() {
    for queries in 1..10 {
        for keys in 1..10 {
            for mask in ["", ":causal", ":causal-br", ":window=1/1", ":window=100000/7"] {
                let shape = format!("b1h2s{queries}/{keys}d5{mask}");
                check(&problem(&shape, DType::BF16), Family::Normal, (queries * 10 + keys) as u64);
            }
        }
    }
}

/// Most of them with nothing to do.
#[test]
fn ten_thousand_tiny_sequences() {
    for seed in 0..4 {
        check(&problem("b10000h1s3/4d8:causal-br:varlen", DType::F32), Family::Normal, seed);
    }
}

#[test]
fn a_hundred_thousand_pages_of_one_key() {
    for (shape, dtype) in [
        ("b1h2/1s1/100000d8:used:paged=1", DType::F32),
        ("b1h2/1s1/100000d8:used:paged=1:kv=i8", DType::BF16),
        ("b1h1s20/100000d8:used:paged=1", DType::BF16),
    ] {
        check(&problem(shape, dtype), Family::Normal, 1);
    }
}

/// Four heads of two sequences where there is one of one.
fn repeat(tensor: &Tensor, keys: usize, dim: usize) -> TensorView<'_> {
    let dtype = tensor.view().dtype();
    TensorView::new(tensor.bytes(), dtype, [2, 4, keys, dim], [0, 0, dim, 1]).unwrap()
}

/// One sequence and one head of keys, repeated by strides of zero, are as good as copies.
#[test]
fn keys_repeated_by_strides() {
    for (queries, keys, dim) in [(1, 300, 40), (70, 130, 64)] {
        for dtype in [DType::F32, DType::BF16] {
            let repeated = problem(&format!("b2h4s{queries}/{keys}d{dim}:causal-br"), dtype);
            let shared = problem(&format!("b2h4/1s{queries}/{keys}d{dim}:causal-br"), dtype);
            let mut inputs = Inputs::generate(&shared, Family::Normal, 3);
            // Both sequences have the first one's keys.
            let one = |tensor: &Tensor| {
                let mut copy = Tensor::zeros(shared.k_shape(), dtype, Layout::Bhsd);
                let half = copy.bytes().len() / 2;
                let first = tensor.bytes()[..half].to_vec();
                copy.bytes_mut().chunks_mut(half).for_each(|part| part.copy_from_slice(&first));
                copy
            };
            (inputs.k, inputs.v) = (one(&inputs.k), one(&inputs.v));
            for isa in isas() {
                let options = CpuOptions { isa: Some(isa), threads: Some(2), tiles: None };
                let (want, _) = run(&shared, &inputs, CpuKernel::Flash, &options);
                let mut got = Tensor::zeros(repeated.o_shape(), dtype, Layout::Bhsd);
                let (k, v) = (repeat(&inputs.k, keys, dim), repeat(&inputs.v, keys, dim));
                let side = SideInputs::default();
                attention(
                    CpuKernel::Flash,
                    &repeated,
                    inputs.q.view(),
                    k,
                    v,
                    &side,
                    got.view_mut(),
                    None,
                    &options,
                )
                .unwrap();
                assert!(got.bytes() == want.bytes(), "{isa} {repeated}");
            }
        }
    }
}
