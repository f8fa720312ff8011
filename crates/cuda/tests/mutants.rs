//! The known-bad kernels as far as no GPU is needed: the compiler and the resource gate catch exactly those that name
//! them, and let the others through to the gates that must. With its mistake repaired every one of them passes.

use evosdpa_core::{DType, Problem, Shape};
use evosdpa_cuda::{Builder, Error, ResourceReport, resources};
use evosdpa_kernels::{Arch, Gate, Kernel, Mutant, ProblemFacts, Registry, Target, Variant};

const ARCHS: [Arch; 3] = [Arch::Sm80, Arch::Sm89, Arch::Sm90a];

fn mutants() -> Vec<Kernel> {
    Registry::embedded().unwrap().mutants().cloned().collect()
}

fn named(name: &str) -> Kernel {
    mutants().into_iter().find(|mutant| mutant.name() == name).unwrap()
}

fn about(kernel: &Kernel) -> &Mutant {
    kernel.manifest.mutant.as_ref().unwrap()
}

fn variant(kernel: &Kernel, shape: Shape, dtype: DType, arch: Arch, mistake: i64) -> Variant {
    let problem = Problem::new(shape, dtype).unwrap().with_lse(true);
    let facts = ProblemFacts::try_from(&problem).unwrap();
    kernel.variant(&facts, &Target::nominal(arch), [("MISTAKE", mistake)]).unwrap()
}

fn gate(variant: &Variant) -> Result<ResourceReport, Error> {
    resources::gate(&Builder::new()?.build(variant)?, variant, &Target::nominal(variant.arch))
}

fn failures(report: &ResourceReport) -> String {
    let failed = report.findings.iter().filter(|finding| finding.fails);
    failed.map(|finding| finding.text.as_str()).collect::<Vec<_>>().join("; ")
}

#[test]
fn every_known_mistake_is_kept_and_none_can_be_chosen() {
    let registry = Registry::embedded().unwrap();
    let mut names: Vec<&str> = registry.mutants().map(Kernel::name).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "causal_off_by_one",
            "flag_without_fence",
            "fragment_in_array",
            "fragment_in_local_memory",
            "missing_barrier",
            "missing_wait",
            "narrow_cp_async",
            "narrow_index",
            "nobody_begins",
            "producer_owns_rows",
            "racing_rows",
            "shared_memory_past_limit",
        ]
    );
    let problem = Problem::new("tiny".parse().unwrap(), DType::F16).unwrap();
    let facts = ProblemFacts::try_from(&problem).unwrap();
    let choice = registry.supporting(&facts, &Target::nominal(Arch::Sm80)).unwrap();
    for mutant in registry.mutants() {
        assert!(registry.kernel(mutant.name()).is_err(), "{}", mutant.name());
        assert!(registry.kernel(&about(mutant).of).is_ok(), "{}", mutant.name());
        assert!(!choice.iter().any(|kernel| kernel.name() == mutant.name()), "{}", mutant.name());
        assert!(!registry.lineage().iter().any(|entry| entry.name == mutant.name()), "{}", mutant.name());
    }
}

/// Compiles every mutant as it is and sees which gate stops it.
#[test]
fn the_compiler_and_the_resource_gate_stop_those_that_name_them() {
    let mut wrong = Vec::new();
    for mutant in mutants() {
        let expected = Some(about(&mutant).caught_by).filter(|gate| *gate <= Gate::Resources);
        for (arch, dtype) in [(Arch::Sm80, DType::F16), (Arch::Sm90a, DType::BF16)] {
            let outcome = gate(&variant(&mutant, about(&mutant).shape, dtype, arch, 1));
            let stopped_by = match &outcome {
                Err(Error::Compile(_)) => Some(Gate::Compile),
                Ok(report) if !report.passed() => Some(Gate::Resources),
                Ok(_) => None,
                Err(error) => panic!("{} {arch}: {error}", mutant.name()),
            };
            if stopped_by != expected {
                wrong.push(format!(
                    "{} {arch} {dtype:?}: {:?}",
                    mutant.name(),
                    outcome.map(|r| failures(&r))
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn repaired_they_pass_both() {
    for mutant in mutants() {
        let report = gate(&variant(&mutant, about(&mutant).shape, DType::F16, Arch::Sm89, 0));
        let report = report.unwrap_or_else(|error| panic!("{}: {error}", mutant.name()));
        assert!(report.passed(), "{}: {}", mutant.name(), failures(&report));
        assert_eq!(report.entry.worst_stack_bytes(), 0, "{}", mutant.name());
    }
}

#[test]
fn the_compilers_log_names_the_copy_and_its_size() {
    let mutant = named("narrow_cp_async");
    match gate(&variant(&mutant, about(&mutant).shape, DType::F16, Arch::Sm80, 1)).unwrap_err() {
        Error::Compile(error) => {
            let complaint = "'cp.async': unexpected value '8', expected to be 16";
            assert!(error.log.contains(complaint), "{}", error.log);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn shared_memory_past_a_limit_is_named_with_both_numbers() {
    let mutant = named("shared_memory_past_limit");
    // 16 tiles of 32 keys, K and V, 72 halves a row; 64 such tiles pass what any device has.
    for (shape, used) in [("mission", "147456"), ("long", "589824")] {
        for (arch, device_limit) in ARCHS.into_iter().zip(["166912", "101376", "232448"]) {
            let report = gate(&variant(&mutant, shape.parse().unwrap(), DType::F16, arch, 1)).unwrap();
            let text = failures(&report);
            let own = format!("{used} bytes of shared memory, the kernel's limit on {arch} is 98304");
            assert!(text.contains(&own), "{text}");
            let device =
                format!("{used} bytes of shared memory, one block on {arch} can have {device_limit}");
            assert_eq!(text.contains(&device), shape == "long" || arch == Arch::Sm89, "{text}");
        }
    }
    // Where it fits it is a kernel like any other.
    let report = gate(&variant(&mutant, "tiny".parse().unwrap(), DType::F16, Arch::Sm89, 1)).unwrap();
    assert!(report.passed() && report.smem_bytes == 9216, "{report:?}");
}

/// Nothing else gives it away: it has no stack, and uses next to nothing, because the compiler leaves out what has no
/// meaning.
#[test]
fn a_fragment_in_an_array_is_stopped_by_the_compilers_warning_alone() {
    let mutant = named("fragment_in_array");
    for arch in ARCHS {
        let report = gate(&variant(&mutant, about(&mutant).shape, DType::BF16, arch, 1)).unwrap();
        let text = failures(&report);
        assert!(text.contains("cannot perform wmma load or store on local memory"), "{arch}: {text}");
        assert!(report.findings.iter().filter(|finding| finding.fails).count() == 1, "{arch}: {text}");
    }
}

/// The limit of 0 bytes of stack that the kernels of the line have would catch this one before it runs.
#[test]
fn a_fragment_in_local_memory_needs_a_stack() {
    let mutant = named("fragment_in_local_memory");
    let report = gate(&variant(&mutant, about(&mutant).shape, DType::F16, Arch::Sm89, 1)).unwrap();
    assert!(report.entry.worst_stack_bytes() >= 16 * 72 * 2, "{:?}", report.entry);
}
