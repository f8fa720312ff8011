//! Confinement: the rights a process gives up (seccomp, Landlock) before it reads untrusted input.
//!
//! | | how | where the kernel cannot |
//! |---|---|---|
//! | no programs, no ptrace (the proposer) | seccomp | an error |
//! | no network, no ptrace (evaluations) | seccomp: only sockets of this machine | an error |
//! | files written only in some folders | Landlock (Linux 5.13) | left out, and said |
//! | memory, processor time, size of files | rlimits | an error |

use std::{
    collections::BTreeMap,
    ffi::OsString,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context;
use landlock::{ABI, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// System calls that start a program or look into one.
const STARTING: [i64; 3] = [libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace];

/// Families of sockets that lead out of this machine.
const OUTWARD: [i32; 5] =
    [libc::AF_INET, libc::AF_INET6, libc::AF_PACKET, libc::AF_VSOCK, libc::AF_BLUETOOTH];

/// System calls that look into a process, or open sockets past a filter.
const AROUND: [i64; 3] = [libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_io_uring_setup];

/// Runs a program within limits: this is how evaluations are started.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Bytes of memory it may map
    #[arg(long, value_name = "N")]
    memory_bytes: Option<u64>,
    /// Seconds of processor time
    #[arg(long, value_name = "N")]
    cpu_s: u64,
    /// Bytes of one file
    #[arg(long, value_name = "N")]
    file_bytes: u64,
    /// Folders it may write to; may be given several times
    #[arg(long, value_name = "FOLDER")]
    writable: Vec<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Becomes the program; comes back only with an error.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let limits = [
        (Resource::Core, Some(0)),
        (Resource::Cpu, Some(args.cpu_s)),
        (Resource::Fsize, Some(args.file_bytes)),
        (Resource::As, args.memory_bytes),
    ];
    for (resource, limit) in limits.into_iter().filter(|(_, limit)| limit.is_some()) {
        setrlimit(resource, Rlimit { current: limit, maximum: limit })
            .with_context(|| format!("the limit {resource:?} cannot be set"))?;
    }
    let folders: Vec<&Path> =
        args.writable.iter().map(PathBuf::as_path).filter(|path| path.exists()).collect();
    write_only_below(&folders)?;
    reach_nobody()?;
    let [program, arguments @ ..] = &args.command[..] else { anyhow::bail!("no program") };
    Err(Command::new(program).args(arguments).exec()).with_context(|| program.to_string_lossy().into_owned())
}

/// From now on this process starts no program. An error where the kernel cannot be asked for that.
pub(crate) fn start_no_program() -> anyhow::Result<()> {
    refuse(STARTING.into_iter().map(|call| (call, vec![])).collect())
}

/// From now on this process opens no socket that leads out of the machine.
fn reach_nobody() -> anyhow::Result<()> {
    let is = |family: i32| SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, family as u64);
    let outward = OUTWARD.into_iter().map(|family| SeccompRule::new(vec![is(family)?]));
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = AROUND.into_iter().map(|call| (call, vec![])).collect();
    rules.insert(libc::SYS_socket, outward.collect::<Result<_, _>>()?);
    refuse(rules)
}

fn refuse(rules: BTreeMap<i64, Vec<SeccompRule>>) -> anyhow::Result<()> {
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let filter =
        SeccompFilter::new(rules, SeccompAction::Allow, refused, std::env::consts::ARCH.try_into()?)?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&program).context("seccomp")
}

/// From now on this process writes only below these folders. False where the kernel has no Landlock.
pub(crate) fn write_only_below(folders: &[&Path]) -> anyhow::Result<bool> {
    let writing = AccessFs::from_write(ABI::V3);
    let mut rules = Ruleset::default().handle_access(writing)?.create()?;
    for folder in folders {
        let opened = PathFd::new(folder).with_context(|| folder.display().to_string())?;
        rules = rules.add_rule(PathBeneath::new(opened, writing))?;
    }
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}
