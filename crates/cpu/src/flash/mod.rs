//! Flash attention over register tiles: the driver of the kernels in `tile`.

mod packing;
mod scoring;
mod scratch;

pub(crate) use scratch::Scratch;

use crate::job::Job;
use crate::kernels::Kernels;
use crate::options::FlashTiles;
use crate::partial::{Partials, factor, log_sum_exp};
use crate::plan::{Unit, query_span};
use crate::query_tile::{Look, QueryTile};
use crate::simd::MAX_LANES;
use crate::span::Span;
use crate::tile::{Ahead, Care, FEW_WEIGHTS, Start, TileStep, Weighed};
use std::ptr;

/// How many times the weight seen so far a row expects at most. More would save nothing, and be in vain more often.
const MOST_HOPE: f32 = 8.0;

/// A unit at work.
struct Work<'a> {
    job: &'a Job<'a>,
    tiles: &'a FlashTiles,
    layout: &'a Scratch,
    unit: &'a Unit,
    span: Span,
    scratch: *mut f32,
}

/// Computes one unit.
///
/// # Safety
/// The instruction set of `K`; `job` describes valid tensors; `scratch` holds `layout.floats`; no other thread
/// writes the unit's rows.
pub(crate) unsafe fn run_unit<K: Kernels>(
    job: &Job<'_>,
    tiles: &FlashTiles,
    layout: &Scratch,
    unit: &Unit,
    partials: &Partials,
    scratch: *mut f32,
) {
    let width = K::VECTORS * K::LANES;
    let span = job.span(unit.sequence);
    let mut cut: Vec<QueryTile> = (unit.rows.clone().step_by(width))
        .map(|start| QueryTile::new::<K>(&span, start..(start + width).min(unit.rows.end)))
        .collect();
    let work = Work { job, tiles, layout, unit, span, scratch };
    // SAFETY: scratch offsets are those of the layout; tensors are valid by contract.
    unsafe {
        for (index, tile) in cut.iter().enumerate() {
            work.pack_queries::<K>(index, tile);
            work.set_hope::<K>(index, tile);
            work.clear_state::<K>(index, tile);
            work.find_rows::<K>(index, tile);
        }
        work.run_blocks::<K>(&mut cut);
        for (index, tile) in cut.iter_mut().enumerate() {
            tile.done = !work.goes_again::<K>(index, tile);
        }
        if cut.iter().any(|tile| !tile.done) {
            work.run_blocks::<K>(&mut cut);
        }
        for (index, tile) in cut.iter().enumerate() {
            work.finish_tile::<K>(index, tile, partials);
        }
    }
}

