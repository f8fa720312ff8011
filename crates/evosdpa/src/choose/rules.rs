//! What to try where no tuned row says better: an order of kernels for a kind of problem.

use evosdpa_core::{DType, Feature};
use evosdpa_kernels::{Arch, ProblemFacts, Target};

use super::{cost, hopper_wide, look::Look};

/// Problems with more queries than this are no decoding.
const DECODE_QUERIES_MAX: u32 = 16;

/// Kernels in the order in which to try them, each with why it stands there.
pub(super) fn candidates(facts: &ProblemFacts, target: &Target) -> Vec<(&'static str, &'static str)> {
    let small = ("hopper_small", "splitting the keys of each Q tile is the fastest cut of so few");
    let large = ("hopper_fwd", "Q tiles fill the GPU: the kernel with the highest throughput");
    let decode = ("flash_decode", "few queries against a cache: its keys are split evenly over all SMs");
    if facts.features.contains(Feature::BatchInvariant) {
        return vec![(
            "flash_decode",
            "splits the keys of a sequence by its own length alone, whatever else is in the batch",
        )];
    }
    if facts.dtype == DType::F32 {
        return vec![("ampere_f32", "the one kernel that reads f32")];
    }
    // Blocks of 64 queries take tiles of one warpgroup, two to an SM: those of wider heads do not fit.
    let narrow_blocks = !facts.block_q.is_multiple_of(128) && facts.head_dim.max(facts.value_dim) > 128;
    let hopper = target.arch == Arch::Sm90a && !narrow_blocks;
    // Other caches of equal lengths are hopper_small's there, but for those that were measured.
    let split_evenly = !hopper
        || reads_cache(facts)
        || modifies_scores(facts)
        || Look::new(facts, target).reads_dense_cache();
    let decodes = facts.seq_q <= DECODE_QUERIES_MAX && split_evenly;
    let mut candidates = Vec::new();
    candidates.extend(decodes.then_some(decode));
    if hopper {
        candidates.extend(if splits_keys(facts, target) { [small, large] } else { [large, small] });
    }
    if hopper && Look::new(facts, target).widest() > hopper_wide::COLUMNS_MAX_OF_OTHERS {
        candidates.push(("hopper_wide", "heads of more than 256 columns, whose output fills two warpgroups"));
    }
    candidates.extend([
        ("ampere_fwd", "the fastest kernel that runs everywhere and reads any alignment"),
        ("flash_decode", "8-bit caches, whose codes nothing else reads"),
        ("sdpa_v2c", "tensor cores, where nothing newer does"),
        ("sdpa_v2b", "shared memory, where nothing newer does"),
        ("sdpa_v1", "the baseline takes nearly everything"),
        ("sdpa_fp8_stage_c", "8-bit inputs"),
    ]);
    candidates
}

/// Whether keys are split over warpgroups and clusters: when decoding, and where that is the fastest cut; where nobody knows, if Q
/// tiles of 64 rows leave SMs idle.
fn splits_keys(facts: &ProblemFacts, target: &Target) -> bool {
    let look = Look::new(facts, target);
    let decodes = facts.seq_q <= DECODE_QUERIES_MAX;
    decodes || cost::splits_keys(&look).unwrap_or(facts.seq_q <= 64 || look.q_tiles(64) <= look.sms())
}

/// Whether a cache's lengths, pages or codes are data.
fn reads_cache(facts: &ProblemFacts) -> bool {
    use Feature::*;
    let kinds = [UsedLengths, PagedCache, KvType, PackedKeys, UsedQueries, LeftPadding, CacheIndices];
    kinds.into_iter().any(|kind| facts.features.contains(kind))
}

/// Whether scores are changed, which `hopper_small` does not.
fn modifies_scores(facts: &ProblemFacts) -> bool {
    use Feature::*;
    [Softcap, Alibi, Bias, BooleanMask, BlockMask, Chunks, Sinks]
        .into_iter()
        .any(|kind| facts.features.contains(kind))
}
