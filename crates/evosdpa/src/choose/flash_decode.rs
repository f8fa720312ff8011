//! How `flash_decode` fills SMs and shared memory.

use evosdpa_core::Feature;
use evosdpa_kernels::Arch;

use super::{look::Look, settings::Settings};

/// Shared memory that the system keeps of every CTA (CUDA programming guide, compute capabilities 8.x and 9.x).
const RESERVED_BYTES: i64 = 1024;

/// Keys of a split where results are batch-invariant: the manifest holds to it.
const INVARIANT_SPLIT_KEYS: i64 = 1024;

pub(super) fn tunables(look: &Look<'_>, settings: &mut Settings) {
    let cta = Cta::of(look);
    settings.decide(
        "tile",
        &[("WARPS_M", cta.warps_m), ("WARPS_N", cta.warps_n), ("CTAS_PER_SM", cta.per_sm)],
        match cta.warps_m {
            1 => "all query heads of a key head fit 16 rows: one warp reads a key for all of them",
            _ => "warps share a key's rows, 16 each, so that the cache is read once",
        },
    );
    settings.decide(
        "pipeline",
        &[("WARP_KEYS", cta.keys), ("STAGES", cta.stages())],
        "as many KV tiles in flight as shared memory holds: memory answers late, and is asked early",
    );
    let programmatic = i64::from(look.target.arch == Arch::Sm90a);
    let (split_keys, why) = match cta.cluster {
        _ if look.asks_for(&[Feature::BatchInvariant]) => (
            INVARIANT_SPLIT_KEYS,
            "asked for: splits that follow from a sequence's own length, merged in their order",
        ),
        1 => (
            0,
            "equal shares of all KV tiles for all CTAs, or whole Q tiles where these are equal; the last to finish a Q tile merges it",
        ),
        _ => (
            0,
            "few Q tiles: the CTAs of a cluster share the keys of one, and merge in distributed shared memory",
        ),
    };
    let values = [("SPLIT_KEYS", split_keys), ("CLUSTER", cta.cluster), ("PROGRAMMATIC", programmatic)];
    settings.decide("split", &values, why);
}

pub(super) fn kinds(look: &Look<'_>, settings: &mut Settings) {
    // Memory is what takes time: code for rows with few keys costs nothing, and other code for other lengths would.
    look.decide_precision(true, false, settings);
}

/// The warps of a CTA and what its rings are made of.
#[derive(Clone, Copy)]
struct Cta {
    warps_m: i64,
    warps_n: i64,
    /// Keys of a team's KV tile.
    keys: i64,
    per_sm: i64,
    /// CTAs that share a Q tile.
    cluster: i64,
    value_dim: i64,
    /// Of one key and value.
    key_bytes: i64,
    /// Of Q, where it lies in shared memory.
    query_bytes: i64,
    paged: bool,
    smem_limit_bytes: i64,
}

