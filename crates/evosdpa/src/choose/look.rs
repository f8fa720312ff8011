//! Derived facts of a problem on a GPU that the rules read: Q tiles, bytes, rows for each SM.

use evosdpa_core::{DType, Feature};
use evosdpa_kernels::{MaskKind, ProblemFacts, Target};

use super::settings::Settings;

/// A problem on a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look<'a> {
    pub(super) facts: &'a ProblemFacts,
    pub(super) target: &'a Target,
    mask: MaskKind,
}

/// Of a bf16 row with fewer visible keys than this, the rounding of P to 8 mantissa bits shows: the errors of the weights no
/// longer average out below the 1e-3 that results are held to.
pub(super) const PRECISE_KEYS: u32 = 256;

/// The same beside a cap, a bias or a boolean mask, which leave fewer of the keys to count: `n` keys with scores of variance `σ²` count as
/// `n·exp(−σ²)` equal ones (`(Σp)²/Σp²`). So 256 of variance 1 are 94, and with a bias of variance 1 added it takes 700 for as many.
pub(super) const PRECISE_KEYS_MODIFIED: u32 = 1024;

/// More keys than any row sees.
const EVERY_ROW: u32 = 1 << 30;

impl<'a> Look<'a> {
    pub(super) fn new(facts: &'a ProblemFacts, target: &'a Target) -> Self {
        Self { facts, target, mask: facts.mask() }
    }

    pub(super) fn masked(&self) -> bool {
        self.mask != MaskKind::Full
    }

    pub(super) fn causal(&self) -> bool {
        self.mask == MaskKind::Causal
    }

    /// Keys that a row sees at most under a window, that is, a mask which is neither full nor causal.
    pub(super) fn window(&self) -> Option<u32> {
        let keys = i64::from(self.facts.seq_kv);
        let edge = |edge: Option<i32>| edge.map(i64::from);
        let width = match (edge(self.facts.band_lo), edge(self.facts.band_hi)) {
            (Some(low), Some(high)) => high - low + 1,
            _ => keys,
        };
        (self.mask == MaskKind::Window).then_some(width.clamp(0, keys) as u32)
    }

    /// The larger head dimension.
    pub(super) fn widest(&self) -> u32 {
        self.facts.head_dim.max(self.facts.value_dim)
    }

    /// Head dimensions of at most 64: the softmax takes as long as the MMAs.
    pub(super) fn narrow(&self) -> bool {
        self.widest() <= 64
    }

    /// Query heads of one key head.
    pub(super) fn group(&self) -> u32 {
        self.facts.heads_q / self.facts.heads_kv
    }

    /// Groups of four or eight query heads: their problems are decoded in kinds of their own, which leaves room for fewer
    /// others.
    pub(super) fn grouped(&self) -> bool {
        self.group().is_multiple_of(4)
    }

    /// Query heads of all batches.
    pub(super) fn heads(&self) -> u64 {
        u64::from(self.facts.heads_q) * u64::from(self.facts.batch)
    }

    /// Key heads of all batches.
    pub(super) fn kv_heads(&self) -> u64 {
        u64::from(self.facts.heads_kv) * u64::from(self.facts.batch)
    }

    /// Q tiles of so many rows, of all heads.
    pub(super) fn q_tiles(&self, rows: u32) -> u64 {
        u64::from(self.facts.seq_q.div_ceil(rows)) * self.heads()
    }

    pub(super) fn sms(&self) -> u64 {
        u64::from(self.target.sm_count)
    }

    /// Whether the problem asks for one of these.
    pub(super) fn asks_for(&self, features: &[Feature]) -> bool {
        features.iter().any(|feature| self.facts.features.contains(*feature))
    }

    /// Whether sequences have lengths or places of their own, which no host knows.
    pub(super) fn own_lengths(&self) -> bool {
        use Feature::*;
        self.asks_for(&[PackedQueries, PackedKeys, UsedLengths, UsedQueries, LeftPadding, CacheIndices])
    }

