//! The three inner kernels of flash attention: scores, softmax, values.
//!
//! Everything is laid out with **queries in the vector lanes**: the score tile is `Sᵀ[key][query]`, the output tile is
//! `Oᵀ[value column][query]`. A query tile is `NR` vectors wide, and a kernel keeps `MR × NR` accumulators in registers,
//! reading one broadcast scalar of K (or V) per `NR` multiply-adds. So K and V are never transposed, running
//! maxima and sums are plain vectors without any horizontal step, and rescaling is one product per accumulator.
//!
//! Scores are in units of log2: the queries were multiplied by `scale · log2(e)` when they were packed.

use crate::simd::Simd;

/// Which queries of a tile see a key, when not all do.
pub(crate) struct TileMask {
    /// Per lane, the query's index relative to the tile's first query.
    pub(crate) lane_query: *const f32,
    /// Key row `r` of the block is seen by relative queries in `first + r ..= last + r`.
    pub(crate) first: i64,
    pub(crate) last: i64,
    /// Key rows seen by every query of the tile: no mask is applied to these.
    pub(crate) clear_begin: usize,
    pub(crate) clear_end: usize,
}

impl TileMask {
    /// The relative queries that see key row `row`, as exact floats.
    #[inline(always)]
    fn bounds(&self, row: usize) -> (f32, f32) {
        const FAR: i64 = 1 << 20;
        let shift = row as i64;
        let clamp = |x: i64| x.saturating_add(shift).clamp(-FAR, FAR) as f32;
        (clamp(self.first), clamp(self.last))
    }
}

/// What the three kernels share about one query tile against one block of keys.
pub(crate) struct TileStep {
    /// Packed queries, `[dim_qk][NR·LANES]`.
    pub(crate) queries: *const f32,
    pub(crate) dim_qk: usize,
    /// Packed keys of the block, `[key][key_stride]`.
    pub(crate) keys: *const f32,
    pub(crate) key_stride: usize,
    /// Packed values of the block, `[key][value_stride]`.
    pub(crate) values: *const f32,
    pub(crate) value_stride: usize,
    /// Output accumulator, `[dim_v rounded up][NR·LANES]`.
    pub(crate) output: *mut f32,
    pub(crate) dim_v: usize,
    /// Score tile, `[key][NR·LANES]`.
    pub(crate) scores: *mut f32,
    /// Key rows of the block to process. `key_begin` is a multiple of `MR`; rows up to `key_end` rounded up to `MR` are readable.
    pub(crate) key_begin: usize,
    pub(crate) key_end: usize,
    /// Per lane: running maximum before this block, after it, running sum, and the factor between.
    pub(crate) old_max: *mut f32,
    pub(crate) new_max: *mut f32,
    pub(crate) sum: *mut f32,
    pub(crate) rescale: *mut f32,
    pub(crate) mask: TileMask,
}

/// `Sᵀ = K·Qᵀ` for the block's key rows, masked at the edges, with the running maximum updated.
///
/// # Safety
/// The instruction set of `S`; `t` describes valid buffers for tiles of `NR` vectors.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd, const MR: usize, const NR: usize>(t: &TileStep) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let mut maximum = [S::splat(0.0); NR];
        for v in 0..NR {
            maximum[v] = S::load(t.old_max.add(v * S::LANES));
        }
        let mut row = t.key_begin;
        while row < t.key_end {
            let mut acc = [[S::splat(0.0); NR]; MR];
            let key = t.keys.add(row * t.key_stride);
            for c in 0..t.dim_qk {
                let mut q = [S::splat(0.0); NR];
                for v in 0..NR {
                    q[v] = S::load(t.queries.add(c * width + v * S::LANES));
                }
                for r in 0..MR {
                    let k = S::splat(*key.add(r * t.key_stride + c));
                    for v in 0..NR {
                        acc[r][v] = S::fma(k, q[v], acc[r][v]);
                    }
                }
            }
            let valid = (t.key_end - row).min(MR);
            if row < t.mask.clear_begin || row + valid > t.mask.clear_end {
                let hidden = S::splat(f32::NEG_INFINITY);
                for r in 0..MR {
                    let (lo, hi) = t.mask.bounds(row + r);
                    for v in 0..NR {
                        let index = S::load(t.mask.lane_query.add(v * S::LANES));
                        acc[r][v] = S::select_between(index, lo, hi, acc[r][v], hidden);
                    }
                }
            }
            let out = t.scores.add(row * width);
            for r in 0..MR {
                if r < valid {
                    for v in 0..NR {
                        S::store(out.add(r * width + v * S::LANES), acc[r][v]);
                        // NaN is left out here and comes back through the exponential.
                        maximum[v] = S::max(acc[r][v], maximum[v]);
                    }
                }
            }
            row += MR;
        }
        for v in 0..NR {
            S::store(t.new_max.add(v * S::LANES), maximum[v]);
        }
    }
}

