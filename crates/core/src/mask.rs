//! Which keys a query sees.
//!
//! Every mask is a *band*: query `i` sees key `j` when `i + lo <= j <= i + hi`. Kernels know only the band.

use std::ops::Range;

/// Where the diagonal starts when queries and keys differ in number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// Query 0 is aligned with key 0, as in PyTorch's `is_causal`.
    TopLeft,
    /// The last query is aligned with the last key, as in FlashAttention.
    BottomRight,
}

impl Alignment {
    /// The key that query 0 is aligned with.
    pub fn offset(self, seq_q: usize, seq_kv: usize) -> i64 {
        match self {
            Self::TopLeft => 0,
            Self::BottomRight => seq_kv as i64 - seq_q as i64,
        }
    }
}

/// Which keys each query may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Every query sees every key.
    Full,
    /// A query sees the keys up to its own position.
    Causal(Alignment),
    /// A query sees `left` keys before and `right` keys after its own position; `None` is unbounded.
    Window {
        /// Keys visible before the query's own position.
        left: Option<usize>,
        /// Keys visible after the query's own position.
        right: Option<usize>,
        /// Which corner the diagonal is aligned with.
        alignment: Alignment,
    },
}

impl Mask {
    /// The band this mask is for these lengths.
    pub fn band(self, seq_q: usize, seq_kv: usize) -> Band {
        match self {
            Self::Full => Band::FULL,
            Self::Causal(alignment) => Band { lo: Band::FULL.lo, hi: alignment.offset(seq_q, seq_kv) },
            Self::Window { left, right, alignment } => {
                let offset = alignment.offset(seq_q, seq_kv);
                // As many keys as a number can say is a bound like any other: it hides nothing.
                let reach = |keys: usize| i64::try_from(keys).unwrap_or(i64::MAX);
                let lo = left.map(|left| offset.saturating_sub(reach(left)).max(Band::FULL.lo));
                let hi = right.map(|right| offset.saturating_add(reach(right)).min(Band::FULL.hi));
                Band { lo: lo.unwrap_or(Band::FULL.lo), hi: hi.unwrap_or(Band::FULL.hi) }
            }
        }
    }
}

/// Query `i` sees key `j` when `i + lo <= j <= i + hi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// First visible key relative to the query.
    pub lo: i64,
    /// Last visible key relative to the query.
    pub hi: i64,
}

impl Band {
    /// Unbounded on both sides; sequence lengths are below 2³⁰, so nothing is ever outside.
    pub const FULL: Self = Self { lo: -(1 << 30), hi: 1 << 30 };

    /// The keys that query `i` sees, among `seq_kv`.
    pub fn visible(self, i: usize, seq_kv: usize) -> Range<usize> {
        let clamp = |x: i64| x.clamp(0, seq_kv as i64) as usize;
        let start = clamp(i as i64 + self.lo);
        let end = clamp((i as i64 + self.hi).saturating_add(1));
        start..end.max(start)
    }

    /// The number of visible (query, key) pairs.
    pub fn visible_pairs(self, seq_q: usize, seq_kv: usize) -> u64 {
        if self == Self::FULL {
            return seq_q as u64 * seq_kv as u64;
        }
        (0..seq_q).map(|i| self.visible(i, seq_kv).len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(mask: Mask, seq_q: usize, seq_kv: usize) -> Vec<String> {
        let band = mask.band(seq_q, seq_kv);
        let row = |i| {
            let visible = band.visible(i, seq_kv);
            (0..seq_kv).map(|j| if visible.contains(&j) { '#' } else { '.' }).collect()
        };
        (0..seq_q).map(row).collect()
    }

    #[test]
    fn alignments_differ_when_lengths_do() {
        assert_eq!(picture(Mask::Causal(Alignment::TopLeft), 2, 4), ["#...", "##.."]);
        assert_eq!(picture(Mask::Causal(Alignment::BottomRight), 2, 4), ["###.", "####"]);
        // More queries than keys: bottom-right leaves the first rows without any key.
        assert_eq!(picture(Mask::Causal(Alignment::BottomRight), 4, 2), ["..", "..", "#.", "##"]);
    }

    #[test]
    fn windows_are_bounded_on_both_sides() {
        let mask = |left, right| Mask::Window { left, right, alignment: Alignment::TopLeft };
        assert_eq!(picture(mask(Some(1), Some(0)), 4, 4), ["#...", "##..", ".##.", "..##"]);
        assert_eq!(picture(mask(None, Some(1)), 3, 4), ["##..", "###.", "####"]);
        assert_eq!(picture(mask(Some(0), None), 3, 3), ["###", ".##", "..#"]);
        for far in [1 << 30, i64::MAX as usize, usize::MAX] {
            for (queries, keys) in [(2, 5), (5, 2)] {
                let mask =
                    Mask::Window { left: Some(far), right: Some(far), alignment: Alignment::BottomRight };
                assert_eq!(picture(mask, queries, keys), vec!["#".repeat(keys); queries]);
            }
        }
    }

    #[test]
    fn visible_pairs_counts_what_visible_lists() {
        for (q, k) in [(1, 1), (5, 9), (9, 5), (7, 7)] {
            for mask in [Mask::Full, Mask::Causal(Alignment::TopLeft), Mask::Causal(Alignment::BottomRight)] {
                let drawn: usize = picture(mask, q, k).iter().map(|row| row.matches('#').count()).sum();
                assert_eq!(mask.band(q, k).visible_pairs(q, k), drawn as u64);
            }
        }
    }
}
