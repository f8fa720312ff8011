//! The `evosdpa` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    // What a proposer leaves behind is ended with it.
    evosdpa_lab::process::adopt_orphans();
    ExitCode::from(evosdpa_cli::run(std::env::args_os()))
}
