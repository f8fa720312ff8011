//! Performance regressions that need no GPU: exact counts of what kernels execute.

use evosdpa_core::{DType, Problem};
use evosdpa_kernels::Registry;
use evosdpa_lab::device::Sim;
use evosdpa_oracle::inputs::{Family, Inputs};
use ptxsan::{
    Options, Schedule,
    count::{Class, Counters},
};

fn count(sim: &Sim, kernel: &str, edit: impl Fn(&str) -> String, schedule: Schedule) -> Counters {
    let problem = Problem::new("b1h1s64/256d64".parse().unwrap(), DType::F16).unwrap();
    let mut kernel = sim.registry().kernel(kernel).unwrap().clone();
    kernel.source = edit(&kernel.source).into();
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let options = Options { schedule, ..Options::default() };
    let (_, outcome) = sim.simulation_of(&kernel, &[], &problem).unwrap().run(&inputs, &options).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    outcome.counters
}

#[test]
fn bank_conflicts_stay_where_they_are() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    // Measured 28.7 % and 35.5 %: the scalar kernel's rows of 144 bytes, the trips of scores through the strip.
    for (kernel, most) in [("sdpa_v2b", 0.30), ("sdpa_v2c", 0.37)] {
        let counters = count(&sim, kernel, str::to_owned, Schedule::RoundRobin);
        let share = counters.shared_conflicts as f64 / counters.shared_wavefronts as f64;
        assert!(share < most, "{kernel}: {:.1} % of wavefronts are conflicts\n{counters}", 100.0 * share);
    }
}

#[test]
fn row_padding_is_what_keeps_bank_conflicts_away() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    const PADDING: &str = "constexpr int ROW_PADDING = 8;";
    let without = |source: &str| {
        assert!(source.contains(PADDING), "sdpa_v2b pads otherwise now");
        // The layout is then smaller than the launch's shared memory.
        source
            .replace(PADDING, "constexpr int ROW_PADDING = 0;")
            .replace("== DYNAMIC_SMEM_BYTES", "<= DYNAMIC_SMEM_BYTES")
    };
    let padded = count(&sim, "sdpa_v2b", str::to_owned, Schedule::RoundRobin);
    let bare = count(&sim, "sdpa_v2b", without, Schedule::RoundRobin);
    assert!(bare.shared_conflicts > 5 * padded.shared_conflicts, "with\n{padded}without\n{bare}");
    // The line that conflicts is named.
    assert!(bare.conflict_lines()[0].source.contains("sdpa_v2b.cu"), "{bare}");
}

#[test]
fn counts_are_exact_and_the_same_under_every_schedule() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    // Two products of 64 x 256 x 64, a multiplication and an addition each.
    let products = 2 * 2 * 64 * 256 * 64;
    let first = count(&sim, "ampere_fwd", str::to_owned, Schedule::RoundRobin);
    assert_eq!(first.tensor_ops, products);
    for schedule in [Schedule::Random, Schedule::ConsumerLate] {
        assert_eq!(count(&sim, "ampere_fwd", str::to_owned, schedule), first);
    }
    // Line by line they add up, and they survive being written down.
    let sum =
        |of: fn(&ptxsan::count::Counts) -> u64| first.lines.iter().map(|line| of(&line.counts)).sum::<u64>();
    assert_eq!(sum(|counts| counts.instructions()), first.instructions());
    assert_eq!(sum(|counts| counts.global_sectors), first.global_sectors);
    assert!(first.warp_instructions[&Class::Tensor] > 0 && first.barrier_waits > 0 && first.flops > 0);
    let text = serde_json::to_string(&first).unwrap();
    assert_eq!(serde_json::from_str::<Counters>(&text).unwrap(), first);
    // One CTA of 64 rows: Q, K and V are read once, and O written once.
    let bytes = 2 * 64 * (64 + 256 + 256 + 64);
    assert_eq!(first.global_bytes, bytes);
}
