//! How `hopper_small` splits keys over warpgroups and clusters. Measured on an H200: docs/log/hopper.md.

use super::{cost, look::Look, look::PRECISE_KEYS, settings::Settings};

/// How the keys of one Q tile are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// Few queries of very few key heads: eight CTAs share the keys of each.
    FewHeads,
    /// Few queries of groups of eight heads, which fill a Q tile of 64 rows.
    WideGroup,
    /// Few queries of groups of four.
    Group,
    /// Over so many CTAs and warpgroups.
    Keys(cost::Split),
}

impl Split {
    fn of(look: &Look<'_>) -> Self {
        // 16 positions of four heads fill the 64 rows of a Q tile.
        if look.facts.seq_q <= 16 && look.grouped() {
            if look.kv_heads() < 32 {
                Self::FewHeads
            } else if look.group().is_multiple_of(8) {
                Self::WideGroup
            } else {
                Self::Group
            }
        } else {
            Self::Keys(cost::split(look).unwrap_or(if 2 * look.q_tiles(64) <= look.sms() {
                cost::Split { cluster: 2, warpgroups: 1 }
            } else {
                cost::Split { cluster: 1, warpgroups: 2 }
            }))
        }
    }

    /// CTAs that have their SMs for themselves, one warpgroup each.
    fn one_wave(self, look: &Look<'_>) -> bool {
        match self {
            Self::Keys(cost::Split::NONE) => look.q_tiles(64) <= look.sms(),
            Self::Keys(cost::Split { cluster: 2.., warpgroups: 1 }) => true,
            _ => false,
        }
    }

    /// Groups of eight heads, with two CTAs of one warpgroup for each key head.
    fn has_one_warpgroup_of_wide_groups(self, look: &Look<'_>) -> bool {
        self == Self::WideGroup && 2 * look.kv_heads() <= look.sms()
    }

    /// A single KV tile for each Q tile, and code for that alone.
    fn one_tile(self, look: &Look<'_>) -> bool {
        self == Self::Keys(cost::Split::NONE) && cost::one_tile_each(look) && !look.every_row_precise()
    }
}

pub(super) fn tunables(look: &Look<'_>, settings: &mut Settings) {
    let split = Split::of(look);
    divide(look, split, settings);
    settings.decide(
        "tile",
        &[("BLOCK_N", i64::from(cost::Split::block_n(look)))],
        "the longest KV tile whose two sets of scores fit beside O",
    );
    overlap(look, split, settings);
}

/// Warpgroups, CTAs, packed heads and the depth of their rings.
fn divide(look: &Look<'_>, split: Split, settings: &mut Settings) {
    let short = look.facts.seq_kv <= 2048;
    let (warpgroups, cluster, heads, stages, why) = match split {
        Split::FewHeads if short => {
            (1, 8, 4, 4, "decoding few key heads: a cluster of eight shares the keys, all of them in flight")
        }
        Split::FewHeads => {
            let warpgroups = if look.facts.head_dim <= 64 { 1 } else { 2 };
            (
                warpgroups,
                8,
                4,
                2,
                "decoding few key heads of many keys: a cluster of eight, two warpgroups each",
            )
        }
        _ if split.has_one_warpgroup_of_wide_groups(look) => {
            (1, 2, 8, 4, "decoding groups of eight heads: two CTAs for each key head fit the GPU at once")
        }
        Split::WideGroup | Split::Group => {
            let (cluster, heads) = (fills(look), if split == Split::WideGroup { 8 } else { 4 });
            (
                2,
                cluster,
                heads,
                2,
                "decoding: two warpgroups read the keys of one head, two CTAs while SMs are idle",
            )
        }
        Split::Keys(cost::Split { cluster, warpgroups }) => {
            let why = match (cluster, warpgroups) {
                (1, 1) => "one warpgroup has all keys of a Q tile: nothing is merged",
                (1, _) => "Q tiles fill the SMs: two warpgroups share the keys of each",
                (_, 1) => "Q tiles leave SMs idle: a cluster of CTAs shares the keys of each",
                _ => "few Q tiles of many keys: warpgroups of a cluster share the keys of each",
            };
            (i64::from(warpgroups), i64::from(cluster), 1, 2, why)
        }
    };
    // Rings of wide tiles fill shared memory with one stage.
    let stages = if look.widest() > 128 || split.one_tile(look) { 1 } else { stages };
    settings.decide(
        "split",
        &[("WG_N", warpgroups), ("CLUSTER", cluster), ("PACK_HEADS", heads), ("STAGES", stages)],
        why,
    );
}

/// Two CTAs for a key head while one each leaves more than a quarter of the SMs idle.
fn fills(look: &Look<'_>) -> i64 {
    if 4 * look.kv_heads() < 3 * look.sms() { 2 } else { 1 }
}

