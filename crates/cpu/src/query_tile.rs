//! Q tiles of a unit of work, and which key rows of a block each of them reads.

use crate::kernels::Kernels;
use crate::plan::query_span;
use crate::shown::MaskRows;
use crate::simd::MAX_LANES;
use crate::span::Span;
use crate::tile::{MAX_VECTORS, TileMask};
use std::ops::Range;

/// Widest query tile of any instruction set.
const MAX_TILE_ROWS: usize = MAX_VECTORS * MAX_LANES;

/// A row that sees fewer keys has some weights so large that their rounding to bfloat16 (one part in 256) would move the output by more than
/// rounding the output does; from here on the errors of many small weights cancel.
const FEW_KEYS: usize = 512;

/// One query tile of a unit.
pub(crate) struct QueryTile {
    pub(crate) rows: Range<usize>,
    pub(crate) vectors: usize,
    first_query: usize,
    last_query: usize,
    lane_query: [f32; MAX_TILE_ROWS],
    /// What it has to do with the block that is looked at.
    pub(crate) look: Look,
    /// Whether nothing is left to compute.
    pub(crate) done: bool,
    /// Whether biases may be infinite in units of log2 that are finite as given.
    pub(crate) careful: bool,
}

/// The key rows of a block that a tile is run against.
#[derive(Clone, Copy, Default)]
pub(crate) struct Look {
    /// A multiple of the kernels' step; nothing to do where it is not below the end.
    pub(crate) begin: usize,
    pub(crate) end: usize,
    /// Whether a boolean mask or a block table hides some of them from some query.
    pub(crate) hides: bool,
}

impl QueryTile {
    pub(crate) fn new<K: Kernels>(span: &Span, rows: Range<usize>) -> QueryTile {
        let (first_query, last_query) = query_span(span, &rows);
        let mut lane_query = [0.0; MAX_TILE_ROWS];
        for (lane, index) in lane_query.iter_mut().enumerate().take(K::VECTORS * K::LANES) {
            *index = (row_of_lane(&rows, lane) % span.queries - first_query) as f32;
        }
        let vectors = rows.len().div_ceil(K::LANES);
        QueryTile {
            rows,
            vectors,
            first_query,
            last_query,
            lane_query,
            look: Look::default(),
            done: false,
            careful: false,
        }
    }

    /// Whether a row of the tile sees so few keys that rounding its weights to 16 bits could show in the output. The number of keys in a band
    /// is smallest for the first or the last query.
    pub(crate) fn sees_few_keys(&self, span: &Span) -> bool {
        [self.first_query, self.last_query].iter().any(|&query| {
            let (begin, end) = span.seen_by_any(query, query);
            end - begin < FEW_KEYS
        })
    }

    /// How many times the keys up to `until` those are among `keys` that the query sees which sees fewest; 1 at least.
    pub(crate) fn hope(&self, span: &Span, keys: &Range<usize>, until: usize) -> f32 {
        let hope = [self.first_query, self.last_query].map(|query| {
            let (begin, end) = span.seen_by_any(query, query);
            let (begin, end) = (begin.max(keys.start), end.min(keys.end));
            let (all, seen) = (end.saturating_sub(begin), until.min(end).saturating_sub(begin));
            (all as f32 / seen.max(1) as f32).max(1.0)
        });
        hope[0].min(hope[1])
    }

    /// The row of a lane.
    pub(crate) fn row(&self, lane: usize) -> usize {
        row_of_lane(&self.rows, lane)
    }

    /// The position of the tile's first query relative to key `block`.
    pub(crate) fn position(&self, span: &Span, block: usize) -> i64 {
        self.first_query as i64 + span.position - block as i64
    }

    /// Of the rows `begin..end` of a block those that any query sees.
    pub(crate) fn look<K: Kernels>(&self, span: &Span, block: usize, begin: usize, end: usize) -> Look {
        let seen = span.seen_by_any(self.first_query, self.last_query);
        let begin = (seen.0.max(block + begin) - block) / K::STEP * K::STEP;
        Look { begin, end: seen.1.clamp(block, block + end) - block, hides: false }
    }

