//! The `evosdpa` program, for this crate's tests: cargo builds the programs of the package it tests, and no others.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(evosdpa_cli::run(std::env::args_os()))
}
