//! `ptxsan`: run a CUDA kernel on the CPU and report what it does wrong.
//!
//! Exit status: 0 nothing found that fails (see `--fail-on`), 1 findings, 2 wrong use.

mod arguments;
mod entries;
mod input;
mod mutate;
mod npy;
mod options;
mod run;
mod session;
mod values;

use anyhow::{Result, bail};
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser};
use options::{Cli, Command, LaunchArgs, Next};
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

/// Between one launch and the next.
const THEN: &str = "--then";

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    // Known before the command line is understood, so that what is wrong with it can be said in JSON too.
    let json = words.iter().any(|word| word == "--json");
    match command(&words, json) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        // Nobody reads any more, as in `ptxsan run … | head -1`: that is no mistake of the user's.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&error, json),
    }
}

fn command(words: &[OsString], json: bool) -> Result<bool> {
    let mut parts = words.split(|word| word == THEN);
    let cli = Cli::try_parse_from(parts.next().unwrap_or_default())?;
    let mut parts = parts.peekable();
    match cli.command {
        Command::Run(args) => {
            // `--json` may stand anywhere.
            let own =
                |part: &[OsString]| part.iter().filter(|word| *word != "--json").cloned().collect::<Vec<_>>();
            let then: Result<Vec<LaunchArgs>> = parts.map(|part| next_launch(own(part))).collect();
            let then = then?;
            run::run(&args, &then, json)
        }
        _ if parts.peek().is_some() => bail!("--then is for `ptxsan run`: leave it out"),
        Command::Entries(args) => entries::entries(&args, json),
        Command::Mutate(args) => mutate::mutate(&args, json),
    }
}

/// The launch after a `--then`. What holds for all launches is said before the first of them.
fn next_launch(words: Vec<OsString>) -> Result<LaunchArgs> {
    let error = match Next::try_parse_from(words) {
        Ok(next) => return Ok(next.launch),
        Err(error) => error,
    };
    let of_all = |word: &str| {
        let run = Cli::command();
        let run = run.find_subcommand("run")?;
        let known =
            |arg: &&clap::Arg| arg.get_long().is_some_and(|long| word.trim_start_matches('-') == long);
        run.get_arguments().find(known).map(|_| ())
    };
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg)
        && of_all(word).is_some()
    {
        bail!("{word} holds for all launches: put it before the first --then");
    }
    Err(error.into())
}

/// Says what was wrong, as text or as a document.
fn failed(error: &anyhow::Error, json: bool) -> ExitCode {
    let clap = error.downcast_ref::<clap::Error>();
    if let Some(clap) = clap.filter(|clap| !json || clap.exit_code() == 0) {
        // Help and the version are no errors. A closed pipe cannot be told.
        let _ = clap.print();
        return ExitCode::from(clap.exit_code().clamp(0, 2) as u8);
    }
    let message = match clap {
        Some(clap) => clap.to_string().trim_start_matches("error: ").trim_end().to_owned(),
        None => format!("{error:#}"),
    };
    if json {
        let error = serde_json::json!({ "kind": kind(error), "message": message });
        let document = serde_json::json!({ "schema": "ptxsan.error/1", "error": error });
        let _ = say(&format!("{document}\n"));
    } else {
        eprintln!("ptxsan: {message}");
    }
    ExitCode::from(2)
}

/// What an error is about, for programs.
fn kind(error: &anyhow::Error) -> &'static str {
    use ptxsan::Error;
    match error.downcast_ref::<Error>() {
        Some(Error::Parse { .. } | Error::Unsupported { .. }) => "ptx",
        Some(Error::Compiler(_) | Error::Rejected { .. }) => "compile",
        Some(Error::Launch { .. } | Error::TensorMap(_) | Error::Memory(_)) => "launch",
        Some(_) => "name",
        None if error.downcast_ref::<std::io::Error>().is_some() => "file",
        None => "usage",
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Writes to the standard output at once.
fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}
