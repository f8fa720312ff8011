//! The simulator against an H200: what the GPU answered is in `results/h200/sim-agreement.json`.
//!
//! Of whole numbers every right kernel gives the same bits, so that the GPU's answers hold the simulator, and the kernels, on machines without one.

use evosdpa_kernels::{Arch, Registry, VariantId};
use evosdpa_lab::{
    agreement::{
        AgreementRow, Asked, LSE_DISTANCE, Numbers, QUESTIONS,
        cache_write::{Kernels, Write, WriteRow, questions},
    },
    device::Sim,
};
use ptxsan::Schedule;

fn rows() -> Vec<AgreementRow> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../results/h200/sim-agreement.json");
    let document: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(document["schema"], "evosdpa.sim-agreement/2");
    assert!(document["environment"]["accelerator"].as_str().unwrap().contains("H200"));
    assert_eq!(document["failures"], serde_json::json!([]));
    serde_json::from_value(document["rows"].clone()).unwrap()
}

fn is_of(row: &AgreementRow, asked: &Asked) -> bool {
    let kernel = VariantId::kernel_of(&row.kernel) == VariantId::kernel_of(asked.kernel);
    kernel
        && row.shape == asked.shape
        && row.dtype == asked.dtype
        && row.numbers == asked.numbers
        && row.seed == asked.seed
}

#[test]
fn every_question_was_answered_alike() {
    let rows = rows();
    for asked in QUESTIONS {
        let row =
            rows.iter().find(|row| is_of(row, asked)).unwrap_or_else(|| panic!("{asked:?} was not asked"));
        assert!(row.agrees && row.elements > 0, "{row:?}");
        match asked.numbers {
            Numbers::Whole => assert_eq!(row.same_bits, row.elements, "{row:?}"),
            Numbers::Normal => assert!(row.of_bound <= 1.0, "{row:?}"),
        }
        assert!(row.lse_max_distance.is_some_and(|distance| distance <= LSE_DISTANCE), "{row:?}");
    }
}

/// One of every path; all of them take the simulator half a minute.
const AGAIN: [(&str, &str); 9] = [
    ("hopper_fwd", "b1h2s128d64"),
    ("hopper_fwd", "b1h2s300d64:causal"),
    ("hopper_fwd", "b1h4/2s30/70d64:causal-br"),
    ("hopper_fwd", "b3h4/2s9/300d64:causal-br:used:paged=16"),
    ("hopper_fwd", "b4h2s40/300d64:causal-br:varlen"),
    ("hopper_small", "b1h2s128d64"),
    ("hopper_small", "b1h1s200d64:causal"),
    ("hopper_small", "b1h8/2s1/500d128"),
    ("flash_decode", "b3h4/2s2/170d64:causal-br:used:paged=16"),
];

#[test]
fn the_simulator_gives_a_gpus_bits() {
    let (rows, sim) = (rows(), Sim::open(Registry::embedded().unwrap()).unwrap().preferring(Arch::Sm90a));
    let mut compared = 0;
    for (kernel, shape) in AGAIN {
        let whole = |asked: &&Asked| {
            asked.kernel == kernel && asked.shape == shape && asked.numbers == Numbers::Whole
        };
        for asked in QUESTIONS.iter().filter(whole) {
            let row = rows.iter().find(|row| is_of(row, asked)).unwrap();
            let (variant, output) = asked.simulate(&sim).unwrap();
            assert_eq!(
                asked.digest(&output).unwrap(),
                row.gpu_blake3,
                "{variant} {shape} {}",
                asked.dtype.name()
            );
            compared += 1;
        }
    }
    assert!(compared >= AGAIN.len(), "{compared}");
}

/// What a GPU made of writes to caches, the simulator makes of them too.
#[test]
fn the_simulator_leaves_a_gpus_bytes_in_caches() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../results/h200/sim-agreement.json");
    let document: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let rows: Vec<WriteRow> = serde_json::from_value(document["cache_writes"].clone()).unwrap();
    let kernels = Kernels::compile().unwrap();
    assert_eq!(rows.len(), questions().len());
    for row in &rows {
        let is_it = |(name, write): &&(&str, Write)| *name == row.name && write.dtype == row.dtype;
        let questions = questions();
        let (name, write) = questions.iter().find(is_it).unwrap_or_else(|| panic!("{row:?} is not asked"));
        let (written, outcome) = kernels.simulate(write, Schedule::RoundRobin).unwrap();
        assert!(row.agrees && outcome.is_clean(), "{row:?}");
        assert_eq!(written.digest(), row.gpu_blake3, "{name}");
    }
}
