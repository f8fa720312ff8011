//! The command-line program: arguments, `.npy` files, exit status, JSON.

use std::path::Path;
use std::process::{Command, Output};

fn ptxsan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ptxsan")).args(args).output().unwrap()
}

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).display().to_string()
}

/// A version 1.0 `.npy` file of 32-bit floats.
fn write_npy(path: &Path, values: &[f32]) {
    write_npy_as(
        path,
        &format!("'descr': '<f4', 'fortran_order': False, 'shape': ({},)", values.len()),
        values,
    );
}

fn write_npy_as(path: &Path, about: &str, values: &[f32]) {
    let mut header = format!("{{{about}, }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    std::fs::write(path, bytes).unwrap();
}

fn read_npy(path: &Path) -> (String, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let length = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = String::from_utf8_lossy(&bytes[10..10 + length]).into_owned();
    let values =
        bytes[10 + length..].chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
    (header, values)
}

#[test]
fn runs_a_kernel_on_files() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b, c) = (folder.path().join("a.npy"), folder.path().join("b.npy"), folder.path().join("c.npy"));
    write_npy(&a, &[1.0, 2.0, 3.0]);
    write_npy(&b, &[0.5, 0.25, 0.125]);
    let args =
        [format!("in:{}", a.display()), format!("in:{}", b.display()), format!("out:{}:f32:3", c.display())];
    let file = fixture("basics.ptx");
    let mut line = vec!["run", &file, "--entry", "vector_add", "--grid", "1", "--block", "32", "--args"];
    line.extend(args.iter().map(String::as_str));
    line.push("i32:3");
    let output = ptxsan(&line);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("no findings"), "{text}");
    let (header, values) = read_npy(&c);
    assert!(header.contains("'<f4'") && header.contains("(3"), "{header}");
    assert_eq!(values, [1.5, 2.25, 3.125]);
}

#[test]
fn findings_exit_with_one_and_wrong_use_with_two() {
    let file = fixture("hazards.ptx");
    let line = [
        "run",
        &file,
        "--entry",
        "missing_barrier",
        "--grid",
        "1",
        "--block",
        "64",
        "--json",
        "--args",
        "fresh:256",
    ];
    let output = ptxsan(&line);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["schema"], "ptxsan.run/3");
    let findings = json["rows"][0]["findings"].as_array().unwrap();
    assert!(findings.iter().any(|f| f["kind"] == "race"), "{findings:?}");
    assert_eq!(ptxsan(&["run", &file, "--grid", "1", "--block", "64"]).status.code(), Some(2));
    assert_eq!(ptxsan(&["run", "/nonexistent.ptx", "--grid", "1", "--block", "1"]).status.code(), Some(2));
    assert_eq!(ptxsan(&["entries", &file]).status.code(), Some(0));
}

#[test]
fn severities_decide_what_fails_and_suppressions_what_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let file = fixture("findings.ptx");
    let run = |entry: &str, grid: &str, more: &[&str]| {
        let line = ["run", &file, "--entry", entry, "--grid", grid, "--block", "32", "--schedule", "all"];
        ptxsan(&[&line[..], more, &["--json", "--args", "zeros:4"]].concat())
    };
    let code = |entry: &str, more: &[&str]| run(entry, "2", more).status.code();
    assert_eq!(code("same_value", &[]), Some(0));
    assert_eq!(code("same_value", &["--fail-on", "info"]), Some(1));
    assert_eq!(code("lost_update", &[]), Some(1));
    assert_eq!(code("lost_update", &["--fail-on", "error"]), Some(0));
    assert_eq!(code("other_value", &["--fail-on", "error"]), Some(1));
    assert_eq!(code("other_value", &["--fail-on", "never"]), Some(0));
    assert_eq!(code("other_value", &["--fail-on", "fatal"]), Some(2));

    // One finding for all schedules, with how often and under which.
    let json: serde_json::Value = serde_json::from_slice(&run("other_value", "2", &[]).stdout).unwrap();
    let [finding] = &json["findings"].as_array().unwrap()[..] else { panic!("{json}") };
    assert_eq!((&finding["severity"], &finding["kind"]), (&"error".into(), &"race".into()));
    assert_eq!(finding["schedules"].as_array().unwrap().len(), 6, "{finding}");
    assert_eq!(finding["variable"]["name"], "arg0", "{finding}");
    assert_eq!(json["rows"].as_array().unwrap().len(), 6);

    let known = folder.path().join("known.txt");
    let known = |text: &str| {
        std::fs::write(&known, text).unwrap();
        known.display().to_string()
    };
    let output = run("other_value", "2", &["--suppressions", &known("race findings.cu:*\ntrap nowhere\n")]);
    assert_eq!(output.status.code(), Some(0));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((json["findings"].as_array().unwrap().len(), &json["suppressed"]), (0, &6.into()));
    assert_eq!(json["unused_suppressions"], serde_json::json!(["line 2: trap nowhere"]));
    let output = run("other_value", "2", &["--suppressions", &known("racy *")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stdout).contains("line 1: no kind `racy`"));
}

