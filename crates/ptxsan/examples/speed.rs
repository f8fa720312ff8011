//! How fast the machine runs: lane instructions per second on one host core, with hazard checking on.
//!
//! `cargo run --release -p ptxsan --example speed`

use ptxsan::{Arg, Device, Launch, Module, Outcome};
use std::{fs, time::Instant};

const PTX: &str = include_str!("../tests/fixtures/speed.ptx");

/// Seconds that this thread has had a processor, where Linux says so: other programs do not disturb it.
fn processor_seconds() -> Option<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(text.split_whitespace().next()?.parse::<f64>().ok()? * 1e-9)
}

fn measure(name: &str, check_races: bool, run: impl Fn(bool) -> Outcome) {
    let (mut best, mut lanes) = (f64::MAX, 0);
    for _ in 0..7 {
        let (start, wall) = (processor_seconds(), Instant::now());
        let outcome = run(check_races);
        let took = processor_seconds().zip(start).map(|(end, start)| end - start);
        best = best.min(took.unwrap_or_else(|| wall.elapsed().as_secs_f64()));
        assert!(outcome.is_clean(), "{outcome}");
        lanes = outcome.counters.lane_instructions;
    }
    let checks = if check_races { "hazards on " } else { "hazards off" };
    println!(
        "{name:8} {checks}  {lanes:>10} lane instructions  {:7.2} ms  {:7.1} M/s",
        best * 1e3,
        lanes as f64 / best / 1e6
    );
}

fn main() -> ptxsan::Result<()> {
    let module = Module::parse(PTX)?;
    let product = |check_races: bool| {
        let (m, n, k) = (128usize, 128usize, 256usize);
        let mut device = Device::new();
        let id = device.load(&module).expect("loads");
        // 0x3c00 is one.
        let ones: Vec<u8> = [0x00, 0x3c].repeat(m.max(n) * k);
        let a = device.upload("a", &ones[..2 * m * k]).expect("fits");
        let b = device.upload("b", &ones[..2 * n * k]).expect("fits");
        let c = device.allocate("c", 4 * m * n).expect("fits");
        let args =
            vec![Arg::Buffer(a), Arg::Buffer(b), Arg::Buffer(c), Arg::I32(n as i32), Arg::I32(k as i32)];
        let mut launch = Launch::new("product", [n as u32 / 64, m as u32 / 64, 1], [128, 1, 1], 0, args);
        launch.options.check_races = check_races;
        launch.options.parallel = false;
        let outcome = device.launch(id, &launch).expect("launches");
        let c = device.read(c).expect("is there");
        assert!(c.chunks_exact(4).all(|x| x == (k as f32).to_le_bytes()), "the product is wrong");
        outcome
    };
    let smooth = |check_races: bool| {
        let mut device = Device::new();
        let id = device.load(&module).expect("loads");
        let data = device.upload("data", &1f32.to_le_bytes().repeat(4 * 256)).expect("fits");
        let mut launch =
            Launch::new("smooth", [4, 1, 1], [256, 1, 1], 0, vec![Arg::Buffer(data), Arg::I32(100)]);
        launch.options.check_races = check_races;
        launch.options.parallel = false;
        device.launch(id, &launch).expect("launches")
    };
    for check_races in [true, false] {
        measure("product", check_races, product);
        measure("smooth", check_races, smooth);
    }
    Ok(())
}
