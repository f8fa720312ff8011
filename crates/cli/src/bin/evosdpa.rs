//! The `evosdpa` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(evosdpa_cli::run(std::env::args_os()))
}
