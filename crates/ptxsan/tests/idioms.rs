//! What CUDA programmers write: right programs have no finding that fails and the right results, wrong ones are found.

use ptxsan::finding::merge;
use ptxsan::{Arg, Device, Finding, Kind, Launch, Module, Schedule, Severity};

const PTX: &str = include_str!("fixtures/idioms.ptx");

/// Runs an entry under every schedule on buffers of words: what each buffer holds then, and all findings.
fn run(
    entry: &str,
    grid: u32,
    block: u32,
    buffers: &[Vec<u32>],
    more: &[Arg],
) -> (Vec<Vec<u32>>, Vec<Finding>) {
    let module = Module::parse(PTX).unwrap();
    let entry = module.entries().find(|name| name.contains(entry)).unwrap().to_owned();
    let (mut results, mut findings): (Vec<Vec<u32>>, _) = (Vec::new(), Vec::new());
    for schedule in Schedule::ALL {
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let mut args = Vec::new();
        for (i, words) in buffers.iter().enumerate() {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            args.push(device.upload(&format!("buffer{i}"), &bytes).unwrap());
        }
        let all = args.iter().copied().map(Arg::Buffer).chain(more.iter().cloned()).collect();
        let mut launch = Launch::new(&entry, [grid, 1, 1], [block, 1, 1], 0, all).with_schedule(schedule, 3);
        launch.options.instruction_budget = 2_000_000;
        merge(&mut findings, device.launch(id, &launch).unwrap().findings);
        let words = |bytes: &[u8]| {
            bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
        };
        let now: Vec<Vec<u32>> = args.iter().map(|buffer| words(&device.read(*buffer).unwrap())).collect();
        // What is right does not depend on the schedule.
        assert!(results.is_empty() || results == now || !findings.is_empty(), "{entry} {schedule:?}");
        results = now;
    }
    (results, findings)
}

fn fails(findings: &[Finding]) -> Vec<&Finding> {
    findings.iter().filter(|finding| finding.severity != Severity::Info).collect()
}

fn float(bits: u32) -> f32 {
    f32::from_bits(bits)
}

