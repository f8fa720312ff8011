//! A new length or batch size never means new code.

use std::collections::{BTreeMap, BTreeSet};

use evosdpa_core::{DType, Feature};
use evosdpa_kernels::{Arch, ProblemFacts, Target};

use super::*;

/// The most codes that may answer one head dimension, type, mask kind and group size. Up to four are those of long rows, which settle.
const CODES_MAX: usize = 16;

/// The most on older GPUs.
const OLDER_MAX: usize = 8;

/// Masks by their kind; the bounds of a band are no part of the code.
const MASKS: [&str; 3] = ["full", "causal", "window"];

/// Keys of the windows: precise rows, narrow ones and wide.
const WINDOWS: [i32; 3] = [100, 256, 3000];

fn facts(dims: (u32, u32), dtype: DType, mask: &str, sizes: [u32; 5]) -> ProblemFacts {
    let [batch, heads_q, heads_kv, seq_q, seq_kv] = sizes;
    let (band_lo, band_hi) = match mask {
        "full" => (None, None),
        // At the bottom right, where one query sees every key.
        "causal" => (None, Some(seq_kv as i32 - seq_q as i32)),
        _ => (Some(-255), Some(0)),
    };
    let (head_dim, value_dim) = dims;
    ProblemFacts {
        batch,
        heads_q,
        heads_kv,
        seq_q,
        seq_kv,
        head_dim,
        value_dim,
        dtype,
        kv_dtype: dtype,
        band_lo,
        band_hi,
        lse: false,
        page_size: 0,
        block_q: 0,
        block_kv: 0,
        features: evosdpa_core::Features::NONE,
    }
}

/// What the kernel is compiled with, as far as it depends on the problem's lengths, batch and heads.
type Code = (&'static str, Vec<(&'static str, i64)>);

fn code(registry: &Registry, facts: &ProblemFacts, target: &Target) -> Code {
    // With tensors that TMA can read, the kernel that the rules put first is the one that is taken.
    let (name, _) = rules::candidates(facts, target)[0];
    let kernel = registry.kernel(name).unwrap();
    let settings = settings(kernel, facts, target, &Assignment::default()).unwrap();
    let values = settings.reasons().flat_map(|(_, values)| values.iter().copied());
    // What flash_decode reads of a cluster is whether there is one.
    let read = values.filter_map(|(name, value)| match name {
        "CLUSTER" if kernel.reads.contains("CLUSTERED") => Some(("CLUSTERED", i64::from(value > 1))),
        _ => kernel.reads.contains(name).then_some((name, value)),
    });
    (name, read.collect())
}

/// Lengths from 1 to 16,384: short ones, those next to a multiple of a tile or a boundary of a rule, and odd ones between.
fn lengths() -> Vec<u32> {
    let near = [16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 480, 512, 640, 768, 1024, 1280, 1536, 1600]
        .into_iter()
        .chain([1920, 2048, 2560, 3072, 4096, 6144, 8192, 12_288, 16_384])
        .flat_map(|length: u32| [length - 1, length, length + 1]);
    let odd = (0..40_u32).map(|i| 1 + i * i * 10 + 7 * (i % 3));
    let all: BTreeSet<u32> = (1..=8).chain(near).chain(odd).filter(|length| *length <= 16_384).collect();
    all.into_iter().collect()
}

/// Every code of a sweep, with a problem that it answers: equal lengths, decoding, and some queries against many keys.
fn sweep(
    registry: &Registry,
    arch: Arch,
    dims: (u32, u32),
    dtype: DType,
    mask: &str,
    group: u32,
) -> BTreeMap<Code, ProblemFacts> {
    let target = Target::nominal(arch);
    let mut codes = BTreeMap::new();
    for [heads_kv, batch] in [[1, 1], [8, 1], [2, 3], [8, 4], [8, 8], [4, 20], [8, 16], [1, 40], [16, 64]] {
        for length in lengths() {
            for seq_q in [length, 1, 9, 16, 64, 80, 190] {
                let mut facts = facts(dims, dtype, mask, [batch, heads_kv * group, heads_kv, seq_q, length]);
                for window in &WINDOWS[..if mask == "window" { WINDOWS.len() } else { 1 }] {
                    facts.band_lo = facts.band_lo.map(|_| 1 - window);
                    codes.entry(code(registry, &facts, &target)).or_insert(facts);
                }
            }
        }
    }
    codes
}

