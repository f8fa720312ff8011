//! `evosdpa`: check, time and compare attention kernels. The program is [`run`] with its arguments; the Python package
//! reaches the same commands through it.

mod agent;
mod args;
mod command;
mod interrupt;
mod output;
mod progress;

use std::ffi::OsString;

use clap::Parser;
use evosdpa_lab::gate::Verdict;

use args::{Cli, Command};

/// What a command came to. Wrong use and a bad environment are errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// Every gate that ran passed.
    Passed,
    /// A gate failed.
    Failed,
    /// Nothing could be checked or measured at all.
    Unavailable,
    /// Ctrl-C.
    Interrupted,
}

impl Status {
    /// What gates came to. `enough` says whether those that passed are.
    pub(crate) fn of_gates(verdicts: &[&Verdict], enough: bool) -> Self {
        match () {
            () if interrupt::asked() => Self::Interrupted,
            () if verdicts.iter().any(|verdict| verdict.is_fail()) => Self::Failed,
            () if enough => Self::Passed,
            () => Self::Unavailable,
        }
    }
}

/// Runs one command line, its first word being the program's name, and says with which status to exit. Errors have been
/// printed then.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    // The program starts itself again to compile; such a process does that and nothing else.
    evosdpa_cuda::worker::run_if_requested_by(&arguments);
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(asked) => {
            if asked.use_stderr() {
                output::tell(short_words(&output::fitted(&asked.render().ansi().to_string())).trim_end());
            } else {
                // Help that nobody reads is no reason to fail.
                let _ = asked.print();
            }
            return u8::try_from(asked.exit_code()).unwrap_or(2);
        }
    };
    match dispatch(cli, arguments.get(1..).unwrap_or_default()) {
        Ok(Status::Passed) => 0,
        Ok(Status::Failed) => 1,
        Ok(Status::Unavailable) => 2,
        // As a shell reports a program ended by Ctrl-C.
        Ok(Status::Interrupted) => 130,
        Err(error) if output::is_broken_pipe(&error) => 0,
        Err(error) => {
            let (red, plain) = (output::RED.render(), output::RED.render_reset());
            output::tell(&output::fitted(&format!("{red}error:{plain} {}", short_words(&explain(&error)))));
            2
        }
    }
}

fn dispatch(cli: Cli, own: &[OsString]) -> anyhow::Result<Status> {
    match cli.command {
        Command::Bench(args) if args.repeat.is_some() => command::repeat::run(args, own),
        Command::Bench(args) => command::bench::run(args, None),
        Command::Check(args) => command::check::run(args),
        Command::Build(args) => command::build::run(args),
        Command::Sanitize(args) => command::sanitize::run(args),
        Command::Profile(args) => command::profile::run(args),
        Command::Report(args) => command::report::run(args),
        Command::Tune(args) => command::tune::run(&args, own),
        Command::Evaluator(args) => command::tune::serve(&args),
        Command::Serve(args) => agent::run("serve", args),
        Command::Mcp(args) => agent::run("mcp", args),
        Command::Cache(args) => command::cache::run(args),
        Command::Kernels(args) => command::kernels::run(args),
        Command::Plan(args) => command::plan::run(args),
        Command::Precompile(args) => command::precompile::run(args),
        Command::Apply(args) => command::apply::run(args),
        Command::Export(args) => command::export::run(args),
        Command::Import(args) => command::import::run(args),
        Command::Runs(args) => command::runs::run(args),
        Command::Compare(args) => command::compare::run(args),
        Command::Doctor(args) => command::doctor::run(args),
        Command::Completions(args) => command::completions::run(args),
    }
}

/// Characters of a word that are shown: what was typed may be of any length, and the reason comes after it.
const WORD: usize = 200;

fn short_words(text: &str) -> String {
    let shown = |word: &str| match word.char_indices().nth(WORD) {
        Some((at, _)) => {
            let end = &word[word.trim_end().len()..];
            format!("{}…{end}", &word[..at])
        }
        None => word.to_owned(),
    };
    text.split_inclusive(char::is_whitespace).map(shown).collect()
}

/// What an error quotes of a file may be a line of any length: so much of it is shown.
const LINE: usize = 1000;

/// The error and its causes. Some errors already quote their cause, which is then not said twice.
fn explain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    let shown = |line: &str| match line.char_indices().nth(LINE) {
        Some((at, _)) => format!("{} …", &line[..at]),
        None => line.to_owned(),
    };
    text.split('\n').map(shown).collect::<Vec<_>>().join("\n")
}