/// What waits for what.
fn overlap(look: &Look<'_>, split: Split, settings: &mut Settings) {
    let masked = look.masked();
    let one_wave = split.one_wave(look);
    let cluster = matches!(split, Split::Keys(cost::Split { cluster: 2.., .. }));
    let one_tile = split.one_tile(look);
    // What a narrow head's one warpgroup keeps for the wait before the maximum does not fit the registers.
    let full = look.narrow() && split.has_one_warpgroup_of_wide_groups(look);
    let early = masked || cluster || one_tile || full || split == Split::FewHeads;
    settings.decide(
        "pipeline",
        &[
            ("WAIT_AT", if early { 4 } else { -1 }),
            ("NEXT_LATE", i64::from(cluster != masked && !one_tile)),
            ("SPIN_WAIT", i64::from(cluster)),
        ],
        match (one_wave, early) {
            (true, _) => "one warpgroup has the SM: PV runs under half of the next exponentials, and it spins for messages",
            (false, true) => "PV runs under half of the next exponentials",
            (false, false) => "two warpgroups run under each other: PV is waited for before the next maximum",
        },
    );
    let pairs = Split::Keys(cost::Split { cluster: 1, warpgroups: 2 });
    let late = look.narrow() && !masked && split == pairs;
    let programmatic = split != Split::FewHeads || look.facts.seq_kv <= 2048;
    settings.decide(
        "PDL",
        &[
            ("ONE_CTA_PER_SM", i64::from(one_wave)),
            ("LATE_TRIGGER", i64::from(late)),
            ("PROGRAMMATIC", i64::from(programmatic)),
        ],
        match (one_wave, programmatic) {
            (true, _) => "the next launch starts early, but its CTAs find the SMs of these taken",
            (false, true) => "the next launch starts early",
            (false, false) => "a long read of memory: a launch that starts early would only wait beside it",
        },
    );
}

/// What lengths leave out of the code: nothing, but for the lengths that it was measured to matter for.
pub(super) fn kinds(look: &Look<'_>, value: &dyn Fn(&str) -> i64, settings: &mut Settings) {
    let (parts, stages) = (value("WG_N") * value("CLUSTER"), value("STAGES"));
    let (keys, tile) = (i64::from(look.facts.seq_kv), value("BLOCK_N"));
    let registers = 5 * tile / 4 + i64::from(look.facts.value_dim.next_multiple_of(16)) / 2;
    // With two sets of scores a part takes two tiles without a loop.
    let two_at_once = stages >= 2
        && value("WG_M") * value("WG_N") * value("CTAS_PER_SM") <= 2
        && registers <= 200
        && keys <= 2 * tile * parts;
    let kept = Kept::of(look, parts, value("CLUSTER"));
    let two_each = keys == 2 * tile * parts && stages >= 2 && keys >= i64::from(PRECISE_KEYS);
    let whole = keys % tile == 0 && keys / tile > stages * parts && keys >= i64::from(PRECISE_KEYS);
    let any_length = [("WHOLE_TILES", 0), ("OWN_TILES", 0), ("LOOP", 1)];
    let one_tile = parts == 1 && cost::one_tile_each(look) && value("PACK_HEADS") == 1;
    let (kind, precise, why) = if look.every_row_precise() {
        (any_length, true, "straight code keeps P of one KV tile precise: the loop keeps that of all")
    } else if one_tile {
        let kind = [("WHOLE_TILES", 0), ("OWN_TILES", 1), ("LOOP", 1)];
        (kind, true, "one KV tile: straight code")
    } else if look.masked() {
        let straight = kept.short
            && two_at_once
            && look.causal()
            && look.facts.seq_q == look.facts.seq_kv
            && value("WG_M") * 64 / value("PACK_HEADS") <= 64
            && i64::from(PRECISE_KEYS) <= tile * parts;
        let kind = [("WHOLE_TILES", 0), ("OWN_TILES", 0), ("LOOP", i64::from(!straight))];
        (kind, true, if straight { "two masked KV tiles for each part at most: no loop" } else { ANY_MASK })
    } else if two_each && kept.two_each {
        let kind = [("WHOLE_TILES", 1), ("OWN_TILES", 2), ("LOOP", i64::from(!two_at_once))];
        (kind, false, "two whole KV tiles for each part: straight code without masks")
    } else if whole && kept.whole {
        ([("WHOLE_TILES", 1), ("OWN_TILES", 0), ("LOOP", 1)], false, "whole KV tiles: no masks")
    } else if kept.short && two_at_once && (keys >= i64::from(PRECISE_KEYS) || keys <= tile * parts) {
        (
            [("WHOLE_TILES", 0), ("OWN_TILES", 0), ("LOOP", 0)],
            true,
            "two KV tiles for each part at most: no loop",
        )
    } else {
        (any_length, true, "code for any number of keys")
    };
    settings.decide("mask code", &kind, why);
    look.decide_precision(precise, false, settings);
}

const ANY_MASK: &str = "code for any mask and any number of keys";

/// Which kinds of its own a split has, so that all codes of a head dimension, type, mask and group stay few.
struct Kept {
    /// Two whole tiles for each part.
    two_each: bool,
    /// Whole tiles.
    whole: bool,
    /// Two tiles for each part, of any number of keys.
    short: bool,
}

impl Kept {
    fn of(look: &Look<'_>, parts: i64, cluster: i64) -> Self {
        // `mission` and `small` are the two; wider heads have no second stage to hold them.
        let own = !look.grouped() && parts == 2;
        // Decoding reads memory as fast as it comes, and lengths are seldom whole: of wide heads only the splits of long caches.
        let decoding = look.facts.seq_q <= 16 && look.grouped() && (65..=128).contains(&look.widest());
        Self {
            two_each: own,
            // Of narrow heads, rows that would take so long to read are mostly hopper_fwd's. Decoding is for more rows than flash_decode's 16.
            whole: own && cluster == 1 && !look.narrow()
                || decoding && (parts == 16 || parts == 2 && !look.group().is_multiple_of(8)),
            short: own && (cluster > 1 || look.narrow() && look.masked()),
        }
    }
}
