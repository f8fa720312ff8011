//! A tune of CUDA kernels on a machine without a GPU: the compiler, the resource gate and the simulator are real, and a
//! device of the test stands in for the last steps. Its kernels give right answers at a speed that the test decides.

mod stage;

use std::{
    cell::{OnceCell, RefCell},
    collections::HashSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use assert_cmd::cargo::cargo_bin;
use evosdpa_core::{DType, Problem};
use evosdpa_cuda::worker::CompilePool;
use evosdpa_kernels::{Arch, ProblemFacts, Registry, Target};
use evosdpa_lab::{
    device::DeviceId,
    evolve::{
        Evaluation, Point, Space, Standing,
        ahead::{Ahead, Compiling, Nothing},
        gates,
        insight::{Prior, Seen},
        log,
        profiler::Profiler,
        proposer::Proposer,
        simulate,
        tune::{self, Finished, Request},
        work::{Here, Terms},
    },
    gate::{GateResult, Verdict},
    measure::duel::Rule,
    profile::{Ncu, Session},
};
use serde_json::Value;
use stage::Stage;

fn target() -> Target {
    Target::nominal(Arch::Sm90a)
}

fn problem() -> Problem {
    Problem::new("b1h2s96d64:causal".parse().unwrap(), DType::F16).unwrap()
}

const CAPTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/tests/ncu/mission-v2c.csv");

/// A stand-in for ncu that answers with a saved capture, or does what it is told instead of profiling. Each profile adds a
/// line to a file.
fn profiler_program(folder: &Path, instead: Option<&str>) -> PathBuf {
    let path = folder.join("ncu");
    let calls = folder.join("profiles");
    let writes_report = "while [ \"$1\" != --export ]; do shift; done; echo report > \"$2\"";
    let script = format!(
        "#!/bin/sh\ncase \"$1\" in\n--version) echo 'Version 2025.3.1.0';;\n--import) cat {CAPTURE};;\n*) echo \"$@\" >> {}; {};;\nesac\n",
        calls.display(),
        instead.unwrap_or(writes_report),
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn profiles(folder: &Path) -> Vec<String> {
    fs::read_to_string(folder.join("profiles")).unwrap_or_default().lines().map(str::to_owned).collect()
}

struct Tune<'a> {
    registry: Registry,
    kernel: &'a str,
    evaluations: usize,
    resume: bool,
    stage: Stage,
    proposer: Option<String>,
    /// Tunables that are tried, all others fixed; all when empty.
    only: &'a [&'a str],
    /// Candidates prepared ahead.
    ahead: usize,
}

impl Tune<'_> {
    fn run(&self, folder: &Path, profiler: &Profiler<'_>, ahead: &mut dyn Ahead) -> Finished {
        let kernel = self.registry.kernel(self.kernel).unwrap();
        let mut space = Space::of_kernel(kernel, &problem(), &target()).unwrap();
        if !self.only.is_empty() {
            space.dimensions.retain(|dimension| self.only.contains(&dimension.name.as_str()));
        }
        let gate = |label: &str| profiler.gate(label);
        let facts = ProblemFacts::try_from(&problem()).unwrap();
        let breaks = |point: &Point| {
            let chosen = point.iter().map(|(name, value)| (name.as_str(), *value)).collect();
            evosdpa::choose::variant(kernel, &facts, &target(), &chosen).err().map(|error| error.to_string())
        };
        let request = Request {
            folder: folder.join("t"),
            problems: vec![problem()],
            space,
            breaks: &breaks,
            device: DeviceId::Cuda(0),
            device_name: "a stage".to_owned(),
            arch: "sm_90a".to_owned(),
            strategy: "evo".to_owned(),
            seed: 3,
            evaluations: self.evaluations,
            limit: None,
            top: 3,
            resume: self.resume,
            prior: Prior::default(),
            has_profile_gate: true,
        };
        let terms = Terms {
            space: request.space.clone(),
            problems: vec![problem()],
            seed: 3,
            rule: Rule { most_blocks: 12, ..gates::rule(None) },
            sets: Some(2),
            last_gate: Some(&gate),
            ahead: self.ahead,
        };
        let proposer =
            self.proposer.as_deref().map(|command| Proposer::new(command, Duration::from_secs(60)));
        let materials = OnceCell::new();
        let mut here = Here::new(&self.stage, ahead, profiler, terms, &materials).unwrap();
        tune::tune(&mut here, proposer, &request, |_| true, &|| false).unwrap()
    }
}

