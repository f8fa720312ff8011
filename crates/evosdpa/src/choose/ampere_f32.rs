//! Tiles of `ampere_f32`. The numbers were measured on an H200 (docs/log/hopper.md).

use super::{look::Look, settings::Settings};

/// Rows, keys, and the warps over each.
type Tile = (i64, i64, i64, i64);

/// Few rows, or wide ones on GPUs with little shared memory: two warps share the keys of a KV tile.
const SMALLEST: Tile = (32, 32, 2, 2);

pub(super) fn tunables(look: &Look<'_>, settings: &mut Settings) {
    let (tile, why) = if look.q_tiles(64) <= look.sms() {
        (SMALLEST, "Q tiles of 64 rows leave SMs idle: 32 rows, and two warps share the keys of a KV tile")
    } else {
        let larger: &[Tile] = if look.widest() > 128 {
            &[(128, 32, 8, 1)]
        } else if look.narrow() && look.q_tiles(128) > look.sms() {
            &[(128, 32, 4, 1), (64, 64, 4, 1)]
        } else {
            &[(64, 64, 4, 1), (64, 32, 4, 1)]
        };
        let tile = larger
            .iter()
            .copied()
            .find(|tile| fits(look, tile) && look.in_blocks(tile.0, tile.1))
            .unwrap_or(SMALLEST);
        (tile, "the largest Q tile whose queries, keys and values of f32 fit shared memory")
    };
    let (rows, keys, warps_m, warps_n) = tile;
    let values = [("BLOCK_M", rows), ("BLOCK_N", keys), ("WARPS_M", warps_m), ("WARPS_N", warps_n)];
    settings.decide("tile", &values, why);
    settings.decide(
        "pipeline",
        &[("STAGES", 1)],
        "one stage still overlaps each load with the other GEMM, and leaves shared memory for another CTA",
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

/// Whether a tile's queries, keys and values fit shared memory.
fn fits(look: &Look<'_>, &(rows, keys, ..): &Tile) -> bool {
    let head_dim = i64::from(look.facts.head_dim.next_multiple_of(16));
    let value_dim = i64::from(look.facts.value_dim.next_multiple_of(32));
    let bytes = 4 * rows * head_dim.max(value_dim) + 4 * keys * (head_dim + value_dim);
    bytes <= i64::from(look.target.smem_limit_bytes)
}
