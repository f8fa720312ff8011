//! A checked problem as the kernels see it: typed pointers, strides, sizes.

/// A tensor's first element and the elements between neighbours; the innermost stride is 1.
#[derive(Clone, Copy)]
pub(crate) struct Operand<P> {
    pub(crate) data: P,
    pub(crate) batch_stride: usize,
    pub(crate) head_stride: usize,
    pub(crate) row_stride: usize,
}

impl<P> Operand<P> {
    /// Elements between the first and the first of a row.
    #[inline]
    pub(crate) fn offset(&self, batch: usize, head: usize, row: usize) -> usize {
        batch * self.batch_stride + head * self.head_stride + row * self.row_stride
    }
}

impl<E> Operand<*const E> {
    /// The address of a row, which need not exist.
    #[inline]
    pub(crate) fn row_address(&self, batch: usize, head: usize, row: usize) -> *const E {
        self.data.wrapping_add(self.offset(batch, head, row))
    }

    /// # Safety
    /// The indices are within the tensor.
    #[inline]
    pub(crate) unsafe fn row(&self, batch: usize, head: usize, row: usize) -> *const E {
        // SAFETY: a valid element's offset is within the allocation.
        unsafe { self.data.add(self.offset(batch, head, row)) }
    }
}

impl<E> Operand<*mut E> {
    /// # Safety
    /// The indices are within the tensor.
    #[inline]
    pub(crate) unsafe fn row(&self, batch: usize, head: usize, row: usize) -> *mut E {
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

/// One call: operands of element type `E`, the shape, and where the LSE goes.
pub(crate) struct Job<E> {
    pub(crate) q: Operand<*const E>,
    pub(crate) k: Operand<*const E>,
    pub(crate) v: Operand<*const E>,
    pub(crate) o: Operand<*mut E>,
    /// `[batch][heads_q][seq_q]`, contiguous; null when not wanted.
    pub(crate) lse: *mut f32,
    pub(crate) shape: Shape,
    pub(crate) scale: f32,
}

// SAFETY: tasks write disjoint rows of `o` and `lse` and only read the others.
unsafe impl<E: Sync> Sync for Job<E> {}

impl<E> Job<E> {
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
