//! `evosdpa doctor`: what this machine can do. Every probe is guarded; a failure is a line of the report.

use std::time::Duration;

use evosdpa::Isa;
use evosdpa_cuda::{
    Cache, Compiler, Device, Precompiled, loader, toolchain,
    toolkit::{HOME_VARIABLE, Toolkit},
};
use evosdpa_lab::{
    baseline::torch::Torch,
    gate::GateResult,
    machine::{self, Environment},
    tool::{self, CudaTool},
};

use crate::{Status, args::Doctor, output};

/// Importing torch takes seconds; longer than this and something is wrong.
const TORCH_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn run(args: Doctor) -> anyhow::Result<Status> {
    if args.fix {
        return fix(&args);
    }
    let mut environment = Environment::look(None);
    environment.measure_peaks(None);
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
                "{}. Fix: `{} -m pip install torch`, or name another Python with --python",
                error.to_string().trim_start_matches("torch: "),
                args.python
            ),
        ),
    });
    probes.extend(gpu_probes());
    probes.push(compiler_probe());
    probes.extend([CudaTool::ComputeSanitizer, CudaTool::Ncu].map(tool_probe));
    probes.extend([precompiled_probe(), cache_probe()]);
    report(&args, &environment, &probes)
}

fn report(args: &Doctor, environment: &Environment, probes: &[GateResult]) -> anyhow::Result<Status> {
    if args.json {
        output::print_json("doctor", environment, &probes)?;
        return Ok(Status::Passed);
    }
    let rows = probes
        .iter()
        .map(|probe| vec![probe.gate.clone(), probe.verdict.word().to_owned(), probe.detail.clone()]);
    output::print(&output::table(&["what", "verdict", "detail"], 9, rows.collect()))?;
    Ok(Status::Passed)
}

/// Installs the CUDA compiler, unless there is one that can be opened.
fn fix(args: &Doctor) -> anyhow::Result<Status> {
    let environment = Environment::look(None);
    if Compiler::open().is_ok() {
        return report(args, &environment, &[compiler_probe()]);
    }
    output::tell(&format!("installing {} from PyPI; this takes a minute or two", toolchain::REQUIREMENT));
    let installed = toolchain::install_private()?;
    let mut detail = format!("installed into {}", installed.root.display());
    // The search looks elsewhere first: something that is found there but does not open is still in the way.
    if let Ok(found) = Toolkit::find() {
        detail.push_str(&format!(
            "; {} is found first and cannot be opened: remove it, or set {HOME_VARIABLE} to the new one",
            found.root.display()
        ));
    }
    report(args, &environment, &[GateResult::pass("CUDA compiler", detail)])
}

/// The driver, then each device it sees.
fn gpu_probes() -> Vec<GateResult> {
    let driver = match loader::driver() {
        Ok(driver) => driver,
        Err(error) => return vec![GateResult::unavailable("CUDA driver", error.to_string())],
    };
    let version = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let mut probes = vec![GateResult::pass(
        "CUDA driver",
        format!("supports CUDA {}, sees {} devices", version(driver.cuda_version), driver.device_count),
    )];
    for ordinal in 0..driver.device_count {
        let name = format!("cuda:{ordinal}");
        probes.push(
            match Device::open(ordinal).and_then(|device| Ok((device.target()?, device.info().clone()))) {
                Ok((target, info)) => GateResult::pass(
                    &name,
                    format!(
                        "{}, {}, {} SMs, {:.0} GB, {} kB of shared memory a block",
                        info.name,
                        target.arch,
                        info.sm_count,
                        info.memory_bytes as f64 / 1e9,
                        info.smem_per_block_bytes / 1024
                    ),
                ),
                Err(error) => GateResult::unavailable(&name, error.to_string()),
            },
        );
    }
    probes
}

/// What is installed is told apart from what can be opened.
fn compiler_probe() -> GateResult {
    const NAME: &str = "CUDA compiler";
    let toolkit = match Toolkit::find() {
        Ok(toolkit) => toolkit,
        Err(error) => return GateResult::unavailable(NAME, error.to_string()),
    };
    match Compiler::open() {
        Ok(compiler) => GateResult::pass(
            NAME,
            format!(
                "NVRTC {} loaded from {} ({})",
                compiler.version(),
                toolkit.root.display(),
                toolkit.found_by
            ),
        ),
        Err(error) => GateResult::unavailable(
            NAME,
            format!(
                "installed at {} ({}) but not loadable: {error}. Fix: `evosdpa doctor --fix`",
                toolkit.root.display(),
                toolkit.found_by
            ),
        ),
    }
}

fn tool_probe(wanted: CudaTool) -> GateResult {
    let found = wanted.find().and_then(|path| Ok((tool::version(&path)?, path)));
    match found {
        Ok((version, path)) => GateResult::pass(wanted.name(), format!("{version}, {}", path.display())),
        Err(why) => GateResult::unavailable(wanted.name(), why),
    }
}

fn precompiled_probe() -> GateResult {
    const NAME: &str = "precompiled";
    match Precompiled::find().and_then(|found| found.map(|found| Ok((found.size()?, found))).transpose()) {
        Ok(Some(((count, bytes), found))) => {
            let (megabytes, folder) = (bytes as f64 / 1e6, found.folder().display());
            GateResult::pass(NAME, format!("{count} kernels, {megabytes:.1} MB in {folder}"))
        }
        Ok(None) => GateResult::unavailable(
            NAME,
            "no kernels came along: each is compiled when it is first needed. `evosdpa precompile` makes a folder of them",
        ),
        Err(error) => GateResult::unavailable(NAME, error.to_string()),
    }
}

fn cache_probe() -> GateResult {
    let looked = Cache::open_default().and_then(|cache| Ok((cache.size_bytes()?, cache)));
    match looked {
        Ok((bytes, cache)) => {
            let megabytes = bytes as f64 / 1e6;
            GateResult::pass("kernel cache", format!("{megabytes:.1} MB in {}", cache.folder().display()))
        }
        Err(error) => GateResult::unavailable("kernel cache", error.to_string()),
    }
}

fn isa_probe(environment: &Environment) -> GateResult {
    let isas = environment.isas.join(", ");
    if environment.isas.len() == 1 {
        return GateResult::unavailable(
            "vector units",
            format!("only {isas}: kernels run, slowly. AVX2 with FMA or AVX-512 makes them fast"),
        );
    }
    let lacking = Isa::ALL.into_iter().filter_map(|isa| Some(format!("{isa} needs {}", isa.lacks()?)));
    let lacking = lacking.collect::<Vec<_>>().join(", ");
    GateResult::pass("vector units", format!("{isas}; {} is taken ({lacking})", Isa::best()))
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
