//! The decision tree on counters made up to sit on either side of each threshold, and on captures of an H200.

use std::path::Path;

use evosdpa_kernels::Arch;
use evosdpa_lab::profile::{
    Bottleneck, Capture, Insight, Launch, Metric, Registry, Stall, Values, Work, diagnose, gate,
};

/// A launch with every metric of the architecture: idle units, balanced SMs, warps that wait for fixed latencies.
fn idle(arch: Arch) -> Launch {
    let registry = Registry::of(arch);
    let mut launch = Launch { kernel: "made_up".into(), ..Launch::default() };
    for entry in registry.entries() {
        let value = match entry.metric {
            Metric::Duration => 1e-5,
            Metric::SmActiveMean | Metric::SmActiveMost | Metric::SmActiveLeast => 1000.0,
            Metric::Instructions => 1e6,
            Metric::LoadSectorUse => 100.0,
            Metric::Stall(Stall::Wait) => 2.0,
            Metric::Stall(_) | Metric::Spills | Metric::SharedConflicts | Metric::TmaInstructions => 0.0,
            _ => 10.0,
        };
        launch.metrics.insert(entry.names[0].to_owned(), value);
    }
    launch
}

fn set(launch: &mut Launch, arch: Arch, values: &[(Metric, f64)]) {
    for (metric, value) in values {
        let registry = Registry::of(arch);
        let entry = registry.entries().iter().find(|entry| entry.metric == *metric).unwrap();
        launch.metrics.insert(entry.names[0].to_owned(), *value);
    }
}

fn insights(values: &[(Metric, f64)]) -> Vec<Insight> {
    let mut launch = idle(Arch::Sm90a);
    set(&mut launch, Arch::Sm90a, values);
    let work = Work { flops: 1e9, compulsory_bytes: 10.0 };
    let has = ["STAGES", "BLOCK_M", "PINGPONG", "USE_WMMA_PV"].map(str::to_owned);
    diagnose(&Values::of(&launch, &Registry::of(Arch::Sm90a)).unwrap(), Some(&work), &has, &[])
}