#[test]
fn reductions_of_bulk_copies_reach_all_blocks() {
    let (results, findings) = run("bulk_sum", 5, 128, &[vec![0; 128]], &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
    assert!((0..128).all(|i| float(results[0][i]) == 5.0 * i as f32), "{results:?}");
}

#[test]
fn the_last_block_may_fence_in_every_thread() {
    let buffers = [vec![0], vec![0; 8], vec![0]];
    let (results, findings) = run("last_blockILb1", 8, 32, &buffers, &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
    assert_eq!(results[2], [36]);
    let (_, findings) = run("last_blockILb0", 8, 32, &buffers, &[]);
    let [finding] = &findings[..] else { panic!("{findings:?}") };
    assert_eq!((finding.kind, finding.severity), (Kind::Race, Severity::Error));
    assert!(finding.to_string().contains("idioms.cu:32"), "{finding}");
}

#[test]
fn who_has_read_the_last_atomic_may_store() {
    // In one block and in several.
    for (grid, block) in [(1, 41), (5, 64)] {
        let (results, findings) = run("ticketILb1", grid, block, &[vec![0, 0], vec![0], vec![0]], &[]);
        assert!(findings.is_empty(), "{grid} {block}: {}", findings[0]);
        assert_eq!(results[0], [0, 0]);
    }
    let (_, findings) = run("ticketILb0", 5, 64, &[vec![0, 0], vec![0], vec![0]], &[]);
    assert!(!findings.is_empty());
    assert!(findings.iter().all(|f| f.kind == Kind::Race && f.severity == Severity::Error), "{findings:?}");

    let buffers = [vec![0], vec![0; 32], vec![0; 32]];
    let (results, findings) = run("last_reads_sumsILb1", 4, 32, &buffers, &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
    assert_eq!(results[2], [4; 32]);
    let (_, findings) = run("last_reads_sumsILb0", 4, 32, &buffers, &[]);
    assert!(findings.iter().any(|f| f.kind == Kind::Race && f.severity == Severity::Error), "{findings:?}");

    let (results, findings) = run("5turns", 4, 32, &[vec![0], vec![0; 32]], &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
    assert!(results[0] == [0] && results[1].iter().all(|sum| *sum == 10), "{results:?}");
}

#[test]
fn volatile_data_is_not_ordered() {
    let x = [(1..=64).collect(), vec![0], vec![0]];
    let (results, findings) = run("volatile_scanILb1", 1, 64, &x, &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
    assert!((1..=64).all(|i| results[0][i as usize - 1] == i * (i + 1) / 2), "{results:?}");
    let (_, findings) = run("volatile_scanILb0", 1, 64, &x, &[]);
    let found = findings.iter().find(|finding| finding.kind == Kind::VolatileRace).expect("between warps");
    assert_eq!(found.severity, Severity::Warning);
    assert!(
        found.advice.as_deref().unwrap().contains("__syncthreads() between the accesses is missing"),
        "{found}"
    );

    let (_, findings) = run("8progress", 1, 64, &[vec![5]], &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
}

#[test]
fn a_fence_of_the_block_shows_nothing_of_another() {
    let buffers = [vec![0], vec![0], vec![0]];
    let (results, findings) = run("messageILb1", 2, 1, &buffers, &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
    assert_eq!(results[2], [7]);
    let (_, findings) = run("messageILb0", 2, 1, &buffers, &[]);
    let races: Vec<&Finding> = findings.iter().filter(|finding| finding.kind == Kind::Race).collect();
    assert_eq!(races.len(), 1, "{findings:?}");
    assert!(
        races[0].advice.as_deref().unwrap().contains("on this side one is missing: __threadfence()"),
        "{}",
        races[0]
    );
}

#[test]
fn the_first_guess_of_a_compare_and_swap_may_be_a_plain_load() {
    let buffers = [vec![0], vec![0], vec![0]];
    let (results, findings) = run("maximumILb1", 3, 32, &buffers, &[]);
    assert!(fails(&findings).is_empty(), "{findings:?}");
    assert!(
        findings.iter().any(|finding| finding.advice.as_deref().unwrap().contains("by the letter")),
        "{findings:?}"
    );
    assert_eq!(float(results[0][0]), 33.0);
    // A plain store is none of that loop's.
    let (_, findings) = run("maximumILb0", 3, 32, &buffers, &[]);
    let wrong = fails(&findings);
    assert!(
        !wrong.is_empty() && wrong.iter().all(|finding| finding.to_string().contains("idioms.cu:67")),
        "{findings:?}"
    );
}

#[test]
fn a_lock_within_a_warp_is_taken_in_turn() {
    let buffers = [vec![0], vec![0], vec![0]];
    let (results, findings) = run("_Z4lockILb1", 2, 32, &buffers, &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
    assert_eq!(results[1], [64]);
    let (_, findings) = run("_Z4lockILb0", 2, 32, &buffers, &[]);
    assert!(findings.iter().any(|finding| finding.kind == Kind::Race), "{findings:?}");
}

#[test]
fn vectors_are_atomic_by_element_and_aligned_as_a_whole() {
    let (results, findings) = run("vectors", 2, 64, &[vec![0; 8]], &[Arg::I32(0)]);
    assert!(findings.is_empty(), "{}", findings[0]);
    let sums: Vec<f32> = results[0].iter().map(|bits| float(*bits)).collect();
    assert_eq!(sums, [128.0, 256.0, 384.0, 512.0, 640.0, 768.0, 0.0, 0.0]);
    let (_, findings) = run("vectors", 1, 32, &[vec![0; 8]], &[Arg::I32(2)]);
    assert!(findings.iter().any(|finding| finding.kind == Kind::Misaligned), "{findings:?}");
}

#[test]
fn packed_integers_are_computed_apart() {
    let x: Vec<u32> = (0u32..64).map(|i| i.wrapping_mul(0x9e37_79b9) ^ 0x8000_7fff).collect();
    let (results, findings) = run("packed", 1, 32, &[x.clone(), vec![0; 256]], &[]);
    assert!(findings.is_empty(), "{}", findings[0]);
    let halves = |a: u32, b: u32, f: &dyn Fn(u16, u16) -> u16| {
        u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
    };
    let bytes = |a: u32, b: u32| a.to_le_bytes().into_iter().zip(b.to_le_bytes()).map(|(a, b)| a.abs_diff(b));
    for i in 0..32 {
        let (a, b) = (x[i], x[i + 32]);
        let wanted = [
            halves(a, b, &u16::wrapping_add),
            halves(a, b, &|a, b| (a as i16).max(b as i16) as u16),
            halves(a, b, &u16::min),
            halves(a, b, &|a, b| (a as i16).max(b as i16).max(0) as u16),
            bytes(a, b).rev().fold(0, |all, byte| all << 8 | u32::from(byte)),
            bytes(a, b).map(u32::from).sum(),
            u32::from((a as u16).abs_diff(b as u16))
                + u32::from(((a >> 16) as u16).abs_diff((b >> 16) as u16)),
            halves(a, b, &u16::wrapping_sub),
        ];
        assert_eq!(results[1][8 * i..8 * i + 8], wanted, "{i}");
    }
}

#[test]
fn a_deadlock_is_where_the_bytes_are_wrong_not_where_others_wait_for_it() {
    let (_, findings) = run("too_many_bytes", 1, 64, &[vec![0; 128], vec![0; 64]], &[]);
    let deadlock = findings.iter().find(|finding| finding.kind == Kind::Deadlock).unwrap();
    assert_eq!(deadlock.site.thread, [32, 0, 0], "{deadlock}");
    let full = deadlock.detail.find("(full+0)").unwrap();
    assert!(full < deadlock.detail.find("(empty+0)").unwrap(), "{deadlock}");
    assert!(
        deadlock.detail.contains("0 of 1 arrivals pending, 256 bytes more arrived than were expected"),
        "{deadlock}"
    );
}
