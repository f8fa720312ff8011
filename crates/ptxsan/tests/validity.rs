//! Uninitialised values on their way through compiled code: shared memory, matrix fragments, asynchronous copies, packed halves.

use ptxsan::{Arg, Device, Kind, Launch, Module, Outcome, Schedule};

const PTX: &str = include_str!("fixtures/validity.ptx");

/// Launches one block: a buffer of which the first bytes are written, others as given, and numbers.
fn run(
    entry: &str,
    threads: u32,
    written: &[&[u8]],
    fresh: usize,
    numbers: &[i32],
    schedule: Schedule,
) -> Outcome {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let mut args = Vec::new();
    for bytes in written {
        let buffer = device.allocate("in", 1024).unwrap();
        device.write(buffer, 0, bytes).unwrap();
        args.push(Arg::Buffer(buffer));
    }
    args.push(Arg::Buffer(device.allocate("out", fresh).unwrap()));
    args.extend(numbers.iter().map(|n| Arg::I32(*n)));
    let launch = Launch::new(entry, [1, 1, 1], [threads, 1, 1], 0, args).with_schedule(schedule, 2);
    device.launch(id, &launch).unwrap()
}

/// What a launch must say: nothing, or that a value stored depends on something never written.
fn assert_says(outcome: &Outcome, words: Option<&str>) {
    match words {
        None => assert!(outcome.findings.is_empty(), "{outcome}"),
        Some(words) => {
            let kinds: Vec<Kind> = outcome.findings.iter().map(|finding| finding.kind).collect();
            assert_eq!(kinds, [Kind::UninitialisedMemory], "{outcome}");
            let finding = &outcome.findings[0];
            assert!(finding.detail.contains("a value stored to global memory depends on"), "{finding}");
            assert!(finding.detail.contains(words), "{finding}");
        }
    }
}

#[test]
fn a_sum_over_one_element_too_many() {
    for schedule in Schedule::ALL {
        let sum = |written, summed| run("off_by_one", 64, &[&[0; 1024]], 4, &[written, summed], schedule);
        assert_says(&sum(64, 64), None);
        assert_says(&sum(63, 63), None);
        assert_says(&sum(63, 64), Some("(tile+252), which nothing wrote"));
    }
}

#[test]
fn rows_of_a_product_are_apart() {
    for schedule in Schedule::ALL {
        let product = |loaded, stored| {
            run("ragged_product", 32, &[&[0; 1024], &[0; 1024]], 1024, &[loaded, stored], schedule)
        };
        assert_says(&product(16, 16), None);
        assert_says(&product(10, 10), None);
        assert_says(
            &product(10, 11),
            Some("(product+640), which holds what was made of memory that nothing wrote"),
        );
    }
}

#[test]
fn copies_bring_what_nothing_wrote() {
    for schedule in Schedule::ALL {
        let copied = |used| run("copied", 32, &[&[0; 20 * 16]], 128, &[used], schedule);
        assert_says(&copied(20), None);
        assert_says(&copied(21), Some("(tile+320)"));
    }
}

#[test]
fn halves_of_a_pair_are_apart() {
    for schedule in Schedule::ALL {
        // Of the last pair only the low half is written.
        let halves = |high| run("halves", 32, &[&[0; 32 * 4 - 2]], 64, &[high], schedule);
        assert_says(&halves(0), None);
        assert_says(&halves(1), Some("(in+126)"));
    }
}

#[test]
fn what_the_other_side_of_an_and_decides_is_not_asked() {
    // 1, 3, 5 … and 0, 2, 4 …: the second list ends first.
    let words = (0..8).map(|i| 2 * i + 1).chain((0..8).map(|i| 2 * i));
    let lists: Vec<u8> = words.flat_map(i32::to_le_bytes).collect();
    let outcome = run("merged", 32, &[&lists], 64, &[16, 16], Schedule::RoundRobin);
    assert!(outcome.findings.is_empty(), "{outcome}");
    let outcome = run("merged", 32, &[&lists], 64, &[16, 17], Schedule::RoundRobin);
    let mut kinds = outcome.findings.iter().map(|finding| finding.kind);
    assert!(kinds.len() > 0 && kinds.all(|kind| kind == Kind::UninitialisedMemory), "{outcome}");
}
