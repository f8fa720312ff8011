//! The same kernels on the same inputs, once on the simulator and once on a GPU: how far are the outputs apart?
//!
//! `cargo xtask gpu` runs it on a machine with a GPU and keeps what it prints.
//! The tensor cores' sums are not the simulator's bit for bit (PTX
//! leaves their rounding open), so the outputs are held against the gates and against each other.

use evosdpa_core::{DType, Problem};
use evosdpa_kernels::Registry;
use evosdpa_lab::{
    Error,
    device::{Cuda, Device, Output, Sim},
    machine::Environment,
};
use evosdpa_oracle::{Case, inputs::Family};
use serde::Serialize;
use serde_json::json;

const SHAPES: [&str; 4] =
    ["tiny", "b1h2/1s33/65d64:causal-br", "b1h1s70/40d40:window=9/3", "b1h1s512d64:causal"];

#[derive(Serialize)]
struct Row {
    kernel: String,
    problem: String,
    /// Whether the output passes the correctness gate.
    sim_passes: Option<bool>,
    gpu_passes: Option<bool>,
    /// Largest error against the oracle.
    sim_max_error: Option<f64>,
    gpu_max_error: Option<f64>,
    /// Largest distance between the two, and the share of elements that are the same bits.
    max_distance: Option<f64>,
    same_bits: Option<f64>,
    note: Option<String>,
}

fn run(device: &dyn Device, kernel: &str, case: &Case) -> Result<Output, Error> {
    let inputs = [case.inputs.clone()];
    device.load(kernel, &case.problem, &inputs)?.run(0)
}

fn row(sim: &Sim, gpu: &Cuda, kernel: &str, case: &Case) -> Row {
    let mut note = None;
    let mut on = |device: &dyn Device| match run(device, kernel, case) {
        Ok(output) => Some(output),
        Err(error) => {
            note = Some(format!("{}: {error}", device.id()));
            None
        }
    };
    let (simulated, real) = (on(sim), on(gpu));
    let judged = |output: &Option<Output>| {
        output.as_ref().map(|output| case.judge(&output.o.view(), output.lse.as_deref()))
    };
    let (sim_judged, gpu_judged) = (judged(&simulated), judged(&real));
    let values = |output: &Output| -> Vec<f32> {
        let view = output.o.view();
        let [batch, heads, seq, _] = view.shape();
        let (mut all, mut row) = (Vec::new(), Vec::new());
        for b in 0..batch {
            for h in 0..heads {
                for s in 0..seq {
                    row.resize(view.shape()[3], 0.0);
                    view.read_row(b, h, s, &mut row);
                    all.extend_from_slice(&row);
                }
            }
        }
        all
    };
    let both = simulated.as_ref().zip(real.as_ref()).map(|(a, b)| (values(a), values(b)));
    let distance = both
        .as_ref()
        .map(|(a, b)| a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max));
    let same = both.as_ref().map(|(a, b)| {
        let same = a.iter().zip(b).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
        same as f64 / a.len().max(1) as f64
    });
    Row {
        kernel: kernel.to_owned(),
        problem: case.problem.to_string(),
        sim_passes: sim_judged.as_ref().map(|judgement| judgement.passed()),
        gpu_passes: gpu_judged.as_ref().map(|judgement| judgement.passed()),
        sim_max_error: sim_judged.map(|judgement| judgement.errors.max),
        gpu_max_error: gpu_judged.map(|judgement| judgement.errors.max),
        max_distance: distance,
        same_bits: same,
        note,
    }
}

fn main() -> Result<(), Error> {
    let sim = Sim::open(Registry::embedded()?)?;
    let gpu = Cuda::open(0, Registry::embedded()?)?;
    let mut rows = Vec::new();
    for shape in SHAPES {
        for dtype in [DType::F16, DType::BF16, DType::U8, DType::E4M3] {
            let problem = Problem::new(shape.parse()?, dtype)?.with_lse(true);
            let kernels: Vec<String> = sim.kernels().into_iter().map(|kernel| kernel.name).collect();
            let taken: Vec<&String> =
                kernels.iter().filter(|name| sim.refuses(name, &problem).is_none()).collect();
            if taken.is_empty() {
                continue;
            }
            let case = Case::new(problem, Family::Normal, 1, Some(16));
            rows.extend(taken.into_iter().map(|kernel| row(&sim, &gpu, kernel, &case)));
        }
    }
    let mut environment = Environment::look(None);
    environment.accelerator = gpu.accelerator();
    let document = json!({ "schema": "evosdpa.sim-agreement/1", "environment": environment, "rows": rows });
    println!("{document:#}");
    Ok(())
}
