//! The limits that evaluations run within.

use std::process::{Command, Output};

fn confined(folder: &std::path::Path, more: &[&str], script: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evosdpa-agent"));
    command
        .args(["confine", "--cpu-s=50", "--file-bytes=1000000"])
        .arg(format!("--writable={}", folder.display()));
    command.args(more).args(["--", "sh", "-c", script]).current_dir(folder).output().unwrap()
}

#[test]
fn a_confined_program_has_little() {
    let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let output = confined(
        own.path(),
        &["--memory-bytes=1073741824"],
        "ulimit -v; ulimit -t; ulimit -c; echo x > here; cat here",
    );
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "1048576\n50\n0\nx\n");
    // A file that grows past the limit ends who writes it.
    assert!(!confined(own.path(), &[], "exec head -c 2000000 /dev/zero > big").status.success());
    assert!(std::fs::metadata(own.path().join("big")).unwrap().len() <= 1_000_000);
    // Where the kernel has Landlock nothing is written elsewhere.
    let there = other.path().join("there");
    let script = format!("echo x > {}", there.display());
    let has_landlock =
        std::fs::read_to_string("/sys/kernel/security/lsm").is_ok_and(|all| all.contains("landlock"));
    let output = confined(own.path(), &[], &script);
    assert!(!has_landlock || (!output.status.success() && !there.exists()));

    // A proposer that cannot open a socket says so, and the service hears nothing.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let agent = env!("CARGO_BIN_EXE_evosdpa-agent");
    let request = r#"{"number":1,"left":1,"task":{"space":{"kernel":"k","dimensions":[]},"device_name":"","arch":"","problems":[]},"source":null,"elites":[],"insights":[],"history":[]}"#;
    let script = format!(
        "echo '{request}' | {agent} propose --folder . --url http://{address}/v1 --model m --timeout 1"
    );
    let output = confined(own.path(), &[], &script);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("\"error\"") && said.contains("cannot be asked"), "{said}");
    assert!(listener.accept().is_err(), "somebody came through");
}