/// The leaf's id, what it says, and the counters that lead there.
type Case = (&'static str, Bottleneck, Vec<(Metric, f64)>);

#[test]
fn every_leaf_has_counters_that_lead_to_it() {
    use Metric as M;
    let stall = |stall: Stall, warps: f64| (M::Stall(stall), warps);
    let cases: &[Case] = &[
        (
            "0-resources",
            Bottleneck::Resources,
            vec![(M::Spills, 2e4), (M::DramThroughput, 99.0), (M::MemoryThroughput, 99.0)],
        ),
        ("1-roofline", Bottleneck::Roofline, vec![(M::MemoryThroughput, 96.0), (M::DramThroughput, 96.0)]),
        (
            "2a-dram-reuse",
            Bottleneck::Dram,
            vec![(M::MemoryThroughput, 80.0), (M::DramThroughput, 80.0), (M::DramReadBytes, 30.0)],
        ),
        (
            "2a-dram-floor",
            Bottleneck::Dram,
            vec![
                (M::MemoryThroughput, 80.0),
                (M::DramThroughput, 80.0),
                (M::DramReadBytes, 1.0),
                (M::DramWriteBytes, 9.0),
            ],
        ),
        ("2b-l2", Bottleneck::L2, vec![(M::MemoryThroughput, 70.0), (M::L2Throughput, 70.0)]),
        (
            "2c-smem-conflicts",
            Bottleneck::SharedMemory,
            vec![(M::MemoryThroughput, 70.0), (M::L1Throughput, 70.0), (M::SharedConflicts, 4.0)],
        ),
        (
            "2c-smem-traffic",
            Bottleneck::SharedMemory,
            vec![(M::MemoryThroughput, 70.0), (M::L1Throughput, 70.0)],
        ),
        ("3a-math", Bottleneck::Math, vec![(M::SmThroughput, 75.0), (M::TensorPipeActive, 75.0)]),
        (
            "3b-softmax",
            Bottleneck::Softmax,
            vec![(M::SmThroughput, 75.0), (M::TensorPipeActive, 40.0), (M::XuPipe, 70.0)],
        ),
        (
            "3c-scalar",
            Bottleneck::Math,
            vec![(M::SmThroughput, 75.0), (M::TensorPipeActive, 0.0), (M::FmaPipe, 70.0)],
        ),
        (
            "3d-issue",
            Bottleneck::Issue,
            vec![(M::SmThroughput, 75.0), (M::TensorPipeActive, 40.0), (M::IssueActive, 75.0)],
        ),
        ("4-grid", Bottleneck::Grid, vec![(M::SmActiveMean, 480.0), stall(Stall::Gmma, 9.0)]),
        ("4-overlap", Bottleneck::Overlap, vec![stall(Stall::Gmma, 9.0)]),
        (
            "4-producer",
            Bottleneck::Producer,
            vec![
                stall(Stall::LongScoreboard, 3.0),
                stall(Stall::Barrier, 3.0),
                stall(Stall::ShortScoreboard, 4.0),
                (M::TmaInstructions, 64.0),
            ],
        ),
        (
            "4-shared-queue",
            Bottleneck::SharedQueue,
            vec![
                stall(Stall::LongScoreboard, 3.0),
                stall(Stall::Barrier, 3.0),
                stall(Stall::ShortScoreboard, 4.0),
            ],
        ),
        ("4-latency", Bottleneck::Latency, vec![stall(Stall::LongScoreboard, 4.0)]),
        ("4-synchronisation", Bottleneck::Synchronisation, vec![stall(Stall::Barrier, 4.0)]),
        ("4-issue", Bottleneck::Issue, vec![]),
        ("4-instruction-cache", Bottleneck::InstructionCache, vec![stall(Stall::NoInstruction, 4.0)]),
    ];
    for (id, bottleneck, values) in cases {
        let insights = insights(values);
        let first = &insights[0];
        assert_eq!((first.id.as_str(), first.bottleneck), (*id, *bottleneck), "{insights:#?}");
        assert!((0.0..=1.0).contains(&first.confidence), "{id}: {}", first.confidence);
        assert!(!first.evidence.is_empty() && !first.suggestion.is_empty(), "{id}");
        let json = serde_json::to_string(first).unwrap();
        assert_eq!(&serde_json::from_str::<Insight>(&json).unwrap(), first);
    }
    let grid = insights(&cases[11].2);
    assert!(
        grid[1..].iter().any(|insight| insight.bottleneck == Bottleneck::Overlap),
        "what else holds follows: {grid:#?}"
    );
    assert_eq!(grid[0].tunables[0].name, "BLOCK_M");
}

#[test]
fn a_few_spills_are_mentioned_and_many_come_first() {
    let few = insights(&[(Metric::Spills, 10.0)]);
    assert_eq!(few[0].bottleneck, Bottleneck::Issue);
    assert!(
        few.iter().any(|insight| insight.bottleneck == Bottleneck::Resources && insight.confidence < 0.01)
    );
    let advisory = {
        let launch = idle(Arch::Sm90a);
        let values = Values::of(&launch, &Registry::of(Arch::Sm90a)).unwrap();
        diagnose(&values, None, &[], &["ptxas C7510: wgmma serialised".to_owned()])
    };
    assert_eq!(advisory[0].bottleneck, Bottleneck::Resources);
}

#[test]
fn the_gate_wants_tensor_cores_busy_or_memory_free() {
    for (tensor, dram, passes) in
        [(60.0, 90.0, true), (10.0, 20.0, true), (49.0, 51.0, false), (50.0, 99.0, true)]
    {
        let mut launch = idle(Arch::Sm89);
        set(&mut launch, Arch::Sm89, &[(Metric::TensorPipe, tensor), (Metric::DramThroughput, dram)]);
        let verdict = gate(&Values::of(&launch, &Registry::of(Arch::Sm89)).unwrap()).verdict;
        assert_eq!(verdict.is_pass(), passes, "{tensor} {dram}: {verdict}");
    }
}

#[test]
fn a_missing_metric_is_named_and_never_zero() {
    let mut launch = idle(Arch::Sm90a);
    let name = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed";
    launch.metrics.remove(name);
    launch.metrics.remove(Stall::Gmma.metric_name());
    launch.without_value.push(name.to_owned());
    let message = Values::of(&launch, &Registry::of(Arch::Sm90a)).unwrap_err().to_string();
    assert!(
        message.contains(&format!("{name} (n/a)")) && message.contains(Stall::Gmma.metric_name()),
        "{message}"
    );
    // Ada has no warpgroup MMA, so it does not miss their stall; the other name still is missing.
    let message = Values::of(&launch, &Registry::of(Arch::Sm89)).unwrap_err().to_string();
    assert!(!message.contains("gmma"), "{message}");
}

fn capture(name: &str) -> Capture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ncu").join(name);
    Capture::parse(&std::fs::read_to_string(path).unwrap(), name).unwrap()
}

