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
    Interrupted,
}

fn main() -> ExitCode {
    // Compilers run in child processes of this same program.
    evosdpa_cuda::worker::run_if_requested();
    match run(Cli::parse()) {
        Ok(Found::NothingWrong) => ExitCode::SUCCESS,
        Ok(Found::Failure) => ExitCode::from(1),
        // As a shell reports a program ended by Ctrl-C.
        Ok(Found::Interrupted) => ExitCode::from(130),
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            anstream::eprintln!("{}error:{} {error:#}", output::RED.render(), output::RED.render_reset());
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<Found> {
    match cli.command {
        Command::Bench(args) => command::bench::run(args),
        Command::Check(args) => command::check::run(args),
        Command::Kernels(args) => command::kernels::run(args),
        Command::Runs(args) => command::runs::run(args),
        Command::Compare(args) => command::compare::run(args),
        Command::Doctor(args) => command::doctor::run(args),
        Command::Completions(args) => command::completions::run(args),
    }
}