/// Scores become weights `2^(s - max)` in place; maximum, sum and rescale factor are brought up to date.
///
/// # Safety
/// As [`scores`], which ran before on the same `t`.
#[inline(always)]
pub(crate) unsafe fn softmax<S: Simd, const NR: usize>(t: &TileStep) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let mut shift = [S::splat(0.0); NR];
        let mut sum = [S::splat(0.0); NR];
        for v in 0..NR {
            // A row that has seen no key yet has maximum -inf; a finite shift keeps -inf - shift at -inf, not NaN.
            shift[v] = S::max(S::load(t.new_max.add(v * S::LANES)), S::splat(f32::MIN));
        }
        for row in t.key_begin..t.key_end {
            let p = t.scores.add(row * width);
            for v in 0..NR {
                let weight = S::exp2(S::sub(S::load(p.add(v * S::LANES)), shift[v]));
                S::store(p.add(v * S::LANES), weight);
                sum[v] = S::add(sum[v], weight);
            }
        }
        for v in 0..NR {
            let at = v * S::LANES;
            let rescale = S::exp2(S::sub(S::load(t.old_max.add(at)), shift[v]));
            S::store(t.rescale.add(at), rescale);
            S::store(t.sum.add(at), S::fma(S::load(t.sum.add(at)), rescale, sum[v]));
            S::store(t.old_max.add(at), S::load(t.new_max.add(at)));
        }
    }
}

/// `Oᵀ = Oᵀ·rescale + Vᵀ·P`, `MR` value columns at a time.
///
/// With `EXACT`, weights of keys a query does not see are not even multiplied: needed only where V holds NaN or
/// infinity, because 0·NaN is NaN.
///
/// # Safety
/// As [`softmax`], which ran before on the same `t`.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd, const MR: usize, const NR: usize, const EXACT: bool>(t: &TileStep) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let mut column = 0;
        while column < t.dim_v {
            let out = t.output.add(column * width);
            let mut acc = [[S::splat(0.0); NR]; MR];
            for v in 0..NR {
                let rescale = S::load(t.rescale.add(v * S::LANES));
                for r in 0..MR {
                    acc[r][v] = S::mul(S::load(out.add(r * width + v * S::LANES)), rescale);
                }
            }
            for row in t.key_begin..t.key_end {
                let weight = t.scores.add(row * width);
                let value = t.values.add(row * t.value_stride + column);
                let mut p = [S::splat(0.0); NR];
                for v in 0..NR {
                    p[v] = S::load(weight.add(v * S::LANES));
                }
                let (lo, hi) = if EXACT { t.mask.bounds(row) } else { (0.0, 0.0) };
                for r in 0..MR {
                    let x = S::splat(*value.add(r));
                    for v in 0..NR {
                        let next = S::fma(x, p[v], acc[r][v]);
                        acc[r][v] = if EXACT {
                            let index = S::load(t.mask.lane_query.add(v * S::LANES));
                            S::select_between(index, lo, hi, next, acc[r][v])
                        } else {
                            next
                        };
                    }
                }
            }
            for r in 0..MR {
                for v in 0..NR {
                    S::store(out.add(r * width + v * S::LANES), acc[r][v]);
                }
            }
            column += MR;
        }
    }
}
