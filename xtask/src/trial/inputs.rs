//! Bad input of every kind: values, files, manifests, tables.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Context;
use serde_json::{Value, json};

use super::{Ended, Trial, ended};

/// No refusal may take longer, on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);

const SHAPES: [&str; 44] = [
    "",
    "x",
    "tyni",
    "mission2",
    "b",
    "b1",
    "b1h1",
    "b1h1s1",
    "h1s1d1",
    "b0h1s1d1",
    "b1h0s1d1",
    "b1h1s0d0",
    "b1h1s1d0",
    "b1h1s1d513",
    "b1h1s1d99999",
    "b-1h1s1d1",
    "b1h-2s1d1",
    "b1.5h1s1d1",
    "b1h3/2s4d8",
    "b1h2/0s4d8",
    "b1h1s1d64/0",
    "b1h1s1d64/9999",
    "b99999999999999999999h1s1d1",
    "b4000000000h4000000000s4000000000d64",
    "b1h1s1d1d1",
    "d64b1h1s1",
    "b1h1s1d1:",
    "b1h1s1d1:foo",
    "tiny:casual",
    "tiny:window",
    "tiny:window=",
    "tiny:window=-1/0",
    "tiny:window=a/b",
    "tiny:window=1/2/3",
    "tiny:chunk=0",
    "tiny:softcap=0",
    "tiny:softcap=nan",
    "tiny:softcap=-3",
    "tiny:paged=0",
    "tiny:paged=9999",
    "tiny:kv=f99",
    "tiny:scales=room",
    "tiny:bias=zz",
    "🦀",
];
const DTYPES: [&str; 12] =
    ["", "x", "f61", "F32 ", "int4", "float", "fp16", "bf61", "e5m3", "16", "-1", "🦀"];
const DEVICES: [&str; 10] =
    ["", "gpu", "tpu", "cuda:x", "cuda:-1", "cuda:", "cpu:1", "cpu,cuda", " cpu", "🦀"];
const KERNELS: [&str; 12] = [
    "",
    "nope",
    "cpu_falsh",
    "sdpa_v2",
    "cpu_flash[",
    "cpu_flash[X]",
    "cpu_flash[X=1]",
    "cpu_flash[BLOCK_Q=-1]",
    "cpu_flash[BLOCK_Q=99999999999999999999]",
    "cpu_flash[BLOCK_Q=48]",
    "cpu_flash[BLOCK_KV=33 BLOCK_Q=48]",
    "🦀",
];
const NUMBERS: [&str; 7] = ["-1", "x", "", "1e99", "99999999999999999999", "1,5", "🦀"];
const SECONDS: [&str; 7] = ["-1", "0", "x", "", "nan", "inf", "1e400"];

/// Options with whole numbers, and with seconds.
const COUNTS: [(&[&str], &str); 11] = [
    (&["bench", "--shapes", "tiny"], "--iters"),
    (&["bench", "--shapes", "tiny"], "--threads"),
    (&["bench", "--shapes", "tiny"], "--repeat"),
    (&["bench", "--shapes", "tiny"], "--self-test"),
    (&["bench", "--shapes", "tiny"], "--seed"),
    (&["check", "--device", "cpu", "--shapes", "tiny"], "--seeds"),
    (&["check", "--device", "cpu", "--shapes", "tiny"], "--runs"),
    (&["tune", "--device", "cpu", "--shapes", "tiny"], "--evaluations"),
    (&["tune", "--device", "cpu", "--shapes", "tiny"], "--top"),
    (&["tune", "--device", "cpu", "--shapes", "tiny"], "--blocks"),
    (&["tune", "--device", "cpu", "--shapes", "tiny"], "--evaluators"),
];
const TIMES: [(&[&str], &str); 6] = [
    (&["bench", "--shapes", "tiny"], "--budget"),
    (&["bench", "--shapes", "tiny"], "--baseline-timeout"),
    (&["check", "--device", "cpu", "--shapes", "tiny"], "--time-limit"),
    (&["tune", "--device", "cpu", "--shapes", "tiny"], "--minutes"),
    (&["tune", "--device", "cpu", "--shapes", "tiny"], "--proposer-timeout"),
    (&["sanitize", "--device", "sim", "--kernels", "sdpa_v1"], "--timeout"),
];

/// Commands that take a file, which is put in place of `@`.
const READERS: [&[&str]; 11] = [
    &["report", "@", "--out", "-"],
    &["compare", "@", "@"],
    &["apply", "@", "--table", "t.toml"],
    &["build", "--parse", "@"],
    &["profile", "--import", "@", "--shape", "mission"],
    &["tune", "--simulate", "@"],
    &["tune", "--device", "cpu", "--shapes", "tiny", "--prior", "@"],
    &["import", "kernelbench", "@", "--shape", "tiny"],
    &["import", "gpumode", "@", "--shape", "tiny"],
    &["import", "openevolve", "@", "--shape", "tiny", "--kernel", "sdpa_v1"],
    &["bench", "--shapes", "tiny", "--kernel-path", "@"],
];