#[test]
fn shuffles_order_memory_where_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("k.ptx");
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n.reg .b32 %r<5>;\n.shared .align 4 .b8 tile[128];\n\
                mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 2;\nmov.u32 %r3, tile;\nadd.s32 %r3, %r3, %r2;\nst.shared.u32 [%r3], %r1;\n\
                shfl.sync.idx.b32 %r4, %r1, 0, 31, -1;\nxor.b32 %r3, %r3, 4;\nld.shared.u32 %r4, [%r3];\nret;\n}\n";
    std::fs::write(&file, text).unwrap();
    let file = file.display().to_string();
    let line = ["run", &file, "--grid", "1", "--block", "32"];
    assert_eq!(ptxsan(&line).status.code(), Some(1));
    assert_eq!(ptxsan(&[&line[..], &["--collectives-order-memory"]].concat()).status.code(), Some(0));
}

#[test]
fn what_cannot_be_run_is_listed_and_grids_synchronise() {
    let file = fixture("refusals.ptx");
    let listed = ptxsan(&["entries", &file]);
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(text.contains("textured: cannot be run: refusals.cu:"), "{text}");
    let line = ["run", &file, "--entry", "grid_sync", "--grid", "3", "--block", "32"];
    let args = ["--args", "fresh:384", "fresh:384"];
    assert_eq!(ptxsan(&[&line[..], &["--cooperative"], &args].concat()).status.code(), Some(0));
    let refused = ptxsan(&[&line[..], &args].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--cooperative"));
}

/// `vector_add` of `a`, `b` into `c`, three elements.
fn vector_add(a: &str, b: &str, c: &str) -> Output {
    let file = fixture("basics.ptx");
    let line = ["run", &file, "--entry", "vector_add", "--grid", "1", "--block", "32", "--args", a, b, c];
    ptxsan(&[&line[..], &["i32:3"]].concat())
}

#[test]
fn files_change_in_place_and_files_of_another_kind_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (a, c) = (path("a.npy"), path("c.npy"));
    write_npy(&a, &[1.0, 2.0, 3.0]);
    let from = format!("in:{}", a.display());
    let output = vector_add(&from, &from, &format!("inout:{}:{}", a.display(), c.display()));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(read_npy(&c).1, [2.0, 4.0, 6.0]);

    let refused = |b: &str, expected: &str| {
        let output = vector_add(&from, b, "fresh:12");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{b}: {text}");
        assert!(text.contains(expected), "{b}: {text}");
    };
    for (name, about, expected) in [
        ("big.npy", "'descr': '>f4', 'fortran_order': False, 'shape': (3,)", "big-endian"),
        ("turned.npy", "'descr': '<f4', 'fortran_order': True, 'shape': (3, 1)", "Fortran"),
        ("wide.npy", "'descr': '<c16', 'fortran_order': False, 'shape': (3,)", "16 bytes"),
        ("short.npy", "'descr': '<f4', 'fortran_order': False, 'shape': (4,)", "12 bytes of data where 16"),
        (
            "huge.npy",
            "'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807,)",
            "can be addressed",
        ),
    ] {
        write_npy_as(&path(name), about, &[1.0, 2.0, 3.0]);
        refused(&format!("in:{}", path(name).display()), expected);
    }
    std::fs::write(path("no.npy"), "not an array").unwrap();
    refused(&format!("in:{}", path("no.npy").display()), "no.npy");
}

