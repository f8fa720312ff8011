//! Times the CPU kernels over the shapes given on the command line, against the machine's own peak measured in the same run.
//!
//! `cargo run --release -p evosdpa-cpu --example cpu_speed -- [shapes] [dtypes] [threads] [blocks] [isa]`; 0 threads leaves their number to the library.

use evosdpa_core::{DType, Problem, Shape, Tensor};
use evosdpa_cpu::{
    CpuKernel, CpuOptions, FlashTiles, Isa, attention, fma_peak_gflops, memory_bandwidth_gbps,
};
use evosdpa_oracle::inputs::{Family, Inputs};
use std::time::Instant;

/// Measured time per row and block: short enough to interleave, long enough to average over.
const BLOCK_SECONDS: f64 = 0.15;

struct Row {
    problem: Problem,
    inputs: Inputs,
    output: Tensor,
    times_us: Vec<f64>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let argument =
        |index: usize, default: &str| std::env::args().nth(index).unwrap_or_else(|| default.to_owned());
    let shapes = Shape::parse_list(&argument(1, "mission,small,long,long128,mission:causal,long:causal"))?;
    let dtypes = argument(2, "f32").split(',').map(str::parse).collect::<Result<Vec<DType>, _>>()?;
    let threads: usize = argument(3, "2").parse()?;
    let blocks: usize = argument(4, "5").parse()?;
    let isa: Option<Isa> = std::env::args().nth(5).map(|name| name.parse()).transpose()?;
    let tiles = match (std::env::args().nth(6), std::env::args().nth(7)) {
        (Some(q), Some(kv)) => Some(FlashTiles { block_q: q.parse()?, block_kv: kv.parse()? }),
        _ => None,
    };
    let options = CpuOptions { threads: (threads > 0).then_some(threads), isa, tiles };
    let threads = if threads > 0 { threads } else { std::thread::available_parallelism()?.get() };
    let mut rows = Vec::new();
    for shape in shapes {
        for &dtype in &dtypes {
            let problem = Problem::new(shape, dtype)?;
            let inputs = Inputs::generate(&problem, Family::Normal, 1);
            let output = Tensor::zeros(problem.o_shape(), problem.output_dtype(), problem.layout());
            rows.push(Row { problem, inputs, output, times_us: Vec::new() });
        }
    }
    let mut peak = 0.0f64;
    for _ in 0..blocks {
        peak = peak.max(fma_peak_gflops(isa.unwrap_or_else(Isa::best), threads));
        for row in &mut rows {
            time_block(row, &options)?;
        }
    }
    println!(
        "FMA peak {peak:.0} GFLOP/s, memory {:.1} GB/s, {threads} threads",
        memory_bandwidth_gbps(threads)
    );
    println!(
        "{:32} {:>10} {:>10} {:>9} {:>7} {:>8}",
        "problem", "min us", "p50 us", "GFLOP/s", "% peak", "GB/s"
    );
    for row in &mut rows {
        let time_us = median(&mut row.times_us);
        let least_us = row.times_us[0];
        let gflops = row.problem.flops() / time_us / 1e3;
        let (share, rate) = (100.0 * gflops / peak, row.problem.bytes() as f64 / time_us / 1e3);
        println!(
            "{:32} {least_us:10.1} {time_us:10.1} {gflops:9.1} {share:7.1} {rate:8.2}",
            row.problem.to_string()
        );
    }
    Ok(())
}

fn time_block(row: &mut Row, options: &CpuOptions) -> Result<(), evosdpa_cpu::Error> {
    let begin = Instant::now();
    let mut calls = 0;
    while calls < 2 || begin.elapsed().as_secs_f64() < BLOCK_SECONDS {
        let Inputs { q, k, v, .. } = &row.inputs;
        let start = Instant::now();
        attention(
            CpuKernel::Flash,
            &row.problem,
            q.view(),
            k.view(),
            v.view(),
            &row.inputs.side(),
            row.output.view_mut(),
            None,
            options,
        )?;
        // The first call of a block warms caches and threads.
        if calls > 0 {
            row.times_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        calls += 1;
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
