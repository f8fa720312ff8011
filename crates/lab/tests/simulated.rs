//! Every CUDA kernel runs here, on the CPU, under the correctness gate and the race detector: no GPU needed.
//!
//! Every kernel with its default tunables runs on every small case under every schedule. Its other variants run on a choice
//! of (variant, type, case, schedule) in which every two values of any two of these meet: all of them, under all schedules,
//! is what `evosdpa check --device sim --all-variants` and `evosdpa sanitize --device sim` are for.

use std::collections::{BTreeMap, BTreeSet};

use evosdpa_core::{Case, DType, Problem, inputs::Family};
use evosdpa_kernels::Registry;
use evosdpa_lab::{
    covering::pairwise,
    device::{Device, Sim},
    gate::suite::{CaseSpec, Group},
};
use ptxsan::{Options, Schedule};

const HALF: [DType; 2] = [DType::F16, DType::BF16];

fn sim() -> Sim {
    // The compiler comes from `cargo xtask setup`; without it there is nothing to test, and that is a failure.
    Sim::open(Registry::embedded().unwrap()).unwrap()
}

fn spec(shape: &str, dtype: DType) -> CaseSpec {
    let problem = Problem::new(shape.parse().unwrap(), dtype).unwrap().with_lse(true);
    // 16 bytes, or 16 codes: rows stay aligned.
    let row_gap = Some(if HALF.contains(&dtype) { 8 } else { 16 });
    CaseSpec { group: Group::Simulated, problem, family: Family::Normal, seed: 1, row_gap }
}

