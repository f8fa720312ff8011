//! The three inner kernels of flash attention: scores, softmax, values.
//!
//! Everything is laid out with **queries in the vector lanes**: the score tile is `Sᵀ[key][query]`, the output tile is
//! `Oᵀ[value column][query]`. A query tile is `NR` vectors wide, and a kernel keeps `MR × NR` accumulators in registers,
//! reading one broadcast scalar of K (or V) per `NR` multiply-adds. So K and V are never transposed, running
//! maxima and sums are plain vectors without any horizontal step, and rescaling is one multiplication per accumulator.
//!
//! Scores are in units of log2: the queries were multiplied by `scale · log2(e)` when they were packed.
//!
//! Where an instruction set multiplies pairs of bfloat16 ([`Simd::PACKED`] is 2), a lane of packed queries, keys, values and weights holds a pair:
//! neighbours of the head dimension for the scores, neighbouring keys for the values. Queries then are as they were given, and scores
//! are multiplied afterwards. What multiplies blocks of rows and queries has layouts of its own ([`Gemm`]).

mod gemm;
mod scores;
mod softmax;
mod values;

pub(crate) use {
    gemm::Gemm,
    scores::scores,
    softmax::softmax,
    values::{add_infinite, finite_part, values},
};

use crate::simd::Simd;

/// Most vectors of a query tile, on any instruction set.
pub(crate) const MAX_VECTORS: usize = 3;

/// Which queries of a tile see a key, when not all do.
pub(crate) struct TileMask {
    /// Per lane, the query's index relative to the tile's first query.
    pub(crate) lane_query: *const f32,
    /// Key row `r` of the block is seen by relative queries in `first + r ..= last + r`.
    pub(crate) first: i64,
    pub(crate) last: i64,
    /// Keys of a chunk, whose keys and queries see no others; 0 without chunks.
    pub(crate) chunk: i64,
    /// The block's first key and the position of the tile's first query: what chunks count from.
    pub(crate) key: i64,
    pub(crate) position: i64,
    /// Key rows seen by every query of the tile: no mask is applied to these.
    pub(crate) clear_begin: usize,
    pub(crate) clear_end: usize,
}

impl TileMask {
    /// The relative queries that see key row `row`, as exact floats.
    #[inline(always)]
    pub(crate) fn bounds(&self, row: usize) -> (f32, f32) {
        const FAR: i64 = 1 << 20;
        let shift = row as i64;
        let (mut first, mut last) = (self.first.saturating_add(shift), self.last.saturating_add(shift));
        if self.chunk > 0 {
            let start = (self.key + shift) / self.chunk * self.chunk - self.position;
            (first, last) = (first.max(start), last.min(start + self.chunk - 1));
        }
        let clamp = |x: i64| x.clamp(-FAR, FAR) as f32;
        (clamp(first), clamp(last))
    }
}

/// What the three kernels share about one query tile against one block of keys.
pub(crate) struct TileStep {
    /// Packed queries, `[dim_qk][NR·LANES]`; pairs are counted.
    pub(crate) queries: *const f32,
    pub(crate) dim_qk: usize,
    /// What scores of pairs are multiplied with.
    pub(crate) score_scale: f32,
    /// Keys of the block, packed or as they are given, `[key][key_stride]`.
    pub(crate) keys: *const f32,
    pub(crate) key_stride: usize,
    /// Packed values of the block, `[key][value_stride]`, or `[pair of keys][value_stride]`.
    pub(crate) values: *const f32,
    pub(crate) value_stride: usize,
    /// Output accumulator, `[dim_v rounded up][NR·LANES]`.
    pub(crate) output: *mut f32,
    pub(crate) dim_v: usize,
    /// Score tile, `[key][NR·LANES]`. Weights in pairs lie in the even rows, and what rounding took from them in the odd ones.
    pub(crate) scores: *mut f32,
    /// What the score tile holds before the scores.
    pub(crate) start: Start,
    pub(crate) care: Care,
    /// What the softmax said of the weights.
    pub(crate) weighed: Weighed,
    /// The first rows of pairs whose weights lost something to rounding that counts, [`Weighed::heavy`] of them, rising.
    pub(crate) heavy_rows: *mut u32,
    /// Key rows of the block to process. `key_begin` is a multiple of `TAIL`; rows up to `key_end` rounded up to `TAIL` are readable.
    pub(crate) key_begin: usize,
    pub(crate) key_end: usize,
    /// Per vector, one past the last key row that any of its queries sees: never falling, the last is `key_end`. What lies beyond is
    /// neither computed nor read, so that a causal diagonal costs little more than its triangle.
    pub(crate) vector_end: [usize; MAX_VECTORS],
    /// Per lane: running maximum before this block, after it, running sum, and the factor between.
    pub(crate) old_max: *mut f32,
    pub(crate) new_max: *mut f32,
    pub(crate) sum: *mut f32,
    pub(crate) rescale: *mut f32,
    /// Per lane, the running sum of squared weights, and of those among them whose loss to rounding was multiplied, where weights are [`Care::Measured`].
    pub(crate) squares: *mut f32,
    pub(crate) whole_squares: *mut f32,
    /// How many times the weight seen so far, this block included, a row may expect in the end, and per lane the most that it may: 1 expects nothing.
    pub(crate) hope: f32,
    pub(crate) most_hope: *const f32,
    pub(crate) mask: TileMask,
    /// Which keys a boolean mask or a block table shows to whom, as [`crate::shown`] has it; null where they hide nothing.
    pub(crate) shown: *const u32,
    /// Read by the exact value kernel alone: 1 where a query does not see a key, else 0, `[key][NR·LANES]`.
    pub(crate) hidden: *const f32,
    /// Rows of the next block to bring nearer meanwhile.
    pub(crate) ahead: [Ahead; 2],
}

