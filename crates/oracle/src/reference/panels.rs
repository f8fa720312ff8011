//! One head's keys and values, rearranged so that products run over contiguous memory.

use evosdpa_core::TensorView;

use super::product::{LANES, Real};

/// Keys as `[key block][d][LANES]` and values as `[d block][key][LANES]`, padded with zeros.
pub(super) struct Panels<R> {
    keys: Vec<[R; LANES]>,
    values: Vec<[R; LANES]>,
    seq_kv: usize,
    dim_qk: usize,
    dim_v: usize,
    largest_key_norm: f64,
    values_finite: bool,
}

impl<R: Real> Panels<R> {
    pub(super) fn pack(k: &TensorView<'_>, v: &TensorView<'_>, b: usize, h: usize) -> Self {
        let [_, _, seq_kv, dim_qk] = k.shape();
        let dim_v = v.shape()[3];
        let mut keys = vec![[R::ZERO; LANES]; seq_kv.div_ceil(LANES) * dim_qk];
        let mut values = vec![[R::ZERO; LANES]; dim_v.div_ceil(LANES) * seq_kv];
        let mut largest_key_norm = 0.0f64;
        let mut values_finite = true;
        let mut row = Vec::new();
        for s in 0..seq_kv {
            k.row_f64(b, h, s, &mut row);
            largest_key_norm = largest_key_norm.max(row.iter().map(|x| x * x).sum::<f64>().sqrt());
            for (d, &x) in row.iter().enumerate() {
                keys[s / LANES * dim_qk + d][s % LANES] = R::from_f64(x);
            }
            v.row_f64(b, h, s, &mut row);
            values_finite &= row.iter().all(|x| x.is_finite());
            for (d, &x) in row.iter().enumerate() {
                values[d / LANES * seq_kv + s][d % LANES] = R::from_f64(x);
            }
        }
        Self { keys, values, seq_kv, dim_qk, dim_v, largest_key_norm, values_finite }
    }

    /// `[d][LANES]` for keys `block·LANES ..`.
    pub(super) fn key_block(&self, block: usize) -> &[[R; LANES]] {
        &self.keys[block * self.dim_qk..][..self.dim_qk]
    }

    /// `[key][LANES]` for value columns `block·LANES ..`.
    pub(super) fn value_block(&self, block: usize) -> &[[R; LANES]] {
        &self.values[block * self.seq_kv..][..self.seq_kv]
    }

    pub(super) fn dim_v(&self) -> usize {
        self.dim_v
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
}
