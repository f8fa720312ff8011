//! Each known mistake is reported, with its kind and line; the corrected twin is clean.

use ptxsan::{Arg, Device, Finding, Kind, Launch, Module, Outcome, Schedule};

const PTX: &str = include_str!("fixtures/hazards.ptx");

/// Launches an entry with the first buffers zeroed and the last one never written.
fn run(
    entry: &str,
    grid: u32,
    block: u32,
    buffers: &[(&str, usize, bool)],
    extra: &[Arg],
    schedule: Schedule,
) -> (Outcome, Vec<Vec<u8>>) {
    let module = Module::parse(PTX).unwrap();
    run_module(&module, entry, grid, block, buffers, extra, schedule)
}

fn run_module(
    module: &Module,
    entry: &str,
    grid: u32,
    block: u32,
    buffers: &[(&str, usize, bool)],
    extra: &[Arg],
    schedule: Schedule,
) -> (Outcome, Vec<Vec<u8>>) {
    let mut device = Device::new();
    let id = device.load(module).unwrap();
    let mut handles = Vec::new();
    for (name, bytes, is_zeroed) in buffers {
        let buffer = device.allocate(name, *bytes).unwrap();
        if *is_zeroed {
            device.write(buffer, 0, &vec![0; *bytes]).unwrap();
        }
        handles.push(buffer);
    }
    let args = handles.iter().map(|b| Arg::Buffer(*b)).chain(extra.iter().cloned()).collect();
    let mut launch = Launch::new(entry, [grid, 1, 1], [block, 1, 1], 0, args).with_schedule(schedule, 11);
    launch.options.instruction_budget = 2_000_000;
    let outcome = device.launch(id, &launch).unwrap();
    let contents = handles.iter().map(|b| device.read(*b).unwrap()).collect();
    (outcome, contents)
}

fn only(outcome: &Outcome, kind: Kind) -> &Finding {
    assert_eq!(outcome.findings.len(), 1, "{outcome}");
    assert_eq!(outcome.findings[0].kind, kind, "{outcome}");
    &outcome.findings[0]
}

fn source(finding: &Finding) -> &str {
    finding.site.source.as_deref().unwrap_or("")
}

fn advice(finding: &Finding) -> &str {
    finding.advice.as_deref().unwrap_or("")
}

#[test]
fn missing_barrier() {
    for schedule in Schedule::ALL {
        let (outcome, _) = run("missing_barrier", 1, 64, &[("out", 256, false)], &[], schedule);
        let races: Vec<_> = outcome.of_kind(Kind::Race).collect();
        assert!(!races.is_empty(), "{outcome}");
        let lines = |f: &Finding| (source(f).to_owned(), f.other.as_ref().unwrap().source.clone().unwrap());
        let (a, b) = lines(races[0]);
        let mut pair = [a, b];
        pair.sort();
        assert_eq!(pair, ["hazards.cu:4", "hazards.cu:5"]);
        assert!(advice(races[0]).contains("__syncthreads()"), "{outcome}");
        let (outcome, _) = run("missing_barrier_ok", 1, 64, &[("out", 256, false)], &[], schedule);
        assert!(outcome.is_clean(), "{outcome}");
    }
}

#[test]
fn missing_warp_sync() {
    let (outcome, _) = run("missing_warp_sync", 1, 32, &[("out", 128, false)], &[], Schedule::RoundRobin);
    // Volatile accesses do not race in the sense of the memory model; the plain twin below does.
    only(&outcome, Kind::WarpSynchronous);
    let plain = PTX.replace(".volatile.shared", ".shared");
    let module = Module::parse(&plain).unwrap();
    let (outcome, _) =
        run_module(&module, "missing_warp_sync", 1, 32, &[("out", 128, false)], &[], Schedule::RoundRobin);
    let finding = only(&outcome, Kind::Race);
    assert!(advice(finding).contains("__syncwarp()"), "{finding}");
    let (outcome, _) =
        run_module(&module, "missing_warp_sync_ok", 1, 32, &[("out", 128, false)], &[], Schedule::RoundRobin);
    assert!(outcome.is_clean(), "{outcome}");
}

#[test]
fn flag_handshake_needs_its_fences() {
    let buffers = [("data", 4, true), ("flag", 4, true), ("out", 4, false)];
    for schedule in Schedule::ALL {
        let (outcome, _) = run("flag_handshake", 2, 32, &buffers, &[], schedule);
        let finding = outcome.of_kind(Kind::Race).next().unwrap_or_else(|| panic!("{schedule:?} {outcome}"));
        assert!(advice(finding).contains("__threadfence"), "{finding}");
        let (outcome, contents) = run("flag_handshake_ok", 2, 32, &buffers, &[], schedule);
        assert!(outcome.is_clean(), "{schedule:?}\n{outcome}");
        assert_eq!(contents[2], 42i32.to_le_bytes());
    }
    let module = Module::parse(PTX).unwrap();
    let points = module.sync_points("flag_handshake_ok").unwrap();
    assert_eq!(points.len(), 2);
    for point in points {
        let broken = module.without(point.id).unwrap();
        let (outcome, _) =
            run_module(&broken, "flag_handshake_ok", 2, 32, &buffers, &[], Schedule::RoundRobin);
        assert!(outcome.of_kind(Kind::Race).count() > 0, "without {point:?}");
    }
}

