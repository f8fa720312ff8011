//! Flash attention over register tiles: the driver of the kernels in `tile`.

use crate::dense::DenseRows;
use crate::hook::TileHook;
use crate::job::{Job, Operand, Shape};
use crate::kernels::Kernels;
use crate::options::FlashTiles;
use crate::pack::{Rows, packed_stride};
use crate::partial::{Partials, factor, log_sum_exp};
use crate::plan::{Unit, query_span};
use crate::query_tile::{Look, QueryTile};
use crate::simd::MAX_LANES;
use crate::span::Span;
use crate::tile::{Ahead, Care, Start, TileStep, Weighed};
use crate::workspace::Carver;
use std::ptr;

/// Where each piece of a thread's scratch memory begins, in floats.
pub(crate) struct Scratch {
    queries: usize,
    queries_per_tile: usize,
    output: usize,
    output_per_tile: usize,
    keys: usize,
    key_stride: usize,
    values: usize,
    value_stride: usize,
    scores: usize,
    scores_per_tile: usize,
    heavy_rows: usize,
    /// What is hidden from whom, as the scores lie.
    hidden: usize,
    rows: usize,
    row_stride: usize,
    /// Values of a block as they are given, where pages are to be packed in pairs.
    together: usize,
    /// Running maximum, its successor, sum, rescale, sum of squares: five vectors' worth per tile.
    state: usize,
    /// Per tile and lane: ALiBi's slope, and the addresses of its rows of bias, mask and block table.
    slopes: usize,
    bias_rows: usize,
    mask_rows: usize,
    block_rows: usize,
    /// Of one tile: what a block table and a boolean mask show, written out, and the addresses of its rows.
    written: usize,
    written_rows: usize,
    pub(crate) floats: usize,
}

