//! The same kernels on the same inputs, once on the simulator and once on a GPU: see `evosdpa_lab::agreement`.
//!
//! `cargo xtask gpu` runs it on a machine with a GPU and keeps what it prints. With `sim` as its argument it asks the simulator alone, and
//! prints which questions it answers and in how long.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use evosdpa_core::Problem;
use evosdpa_kernels::{Arch, Registry};
use evosdpa_lab::{
    Error,
    agreement::{AgreementRow, Asked, QUESTIONS, cache_write},
    device::{Cuda, Device, Output, Sim},
    machine::Environment,
};
use ptxsan::Schedule;
use serde_json::json;

type Simulated = Result<(String, Output), Error>;

/// Every question to the simulator, as many at once as there are cores.
fn simulate(sim: &Sim, cores: usize) -> Vec<(&'static Asked, Simulated)> {
    let next = AtomicUsize::new(0);
    let answers: Mutex<Vec<(usize, Simulated)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(asked) = QUESTIONS.get(at) else { return };
                    let started = Instant::now();
                    let answer = asked.simulate(sim);
                    let word = match &answer {
                        Ok((_, output)) => asked.digest(output).unwrap_or_else(|error| error.to_string()),
                        Err(error) => error.to_string(),
                    };
                    eprintln!("{:?} {} ms: {word}", asked, started.elapsed().as_millis());
                    answers.lock().expect("nobody panics under it").push((at, answer));
                }
            });
        }
    });
    let mut answers = answers.into_inner().expect("nobody panics under it");
    answers.sort_by_key(|(at, _)| *at);
    answers.into_iter().map(|(at, answer)| (&QUESTIONS[at], answer)).collect()
}

/// Compiles everything for both machines, in worker processes.
fn compile(sim: &Sim, gpu: Option<&Cuda>, cores: usize) -> Result<(), Error> {
    let named = |asked: &Asked| -> Result<(String, Problem), Error> {
        let problem = asked.problem()?;
        let variant = sim.compile(asked.kernel, &problem)?.0;
        Ok((variant.label(), problem))
    };
    let plain = QUESTIONS.iter().map(|asked| Ok((asked.kernel.to_owned(), asked.problem()?)));
    sim.prepare(&plain.collect::<Result<Vec<_>, Error>>()?, cores, &|_, _| true)?;
    if let Some(gpu) = gpu {
        let work: Vec<_> = QUESTIONS.iter().filter_map(|asked| named(asked).ok()).collect();
        gpu.prepare(&work, cores, &|_, _| true)?;
    }
    Ok(())
}

fn row(gpu: &Cuda, asked: &Asked, simulated: Simulated) -> Result<AgreementRow, Error> {
    let (variant, simulated) = simulated?;
    let real = asked.run_on(gpu, &variant)?;
    asked.compare(&variant, &simulated, &real)
}

fn main() -> Result<(), Error> {
    evosdpa_cuda::worker::run_if_requested();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let sim = Sim::open(Registry::embedded()?)?.preferring(Arch::Sm90a);
    if std::env::args().nth(1).as_deref() == Some("sim") {
        compile(&sim, None, cores)?;
        let answers = simulate(&sim, cores);
        let failed = answers.iter().filter(|(_, answer)| answer.is_err()).count();
        println!("{} of {} questions answered", answers.len() - failed, QUESTIONS.len());
        let (kernels, writes) = (cache_write::Kernels::compile()?, cache_write::questions());
        let answered =
            writes.iter().filter(|(_, write)| kernels.simulate(write, Schedule::RoundRobin).is_ok());
        println!("{} of {} writes to caches made", answered.count(), writes.len());
        return Ok(());
    }
    let gpu = Cuda::open(0, Registry::embedded()?)?;
    compile(&sim, Some(&gpu), cores)?;
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    for (asked, simulated) in simulate(&sim, cores) {
        match row(&gpu, asked, simulated) {
            Ok(row) => rows.push(row),
            Err(error) => failures
                .push(json!({ "kernel": asked.kernel, "shape": asked.shape, "why": error.to_string() })),
        }
    }
    let kernels = cache_write::Kernels::compile()?;
    let mut writes = Vec::new();
    for (name, write) in cache_write::questions() {
        match cache_write::compare(&gpu, &kernels, name, &write) {
            Ok(row) => writes.push(row),
            Err(error) => {
                failures.push(json!({ "kernel": "cache_write", "shape": name, "why": error.to_string() }))
            }
        }
    }
    let mut environment = Environment::look(None);
    environment.accelerator = gpu.accelerator();
    let document = json!({
        "schema": "evosdpa.sim-agreement/2", "environment": environment, "rows": rows, "cache_writes": writes,
        "failures": failures,
    });
    println!("{document:#}");
    let agree = rows.iter().filter(|row| row.agrees).count() + writes.iter().filter(|row| row.agrees).count();
    eprintln!("{agree} of {} rows agree, {} could not be run", rows.len() + writes.len(), failures.len());
    Ok(())
}
