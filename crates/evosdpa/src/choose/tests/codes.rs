//! A new length or batch size never means new code.

use std::collections::{BTreeMap, BTreeSet};

use evosdpa_kernels::{Arch, InputType, ProblemFacts, Target};

use super::*;

/// The most codes that may answer one head dimension, type, mask kind and group size.
const CODES_MAX: usize = 12;

/// Masks by their kind; the bounds of a band are no part of the code.
const MASKS: [&str; 3] = ["full", "causal", "window"];

fn facts(dims: (u32, u32), dtype: InputType, mask: &str, sizes: [u32; 5]) -> ProblemFacts {
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
        band_lo,
        band_hi,
        lse: false,
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
    (name, values.filter(|(name, _)| kernel.reads.contains(*name)).collect())
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
    dims: (u32, u32),
    dtype: InputType,
    mask: &str,
    group: u32,
) -> BTreeMap<Code, ProblemFacts> {
    let target = Target::nominal(Arch::Sm90a);
    let mut codes = BTreeMap::new();
    for [heads_kv, batch] in [[1, 1], [8, 1], [2, 3], [8, 4], [8, 8], [4, 20], [8, 16], [1, 40], [16, 64]] {
        for length in lengths() {
            for seq_q in [length, 1, 9, 16, 64, 80, 190] {
                let facts = facts(dims, dtype, mask, [batch, heads_kv * group, heads_kv, seq_q, length]);
                codes.entry(code(registry, &facts, &target)).or_insert(facts);
            }
        }
    }
    codes
}

#[test]
fn a_new_length_or_batch_is_never_new_code() {
    let registry = Registry::embedded().unwrap();
    let mut wrong = Vec::new();
    for dims in [(64, 64), (32, 32), (128, 128), (96, 96), (192, 128), (160, 160), (256, 256)] {
        for group in [1, 2, 4, 8] {
            for mask in MASKS {
                let codes = sweep(&registry, dims, InputType::BF16, mask, group);
                if codes.len() > CODES_MAX {
                    let list: Vec<String> =
                        codes.iter().map(|(code, first)| format!("  {code:?} e.g. {first}")).collect();
                    wrong.push(format!(
                        "{dims:?} {mask} group {group}: {} codes\n{}",
                        codes.len(),
                        list.join("\n")
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
