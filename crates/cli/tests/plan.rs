//! `plan` and `apply`: what the library would run and why, and how a tune's winners change it. No GPU is needed.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use assert_cmd::cargo::cargo_bin;
use serde_json::{Value, json};

/// Runs the program with this table as the user's.
fn evosdpa(table: &Path, args: &[&str]) -> Output {
    Command::new(cargo_bin!("evosdpa"))
        .args(args)
        .env("NO_COLOR", "1")
        .env("EVOSDPA_TUNED", table)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The same with its broken lines joined again.
fn joined(bytes: &[u8]) -> String {
    text(bytes).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn page(output: &Output) -> String {
    assert!(output.status.success(), "{}", joined(&output.stderr));
    text(&output.stdout)
}

fn refusal(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    joined(&output.stderr)
}

fn rows(output: &Output) -> Vec<Value> {
    let document: Value = serde_json::from_str(&page(output)).unwrap();
    document["rows"].as_array().unwrap().clone()
}

fn elites() -> Value {
    json!({
        "schema": "evosdpa.elite/1",
        "device": {"name": "NVIDIA H200", "arch": "sm_90a"},
        "elites": [{
            "kernel": "hopper_fwd",
            "tunables": {"CONSUMERS": 1, "CTAS_PER_SM": 2, "BLOCK_N": 96},
            "dtype": "bf16",
            "evaluation": 7,
            "shapes": {"mission:causal": {"speedup": 1.3, "p50_us": 4.1}, "small": {"speedup": 0.8}},
        }],
        // What is believed, and what becomes the row.
        "confirmation": {
            "number": 7, "confirmed": true, "fitness": 1.2, "shapes": {"mission:causal bf16": {"speedup": 1.2, "p50_us": 4.5}},
        },
    })
}

#[test]
fn a_plan_says_what_from_where_and_why_not_the_others() {
    let none = Path::new("");
    let shape = "b2h32/8s4096d128:causal";
    let page = page(&evosdpa(none, &["plan", "--explain", shape, "--arch", "sm_90a"]));
    for part in [
        "b2h32/8s4096d128:causal bf16 on sm_90a: hopper_fwd",
        "from      rule: Q tiles fill the GPU",
        "launch    grid 132x1x1",
        "schedule  LONGEST_FIRST=1 PAIRED=0 PERSISTENT=2 SECTION_MIB=0",
        "unequal Q tiles: longest first of all heads, by an atomic counter",
        "not ampere_fwd: something better is there",
        "not sdpa_fp8_stage_c: b2h32/8s4096d128 bf16 causal is not supported",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let row = &rows(&evosdpa(none, &["plan", shape, "--arch", "sm_89", "--dtype", "f16", "--json"]))[0];
    assert_eq!(row["kernel"], "ampere_fwd");
    assert!(row["tunables"]["BLOCK_M"].is_i64() && row["grid"][0].as_u64() > Some(0), "{row}");
    let tile = &row["reasons"][0];
    assert_eq!(
        (&tile["concern"], &tile["settings"]["BLOCK_M"]),
        (&"tile".into(), &row["tunables"]["BLOCK_M"]),
        "{row}"
    );
    assert!(tile["why"].as_str().unwrap().starts_with("Q tiles as large as"), "{row}");
    let hopper = row["others"].as_array().unwrap().iter().find(|other| other["kernel"] == "hopper_fwd");
    assert_eq!(hopper, None, "sm_89 has no reason to look at it");
}

#[test]
fn a_plan_for_a_cpu_needs_no_more() {
    let rows = rows(&evosdpa(Path::new(""), &["plan", "mission,long", "--device", "cpu", "--json"]));
    assert_eq!(rows.len(), 2);
    assert!(rows.iter().all(|row| row["kernel"] == "cpu_flash"), "{rows:?}");
}

#[test]
fn what_cannot_be_planned_is_refused_by_name() {
    let none = Path::new("");
    for (args, expected) in [
        (&["plan", "misson"][..], "did you mean `mission`"),
        (&["plan", "mission", "--arch", "sm_91"], "architecture `sm_91`"),
        (&["plan", "mission", "--device", "gpu"], "--device"),
        (&["plan", "b1h8s512d512", "--arch", "sm_90a", "--dtype", "f32"], "head_dim is 512"),
        (&["plan", "mission:kv=f16", "--arch", "sm_90a", "--dtype", "f32"], "does not take"),
        (&["plan"], "<SHAPES>"),
    ] {
        let message = refusal(&evosdpa(none, args));
        assert!(message.contains(expected), "{args:?}: {message}");
    }
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("tuned.toml");
    fs::write(&broken, "schema = 1\ndevices = 3\n").unwrap();
    let message = refusal(&evosdpa(&broken, &["plan", "mission", "--arch", "sm_90a"]));
    assert!(message.contains("tuned.toml") && message.contains("unknown field `devices`"), "{message}");
}

#[test]
fn winners_change_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let (table, elite) = (folder.path().join("config/tuned.toml"), folder.path().join("elite.json"));
    fs::write(&elite, elites().to_string()).unwrap();
    let elite = elite.to_str().unwrap();
    let plan = ["plan", "mission:causal", "--arch", "sm_90a", "--json"];
    assert_eq!(rows(&evosdpa(&table, &plan))[0]["kernel"], "hopper_small");

    let said = page(&evosdpa(&table, &["apply", elite, "--dry-run"]));
    assert!(said.contains("1 rows for NVIDIA H200 (sm_90a) would be in"), "{said}");
    assert!(!table.exists());

    let said = page(&evosdpa(&table, &["apply", elite]));
    assert!(said.contains("mission:causal bf16: hopper_fwd[BLOCK_N=96 CONSUMERS=1 CTAS_PER_SM=2]"), "{said}");
    assert!(said.contains("small: not hopper_fwd: slower than"), "{said}");
    let row = &rows(&evosdpa(&table, &plan))[0];
    assert_eq!((&row["kernel"], &row["tunables"]["CTAS_PER_SM"]), (&json!("hopper_fwd"), &json!(2)));
    assert_eq!(row["p50_us"], 4.5);
    // Another type, and a problem of another class, are as before.
    let f16 = [&plan[..], &["--dtype", "f16"]].concat();
    assert_eq!(rows(&evosdpa(&table, &f16))[0]["kernel"], "hopper_small");

    let said = page(&evosdpa(&table, &["apply", elite]));
    assert!(said.contains("in place of hopper_fwd"), "{said}");
    assert_eq!(fs::read_to_string(&table).unwrap().matches("[[device.row]]").count(), 1);
}

#[test]
fn winners_that_do_not_exist_leave_the_table_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (table, elite) = (folder.path().join("tuned.toml"), folder.path().join("elite.json"));
    let path = elite.to_str().unwrap();
    for (from, to, expected) in [
        ("hopper_fwd", "hoper_fwd", "did you mean `hopper_fwd`"),
        ("CONSUMERS", "CONSUMER", "did you mean `CONSUMERS`"),
        ("\"BLOCK_N\":96", "\"BLOCK_N\":97", "BLOCK_N = 97"),
        ("\"mission:causal\":", "\"mission:casual\":", "did you mean `:causal`"),
        ("\"CTAS_PER_SM\":2", "\"CTAS_PER_SM\":2,\"CONSUMERS\":3", "does not hold"),
        ("{\"confirmation\"", "[{\"confirmation\"", "elite.json"),
    ] {
        let good = elites().to_string();
        assert!(good.contains(from), "{from}: {good}");
        fs::write(&elite, good.replacen(from, to, 1)).unwrap();
        let message = refusal(&evosdpa(&table, &["apply", path]));
        assert!(message.contains(expected), "{to}: {message}");
        assert!(!table.exists());
    }
    // What was measured once only is refused, or forced.
    let mut alone = elites();
    alone["confirmation"]["confirmed"] = false.into();
    fs::write(&elite, alone.to_string()).unwrap();
    let message = refusal(&evosdpa(&table, &["apply", path]));
    assert!(message.contains("not confirmed: measured again") && message.contains("--force"), "{message}");
    assert!(!table.exists());
    page(&evosdpa(&table, &["apply", path, "--force"]));
    assert!(table.exists());
    let message = refusal(&evosdpa(&table, &["apply", "nowhere.json"]));
    assert!(message.contains("nowhere.json"), "{message}");
    fs::write(&elite, elites().to_string()).unwrap();
    let message = refusal(&evosdpa(Path::new(""), &["apply", path]));
    assert!(message.contains("--table FILE"), "{message}");
}
