//! Notes which sources the program was made from: `evosdpa` starts it only if they are its own.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=../../crates");
    println!("cargo::rerun-if-changed=../../.git/HEAD");
    println!("cargo::rerun-if-changed=../../.git/index");
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok();
    let revision = output.filter(|output| output.status.success());
    let revision = revision.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    println!("cargo::rustc-env=EVOSDPA_REVISION={}", revision.unwrap_or_else(|| "unknown".to_owned()));
}
