//! A checked problem as the kernels see it: pointers, types, strides, sizes.

use crate::element::unit;
use crate::modifiers::Modifiers;
use crate::span::Span;
use evosdpa_core::{DType, Float, Granularity, KeyPlace, Problem, Sequences};

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

impl<'a, P> Operand<'a, P> {
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
    pub(crate) fn row_scales(&self, batch: usize, head: usize, row: usize) -> Option<&'a [f32]> {
        let scales = self.scales.filter(|scales| scales.reach == Granularity::Token)?;
        Some(&scales.values[(batch * scales.heads + head) * scales.rows + row..])
    }
}

impl Operand<'_, *const u8> {
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

/// The sizes that all sequences share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) batch: usize,
    pub(crate) heads_q: usize,
    pub(crate) heads_kv: usize,
    pub(crate) dim_qk: usize,
    pub(crate) dim_v: usize,
    /// Whether different keys may be hidden from the heads that share them.
    pub(crate) heads_apart: bool,
}

impl Shape {
    pub(crate) fn new(problem: &Problem) -> Shape {
        let (sizes, scores) = (problem.sizes(), problem.scores());
        let heads_apart =
            scores.mask.is_some_and(|mask| mask.heads) || scores.blocks.is_some_and(|blocks| blocks.heads);
        Shape {
            batch: sizes.batch,
            heads_q: sizes.heads_q,
            heads_kv: sizes.heads_kv,
            dim_qk: sizes.dim_qk,
            dim_v: sizes.dim_v,
            heads_apart,
        }
    }

    /// Query heads per key/value head.
    pub(crate) fn group(&self) -> usize {
        self.heads_q / self.heads_kv
    }
}

/// One call: operands, sequences, modifiers, and where the LSE goes.
pub(crate) struct Job<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) shape: Shape,
    pub(crate) sequences: Sequences<'a>,
    /// Tokens of a page, where keys lie in pages.
    pub(crate) page: Option<usize>,
    pub(crate) modifiers: Modifiers<'a>,
    pub(crate) q: Operand<'a, *const u8>,
    pub(crate) k: Operand<'a, *const u8>,
    pub(crate) v: Operand<'a, *const u8>,
    pub(crate) o: Operand<'a, *mut u8>,
    /// `[batch][heads_q][rows]` as O has them, contiguous; null when not wanted.
    pub(crate) lse: *mut f32,
    /// Rows of O a head.
    pub(crate) rows_per_head: usize,
    /// Whether weights must not be rounded to 16 bits.
    pub(crate) precise: bool,
    /// What outputs are rounded to.
    pub(crate) output: Float,
}

// SAFETY: tasks write disjoint rows of `o` and `lse` and only read the others.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    /// A sequence's lengths and what its queries see.
    pub(crate) fn span(&self, sequence: usize) -> Span {
        Span::new(self.problem, self.sequences.queries(sequence).len(), self.sequences.keys(sequence))
    }

    /// Where a query of a sequence lies: first and third index into Q and O.
    pub(crate) fn query_place(&self, sequence: usize, query: usize) -> (usize, usize) {
        (self.sequences.query_batch(sequence), self.sequences.queries(sequence).start + query)
    }

    /// Where a key of a sequence lies, and how many of the `most` from it on lie one behind the other.
    pub(crate) fn key_run(&self, sequence: usize, key: usize, most: usize) -> (KeyPlace, usize) {
        let place = self.sequences.key(sequence, key);
        (place, self.page.map_or(most, |page| most.min(page - place.row)))
    }

    /// What QKᵀ of loaded keys is multiplied with to be scores in units of log2.
    pub(crate) fn score_scale(&self, sequence: usize, kv_head: usize) -> f32 {
        self.problem.scale() * std::f32::consts::LOG2_E * self.k.scale(sequence, kv_head)
    }

    /// Writes a query's log-sum-exp, if wanted.
    ///
    /// # Safety
    /// The query is one of the sequence's; no other thread writes the same row.
    #[inline]
    pub(crate) unsafe fn put_lse(
        &self,
        sequence: usize,
        head: usize,
        query: usize,
        value: impl FnOnce() -> f32,
    ) {
        if !self.lse.is_null() {
            let (batch, row) = self.query_place(sequence, query);
            let at = (batch * self.shape.heads_q + head) * self.rows_per_head + row;
            // SAFETY: the caller checked the length against O's rows.
            unsafe { *self.lse.add(at) = value() };
        }
    }

    /// Where a query's row of O lies.
    ///
    /// # Safety
    /// The query is one of the sequence's.
    pub(crate) unsafe fn output_row(&self, sequence: usize, head: usize, query: usize) -> *mut u8 {
        let (batch, row) = self.query_place(sequence, query);
        // SAFETY: by contract.
        unsafe { self.o.row(batch, head, row) }
    }
}