/// The sweeps with more codes than there may be, each with its codes.
fn too_many(arch: Arch, dims: &[(u32, u32)], dtypes: &[DType], groups: &[u32], most: usize) -> Vec<String> {
    let registry = Registry::embedded().unwrap();
    let mut wrong = Vec::new();
    for (&dims, &dtype) in dims.iter().flat_map(|dims| dtypes.iter().map(move |dtype| (dims, dtype))) {
        for (&group, mask) in groups.iter().flat_map(|group| MASKS.map(|mask| (group, mask))) {
            let codes = sweep(&registry, arch, dims, dtype, mask, group);
            if codes.len() > most {
                let list = codes.iter().map(|(code, facts)| format!("\n  {code:?}, say of {facts}"));
                let list: String = list.collect();
                wrong.push(format!("{dims:?} {dtype} {mask} group {group}: {} codes{list}", codes.len()));
            }
        }
    }
    wrong
}

#[test]
fn a_new_length_or_batch_is_never_new_code() {
    let mut dims = [64, 32, 128, 80, 96, 104, 160, 256, 512].map(|dim| (dim, dim)).to_vec();
    dims.push((192, 128));
    let wrong = too_many(Arch::Sm90a, &dims, &[DType::BF16], &[1, 2, 4, 8], CODES_MAX);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let f16 = too_many(Arch::Sm90a, &[(64, 64), (128, 128)], &[DType::F16], &[1, 4], CODES_MAX);
    assert!(f16.is_empty(), "{}", f16.join("\n"));
}

/// Of packed sequences, whose lengths no host knows, only whether some may be long is.
#[test]
fn packed_sequences_have_one_code_for_short_ones_and_one_for_long() {
    let (registry, target) = (Registry::embedded().unwrap(), Target::nominal(Arch::Sm90a));
    let kernel = registry.kernel("hopper_fwd").unwrap();
    for (dim, mask, group) in [(64, "causal", 1), (128, "causal", 4), (128, "window", 8), (128, "full", 2)] {
        let mut codes = BTreeSet::new();
        for length in lengths() {
            for batch in [1, 16, 256] {
                let mut facts = facts((dim, dim), DType::BF16, mask, [batch, 8 * group, 8, length, length]);
                facts.features = [Feature::PackedQueries, Feature::PackedKeys].into_iter().collect();
                let settings = settings(kernel, &facts, &target, &Assignment::default()).unwrap();
                codes.insert(
                    settings.iter().map(|(name, value)| (name.to_owned(), value)).collect::<Vec<_>>(),
                );
            }
        }
        // Windows do not settle, however long.
        let most = if mask == "window" { 1 } else { 2 };
        assert_eq!(codes.len(), most, "{dim} {mask} group {group}: {codes:?}");
    }
}

#[test]
fn older_gpus_have_fewer_codes() {
    let dims = [(64, 64), (128, 128), (256, 256), (512, 512)];
    let wrong = too_many(Arch::Sm89, &dims, &[DType::BF16, DType::F16], &[1, 4], OLDER_MAX);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let single = too_many(Arch::Sm90a, &[(64, 64), (256, 256)], &[DType::F32], &[1], CODES_MAX / 4);
    assert!(single.is_empty(), "{}", single.join("\n"));
}