fn shipped() -> Registry {
    Registry::embedded().unwrap()
}

fn session(registry: Registry, ncu: &Path) -> Session {
    Session::open(registry, target(), DeviceId::Cuda(0), Ncu::find(Some(ncu)), Duration::from_secs(60))
        .unwrap()
}

fn compiling() -> Compiling {
    let pool = CompilePool::with_program(cargo_bin!("evosdpa").to_owned(), 1, Duration::from_secs(120));
    Compiling::new(shipped(), target(), &[problem()], pool, true).unwrap()
}

fn failed(evaluation: &Evaluation) -> &GateResult {
    evaluation.gates.iter().find(|gate| gate.verdict.is_fail()).unwrap_or_else(|| panic!("{evaluation:?}"))
}

/// A proposer that gives prepared answers one after the other and keeps what it was asked.
fn prepared_answers(folder: &Path, answers: &[Value]) -> String {
    for (i, answer) in answers.iter().enumerate() {
        fs::write(folder.join(format!("answer-{}", i + 1)), format!("{answer}\n")).unwrap();
    }
    format!(
        "cd {}; i=0; while read -r line; do i=$((i+1)); printf '%s\\n' \"$line\" > request-$i; cat answer-$i; done",
        folder.display()
    )
}

#[test]
fn a_proposed_source_goes_through_every_gate_and_a_winner_is_kept_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let own = shipped().kernel("sdpa_v2c").unwrap().source.clone();
    let with = |from: &str, to: &str| {
        assert!(own.contains(from), "{from}");
        own.replacen(from, to, 1)
    };
    let good = with("#pragma unroll 4\n    for (int dim", "#pragma unroll 2\n    for (int dim");
    let answers = [
        serde_json::json!({ "source": good, "rationale": "a shorter loop body" }),
        serde_json::json!({ "source": with("constexpr int STAGES = 2;", "constexpr int STAGES = two;") }),
        serde_json::json!({
            "source": with("element2(even.pair[i].x, odd.pair[i].x)", "element2(odd.pair[i].x, even.pair[i].x)")
        }),
        serde_json::json!({
            "source": with("transpose_own_keys(stage);\n    __syncthreads();", "transpose_own_keys(stage);")
        }),
    ];
    let ncu = profiler_program(path, None);
    let proposer = Some(prepared_answers(path, &answers));
    let said = RefCell::new(Vec::new());
    let say = |why: &str| said.borrow_mut().push(why.to_owned());
    let profiler = Profiler::new(session(shipped(), &ncu), problem(), path.join("t"), &say);
    let mut tune = Tune {
        registry: shipped(),
        kernel: "sdpa_v2c",
        evaluations: 5,
        resume: false,
        stage: Stage::new("_p"),
        proposer,
        only: &[],
        ahead: 1,
    };
    let outcome = tune.run(path, &profiler, &mut compiling());
    let [_, good_one, uncompiled, wrong, racing] = outcome.history.as_slice() else {
        panic!("{:?}", outcome.history.len())
    };

    let names: Vec<&str> = good_one.gates.iter().map(|gate| gate.gate.as_str()).collect();
    assert_eq!(names, ["compile", "resources", "sim", "correctness", "performance", "profile"]);
    assert!(good_one.gates.iter().all(|gate| gate.verdict.is_pass()), "{:?}", good_one.gates);
    // When, and what took how long: ahead until it began, and inside it.
    let parts: Vec<&str> = good_one.spans.iter().map(|span| span.what.as_str()).collect();
    assert_eq!(parts, ["compile", "sim", "correctness", "measure", "profile"]);
    let began_us = good_one.began_us.unwrap();
    assert!(
        good_one
            .spans
            .iter()
            .all(|span| (span.began_us < began_us) == ["compile", "sim"].contains(&span.what.as_str()))
    );
    let inside: f64 = good_one.spans[2..].iter().map(|span| span.seconds).sum();
    assert!(inside <= good_one.seconds, "{good_one:?}");
    let began: Vec<Option<u64>> = outcome.history.iter().map(|evaluation| evaluation.began_us).collect();
    assert!(began.iter().all(Option::is_some), "{began:?}");
    assert_eq!(
        (good_one.status, good_one.rationale.as_deref()),
        (Standing::Promoted, Some("a shorter loop body"))
    );
    assert!(good_one.resources.is_some_and(|used| used.registers > 16));

    let line = 1 + own.lines().position(|line| line.contains("constexpr int STAGES = 2;")).unwrap();
    let compile = failed(uncompiled);
    assert_eq!(compile.gate, "compile");
    let place = format!("sdpa_v2c_p2.cu({line}): error: identifier \"two\" is undefined");
    assert!(compile.detail.contains(&place), "{}", compile.detail);

    assert_eq!(failed(wrong).gate, "sim");
    assert!(failed(wrong).detail.contains("bound"), "{}", failed(wrong).detail);
    assert!(wrong.shapes.is_empty() && wrong.fitness.is_none(), "what is wrong is not timed");

    assert_eq!(failed(racing).gate, "sim");
    let detail = &failed(racing).detail;
    assert!(detail.contains("race") && detail.contains("sdpa_v2c_p4.cu:"), "{detail}");

    // The first profiles were of the default and of the winner, on the kernel's own source and on the proposed one.
    assert!(said.borrow().is_empty(), "{:?}", said.borrow());
    let profiled = profiles(path);
    assert_eq!(profiled.len(), 2, "{profiled:?}");
    assert!(
        profiled[1].contains("sdpa_v2c_p1[") && profiled[1].contains("t/sources/sdpa_v2c_p1"),
        "{}",
        profiled[1]
    );

    // The winner is where elite.json says, and builds from there without the tune.
    let elites: Value = serde_json::from_slice(&fs::read(path.join("t/elite.json")).unwrap()).unwrap();
    assert_eq!(
        (&elites["elites"][0]["kernel"], &elites["elites"][0]["source"]),
        (&"sdpa_v2c_p1".into(), &"sources/sdpa_v2c_p1".into())
    );
    assert_eq!(elites["confirmation"]["confirmed"], true, "{elites}");
    let kept = path.join("t/sources/sdpa_v2c_p1");
    assert_eq!(fs::read_to_string(kept.join("sdpa_v2c_p1.cu")).unwrap(), good);
    let kept = kept.to_str().unwrap();
    let build =
        ["build", "--kernels", "sdpa_v2c_p1", "--arch", "sm_90a", "--dtype", "f16", "--device", "none"];
    let apply = ["apply", "t/elite.json", "--table", "tuned.toml"];
    for args in [&[&build[..], &["--problem", "b1h2s96d64:causal"]].concat()[..], &apply] {
        let run = Command::new(cargo_bin!("evosdpa"))
            .args(args)
            .args(["--kernel-path", kept])
            .current_dir(path)
            .output()
            .unwrap();
        let said = [run.stdout, run.stderr].concat();
        assert!(run.status.success(), "{args:?}: {}", String::from_utf8_lossy(&said));
    }
    assert!(fs::read_to_string(path.join("tuned.toml")).unwrap().contains("sdpa_v2c_p1"));

    // Going on with the example: the winner's source is known again, and the proposer sees it with the profile's insights.
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/proposer/unroll.py");
    tune = Tune {
        evaluations: 6,
        resume: true,
        stage: Stage::new("_p"),
        proposer: Some(format!("tee {} | python3 {example}", path.join("request-1").display())),
        ..tune
    };
    let profiler = Profiler::new(session(shipped(), &ncu), problem(), path.join("t"), &say);
    let outcome = tune.run(path, &profiler, &mut compiling());
    assert_eq!((outcome.history.len(), outcome.new), (6, 1));
    let last = &outcome.history[5];
    assert_eq!(last.kernel.as_deref(), Some("sdpa_v2c_p5"));
    assert!(last.rationale.as_deref().unwrap().contains("unrolled"), "{last:?}");
    assert_eq!(last.gates[0].gate, "compile");
    assert!(last.gates[0].verdict.is_pass(), "{:?}", last.gates);
    let request: Value = serde_json::from_slice(&fs::read(path.join("request-1")).unwrap()).unwrap();
    assert_eq!(request["elites"][0]["source"], good);
    let insight = &request["insights"][0];
    assert!(insight["evidence"][0]["value"].is_number() && insight["tunables"].is_array(), "{insight}");
    let again = profiles(path).iter().filter(|line| line.contains("sdpa_v2c_p1[")).count();
    assert_eq!(again, 1, "what the log says of a profile is not asked for again");
}

