//! Notes which sources and which compiler a binary was made from, for the records it will write.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=../../crates");
    println!("cargo::rerun-if-changed=../../.git/HEAD");
    println!("cargo::rerun-if-changed=../../.git/index");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let compiler = said(&rustc, &["--version"]);
    let revision = said("git", &["rev-parse", "--short=12", "HEAD"]);
    // No answer is "not known", which is not the same as clean.
    let dirty = said("git", &["status", "--porcelain"]).map(|changes| (!changes.is_empty()).to_string());
    for (name, value) in
        [("EVOSDPA_COMPILER", compiler), ("EVOSDPA_REVISION", revision), ("EVOSDPA_DIRTY", dirty)]
    {
        println!("cargo::rustc-env={name}={}", value.unwrap_or_else(|| "unknown".to_owned()));
    }
}

fn said(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
