//! Every CUDA kernel runs here, on the CPU, under the correctness gate and the race detector: no GPU needed.
//!
//! Kernels with few variants run in full: every variant on every small case under every schedule. The others run so with
//! their default tunables; their variants run on a choice of (variant, type, case, schedule) in which every two values of
//! any two of these meet. All of them under all schedules is what `evosdpa sanitize --device sim --all-variants` is for:
//! 25 minutes of processor time for the kernels of the line, half of it the compiler's.

use std::collections::{BTreeMap, BTreeSet};

use evosdpa_core::DType;
use evosdpa_kernels::Registry;
use evosdpa_lab::{
    covering::pairwise,
    device::{Device, Sim},
    gate::suite::CaseSpec,
    sweep::{LONG, Lot, SMALL, Shown, SweepRow, Trial, case_spec, settings},
};
use evosdpa_oracle::Case;
use ptxsan::{Options, Schedule};

const HALF: [DType; 2] = [DType::F16, DType::BF16];
/// Kernels of which every variant runs on every case under every schedule.
const FEW_VARIANTS: [&str; 3] = ["sdpa_v1", "sdpa_v2b", "sdpa_v2c"];

fn sim() -> Sim {
    // The compiler comes from `cargo xtask setup`; without it there is nothing to test, and that is a failure.
    Sim::open(Registry::embedded().unwrap()).unwrap()
}

fn spec(shape: &str, dtype: DType) -> CaseSpec {
    case_spec(shape.parse().unwrap(), dtype).unwrap()
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
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut turn = 0;
    for &shape in shapes {
        for &dtype in dtypes {
            let names = sim.variants(kernel, &spec(shape, dtype).problem, usize::MAX).unwrap();
            // A huge space is thinned out first, by a step that hits every value.
            let step = names.len().div_ceil(POOL) | 1;
            turn += 1;
            for (at, name) in names.into_iter().step_by(step).enumerate() {
                let tunables = settings(&name).unwrap();
                // Where a run is short every schedule is offered, else each in turn.
                let schedules = match offer {
                    Offer::EverySchedule => &Schedule::ALL[..],
                    Offer::OneEach => &Schedule::ALL[(at + turn) % Schedule::ALL.len()..][..1],
                };
                for &schedule in schedules {
                    let mut values = tunables.clone();
                    values.extend([shape.to_owned(), dtype.name().to_owned(), schedule.name().to_owned()]);
                    rows.push(values);
                    all.push((name.clone(), shape, dtype, schedule));
                }
            }
        }
    }
    let chosen = pairwise(&rows);
    // The choice is only as good as what it was made from.
    let values = |rows: &mut dyn Iterator<Item = &Vec<String>>| -> BTreeSet<String> {
        rows.flatten().cloned().collect()
    };
    assert_eq!(values(&mut chosen.iter().map(|at| &rows[*at])), values(&mut rows.iter()));
    chosen.into_iter().map(|at| all[at].clone()).collect()
}

#[test]
fn every_kernel_is_right_and_free_of_races_under_every_schedule() {
    let sim = sim();
    let mut runs: Vec<Run> = Vec::new();
    for kernel in sim.kernels().into_iter().filter(|kernel| !FEW_VARIANTS.contains(&kernel.name.as_str())) {
        let shapes: &[&str] = if kernel.name == "fa_s512_v3" { &LONG } else { &SMALL };
        for &shape in shapes {
            for dtype in DType::ALL {
                if sim.refuses(&kernel.name, &spec(shape, dtype).problem).is_none() {
                    let name = kernel.name.clone();
                    runs.extend(Schedule::ALL.map(|schedule| (name.clone(), shape, dtype, schedule)));
                }
            }
        }
    }
    runs.push(("sdpa_v1".to_owned(), "b1h1s20d128", DType::F16, Schedule::Random));
    // ampere_fwd and the 8-bit kernel on five cases of two types, fa_s512_v3 on one; six schedules.
    assert!(run_all(&sim, runs) > 6 * (2 * 5 * 2 + 2));
}

#[test]
fn every_variant_of_the_small_spaces_is_right_under_every_schedule() {
    let sim = sim();
    let (mut codes, mut failures) = (0, Vec::new());
    for kernel in FEW_VARIANTS {
        for (shape, dtype) in SMALL.iter().flat_map(|shape| HALF.map(|dtype| (shape, dtype))) {
            let lot = Lot::new(&sim, kernel, spec(shape, dtype), usize::MAX).unwrap().unwrap();
            let trial = Trial::new(&sim, &lot.spec);
            let shown: Vec<(String, Shown)> =
                lot.variants.iter().map(|name| (name.clone(), trial.of(name).unwrap())).collect();
            let row = SweepRow::new(&lot, &shown);
            assert_eq!((row.looked_at, row.runs), (row.variants, 6 * row.codes));
            codes += row.codes;
            failures.extend(row.failures);
        }
    }
    assert!(failures.is_empty(), "{} wrong: {failures:#?}", failures.len());
    // 3 + 2 + 6 variants for f16 and 3 + 2 + 4 for bf16, on five cases.
    assert_eq!(codes, 5 * 20);
}

/// A run takes a third of a second: every variant once, the schedules in turn.
#[test]
fn every_variant_of_fa_s512_is_right() {
    let sim = sim();
    let mut runs: Vec<Run> = Vec::new();
    for dtype in HALF {
        for name in sim.variants("fa_s512_v3", &spec(LONG[0], dtype).problem, usize::MAX).unwrap() {
            runs.push((name, LONG[0], dtype, Schedule::ALL[runs.len() % Schedule::ALL.len()]));
        }
    }
    assert!(run_all(&sim, runs) > 20);
}

#[test]
fn toggles_of_the_eight_bit_kernel_are_right() {
    let sim = sim();
    let shapes = ["tiny:causal", "b1h1s40/33d64:causal-br", "b1h1s33/70d64"];
    let runs = pairs(&sim, "sdpa_fp8_stage_c", &shapes, &[DType::U8, DType::E4M3], Offer::EverySchedule);
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

/// The sweep itself: a known mistake is seen, its repair is not blamed, and the same code is not run twice.
#[test]
fn a_sweep_tells_right_from_wrong() {
    let sim = Sim::open(Registry::embedded().unwrap().with_mutants()).unwrap();
    let lot =
        Lot::new(&sim, "missing_barrier", spec("b1h1s20/80d64", DType::F16), usize::MAX).unwrap().unwrap();
    let trial = Trial::new(&sim, &lot.spec);
    let shown: Vec<(String, Shown)> =
        lot.variants.iter().map(|name| (name.clone(), trial.of(name).unwrap())).collect();
    let row = SweepRow::new(&lot, &shown);
    assert_eq!((row.looked_at, row.codes, row.failures.len()), (2, 2, 1), "{row:?}");
    assert_eq!(row.failures[0].variant, "missing_barrier[MISTAKE=1]");
    assert!(row.failures[0].why.contains("race") && row.gates[0].verdict.is_fail(), "{row:?}");
    assert_eq!(trial.of(&lot.variants[0]).unwrap(), Shown::SameCode);
}
