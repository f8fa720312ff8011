//! `evosdpa-agent`: what joins the lab to language models and to agents. `evosdpa tune --llm`, `serve` and `mcp` start it; it is a program of its own so
//! that the lab builds without a network stack.

mod confine;
mod evaluate;
mod llm;
mod mcp;
mod propose;
mod serve;

use std::{io::Write, process::ExitCode};

use clap::{Parser, Subcommand};

/// What `evosdpa` compares with its own: the version, and the revision of the sources.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("EVOSDPA_REVISION"), ")");

/// Joins the evosdpa lab to language models and agents.
#[derive(Parser)]
#[command(name = "evosdpa-agent", version = VERSION, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Propose candidates for `evosdpa tune`, by asking a language model: `evosdpa tune --llm` starts this
    Propose(propose::Args),
    /// Evaluate kernels for agents, over HTTP: `evosdpa serve` starts this
    Serve(serve::Args),
    /// Evaluate kernels for agents, as tools of the Model Context Protocol, over standard input and output: `evosdpa mcp` starts this
    Mcp(mcp::Args),
    /// Run a program within limits of memory, time, files and network: how evaluations are started
    Confine(confine::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Propose(args) => propose::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Mcp(args) => mcp::run(&args),
        Command::Confine(args) => confine::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // That nobody can read it changes nothing.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::from(2)
        }
    }
}
