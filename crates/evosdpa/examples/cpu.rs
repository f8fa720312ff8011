//! Attention on a CPU: plan a problem once, run it on your own buffers.
//!
//! `cargo run --release -p evosdpa --example cpu`

use std::time::Instant;

use evosdpa::{Attention, DType, Device, Error, Layout, Problem, TensorView, TensorViewMut};

fn main() -> Result<(), Error> {
    // One batch, 8 query heads that share 2 key/value heads, 512 queries and keys, head dimension 64.
    let problem = Problem::new("b1h8/2s512d64:causal".parse()?, DType::F32)?;
    let attention = Attention::plan(problem, Device::Cpu)?;

    let numbers = |shape: [usize; 4], seed: usize| -> Vec<f32> {
        (0..shape.iter().product()).map(|i: usize| ((i * 31 + seed) % 101) as f32 / 50.0 - 1.0).collect()
    };
    let (q, k, v) =
        (numbers(problem.q_shape(), 1), numbers(problem.k_shape(), 2), numbers(problem.v_shape(), 3));
    let mut o = vec![0.0_f32; problem.o_shape().iter().product()];
    let mut lse = vec![0.0_f32; problem.rows()];

    let start = Instant::now();
    attention.run(
        TensorView::from_slice(&q, problem.q_shape(), Layout::Bhsd)?,
        TensorView::from_slice(&k, problem.k_shape(), Layout::Bhsd)?,
        TensorView::from_slice(&v, problem.v_shape(), Layout::Bhsd)?,
        TensorViewMut::from_slice(&mut o, problem.o_shape(), Layout::Bhsd)?,
        Some(&mut lse),
    )?;
    let time = start.elapsed();

    println!("{problem} with {} on {}: {time:?}", attention.variant(), attention.device());
    // The first query sees one key: its output is that key's value.
    println!("o[0] = {}, v[0] = {}, log-sum-exp of the last row {}", o[0], v[0], lse[problem.rows() - 1]);
    Ok(())
}