#[test]
fn last_block_pattern_is_clean_and_each_deletion_is_noticed() {
    let buffers = [("part", 32, false), ("done", 4, true), ("out", 4, false)];
    for schedule in Schedule::ALL {
        let (outcome, contents) = run("last_block", 8, 64, &buffers, &[], schedule);
        assert!(outcome.is_clean(), "{schedule:?}\n{outcome}");
        assert_eq!(contents[2], 36f32.to_le_bytes());
    }
    let module = Module::parse(PTX).unwrap();
    for point in module.sync_points("last_block").unwrap() {
        let broken = module.without(point.id).unwrap();
        let found = Schedule::ALL
            .into_iter()
            .any(|schedule| !run_module(&broken, "last_block", 8, 64, &buffers, &[], schedule).0.is_clean());
        assert!(found, "without {point:?}");
    }
}

#[test]
fn divergent_barrier() {
    let (outcome, _) = run("divergent_barrier", 1, 32, &[("out", 128, false)], &[], Schedule::RoundRobin);
    let finding = outcome.of_kind(Kind::BarrierDivergence).next().unwrap_or_else(|| panic!("{outcome}"));
    assert_eq!(source(finding), "hazards.cu:68");
    assert!(finding.detail.contains("0x0000ffff"), "{finding}");
}

#[test]
fn deadlock_shows_who_waits_where() {
    for schedule in Schedule::ALL {
        let (outcome, _) = run("deadlock", 1, 64, &[("out", 256, false)], &[], schedule);
        let finding = only(&outcome, Kind::Deadlock);
        for part in ["barrier 1: 32 of 64", "barrier 2: 32 of 64", "hazards.cu:73", "hazards.cu:74"] {
            assert!(finding.detail.contains(part), "{part} in {finding}");
        }
    }
}

#[test]
fn shuffle_from_an_inactive_lane() {
    let (outcome, _) = run("shuffle_from_inactive", 1, 32, &[("out", 128, false)], &[], Schedule::RoundRobin);
    let finding = only(&outcome, Kind::ShuffleInactive);
    assert_eq!(finding.count, 1);
    assert!(source(finding).starts_with("hazards.cu:80"), "{finding}");
}

#[test]
fn out_of_bounds_names_the_allocation() {
    let (outcome, _) =
        run("out_of_bounds", 1, 32, &[("out", 128, false)], &[Arg::I32(30)], Schedule::RoundRobin);
    let finding = only(&outcome, Kind::OutOfBounds);
    assert_eq!(finding.count, 30);
    assert_eq!((source(finding), finding.site.thread), ("hazards.cu:85", [2, 0, 0]));
    assert!(finding.detail.contains("`out` (128 bytes)"), "{finding}");
}

#[test]
fn lanes_of_one_warp_take_a_lock_in_turn() {
    for schedule in Schedule::ALL {
        let buffers = [("lock", 4, true), ("count", 4, true)];
        let (outcome, contents) = run("lane_lock", 2, 64, &buffers, &[], schedule);
        assert!(outcome.is_clean(), "{schedule:?}\n{outcome}");
        assert_eq!(contents[1], 128i32.to_le_bytes());
    }
}

#[test]
fn named_barriers_hand_over_between_warps() {
    for schedule in Schedule::ALL {
        let (outcome, contents) = run("named_barriers", 1, 64, &[("out", 512, false)], &[], schedule);
        assert!(outcome.is_clean(), "{schedule:?}\n{outcome}");
        let got: Vec<i32> =
            contents[0].chunks_exact(4).map(|c| i32::from_le_bytes(c.try_into().unwrap())).collect();
        assert!((0..128).all(|i| got[i] == (i / 32 * 100 + 31 - i % 32) as i32), "{got:?}");
    }
    let module = Module::parse(PTX).unwrap();
    let points = module.sync_points("named_barriers").unwrap();
    let mut quiet = Vec::new();
    for point in &points {
        let broken = module.without(point.id).unwrap();
        let found = Schedule::ALL.into_iter().any(|schedule| {
            !run_module(&broken, "named_barriers", 1, 64, &[("out", 512, false)], &[], schedule).0.is_clean()
        });
        if !found {
            quiet.push(point);
        }
    }
    assert!(quiet.is_empty(), "{quiet:?} of {points:?}");
}

#[test]
fn the_same_seed_gives_the_same_report() {
    let report = |seed: u64| {
        let module = Module::parse(PTX).unwrap();
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let buffers = ["data", "flag", "out"].map(|n| device.upload(n, &[0; 4]).unwrap());
        let launch =
            Launch::new("flag_handshake", [2, 1, 1], [32, 1, 1], 0, buffers.map(Arg::Buffer).to_vec());
        let outcome = device.launch(id, &launch.with_schedule(Schedule::Random, seed)).unwrap();
        (outcome.to_string(), outcome.warp_instructions)
    };
    assert_eq!(report(5), report(5));
    assert!((0..8).any(|seed| report(seed).1 != report(5).1), "other seeds give other runs");
}