/// What servers and models ask for: packed sequences, filled parts of caches, pages of every size, 8-bit caches, modifiers.
const SERVED: [&str; 29] = [
    ":varlen",
    ":causal-br:varlen",
    ":causal-br:varlen:softcap=50",
    ":varlen=q:used",
    ":causal-br:varlen=q:used:paged=16",
    ":used",
    ":causal-br:used",
    ":window=255/0:used",
    ":paged=16",
    ":causal-br:used:paged=1",
    ":causal-br:used:paged=16",
    ":causal-br:used:paged=64",
    ":causal-br:used:paged=256",
    ":causal-br:used:leftpad",
    ":causal-br:used:indexed",
    ":kv=e4m3",
    ":used:kv=e4m3",
    ":causal-br:used:paged=16:kv=e4m3",
    ":used:paged=64:kv=e4m3:scales=token",
    ":softcap=30",
    ":causal-br:softcap=30",
    ":causal-br:alibi",
    ":bias=h",
    ":causal-br:bias=bh",
    ":mask=b",
    ":mask=bhk",
    ":causal-br:chunk=100",
    ":window=127/0:sinks",
    ":causal-br:used:paged=16:sinks",
];

/// Every code of a kind that the planner itself takes, tuned rows included, with a problem that it answers.
fn served(
    planner: &Planner,
    arch: Arch,
    dim: u32,
    kind: &str,
) -> BTreeMap<(String, Vec<(String, i64)>), String> {
    let (target, mut codes) = (Target::nominal(arch), BTreeMap::new());
    for [heads_kv, batch] in [[8, 1], [2, 3], [8, 16], [8, 64]] {
        for length in [1, 7, 16, 63, 128, 200, 256, 257, 511, 640, 1024, 1600, 2049, 4096, 8192, 16_384_u32] {
            for seq_q in [length, 1, 4, 9, 64, 190] {
                let heads_q = heads_kv * 4;
                let text = format!("b{batch}h{heads_q}/{heads_kv}s{seq_q}/{length}d{dim}{kind}");
                let problem = Problem::new(text.parse().unwrap(), DType::BF16).unwrap();
                let tensors = assumed_tensors(&problem);
                let device = Some("NVIDIA H200");
                let question = Question { problem: &problem, tensors: &tensors, target: &target, device };
                // What no kernel takes has no code: 8-bit caches of many queries.
                let Ok(choice) = planner.choose_quickly(&question) else { continue };
                let kernel = planner.registry().kernel(&choice.variant.id.kernel).unwrap();
                let read =
                    choice.variant.defines.iter().filter(|(name, _)| kernel.reads.contains(name.as_str()));
                let values = read.map(|(name, value)| (name.to_string(), *value)).collect();
                codes.entry((kernel.name().to_owned(), values)).or_insert(text);
            }
        }
    }
    codes
}

#[test]
fn served_problems_have_few_codes_too() {
    let planner = embedded();
    for (arch, dims) in [(Arch::Sm90a, &[64, 128, 256][..]), (Arch::Sm89, &[128][..])] {
        for (dim, kind) in dims.iter().flat_map(|dim| SERVED.map(|kind| (*dim, kind))) {
            let codes = served(&planner, arch, dim, kind);
            let list: String =
                codes.iter().map(|(code, text)| format!("\n  {code:?}, say of {text}")).collect();
            assert!(
                (1..=CODES_MAX).contains(&codes.len()),
                "{arch} d{dim}{kind}: {} codes{list}",
                codes.len()
            );
        }
    }
}

/// The sweeps above see what the planner does: the same kernel, and the same values of what it reads.
#[test]
fn the_planner_compiles_what_the_sweeps_count() {
    let (registry, planner) = (Registry::embedded().unwrap(), embedded());
    let target = Target::nominal(Arch::Sm90a);
    for shape in
        ["mission", "b3h8s777d64:causal", "b2h32/8s1/4096d128", "b1h32/8s300d256:window=9/0", "long128"]
    {
        let problem = Problem::new(shape.parse().unwrap(), DType::BF16).unwrap();
        let (kernel, values) = code(&registry, &ProblemFacts::try_from(&problem).unwrap(), &target);
        let choice = choose_with(&planner, shape, DType::BF16, (Arch::Sm90a, None), |_| {}).unwrap();
        assert_eq!(choice.variant.id.kernel, kernel);
        assert!(values.len() > 5, "{values:?}");
        for (name, value) in values {
            assert_eq!(choice.variant.defines[name], value, "{name} of {shape}");
        }
    }
}
