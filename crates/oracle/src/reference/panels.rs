//! One head's keys and values, rearranged so that QKᵀ and PV read contiguous memory.

use super::{
    Question,
    gemm::{LANES, Real},
};

/// Keys as `[key block][d][LANES]` and values as `[d block][key][LANES]`, padded with zeros.
pub(super) struct Panels<R> {
    keys: Vec<[R; LANES]>,
    values: Vec<[R; LANES]>,
    seq_kv: usize,
    dim_qk: usize,
    dim_v: usize,
    largest_key_norm: f64,
    largest_value: f64,
    values_finite: bool,
}

impl<R: Real> Panels<R> {
    /// The keys and values of one head of a sequence.
    pub(super) fn pack(question: &Question<'_>, sequence: usize, h: usize) -> Self {
        let Question { k, v, sequences, .. } = question;
        let seq_kv = sequences.keys(sequence);
        let (dim_qk, dim_v) = (k.shape()[3], v.shape()[3]);
        let mut keys = vec![[R::ZERO; LANES]; seq_kv.div_ceil(LANES) * dim_qk];
        let mut values = vec![[R::ZERO; LANES]; dim_v.div_ceil(LANES) * seq_kv];
        let (mut largest_key_norm, mut largest_value) = (0.0f64, 0.0f64);
        let mut values_finite = true;
        let mut rows: [Vec<f64>; LANES] = Default::default();
        for (block, keys) in keys.chunks_exact_mut(dim_qk.max(1)).enumerate() {
            let count = LANES.min(seq_kv - block * LANES);
            for (lane, row) in rows[..count].iter_mut().enumerate() {
                let place = sequences.key(sequence, block * LANES + lane);
                k.row_f64(place.batch, h, place.row, row);
                let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
                // A key that is not finite is hidden, or its rows have no answer to be close to.
                largest_key_norm =
                    if norm.is_finite() { largest_key_norm.max(norm) } else { largest_key_norm };
            }
            for (d, key) in keys.iter_mut().enumerate() {
                for (lane, row) in rows[..count].iter().enumerate() {
                    key[lane] = R::from_f64(row[d]);
                }
            }
        }
        let row = &mut rows[0];
        for s in 0..seq_kv {
            let place = sequences.key(sequence, s);
            v.row_f64(place.batch, h, place.row, row);
            for (block, part) in row.chunks(LANES).enumerate() {
                let into = &mut values[block * seq_kv + s];
                for (into, &x) in into.iter_mut().zip(part) {
                    *into = R::from_f64(x);
                    values_finite &= x.is_finite();
                    largest_value = if x.is_finite() { largest_value.max(x.abs()) } else { largest_value };
                }
            }
        }
        Self { keys, values, seq_kv, dim_qk, dim_v, largest_key_norm, largest_value, values_finite }
    }

    /// `[d][LANES]` for keys `block·LANES ..`.
    pub(super) fn key_block(&self, block: usize) -> &[[R; LANES]] {
        &self.keys[block * self.dim_qk..][..self.dim_qk]
    }

    /// `[key][LANES]` for value columns `block·LANES ..`.
    pub(super) fn value_block(&self, block: usize) -> &[[R; LANES]] {
        &self.values[block * self.seq_kv..][..self.seq_kv]
    }

    /// Blocks of value columns.
    pub(super) fn value_blocks(&self) -> usize {
        self.dim_v.div_ceil(LANES)
    }

    /// Elements between two rows of scores: the keys, padded to whole blocks.
    pub(super) fn score_stride(&self) -> usize {
        self.seq_kv.next_multiple_of(LANES)
    }

    /// Whether no value is NaN or infinite.
    pub(super) fn values_finite(&self) -> bool {
        self.values_finite
    }

    pub(super) fn largest_key_norm(&self) -> f64 {
        self.largest_key_norm
    }

    /// Of the finite ones.
    pub(super) fn largest_value(&self) -> f64 {
        self.largest_value
    }
}
