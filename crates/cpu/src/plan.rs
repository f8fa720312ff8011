//! How a problem is cut into units of work.
//!
//! The cut never changes a result: each query row sees its keys in the same blocks and the same order whatever the number
//! of threads, and where a long key sequence is split, the split depends on the problem alone.

use crate::job::Shape;
use crate::options::FlashTiles;
use std::ops::Range;

/// Work for one thread at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    /// Rows of all queries that share the key/value head, numbered head by head.
    pub(crate) rows: Range<usize>,
    pub(crate) keys: Range<usize>,
    /// Where the keys are split: index of the first partial row. Otherwise the unit writes final rows.
    pub(crate) partial: Option<usize>,
}

/// Rows whose keys were split over several units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitRows {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) rows: Range<usize>,
    pub(crate) splits: usize,
    /// Partial row of split `s`, row `r`: `first_partial + s · rows.len() + r`.
    pub(crate) first_partial: usize,
}

/// All units of a problem, in the order they are to be started.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) units: Vec<Unit>,
    pub(crate) split_rows: Vec<SplitRows>,
    pub(crate) partial_rows: usize,
    pub(crate) decode: bool,
}

/// At most this many rows share a key/value head on the decode path. Beyond it the tile kernels, which cost the same for 1 as
/// for a vector full of rows, are cheaper.
const DECODE_ROWS: usize = 6;

/// Keys are split when there are fewer independent pieces of work than this, so that large machines are kept busy.
const WANTED_UNITS: usize = 64;

/// No split is shorter than this: merging must stay negligible.
const MIN_SPLIT_KEYS: usize = 1024;

/// Rows of a split problem count as one piece of work in such portions.
const SPLIT_ROWS: usize = 64;

impl Plan {
    /// Cuts `shape` for `threads` threads; `tile_rows` is the width of a full query tile.
    pub(crate) fn new(shape: &Shape, tiles: &FlashTiles, tile_rows: usize, threads: usize) -> Plan {
        let rows_per_head = shape.group() * shape.seq_q;
        let mut plan = Plan { decode: rows_per_head <= DECODE_ROWS, ..Plan::default() };
        let blocks = row_blocks(shape, block_rows(shape, tiles, tile_rows, threads), tile_rows, plan.decode);
        let split_keys = split_length(shape, tiles.block_kv);
        for batch in 0..shape.batch {
            for kv_head in 0..shape.heads_kv {
                for rows in &blocks {
                    plan.push(shape, batch, kv_head, rows.clone(), split_keys);
                }
            }
        }
        // Longest first, so that no thread begins a long unit when the others are done. Stable: equal units keep
        // the order in which neighbours share keys in the cache.
        plan.units.sort_by_key(|unit| std::cmp::Reverse(unit.rows.len() * unit.keys.len()));
        plan
    }

    fn push(&mut self, shape: &Shape, batch: usize, kv_head: usize, rows: Range<usize>, split_keys: usize) {
        let (first, last) = query_span(shape, &rows);
        let (begin, end) = shape.seen_by_any(first, last);
        let first_split = begin / split_keys;
        let splits = if begin == end { 1 } else { (end - 1) / split_keys - first_split + 1 };
        if splits == 1 {
            self.units.push(Unit { batch, kv_head, rows, keys: begin..end, partial: None });
            return;
        }
        let first_partial = self.partial_rows;
        for split in 0..splits {
            let from = (first_split + split) * split_keys;
            let keys = from.max(begin)..(from + split_keys).min(end);
            let partial = Some(first_partial + split * rows.len());
            self.units.push(Unit { batch, kv_head, rows: rows.clone(), keys, partial });
        }
        self.partial_rows += splits * rows.len();
        self.split_rows.push(SplitRows { batch, kv_head, rows, splits, first_partial });
    }
}

/// The smallest and largest query index among rows of a key/value head's row space.
pub(crate) fn query_span(shape: &Shape, rows: &Range<usize>) -> (usize, usize) {
    let (first, last) = (rows.start % shape.seq_q, (rows.end - 1) % shape.seq_q);
    if rows.start / shape.seq_q == (rows.end - 1) / shape.seq_q {
        (first, last)
    } else {
        // Rows run over the end of a head into the next: both ends of the sequence are in.
        (0, shape.seq_q - 1)
    }
}

/// Units each thread should have at least, so that one that is late or slow does not leave the others waiting long.
const UNITS_PER_THREAD: usize = 8;

