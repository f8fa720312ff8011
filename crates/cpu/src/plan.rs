//! How a problem is cut into units of work.
//!
//! The cut never changes a result: each query row sees its keys in the same blocks and the same order whatever the number
//! of threads, and where a long key sequence is split, the split depends on that sequence alone. So a sequence's answer
//! is the same, bit for bit, whatever else is in the batch.

use crate::few;
use crate::job::Shape;
use crate::options::FlashTiles;
use crate::span::Span;
use std::cmp::Reverse;
use std::ops::Range;

/// Work for one thread at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
    /// Rows of all queries that share the key/value head, numbered head by head.
    pub(crate) rows: Range<usize>,
    pub(crate) keys: Range<usize>,
    /// Where the keys are split: index of the first partial row. Otherwise the unit writes final rows.
    pub(crate) partial: Option<usize>,
    /// Few rows, which the decode kernels serve.
    pub(crate) decode: bool,
}

impl Unit {
    /// How long it takes, roughly: reading keys for few rows costs as much as computing with a vector full of them.
    fn cost(&self) -> usize {
        self.rows.len().max(16) * self.keys.len()
    }
}

/// Rows whose keys were split over several units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitRows {
    pub(crate) sequence: usize,
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
    /// Most rows of a unit for the tile kernels, and of one for the decode kernels.
    pub(crate) tile_rows: usize,
    pub(crate) decode_rows: usize,
}

/// The keys of a sequence are split when it has fewer independent pieces of work than this, so that large machines are kept
/// busy.
const WANTED_UNITS: usize = 64;

/// No split is shorter than this: merging must stay negligible.
const MIN_SPLIT_KEYS: usize = 2048;

/// Rows of a split problem count as one piece of work in such portions.
const SPLIT_ROWS: usize = 64;

/// Units each thread should have at least, so that one that is late or slow does not leave the others waiting long.
const UNITS_PER_THREAD: usize = 8;

/// Work that is handed out longest first at the end, in units of the longest for each thread.
const EVENING_OUT: usize = 2;

impl Plan {
    /// Cuts sequences for `threads` threads; `width` is that of a full query tile, and few rows are those that cost no more than `few_limit`
    /// (see [`few::cost`]).
    pub(crate) fn new(
        shape: &Shape,
        span: impl Fn(usize) -> Span,
        tiles: &FlashTiles,
        width: usize,
        few_limit: usize,
        threads: usize,
    ) -> Plan {
        let mut plan = Plan::default();
        let total = total_pairs(shape, &span);
        for sequence in 0..shape.batch {
            let span = span(sequence);
            if span.queries == 0 {
                continue;
            }
            // Units that this sequence should become, by its share of the work.
            let alike = (total / pairs(&span).max(1)).max(1);
            let wanted = (UNITS_PER_THREAD * threads).div_ceil(alike.saturating_mul(shape.heads_q));
            let decode = few::cost(shape, span.queries) <= few_limit;
            let blocks = row_blocks(shape, &span, block_rows(&span, tiles, width, wanted), width, decode);
            let split_keys = split_length(shape, &span, tiles.block_kv);
            for kv_head in 0..shape.heads_kv {
                for rows in &blocks {
                    plan.push(&span, sequence, kv_head, rows.clone(), split_keys, decode);
                }
            }
        }
        plan.units = in_order(plan.units, threads);
        plan
    }

    fn push(
        &mut self,
        span: &Span,
        sequence: usize,
        kv_head: usize,
        rows: Range<usize>,
        split_keys: usize,
        decode: bool,
    ) {
        let most = if decode { &mut self.decode_rows } else { &mut self.tile_rows };
        *most = (*most).max(rows.len());
        let (first, last) = query_span(span, &rows);
        let (begin, end) = span.seen_by_any(first, last);
        let first_split = begin / split_keys;
        let splits = if begin == end { 1 } else { (end - 1) / split_keys - first_split + 1 };
        let unit = Unit { sequence, kv_head, rows, keys: begin..end, partial: None, decode };
        if splits == 1 {
            self.units.push(unit);
            return;
        }
        let first_partial = self.partial_rows;
        for split in 0..splits {
            let from = (first_split + split) * split_keys;
            let keys = from.max(begin)..(from + split_keys).min(end);
            let partial = Some(first_partial + split * unit.rows.len());
            self.units.push(Unit { keys, partial, ..unit.clone() });
        }
        self.partial_rows += splits * unit.rows.len();
        self.split_rows.push(SplitRows { sequence, kv_head, rows: unit.rows, splits, first_partial });
    }
}