/// A bad input and where it is.
struct Case {
    kind: &'static str,
    arguments: Vec<String>,
    /// A file that is put there before, and whether it is the user's table.
    file: Option<(String, Vec<u8>)>,
    /// What the message must have in it.
    named: Option<String>,
}

fn case(kind: &'static str, arguments: &[&str], named: Option<&str>) -> Case {
    let arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
    Case { kind, arguments, file: None, named: named.map(str::to_owned) }
}

/// All cases; they depend on nothing.
fn cases(root: &Path) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    // What is empty, or a comma's neighbour, cannot be quoted.
    let name_of =
        |value: &'static str| Some(value.trim()).filter(|value| !value.is_empty() && !value.contains(','));
    for shape in SHAPES {
        let named = name_of(shape);
        cases.push(case("shape", &["bench", "--no-baselines", "--shapes", shape], named));
        cases.push(case("shape", &["check", "--device", "cpu", "--shapes", shape], named));
        cases.push(case("shape", &["tune", "--device", "cpu", "--shapes", shape], named));
        cases.push(case("shape", &["plan", "--device", "cpu", shape], named));
        cases.push(case("shape", &["export", "gpumode", "--out", "x", "--shape", shape], named));
    }
    for dtype in DTYPES {
        let named = name_of(dtype);
        for command in
            [&["bench", "--shapes", "tiny"][..], &["check", "--device", "cpu"], &["plan", "tiny"], &["tune"]]
        {
            cases.push(case("dtype", &[command, &["--dtype", dtype]].concat(), named));
        }
    }
    for device in DEVICES {
        for command in ["bench", "check", "tune", "kernels", "profile"] {
            cases.push(case("device", &[command, "--device", device], name_of(device)));
        }
    }
    for kernel in KERNELS {
        let named = name_of(kernel).map(|name| name.split('[').next().unwrap_or(name));
        cases.push(case(
            "kernel",
            &["bench", "--device", "cpu", "--shapes", "tiny", "--kernels", kernel],
            named,
        ));
        cases.push(case(
            "kernel",
            &["check", "--device", "cpu", "--shapes", "tiny", "--kernels", kernel],
            named,
        ));
        cases.push(case("kernel", &["build", "--kernels", kernel], named));
        cases.push(case("kernel", &["tune", "--device", "cpu", "--kernel", kernel], named));
    }
    for (options, values) in [(&COUNTS[..], NUMBERS), (&TIMES[..], SECONDS)] {
        for (command, option) in options {
            for value in values {
                cases.push(case("number", &[command, &[option, value][..]].concat(), Some(option)));
            }
        }
    }
    for words in [
        &["benhc"][..],
        &[""],
        &["🦀"],
        &["bench", "--shapse", "tiny"],
        &["bench", "extra"],
        &["check", "--quick", "--seeds", "3"],
        &["report"],
        &["compare"],
        &["compare", "a"],
        &["apply"],
        &["export"],
        &["export", "x"],
        &["import"],
        &["import", "kernelbench"],
        &["plan"],
        &["tune", "--launcher", "sh"],
        &["tune", "--simulate", "x", "--out", "y"],
        &["completions", "fsh"],
        &["bench", "--baselines", "torhc"],
        &["bench", "--timing", "colt"],
        &["bench", "--isa", "avx1024"],
        &["report", "x", "--format", "pdf"],
        &["sanitize", "--tools", "memchek"],
        &["bench", "--margin", "2"],
        &["bench", "--margin", "nan"],
        &["tune", "--strategy", "luck", "--device", "cpu"],
        &["compare", "a", "b", "--margin", "x"],
    ] {
        cases.push(case("words", words, None));
    }
    for (name, bytes) in files() {
        for reader in READERS {
            let arguments: Vec<&str> =
                reader.iter().map(|word| if *word == "@" { name } else { *word }).collect();
            let file = Some((name.to_owned(), bytes.clone())).filter(|_| name != "missing");
            cases.push(Case { file, ..case("file", &arguments, Some(name)) });
        }
    }
    let manifest = fs::read_to_string(root.join("examples/custom-kernel/my_sdpa.toml"))
        .context("the example's manifest")?;
    for text in spoiled(&manifest) {
        let file = Some(("k/my_sdpa.toml".to_owned(), text));
        cases.push(Case { file, ..case("manifest", &["build", "--kernel-path", "k"], Some("my_sdpa")) });
    }
    for text in spoiled(TABLE) {
        let file = Some(("tuned.toml".to_owned(), text));
        cases.push(Case {
            file,
            ..case("table", &["plan", "mission", "--arch", "sm_90a"], Some("tuned.toml"))
        });
    }
    Ok(cases)
}