#[test]
fn hostile_arguments_are_wrong_use() {
    for arg in [
        "",
        "zeros",
        "zeros:",
        "zeros:-1",
        "zeros:18446744073709551615",
        "fresh:18446744073709551615",
        "fresh:99999999999999999999",
        "out:x.npy:f32:4294967296x4294967296x4294967296",
        "out:x.npy:f99:3",
        "out:x.npy",
        "in:/nonexistent.npy",
        "inout:x.npy",
        "i32:4294967296",
        "f32:one",
        "bytes:0",
        "bytes:zz",
        "bytes:é",
        "struct:",
        "struct:i32:1+",
        "pointer:0",
    ] {
        let output = vector_add("zeros:12", "zeros:12", arg);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arg}: {text}");
        assert!(text.starts_with("ptxsan: argument 2"), "{arg}: {text}");
    }
    let file = fixture("basics.ptx");
    for (grid, block) in [
        ("0", "32"),
        ("1", "0"),
        ("1", "2048"),
        ("4294967295,4294967295,4294967295", "32"),
        ("1,2,3,4", "1"),
        ("-1", "1"),
    ] {
        let line = ["run", &file, "--entry", "vector_add", "--grid", grid, "--block", block, "--args"];
        let output = ptxsan(&[&line[..], &["zeros:12", "zeros:12", "zeros:12", "i32:3"]].concat());
        assert_eq!(
            output.status.code(),
            Some(2),
            "{grid} {block}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn a_kernel_with_findings_has_no_score() {
    let file = fixture("hazards.ptx");
    let line = ["mutate", &file, "--entry", "missing_barrier", "--grid", "1", "--block", "64", "--json"];
    let output = ptxsan(&[&line[..], &["--args", "fresh:256"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = json["unmutated_findings"].as_array().unwrap();
    assert!(findings.iter().any(|finding| finding.as_str().unwrap().contains("data race")), "{json}");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ptxsan"))
        .args(["entries", &fixture("basics.ptx")])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{output:?}");
}

#[test]
fn mutation_score_of_a_pipeline() {
    let file = fixture("tensor.ptx");
    let line = [
        "mutate",
        &file,
        "--entry",
        "pipeline",
        "--grid",
        "1",
        "--block",
        "128",
        "--schedule",
        "all",
        "--json",
        "--args",
        "zeros:22528",
        "fresh:22528",
        "i32:11",
    ];
    let output = ptxsan(&line);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["noticed"], json["matter"]);
    assert!(json["matter"].as_u64().unwrap() >= 8);
}

#[test]
fn a_tensor_map_is_an_argument() {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/hopper/capture.ptx").display().to_string();
    let run = |map: &str| {
        let line = [
            "run",
            &file,
            "--entry",
            "tensor_load_2",
            "--grid",
            "1",
            "--block",
            "128",
            "--shared",
            "8192",
            "--args",
        ];
        let rest = [map, "zeros:8196", "i32:1024", "i32:0", "i32:0", "i32:0", "i32:0", "i32:0", "i32:0"];
        ptxsan(&[&line[..], &rest[..]].concat())
    };
    let output = run("map:1:f16:64x8:128:64x8:128");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    // Most kernels for Hopper take maps and no pointers: what they are of stands beside the arguments.
    let line = ["--buffer", "tile=zeros:1K", "--entry", "tensor_load_2", "--grid", "1", "--block", "128"];
    let args = ["--shared", "8192", "--args", "map:@tile:f16:64x8:128:64x8:128", "zeros:8196", "i32:1024"];
    let output = ptxsan(&[&["run", &file], &line[..], &args, &["i32:0"; 6]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
    for (map, word) in [
        ("map:0:f16:64x8:128:64x8:128", "no buffer"),
        ("map:0:f16:64x8", "expected map"),
        ("map:1:f16:64x8:100:64x8", "multiples of 16"),
    ] {
        let output = run(map);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(word), "{text}");
    }
}

/// What a kernel takes by value or finds behind a pointer, maps in it at multiples of 64 bytes.
#[test]
fn structures_and_pointers_hold_what_arguments_do() {
    const PTX: &str = "\u{feff}.version 8.0\n.target sm_90a\n.address_size 64\n\
        .visible .entry k(.param .u64 p, .param .align 64 .b8 s[192], .param .u64 o)\n{\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\n\
        ld.param.u64 %rd1, [p];\nld.global.u32 %r1, [%rd1+8];\nld.param.u32 %r2, [s+128];\nadd.u32 %r1, %r1, %r2;\n\
        ld.param.u64 %rd2, [o];\nst.global.u32 [%rd2], %r1;\nret;\n}\n";
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("k.ptx"), folder.path().join("o.npy").display().to_string());
    std::fs::write(&file, PTX).unwrap();
    let file = file.display().to_string();
    let map = "map:@tile:f16:64x8:128:64x8:128";
    let run = |pointer: &str, by_value: &str| {
        let line = ["run", &file, "--grid", "1", "--block", "1", "--buffer", "tile=zeros:1K", "--args"];
        ptxsan(&[&line[..], &[pointer, by_value, &format!("out:{out}:i32:1")]].concat())
    };
    let output = run("ptr:struct:u64:1+i32:7", &format!("struct:{map}+i32:5"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(read_npy(Path::new(&out)).1[0].to_bits(), 12);
    let output = run(&format!("ptr:{map}"), &format!("struct:i32:0+{map}"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output = run("ptr:map:0:f16:64x8:128:64x8:128", &format!("struct:{map}+i32:5"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("as @NAME"), "{output:?}");
}

/// A bool is a u8; in a structure each lies at a multiple of its size.
#[test]
fn narrow_numbers_are_arguments() {
    const PTX: &str = ".version 8.0\n.target sm_80\n.address_size 64\n\
        .visible .entry k(.param .u64 o, .param .u8 flag, .param .align 4 .b8 s[8])\n{\n.reg .b16 %h<3>;\n.reg .b32 %r<5>;\n\
        .reg .b64 %rd<2>;\nld.param.u8 %r1, [flag];\nld.param.u16 %r2, [s+2];\nld.param.u32 %r3, [s+4];\nld.param.u8 %r4, [s];\n\
        ld.param.u64 %rd1, [o];\nst.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};\nret;\n}\n";
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("k.ptx"), folder.path().join("o.npy").display().to_string());
    std::fs::write(&file, PTX).unwrap();
    let file = file.display().to_string();
    let run = |flag: &str, fields: &str| {
        let line = ["run", &file, "--grid", "1", "--block", "1", "--args", &format!("out:{out}:i32:4")];
        ptxsan(&[&line[..], &[flag, fields]].concat())
    };
    let output = run("u8:1", "struct:i8:-1+f16:1.5+i32:7");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let bits: Vec<u32> = read_npy(Path::new(&out)).1.iter().map(|v| v.to_bits()).collect();
    assert_eq!(bits, [1, 0x3e00, 7, 0xff]);
    for (flag, fields) in
        [("u8:256", "struct:bytes:0000000000000000"), ("u8:1,1", "i64:0"), ("bf16:x", "i64:0")]
    {
        let output = run(flag, fields);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).starts_with("ptxsan: argument 1"), "{output:?}");
    }
}

#[test]
fn what_holds_for_all_launches_stands_before_the_first_then() {
    let file = fixture("hazards.ptx");
    let line = [
        "run",
        &file,
        "--entry",
        "deadlock",
        "--grid",
        "1",
        "--block",
        "64",
        "--args",
        "zeros:256",
        "--then",
    ];
    for (option, value) in [("--schedule", "all"), ("--budget", "100"), ("--fail-on", "error")] {
        let output = ptxsan(
            &[&line[..], &["--entry", "deadlock", "--grid", "1", "--block", "64", option, value]].concat(),
        );
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&format!("{option} holds for all launches")), "{said}");
    }
}
