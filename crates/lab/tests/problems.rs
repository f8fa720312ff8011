//! Every field of a problem: from its spelling through the oracle to the CPU kernels and the gate, with controls that fail.

use evosdpa_core::{DType, Feature, Problem};
use evosdpa_kernels::{Arch, ProblemFacts, Registry, Target};
use evosdpa_lab::{
    device::{Cpu, Device},
    gate::{Verdict, correctness},
};
use evosdpa_oracle::{
    Case, Control,
    inputs::{Family, Inputs},
};

static CPU: Cpu = Cpu { threads: Some(2), isa: None };

/// A spelling, the dtypes of its queries, and what it is there for.
type Field = (&'static str, &'static [DType], Feature);

const ANY: &[DType] = &[DType::F32, DType::F16, DType::BF16];
const HALF: &[DType] = &[DType::F16, DType::BF16];
const CODES: &[DType] = &DType::EIGHT_BIT;

/// Every field by itself or in the company that its users give it.
const FIELDS: [Field; 32] = [
    ("b3h4/2s9/33d16:varlen", ANY, Feature::PackedQueries),
    ("b3h4/2s9/33d16:causal-br:varlen=q", ANY, Feature::PackedQueries),
    ("b3h4/2s9/33d16:causal:varlen=kv", ANY, Feature::PackedKeys),
    ("b3h4/2s9/33d16:causal-br:varlen:used", ANY, Feature::UsedLengths),
    ("b3h4/2s9/33d16:used", ANY, Feature::UsedLengths),
    ("b3h4/2s9/33d16:window=9/2:used", ANY, Feature::UsedLengths),
    ("b3h4/2s9/33d16:causal-br:used-q", ANY, Feature::UsedQueries),
    ("b3h4/2s9/33d16:window=9/2:varlen:used:used-q", ANY, Feature::UsedQueries),
    ("b3h4/2s9/33d16:causal-br:used:leftpad", ANY, Feature::LeftPadding),
    ("b3h4/2s9/33d16:causal-br:used:leftpad:indexed:paged=4", ANY, Feature::CacheIndices),
    ("b3h4/2s9/33d16:paged=1", ANY, Feature::PagedCache),
    ("b3h4/2s9/33d16:causal-br:used:paged=16", ANY, Feature::PagedCache),
    ("b3h4/2s9/300d16:varlen=q:used:paged=256", ANY, Feature::PagedCache),
    ("b2h4/2s9/33d16:softcap=30", ANY, Feature::Softcap),
    ("b2h4/2s9/33d16:causal:softcap=0.5", ANY, Feature::Softcap),
    ("b2h4/2s9/33d16:alibi", ANY, Feature::Alibi),
    ("b2h4/2s9/33d16:bias", ANY, Feature::Bias),
    ("b2h4/2s9/33d16:bias=bh", ANY, Feature::Bias),
    ("b2h4/2s9/33d16:mask=bk", ANY, Feature::BooleanMask),
    ("b2h4/2s20/33d16:causal-br:mask=h", ANY, Feature::BooleanMask),
    ("b2h4/2s70/200d16:blocks=h64", ANY, Feature::BlockMask),
    ("b2h2/1s9/400d16:causal-br:blocks=b128/64", ANY, Feature::BlockMask),
    ("b2h4/2s20/33d16:causal-br:chunk=8", ANY, Feature::Chunks),
    ("b2h4/2s20/33d16:causal-br:sinks", ANY, Feature::Sinks),
    ("b2h4/2s9/33d16:kv=e4m3", HALF, Feature::KvType),
    ("b3h4/2s9/33d16:used:paged=16:kv=u8", HALF, Feature::KvType),
    ("b3h4/2s9/33d16:used:paged=16:kv=i8", ANY, Feature::KvType),
    ("b2h4/2s9/33d16:o=f32", HALF, Feature::OutputType),
    ("b2h4/2s9/33d16:scales=tensor", CODES, Feature::TensorScales),
    ("b3h4/2s9/33d16:used:paged=4:scales=token", CODES, Feature::TokenScales),
    ("b2h4/2s9/33d16:causal:precise", ANY, Feature::HighPrecision),
    ("b3h4/2s9/33d16:used:invariant", ANY, Feature::BatchInvariant),
];

#[test]
fn there_is_a_case_for_every_feature() {
    for feature in Feature::ALL {
        assert!(FIELDS.iter().any(|field| field.2 == feature), "{feature}");
    }
}

