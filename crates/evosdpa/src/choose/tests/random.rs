//! Whatever the problem: what is chosen keeps its kernel's constraints, and no fallback was needed.

use evosdpa_core::DType;
use evosdpa_kernels::ProblemFacts;
use proptest::prelude::*;

use super::*;

fn any_facts() -> impl Strategy<Value = ProblemFacts> {
    let length = || prop_oneof![1..=2100_u32, (1..=256_u32).prop_map(|tiles| 64 * tiles)];
    // Mostly what every kernel takes; the others take part where they are not too wide.
    let dim = || prop_oneof![4 => 1..=256_u32, 4 => (1..=32_u32).prop_map(|eighths| 8 * eighths), 1 => 257..=512_u32];
    let heads = (1..=16_u32, prop_oneof![Just(1), Just(2), Just(4), Just(8), 1..=12_u32]);
    let seq = (prop_oneof![1..=20_u32, length()], length());
    let band = (prop::option::of(-3000..3000_i32), prop::option::of(-3000..3000_i32));
    let blocks = prop_oneof![3 => Just((0, 0)), 1 => (1..4_u32, 1..4_u32)];
    let any = (1..=64_u32, heads, seq, (dim(), dim()), any::<bool>(), (0..4_u8, band, blocks));
    any.prop_map(|(batch, (heads_kv, group), (seq_q, seq_kv), dims, bf16, (mask, band, blocks))| {
        let (band_lo, band_hi) = match mask {
            0 => (None, None),
            1 => (None, Some(0)),
            2 => (None, Some(seq_kv as i32 - seq_q as i32)),
            _ => band,
        };
        let dtype = if bf16 { DType::BF16 } else { DType::F16 };
        ProblemFacts {
            batch,
            heads_q: heads_kv * group,
            heads_kv,
            seq_q,
            seq_kv,
            head_dim: dims.0,
            value_dim: dims.1,
            dtype,
            kv_dtype: dtype,
            band_lo,
            band_hi,
            lse: false,
            page_size: 0,
            block_q: 64 * blocks.0,
            block_kv: 64 * blocks.1,
            features: evosdpa_core::Features::NONE.with(evosdpa_core::Feature::BlockMask, blocks.0 > 0),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn what_is_chosen_keeps_the_constraints(facts in any_facts(), sm_count in prop_oneof![Just(132), 1..200_u32]) {
        let registry = registry();
        let hopper = ["hopper_fwd", "hopper_small", "hopper_wide"].map(|name| (name, Arch::Sm90a));
        let ampere = [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90a]
            .into_iter()
            .flat_map(|arch| ["ampere_fwd", "ampere_f32"].map(|name| (name, arch)));
        let wide = facts.head_dim.max(facts.value_dim) > evosdpa_kernels::HEAD_DIM_MAX;
        for (name, arch) in hopper.into_iter().chain(ampere).filter(|(name, _)| !wide || ["ampere_fwd", "hopper_wide"].contains(name)) {
            let kernel = registry.kernel(name).unwrap();
            let dtype = if name == "ampere_f32" { DType::F32 } else { facts.dtype };
            let facts = ProblemFacts { dtype, kv_dtype: dtype, ..facts };
            if !facts.features.without(kernel.features()).is_empty() {
                continue;
            }
            let target = Target { sm_count, ..Target::nominal(arch) };
            let settings = settings(kernel, &facts, &target, &Assignment::default()).unwrap();
            // Not `choose::variant`, which would look for other values.
            let variant = kernel.variant(&facts, &target, settings.iter());
            prop_assert!(variant.is_ok(), "{facts}: {}", variant.unwrap_err());
            let smem_bytes = variant.unwrap().launch.dynamic_smem_bytes;
            prop_assert!(
                smem_bytes <= target.smem_limit_bytes,
                "{facts}: {name} wants {smem_bytes} bytes"
            );
        }
    }
}

/// Read once: it is the same for every case.
fn registry() -> &'static Registry {
    static REGISTRY: std::sync::OnceLock<Registry> = std::sync::OnceLock::new();
    REGISTRY.get_or_init(|| Registry::embedded().unwrap())
}
