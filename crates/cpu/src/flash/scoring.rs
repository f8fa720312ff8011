//! What happens to the scores of a tile besides QKᵀ: which keys it looks at, and the modifiers.

use super::Work;
use crate::dense::DenseRows;
use crate::hook::TileHook;
use crate::kernels::Kernels;
use crate::query_tile::{Look, QueryTile};
use crate::shown::{clear, words};
use crate::tile::{Start, TileStep};
use evosdpa_core::DType;
use std::ptr;

/// # Safety
/// As [`super::run_unit`], of every function.
impl Work<'_> {
    /// Where each lane's slope, bias and mask are.
    pub(super) unsafe fn find_rows<K: Kernels>(&self, index: usize, tile: &QueryTile) {
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
    pub(super) unsafe fn lane_rows<K: Kernels>(&self, at: usize, index: usize) -> *const *const u8 {
        // SAFETY: the layout has room for every tile.
        unsafe { self.scratch.add(at).cast::<*const u8>().add(index * K::VECTORS * K::LANES) }
    }

    /// The key rows of a block that a tile is run against.
    pub(super) unsafe fn look<K: Kernels>(
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
            let table = job.modifiers.blocks.as_ref();
            if let Some(table) = table.filter(|_| look.begin < look.end) {
                let rows = self.lane_rows::<K>(layout.block_rows, index);
                look = tile.unhide_blocks::<K>(look, block, table.keys(), rows);
            }
            let masked = job.modifiers.mask.is_some();
            if masked && look.begin < look.end {
                let rows = self.lane_rows::<K>(layout.mask_rows, index);
                look = tile.unhide::<K>(look, block, rows, self.shown(index));
            }
            if look.hides
                && let Some(table) = table
            {
                self.show_blocks::<K>(index, tile, block, look.end, table.keys(), masked);
            }
        }
        look
    }

    /// The bits of what a tile is shown of a block.
    pub(super) unsafe fn shown(&self, index: usize) -> *mut u32 {
        // SAFETY: the layout has room for every tile.
        unsafe { self.scratch.add(self.layout.shown + index * self.layout.shown_per_tile).cast() }
    }

    /// Clears the bits of the keys before `end` that a block table hides; without a mask all of them are set before.
    unsafe fn show_blocks<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        end: usize,
        size: usize,
        masked: bool,
    ) {
        let lanes = tile.vectors * K::LANES;
        // SAFETY: the layout has room for every tile; tables have a byte for every block of keys.
        unsafe {
            let (bits, rows) = (self.shown(index), self.lane_rows::<K>(self.layout.block_rows, index));
            if !masked {
                ptr::write_bytes(bits, 0xFF, words(end) * lanes);
            }
            for number in block / size..(block + end).div_ceil(size) {
                let from = (number * size).saturating_sub(block);
                let until = ((number + 1) * size - block).min(end);
                for lane in (0..lanes).filter(|&lane| *(*rows.add(lane)).add(number) == 0) {
                    clear(bits.add(lane), lanes, from, until);
                }
            }
        }
    }

    /// Writes into a tile's scores what can be known of them beforehand: a bias, or else ALiBi. A softcap comes before both, and tiles with a
    /// bias beyond what can be written are careful.
    pub(super) unsafe fn start_scores<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        step: &TileStep,
    ) -> Start {
        let modifiers = &self.job.modifiers;
        if modifiers.cap > 0.0 || tile.careful {
            return Start::Nothing;
        }
        // SAFETY: as `run_unit`.
        unsafe {
            let Some(bias) = &modifiers.bias else {
                K::start_alibi(tile.vectors, step, &self.tile_hook::<K>(index, tile, block));
                return Start::Added;
            };
            let rows = self.bias_rows::<K>(index, tile, block);
            if K::WORDS && bias.dtype() == DType::BF16 {
                K::start_words(tile.vectors, step, &rows);
                return Start::Words;
            }
            K::start_bias(bias.dtype(), tile.vectors, step, &rows);
        }
        Start::Added
    }

    /// Softcap and ALiBi of a tile.
    pub(super) unsafe fn tile_hook<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
    ) -> TileHook {
        let Work { job, layout, scratch, .. } = *self;
        let mut slopes = ptr::null();
        if job.modifiers.alibi() {
            // SAFETY: the layout has room for every tile.
            slopes = unsafe { scratch.add(layout.slopes + index * K::VECTORS * K::LANES).cast_const() };
        }
        TileHook { cap: job.modifiers.cap, slopes, position: tile.position(&self.span, block) }
    }

    /// Everything that happens to a tile's scores besides what is hidden and what they were started with.
    pub(super) unsafe fn modify_scores<K: Kernels>(
        &self,
        index: usize,
        tile: &QueryTile,
        block: usize,
        step: &TileStep,
    ) {
        let modifiers = &self.job.modifiers;
        let added = step.start != Start::Nothing;
        // SAFETY: as `run_unit`.
        unsafe {
            if modifiers.cap > 0.0 || modifiers.alibi() && (!added || modifiers.bias.is_some()) {
                K::modify(tile.vectors, step, &self.tile_hook::<K>(index, tile, block));
            }
            if let Some(bias) = modifiers.bias.as_ref().filter(|_| !added) {
                K::add_bias(bias.dtype(), tile.vectors, step, &self.bias_rows::<K>(index, tile, block));
            }
        }
    }

    /// A tile's rows of the bias, and those that are read next: the following tile's, or the first one's of the next block.
    unsafe fn bias_rows<K: Kernels>(&self, index: usize, tile: &QueryTile, block: usize) -> DenseRows {
        let Work { layout, unit, tiles, .. } = *self;
        let follows = tile.rows.end + tile.rows.len() <= unit.rows.end;
        let (next, next_first) = if follows { (index + 1, block) } else { (0, block + tiles.block_kv) };
        // SAFETY: the layout has room for every tile, and the first has as many lanes as any.
        let rows = |index| unsafe { self.lane_rows::<K>(layout.bias_rows, index) };
        DenseRows { rows: rows(index), first: block, next_rows: rows(next), next_first }
    }
}
