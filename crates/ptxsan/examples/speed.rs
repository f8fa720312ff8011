//! How fast the machine runs: lane instructions per second on one host core, with hazard checking on and off, by processor time; and with
//! checking on all cores, by the clock on the wall.
//!
//! `cargo run --release -p ptxsan --example speed -- [NAME]…`: all kernels, or those that are named.

use ptxsan::tensor::wgmma::Swizzle;
use ptxsan::{Arg, Buffer, Device, Launch, Module, Outcome, Result, TensorElement, TensorMap};
use std::{fs, time::Instant};

const AMPERE: &str = include_str!("../tests/fixtures/speed.ptx");
const HOPPER: &str = include_str!("../tests/fixtures/speed_hopper.ptx");

/// Each kernel with the module it is in and how to launch it.
const KERNELS: [(&str, &str, Run); 4] = [
    ("product", AMPERE, product),
    ("product_inputs", AMPERE, product_inputs),
    ("smooth", AMPERE, smooth),
    ("wgmma_product", HOPPER, wgmma_product),
];

/// Samples, of which the best counts, and launches of each: Linux counts a thread's time in steps of milliseconds.
const SAMPLES: u32 = 5;
const LAUNCHES: u32 = 20;

type Run = fn(&Module, Mode) -> Result<Outcome>;

#[derive(Clone, Copy)]
struct Mode {
    checks: bool,
    /// Blocks run on all cores.
    parallel: bool,
}

/// Seconds that this thread has had a processor, where Linux says so: other programs do not disturb it.
fn processor_seconds() -> Option<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(text.split_whitespace().next()?.parse::<f64>().ok()? * 1e-9)
}

fn measure(name: &str, module: &Module, run: Run, mode: Mode) -> Result<()> {
    let (mut best, mut lanes, mut warps) = (f64::MAX, 0, 0);
    for _ in 0..SAMPLES {
        let (start, wall) = (processor_seconds(), Instant::now());
        for _ in 0..LAUNCHES {
            let outcome = run(module, mode)?;
            assert!(outcome.is_clean(), "{outcome}");
            (lanes, warps) = (outcome.counters.lane_instructions, outcome.warp_instructions);
        }
        let took = processor_seconds().zip(start).map(|(end, start)| end - start).filter(|_| !mode.parallel);
        best = best.min(took.unwrap_or_else(|| wall.elapsed().as_secs_f64()) / f64::from(LAUNCHES));
    }
    println!(
        "{name:14}  hazards {:3}  {}  {lanes:>8} lane instructions  {:7.2} ms  {:7.1} M lanes/s  {:6.2} M warps/s",
        if mode.checks { "on" } else { "off" },
        if mode.parallel { "all cores" } else { "one core " },
        best * 1e3,
        lanes as f64 / best / 1e6,
        warps as f64 / best / 1e6,
    );
    Ok(())
}

fn launch(device: &mut Device, module: &Module, mut launch: Launch, mode: Mode) -> Result<Outcome> {
    let id = device.load(module)?;
    launch.options.check_races = mode.checks;
    launch.options.parallel = mode.parallel;
    device.launch(id, &launch)
}

/// Rows of ones in f16.
fn ones(device: &mut Device, name: &str, rows: usize, columns: usize) -> Result<Buffer> {
    device.upload(name, &[0x00, 0x3c].repeat(rows * columns))
}

/// The sizes of the products.
const M: usize = 128;
const N: usize = 128;
const K: usize = 512;

fn expect_product(device: &mut Device, c: Buffer) -> Result<()> {
    assert!(device.read(c)? == (K as f32).to_le_bytes().repeat(M * N), "the product is wrong");
    Ok(())
}

fn product(module: &Module, mode: Mode) -> Result<Outcome> {
    half_product(module, mode, false)
}

/// The same with operands that the kernel may only read.
fn product_inputs(module: &Module, mode: Mode) -> Result<Outcome> {
    half_product(module, mode, true)
}

fn half_product(module: &Module, mode: Mode, are_inputs: bool) -> Result<Outcome> {
    let mut device = Device::new();
    let (a, b) = (ones(&mut device, "a", M, K)?, ones(&mut device, "b", N, K)?);
    device.set_read_only(a, are_inputs)?;
    device.set_read_only(b, are_inputs)?;
    let c = device.allocate("c", 4 * M * N)?;
    let args = vec![Arg::Buffer(a), Arg::Buffer(b), Arg::Buffer(c), Arg::I32(N as i32), Arg::I32(K as i32)];
    let grid = [N as u32 / 64, M as u32 / 64, 1];
    let outcome = launch(&mut device, module, Launch::new("product", grid, [128, 1, 1], 0, args), mode)?;
    expect_product(&mut device, c)?;
    Ok(outcome)
}

fn wgmma_product(module: &Module, mode: Mode) -> Result<Outcome> {
    let mut device = Device::new();
    let (a, b) = (ones(&mut device, "a", M, K)?, ones(&mut device, "b", N, K)?);
    let c = device.allocate("c", 4 * M * N)?;
    let tiles = |of: Buffer, rows: usize| {
        let map = TensorMap {
            address: of.address(),
            element: TensorElement::F16,
            sizes: vec![K as u64, rows as u64],
            strides_bytes: vec![2 * K as u64],
            box_sizes: vec![64, 64],
            element_strides: vec![1, 1],
            swizzle: Swizzle::Bytes128,
            is_nan_outside: false,
        };
        map.encode().map(|raw| Arg::Bytes(raw.to_vec()))
    };
    let args = vec![tiles(a, M)?, tiles(b, N)?, Arg::Buffer(c), Arg::I32(N as i32), Arg::I32(K as i32)];
    let grid = [N as u32 / 64, M as u32 / 64, 1];
    let stages = 3 * 2 * 64 * 64 * 2;
    let asked = Launch::new("wgmma_product", grid, [160, 1, 1], stages, args);
    let outcome = launch(&mut device, module, asked, mode)?;
    expect_product(&mut device, c)?;
    Ok(outcome)
}

fn smooth(module: &Module, mode: Mode) -> Result<Outcome> {
    let mut device = Device::new();
    let data = device.upload("data", &1f32.to_le_bytes().repeat(4 * 256))?;
    let args = vec![Arg::Buffer(data), Arg::I32(100)];
    launch(&mut device, module, Launch::new("smooth", [4, 1, 1], [256, 1, 1], 0, args), mode)
}

fn main() -> Result<()> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    for (checks, parallel) in [(true, false), (false, false), (true, true)] {
        for (name, ptx, run) in KERNELS.iter().filter(|k| names.is_empty() || names.iter().any(|n| n == k.0))
        {
            measure(name, &Module::parse(ptx)?, *run, Mode { checks, parallel })?;
        }
    }
    Ok(())
}
