//! Tiles of `ampere_fwd`. The numbers were measured on an H200 (docs/log/hopper.md).

use evosdpa_core::Feature;

use super::{look::Look, settings::Settings};

/// O of a wider head is divided among two CTAs: the manifest's VALUE_PARTS.
const VALUE_COLUMNS_MAX: u32 = 256;

pub(super) fn tunables(look: &Look<'_>, settings: &mut Settings) {
    let narrow = look.narrow();
    let few = narrow && look.q_tiles(128) <= look.sms();
    let fewest = narrow && look.q_tiles(32) <= look.sms();
    tile(look, few, fewest, settings);
    let masked = look.masked();
    let two_stages = if few { !fewest } else { narrow && masked };
    settings.decide(
        "pipeline",
        &[("STAGES", if two_stages { 2 } else { 1 })],
        if two_stages {
            "short KV tiles: the next one is loaded a tile ahead"
        } else {
            "one stage still overlaps each load with the other MMA, and leaves shared memory for another CTA"
        },
    );
    settings.decide(
        "registers",
        &[
            ("Q_IN_REGS", i64::from(narrow && masked || few)),
            ("SPLIT_PRECISE_LOOP", i64::from(look.facts.head_dim <= 64 && !is_wide(look))),
            ("SPLIT_MASKED_LOOP", i64::from(narrow && !masked && !few)),
            ("SKIP_RESCALE", i64::from(look.widest() > 64 && look.widest() <= 128)),
        ],
        "what the head dimensions leave room for beside the accumulators",
    );
    settings.decide(
        "schedule",
        &[("HEAD_GROUP", if look.causal() { 8 } else { 1 })],
        if look.causal() {
            "causal Q tiles differ in length: the longest of eight heads start together, whose K and V fit L2"
        } else {
            "equal Q tiles, head by head"
        },
    );
}

fn tile(look: &Look<'_>, few: bool, fewest: bool, settings: &mut Settings) {
    let (rows, keys, warps_m, warps_n, why) = if is_wide(look) {
        let fitting = WIDE_TILES.into_iter().find(|tile| fits(look, tile) && look.in_blocks(tile.0, tile.1));
        let (rows, keys, warps_m, warps_n) = fitting.unwrap_or(SMALLEST_WIDE_TILE);
        let why = "heads of more than 256 columns: the largest tile whose queries, keys and values fit shared memory";
        (rows, keys, warps_m, warps_n, why)
    } else if look.asks_for(&[Feature::BlockMask]) {
        let (rows, warps_m, warps_n) = if few { (32, 2, 2) } else { (64, 4, 1) };
        (rows, 64, warps_m, warps_n, "a tile that lies within one block of any block mask")
    } else if fewest {
        (32, 256, 2, 4, "Q tiles of 32 rows leave SMs idle: four warps share the keys of a KV tile")
    } else if few {
        (
            32,
            128,
            2,
            2,
            "Q tiles of 128 rows leave SMs idle: 32 rows, and two warps share the keys of a KV tile",
        )
    } else {
        // Lengths, pages and modified scores take the registers of the larger tile.
        let fills = look.widest() <= 128 && look.q_tiles(128) > look.sms() && look.is_plain();
        let keys = if look.narrow() && !look.masked() { 96 } else { 64 };
        let why =
            "Q tiles as large as registers and the number of SMs allow, so that K and V are read less often";
        (if fills { 128 } else { 64 }, keys, 4, 1, why)
    };
    let values = [("BLOCK_M", rows), ("BLOCK_N", keys), ("WARPS_M", warps_m), ("WARPS_N", warps_n)];
    settings.decide("tile", &values, why);
}

/// Whether queries, keys or values are so wide that shared memory decides on the tile.
fn is_wide(look: &Look<'_>) -> bool {
    look.widest() > VALUE_COLUMNS_MAX
}

/// Rows, keys, and the warps over each, of wide heads: the first that fits is the best.
const WIDE_TILES: [(i64, i64, i64, i64); 3] = [(128, 32, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1)];
const SMALLEST_WIDE_TILE: (i64, i64, i64, i64) = (32, 32, 2, 2);

/// Whether a tile's queries, keys and values fit shared memory with one stage, and O where warps over the keys merge.
fn fits(look: &Look<'_>, &(rows, keys, _, warps_n): &(i64, i64, i64, i64)) -> bool {
    let parts = look.facts.value_dim.div_ceil(VALUE_COLUMNS_MAX);
    let head_dim = i64::from(look.facts.head_dim.next_multiple_of(16));
    let value_dim = i64::from(look.facts.value_dim.div_ceil(parts).next_multiple_of(16));
    let loop_bytes = 2 * rows * head_dim.max(value_dim) + 2 * keys * (head_dim + value_dim);
    let merge_bytes = if warps_n > 1 { 4 * warps_n * rows * (value_dim + 6) } else { 0 };
    loop_bytes.max(merge_bytes) <= i64::from(look.target.smem_limit_bytes)
}

pub(super) fn kinds(look: &Look<'_>, settings: &mut Settings) {
    look.decide_precision(look.few_keys(), false, settings);
}