#[test]
fn the_profile_of_a_new_best_gives_the_insights_that_are_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let ncu = profiler_program(path, None);
    let say = |why: &str| panic!("{why}");
    // Many tunables, and a source that is compiled in no time: the capture is what is read.
    let source = "#include \"params.h\"\nextern \"C\" __global__ void ampere_fwd(const __grid_constant__ SdpaParams p) {}\n";
    let mut registry = shipped();
    registry.register_source("ampere_fwd", "quick", source).unwrap();
    let profiler = Profiler::new(session(registry.clone(), &ncu), problem(), path.join("t"), &say);
    let tune = Tune {
        registry,
        kernel: "quick",
        evaluations: 24,
        resume: false,
        stage: Stage::new("CTAS_PER_SM=2"),
        proposer: None,
        only: &["CTAS_PER_SM", "STAGES", "HEAD_GROUP", "SKIP_RESCALE"],
        // More than there are evaluations: everything could be proposed before anything is known.
        ahead: 32,
    };
    let outcome = tune.run(path, &profiler, &mut Nothing);
    let contents = log::read(&path.join("t/log.jsonl")).unwrap();
    assert!(contents.diagnoses.len() >= 2, "the default, and at least one that was better");
    for diagnosis in &contents.diagnoses {
        assert_eq!((diagnosis.view, &diagnosis.without_counters), (Seen::Counters, &None));
        assert_eq!(diagnosis.insights[0].id, "4-issue");
        assert!(!diagnosis.insights[0].evidence.is_empty());
    }
    let ids: HashSet<&str> = contents
        .diagnoses
        .iter()
        .flat_map(|d| d.insights.iter().map(|insight| insight.id.as_str()))
        .collect();
    let followed: Vec<&Evaluation> = outcome.history.iter().filter(|e| e.operator == "insight").collect();
    for evaluation in &followed {
        assert!(ids.contains(evaluation.insight.as_deref().unwrap()) && evaluation.helped.is_some());
        let led = evaluation.trials.iter().find(|trial| Some(&trial.insight) == evaluation.insight.as_ref());
        assert_eq!(led.map(|trial| Some(trial.helped)), Some(evaluation.helped), "{evaluation:?}");
    }
    let operators = || outcome.history.iter().map(|e| (&e.operator, &e.parents)).collect::<Vec<_>>();
    assert!(followed.len() >= 2, "{:?}", operators());
    // What was said of the default and of the best that came after it is tried next, however much was on its way.
    for diagnosis in &contents.diagnoses[..2] {
        let next = &outcome.history[diagnosis.number as usize + 1];
        assert_eq!(
            (next.operator.as_str(), &next.parents),
            ("insight", &vec![diagnosis.number]),
            "{:?}",
            operators()
        );
    }
    assert!(
        outcome.history.iter().any(|e| e.operator != "insight" && !e.trials.is_empty()),
        "{:?}",
        operators()
    );
    let prior = Prior::read(&path.join("t/insights.json")).unwrap();
    assert!(prior.insights.keys().all(|id| ids.contains(id.as_str())) && !prior.insights.is_empty());
    let tried: u32 = prior.insights.values().map(|record| record.tried).sum();
    assert_eq!(tried as usize, outcome.history.iter().map(|e| e.trials.len()).sum::<usize>());

    // Every elite passed the profile gate, what is out never saw it, and no candidate was profiled twice.
    for elite in &outcome.elites.elites {
        assert!(elite.profile.as_ref().is_some_and(|gate| gate.verdict.is_pass()), "{elite:?}");
    }
    for evaluation in &outcome.history {
        let gated = evaluation.gates.iter().any(|gate| gate.gate == "profile");
        assert!(!gated || evaluation.status >= Standing::Kept, "{evaluation:?}");
    }
    let profiled = profiles(path);
    assert_eq!(profiled.iter().collect::<HashSet<_>>().len(), profiled.len(), "{profiled:?}");
    assert!(path.join("t/profiles").is_dir(), "captures are kept");

    // A replay follows the same insights.
    let replay = simulate::replay(&contents, "evo", 100, 3, 1).unwrap();
    assert_eq!(replay.budget, contents.evaluations.len());
}

