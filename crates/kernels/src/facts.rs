//! The facts of a problem that a manifest's expressions and support rules may read.

use std::fmt;

use evosdpa_core::{Band, Blocks, DType, Feature, Features, PageSize, Problem};

use crate::{Error, MaskKind};

/// A problem in plain integers: the environment of a manifest's expressions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProblemFacts {
    /// Batch size.
    pub batch: u32,
    /// Query heads.
    pub heads_q: u32,
    /// Key/value heads.
    pub heads_kv: u32,
    /// Query length.
    pub seq_q: u32,
    /// Key/value length.
    pub seq_kv: u32,
    /// Head dimension of Q and K.
    pub head_dim: u32,
    /// Head dimension of V and O.
    pub value_dim: u32,
    /// Element type of Q, and of K and V where they have none of their own.
    pub dtype: DType,
    /// Element type of K and V.
    pub kv_dtype: DType,
    /// Key `j` is visible to query `i` only if `i + band_lo <= j`; `None` is unbounded.
    pub band_lo: Option<i32>,
    /// Key `j` is visible to query `i` only if `j <= i + band_hi`; `None` is unbounded.
    pub band_hi: Option<i32>,
    /// Whether the log-sum-exp is wanted.
    pub lse: bool,
    /// Tokens in a page of the cache; 0 where it has none.
    pub page_size: u32,
    /// Queries and keys in a block of a block mask; 0 where there is none.
    pub block_q: u32,
    /// See `block_q`.
    pub block_kv: u32,
    /// What is asked for beyond equal lengths, one dtype and a mask.
    pub features: Features,
}

impl ProblemFacts {
    /// The names an expression may use for these facts and the target's.
    pub const NAMES: [&'static str; 40] = [
        "batch",
        "heads_q",
        "heads_kv",
        "seq_q",
        "seq_kv",
        "head_dim",
        "value_dim",
        "causal",
        "window",
        "masked",
        "lse",
        "page_size",
        "block_q",
        "block_kv",
        "dtype_bytes",
        "kv_e4m3",
        "kv_u8",
        "kv_i8",
        "sm_count",
        "smem_limit",
        "packed_queries",
        "packed_keys",
        "used_lengths",
        "paged_cache",
        "kv_type",
        "output_type",
        "tensor_scales",
        "token_scales",
        "softcap",
        "alibi",
        "bias",
        "boolean_mask",
        "block_mask",
        "chunks",
        "sinks",
        "high_precision",
        "batch_invariant",
        "used_queries",
        "left_padding",
        "cache_indices",
    ];

    /// The name by which an expression asks whether a feature is wanted. A kernel takes the features that its defines ask for.
    pub fn feature_name(feature: Feature) -> &'static str {
        match feature {
            Feature::PackedQueries => "packed_queries",
            Feature::PackedKeys => "packed_keys",
            Feature::UsedLengths => "used_lengths",
            Feature::PagedCache => "paged_cache",
            Feature::KvType => "kv_type",
            Feature::OutputType => "output_type",
            Feature::TensorScales => "tensor_scales",
            Feature::TokenScales => "token_scales",
            Feature::Softcap => "softcap",
            Feature::Alibi => "alibi",
            Feature::Bias => "bias",
            Feature::BooleanMask => "boolean_mask",
            Feature::BlockMask => "block_mask",
            Feature::Chunks => "chunks",
            Feature::Sinks => "sinks",
            Feature::HighPrecision => "high_precision",
            Feature::BatchInvariant => "batch_invariant",
            Feature::UsedQueries => "used_queries",
            Feature::LeftPadding => "left_padding",
            Feature::CacheIndices => "cache_indices",
        }
    }

    /// Which kind of mask the band is.
    ///
    /// An upper bound at the top-left or bottom-right diagonal alone is causal; any other bound is a window.
    pub fn mask(&self) -> MaskKind {
        let bottom_right = i64::from(self.seq_kv) - i64::from(self.seq_q);
        match (self.band_lo, self.band_hi) {
            (None, None) => MaskKind::Full,
            (None, Some(hi)) if hi == 0 || i64::from(hi) == bottom_right => MaskKind::Causal,
            _ => MaskKind::Window,
        }
    }

    /// The value of a name, given the target.
    pub(crate) fn value(&self, name: &str, target: &crate::Target) -> Option<i64> {
        let mask = self.mask();
        let value = match name {
            "batch" => self.batch.into(),
            "heads_q" => self.heads_q.into(),
            "heads_kv" => self.heads_kv.into(),
            "seq_q" => self.seq_q.into(),
            "seq_kv" => self.seq_kv.into(),
            "head_dim" => self.head_dim.into(),
            "value_dim" => self.value_dim.into(),
            "causal" => i64::from(mask == MaskKind::Causal),
            "window" => i64::from(mask == MaskKind::Window),
            "masked" => i64::from(mask != MaskKind::Full),
            "lse" => i64::from(self.lse),
            "page_size" => self.page_size.into(),
            "block_q" => self.block_q.into(),
            "block_kv" => self.block_kv.into(),
            "dtype_bytes" => self.dtype.bytes() as i64,
            "kv_e4m3" => i64::from(self.kv_dtype == DType::E4M3),
            "kv_u8" => i64::from(self.kv_dtype == DType::U8),
            "kv_i8" => i64::from(self.kv_dtype == DType::I8),
            "sm_count" => target.sm_count.into(),
            "smem_limit" => target.smem_limit_bytes.into(),
            _ => {
                let named = |feature: &Feature| Self::feature_name(*feature) == name;
                let feature = Feature::ALL.into_iter().find(named)?;
                i64::from(self.features.contains(feature))
            }
        };
        Some(value)
    }
}

