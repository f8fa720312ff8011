//! What is said of a mistake: the threads that are really unordered, one finding for one mistake, its severity, and advice that fits.

use ptxsan::finding::merge;
use ptxsan::{Arg, Device, Finding, Kind, Launch, Module, Outcome, Schedule, Severity, Suppressions};

const PTX: &str = include_str!("fixtures/findings.ptx");

/// Launches an entry on buffers of zeros.
fn run_module(
    module: &Module,
    entry: &str,
    grid: u32,
    block: u32,
    bytes: &[usize],
    schedule: Schedule,
) -> Outcome {
    let mut device = Device::new();
    let id = device.load(module).unwrap();
    let names = ["first", "second", "third"];
    let buffers = bytes.iter().zip(names).map(|(bytes, name)| device.upload(name, &vec![0; *bytes]).unwrap());
    let args: Vec<Arg> = buffers.map(Arg::Buffer).collect();
    let mut launch = Launch::new(entry, [grid, 1, 1], [block, 1, 1], 0, args).with_schedule(schedule, 3);
    launch.options.instruction_budget = 2_000_000;
    device.launch(id, &launch).unwrap()
}

fn run(entry: &str, grid: u32, block: u32, bytes: &[usize], schedule: Schedule) -> Outcome {
    run_module(&Module::parse(PTX).unwrap(), entry, grid, block, bytes, schedule)
}

/// The findings of all schedules together.
fn under_all(entry: &str, grid: u32, block: u32, bytes: &[usize]) -> Vec<Finding> {
    let mut all = Vec::new();
    for schedule in Schedule::ALL {
        merge(&mut all, run(entry, grid, block, bytes, schedule).findings);
    }
    all
}

fn clean(entry: &str, grid: u32, block: u32, bytes: &[usize]) {
    let all = under_all(entry, grid, block, bytes);
    assert!(all.is_empty(), "{entry}: {}", all[0]);
}

fn advice(finding: &Finding) -> &str {
    finding.advice.as_deref().unwrap_or("")
}

/// Two different threads, always.
fn assert_two_threads(finding: &Finding) {
    let other = finding.other.as_ref().unwrap_or_else(|| panic!("{finding}"));
    assert_ne!((finding.site.block, finding.site.thread), (other.block, other.thread), "{finding}");
}

#[test]
fn the_thread_that_is_not_ordered_is_named() {
    for schedule in Schedule::ALL {
        // One warp: thread 0's own read is in order, and is not what is reported.
        let outcome = run("broadcast", 1, 32, &[128], schedule);
        let [finding] = &outcome.findings[..] else { panic!("{outcome}") };
        assert_two_threads(finding);
        assert!(advice(finding).contains("__syncwarp()"), "{finding}");
        let outcome = run("broadcast", 1, 96, &[384], schedule);
        outcome.findings.iter().for_each(assert_two_threads);
        // Without a race checker's help nothing else is wrong with it.
        assert!(!outcome.is_clean());
    }
    clean("broadcast_ok", 1, 96, &[384]);
    // Only the writing warp, and only the writer's lane: nothing to report.
    clean("broadcast", 1, 1, &[4]);
}

#[test]
fn the_missing_fence_is_named_and_no_other() {
    let buffers = [4, 4, 4];
    for schedule in Schedule::ALL {
        let of = |entry: &str| {
            let outcome = run(entry, 2, 32, &buffers, schedule);
            let found = outcome.of_kind(Kind::Race).next();
            let found = found.unwrap_or_else(|| panic!("{entry} {schedule:?} {outcome}"));
            assert_two_threads(found);
            advice(found).to_owned()
        };
        let reader = of("reader_without_fence");
        assert!(reader.contains("the other side has"), "{reader}");
        assert!(!reader.contains("both sides"), "{reader}");
        let writer = of("writer_without_fence");
        assert!(writer.contains("on the other side one is missing") || writer.contains("both"), "{writer}");
        let narrow = of("narrow_fence");
        assert!(narrow.contains("reaches no further than its block"), "{narrow}");
    }
    // The usual order: the flag is set before it is read.
    let outcome = run("reader_without_fence", 2, 32, &buffers, Schedule::RoundRobin);
    let finding = outcome.of_kind(Kind::Race).next().unwrap();
    assert!(advice(finding).contains("on this side one is missing: __threadfence()"), "{finding}");
    let outcome = run("writer_without_fence", 2, 32, &buffers, Schedule::RoundRobin);
    let finding = outcome.of_kind(Kind::Race).next().unwrap();
    assert!(advice(finding).contains("on the other side one is missing: __threadfence()"), "{finding}");
}

#[test]
fn an_atomic_does_not_hide_the_plain_store_before_it() {
    for schedule in Schedule::ALL {
        let outcome = run("reset_counter", 1, 64, &[256], schedule);
        let races: Vec<&Finding> = outcome.of_kind(Kind::Race).collect();
        assert!(!races.is_empty(), "{schedule:?} {outcome}");
        races.iter().for_each(|finding| assert_two_threads(finding));
        assert_eq!(races[0].variable.as_ref().unwrap().name, "counter", "{outcome}");
    }
    clean("reset_counter_ok", 1, 64, &[256]);
}

