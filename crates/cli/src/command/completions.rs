//! `evosdpa completions SHELL`.

use clap::CommandFactory;

use crate::{
    Status,
    args::{Cli, Completions},
    output,
};

pub(crate) fn run(args: Completions) -> anyhow::Result<Status> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "evosdpa", &mut script);
    output::print_whole(&String::from_utf8_lossy(&script))?;
    Ok(Status::Passed)
}
