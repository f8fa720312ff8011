//! `evosdpa tune --evaluators N`: the tune proposes and writes the log, evaluators measure. They are this program again, started by
//! the user's launcher on whatever machine it chooses.

use std::{
    ffi::{OsStr, OsString},
    io::{BufReader, stdin, stdout},
    time::Duration,
};

use anyhow::Context;
use evosdpa_core::DType;
use evosdpa_cuda::Program;
use evosdpa_kernels::{Arch, Target};
use evosdpa_lab::{
    device::DeviceId,
    evolve::{
        Point,
        evaluator::{self, NUMBER_VARIABLE, Pool, Ready, SCHEMA, Staff},
    },
    machine::Environment,
};

use super::{
    About, Constraints, Subject, at_the_device, evolve, folder,
    subject::{first_dtype, problems},
};
use crate::{
    Status,
    args::{Place, Tune},
    command, interrupt, progress,
};

/// The hidden command that an evaluator is.
pub(crate) const EVALUATOR: &str = "evaluator";

/// Candidates that an evaluator has at once: on a GPU, one is measured while others are compiled.
const AHEAD_ON_GPU: usize = 3;

/// Time for an evaluator to end by itself once nobody needs it.
const FAREWELL: Duration = Duration::from_millis(500);

/// The tune's side.
pub(super) fn run(args: &Tune, own: &[OsString], count: usize) -> anyhow::Result<Status> {
    let on_cpu = match args.common.device {
        Place::On(DeviceId::Cpu) => true,
        Place::On(DeviceId::Cuda(_)) => false,
        _ => anyhow::bail!(
            "--evaluators needs --device cpu or --device cuda: every evaluator has to take the same"
        ),
    };
    let bar = progress::bar(u64::from(args.evaluations));
    let say = |words: &str| progress::note(&bar, words);
    interrupt::listen();
    let staff = Staff {
        command: command_of_evaluators(args, own)?,
        count,
        ahead: if on_cpu { 1 } else { AHEAD_ON_GPU },
        slow_after: Duration::from_secs_f64(args.evaluator_timeout),
        lost_after: Duration::from_secs_f64(args.evaluator_silence),
    };
    let registry = if on_cpu { None } else { Some(command::registry(&args.common.kernel_path)?) };
    let Some(mut pool) = Pool::open(staff, registry.clone(), &say, &interrupt::asked)? else {
        return Ok(Status::Interrupted);
    };
    // It is there, or the pool would not have opened.
    let ready = pool.ready().cloned().context("no evaluator is ready")?;
    let kernel = ready.space.kernel.clone();
    let problems = match &registry {
        Some(registry) => problems(args, first_dtype(registry, &kernel)?)?,
        None => problems(args, DType::F32)?,
    };
    let constraints = match (registry, ready.gpu) {
        (Some(registry), Some([sm_count, smem_limit_bytes])) => {
            let arch: Arch = ready.arch.parse()?;
            let target = Target { arch, sm_count, smem_limit_bytes };
            Some(Constraints::new(registry, &kernel, target, &problems)?)
        }
        _ => None,
    };
    let about = About {
        space: ready.space,
        problems,
        device: if on_cpu { DeviceId::Cpu } else { DeviceId::Cuda(0) },
        device_name: ready.device_name,
        arch: ready.arch,
    };
    let folder = folder(args, &about.space);
    let breaks = |point: &Point| constraints.as_ref().and_then(|constraints| constraints.broken(point));
    let environment = Environment::look(args.common.thread_count());
    evolve(args, &mut pool, about, &breaks, &folder, &bar, &environment)
}

/// The same command line again, as an evaluator; behind the launcher where there is one, whose words a shell reads.
fn command_of_evaluators(args: &Tune, own: &[OsString]) -> anyhow::Result<Vec<OsString>> {
    let program = Program::running().context("cannot find this program to run it again")?;
    let again = [program.path.into_os_string()].into_iter().chain(program.arguments);
    let again = again.chain([OsString::from(EVALUATOR)]).chain(own.iter().skip(1).cloned());
    let Some(launcher) = &args.launcher else { return Ok(again.collect()) };
    let script = format!("exec {launcher} \"$@\"");
    Ok(["sh", "-c", &script, "launcher"].map(OsString::from).into_iter().chain(again).collect())
}

/// The evaluator's side.
pub(crate) fn serve(args: &Tune) -> anyhow::Result<Status> {
    let result = work(args);
    if let Err(error) = &result {
        // Also in the tune's own words, so that it does not try in vain.
        evaluator::give_up(stdout(), &format!("{error:#}"));
    }
    result.map(|()| Status::Passed)
}

fn work(args: &Tune) -> anyhow::Result<()> {
    let number = std::env::var(NUMBER_VARIABLE).ok().and_then(|number| number.parse().ok()).unwrap_or(0);
    // A launcher hands out GPUs; without one, each evaluator takes the GPU of its number.
    let subject = Subject::find(args, if args.launcher.is_some() { 0 } else { number })?;
    let gpu = subject.constraints.as_ref().map(|it| [it.target.sm_count, it.target.smem_limit_bytes]);
    let ready = Ready {
        schema: SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: host(),
        device_name: subject.device_name.clone(),
        arch: subject.arch.clone(),
        gpu,
        space: subject.space.clone(),
    };
    let say = crate::output::tell;
    at_the_device(args, subject, AHEAD_ON_GPU, &say, |here, _| {
        let abandoned = || {
            std::thread::sleep(FAREWELL);
            evosdpa_lab::process::end_all();
            std::process::exit(0);
        };
        Ok(evaluator::serve(here, ready, BufReader::new(stdin()), stdout(), abandoned)?)
    })
}

/// The machine's name: under Slurm that of the node, which several may share a machine in trials.
fn host() -> String {
    let of_slurm = std::env::var_os("SLURMD_NODENAME").filter(|name| !name.is_empty());
    let own = || {
        std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| OsStr::new(name.trim()).to_owned())
    };
    let name = of_slurm.or_else(|| own().ok()).unwrap_or_else(|| OsString::from("unknown"));
    name.to_string_lossy().into_owned()
}
