//! The inner loops of the two GEMMs, which an instruction set may have in its own way.

use super::{TileStep, Weighed, scores::products_by_rows, values::add_by_rows};
use crate::simd::Simd;

/// How QKᵀ and PV are multiplied. As a rule an element or pair of a row of keys or values is broadcast and multiplied with vectors of queries ([`Simd::dot`]).
/// What multiplies blocks of rows and queries has these for itself, and with them its own layout of packed keys, queries, values, weights and sums.
///
/// # Safety
/// The instruction set; `t` describes valid buffers for tiles of `NR` vectors. All are `inline(always)`, as those of [`Simd`].
pub(crate) trait Gemm: Simd {
    /// Keys that PV multiplies at a time.
    const DEPTH: usize = Self::PACKED;

    /// The products of `MR` key rows from `row` on with the tile's vectors from `FIRST` on.
    #[inline(always)]
    unsafe fn key_products<const MR: usize, const NR: usize, const FIRST: usize>(
        t: &TileStep,
        row: usize,
    ) -> [[Self::V; NR]; MR] {
        // SAFETY: same contract.
        unsafe { products_by_rows::<Self, MR, NR, FIRST>(t, row) }
    }

    /// Lays weights, which are in rows or pairs of rows, as [`Gemm::add_keys`] takes them. Says which these are then.
    #[inline(always)]
    unsafe fn lay_weights<const NR: usize>(_t: &TileStep, weighed: Weighed) -> Weighed {
        weighed
    }

    /// Of a number for each query of a vector, those that belong to the sums in row `row` of the output tile.
    #[inline(always)]
    unsafe fn for_sums(of_queries: Self::V, _row: usize) -> Self::V {
        of_queries
    }

    /// Adds `DEPTH` key rows from `row` on, weighted, to `MR` value columns from `column` on, for the tile's vectors from `FIRST` on. With `EXACT`
    /// values may be NaN or infinite, which only those get who see them; with `LOST` it adds what rounding took from the weights.
    #[inline(always)]
    unsafe fn add_keys<
        const MR: usize,
        const NR: usize,
        const FIRST: usize,
        const EXACT: bool,
        const LOST: bool,
    >(
        t: &TileStep,
        column: usize,
        row: usize,
        sums: &mut [[Self::V; NR]; MR],
    ) {
        // SAFETY: same contract.
        unsafe { add_by_rows::<Self, MR, NR, FIRST, EXACT, LOST>(t, column, row, sums) }
    }
}