impl Cta {
    fn of(look: &Look<'_>) -> Self {
        let rows = look.facts.seq_q.saturating_mul(look.group());
        let wide = look.widest() > 128;
        let invariant = look.asks_for(&[Feature::BatchInvariant]);
        // Two codes: rows that are not there cost MMAs, of which there are plenty.
        let warps_m = match rows {
            0..=16 => 1,
            _ if invariant => 2,
            _ => 4,
        };
        let cluster = if warps_m == 1 && !wide && !invariant { cluster(look) } else { 1 };
        let (warps_n, per_sm) = match (warps_m, wide) {
            // The same for every number of queries: a row's keys go to as many teams.
            (1, false) if invariant => (4, 2),
            (_, false) if invariant => (4, 1),
            (_, true) if invariant => (2, 1),
            (1, false) if one_large_cta(look) => (8, 1),
            // The accumulators of wide heads, and those of several warps, leave no registers for a second CTA.
            (1, false) => (4, 2),
            (1, true) => (4, 1),
            _ => (2, 1),
        };
        let codes = look.asks_for(&[Feature::KvType]);
        let padded = |dim: u32| i64::from(dim.next_multiple_of(32));
        let (head_dim, value_dim) = (padded(look.facts.head_dim), padded(look.facts.value_dim));
        let cta = Self {
            warps_m,
            warps_n,
            // Twice the keys of half the bytes are a stage of the same size; of few keys every warp gets some.
            keys: if codes && !wide && (cluster < 8 || look.facts.seq_kv > 8 * 8 * 16) { 32 } else { 16 },
            per_sm,
            cluster,
            value_dim,
            key_bytes: if codes { head_dim + value_dim + 8 } else { 2 * (head_dim + value_dim) },
            query_bytes: if head_dim > 128 { 32 * warps_m * head_dim } else { 0 },
            paged: look.asks_for(&[Feature::PagedCache]),
            smem_limit_bytes: i64::from(look.target.smem_limit_bytes),
        };
        // Where two stages are too much for two CTAs, one has all of the shared memory; then fewer teams share it.
        let fewer = |warps_n: i64| Self { warps_n, per_sm: 1, ..cta };
        if invariant {
            return [cta, fewer(cta.warps_n)].into_iter().find(|cta| cta.most_stages() >= 2).unwrap_or(cta);
        }
        let smaller = [cta, fewer(cta.warps_n), fewer(2), fewer(1)];
        smaller.into_iter().find(|cta| cta.most_stages() >= 2).unwrap_or(fewer(1))
    }

    /// The most stages that leave room for every CTA of an SM.
    fn most_stages(&self) -> i64 {
        let warps = self.warps_n * self.warps_m;
        let statistics = warps * if self.paged { 416 } else { 320 } + 16;
        let pages = if self.paged { 4 * warps * self.keys } else { 0 };
        let received = if self.cluster > 1 { 16 * self.warps_m * (4 * self.value_dim + 8) } else { 0 };
        let merged = 64 * self.warps_m * if self.cluster > 1 { self.value_dim } else { 16 };
        let taken = RESERVED_BYTES + statistics + received + self.query_bytes;
        let room = self.smem_limit_bytes / self.per_sm - taken;
        room / (self.warps_n * (self.keys * self.key_bytes).max(merged) + pages)
    }

    fn stages(&self) -> i64 {
        let most = self.most_stages();
        [8, 6, 5, 4, 3].into_iter().find(|stages| *stages <= most).unwrap_or(2)
    }
}

/// Q tiles of 16 rows.
fn q_tiles(look: &Look<'_>) -> u64 {
    look.kv_heads() * u64::from(look.facts.seq_q.saturating_mul(look.group()).div_ceil(16))
}

/// Whether one CTA has an SM on Hopper. Eight warps have fewer parts to merge than twice four. Where there are more Q tiles than SMs, twice four
/// read pages and codes faster, whose merges and first loads are a larger part: one CTA reads while the other merges.
fn one_large_cta(look: &Look<'_>) -> bool {
    let fits = q_tiles(look) <= look.sms() || !look.asks_for(&[Feature::KvType, Feature::PagedCache]);
    look.target.arch == Arch::Sm90a && (fits || cluster(look) > 1)
}

/// CTAs of a cluster on Hopper. Those of one GPC leave SMs over unless clusters are small; and half of the SMs read short caches as fast as all.
fn cluster(look: &Look<'_>) -> i64 {
    let (tiles, sms, keys) = (q_tiles(look), look.sms(), look.facts.seq_kv);
    if look.target.arch != Arch::Sm90a || 2 * tiles > sms {
        return 1;
    }
    // Codes are half the bytes; and pages cannot be asked for before lengths are known, which without clusters takes longer.
    let longest = if look.asks_for(&[Feature::KvType, Feature::PagedCache]) { 8192 } else { 4096 };
    if 8 * tiles >= 3 * sms || 5 * tiles >= sms && keys <= 8192 {
        2
    } else if 12 * tiles <= sms && keys <= longest {
        8
    } else {
        1
    }
}