#[test]
fn a_replay_of_a_log_from_before_trials_is_the_same_each_time() {
    let log = concat!(env!("CARGO_MANIFEST_DIR"), "/../../results/h200/tune-stage-c/log.jsonl");
    let contents = log::read(Path::new(log)).unwrap();
    assert!(contents.evaluations.iter().all(|evaluation| evaluation.trials.is_empty()));
    let replays = || {
        let replay = simulate::replay(&contents, "evo", 40, 3, 1).unwrap();
        assert_eq!((replay.budget, replay.best_so_far.len()), (40, 40));
        replay.best_so_far
    };
    assert_eq!(replays(), replays());
}

#[test]
fn what_is_no_longer_wanted_is_passed_over_and_may_be_wanted_again() {
    let mut ahead = compiling();
    let source = "#include \"params.h\"\nextern \"C\" __global__ void sdpa_v2c(const __grid_constant__ SdpaParams p) {}\n";
    let names: Vec<String> = (0..6).map(|i| format!("quick_{i}")).collect();
    for (i, name) in names.iter().enumerate() {
        // The first is in no cache: the one worker is busy with it until the others have been forgotten.
        let unique = if i == 0 { format!("// {:?}\n", std::time::SystemTime::now()) } else { String::new() };
        ahead.register_source("sdpa_v2c", name, &format!("{unique}{source}")).unwrap();
    }
    names.iter().for_each(|name| ahead.start(name));
    for name in &names[1..] {
        ahead.forget(name);
    }
    let passes = |ahead: &mut Compiling, name: &String| {
        let prepared = ahead.wait(name).unwrap();
        assert!(prepared.gates.first().is_some_and(|gate| gate.verdict.is_pass()), "{name}: {prepared:?}");
    };
    ahead.start(&names[5]);
    passes(&mut ahead, &names[0]);
    // By now the next ones have been passed over; if not, they are prepared from where they stand.
    std::thread::sleep(Duration::from_millis(100));
    ahead.start(&names[1]);
    passes(&mut ahead, &names[1]);
    passes(&mut ahead, &names[5]);
}