#[test]
fn every_field_goes_from_its_spelling_to_a_verdict() {
    for (text, dtypes, feature) in FIELDS {
        for &dtype in dtypes {
            let problem = Problem::new(text.parse().unwrap(), dtype).unwrap().with_lse(true);
            assert_eq!(problem.shape().to_string(), text);
            assert!(problem.features().contains(feature), "{text}");
            for family in Family::ALL {
                let case = Case::new(problem, family, 1, Some(8));
                for kernel in ["cpu_naive", "cpu_flash"] {
                    let result = correctness::check(&CPU, kernel, &case, None).unwrap();
                    assert!(result.verdict.is_pass(), "{kernel} {problem} {family}: {}", result.verdict);
                }
            }
        }
    }
}

/// A control may happen to be right on some data, where it proves nothing; over the seeds each must be wrong, and refused.
#[test]
fn every_control_fails_the_gate() {
    for (text, dtypes, _) in FIELDS {
        for &dtype in dtypes {
            let problem = Problem::new(text.parse().unwrap(), dtype).unwrap().with_lse(true);
            let mut refused = Vec::new();
            for seed in 0..4 {
                let case = Case::new(problem, Family::Normal, seed, None);
                for control in Control::of(&problem) {
                    let output = case.control_output(control).unwrap();
                    if !case.is_right(&output.view()) {
                        let result = correctness::check(&CPU, "cpu_flash", &case, Some(control)).unwrap();
                        assert!(result.verdict.is_fail(), "{problem} {control} seed {seed}");
                        refused.push(control);
                    }
                }
            }
            let missing: Vec<_> =
                Control::of(&problem).filter(|control| !refused.contains(control)).collect();
            // Without an order among keys, and full pages, their order is nobody's business.
            let unseen = |control: &&Control| **control == Control::ReversedPages;
            assert_eq!(
                missing.iter().filter(|control| !unseen(control)).count(),
                0,
                "{problem}: {missing:?}"
            );
        }
    }
}

#[test]
fn a_control_that_a_problem_does_not_have_is_not_forced() {
    let problem = Problem::new("tiny".parse().unwrap(), DType::F32).unwrap();
    let case = Case::new(problem, Family::Normal, 1, None);
    let result = correctness::check(&CPU, "cpu_naive", &case, Some(Control::NoSinks)).unwrap();
    assert!(matches!(result.verdict, Verdict::Unavailable(_)), "{}", result.verdict);
}

#[test]
fn who_does_not_know_a_feature_refuses_it_by_name() {
    let registry = Registry::embedded().unwrap();
    for (text, dtypes, feature) in FIELDS {
        let problem = Problem::new(text.parse().unwrap(), dtypes[0]).unwrap();
        assert_eq!(CPU.refuses("auto", &problem), None, "{text}");
        let facts = ProblemFacts::try_from(&problem).unwrap();
        for kernel in registry.kernels().filter(|kernel| !kernel.features().contains(feature)) {
            let refusal = kernel.supports(&facts, &Target::nominal(Arch::Sm90a)).unwrap_err().to_string();
            assert!(refusal.contains(feature.name()), "{text} {}: {refusal}", kernel.name());
        }
    }
}

/// Rows behind packed queries are zeros, whatever an output held before: a kernel that leaves them as they were, or another that leaves
/// their log-sum-exp, is found.
#[test]
fn rows_of_nobody_are_zeros() {
    let problem = Problem::new("b3h2s9/9d16:varlen".parse().unwrap(), DType::F32).unwrap().with_lse(true);
    let case = Case::new(problem, Family::Normal, 1, None);
    let poisoned = evosdpa_lab::device::fresh_output(&problem);
    assert_eq!(case.first_uncleared_row(&poisoned.o.view(), None), Some([0, 0, 11]));
    let inputs = [Inputs::generate(&problem, Family::Normal, 1)];
    for kernel in ["cpu_flash", "cpu_naive"] {
        let mut output = CPU.load(kernel, &problem, &inputs).unwrap().run(0).unwrap();
        assert_eq!(case.first_uncleared_row(&output.o.view(), output.lse.as_deref()), None, "{kernel}");
        output.lse.as_mut().unwrap()[2 * 27 - 1] = 0.0;
        let uncleared = case.first_uncleared_row(&output.o.view(), output.lse.as_deref());
        assert_eq!(uncleared, Some([0, 1, 26]), "{kernel}");
        let last = output.o.bytes().len() - 200;
        output.o.bytes_mut()[last..].fill(0xFF);
        assert_eq!(case.first_uncleared_row(&output.o.view(), None), Some([0, 1, 25]), "{kernel}");
    }
}