/// # Safety
/// As [`run_unit`], of every function.
impl Work<'_> {
    /// The query head and query of a row.
    fn head_and_query(&self, row: usize) -> (usize, usize) {
        let head = self.unit.kv_head * self.job.shape.group() + row / self.span.queries;
        (head, row % self.span.queries)
    }

    /// A tile's running maximum, its successor, sum, rescale, two sums of squares and most hope.
    unsafe fn state<K: Kernels>(&self, index: usize) -> *mut f32 {
        // SAFETY: the layout has room for every tile.
        unsafe { self.scratch.add(self.layout.state + index * 7 * K::VECTORS * K::LANES) }
    }

    /// Rows see their weights come evenly as a rule. Not with ALiBi, whose weights lie about one place, and not where a table shows some blocks alone.
    unsafe fn set_hope<K: Kernels>(&self, index: usize, tile: &QueryTile) {
        let modifiers = &self.job.modifiers;
        let most = if modifiers.alibi() || modifiers.blocks.is_some() { 1.0 } else { MOST_HOPE };
        let width = tile.vectors * K::LANES;
        // SAFETY: as `run_unit`.
        unsafe {
            let most_hope = self.state::<K>(index).add(6 * width);
            (0..width).for_each(|lane| *most_hope.add(lane) = most);
        }
    }

    /// Whether a tile that was run must be run again, for which it is made ready: some of its rows hoped for more weights than came, or have seen nothing but
    /// infinite scores where a bias may have been finite. Other rows will get the same bits.
    unsafe fn goes_again<K: Kernels>(&self, index: usize, tile: &mut QueryTile) -> bool {
        let measured = self.care::<K>(tile) == Care::Measured;
        let biased = self.job.modifiers.bias.is_some();
        let width = tile.vectors * K::LANES;
        let mut again = false;
        // SAFETY: as `run_unit`.
        unsafe {
            let state = self.state::<K>(index);
            for lane in (0..width).filter(|_| measured || biased) {
                let of = |part: usize| *state.add(part * width + lane);
                let (maximum, sum, squares) = (of(0), of(2), of(4) - of(5));
                let most_hope = state.add(6 * width + lane);
                if measured && squares * FEW_WEIGHTS > sum * sum && *most_hope > 1.0 {
                    *most_hope = 1.0;
                    again = true;
                }
                tile.careful |= biased && maximum.is_infinite() && self.sees_any(tile.row(lane));
            }
            again |= tile.careful;
            if again {
                self.clear_state::<K>(index, tile);
            }
        }
        again
    }

    /// Whether boolean mask and block table leave a row any of the unit's keys: one that sees none is nothing to be careful about.
    unsafe fn sees_any(&self, row: usize) -> bool {
        let Work { job, unit, span, .. } = *self;
        let (head, query) = self.head_and_query(row);
        let (begin, end) = span.seen_by_any(query, query);
        let mask = job.modifiers.mask.as_ref().map(|mask| mask.row(unit.sequence, head, query));
        let blocks = job.modifiers.blocks.as_ref();
        let blocks = blocks.map(|table| (table.keys(), table.row(unit.sequence, head, query)));
        (begin.max(unit.keys.start)..end.min(unit.keys.end)).any(|key| {
            // SAFETY: masks have a byte for every key.
            mask.is_none_or(|mask| unsafe { *mask.add(key) } != 0)
                && blocks.is_none_or(|(size, row)| row[key / size] != 0)
        })
    }

    unsafe fn clear_state<K: Kernels>(&self, index: usize, tile: &QueryTile) {
        let Work { layout, .. } = *self;
        let width = tile.vectors * K::LANES;
        // SAFETY: as `run_unit`.
        unsafe {
            let output = self.scratch.add(layout.output + index * layout.output_per_tile);
            ptr::write_bytes(output, 0, layout.output_per_tile);
            let state = self.state::<K>(index);
            for lane in 0..width {
                *state.add(lane) = f32::NEG_INFINITY;
                *state.add(2 * width + lane) = 0.0;
                *state.add(4 * width + lane) = 0.0;
                *state.add(5 * width + lane) = 0.0;
            }
        }
    }

    /// Runs the tiles that are not done against every block of keys.
    unsafe fn run_blocks<K: Kernels>(&self, cut: &mut [QueryTile]) {
        let Work { tiles, unit, .. } = *self;
        let mut block = unit.keys.start / tiles.block_kv * tiles.block_kv;
        while block < unit.keys.end {
            // SAFETY: as `run_unit`.
            unsafe { self.run_block::<K>(cut, block) };
            block += tiles.block_kv;
        }
    }

    /// Packs one block of keys and values and runs every tile of the unit against it that is not done.
    unsafe fn run_block<K: Kernels>(&self, cut: &mut [QueryTile], block: usize) {
        let Work { job, tiles, layout, unit, span, scratch } = *self;
        // Rows of the block that any tile can want; the first is rounded down to a whole step.
        let mut begin = unit.keys.start.saturating_sub(block) / K::STEP * K::STEP;
        let mut end = unit.keys.end.min(block + tiles.block_kv) - block;
        let (first, last) = query_span(&span, &unit.rows);
        let clear = span.seen_by_all(first, last);
        let mut all_clear = clear.0 <= block + begin && clear.1 >= block + end;
        // SAFETY: as `run_unit`.
        unsafe {
            for (index, tile) in cut.iter_mut().enumerate() {
                let look = || self.look::<K>(index, tile, block, begin, end);
                tile.look = if tile.done { Look::default() } else { look() };
            }
            if job.modifiers.hide() {
                let none = Look { begin: end, end: begin, hides: false };
                let wanted = cut.iter().map(|tile| tile.look).filter(|look| look.begin < look.end);
                let wanted = wanted.fold(none, |all, look| Look {
                    begin: all.begin.min(look.begin),
                    end: all.end.max(look.end),
                    hides: all.hides || look.hides,
                });
                if wanted.begin >= wanted.end {
                    return;
                }
                (begin, end) = (wanted.begin, wanted.end);
                all_clear &= !wanted.hides;
            }
            let (keys, values) = (self.keys::<K>(block, begin, end), scratch.add(layout.values));
            // Only where some query is masked, or weights are looked at, does it matter whether V is finite.
            let harmless = all_clear && cut.iter().all(|tile| self.care::<K>(tile) == Care::Rounded);
            let finite = self.pack_values::<K>(block, begin, end, values, !harmless) || harmless;
            for (index, tile) in cut.iter().enumerate() {
                if tile.look.begin < tile.look.end {
                    let ahead = [
                        self.next_rows(&job.k, job.shape.dim_qk, block, index, cut.len()),
                        self.next_rows(&job.v, job.shape.dim_v, block, index, cut.len()),
                    ];
                    self.run_tile::<K>(index, tile, block, end, keys, ahead, finite);
                }
            }
        }
    }

    /// One tile against the rows of a block, which end at `end`; `keys` are those of its keys.
    unsafe fn run_tile<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        end: usize,
        keys: (*const f32, usize),
        ahead: [Ahead; 2],
        finite: bool,
    ) {
        let Work { job, layout, scratch, .. } = *self;
        let look = tile.look;
        let width = tile.vectors * K::LANES;
        // SAFETY: as `run_unit`.
        unsafe {
            let (state, hidden) = (self.state::<K>(index), scratch.add(layout.hidden));
            let care = self.care::<K>(tile);
            let mut step = TileStep {
                queries: scratch.add(layout.queries + index * layout.queries_per_tile),
                dim_qk: job.shape.dim_qk.div_ceil(K::PACKED),
                score_scale: job.score_scale(self.unit.sequence, self.unit.kv_head),
                keys: keys.0,
                key_stride: keys.1,
                values: scratch.add(layout.values),
                value_stride: layout.value_stride,
                output: scratch.add(layout.output + index * layout.output_per_tile),
                dim_v: job.shape.dim_v,
                scores: scratch.add(layout.scores),
                start: Start::Nothing,
                care,
                weighed: Weighed { live: (0, 0), heavy: 0 },
                heavy_rows: scratch.add(layout.heavy_rows).cast(),
                key_begin: look.begin,
                key_end: look.end,
                vector_end: tile.vector_end::<K>(&self.span, block),
                old_max: state,
                new_max: state.add(width),
                sum: state.add(2 * width),
                rescale: state.add(3 * width),
                squares: state.add(4 * width),
                hope: if care == Care::Measured {
                    tile.hope(&self.span, &self.unit.keys, block + look.end)
                } else {
                    1.0
                },
                whole_squares: state.add(5 * width),
                most_hope: state.add(6 * width),
                mask: tile.mask(&self.span, block),
                shown: if look.hides { self.shown(index) } else { ptr::null() },
                hidden,
                ahead,
            };
            let masked = look.begin < step.mask.clear_begin || look.end > step.mask.clear_end;
            if job.modifiers.change() {
                step.start = self.start_scores::<K>(index, tile, block, &step);
            }
            K::scores(tile.vectors, &step);
            if job.modifiers.change() {
                self.modify_scores::<K>(index, tile, block, &step);
            }
            step.weighed = K::softmax(tile.vectors, &step);
            if !finite {
                // A weight of zero is multiplied too.
                step.weighed.live = (look.begin, look.end);
            }
            // A pair of values may reach behind what the tile sees.
            let exact = !finite && (masked || look.hides || look.end < end || step.weighed.heavy > 0);
            if exact {
                K::mark_hidden(tile.vectors, &step, hidden);
            }
            K::values(tile.vectors, exact, &step);
        }
    }

    /// What is done about the rounding of a tile's weights.
    fn care<K: Kernels>(&self, tile: &QueryTile) -> Care {
        let choosy = self.span.chunk > 0 || self.job.modifiers.choose_keys();
        if K::PACKED == 1 {
            Care::Rounded
        } else if self.job.precise {
            Care::Whole
        } else if choosy || tile.sees_few_keys(&self.span) {
            Care::Measured
        } else {
            Care::Rounded
        }
    }

    /// Normalises a tile and writes its rows: final ones to the output, those of a split unit to the partials.
    unsafe fn finish_tile<K: Kernels>(&self, index: usize, tile: &QueryTile, partials: &Partials) {
        let Work { job, layout, unit, .. } = *self;
        let (dim_v, width) = (job.shape.dim_v, tile.vectors * K::LANES);
        // SAFETY: as `run_unit`.
        unsafe {
            let state = self.state::<K>(index);
            let output = self.scratch.add(layout.output + index * layout.output_per_tile);
            let staged = self.scratch.add(layout.rows);
            for vector in 0..tile.vectors {
                let at = vector * K::LANES;
                let from = tile.rows.start + at;
                let ends = |lane: usize| (*state.add(at + lane), *state.add(2 * width + at + lane));
                let sink = |row| job.modifiers.sink(|| self.head_and_query(row).0);
                let mut factors = [job.v.scale(unit.sequence, unit.kv_head); MAX_LANES];
                if unit.partial.is_none() {
                    for lane in 0..K::LANES {
                        let (maximum, sum) = ends(lane);
                        factors[lane] *= factor(maximum, sum, sink(tile.row(at + lane)));
                    }
                }
                let columns = output.add(at);
                K::order_outputs(columns, width, dim_v);
                K::transpose_outputs(columns, width, dim_v, factors.as_ptr(), staged, layout.row_stride);
                for row in from..(from + K::LANES).min(tile.rows.end) {
                    let lane = row - from;
                    let src = staged.add(lane * layout.row_stride);
                    if let Some(first) = unit.partial {
                        let (maximum, sum) = ends(lane);
                        partials.put(first + row - unit.rows.start, maximum, sum, src);
                    } else {
                        let (head, query) = self.head_and_query(row);
                        let dst = job.output_row(unit.sequence, head, query);
                        K::narrow_row(job.output, src, dst, dim_v);
                        let (maximum, sum) = ends(lane);
                        job.put_lse(unit.sequence, head, query, || log_sum_exp(maximum, sum, sink(row)));
                    }
                }
            }
        }
    }
}
