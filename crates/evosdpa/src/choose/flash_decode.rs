//! How `flash_decode` fills SMs and shared memory.

use evosdpa_core::Feature;

use super::{look::Look, settings::Settings};

/// Bytes that a CTA's shared memory holds beside the ones it asks for.
const RESERVED_BYTES: i64 = 1024;

pub(super) fn tunables(look: &Look<'_>, settings: &mut Settings) {
    let rows = look.facts.seq_q.saturating_mul(look.group());
    let warps_m: i64 = match rows {
        ..=16 => 1,
        17..=32 => 2,
        _ => 4,
    };
    // Wide accumulators of several warps leave no registers for a second CTA.
    let (warps_n, ctas) = match (warps_m, look.widest() > 128) {
        (1, false) => (4, 2),
        (1, true) | (2, _) => (4, 1),
        _ => (2, 1),
    };
    settings.decide(
        "tile",
        &[("WARPS_M", warps_m), ("WARPS_N", warps_n), ("CTAS_PER_SM", ctas)],
        match warps_m {
            1 => "all query heads of a key head fit 16 rows: one warp reads a key for all of them",
            _ => "warps share a key's rows, 16 each, so that the cache is read once",
        },
    );
    let codes = look.asks_for(&[Feature::KvType]);
    // Twice the keys of half the bytes are a stage of the same size.
    let keys: i64 = if codes && look.widest() <= 128 { 32 } else { 16 };
    let ring = Ring { look, keys, warps_m, warps_n, ctas, code_bytes: if codes { 1 } else { 2 } };
    settings.decide(
        "pipeline",
        &[("WARP_KEYS", keys), ("STAGES", ring.stages())],
        "as many KV tiles in flight as shared memory holds: memory answers late, and is asked early",
    );
    settings.decide(
        "split",
        &[("SPLIT_KEYS", 0), ("PROGRAMMATIC", 0)],
        "equal shares of all KV tiles for all CTAs, counted on the device; the last to finish a Q tile merges it",
    );
}

/// What a CTA's rings take.
struct Ring<'a> {
    look: &'a Look<'a>,
    keys: i64,
    warps_m: i64,
    warps_n: i64,
    ctas: i64,
    code_bytes: i64,
}

impl Ring<'_> {
    /// The most stages that leave room for every CTA of an SM.
    fn stages(&self) -> i64 {
        let room = i64::from(self.look.target.smem_limit_bytes) / self.ctas - RESERVED_BYTES;
        let merge = self.warps_n * self.warps_m * 16 * (4 * 36 + 8) + 16;
        let facts = self.look.facts;
        let dims = i64::from(facts.head_dim.next_multiple_of(32) + facts.value_dim.next_multiple_of(32));
        let stage = self.warps_n * self.keys * (dims * self.code_bytes + 8);
        let fits = (room - merge) / stage;
        [8, 6, 5, 4, 3].into_iter().find(|stages| *stages <= fits).unwrap_or(2)
    }
}

pub(super) fn kinds(look: &Look<'_>, settings: &mut Settings) {
    look.decide_precision(look.few_keys(), settings);
}