#[cfg(test)]
mod tests {
    use evosdpa_core::{DType, Problem};
    use evosdpa_kernels::{Arch, ProblemFacts, Registry, Target};

    use super::*;

    /// What is chosen fits the SM as often as it says, and as many bytes are in flight as the memory needs.
    #[test]
    fn rings_fill_shared_memory() {
        let registry = Registry::embedded().unwrap();
        let kernel = registry.kernel("flash_decode").unwrap();
        for (shape, in_flight_kib) in [
            ("b16h32/8s1/8192d128", [32, 32, 128]),
            ("b16h32/8s1/8192d64", [32, 32, 128]),
            ("b16h32/8s4/8192d256", [64, 32, 128]),
            ("b16h32/8s16/8192d128", [64, 32, 96]),
            ("b16h32/8s16/8192d256", [32, 16, 96]),
            ("b16h64/8s3/8192d128", [64, 32, 96]),
            ("b16h32/8s1/8192d128:paged=16:kv=e4m3", [32, 32, 128]),
            ("b16h32/8s1/8192d256:kv=e4m3:scales=token", [64, 32, 128]),
        ] {
            let facts =
                ProblemFacts::try_from(&Problem::new(shape.parse().unwrap(), DType::BF16).unwrap()).unwrap();
            for (arch, least_kib) in [Arch::Sm80, Arch::Sm89, Arch::Sm90a].into_iter().zip(in_flight_kib) {
                let target = Target::nominal(arch);
                let cta = Cta::of(&Look::new(&facts, &target));
                let variant = super::super::variant(kernel, &facts, &target, &Default::default()).unwrap();
                let smem = i64::from(variant.launch.dynamic_smem_bytes) + RESERVED_BYTES;
                let label = format!("{shape} on {arch}: {}", variant.label());
                assert!(
                    cta.per_sm * smem <= i64::from(target.smem_limit_bytes) + RESERVED_BYTES,
                    "{label}: {smem}"
                );
                let stage = cta.warps_n * cta.keys * cta.key_bytes;
                let in_flight = cta.per_sm * (cta.stages() - 1) * stage / 1024;
                assert!(in_flight >= least_kib, "{label}: {in_flight} KiB in flight");
            }
        }
    }

    /// What a row's bits depend on is the same for any batch, number of queries and longest sequence.
    #[test]
    fn batch_invariant_variants_differ_in_nothing_that_shows() {
        let registry = Registry::embedded().unwrap();
        let kernel = registry.kernel("flash_decode").unwrap();
        for (dims, kinds) in
            [("d128", ""), ("d64", ":paged=16:kv=e4m3"), ("d256", ":kv=e4m3"), ("d192/128", "")]
        {
            for arch in [Arch::Sm80, Arch::Sm89, Arch::Sm90a] {
                let target = Target::nominal(arch);
                let mut seen = Vec::new();
                for sizes in ["b1h32/8s1/100", "b64h32/8s1/131072", "b3h32/8s9/4096", "b2h32/8s700/1000"] {
                    let text = format!("{sizes}{dims}:used{kinds}:invariant");
                    let facts =
                        ProblemFacts::try_from(&Problem::new(text.parse().unwrap(), DType::BF16).unwrap())
                            .unwrap();
                    let variant =
                        super::super::variant(kernel, &facts, &target, &Default::default()).unwrap();
                    let tunable = |name| variant.id.tunables.value(name).unwrap();
                    seen.push(["SPLIT_KEYS", "WARPS_N", "WARP_KEYS"].map(tunable));
                }
                assert!(seen.iter().all(|values| *values == seen[0]), "{dims}{kinds} on {arch}: {seen:?}");
            }
        }
    }
}
