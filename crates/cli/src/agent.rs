//! `evosdpa-agent`, the program that speaks to language models and agents. It is built apart, so that this one builds without a
//! network stack, and found as cargo finds its subcommands: beside this program, or on PATH.

use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, bail};
use evosdpa_cuda::Program;

use crate::{Status, args::PassedOn};

const NAME: &str = "evosdpa-agent";

/// Where it is.
pub(crate) fn find() -> anyhow::Result<PathBuf> {
    let name = format!("{NAME}{}", env::consts::EXE_SUFFIX);
    let beside = Program::running().ok().and_then(|program| Some(program.path.parent()?.join(&name)));
    let on_path = env::var_os("PATH").unwrap_or_default();
    let candidates = beside.into_iter().chain(env::split_paths(&on_path).map(|folder| folder.join(&name)));
    candidates.into_iter().find(|path| path.is_file()).with_context(|| {
        format!(
            "{NAME} is neither beside this program nor on PATH; in a clone of the repository `cargo build --release --package \
             {NAME}` builds it beside `target/release/evosdpa`, and `cargo install --path crates/agent` puts it on PATH"
        )
    })
}

/// Becomes one of its commands, which starts this program for what it evaluates. Comes back only with an error.
pub(crate) fn run(name: &str, passed: PassedOn) -> anyhow::Result<Status> {
    let path = find()?;
    let own = Program::running().context("cannot find this program to run it again")?;
    let word = |word: &OsStr| {
        let mut argument = OsString::from("--lab=");
        argument.push(word);
        argument
    };
    let words = [own.path.as_os_str()].into_iter().chain(own.arguments.iter().map(OsString::as_os_str));
    let mut command = Command::new(&path);
    command.arg(name).args(words.map(word)).args(passed.arguments);
    Err(command.exec()).with_context(|| format!("cannot run {}", path.display()))
}

/// The command of the proposer that it is, its options checked.
pub(crate) fn proposer(arguments: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let path = find()?;
    let check = Command::new(&path).args(&arguments).arg("--check").stdin(Stdio::null()).output();
    let check = check.with_context(|| format!("cannot run {}", path.display()))?;
    if !check.status.success() {
        let words = String::from_utf8_lossy(&check.stderr);
        bail!("{}", words.trim().trim_start_matches("error: "));
    }
    Ok([path.into_os_string()].into_iter().chain(arguments).collect())
}