impl TryFrom<&Problem> for ProblemFacts {
    type Error = Error;

    fn try_from(problem: &Problem) -> Result<Self, Error> {
        let sizes = problem.sizes();
        let size = |field: &'static str, value: usize| {
            // Kernels index with 32-bit signed integers.
            let max = i32::MAX as u64;
            u32::try_from(value).ok().filter(|value| u64::from(*value) <= max).ok_or(Error::ProblemRange {
                field,
                value: value as u64,
                max,
            })
        };
        // A bound beyond the unbounded value is unbounded, so the conversion cannot lose anything.
        let bound = |bound: i64, unbounded: i64| (bound.abs() < unbounded.abs()).then_some(bound as i32);
        let band = problem.band();
        Ok(Self {
            batch: size("batch", sizes.batch)?,
            heads_q: size("heads_q", sizes.heads_q)?,
            heads_kv: size("heads_kv", sizes.heads_kv)?,
            seq_q: size("seq_q", sizes.seq_q)?,
            seq_kv: size("seq_kv", sizes.seq_kv)?,
            head_dim: size("head_dim", sizes.dim_qk)?,
            value_dim: size("value_dim", sizes.dim_v)?,
            dtype: problem.dtype(),
            kv_dtype: problem.kv_dtype(),
            band_lo: bound(band.lo, Band::FULL.lo),
            band_hi: bound(band.hi, Band::FULL.hi),
            lse: problem.lse(),
            page_size: size("page_size", problem.lengths().page.map_or(0, PageSize::tokens))?,
            block_q: size("block_q", problem.scores().blocks.map_or(0, Blocks::queries))?,
            block_kv: size("block_kv", problem.scores().blocks.map_or(0, Blocks::keys))?,
            features: problem.features(),
        })
    }
}

impl fmt::Display for ProblemFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pair = |a: u32, b: u32| if a == b { a.to_string() } else { format!("{a}/{b}") };
        write!(
            f,
            "b{}h{}s{}d{} {} {}{}{}",
            self.batch,
            pair(self.heads_q, self.heads_kv),
            pair(self.seq_q, self.seq_kv),
            pair(self.head_dim, self.value_dim),
            self.dtype,
            self.mask(),
            if self.lse { " with LSE" } else { "" },
            if self.features.is_empty() { String::new() } else { format!(" with {}", self.features) }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(seq_q: u32, seq_kv: u32, band_lo: Option<i32>, band_hi: Option<i32>) -> ProblemFacts {
        ProblemFacts {
            batch: 1,
            heads_q: 8,
            heads_kv: 2,
            seq_q,
            seq_kv,
            head_dim: 64,
            value_dim: 64,
            dtype: DType::F16,
            kv_dtype: DType::F16,
            band_lo,
            band_hi,
            lse: true,
            page_size: 0,
            block_q: 0,
            block_kv: 0,
            features: Features::NONE,
        }
    }

    #[test]
    fn a_band_is_named_by_its_bounds() {
        assert_eq!(facts(4, 8, None, None).mask(), MaskKind::Full);
        assert_eq!(facts(4, 8, None, Some(0)).mask(), MaskKind::Causal);
        assert_eq!(facts(4, 8, None, Some(4)).mask(), MaskKind::Causal);
        assert_eq!(facts(4, 8, None, Some(2)).mask(), MaskKind::Window);
        assert_eq!(facts(4, 8, Some(-3), Some(0)).mask(), MaskKind::Window);
        assert_eq!(facts(4, 8, Some(-3), None).mask(), MaskKind::Window);
    }

    #[test]
    fn every_listed_name_has_a_value() {
        let target = crate::Target::nominal(crate::Arch::Sm80);
        for name in ProblemFacts::NAMES {
            assert!(facts(4, 8, None, None).value(name, &target).is_some(), "{name}");
        }
    }

    #[test]
    fn reads_a_core_problem() {
        use evosdpa_core::Shape;
        let shape = Shape::parse_list("b2h8/2s4/8d64/32:causal-br").unwrap()[0];
        let problem = Problem::new(shape, DType::BF16).unwrap().with_lse(true);
        let facts = ProblemFacts::try_from(&problem).unwrap();
        assert_eq!(facts.to_string(), "b2h8/2s4/8d64/32 bf16 causal with LSE");
        assert_eq!((facts.band_lo, facts.band_hi), (None, Some(4)));
    }

    #[test]
    fn prints_like_a_shape() {
        assert_eq!(facts(4, 8, None, Some(0)).to_string(), "b1h8/2s4/8d64 f16 causal with LSE");
    }
}
