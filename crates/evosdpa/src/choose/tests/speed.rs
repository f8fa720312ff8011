//! Choosing for a new length costs the host next to nothing.

use std::time::{Duration, Instant};

use super::*;

#[test]
fn a_new_length_is_chosen_for_in_under_a_tenth_of_a_millisecond() {
    let planner = embedded();
    let target = Target::nominal(Arch::Sm90a);
    let device = Some("NVIDIA H200");
    let mut times = Vec::new();
    for length in (1000..1200).flat_map(|length| [(length, length), (1, length)]) {
        let shape = format!("b4h32/8s{}/{}d128:causal-br", length.0, length.1);
        let problem = Problem::new(shape.parse().unwrap(), DType::BF16).unwrap();
        let tensors = assumed_tensors(&problem);
        let question = Question { problem: &problem, tensors: &tensors, target: &target, device };
        let start = Instant::now();
        let choice = planner.choose_quickly(&question).unwrap();
        times.push(start.elapsed());
        assert!(choice.variant.launch.blocks() > 0);
    }
    times.sort_unstable();
    // A choice is far shorter than a scheduler's slice, so a busy machine leaves some of them alone.
    let fastest_tenth = times[times.len() / 10];
    eprintln!("a choice: {fastest_tenth:?}, half of them below {:?}", times[times.len() / 2]);
    // The code of tests is hardly optimised; half of what a new length may cost is room for a slow machine.
    assert!(
        fastest_tenth < Duration::from_micros(100),
        "nine of ten choices take longer than {fastest_tenth:?}"
    );
}