    /// Whether scores are changed between QKᵀ and the softmax.
    pub(super) fn modified(&self) -> bool {
        self.asks_for(&[Feature::Softcap, Feature::Alibi, Feature::Bias, Feature::BooleanMask])
    }

    /// Whether tiles of these sizes lie within the blocks of the problem's block mask, where it has one.
    pub(super) fn in_blocks(&self, rows: i64, keys: i64) -> bool {
        i64::from(self.facts.block_q) % rows == 0 && i64::from(self.facts.block_kv) % keys == 0
    }

    /// Whether the code is that of problems that ask for nothing beyond sizes and a mask, but for its last instructions.
    pub(super) fn is_plain(&self) -> bool {
        !self.own_lengths()
            && !self.modified()
            && !self.asks_for(&[Feature::PagedCache, Feature::Chunks, Feature::BlockMask])
    }

    /// Whether all that hides keys is a block mask.
    pub(super) fn sees_all_shown(&self) -> bool {
        !self.masked() && !self.own_lengths() && !self.asks_for(&[Feature::Chunks])
    }

    /// Whether some row sees so few keys that its P must be kept precise.
    pub(super) fn few_keys(&self) -> bool {
        self.masked()
            || self.facts.seq_kv < self.precise_keys()
            || self.own_lengths()
            || self.asks_for(&[Feature::Chunks, Feature::BlockMask])
    }

    /// Rows that see fewer keys than this have their P kept precise.
    fn precise_keys(&self) -> u32 {
        let fewer_count = self.asks_for(&[Feature::Softcap, Feature::Bias, Feature::BooleanMask]);
        if fewer_count { PRECISE_KEYS_MODIFIED } else { PRECISE_KEYS }
    }

    /// Whether every row is asked to be kept precise. f16 keeps P to 11 bits, which is enough.
    pub(super) fn every_row_precise(&self) -> bool {
        self.facts.dtype == DType::BF16 && self.asks_for(&[Feature::HighPrecision])
    }

    /// Whether few queries read a dense cache for which `flash_decode` was measured to be the faster: groups of four and eight heads, 65 to
    /// 128 columns, from 1,024 keys on.
    pub(super) fn reads_dense_cache(&self) -> bool {
        let rows = self.facts.seq_q.saturating_mul(self.group());
        let measured = self.grouped() && !self.masked() && (65..=128).contains(&self.widest());
        rows <= 16 && measured && self.facts.seq_kv >= 1024
    }

    /// Decides on the kind PRECISE_KEYS, where the code knows rows with few keys or not.
    ///
    /// `asks_device`: beside a cap, or slopes, the code finds out on the device which KV tiles to keep precise.
    pub(super) fn decide_precision(&self, knows_few_keys: bool, asks_device: bool, settings: &mut Settings) {
        let (cap, slopes) = (self.asks_for(&[Feature::Softcap]), self.asks_for(&[Feature::Alibi]));
        let dense = self.asks_for(&[Feature::Bias, Feature::BooleanMask]);
        let (keys, why) = match (self.facts.dtype, knows_few_keys) {
            _ if self.every_row_precise() => {
                (EVERY_ROW, "asked for: a second PV with what rounding left of P, for every row")
            }
            (DType::BF16, _) if asks_device && cap != slopes && !dense => (
                PRECISE_KEYS,
                "caps and slopes may leave a row with few keys that count: the device asks which KV tiles need a second PV",
            ),
            (DType::BF16, _) if cap || slopes || dense && knows_few_keys => (
                EVERY_ROW,
                "modified scores may leave a row with few keys that count: a second PV with what rounding left of P",
            ),
            (DType::BF16, true) => (
                PRECISE_KEYS,
                "bf16 rows that see fewer than 256 keys get a second PV with what rounding left of P",
            ),
            (DType::BF16, false) => (0, "every row sees many keys: one PV, and no code for a second"),
            _ => (0, "f16 keeps P to 11 bits: one PV is precise enough"),
        };
        settings.decide("precision", &[("PRECISE_KEYS", i64::from(keys))], why);
    }
}
