//! Performance regressions that need no GPU: exact counts of what kernels execute.

use evosdpa_core::{
    DType, Problem,
    inputs::{Family, Inputs},
};
use evosdpa_kernels::Registry;
use evosdpa_lab::device::Sim;
use ptxsan::{
    Options, Schedule,
    count::{Class, Counters},
};

fn count(sim: &Sim, kernel: &str, edit: impl Fn(&str) -> String, schedule: Schedule) -> Counters {
    let problem = Problem::new("b1h1s64/256d64".parse().unwrap(), DType::F16).unwrap();
    let mut kernel = sim.registry().kernel(kernel).unwrap().clone();
    kernel.source = edit(&kernel.source);
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let options = Options { schedule, ..Options::default() };
    let (_, outcome) = sim.simulation_of(&kernel, &[], &problem).unwrap().run(&inputs, &options).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    outcome.counters
}

fn conflict_share(counters: &Counters) -> f64 {
    counters.shared_conflicts as f64 / counters.shared_wavefronts as f64
}

#[test]
fn row_padding_keeps_bank_conflicts_away() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    for (kernel, padding, most) in [
        ("sdpa_v2b", "constexpr int ROW_PADDING = 8;", 0.10),
        ("sdpa_v2c", "constexpr int PADDING = 8;", 0.25),
    ] {
        let padded = count(&sim, kernel, str::to_owned, Schedule::RoundRobin);
        let share = conflict_share(&padded);
        assert!(share < most, "{kernel}: {:.1} % of wavefronts are conflicts\n{padded}", 100.0 * share);
        let bare = |source: &str| {
            assert!(source.contains(padding), "{kernel} pads otherwise now");
            source.replace(padding, &padding.replace('8', "0"))
        };
        let bare = count(&sim, kernel, bare, Schedule::RoundRobin);
        assert!(
            bare.shared_conflicts > 2 * padded.shared_conflicts,
            "{kernel}: {} conflicts without padding, {} with it",
            bare.shared_conflicts,
            padded.shared_conflicts
        );
        // The line that conflicts is named.
        let worst = bare.conflict_lines()[0];
        assert!(worst.source.contains(".cu"), "{}", worst.source);
    }
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
    // Each element of Q, K, V is read once, and O written once.
    let bytes = 2 * 64 * (64 + 256 + 256 + 64);
    assert_eq!(first.global_bytes, bytes);
}
