//! The streaming kernel refuses every feature that it does not know, by name, and writes nothing.

use evosdpa_core::{DType, Feature, Problem, Tensor};
use evosdpa_cpu::{CpuKernel, CpuOptions, Error, attention};
use evosdpa_oracle::inputs::{Family, Inputs};

fn refusal(text: &str, dtype: DType) -> Error {
    let problem = Problem::new(text.parse().unwrap(), dtype).unwrap();
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let mut o = Tensor::poisoned_gaps(problem.o_shape(), problem.output_dtype(), problem.layout(), 0);
    let (q, k, v, side) = (inputs.q.view(), inputs.k.view(), inputs.v.view(), inputs.side());
    let options = CpuOptions::default();
    let refused = attention(CpuKernel::Flash, &problem, q, k, v, &side, o.view_mut(), None, &options);
    assert!(o.bytes().iter().all(|&byte| byte == 0xFF));
    assert_eq!(CpuKernel::fastest(&problem), CpuKernel::Naive);
    refused.unwrap_err()
}

#[test]
fn every_feature_is_refused_by_its_name() {
    for (text, dtype, feature) in [
        ("b2h2s5d8:varlen=q", DType::F32, Feature::PackedQueries),
        ("b2h2s5d8:varlen=kv", DType::F32, Feature::PackedKeys),
        ("b2h2s5d8:used", DType::F32, Feature::UsedLengths),
        ("b2h2s5d8:used-q", DType::F32, Feature::UsedQueries),
        ("b2h2s5d8:leftpad", DType::F32, Feature::LeftPadding),
        ("b2h2s5d8:indexed", DType::F32, Feature::CacheIndices),
        ("b2h2s5d8:paged=2", DType::F32, Feature::PagedCache),
        ("b2h2s5d8:softcap=3", DType::F32, Feature::Softcap),
        ("b2h2s5d8:alibi", DType::F32, Feature::Alibi),
        ("b2h2s5d8:bias", DType::F32, Feature::Bias),
        ("b2h2s5d8:mask", DType::F32, Feature::BooleanMask),
        ("b2h2s5d8:chunk=2", DType::F32, Feature::Chunks),
        ("b2h2s5d8:sinks", DType::F32, Feature::Sinks),
    ] {
        let error = refusal(text, dtype).to_string();
        assert!(error.contains("cpu_flash") && error.contains(feature.name()), "{text}: {error}");
    }
    // Its weights are f32 in any case.
    let precise = Problem::new("tiny:precise".parse().unwrap(), DType::BF16).unwrap();
    assert_eq!(CpuKernel::fastest(&precise), CpuKernel::Flash);
}
