//! `evosdpa-agent`: what joins the lab to language models and to agents. `evosdpa tune --llm` starts it; it is a program of its own so
//! that the lab builds without a network stack.

mod confine;
mod llm;
mod propose;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Joins the evosdpa lab to language models and agents.
#[derive(Parser)]
#[command(name = "evosdpa-agent", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Propose candidates for `evosdpa tune`, by asking a language model: `evosdpa tune --llm` starts this
    Propose(propose::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Propose(args) => propose::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
