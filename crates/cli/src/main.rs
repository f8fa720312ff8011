//! `evosdpa`: check, time and compare attention kernels.

mod args;
mod command;
mod interrupt;
mod output;
mod progress;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// What a command found: nothing wrong, or a gate that failed. Wrong use and a bad environment are errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    NothingWrong,
    Failure,
    /// Nothing could be checked at all.
    Unavailable,
    Interrupted,
}

fn main() -> ExitCode {
    // The program starts itself again to compile; such a process does that and nothing else.
    evosdpa_cuda::worker::run_if_requested();
    match run(Cli::parse()) {
        Ok(Found::NothingWrong) => ExitCode::SUCCESS,
        Ok(Found::Failure) => ExitCode::from(1),
        Ok(Found::Unavailable) => ExitCode::from(2),
        // As a shell reports a program ended by Ctrl-C.
        Ok(Found::Interrupted) => ExitCode::from(130),
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let (red, plain) = (output::RED.render(), output::RED.render_reset());
            anstream::eprintln!("{red}error:{plain} {}", explain(&error));
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<Found> {
    match cli.command {
        Command::Bench(args) => command::bench::run(args),
        Command::Check(args) => command::check::run(args),
        Command::Build(args) => command::build::run(args),
        Command::Sanitize(args) => command::sanitize::run(args),
        Command::Profile(args) => command::profile::run(args),
        Command::Report(args) => command::report::run(args),
        Command::Tune(args) => command::tune::run(args),
        Command::Cache(args) => command::cache::run(args),
        Command::Kernels(args) => command::kernels::run(args),
        Command::Plan(args) => command::plan::run(args),
        Command::Apply(args) => command::apply::run(args),
        Command::Runs(args) => command::runs::run(args),
        Command::Compare(args) => command::compare::run(args),
        Command::Doctor(args) => command::doctor::run(args),
        Command::Completions(args) => command::completions::run(args),
    }
}

/// The error and its causes. Some errors already quote their cause, which is then not said twice.
fn explain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
