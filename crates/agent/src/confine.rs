//! What a process takes from itself before it reads what others wrote.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context;
use landlock::{ABI, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// System calls that start a program or look into one.
const STARTING: [i64; 3] = [libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace];

/// From now on this process starts no program. An error where the kernel cannot be asked for that.
pub(crate) fn start_no_program() -> anyhow::Result<()> {
    let rules: BTreeMap<i64, Vec<_>> = STARTING.into_iter().map(|call| (call, vec![])).collect();
    // EPERM.
    let refused = SeccompAction::Errno(1);
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