/// What a score tile holds before QKᵀ: what can be known of scores without them is written first, and costs the kernel one instruction a vector.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// Nothing that counts.
    Nothing,
    /// What is added to the scores: a bias or ALiBi.
    Added,
    /// In the rows of even keys, a bias of bfloat16 as it is given, for the key and the one behind it.
    Words,
}

/// What is done about the rounding of weights to pairs of bfloat16, one part in 256 each at most.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Care {
    /// Nothing: rows see so many keys that the errors of their weights cancel.
    Rounded,
    /// What rounding takes from large weights is multiplied too, where few of them are going to hold most of a row ([`FEW_WEIGHTS`], [`TileStep::hope`]).
    Measured,
    /// What rounding takes is multiplied too, always.
    Whole,
}

/// Weights p of sum l are as few as `l² / Σp²` equal ones. bfloat16 has eight bits, so rounding moves a weight by one part in 256 at most, and an output of unit values
/// by 1.66e-3 over the root of this number (one standard deviation): six of these are 1e-3 at 99. Fewer than so many at the end of a row, those left
/// out whose loss was multiplied: more was hoped for than came, and the row is computed again without hope.
pub(crate) const FEW_WEIGHTS: f32 = 96.0;

/// Key rows of a tile whose weights are multiplied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weighed {
    /// Rows outside hold nothing but zeros.
    pub(crate) live: KeyRange,
    /// How many pairs of rows have weights that lost something to rounding that counts.
    pub(crate) heavy: usize,
}

/// Key rows from the first to one before the second.
pub(crate) type KeyRange = (usize, usize);

/// Tensor rows that will be packed next, fetched into the cache while the arithmetic runs: each tile fetches a share of the rows.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) first: *const u8,
    pub(crate) row_bytes: usize,
    pub(crate) stride_bytes: usize,
    pub(crate) rows: usize,
    /// This tile's number, and how many there are.
    pub(crate) tile: usize,
    pub(crate) tiles: usize,
}

impl Ahead {
    /// Fetches this tile's share of `count` rows from `row` on.
    #[inline(always)]
    pub(crate) unsafe fn prefetch<S: Simd>(&self, row: usize, count: usize) {
        let (from, until) = (count * self.tile / self.tiles, count * (self.tile + 1) / self.tiles);
        for row in row + from..(row + until).min(self.rows) {
            let at = self.first.wrapping_add(row * self.stride_bytes);
            for byte in (0..self.row_bytes).step_by(64) {
                // SAFETY: the instruction set is available; a prefetch reads nothing.
                unsafe { S::prefetch(at.wrapping_add(byte)) };
            }
        }
    }
}

/// Whether the last `left` rows are taken `TAIL` at a time: what then lies beyond the last row never reaches the next multiple of `TAIL`.
#[inline(always)]
const fn ends_in_tails<const MR: usize, const TAIL: usize>(left: usize) -> bool {
    TAIL < MR && (left <= TAIL || left > MR && left <= 2 * TAIL)
}

/// Where each vector's keys end, in whole pairs but for the last: scores are computed in even steps, so that the partner of a vector's last key
/// has one, hidden by the mask.
#[inline(always)]
pub(crate) fn packed_ends<S: Simd>(t: &TileStep) -> [usize; MAX_VECTORS] {
    t.vector_end.map(|end| end.next_multiple_of(S::PACKED).min(t.key_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What scores and outputs have room for: rows up to the next multiple of the smaller step, from any multiple of it.
    #[test]
    fn steps_cover_every_row_and_stay_within_the_next_multiple() {
        fn reach<const MR: usize, const TAIL: usize>(rows: usize) -> usize {
            let mut at = 0;
            while at < rows {
                at += if ends_in_tails::<MR, TAIL>(rows - at) { TAIL } else { MR };
            }
            at
        }
        for rows in 1..400 {
            for (reached, tail) in
                [(reach::<6, 4>(rows), 4), (reach::<8, 8>(rows), 8), (reach::<4, 4>(rows), 4)]
            {
                assert!(reached >= rows && reached <= rows.next_multiple_of(tail), "{rows} rows, {reached}");
            }
            // Whole vectors of head dimension waste nothing.
            assert!(rows % 16 != 0 || reach::<6, 4>(rows) == rows, "{rows}");
        }
    }
}