/// Files that are nothing that the lab writes.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let deep = "[".repeat(100_000).into_bytes();
    vec![
        ("missing", Vec::new()),
        ("empty", Vec::new()),
        ("zeros", vec![0; 4096]),
        ("bytes", (0..=255).cycle().take(4096).collect()),
        ("half.json", b"{\"schema\": \"evosdpa.bench/1\", \"rows\": [".to_vec()),
        ("other.json", b"{\"schema\": \"evosdpa.bench/99\", \"rows\": {}}".to_vec()),
        ("numbers.json", b"[1, 2, 3]".to_vec()),
        ("deep.json", deep),
        ("text.csv", "a,b\n1,2\n".into()),
    ]
}

const TABLE: &str = "schema = 1\n[[device]]\narch = \"sm_90a\"\nname = \"NVIDIA H200\"\n[[device.row]]\nshape = \"mission\"\n\
                     dtypes = [\"bf16\"]\nkernel = \"hopper_small\"\ntunables = { WG_N = 1 }\n[[device.row]]\nwhen = \"causal\"\nkernel = \"hopper_fwd\"\n";

/// A good file with one thing wrong in each: each line cut, a key misspelt, a value of another type, bad bytes.
fn spoiled(good: &str) -> Vec<Vec<u8>> {
    let lines: Vec<&str> = good.lines().collect();
    let mut all = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let Some((key, _)) = line.split_once('=').filter(|(key, _)| !key.contains(['#', '"'])) else {
            continue;
        };
        let replaced = |with: String| {
            let mut changed: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
            changed[i] = with;
            changed.join("\n").into_bytes()
        };
        all.push(replaced(format!("{}x = 1", key.trim())));
        all.push(replaced(format!("{key}= [[")));
        all.push(replaced(format!("{key}= {{ what = \"🦀\" }}")));
        let mut bytes = replaced(format!("{key}= \""));
        bytes.push(0xFF);
        all.push(bytes);
    }
    all
}

pub(super) fn run(trial: &Trial) -> anyhow::Result<(Value, bool)> {
    let root = std::env::current_dir()?;
    let cases = cases(&root)?;
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |cores| cores.get()) {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = tried(trial, case, &root) {
                        // A thread that panicked has left the list as it was.
                        let mut faults = faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                        faults.push(format!("{}: {:?}: {why:#}", case.kind, case.arguments));
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap_or_default();
    faults.iter().for_each(|fault| eprintln!("{fault}"));
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    cases.iter().for_each(|case| *kinds.entry(case.kind).or_default() += 1);
    Ok((json!({"inputs": cases.len(), "of": kinds, "faults": faults}), faults.is_empty()))
}

fn tried(trial: &Trial, case: &Case, root: &Path) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    if let Some((name, bytes)) = &case.file {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap_or(folder.path()))?;
        fs::write(&path, bytes)?;
        if case.kind == "manifest" {
            fs::copy(root.join("examples/custom-kernel/my_sdpa.cu"), path.with_file_name("my_sdpa.cu"))?;
        }
    }
    let listed = |folder: &Path| -> anyhow::Result<Vec<String>> {
        let names = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    };
    let before = listed(folder.path())?;
    let words: Vec<&str> = case.arguments.iter().map(String::as_str).collect();
    let mut command = trial.command(folder.path(), &words);
    if case.kind == "table" {
        command.env("EVOSDPA_TUNED", folder.path().join("tuned.toml"));
    }
    let Ended { code, stderr, took, .. } = ended(&mut command)?;
    anyhow::ensure!(!stderr.contains("panicked at"), "it panicked: {stderr}");
    // 1 where a gate says it: a source that does not compile, say.
    anyhow::ensure!(matches!(code, Some(1 | 2)), "it ended with {code:?}: {stderr}");
    anyhow::ensure!(!stderr.trim().is_empty() || code == Some(1), "it said nothing");
    if let Some(named) = &case.named {
        let is_named = stderr.contains(named.as_str()) || code == Some(1);
        anyhow::ensure!(is_named, "the message does not name `{named}`: {stderr}");
    }
    let after = listed(folder.path())?;
    anyhow::ensure!(after.len() == before.len(), "it left {after:?}");
    anyhow::ensure!(took < LIMIT, "it took {took:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_more_than_700_of_them() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let cases = cases(&root).unwrap();
        assert!(cases.len() >= 700, "{}", cases.len());
        let kinds: std::collections::BTreeSet<&str> = cases.iter().map(|case| case.kind).collect();
        assert_eq!(kinds.len(), 9, "{kinds:?}");
    }
}