/// Head by head, so that units which are computed one after the other share keys in the cache: those of all heads may not fit. The last ones of all are in the
/// order of their length, so that no thread begins a long unit when the others are done.
fn in_order(mut units: Vec<Unit>, threads: usize) -> Vec<Unit> {
    // Stable: equal units keep the order in which they were cut.
    units.sort_by_key(|unit| (unit.sequence, unit.kv_head, Reverse(unit.cost())));
    let longest = units.iter().map(Unit::cost).max().unwrap_or(0);
    let mut heads: Vec<&[Unit]> =
        units.chunk_by(|a, b| (a.sequence, a.kv_head) == (b.sequence, b.kv_head)).collect();
    heads.sort_by_key(|head| Reverse(head[0].cost()));
    let evening_out = EVENING_OUT.saturating_mul(threads).saturating_mul(longest);
    let (mut left, mut last) = (0usize, heads.len());
    while last > 0 && left < evening_out {
        last -= 1;
        left = left.saturating_add(heads[last].iter().map(Unit::cost).sum());
    }
    let mut end: Vec<Unit> = heads[last..].concat();
    end.sort_by_key(|unit| Reverse(unit.cost()));
    heads[..last].iter().flat_map(|head| head.iter().cloned()).chain(end).collect()
}

/// Pairs of queries and keys of all sequences.
pub(crate) fn total_pairs(shape: &Shape, span: impl Fn(usize) -> Span) -> usize {
    (0..shape.batch).fold(0, |sum: usize, sequence| sum.saturating_add(pairs(&span(sequence))))
}

fn pairs(span: &Span) -> usize {
    span.queries.saturating_mul(span.keys)
}

/// The smallest and largest query index among rows of a key/value head's row space.
pub(crate) fn query_span(span: &Span, rows: &Range<usize>) -> (usize, usize) {
    let (first, last) = (rows.start % span.queries, (rows.end - 1) % span.queries);
    if rows.start / span.queries == (rows.end - 1) / span.queries {
        (first, last)
    } else {
        // Rows run over the end of a head into the next: both ends of the sequence are in.
        (0, span.queries - 1)
    }
}

/// Rows per unit: the tile size asked for, evened out over the sequence, and less when there would be too few units.
fn block_rows(span: &Span, tiles: &FlashTiles, width: usize, wanted: usize) -> usize {
    let blocks = span.queries.div_ceil(tiles.block_q).max(wanted);
    span.queries.div_ceil(blocks).div_ceil(width) * width
}

/// Consecutive row ranges of one key/value head. Short sequences of several heads share blocks, so that K and V are read once
/// for all; longer ones are cut head by head, so that a block's queries see nearly the same keys.
fn row_blocks(shape: &Shape, span: &Span, block: usize, width: usize, decode: bool) -> Vec<Range<usize>> {
    let total = shape.group() * span.queries;
    if decode {
        return std::iter::once(0..total).collect();
    }
    let shared = span.queries < width;
    let stretch = if shared { total } else { span.queries };
    let mut blocks = Vec::new();
    for start in (0..total).step_by(stretch) {
        for at in (start..start + stretch).step_by(block) {
            blocks.push(at..(at + block).min(start + stretch));
        }
    }
    blocks
}

/// Keys per split of a sequence, a multiple of the key block.
fn split_length(shape: &Shape, span: &Span, block_kv: usize) -> usize {
    let pieces = shape.heads_kv * (shape.group() * span.queries).div_ceil(SPLIT_ROWS);
    let splits = WANTED_UNITS.div_ceil(pieces).min(span.keys / MIN_SPLIT_KEYS);
    if splits <= 1 {
        return usize::MAX / 2;
    }
    span.keys.div_ceil(splits).div_ceil(block_kv) * block_kv
}

#[cfg(test)]
mod tests {
    use super::*;
    use evosdpa_core::{DType, Problem};

    const TILES: FlashTiles = FlashTiles { block_q: 192, block_kv: 64 };

    fn plan(text: &str, spans: &[(usize, usize)], threads: usize) -> (Shape, Vec<Span>, Plan) {
        let problem = Problem::new(text.parse().unwrap(), DType::F32).unwrap();
        let spans: Vec<Span> = spans.iter().map(|&(q, k)| Span::new(&problem, q, k)).collect();
        let shape = Shape { batch: spans.len(), ..Shape::new(&problem) };
        let plan = Plan::new(&shape, |sequence| spans[sequence], &TILES, 48, 12, threads);
        (shape, spans, plan)
    }

    /// Each row meets each key it sees exactly once, whatever the cut.
    #[test]
    fn units_cover_every_row_and_key_once() {
        for (heads, spans) in [
            ("h4", &[(500, 500), (500, 500)][..]),
            ("h8/2", &[(1, 9000), (3, 2), (700, 800)]),
            ("h8/1", &[(30, 700), (0, 40), (40, 0)]),
            ("h6/3", &[(2, 5000)]),
        ] {
            for mask in ["", ":causal", ":causal-br", ":causal-br:chunk=100"] {
                let (shape, spans, plan) = plan(&format!("b1{heads}s9000d64{mask}"), spans, 3);
                for (sequence, span) in spans.iter().enumerate() {
                    let rows = shape.group() * span.queries;
                    let mut seen = vec![0usize; shape.heads_kv * rows];
                    for unit in plan.units.iter().filter(|unit| unit.sequence == sequence) {
                        for row in unit.rows.clone() {
                            let query = row % span.queries;
                            let (begin, end) = span.seen_by_any(query, query);
                            let (from, until) = (begin.max(unit.keys.start), end.min(unit.keys.end));
                            seen[unit.kv_head * rows + row] += until.saturating_sub(from);
                        }
                    }
                    for (at, keys) in seen.iter().enumerate() {
                        let (begin, end) = span.seen_by_any(at % span.queries, at % span.queries);
                        assert_eq!(*keys, end - begin, "{span:?} row {at}");
                    }
                }
            }
        }
    }

