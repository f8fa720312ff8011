//! Choices held against what was measured. Not part of the packaged crate: the measurements are the repository's.

use std::collections::BTreeMap;

use evosdpa::{
    Problem,
    choose::{Planner, Question, assumed_tensors},
    tuned::TunedTable,
};
use evosdpa_kernels::{Arch, Registry, Target};

/// Of each problem what each kernel took, in microseconds.
type Times = BTreeMap<String, BTreeMap<String, f64>>;

/// The choice is within 3 % of the best kernel in every measurement the built-in table rests on.
#[test]
fn the_table_that_is_built_in_chooses_what_was_fastest() {
    let planner = Planner::new(Registry::embedded().unwrap()).and_table(TunedTable::embedded().unwrap());
    let target = Target::nominal(Arch::Sm90a);
    let mut problems = 0;
    for file in ["hopper-named.json", "bench-named-shapes.json", "planner-boundary.json", "decode.json"] {
        let path = format!("{}/../../results/h200/{file}", env!("CARGO_MANIFEST_DIR"));
        let document: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut measured = Times::new();
        for row in document["rows"].as_array().unwrap().iter().filter(|row| row["peer"] == false) {
            let text = |key: &str| row[key].as_str().unwrap().to_owned();
            let Some(p50_us) = row["p50_us"].as_f64() else { continue };
            // What the library ran is known by its kernel.
            let kernel = if row["kernel"] == "auto" { text("variant") } else { text("kernel") };
            let kernel = kernel.split('[').next().unwrap_or_default().to_owned();
            measured.entry(text("problem")).or_default().insert(kernel, p50_us);
        }
        for (problem, times_us) in measured {
            let (shape, dtype) = problem.split_once(' ').unwrap();
            let asked = Problem::new(shape.parse().unwrap(), dtype.parse().unwrap()).unwrap();
            let tensors = assumed_tensors(&asked);
            let device = Some("NVIDIA H200");
            let question = Question { problem: &asked, tensors: &tensors, target: &target, device };
            let choice = planner.choose(&question).unwrap();
            let best_us = times_us.values().copied().fold(f64::INFINITY, f64::min);
            // flash_decode is younger than two of the documents. The last one has it.
            let Some(&chosen_us) = times_us.get(&choice.variant.id.kernel) else {
                assert!(
                    choice.variant.id.kernel == "flash_decode" && file != "decode.json",
                    "{problem}: {}",
                    choice.origin
                );
                continue;
            };
            assert!(
                chosen_us <= 1.03 * best_us,
                "{problem}: {} takes {chosen_us} of {times_us:?}",
                choice.origin
            );
            problems += 1;
        }
    }
    assert!(problems >= 20, "{problems}");
}

/// What is taken for windows, and for heads of 65 to 112 columns, is within 5 % of the fastest code that was measured beside it.
#[test]
fn windows_and_odd_heads_take_what_was_fastest() {
    let planner = Planner::new(Registry::embedded().unwrap()).and_table(TunedTable::embedded().unwrap());
    let target = Target::nominal(Arch::Sm90a);
    let path = format!("{}/../../results/h200/windows-and-heads.json", env!("CARGO_MANIFEST_DIR"));
    let document: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut slow = Vec::new();
    let mut problems = 0;
    for row in document["rows"].as_array().unwrap() {
        let problem = row["problem"].as_str().unwrap();
        let (shape, dtype) = problem.split_once(' ').unwrap();
        let asked = Problem::new(shape.parse().unwrap(), dtype.parse().unwrap()).unwrap();
        let tensors = assumed_tensors(&asked);
        let question = Question { problem: &asked, tensors: &tensors, target: &target, device: None };
        let variant = planner.choose(&question).unwrap().variant;
        let is_chosen = |candidate: &&serde_json::Value| {
            let Some(code) = candidate["code"].as_str() else { return false };
            let (kernel, values) = (&document["codes"][code][0], &document["codes"][code][1]);
            let mut values = values.as_object().unwrap().iter();
            let same = |name: &str, value: i64| variant.defines.get(name).is_none_or(|now| *now == value);
            kernel == variant.id.kernel.as_str()
                && values.all(|(name, value)| same(name, value.as_i64().unwrap()))
        };
        let candidates = row["candidates"].as_array().unwrap();
        let us = |candidate: &serde_json::Value| candidate["p50_us"].as_f64().unwrap();
        let Some(chosen) = candidates.iter().filter(is_chosen).map(us).reduce(f64::min) else { continue };
        let best = candidates.iter().map(us).fold(f64::INFINITY, f64::min);
        if chosen > 1.05 * best {
            slow.push(format!("{problem}: {chosen} µs, the fastest {best}"));
        }
        problems += 1;
    }
    assert!(slow.is_empty(), "{}", slow.join("\n"));
    assert!(problems >= 40, "{problems}");
}