fn diagnosis(file: &str, kernel: &str, problem: &str) -> Vec<Insight> {
    let launches = capture(file).launches;
    let launch = launches.iter().find(|launch| launch.kernel == kernel).unwrap();
    let values = Values::of(launch, &Registry::of(Arch::Sm90a)).unwrap();
    let (shape, dtype) = problem.split_once(' ').unwrap();
    let problem = evosdpa_core::Problem::new(shape.parse().unwrap(), dtype.parse().unwrap()).unwrap();
    diagnose(&values, Some(&Work::from(&problem)), &[], &[])
}

/// What an H200 (ncu 2025.3) counted. Why each is right is argued in docs/profiling.md.
#[test]
fn captures_of_an_h200_are_diagnosed() {
    for (file, kernel, problem, expected) in [
        ("mission.csv", "sdpa_v2b", "mission bf16", Bottleneck::Grid),
        ("mission.csv", "hopper_fwd", "mission bf16", Bottleneck::Grid),
        ("long.csv", "sdpa_v2b", "long bf16", Bottleneck::Math),
        ("long.csv", "sdpa_v2c", "long bf16", Bottleneck::SharedMemory),
    ] {
        let insights = diagnosis(file, kernel, problem);
        assert_eq!(insights[0].bottleneck, expected, "{kernel} on {problem}: {insights:#?}");
    }
}

#[test]
fn both_forms_of_a_real_capture_agree() {
    let wide = capture("mission.csv");
    let names: Vec<&str> = wide.launches.iter().map(|launch| launch.kernel.as_str()).collect();
    assert_eq!(names, ["sdpa_v2b", "sdpa_v2c", "hopper_small", "hopper_fwd", "ampere_fwd"]);
    assert_eq!(wide.launches[0].capability.as_deref(), Some("9.0"));
    let long = capture("mission.details.csv");
    assert!(long.launches.iter().all(|launch| !launch.rules.is_empty()));
    let mut compared = 0;
    for launch in &long.launches {
        let same = wide.launches.iter().find(|wide| wide.id == launch.id).unwrap();
        for (name, value) in &launch.metrics {
            if let Some(other) = same.metrics.get(name) {
                // The details page rounds to two digits after the point.
                assert!((value - other).abs() <= 0.006 + 1e-3 * other.abs(), "{name}: {value} and {other}");
                compared += 1;
            }
        }
    }
    assert!(compared > 20, "{compared}");
    let labels = capture("mission.labels.csv");
    assert_eq!(labels.launches[0].metrics["GPU Speed Of Light Throughput/Memory Throughput"], 38.05);
    // Labels alone do not have every metric, and it says which are missing.
    let missing = Values::of(&labels.launches[0], &Registry::of(Arch::Sm90a)).unwrap_err().to_string();
    assert!(
        missing.contains("dram__bytes_read.sum") && !missing.contains("gpu__time_duration.sum,"),
        "{missing}"
    );
    assert_eq!(capture("two-metrics.csv").launches[0].metrics["dram__bytes_read.sum"], 1_606_912.0);
}

#[test]
fn a_real_capture_survives_another_locale_and_not_a_cut() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ncu/long.csv");
    let text = std::fs::read_to_string(path).unwrap();
    let whole = Capture::parse(&text, "long.csv").unwrap();
    let (noise, table) = text.split_at(text.find("\"ID\"").unwrap());
    let (header, rows) = table.split_at(table.find('\n').unwrap());
    let european: String = rows.chars().map(|c| if c == '.' { ',' } else { c }).collect();
    // Commas of the compute capability are no number of ours; quotes keep the columns apart.
    let european = european.replace("\"9,0\"", "\"9.0\"");
    assert_eq!(Capture::parse(&format!("{noise}{header}{european}"), "de.csv").unwrap(), whole);
    for cut in [text.len() - 2, text.len() - 30, text.len() * 9 / 10, text.len() / 2] {
        let message = Capture::parse(&text[..cut], "cut.csv").unwrap_err().to_string();
        assert!(message.contains("cut"), "{cut}: {message}");
    }
}