#[test]
fn a_profiler_that_is_refused_is_said_once_and_the_simulator_counts_instead() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let ncu = profiler_program(path, Some("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1"));
    let said = RefCell::new(Vec::new());
    let say = |why: &str| said.borrow_mut().push(why.to_owned());
    let profiler = Profiler::new(session(shipped(), &ncu), problem(), path.join("t"), &say);
    let tune = Tune {
        registry: shipped(),
        kernel: "sdpa_v2c",
        evaluations: 4,
        resume: false,
        stage: Stage::new("MAX_BLOCK_N=32"),
        proposer: None,
        only: &["MAX_BLOCK_N", "BLOCK_M"],
        ahead: 1,
    };
    let outcome = tune.run(path, &profiler, &mut Nothing);
    assert_eq!(outcome.history.len(), 4);
    assert_eq!(said.borrow().len(), 1, "{:?}", said.borrow());
    assert!(said.borrow()[0].contains("NVreg_RestrictProfilingToAdminUsers"));
    assert_eq!(profiles(path).len(), 2, "after two refusals nobody asks again");

    let contents = log::read(&path.join("t/log.jsonl")).unwrap();
    let first = &contents.diagnoses[0];
    assert_eq!(first.view, Seen::Simulated);
    assert!(first.without_counters.as_deref().unwrap().contains("ERR_NVGPUCTRPERM"));
    let ids: Vec<&str> = first.insights.iter().map(|insight| insight.id.as_str()).collect();
    assert!(ids.contains(&"2c-smem-conflicts") && ids.contains(&"3b-softmax"), "{ids:?}");
    assert!(first.insights.iter().all(|insight| insight.confidence <= 0.5), "counts know nothing of time");

    let gates: Vec<&GateResult> =
        outcome.history.iter().flat_map(|e| &e.gates).filter(|gate| gate.gate == "profile").collect();
    assert!(!gates.is_empty() && gates.iter().all(|gate| matches!(gate.verdict, Verdict::Unavailable(_))));
    let file: Value = serde_json::from_slice(&fs::read(path.join("t/elite.json")).unwrap()).unwrap();
    let elites = file["elites"].as_array().unwrap();
    assert_eq!(elites.len(), 3);
    for elite in elites {
        assert_eq!(elite["profile"]["verdict"], "UNAVAILABLE", "{elite}");
    }
    // An unavailable gate turns nobody away.
    assert!(outcome.history.iter().any(|e| e.status == Standing::Promoted), "{:?}", outcome.history);
}

