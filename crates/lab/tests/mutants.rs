//! Every known-bad kernel under the simulator: the right kind of finding on the right line, and none once repaired.

use evosdpa_core::{DType, Problem, Shape};
use evosdpa_kernels::{Gate, Kernel, Registry};
use evosdpa_lab::{
    device::{Output, Sim, Simulation},
    gate::suite::{CaseSpec, Group},
};
use evosdpa_oracle::{Case, inputs::Family};
use ptxsan::{Finding, Kind, Options, Outcome, Schedule};

/// What must be found: the kind, and text of the lines that are to blame.
fn expected(mutant: &str) -> (&'static [Kind], &'static [&'static str]) {
    match mutant {
        "racing_rows" => (&[Kind::Race], &["read_row(rows[r]", "write_row(rows[r]"]),
        "missing_barrier" => (&[Kind::AsyncRace], &["copy_kv<THREADS>(", "rows[r].attend("]),
        "missing_wait" => (&[Kind::AsyncRace], &["rows[r].attend(", "copy_kv<THREADS>("]),
        "flag_without_fence" => (&[Kind::AsyncRace], &["rows[r].attend(", "copy_kv<LANES>("]),
        "narrow_index" => (&[Kind::OutOfBounds], &["element_at("]),
        "fragment_in_local_memory" => (&[Kind::WrongSpace], &["score_tile("]),
        "nobody_begins" => (&[Kind::Deadlock], &["barrier_sync("]),
        other => panic!("say here what the simulator must find in `{other}`"),
    }
}

fn spec(shape: Shape) -> CaseSpec {
    let problem = Problem::new(shape, DType::F16).unwrap().with_lse(true);
    CaseSpec {
        group: Group::Simulated,
        problem,
        family: Family::Normal,
        seed: 1,
        row_gap: Some(8),
        lengths: None,
    }
}

fn under(simulation: &Simulation, case: &Case, schedule: Schedule) -> (Output, Outcome) {
    let options = Options { schedule, instruction_budget: 1 << 24, ..Options::default() };
    simulation.run(&case.inputs, &options).unwrap()
}

/// The text of the lines that a finding names: `a.cu:12 (inlined from b.cuh:3)`, of both accesses.
fn blamed(kernel: &Kernel, finding: &Finding) -> Vec<String> {
    let sites = [Some(&finding.site), finding.other.as_ref()];
    let places = sites.into_iter().flatten().filter_map(|site| site.source.as_deref());
    let words = places.flat_map(|place| place.split([' ', '(', ')']));
    let line_of = |word: &str| {
        let (file, line) = word.split_once(':')?;
        let header = kernel.headers.iter().find(|header| header.name.ends_with(file));
        let text = if kernel.source_file.ends_with(file) { &*kernel.source } else { header?.text.as_str() };
        text.lines().nth(line.parse::<usize>().ok()? - 1).map(str::to_owned)
    };
    words.filter_map(line_of).collect()
}

#[test]
fn the_simulator_says_what_is_wrong_and_where() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let mut seen = 0;
    for kernel in sim.registry().mutants() {
        let about = kernel.manifest.mutant.as_ref().unwrap();
        if about.caught_by != Gate::Sim {
            continue;
        }
        seen += 1;
        let (kinds, lines) = expected(kernel.name());
        let case = spec(about.shape).build();
        let bad = sim.simulation_of(kernel, &[("MISTAKE", 1)], &case.problem).unwrap();
        for schedule in Schedule::ALL {
            let (_, outcome) = under(&bad, &case, schedule);
            let right = |finding: &&Finding| {
                let blamed = blamed(kernel, finding);
                kinds.contains(&finding.kind)
                    && lines.iter().any(|line| blamed.iter().any(|b| b.contains(line)))
            };
            assert!(
                outcome.findings.iter().any(|finding| right(&finding)),
                "{} under {}: {outcome}",
                kernel.name(),
                schedule.name()
            );
        }
    }
    assert!(seen >= 6, "only {seen} mutants are the simulator's");
}

#[test]
fn what_only_the_answer_shows_has_no_finding() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    for kernel in sim.registry().mutants() {
        let about = kernel.manifest.mutant.as_ref().unwrap();
        if about.caught_by != Gate::Correctness {
            continue;
        }
        let case = spec(about.shape).build();
        let bad = sim.simulation_of(kernel, &[("MISTAKE", 1)], &case.problem).unwrap();
        let (output, outcome) = under(&bad, &case, Schedule::RoundRobin);
        assert!(outcome.is_clean(), "{}: {outcome}", kernel.name());
        let judgement = case.judge(&output.o.view(), output.lse.as_deref());
        assert!(!judgement.passed(), "{} passes", kernel.name());
    }
}

#[test]
fn repaired_mutants_are_clean_and_right() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    for kernel in sim.registry().mutants() {
        let about = kernel.manifest.mutant.as_ref().unwrap();
        // What outgrows shared memory shows at a large problem; the repair is tried on a small one.
        let small = about.caught_by == Gate::Resources;
        let case = spec(if small { "tiny".parse().unwrap() } else { about.shape }).build();
        let good = sim.simulation_of(kernel, &[("MISTAKE", 0)], &case.problem).unwrap();
        for schedule in Schedule::ALL {
            let (output, outcome) = under(&good, &case, schedule);
            assert!(outcome.is_clean(), "{} under {}: {outcome}", kernel.name(), schedule.name());
            let judgement = case.judge(&output.o.view(), output.lse.as_deref());
            assert!(judgement.passed(), "{}: {}", kernel.name(), judgement.summary());
        }
    }
}
