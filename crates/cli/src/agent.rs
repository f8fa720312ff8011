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
use evosdpa_lab::machine::Environment;

use crate::{Status, args::PassedOn};

const NAME: &str = "evosdpa-agent";

/// Where it is. One that was built from other sources than this program is refused: what the two say to each other may have
/// changed.
pub(crate) fn find() -> anyhow::Result<PathBuf> {
    let path = look()?;
    let said = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
    let said = said.with_context(|| format!("cannot run {}", path.display()))?;
    let said = String::from_utf8_lossy(&said.stdout).trim().to_owned();
    let theirs = said.strip_prefix(NAME).unwrap_or(&said).trim();
    let Environment { version, revision, .. } = Environment::look(None);
    let own = format!("{version} ({revision})");
    if !is_same(theirs, &own) {
        let theirs = if theirs.is_empty() { "of no version that it would say" } else { theirs };
        bail!(
            "{} is {theirs} and this program is {own}: build both from the same sources, `cargo build --release --package {NAME} \
             --package evosdpa-cli`",
            path.display()
        );
    }
    Ok(path)
}

/// Whether two programs are of one version and, where both know it, of one revision.
fn is_same(theirs: &str, own: &str) -> bool {
    let parts = |text: &str| {
        let (version, revision) = text.split_once(" (")?;
        Some((version.to_owned(), revision.strip_suffix(')')?.to_owned()))
    };
    let (Some((their_version, their_revision)), Some((own_version, own_revision))) =
        (parts(theirs), parts(own))
    else {
        return false;
    };
    let unknown = [&their_revision, &own_revision].iter().any(|revision| *revision == "unknown");
    their_version == own_version && (unknown || their_revision == own_revision)
}

fn look() -> anyhow::Result<PathBuf> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_other_sources_are_told_apart() {
        assert!(is_same("0.1.0 (abc)", "0.1.0 (abc)"));
        // A package from a registry does not know its revision.
        assert!(is_same("0.1.0 (unknown)", "0.1.0 (abc)"));
        for theirs in ["0.1.0 (def)", "0.2.0 (abc)", "0.2.0 (unknown)", "0.1.0", ""] {
            assert!(!is_same(theirs, "0.1.0 (abc)"), "{theirs}");
        }
    }
}