impl Scratch {
    /// Lays out scratch for units of up to `rows` rows.
    pub(crate) fn new<K: Kernels>(shape: &Shape, tiles: &FlashTiles, rows: usize) -> Scratch {
        const POINTER: usize = size_of::<*const u8>() / size_of::<f32>();
        let width = K::VECTORS * K::LANES;
        let count = rows.div_ceil(width);
        let whole = |n: usize| n.div_ceil(MAX_LANES) * MAX_LANES;
        let (queries_per_tile, output_per_tile) = (whole(shape.dim_qk) * width, whole(shape.dim_v) * width);
        let (key_stride, value_stride) = (packed_stride(shape.dim_qk), packed_stride(shape.dim_v));
        let row_stride = key_stride.max(value_stride);
        // Matrix tiles take weights up to a whole tile of keys.
        let scores_per_tile = tiles.block_kv.next_multiple_of(K::STEP) * width;
        let mut carver = Carver::default();
        Scratch {
            queries: carver.take(count * queries_per_tile),
            queries_per_tile,
            output: carver.take(count * output_per_tile),
            output_per_tile,
            keys: carver.take(tiles.block_kv * key_stride),
            key_stride,
            values: carver.take(tiles.block_kv * value_stride),
            value_stride,
            scores: carver.take(scores_per_tile * if K::OVERLAPPED { 2 } else { 1 }),
            scores_per_tile,
            heavy_rows: carver.take(if K::PACKED > 1 { tiles.block_kv } else { 0 }),
            rows: carver.take(MAX_LANES * row_stride),
            row_stride,
            together: carver.take(if K::PACKED > 1 { tiles.block_kv * shape.dim_v.div_ceil(2) } else { 0 }),
            state: carver.take(count * 5 * width),
            slopes: carver.take(count * width),
            // And the row behind the last.
            hidden: carver.take((tiles.block_kv + 1) * width),
            bias_rows: carver.take(count * width * POINTER),
            mask_rows: carver.take(count * width * POINTER),
            block_rows: carver.take(count * width * POINTER),
            written: carver.take((width * tiles.block_kv).div_ceil(size_of::<f32>())),
            written_rows: carver.take(width * POINTER),
            floats: carver.floats(),
        }
    }
}

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
            work.clear_state::<K>(index, tile);
            work.find_rows::<K>(index, tile);
        }
        let mut block = unit.keys.start / tiles.block_kv * tiles.block_kv;
        while block < unit.keys.end {
            work.run_block::<K>(&mut cut, block);
            block += tiles.block_kv;
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

    /// A tile's running maximum, its successor, sum, rescale and sum of squares.
    unsafe fn state<K: Kernels>(&self, index: usize) -> *mut f32 {
        // SAFETY: the layout has room for every tile.
        unsafe { self.scratch.add(self.layout.state + index * 5 * K::VECTORS * K::LANES) }
    }

    unsafe fn pack_queries<K: Kernels>(&self, index: usize, tile: &QueryTile) {
        let Work { job, layout, unit, .. } = *self;
        let (shape, width) = (&job.shape, tile.vectors * K::LANES);
        let score_scale = job.score_scale(unit.sequence, unit.kv_head);
        // SAFETY: as `run_unit`.
        unsafe {
            let packed = self.scratch.add(layout.queries + index * layout.queries_per_tile);
            let staged = self.scratch.add(layout.rows);
            for vector in 0..tile.vectors {
                let from = tile.rows.start + vector * K::LANES;
                let until = (from + K::LANES).min(tile.rows.end);
                ptr::write_bytes(staged, 0, K::LANES * layout.row_stride);
                let mut row = from;
                while row < until {
                    // As many rows at once as lie in the same head.
                    let (head, query) = self.head_and_query(row);
                    let count = (until - row).min(self.span.queries - query);
                    let (batch, first) = job.query_place(unit.sequence, query);
                    let rows = Rows {
                        src: job.q.row(batch, head, first),
                        src_stride: job.q.row_stride,
                        rows: count,
                        columns: shape.dim_qk,
                        dst: staged.add((row - from) * layout.row_stride),
                        dst_stride: layout.row_stride,
                    };
                    K::pack_rows(job.q.dtype, &rows);
                    if job.q.scales.is_some() {
                        let mut scales = [1.0; MAX_LANES];
                        for (i, scale) in scales.iter_mut().enumerate().take(count) {
                            *scale = job.q.row_scale(unit.sequence, batch, head, first + i);
                        }
                        K::scale_rows(rows.dst, rows.dst_stride, count, shape.dim_qk, scales.as_ptr());
                    }
                    row += count;
                }
                let dst = packed.add(vector * K::LANES);
                K::transpose_queries(staged, layout.row_stride, shape.dim_qk, score_scale, dst, width);
            }
        }
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
            }
        }
    }

    /// Where each lane's slope, bias and mask are.
    unsafe fn find_rows<K: Kernels>(&self, index: usize, tile: &QueryTile) {
        let Work { job, layout, unit, .. } = *self;
        let modifiers = &job.modifiers;
        let first = index * K::VECTORS * K::LANES;
        // SAFETY: as `run_unit`.
        unsafe {
            if modifiers.alibi() {
                for lane in 0..tile.vectors * K::LANES {
                    let (head, _) = self.head_and_query(tile.row(lane));
                    *self.scratch.add(layout.slopes + first + lane) = modifiers.slope(head);
                }
            }
            for (dense, at) in [(&modifiers.bias, layout.bias_rows), (&modifiers.mask, layout.mask_rows)] {
                let Some(dense) = dense else { continue };
                let rows = self.scratch.add(at).cast::<*const u8>().add(first);
                for lane in 0..tile.vectors * K::LANES {
                    let (head, query) = self.head_and_query(tile.row(lane));
                    *rows.add(lane) = dense.row(unit.sequence, head, query);
                }
            }
            if let Some(table) = &modifiers.blocks {
                let rows = self.scratch.add(layout.block_rows).cast::<*const u8>().add(first);
                for lane in 0..tile.vectors * K::LANES {
                    let (head, query) = self.head_and_query(tile.row(lane));
                    *rows.add(lane) = table.row(unit.sequence, head, query).as_ptr();
                }
            }
        }
    }

    /// A tile's lanes of row addresses that [`Work::find_rows`] put down.
    unsafe fn lane_rows<K: Kernels>(&self, at: usize, index: usize) -> *const *const u8 {
        // SAFETY: the layout has room for every tile.
        unsafe { self.scratch.add(at).cast::<*const u8>().add(index * K::VECTORS * K::LANES) }
    }

    /// The key rows of a block that a tile is run against.
    unsafe fn look<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        begin: usize,
        end: usize,
    ) -> Look {
        let Work { layout, job, .. } = *self;
        let mut look = tile.look::<K>(&self.span, block, begin, end);
        // SAFETY: masks have an element for every key, block tables one for every block of keys.
        unsafe {
            if let Some(table) = job.modifiers.blocks.as_ref().filter(|_| look.begin < look.end) {
                let rows = self.lane_rows::<K>(layout.block_rows, index);
                look = tile.unhide_blocks::<K>(look, block, table.keys(), rows);
            }
            if job.modifiers.mask.is_some() && look.begin < look.end {
                look = tile.unhide::<K>(look, block, self.lane_rows::<K>(layout.mask_rows, index));
            }
        }
        look
    }

    /// Packs one block of keys and values and runs every tile of the unit against it.
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
                tile.look = self.look::<K>(index, tile, block, begin, end);
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
            let (keys, values) = (scratch.add(layout.keys), scratch.add(layout.values));
            self.pack_keys::<K>(block, begin, end, keys);
            // Only where some query is masked, or weights are looked at, does it matter whether V is finite.
            let harmless = all_clear && cut.iter().all(|tile| self.care::<K>(tile) == Care::Rounded);
            let finite = self.pack_values::<K>(block, begin, end, values, !harmless) || harmless;
            let (mut begun, mut place) = (None, 0);
            for (index, tile) in cut.iter().enumerate() {
                if tile.look.begin >= tile.look.end {
                    continue;
                }
                let ahead = [
                    self.next_rows(&job.k, job.shape.dim_qk, block, index, cut.len()),
                    self.next_rows(&job.v, job.shape.dim_v, block, index, cut.len()),
                ];
                let step = self.begin_tile::<K>(index, tile, block, ahead, place);
                if !K::OVERLAPPED {
                    self.end_tile::<K>(index, tile, block, end, step, finite);
                } else if let Some((before, step)) = begun.replace((index, step)) {
                    self.end_tile::<K>(before, &cut[before], block, end, step, finite);
                }
                place = usize::from(K::OVERLAPPED) - place;
            }
            if let Some((last, step)) = begun {
                self.end_tile::<K>(last, &cut[last], block, end, step, finite);
            }
        }
    }

    /// The scores of one tile against the packed rows of a block, in one of the places for them.
    unsafe fn begin_tile<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        ahead: [Ahead; 2],
        place: usize,
    ) -> TileStep {
        let Work { job, layout, scratch, .. } = *self;
        let look = tile.look;
        let width = tile.vectors * K::LANES;
        // SAFETY: as `run_unit`.
        unsafe {
            let state = self.state::<K>(index);
            let mut step = TileStep {
                queries: scratch.add(layout.queries + index * layout.queries_per_tile),
                dim_qk: job.shape.dim_qk.div_ceil(K::PACKED),
                score_scale: job.score_scale(self.unit.sequence, self.unit.kv_head),
                keys: scratch.add(layout.keys),
                key_stride: layout.key_stride,
                values: scratch.add(layout.values),
                value_stride: layout.value_stride,
                output: scratch.add(layout.output + index * layout.output_per_tile),
                dim_v: job.shape.dim_v,
                scores: scratch.add(layout.scores + place * layout.scores_per_tile),
                start: Start::Nothing,
                care: self.care::<K>(tile),
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
                mask: tile.mask(&self.span, block),
                hidden: scratch.add(layout.hidden),
                ahead,
            };
            if job.modifiers.change() || look.hides {
                step.start = self.start_scores::<K>(index, tile, block, &step);
            }
            K::scores(tile.vectors, &step);
            step
        }
    }

    /// What follows the scores of a tile: weights and sums of values. The packed rows end at `end`.
    unsafe fn end_tile<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        end: usize,
        mut step: TileStep,
        finite: bool,
    ) {
        let Work { job, layout, scratch, .. } = *self;
        let look = tile.look;
        let masked = look.begin < step.mask.clear_begin || look.end > step.mask.clear_end;
        // SAFETY: as `run_unit`.
        unsafe {
            if job.modifiers.change() || look.hides {
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
                let mask = self.mask_rows::<K>(index, tile, block);
                K::mark_hidden(tile.vectors, &step, scratch.add(layout.hidden), &mask);
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

    /// Writes into a tile's scores what can be known of them beforehand: of bias, ALiBi and mask the first that there is. A softcap comes before all of these.
    unsafe fn start_scores<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        step: &TileStep,
    ) -> Start {
        let Work { job, layout, .. } = *self;
        let modifiers = &job.modifiers;
        if modifiers.cap > 0.0 {
            return Start::Nothing;
        }
        // SAFETY: as `run_unit`.
        unsafe {
            if let Some(bias) = &modifiers.bias {
                let rows = self.lane_rows::<K>(layout.bias_rows, index);
                K::start_bias(bias.dtype(), tile.vectors, step, &DenseRows { rows, first: block });
                Start::Added
            } else if modifiers.alibi() {
                K::start_alibi(tile.vectors, step, &self.tile_hook::<K>(index, tile, block));
                Start::Added
            } else {
                K::start_limits(tile.vectors, step, &self.mask_rows::<K>(index, tile, block));
                Start::Limits
            }
        }
    }

    /// Softcap and ALiBi of a tile.
    unsafe fn tile_hook<K: Kernels>(&self, index: usize, tile: &QueryTile, block: usize) -> TileHook {
        let Work { job, layout, scratch, .. } = *self;
        let mut slopes = ptr::null();
        if job.modifiers.alibi() {
            // SAFETY: the layout has room for every tile.
            slopes = unsafe { scratch.add(layout.slopes + index * K::VECTORS * K::LANES).cast_const() };
        }
        TileHook { cap: job.modifiers.cap, slopes, position: tile.position(&self.span, block) }
    }

    /// Everything that happens to a tile's scores besides the band and what they were started with.
    unsafe fn modify_scores<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        step: &TileStep,
    ) {
        let Work { job, layout, .. } = *self;
        let modifiers = &job.modifiers;
        let (added, limited) = (step.start == Start::Added, step.start == Start::Limits);
        // SAFETY: as `run_unit`.
        unsafe {
            if modifiers.cap > 0.0 || modifiers.alibi() && (!added || modifiers.bias.is_some()) {
                K::modify(tile.vectors, step, &self.tile_hook::<K>(index, tile, block));
            }
            if let Some(bias) = modifiers.bias.as_ref().filter(|_| !added) {
                let rows = self.lane_rows::<K>(layout.bias_rows, index);
                K::add_bias(bias.dtype(), tile.vectors, step, &DenseRows { rows, first: block });
            }
            if tile.look.hides && !limited {
                K::hide(tile.vectors, step, &self.mask_rows::<K>(index, tile, block));
            }
        }
    }

    /// A tile's rows of the boolean mask, with what a block table hides; null where they hide nothing.
    unsafe fn mask_rows<K: Kernels>(&self, index: usize, tile: &QueryTile, block: usize) -> DenseRows {
        let Work { job, layout, scratch, tiles, .. } = *self;
        if !tile.look.hides {
            return DenseRows { rows: ptr::null(), first: block };
        }
        // SAFETY: the layout has room for every tile, and for the bytes of one.
        unsafe {
            let rows = self.lane_rows::<K>(layout.mask_rows, index);
            let Some(table) = &job.modifiers.blocks else { return DenseRows { rows, first: block } };
            let written = scratch.add(layout.written_rows).cast::<*const u8>();
            let blocks = self.lane_rows::<K>(layout.block_rows, index);
            for lane in 0..tile.vectors * K::LANES {
                let row = scratch.add(layout.written).cast::<u8>().add(lane * tiles.block_kv);
                *written.add(lane) = row;
                for key in tile.look.begin..tile.look.end {
                    let shown = *(*blocks.add(lane)).add((block + key) / table.keys());
                    let masked = job.modifiers.mask.is_some() && *(*rows.add(lane)).add(block + key) == 0;
                    *row.add(key) = if masked { 0 } else { shown };
                }
            }
            DenseRows { rows: written, first: 0 }
        }
    }

    /// Packs the keys of rows `begin..end` of a block, page by page where there are pages.
    unsafe fn pack_keys<K: Kernels>(&self, block: usize, begin: usize, end: usize, packed: *mut f32) {
        let Work { job, layout, unit, .. } = *self;
        let mut row = begin;
        while row < end {
            let (place, count) = job.key_run(unit.sequence, block + row, end - row);
            // SAFETY: as `run_unit`.
            unsafe {
                let rows = Rows {
                    src: job.k.row(place.batch, unit.kv_head, place.row),
                    src_stride: job.k.row_stride,
                    rows: count,
                    columns: job.shape.dim_qk,
                    dst: packed.add(row * layout.key_stride),
                    dst_stride: layout.key_stride,
                };
                K::pack_rows(job.k.dtype, &rows);
                if let Some(scales) = job.k.row_scales(place.batch, unit.kv_head, place.row) {
                    K::scale_rows(rows.dst, rows.dst_stride, count, rows.columns, scales.as_ptr());
                }
            }
            row += count;
        }
    }

    /// The same for values. When `checked`, says whether all are finite.
    unsafe fn pack_values<K: Kernels>(
        &self,
        block: usize,
        begin: usize,
        end: usize,
        packed: *mut f32,
        checked: bool,
    ) -> bool {
        let Work { job, layout, unit, scratch, .. } = *self;
        let (mut row, mut finite) = (begin, true);
        while row < end {
            let (place, count) = job.key_run(unit.sequence, block + row, end - row);
            // SAFETY: as `run_unit`.
            unsafe {
                let mut rows = Rows {
                    src: job.v.row(place.batch, unit.kv_head, place.row),
                    src_stride: job.v.row_stride,
                    rows: count,
                    columns: job.shape.dim_v,
                    dst: packed.add(row / K::PACKED * layout.value_stride),
                    dst_stride: layout.value_stride,
                };
                if K::PACKED > 1 && job.page.is_some() {
                    // Pairs of keys may lie in two pages: rows are brought together first.
                    let together = scratch.add(layout.together).cast::<u8>();
                    let bytes = rows.columns * job.v.dtype.bytes();
                    for i in 0..count {
                        let to = together.add((row - begin + i) * bytes);
                        rows.src.add(i * job.v.row_bytes()).copy_to_nonoverlapping(to, bytes);
                    }
                    row += count;
                    if row < end {
                        continue;
                    }
                    (rows.src, rows.src_stride, rows.rows) = (together, rows.columns, end - begin);
                    rows.dst = packed.add(begin / K::PACKED * layout.value_stride);
                    return K::pack_values(job.v.dtype, checked, &rows);
                }
                finite &= K::pack_values(job.v.dtype, checked, &rows);
                if let Some(scales) = job.v.row_scales(place.batch, unit.kv_head, place.row) {
                    finite &= K::scale_rows(rows.dst, rows.dst_stride, count, rows.columns, scales.as_ptr());
                }
            }
            row += count;
        }
        finite
    }

    /// Rows of the next block to fetch meanwhile: those that lie one behind the other.
    fn next_rows(
        &self,
        tensor: &Operand<'_, *const u8>,
        columns: usize,
        block: usize,
        tile: usize,
        tiles: usize,
    ) -> Ahead {
        let Unit { sequence, kv_head, ref keys, .. } = *self.unit;
        let next = block + self.tiles.block_kv;
        let (mut first, mut rows) = (tensor.data, 0);
        if next < keys.end {
            let (place, count) = self.job.key_run(sequence, next, (keys.end - next).min(self.tiles.block_kv));
            first = tensor.data.wrapping_add(tensor.offset(place.batch, kv_head, place.row));
            rows = count;
        }
        Ahead {
            first,
            row_bytes: columns * tensor.dtype.bytes(),
            stride_bytes: tensor.row_bytes(),
            rows,
            tile,
            tiles,
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
