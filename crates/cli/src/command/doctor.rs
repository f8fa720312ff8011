//! `evosdpa doctor`: what this machine can do. Every probe is guarded; a failure is a line of the report.

use std::time::Duration;

use evosdpa_lab::{
    gate::GateResult,
    machine::{self, Environment},
    peer::torch::Torch,
};

use crate::{Found, args::Doctor, output};

/// Importing torch takes seconds; longer than this and something is wrong.
const TORCH_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn run(args: Doctor) -> anyhow::Result<Found> {
    let mut environment = Environment::look(None);
    environment.measure_peaks();
    let mut probes = vec![
        GateResult::pass("processor", format!("{}, {} cores", environment.cpu, environment.cores)),
        isa_probe(&environment),
        GateResult::pass("peaks", peaks(&environment)),
        memory_probe(),
    ];
    probes.push(match Torch::start(&args.python, environment.threads, TORCH_LIMIT) {
        Ok(torch) => {
            environment.torch = Some(torch.version().to_owned());
            GateResult::pass("torch", format!("{} in {}", torch.version(), args.python))
        }
        Err(error) => GateResult::unavailable(
            "torch",
            format!(
                "{error}. Fix: `{} -m pip install torch`, or name another Python with --python",
                args.python
            ),
        ),
    });
    if args.json {
        output::print_json("doctor", &environment, &probes)?;
        return Ok(Found::NothingWrong);
    }
    let rows = probes
        .iter()
        .map(|probe| vec![probe.gate.clone(), probe.verdict.word().to_owned(), probe.detail.clone()]);
    output::print(&output::table(&["what", "verdict", "detail"], 9, rows.collect()))?;
    Ok(Found::NothingWrong)
}

fn isa_probe(environment: &Environment) -> GateResult {
    let isas = environment.isas.join(", ");
    if environment.isas.len() == 1 {
        return GateResult::unavailable(
            "vector units",
            format!("only {isas}: kernels run, slowly. AVX2 with FMA or AVX-512 makes them fast"),
        );
    }
    GateResult::pass("vector units", isas)
}

fn peaks(environment: &Environment) -> String {
    let number = |x: Option<f64>| x.map_or("?".to_owned(), |x| format!("{x:.0}"));
    format!(
        "{} GFLOP/s fused multiply-add, {} GB/s memory, on {} threads",
        number(environment.fma_peak_gflops),
        number(environment.memory_gbps),
        environment.threads
    )
}

fn memory_probe() -> GateResult {
    match machine::available_memory_bytes() {
        Some(bytes) => GateResult::pass("memory", format!("{:.1} GB available", bytes as f64 / 1e9)),
        None => {
            GateResult::unavailable("memory", "this system does not say; problems are not checked against it")
        }
    }
}