/// One run: what, on which case, in which order.
type Run = (String, &'static str, DType, Schedule);

/// Puts every run through the gates; panics with all that failed.
fn run_all(sim: &Sim, runs: impl IntoIterator<Item = Run>) -> usize {
    let mut cases: BTreeMap<(&str, &str), (CaseSpec, Case)> = BTreeMap::new();
    let mut failures = Vec::new();
    let mut count = 0;
    for (kernel, shape, dtype, schedule) in runs {
        let (spec, case) = cases.entry((shape, dtype.name())).or_insert_with(|| {
            let spec = spec(shape, dtype);
            (spec, spec.build())
        });
        let simulation = sim.simulation(&kernel, &spec.problem).unwrap();
        let options = Options { schedule, ..Options::default() };
        let (output, outcome) = simulation.run(&case.inputs, &options).unwrap();
        let judgement = case.judge(&output.o.view(), output.lse.as_deref());
        let label = format!("{kernel} on {} under {}", spec.label(), schedule.name());
        if !outcome.is_clean() {
            failures.push(format!("{label}: {}", outcome.findings[0]));
        } else if !judgement.passed() {
            failures.push(format!("{label}: {}", judgement.summary()));
        }
        count += 1;
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    count
}

/// Variants of one kernel, type and case to choose from, about.
const POOL: usize = 2000;

#[derive(Clone, Copy)]
enum Offer {
    EverySchedule,
    OneEach,
}

/// A kernel's variants on these cases, in a choice that shows every pair of settings, types, cases and schedules.
fn pairs(sim: &Sim, kernel: &str, shapes: &[&'static str], dtypes: &[DType], offer: Offer) -> Vec<Run> {
    let mut all: Vec<Run> = Vec::new();
    let mut settings: Vec<Vec<String>> = Vec::new();
    let mut turn = 0;
    for &shape in shapes {
        for &dtype in dtypes {
            let names = sim.variants(kernel, &spec(shape, dtype).problem, usize::MAX).unwrap();
            // A huge space is thinned out first, by a step that hits every value.
            let step = names.len().div_ceil(POOL) | 1;
            turn += 1;
            for (at, name) in names.into_iter().step_by(step).enumerate() {
                let inside = name.split_once('[').map_or("", |(_, rest)| rest.trim_end_matches(']'));
                let tunables: Vec<String> = inside.split_whitespace().map(str::to_owned).collect();
                // Where a run is short every schedule is offered, else each in turn.
                let schedules = match offer {
                    Offer::EverySchedule => &Schedule::ALL[..],
                    Offer::OneEach => &Schedule::ALL[(at + turn) % Schedule::ALL.len()..][..1],
                };
                for &schedule in schedules {
                    let mut values = tunables.clone();
                    values.extend([shape.to_owned(), dtype.name().to_owned(), schedule.name().to_owned()]);
                    settings.push(values);
                    all.push((name.clone(), shape, dtype, schedule));
                }
            }
        }
    }
    let chosen = pairwise(&settings);
    // The choice is only as good as what it was made from.
    let values = |rows: &mut dyn Iterator<Item = &Vec<String>>| -> BTreeSet<String> {
        rows.flatten().cloned().collect()
    };
    assert_eq!(values(&mut chosen.iter().map(|at| &settings[*at])), values(&mut settings.iter()));
    chosen.into_iter().map(|at| all[at].clone()).collect()
}

/// Whole and ragged tiles, every mask, shared heads, other dimensions.
/// Among them one where whole query tiles see no key.
const SMALL: [&str; 5] = [
    "tiny",
    "tiny:causal",
    "b1h2/1s33/65d64:causal-br",
    "b1h1s70/40d40:window=9/3",
    "b1h1s70/20d64:causal-br",
];
/// The one length that `fa_s512_v3` is made for; a window keeps most of its tiles out.
const LONG: [&str; 1] = ["b1h1s512d64:window=70/0"];

#[test]
fn every_kernel_is_right_and_free_of_races_under_every_schedule() {
    let sim = sim();
    let mut runs: Vec<Run> = Vec::new();
    for kernel in sim.kernels() {
        let shapes: &[&str] = if kernel.name == "fa_s512_v3" { &LONG } else { &SMALL };
        for &shape in shapes {
            for dtype in [DType::F16, DType::BF16, DType::U8, DType::E4M3] {
                if sim.refuses(&kernel.name, &spec(shape, dtype).problem).is_none() {
                    let name = kernel.name.clone();
                    runs.extend(Schedule::ALL.map(|schedule| (name.clone(), shape, dtype, schedule)));
                }
            }
        }
        if kernel.name == "sdpa_v1" {
            runs.push((kernel.name, "b1h1s20d128", DType::F16, Schedule::Random));
        }
    }
    // v1, v2b, v2c, ampere_fwd and the 8-bit kernel on four cases of two types, fa_s512_v3 on one; six schedules.
    assert!(run_all(&sim, runs) >= 6 * (5 * 4 * 2 + 2));
}

#[test]
fn variants_of_the_small_spaces_are_right() {
    let sim = sim();
    for kernel in ["sdpa_v1", "sdpa_v2b", "sdpa_v2c"] {
        run_all(&sim, pairs(&sim, kernel, &SMALL, &HALF, Offer::EverySchedule));
    }
    run_all(&sim, pairs(&sim, "fa_s512_v3", &LONG, &HALF, Offer::OneEach));
}

#[test]
fn toggles_of_the_eight_bit_kernel_are_right() {
    let sim = sim();
    let shapes = ["tiny:causal", "b1h1s40/33d64:causal-br", "b1h1s33/70d64"];
    let runs = pairs(&sim, "sdpa_fp8_stage_c", &shapes, &DType::EIGHT_BIT, Offer::EverySchedule);
    assert!(runs.len() >= 18, "{} runs", runs.len());
    run_all(&sim, runs);
}

#[test]
fn variants_of_the_portable_kernel_are_right() {
    let sim = sim();
    let shapes = ["tiny:causal", "b1h2/1s33/65d64:causal-br", "b1h1s40/70d40"];
    let runs = pairs(&sim, "ampere_fwd", &shapes, &HALF, Offer::OneEach);
    assert!(runs.len() >= 24, "{} runs", runs.len());
    run_all(&sim, runs);
}
