//! A checked problem as the kernels see it: pointers, types, strides, sizes.

use crate::element::unit;
use evosdpa_core::{DType, Float, Granularity};

/// A tensor's first byte, the elements between neighbours, and what its codes are multiplied with. The innermost stride is 1.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, P> {
    pub(crate) data: P,
    pub(crate) dtype: DType,
    pub(crate) batch_stride: usize,
    pub(crate) head_stride: usize,
    pub(crate) row_stride: usize,
    pub(crate) scales: Option<Scales<'a>>,
}

/// The scales of 8-bit codes.
#[derive(Clone, Copy)]
pub(crate) struct Scales<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) reach: Granularity,
    /// Heads of the tensor, and rows of each.
    pub(crate) heads: usize,
    pub(crate) rows: usize,
}

impl<P> Operand<'_, P> {
    /// Bytes between the first element and the first of a row.
    #[inline]
    pub(crate) fn offset(&self, batch: usize, head: usize, row: usize) -> usize {
        let elements = batch * self.batch_stride + head * self.head_stride + row * self.row_stride;
        elements * self.dtype.bytes()
    }

    /// Bytes from row to row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_stride * self.dtype.bytes()
    }

    /// What all loaded elements of a sequence and head are to be multiplied with.
    pub(crate) fn scale(&self, sequence: usize, head: usize) -> f32 {
        let scale = self.scales.map_or(1.0, |scales| match scales.reach {
            Granularity::Tensor => scales.values[0],
            Granularity::Head => scales.values[sequence * scales.heads + head],
            Granularity::Token => 1.0,
        });
        scale * unit(self.dtype)
    }

    /// What the loaded elements of one row are to be multiplied with.
    pub(crate) fn row_scale(&self, sequence: usize, batch: usize, head: usize, row: usize) -> f32 {
        self.scale(sequence, head) * self.row_scales(batch, head, row).map_or(1.0, |scales| scales[0])
    }

    /// The scales of this row of the tensor and those behind it, where each row has its own.
    pub(crate) fn row_scales(&self, batch: usize, head: usize, row: usize) -> Option<&[f32]> {
        let scales = self.scales.filter(|scales| scales.reach == Granularity::Token)?;
        Some(&scales.values[(batch * scales.heads + head) * scales.rows + row..])
    }
}

impl Operand<'_, *const u8> {
    /// The address of a row, which need not exist.
    #[inline]
    pub(crate) fn row_address(&self, batch: usize, head: usize, row: usize) -> *const u8 {
        self.data.wrapping_add(self.offset(batch, head, row))
    }

    /// # Safety
    /// The indices are within the tensor.
    #[inline]
    pub(crate) unsafe fn row(&self, batch: usize, head: usize, row: usize) -> *const u8 {
        // SAFETY: a valid element's offset is within the allocation.
        unsafe { self.data.add(self.offset(batch, head, row)) }
    }
}

impl Operand<'_, *mut u8> {
    /// # Safety
    /// The indices are within the tensor.
    #[inline]
    pub(crate) unsafe fn row(&self, batch: usize, head: usize, row: usize) -> *mut u8 {
        // SAFETY: a valid element's offset is within the allocation.
        unsafe { self.data.add(self.offset(batch, head, row)) }
    }
}

/// The sizes of a problem and which keys a query sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) batch: usize,
    pub(crate) heads_q: usize,
    pub(crate) heads_kv: usize,
    pub(crate) seq_q: usize,
    pub(crate) seq_kv: usize,
    pub(crate) dim_qk: usize,
    pub(crate) dim_v: usize,
    /// Query `i` sees keys `i + band_lo ..= i + band_hi` that exist.
    pub(crate) band_lo: i64,
    pub(crate) band_hi: i64,
}

impl Shape {
    /// Query heads per key/value head.
    pub(crate) fn group(&self) -> usize {
        self.heads_q / self.heads_kv
    }

    /// The first key and one past the last key seen by at least one of queries `first..=last`.
    pub(crate) fn seen_by_any(&self, first: usize, last: usize) -> (usize, usize) {
        self.clip((first as i64).saturating_add(self.band_lo), (last as i64).saturating_add(self.band_hi))
    }

    /// The same for keys seen by every one of queries `first..=last`.
    pub(crate) fn seen_by_all(&self, first: usize, last: usize) -> (usize, usize) {
        self.clip((last as i64).saturating_add(self.band_lo), (first as i64).saturating_add(self.band_hi))
    }

    fn clip(&self, lo: i64, hi: i64) -> (usize, usize) {
        let end = hi.saturating_add(1).clamp(0, self.seq_kv as i64);
        let begin = lo.clamp(0, end);
        (begin as usize, end as usize)
    }
}

/// One call: operands, the shape, and where the LSE goes.
pub(crate) struct Job<'a> {
    pub(crate) q: Operand<'a, *const u8>,
    pub(crate) k: Operand<'a, *const u8>,
    pub(crate) v: Operand<'a, *const u8>,
    pub(crate) o: Operand<'a, *mut u8>,
    /// `[batch][heads_q][seq_q]`, contiguous; null when not wanted.
    pub(crate) lse: *mut f32,
    pub(crate) shape: Shape,
    pub(crate) scale: f32,
    /// Whether weights must not be rounded to 16 bits.
    pub(crate) precise: bool,
    /// What outputs are rounded to.
    pub(crate) output: Float,
}

// SAFETY: tasks write disjoint rows of `o` and `lse` and only read the others.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    /// Whether queries, keys and values are all bfloat16.
    pub(crate) fn is_bf16(&self) -> bool {
        [self.q.dtype, self.k.dtype, self.v.dtype] == [DType::BF16; 3]
    }

    /// What products of queries and loaded keys are multiplied with to be scores in units of log2.
    pub(crate) fn score_scale(&self, sequence: usize, kv_head: usize) -> f32 {
        self.scale * std::f32::consts::LOG2_E * self.k.scale(sequence, kv_head)
    }

    /// Writes a row's log-sum-exp, if wanted.
    ///
    /// # Safety
    /// The indices are within the tensor; no other thread writes the same row.
    pub(crate) unsafe fn put_lse(&self, batch: usize, head: usize, row: usize, value: f32) {
        if !self.lse.is_null() {
            let at = (batch * self.shape.heads_q + head) * self.shape.seq_q + row;
            // SAFETY: the caller checked the length against the shape.
            unsafe { *self.lse.add(at) = value };
        }
    }
}
