//! A hostile newcomer: every mistake exits with 2 and says what was given, what is possible and what helps, in JSON where that was asked for.

use std::path::Path;
use std::process::Command;

const PTX: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u32 n, .param .u64 x, .param .f64 d) { ret; }\n\
                   .visible .entry e() { ret; }\n";

/// Mistakes in launching `e`, which takes nothing: what is wrong, and words of the answer.
const LAUNCHES: [(&str, &[&str]); 29] = [
    ("--grid 0 --block 1", &["'0'", "from 1 on", "32x8"]),
    ("--grid NaN --block 1", &["`NaN`", "whole number", "32x8"]),
    ("--grid -1 --block 1", &["-1"]),
    ("--grid 1.5 --block 1", &["`1.5`", "whole number"]),
    ("--grid 1x2x3x4 --block 1", &["4 numbers", "one to three"]),
    ("--grid 99999999999 --block 1", &["`99999999999`", "4294967295"]),
    ("--grid 4294967295 --block 1", &["4294967295", "1 to 2147483647"]),
    ("--grid 1x70000 --block 1", &["70000", "65535"]),
    ("--grid 2147483647 --block 1024", &["2147483647", "fewer blocks", "--budget"]),
    ("--grid 1 --block 2000", &["2000", "1 to 1024 threads", "more blocks"]),
    ("--grid 1 --block 1x1x65", &["65", "at most 64 in z"]),
    ("--grid 3 --block 1 --cluster 2", &["[3, 1, 1]", "multiple", "[2, 1, 1]"]),
    ("--grid 32 --block 1 --cluster 32", &["32", "1 to 16"]),
    ("--block 1", &["--grid"]),
    ("--grid 1 --block 1 --shared 10T", &["`10T`", "`T`", "64K"]),
    ("--grid 1 --block 1 --shared NaN", &["`NaN`", "64K"]),
    ("--grid 1 --block 1 --shared 1G", &["1073741824", "232448", "--max-shared"]),
    ("--grid 1 --block 1 --shared 8G", &["8589934592", "227K"]),
    ("--grid 1 --block 1 --args i32:1", &["takes 0 arguments", "1 were given"]),
    ("--grid 1 --block 1 --schedule never", &["'never'", "round-robin", "all"]),
    ("--grid 1 --block 1 --budget 0", &["'0'", "1.."]),
    ("--grid 1 --block 1 --fail-on fatal", &["`fatal`", "info, warning and error"]),
    ("--grid 1 --block 1 --wibble", &["--wibble"]),
    ("--grid 1 --block 1 --set a", &["--set a", "NAME=f32:1.5"]),
    ("--grid 1 --block 1 --set a=f32:1", &["no variable `a`", "none"]),
    ("--grid 1 --block 1 --read a", &["--read a", "table:f32"]),
    ("--grid 1 --block 1 --sarif /nowhere/at/all/x.sarif", &["/nowhere/at/all/x.sarif"]),
    ("--grid 1 --block 1 --suppressions /nowhere.txt", &["/nowhere.txt"]),
    ("--grid 1 --block 1 --then --grid 1", &["--block"]),
];

/// Mistakes in the arguments of `k`, which takes an i32, a pointer and an f64.
const ARGUMENTS: [(&str, &[&str]); 12] = [
    ("i32:1", &["3 arguments of 4, 8, 8 bytes", "1 were given"]),
    ("i64:1 zeros:4 f64:1", &["argument 0 (`n`) has 4 bytes, 8 were given"]),
    ("i32:x zeros:4 f64:1", &["argument 0", "`x`", "i32"]),
    ("int:1 zeros:4 f64:1", &["`int`", "zeros", "i32"]),
    ("5 zeros:4 f64:1", &["argument 0 (`5`)", "KIND:VALUE"]),
    ("i32:1 @x f64:1", &["no buffer `x`", "x=zeros:64K"]),
    ("i32:1 zeros:99G f64:1", &["argument 1", "106300440576", "17179869184"]),
    ("i32:1 zeros:NaN f64:1", &["`zeros:NaN`", "64K"]),
    ("i32:1 in:/nowhere.npy f64:1", &["/nowhere.npy"]),
    ("i32:1 out:/nowhere/x.npy:f32:2 f64:1", &["/nowhere/x.npy", "no folder"]),
    ("i32:1 out:x.npy:f32:axb f64:1", &["`axb`", "2x3"]),
    ("x=i32:1 zeros:4 f64:1", &["only a buffer", "`x=`"]),
];