/// Rows per unit: the tile size asked for, evened out over the sequence, and less when there would be too few units.
fn block_rows(shape: &Shape, tiles: &FlashTiles, tile_rows: usize, threads: usize) -> usize {
    let wanted = (UNITS_PER_THREAD * threads).div_ceil(shape.batch * shape.heads_q);
    let blocks = shape.seq_q.div_ceil(tiles.block_q).max(wanted);
    shape.seq_q.div_ceil(blocks).div_ceil(tile_rows) * tile_rows
}

/// Consecutive row ranges of one key/value head. Short sequences of several heads share blocks, so that K and V are read once
/// for all; longer ones are cut head by head, so that a block's queries see nearly the same keys.
fn row_blocks(shape: &Shape, block: usize, tile_rows: usize, decode: bool) -> Vec<Range<usize>> {
    let total = shape.group() * shape.seq_q;
    if decode {
        return std::iter::once(0..total).collect();
    }
    let shared = shape.seq_q < tile_rows;
    let stretch = if shared { total } else { shape.seq_q };
    let mut blocks = Vec::new();
    for start in (0..total).step_by(stretch) {
        for at in (start..start + stretch).step_by(block) {
            blocks.push(at..(at + block).min(start + stretch));
        }
    }
    blocks
}

/// Keys per split, a multiple of the key block; from the problem alone, so that results do not depend on threads.
fn split_length(shape: &Shape, block_kv: usize) -> usize {
    let pieces = shape.batch * shape.heads_kv * (shape.group() * shape.seq_q).div_ceil(SPLIT_ROWS);
    let splits = WANTED_UNITS.div_ceil(pieces.max(1));
    let keys = shape.seq_kv.div_ceil(splits).max(MIN_SPLIT_KEYS);
    if splits == 1 || keys >= shape.seq_kv {
        return usize::MAX / 2;
    }
    keys.div_ceil(block_kv) * block_kv
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(heads_q: usize, heads_kv: usize, seq_q: usize, seq_kv: usize, band_hi: i64) -> Shape {
        let (dim_qk, dim_v) = (64, 64);
        Shape { batch: 2, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v, band_lo: -(1 << 30), band_hi }
    }

    const TILES: FlashTiles = FlashTiles { block_q: 192, block_kv: 64 };

    /// Each row meets each key it sees exactly once, whatever the cut.
    #[test]
    fn units_cover_every_row_and_key_once() {
        for (heads_q, heads_kv, seq_q, seq_kv) in
            [(4, 4, 500, 500), (8, 2, 1, 9000), (8, 1, 30, 700), (6, 3, 2, 5000)]
        {
            for band_hi in [1 << 30, 0, seq_kv as i64 - seq_q as i64] {
                let shape = shape(heads_q, heads_kv, seq_q, seq_kv, band_hi);
                let plan = Plan::new(&shape, &TILES, 48, 3);
                let rows = shape.group() * seq_q;
                let mut seen = vec![0usize; 2 * heads_kv * rows];
                for unit in &plan.units {
                    for row in unit.rows.clone() {
                        let (begin, end) = shape.seen_by_any(row % seq_q, row % seq_q);
                        let (from, until) = (begin.max(unit.keys.start), end.min(unit.keys.end));
                        seen[(unit.batch * heads_kv + unit.kv_head) * rows + row] +=
                            until.saturating_sub(from);
                    }
                }
                for (at, keys) in seen.iter().enumerate() {
                    let (begin, end) = shape.seen_by_any(at % rows % seq_q, at % rows % seq_q);
                    assert_eq!(*keys, end - begin, "{shape:?} row {at}");
                }
            }
        }
    }

    #[test]
    fn long_units_come_first() {
        let plan = Plan::new(&shape(4, 4, 2000, 2000, 0), &TILES, 48, 2);
        let work: Vec<usize> = plan.units.iter().map(|unit| unit.rows.len() * unit.keys.len()).collect();
        assert!(work.is_sorted_by(|a, b| a >= b) && work.first() > work.last());
    }

    #[test]
    fn few_rows_with_many_keys_are_split_the_same_for_any_number_of_threads() {
        let keys = |threads| {
            let plan = Plan::new(&shape(1, 1, 1, 100_000, 1 << 30), &TILES, 48, threads);
            plan.units.into_iter().map(|unit| unit.keys).collect::<Vec<_>>()
        };
        assert!(keys(1).len() >= 16, "{}", keys(1).len());
        assert_eq!(keys(1), keys(64));
    }
}