/// A tune of two candidates, the default and `BLOCK_M=64`. Those whose name has `bound` in it wait for device memory with idle
/// tensor cores, says the profiler.
fn tune_of_two(path: &Path, fast: &'static str, bound: &str) -> Finished {
    let ncu = profiler_program(path, None);
    let script = fs::read_to_string(&ncu).unwrap();
    let capture = path.join("memory-bound.csv");
    fs::write(&capture, with_dram_percent(&fs::read_to_string(CAPTURE).unwrap(), "93.1")).unwrap();
    let by_name = format!(
        "case \"$(tail -n 1 {})\" in *{bound}*) cat {};; *) cat {CAPTURE};; esac",
        path.join("profiles").display(),
        capture.display()
    );
    fs::write(&ncu, script.replace(&format!("cat {CAPTURE}"), &by_name)).unwrap();
    let say = |why: &str| panic!("{why}");
    let profiler = Profiler::new(session(shipped(), &ncu), problem(), path.join("t"), &say);
    let tune = Tune {
        registry: shipped(),
        kernel: "sdpa_v2c",
        evaluations: 2,
        resume: false,
        stage: Stage::new(fast),
        proposer: None,
        only: &["BLOCK_M"],
        ahead: 1,
    };
    tune.run(path, &profiler, &mut Nothing)
}

#[test]
fn whoever_the_profile_gate_fails_is_no_elite() {
    let elites = |outcome: &Finished| -> Vec<u64> {
        outcome.elites.elites.iter().map(|elite| elite.evaluation).collect()
    };
    // Four times as fast as the default; and as fast as it, which is enough to be an elite while there are few.
    for (fast, expected) in [("BLOCK_M=64", 4.0), ("nobody", 1.0)] {
        let folder = tempfile::tempdir().unwrap();
        let outcome = tune_of_two(folder.path(), fast, "BLOCK_M=64");
        let candidate = &outcome.history[1];
        assert!(candidate.fitness.is_some_and(|fitness| (fitness / expected - 1.0).abs() < 0.01));
        assert_eq!((failed(candidate).gate.as_str(), candidate.status), ("profile", Standing::Rejected));
        assert!(failed(candidate).detail.contains("DRAM 93.1 %"), "{}", failed(candidate).detail);
        assert_eq!(elites(&outcome), [0]);
    }
    // The default has no privilege, but the search goes on from it.
    let folder = tempfile::tempdir().unwrap();
    let outcome = tune_of_two(folder.path(), "nobody", "BLOCK_M=32");
    assert_eq!((failed(&outcome.history[0]).gate.as_str(), elites(&outcome)), ("profile", vec![1]));
    let contents = log::read(&folder.path().join("t/log.jsonl")).unwrap();
    assert_eq!(contents.diagnoses.iter().map(|d| d.number).collect::<Vec<_>>(), [0, 1]);
}

/// A capture with another number for the use of device memory.
fn with_dram_percent(capture: &str, percent: &str) -> String {
    let metric = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed";
    let at = |line: &str| line.split("\",\"").position(|cell| cell.trim_matches('"') == metric);
    let column = capture.lines().find_map(at).unwrap();
    let launch = capture.lines().last().unwrap();
    let mut cells: Vec<&str> = launch.split("\",\"").collect();
    cells[column] = percent;
    capture.replace(launch, &cells.join("\",\""))
}
