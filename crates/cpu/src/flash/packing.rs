//! Queries, keys and values on their way into packed tiles.

use super::Work;
use crate::job::Operand;
use crate::kernels::Kernels;
use crate::pack::Rows;
use crate::plan::Unit;
use crate::query_tile::QueryTile;
use crate::simd::MAX_LANES;
use crate::tile::Ahead;
use evosdpa_core::DType;
use std::ptr;

/// # Safety
/// As [`super::run_unit`], of every function.
impl Work<'_> {
    pub(super) unsafe fn pack_queries<K: Kernels>(&self, index: usize, tile: &QueryTile) {
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

    /// Where the keys of rows `begin..end` of a block are, and the floats from row to row: packed now, or in the tensor where they lie there as the score
    /// kernel reads them. It reads a few rows from end to end at a time, so that it does not matter which cache sets these share.
    pub(super) unsafe fn keys<K: Kernels>(
        &self,
        block: usize,
        begin: usize,
        end: usize,
    ) -> (*const f32, usize) {
        let Work { job, layout, unit, .. } = *self;
        let (k, columns) = (&job.k, job.shape.dim_qk);
        // Whole vectors of columns, and whole steps of rows: nothing is read beyond them.
        let as_read = K::PACKED == 1
            && k.dtype == DType::F32
            && k.scales.is_none()
            && k.row_stride == columns
            && k.data.cast::<f32>().is_aligned()
            && columns.is_multiple_of(MAX_LANES)
            && end.is_multiple_of(K::STEP)
            && job.page.is_none();
        // SAFETY: as `run_unit`; without pages the keys of a sequence lie one behind the other.
        unsafe {
            if as_read {
                let (place, _) = job.key_run(unit.sequence, block, end);
                return (k.row(place.batch, unit.kv_head, place.row).cast(), columns);
            }
            let packed = self.scratch.add(layout.keys);
            self.pack_keys::<K>(block, begin, end, packed);
            (packed, layout.key_stride)
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
                K::pack_keys(job.k.dtype, row, &rows);
                if let Some(scales) = job.k.row_scales(place.batch, unit.kv_head, place.row) {
                    K::scale_rows(rows.dst, rows.dst_stride, count, rows.columns, scales.as_ptr());
                }
            }
            row += count;
        }
    }

    /// The same for values. When `checked`, says whether all are finite.
    pub(super) unsafe fn pack_values<K: Kernels>(
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
    pub(super) fn next_rows(
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
}