    /// The same less what a boolean mask hides at both ends, with `bits` of what it shows; `rows` is each lane's row of the mask.
    ///
    /// # Safety
    /// The instruction set of `K`; the rows are valid for the keys of the block up to `look.end`, `bits` for their words.
    pub(crate) unsafe fn unhide<K: Kernels>(
        &self,
        look: Look,
        block: usize,
        rows: *const *const u8,
        bits: *mut u32,
    ) -> Look {
        let lanes = self.vectors * K::LANES;
        // SAFETY: by contract.
        let shown = unsafe {
            K::scan(&MaskRows { rows, lanes, first: block, begin: look.begin, end: look.end, bits })
        };
        let begin = shown.begin / K::STEP * K::STEP;
        Look { begin, end: shown.end, hides: shown.hides || look.hides }
    }

    /// The same less what a block table hides at both ends; `rows` is each lane's row of the table, whose blocks have so many keys.
    ///
    /// # Safety
    /// The instruction set of `K`; the rows are valid for the blocks of the keys up to `look.end`, of which there is one.
    pub(crate) unsafe fn unhide_blocks<K: Kernels>(
        &self,
        look: Look,
        block: usize,
        size: usize,
        rows: *const *const u8,
    ) -> Look {
        let mut shown = Look { begin: look.end, end: look.begin, hides: false };
        // Whether blocks behind the last that anyone sees are hidden.
        let mut hidden_since = false;
        for number in (block + look.begin) / size..(block + look.end).div_ceil(size) {
            // SAFETY: by contract.
            let sees = |lane: usize| unsafe { *(*rows.add(lane)).add(number) != 0 };
            let count = (0..self.rows.len()).filter(|&lane| sees(lane)).count();
            if count == 0 {
                hidden_since = true;
                continue;
            }
            shown.hides |= count < self.rows.len() || (hidden_since && shown.end > shown.begin);
            shown.begin = shown.begin.min((number * size).max(block + look.begin) - block);
            shown.end = ((number + 1) * size - block).min(look.end);
            hidden_since = false;
        }
        let begin = shown.begin / K::STEP * K::STEP;
        Look { begin, hides: shown.hides || begin < shown.begin, ..shown }
    }

    /// The band's mask over a block.
    pub(crate) fn mask(&self, span: &Span, block: usize) -> TileMask {
        let clear = span.seen_by_all(self.first_query, self.last_query);
        let origin = block as i64 - self.first_query as i64;
        TileMask {
            lane_query: self.lane_query.as_ptr(),
            // Query i sees key j when j - band_hi <= i <= j - band_lo.
            first: origin.saturating_sub(span.band_hi),
            last: origin.saturating_sub(span.band_lo),
            chunk: span.chunk,
            key: block as i64,
            position: self.first_query as i64 + span.position,
            clear_begin: clear.0.saturating_sub(block),
            clear_end: clear.1.saturating_sub(block),
        }
    }

    /// Per vector, one past the last key row of a block that its queries see, within what the tile looks at; never falling.
    pub(crate) fn vector_end<K: Kernels>(&self, span: &Span, block: usize) -> [usize; MAX_VECTORS] {
        let look = self.look;
        let mut ends = [look.end; MAX_VECTORS];
        // Where rows of several heads share the tile, query indices start again within it.
        let one_head = self.last_query - self.first_query + 1 == self.rows.len();
        if one_head {
            for (vector, limit) in ends.iter_mut().enumerate().take(self.vectors - 1) {
                let last_query = self.first_query + (vector + 1) * K::LANES - 1;
                let seen = span.seen_by_any(last_query, last_query).1;
                *limit = seen.saturating_sub(block).clamp(look.begin, look.end);
            }
        }
        ends
    }
}

/// Lanes beyond the last row repeat it; what they compute is never written.
fn row_of_lane(rows: &Range<usize>, lane: usize) -> usize {
    (rows.start + lane).min(rows.end - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portable::Portable;
    use evosdpa_core::{DType, Problem};

    /// A row that hopes for keys it does not see hopes in vain, and its tile is computed twice.
    #[test]
    fn no_query_of_a_tile_hopes_for_more_than_it_sees() {
        let causal = Problem::new("b1h1s300d8:causal".parse().unwrap(), DType::F32).unwrap();
        let span = Span::new(&causal, 300, 300);
        let tile = QueryTile::new::<Portable>(&span, 250..258);
        assert_eq!(tile.hope(&span, &(0..300), 256), 1.0);
        assert_eq!(tile.hope(&span, &(0..300), 128), 251.0 / 128.0);
        assert_eq!(tile.hope(&span, &(128..300), 192), 123.0 / 64.0);
    }
}