    /// When the last thread is done, where each takes the next unit as soon as it is free.
    fn ends(units: &[Unit], threads: usize) -> usize {
        let mut free = vec![0; threads];
        for unit in units {
            *free.iter_mut().min().unwrap() += unit.cost();
        }
        free.into_iter().max().unwrap()
    }

    #[test]
    fn threads_are_done_at_about_the_same_time() {
        let (_, _, alone) = plan("b1h1s2000d64:causal", &[(2000, 2000)], 1);
        assert!(ends(&alone.units, 1) > 0);
        let skewed: Vec<_> = std::iter::once((4096, 4096)).chain([(100, 100); 20]).collect();
        for (heads, spans) in [
            ("h4", &[(2000, 2000); 2][..]),
            ("h8/2", &[(700, 700)]),
            ("h1", &skewed),
            ("h16", &[(2048, 2048)]),
        ] {
            for threads in [1, 2, 3, 8, 64] {
                let (_, _, plan) = plan(&format!("b1{heads}s5000d64:causal-br"), spans, threads);
                let mut by_length = plan.units.clone();
                by_length.sort_by_key(|unit| Reverse(unit.cost()));
                let (here, best) = (ends(&plan.units, threads), ends(&by_length, threads));
                assert!(here * 100 <= best * 102, "{heads} {threads} threads: {here}, not {best}");
            }
        }
    }

    #[test]
    fn units_of_a_head_follow_one_another() {
        let (_, _, plan) = plan("b2h8s2000d64:causal", &[(2000, 2000); 2], 2);
        let heads: Vec<_> = plan.units.iter().map(|unit| (unit.sequence, unit.kv_head)).collect();
        let mut changes = heads.windows(2).filter(|pair| pair[0] != pair[1]);
        // All but the last few heads, which are evened out.
        let once: Vec<_> = changes.by_ref().map(|pair| pair[0]).take(12).collect();
        assert_eq!(once, (0..12).map(|head| (head / 8, head % 8)).collect::<Vec<_>>());
        for head in plan.units[..40].chunk_by(|a, b| (a.sequence, a.kv_head) == (b.sequence, b.kv_head)) {
            assert!(head.is_sorted_by_key(|unit| Reverse(unit.cost())));
        }
    }

    #[test]
    fn one_long_sequence_among_short_ones_is_cut_into_pieces() {
        let spans: Vec<_> = std::iter::once((32768, 32768)).chain([(100, 100); 300]).collect();
        let (_, _, plan) = plan("b1h1s32768d64:causal-br", &spans, 8);
        let (most, total) = plan
            .units
            .iter()
            .map(Unit::cost)
            .fold((0, 0), |(most, total), cost| (most.max(cost), total + cost));
        assert!(8 * most < total, "{most} of {total}");
        assert!(plan.units.iter().filter(|unit| unit.sequence > 0).all(|unit| unit.rows.len() == 100));
    }

    /// Whoever shares keys is served in passes of four, two and one head; heads that see different keys one by one.
    #[test]
    fn few_rows_are_those_whose_passes_cost_less_than_a_tile() {
        let few =
            |text: &str, queries| plan(text, &[(queries, 500)], 1).2.units.iter().all(|unit| unit.decode);
        for (text, most) in [
            ("b1h4s500d128", 6),
            ("b1h8/2s500d128", 3),
            ("b1h14/2s500d128", 1),
            ("b1h24/2s500d128", 1),
            ("b1h26/2s500d128", 0),
            ("b1h12/2s500d128:mask=h", 1),
            ("b1h14/2s500d128:mask=h", 0),
        ] {
            assert!(most == 0 || few(text, most), "{text}: {most}");
            assert!(!few(text, most + 1), "{text}: {}", most + 1);
        }
    }

    #[test]
    fn few_rows_with_many_keys_are_split_alike_for_any_threads_and_batch() {
        let keys = |threads, others: &[(usize, usize)]| {
            let spans: Vec<_> = std::iter::once((1, 100_000)).chain(others.iter().copied()).collect();
            let (_, _, plan) = plan("b1h1s100000d64", &spans, threads);
            let mut keys: Vec<_> =
                plan.units.iter().filter(|unit| unit.sequence == 0).map(|unit| unit.keys.clone()).collect();
            keys.sort_by_key(|keys| keys.start);
            keys
        };
        assert!(keys(1, &[]).len() >= 16, "{}", keys(1, &[]).len());
        assert_eq!(keys(1, &[]), keys(64, &[]));
        assert_eq!(keys(1, &[]), keys(2, &[(1, 1); 200]));
    }
}