#[test]
fn what_is_no_race_by_the_letter_is_a_warning() {
    for schedule in Schedule::ALL {
        let only = |entry: &str, grid: u32, block: u32, bytes: &[usize], kind: Kind| {
            let outcome = run(entry, grid, block, bytes, schedule);
            let kinds: Vec<Kind> = outcome.findings.iter().map(|finding| finding.kind).collect();
            assert!(!kinds.is_empty() && kinds.iter().all(|found| *found == kind), "{schedule:?} {outcome}");
            assert_eq!(outcome.worst(), Some(Severity::Warning), "{outcome}");
            outcome.findings.iter().for_each(assert_two_threads);
            assert!(!outcome.is_clean());
        };
        only("lost_update", 2, 64, &[4], Kind::LostUpdate);
        only("lost_update", 1, 32, &[4], Kind::LostUpdate);
        only("warp_reduce", 1, 32, &[4], Kind::WarpSynchronous);
        only("volatile_message", 2, 32, &[4, 4, 4], Kind::UnfencedMessage);
    }
    clean("lost_update_ok", 2, 64, &[4]);
    clean("one_counts_ok", 2, 64, &[4]);
    clean("early_end_ok", 2, 64, &[4, 256]);
    clean("counters_ok", 2, 64, &[4, 4, 512]);
    clean("warp_reduce_ok", 1, 32, &[4]);
    clean("volatile_message_ok", 2, 32, &[4, 4, 4]);
}

#[test]
fn stores_of_the_same_value_are_benign() {
    for schedule in Schedule::ALL {
        for (grid, block) in [(1, 32), (1, 64), (3, 1)] {
            let outcome = run("same_value", grid, block, &[4], schedule);
            assert_eq!(outcome.worst(), Some(Severity::Info), "{outcome}");
            assert!(outcome.is_clean());
            outcome.findings.iter().for_each(assert_two_threads);
            assert!(advice(&outcome.findings[0]).contains("the same value"), "{outcome}");
        }
        let outcome = run("other_value", 3, 1, &[4], schedule);
        assert_eq!(outcome.worst(), Some(Severity::Error), "{outcome}");
    }
}

#[test]
fn blocks_that_store_the_same_value_have_not_read_the_place() {
    for schedule in Schedule::ALL {
        for (entry, buffers) in
            [("same_value_seen", &[4, 8][..]), ("same_update", &[4]), ("same_value_if_unset", &[4])]
        {
            let outcome = run(entry, 2, 1, buffers, schedule);
            assert_eq!(outcome.worst(), Some(Severity::Error), "{entry}: {outcome}");
            let first = &outcome.findings[0];
            assert!(!advice(first).contains("the same value"), "{entry}: {first}");
        }
    }
}

#[test]
fn one_missing_barrier_is_one_finding_with_its_inline_stack() {
    let all = under_all("inlined", 1, 64, &[256]);
    let [finding] = &all[..] else { panic!("{} findings, {}", all.len(), all[1]) };
    assert!(finding.count >= 64 * 4, "{finding}");
    assert_eq!(finding.schedules, Schedule::ALL, "{finding}");
    let variable = finding.variable.as_ref().unwrap();
    assert_eq!((variable.name.as_str(), variable.space, variable.size_bytes), ("tile", "shared", 1024));
    let deep =
        [Some(&finding.site), finding.other.as_ref()].into_iter().flatten().find(|s| s.stack.len() > 1);
    let lines: Vec<String> = deep.unwrap().stack.iter().map(ToString::to_string).collect();
    assert_eq!(lines, ["findings.cu:134", "findings.cu:136", "findings.cu:141"]);
    let source = deep.unwrap().source.as_deref().unwrap();
    assert_eq!(source, "findings.cu:141 (inlined from findings.cu:136 from findings.cu:134)");
    assert!(finding.to_string().contains("(tile+"), "{finding}");
}

#[test]
fn suppressions_take_findings_out_and_say_what_they_did_not_meet() {
    let outcome = run("broadcast", 1, 64, &[256], Schedule::RoundRobin);
    assert!(!outcome.is_clean());
    for (rules, left) in [
        ("race findings.cu:6", 0),
        ("race findings.cu", 0),
        ("race value", 0),
        ("* broadcast", 0),
        ("race findings.cu:99\nmisaligned *", 1),
    ] {
        let mut suppressions = Suppressions::parse(rules).unwrap();
        let mut findings = outcome.findings.clone();
        let taken = suppressions.apply("broadcast", &mut findings);
        assert_eq!(
            (findings.len().min(1), taken + findings.len()),
            (left, outcome.findings.len()),
            "{rules}"
        );
        assert_eq!(suppressions.unused().count() > 0, left > 0, "{rules}");
    }
}
