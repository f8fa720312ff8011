//! Accesses that leave what they aim at without leaving memory; loads of what the launch writes; outputs left unwritten.

use ptxsan::{Arg, Buffer, Device, Kind, Launch, Module, Outcome, Schedule, Severity};

const PTX: &str = include_str!("fixtures/bounds.ptx");

/// Launches one warp with the arguments that `prepare` makes.
fn run(entry: &str, schedule: Schedule, prepare: impl FnOnce(&mut Device) -> Vec<Arg>) -> Outcome {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let args = prepare(&mut device);
    let launch = Launch::new(entry, [1, 1, 1], [32, 1, 1], 256, args).with_schedule(schedule, 1);
    device.launch(id, &launch).unwrap()
}

/// A buffer of 33 numbers, the first as given.
fn numbers(device: &mut Device, name: &str, first: i32) -> Buffer {
    let mut bytes = vec![0; 33 * 4];
    bytes[..4].copy_from_slice(&first.to_le_bytes());
    device.upload(name, &bytes).unwrap()
}

fn kinds(outcome: &Outcome) -> Vec<Kind> {
    outcome.findings.iter().map(|finding| finding.kind).collect()
}

#[test]
fn a_neighbouring_shared_array_is_out_of_bounds() {
    for schedule in Schedule::ALL {
        let shifted = |entry: &str, shift: i32| {
            run(entry, schedule, |device| vec![Arg::Buffer(numbers(device, "out", shift))])
        };
        assert_eq!(kinds(&shifted("neighbour", 0)), []);
        let outcome = shifted("neighbour", 1);
        assert_eq!(kinds(&outcome), [Kind::OutOfBounds], "{outcome}");
        let finding = &outcome.findings[0];
        assert_eq!(finding.site.thread, [31, 0, 0]);
        assert!(finding.detail.contains("past the end of `first` (128 bytes), in `second`"), "{finding}");
        assert_eq!(finding.variable.as_ref().unwrap().name, "second");
        assert_eq!(kinds(&shifted("ping_pong", 5)), []);
        assert_eq!(kinds(&shifted("below_dynamic", 0)), []);
        let outcome = shifted("below_dynamic", 2);
        assert_eq!(kinds(&outcome), [Kind::OutOfBounds], "{outcome}");
        assert!(outcome.findings[0].detail.contains("before `dynamic`, in `fixed`"), "{outcome}");
        assert_eq!(outcome.findings[0].count, 2);
    }
}

#[test]
fn a_neighbouring_buffer_is_far_away() {
    let mut device = Device::new();
    let first = device.allocate("first", 100).unwrap();
    let second = device.allocate("second", 100).unwrap();
    assert!(second.address() - first.address() >= 256 << 20);
}

#[test]
fn read_only_loads_of_what_the_launch_writes() {
    for schedule in Schedule::ALL {
        let two = |device: &mut Device| {
            [numbers(device, "from", 0), numbers(device, "to", 0)].map(Arg::Buffer).to_vec()
        };
        assert_eq!(kinds(&run("add_one", schedule, two)), []);
        // The pointers promise not to overlap, and do.
        let outcome = run("add_one", schedule, |device| vec![Arg::Buffer(numbers(device, "both", 0)); 2]);
        assert_eq!(kinds(&outcome), [Kind::NonCoherentLoad], "{outcome}");
        let finding = &outcome.findings[0];
        assert!(finding.advice.as_ref().unwrap().contains("__restrict__"), "{finding}");
        assert_eq!(finding.variable.as_ref().unwrap().name, "both");
        // Ordered or not: the read-only cache does not know of the store.
        let outcome = run("read_back", schedule, two);
        assert_eq!(kinds(&outcome), [Kind::NonCoherentLoad], "{outcome}");
        assert_eq!(kinds(&run("read_back_ok", schedule, two)), []);
    }
}

#[test]
fn bytes_of_an_output_that_nobody_wrote() {
    let few = |count: i32, is_output: bool| {
        run("first_few", Schedule::RoundRobin, |device| {
            let out = device.allocate("out", 128).unwrap();
            device.expect_written(out, is_output).unwrap();
            vec![Arg::Buffer(out), Arg::I32(count)]
        })
    };
    assert_eq!(kinds(&few(32, true)), []);
    assert_eq!(kinds(&few(30, false)), []);
    let outcome = few(30, true);
    assert_eq!((kinds(&outcome), outcome.worst()), (vec![Kind::UnwrittenOutput], Some(Severity::Warning)));
    let finding = &outcome.findings[0];
    assert!(finding.detail.contains("8 of 128 bytes of `out`"), "{finding}");
    assert!(finding.detail.contains("offset 120"), "{finding}");
}