/// What the program says of a mistake, as a document with `--json` at the place given, and as text.
fn refused(words: &[&str], json_at: usize, name: &str) -> String {
    let run = |words: &[&str]| Command::new(env!("CARGO_BIN_EXE_ptxsan")).args(words).output().unwrap();
    let mut with_json = words.to_vec();
    with_json.insert(json_at.min(words.len()), "--json");
    let output = run(&with_json);
    assert_eq!(output.status.code(), Some(2), "{name}: {output:?}");
    let said: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{name}: {error}: {output:?}"));
    assert_eq!(said["schema"], "ptxsan.error/1", "{name}");
    assert!(output.stderr.is_empty(), "{name}: {output:?}");
    let text = run(words);
    assert_eq!(text.status.code(), Some(2), "{name}");
    assert!(text.stdout.is_empty() && !text.stderr.is_empty(), "{name}: {text:?}");
    said["error"]["message"].as_str().unwrap().to_owned()
}

fn check(words: &[&str], json_at: usize, expected: &[&str]) {
    let name = words.join(" ");
    let message = refused(words, json_at, &name);
    for word in expected {
        assert!(message.contains(word), "{name}: `{word}` is not in: {message}");
    }
}

fn written(folder: &Path, name: &str, bytes: &[u8]) -> String {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

#[test]
fn launches_and_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let file = written(folder.path(), "two.ptx", PTX.as_bytes());
    for (at, (line, expected)) in LAUNCHES.iter().enumerate() {
        let words: Vec<&str> = ["run", &file, "--entry", "e"].into_iter().chain(line.split(' ')).collect();
        // In front of everything, at the end, and everywhere between options.
        check(&words, [0, usize::MAX, 2, 4][at % 4], expected);
    }
    for (line, expected) in ARGUMENTS {
        let words = ["run", &file, "--entry", "k", "--grid", "1", "--block", "1", "--args"];
        check(&words.into_iter().chain(line.split(' ')).collect::<Vec<_>>(), usize::MAX, expected);
    }
}

#[test]
fn files_and_commands() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| written(folder.path(), name, bytes);
    let folder_name = folder.path().display().to_string();
    let good = write("two.ptx", PTX.as_bytes());
    let files: [(String, &[&str]); 8] = [
        ("/nowhere/k.cu".to_owned(), &["/nowhere/k.cu", "No such file"]),
        (folder_name, &["directory"]),
        (write("empty.ptx", b""), &["is empty", "CUDA source or PTX"]),
        (write("blank.cu", b" \n"), &["is empty"]),
        (write("noise.ptx", &[0xff, 0xfe, 0x80]), &["not UTF-8", "byte 0"]),
        (write("k.cubin", b"\x7fELF\x02\x01"), &["ELF", "cuobjdump -ptx"]),
        (write("json.ptx", b"{\"a\": 1}"), &["line 1", "found `{`"]),
        (
            write("func.ptx", b".version 8.0\n.target sm_80\n.address_size 64\n.func f() { ret; }\n"),
            &["no kernel", ".entry"],
        ),
    ];
    for (file, expected) in &files {
        check(&["run", file, "--grid", "1", "--block", "1"], 1, expected);
    }
    let launch = ["--grid", "1", "--block", "1"];
    let with = |first: &[&'static str]| -> Vec<String> {
        first.iter().map(|word| if *word == "GOOD" { good.clone() } else { (*word).to_owned() }).collect()
    };
    for (first, expected) in [
        (&["run", "GOOD"][..], &["none was named", "e, k"][..]),
        (&["run", "GOOD", "--entry", "nope"], &["no entry `nope`", "e, k"]),
        (&["run", "GOOD", "--entry", ""], &["no entry ``", "e, k"]),
        (&["mutate", "GOOD", "--entry", "e", "--then"], &["--then", "ptxsan run"]),
        (&["run", "GOOD", "--entry", "e", "--buffer", "zeros:4"], &["--buffer zeros:4", "NAME=KIND:VALUE"]),
        (&["run", "GOOD", "--entry", "e", "--buffer", "a=i32:4"], &["only a buffer", "`a=`"]),
        (&["frobnicate", "GOOD"], &["frobnicate"]),
        (&["run"], &["FILE"]),
    ] {
        let words = with(first);
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        let at = words.iter().position(|word| *word == "--then").unwrap_or(words.len());
        words.splice(at..at, launch);
        check(&words, 0, expected);
    }
    check(&[], 0, &["Usage"]);
}
