//! The words that may stand behind a dot.
//!
//! Decoders look for the modifiers that change what an instruction does and pass over those that do not, such as cache hints. So that a
//! word nobody knows is not passed over as well, every modifier of an instruction that was understood is looked up here.

use crate::parse::ast::Type;

/// In the order of the alphabet, to be searched by halves.
#[rustfmt::skip]
const WORDS: &[&str] = &[
    "1d", "2d", "3d", "4d", "5d", "L1", "L2", "NaN", "a", "abs", "acq_rel", "acquire", "add", "alias", "aligned", "all",
    "and", "any", "approx", "arrive", "arrive_drop", "async", "b", "b1", "b4e", "ballot", "bfly", "bulk", "bulk_group", "c",
    "ca", "cas", "cc", "cg", "clamp", "cluster", "col", "commit_group", "complete_tx", "const", "cs", "cta", "cv", "d",
    "dec", "down", "e2m1", "e2m1x2", "e2m3", "e2m3x2", "e3m2", "e3m2x2", "e4m3", "e4m3x2", "e5m2", "e5m2x2", "ecl", "ecr",
    "eq", "equ", "exch", "expect_tx", "f16", "f4e", "fence", "finite", "fractional", "ftz", "full", "ge", "geu", "gl",
    "global", "gpu", "gt", "gtu", "hi", "hs", "idx", "inc", "infinite", "init", "inval", "l", "launch_dependents", "le",
    "leu", "lo", "load", "local", "ls", "lt", "ltu", "lu", "mask", "max", "mbarrier", "mbarrier_init", "min", "mma",
    "mma_async", "mmio", "mode", "nan", "nc", "ne", "neu", "noComplete", "noftz", "noinc", "normal", "notanumber", "num",
    "number", "oob", "or", "pack", "param", "parity", "pending_count", "popc", "prefetch", "proxy", "r", "range", "rc16",
    "rc8", "read", "red", "reduce", "relaxed", "release", "relu", "rm", "rmi", "rn", "rna", "rni", "row", "rp", "rpi", "rs",
    "rz", "rzi", "s16x2", "s2", "s4", "sat", "satfinite", "sc", "shared", "shiftamt", "store", "subnormal", "sync", "sys",
    "tensor", "tensormap", "test_wait", "tf32", "tile", "to", "trans", "try_wait", "u16x2", "u2", "u4", "ue8m0x2", "uni",
    "unified", "up", "v2", "v4", "v8", "volatile", "wait", "wait_all", "wait_group", "warp", "wb", "weak", "wide", "wrap",
    "wt", "x1", "x2", "x4", "xor", "xorsign",
];

/// Levels that a hint or a state space is qualified with, `.L2::128B`, and what may follow.
const LEVELS: &[(&str, &[&str])] = &[
    ("L1", &["evict_first", "evict_last", "evict_normal", "evict_unchanged", "no_allocate"]),
    ("L2", &["64B", "128B", "256B", "cache_hint", "evict_first", "evict_last", "evict_normal"]),
    ("shared", &["cta", "cluster"]),
    ("param", &["entry", "func"]),
    ("mbarrier", &["complete_tx::bytes", "arrive"]),
    ("multicast", &["cluster"]),
    ("async", &["generic"]),
    ("tensormap", &["generic"]),
    ("sync_restrict", &["shared::cta", "shared::cluster"]),
];

/// Whether PTX has this modifier, on any instruction.
pub(super) fn is_known(part: &str) -> bool {
    if let Some((level, what)) = part.split_once("::") {
        return LEVELS.iter().any(|(name, words)| *name == level && words.contains(&what));
    }
    WORDS.binary_search(&part).is_ok() || Type::named(part).is_some() || is_tile(part)
}

/// `m16n8k16`, `m8n8`.
fn is_tile(part: &str) -> bool {
    let is_size = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let Some((m, rest)) = part.strip_prefix('m').and_then(|rest| rest.split_once('n')) else { return false };
    is_size(m)
        && match rest.split_once('k') {
            Some((n, k)) => is_size(n) && is_size(k),
            None => is_size(rest),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_can_be_searched() {
        assert!(WORDS.is_sorted());
        for part in
            ["m16n8k16", "m8n8", "L1::no_allocate", "L2::128B", "shared::cta", "f16x2", "xorsign", "NaN"]
        {
            assert!(is_known(part), "{part}");
        }
        for part in ["", "m", "mn", "m1n", "m1nk", "pa0bram", "L3::128B", "L2::", "globa"] {
            assert!(!is_known(part), "{part}");
        }
    }
}
