//! What happens to scores between QKᵀ and the softmax: softcap and ALiBi here, then a bias in `dense`.
//!
//! Passes of their own over a score tile, which lies in the first-level cache: the kernels of plain problems know nothing of them. Scores
//! are in units of log2 here, and so are cap and slopes.

use crate::dense::biased;
use crate::simd::Simd;
use crate::tile::TileStep;

/// What is done to the scores of a query tile against a block of keys.
pub(crate) struct TileHook {
    /// `cap · log2 e`; 0 without a softcap.
    pub(crate) cap: f32,
    /// Per lane, `-slope · log2 e`; null without ALiBi.
    pub(crate) slopes: *const f32,
    /// The position of the tile's first query relative to the block's first key.
    pub(crate) position: i64,
}

/// Fills a tile with ALiBi: [`crate::tile::Start::Added`].
///
/// # Safety
/// As [`crate::tile::scores`]; the slopes are valid for `t`'s lanes.
#[inline(always)]
pub(crate) unsafe fn start_alibi<S: Simd, const NR: usize>(t: &TileStep, hook: &TileHook) {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let zero = S::splat(0.0);
        let (mut position, mut slope) = ([zero; NR], [zero; NR]);
        for v in 0..NR {
            let lane = S::load(t.mask.lane_query.add(v * S::LANES));
            position[v] = S::add(lane, S::splat(hook.position as f32));
            slope[v] = S::load(hook.slopes.add(v * S::LANES));
        }
        for row in t.key_begin..t.key_end {
            let key = S::splat(row as f32);
            for v in 0..NR {
                let bias = S::mul(slope[v], S::abs(S::sub(position[v], key)));
                S::store(t.scores.add((row * NR + v) * S::LANES), bias);
            }
        }
    }
}

/// Changes a tile's scores and brings the running maximum up to date. What they were started with is not changed again.
///
/// # Safety
/// As [`crate::tile::scores`], which ran before on the same `t`; the slopes are null or valid for `t`'s lanes.
#[inline(always)]
pub(crate) unsafe fn modify<S: Simd, const NR: usize>(t: &TileStep, hook: &TileHook) {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let mut maximum = [S::splat(0.0); NR];
        for v in 0..NR {
            maximum[v] = S::load(t.old_max.add(v * S::LANES));
        }
        // Rows that every query sees need no mask.
        let clear_end = t.mask.clear_end.clamp(t.key_begin, t.key_end);
        let clear_begin = t.mask.clear_begin.clamp(t.key_begin, clear_end);
        if hook.slopes.is_null() {
            modify_rows::<S, NR, false, false>(t, hook, t.key_begin, clear_begin, &mut maximum);
            modify_rows::<S, NR, false, true>(t, hook, clear_begin, clear_end, &mut maximum);
            modify_rows::<S, NR, false, false>(t, hook, clear_end, t.key_end, &mut maximum);
        } else {
            modify_rows::<S, NR, true, false>(t, hook, t.key_begin, t.key_end, &mut maximum);
        }
        for v in 0..NR {
            S::store(t.new_max.add(v * S::LANES), maximum[v]);
        }
    }
}

/// Key rows `begin..end`, with `CLEAR` such that every query sees them.
#[inline(always)]
unsafe fn modify_rows<S: Simd, const NR: usize, const ALIBI: bool, const CLEAR: bool>(
    t: &TileStep,
    hook: &TileHook,
    begin: usize,
    end: usize,
    maximum: &mut [S::V; NR],
) {
    for row in begin..end {
        // SAFETY: in bounds by the contract of `modify`.
        unsafe {
            let at = t.scores.add(row * NR * S::LANES);
            let mut score = [S::splat(0.0); NR];
            for v in 0..NR {
                score[v] = S::load(at.add(v * S::LANES));
            }
            if hook.cap > 0.0 {
                score = softcaps::<S, NR>(score, hook.cap);
            }
            let distance = S::splat((hook.position - row as i64) as f32);
            let (lo, hi) = if CLEAR { (0.0, 0.0) } else { t.mask.bounds(row) };
            for v in 0..NR {
                if !CLEAR && row >= t.vector_end[v] {
                    continue;
                }
                if ALIBI || !CLEAR {
                    let query = S::load(t.mask.lane_query.add(v * S::LANES));
                    if ALIBI {
                        let slope = S::load(hook.slopes.add(v * S::LANES));
                        score[v] = S::fma(slope, S::abs(S::add(query, distance)), score[v]);
                    }
                    if !CLEAR && (row < t.mask.clear_begin || row >= t.mask.clear_end) {
                        score[v] = S::select_between(query, lo, hi, score[v], S::splat(f32::NEG_INFINITY));
                    }
                }
                score[v] = t.hide::<S, NR>(row, v, score[v]);
                S::store(at.add(v * S::LANES), score[v]);
                maximum[v] = S::max(score[v], maximum[v]);
            }
        }
    }
}

/// What is done to one row of scores, one of each key.
pub(crate) struct RowHook {
    /// `cap · log2 e`; 0 without a softcap.
    pub(crate) cap: f32,
    /// `-slope · log2 e`.
    pub(crate) slope: f32,
    /// How far each key is from the query; null without ALiBi.
    pub(crate) distance: *const f32,
    /// Each key's bias as it is given; null without.
    pub(crate) bias: *const f32,
}

/// Changes a row of scores; those past `keys` up to a whole vector become -inf.
///
/// # Safety
/// The instruction set of `S`; `scores` and the hook's pointers that are not null valid for `keys` rounded up to whole vectors.
#[inline(always)]
pub(crate) unsafe fn modify_row<S: Simd>(scores: *mut f32, keys: usize, hook: &RowHook) {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        for at in (0..keys).step_by(S::LANES) {
            let mut score = S::load(scores.add(at));
            if hook.cap > 0.0 {
                [score] = softcaps::<S, 1>([score], hook.cap);
            }
            if !hook.distance.is_null() {
                score = S::fma(S::splat(hook.slope), S::load(hook.distance.add(at)), score);
            }
            if !hook.bias.is_null() {
                score = biased::<S>(score, S::load(hook.bias.add(at)));
            }
            S::store(scores.add(at), score);
        }
        for past in keys..keys.div_ceil(S::LANES) * S::LANES {
            *scores.add(past) = f32::NEG_INFINITY;
        }
    }
}

/// `cap · tanh(x / cap)`; NaN stays NaN.
#[inline(always)]
unsafe fn softcaps<S: Simd, const N: usize>(x: [S::V; N], cap: f32) -> [S::V; N] {
    // SAFETY: the instruction set of `S`.
    unsafe {
        let zero = S::splat(0.0);
        let (mut small, mut square, mut y, mut far) = ([zero; N], [zero; N], [zero; N], zero);
        for v in 0..N {
            small[v] = S::mul(x[v], S::splat(1.0 / cap));
            square[v] = S::mul(small[v], small[v]);
            // One look at all of them: a sum of squares keeps infinity and NaN.
            far = S::add(far, square[v]);
        }
        let near = !S::exceeds(far, S::splat(TANH_NEAR * TANH_NEAR));
        for v in 0..N {
            if near {
                let mut p = S::splat(TANH_NEAR_P[4]);
                for degree in (0..4).rev() {
                    p = S::fma(p, square[v], S::splat(TANH_NEAR_P[degree]));
                }
                y[v] = S::mul(x[v], p);
            } else {
                y[v] = S::mul(tanh::<S>(small[v]), S::splat(cap));
            }
        }
        y
    }
}

/// Most scores of a model are this near to zero beside its cap.
const TANH_NEAR: f32 = 0.6;

/// `tanh x ≈ x · P(x²)` up to [`TANH_NEAR`], lowest degree first: fitted for the smallest relative error, 7.3e-8.
const TANH_NEAR_P: [f32; 5] = [0.999_999_94, -0.333_323_1, 0.133_101_73, -0.052_101_478, 0.015_475_425];

/// Beyond this the hyperbolic tangent is 1 in f32.
const TANH_END: f32 = 9.1;

/// `tanh x ≈ x · P(x²) / Q(x²)` up to [`TANH_END`], lowest degree first: fitted for the smallest relative error, 2.3e-8.
const TANH_P: [f32; 5] = [0.999_999_98, 0.133_745_34, 3.487_878_5e-3, 2.048_221_6e-5, 1.317_879_5e-8];
const TANH_Q: [f32; 5] = [1.0, 0.467_078_48, 2.584_765e-2, 3.273_027e-4, 7.704_599_4e-7];

/// The hyperbolic tangent to within a few ulp; NaN stays NaN.
#[inline(always)]
unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the instruction set of `S`.
    unsafe {
        // The maximum keeps its second operand where that is NaN.
        let zero = S::splat(0.0);
        let x = S::max(S::splat(-TANH_END), x);
        let x = S::sub(zero, S::max(S::splat(-TANH_END), S::sub(zero, x)));
        let u = S::mul(x, x);
        let (mut p, mut q) = (S::splat(TANH_P[4]), S::splat(TANH_Q[4]));
        for degree in (0..4).rev() {
            p = S::fma(p, u, S::splat(TANH_P[degree]));
            q = S::fma(q, u, S::splat(TANH_Q[degree]));
        }
        S::div(S::mul(x, p), q)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::kernels::Kernels;
    use crate::portable::Portable;
    use crate::simd::MAX_LANES;

    /// `cap · tanh(x / cap)` of many values.
    fn softcap_of(isa: Isa, xs: &[f32], cap: f32) -> Vec<f32> {
        let mut ys = xs.to_vec();
        ys.resize(xs.len().next_multiple_of(MAX_LANES), 0.0);
        let hook = RowHook { cap, slope: 0.0, distance: std::ptr::null(), bias: std::ptr::null() };
        // SAFETY: only instruction sets of this machine are asked for.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => {
                    crate::avx512::Avx512::modify_row(ys.as_mut_ptr(), xs.len(), &hook)
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => crate::avx2::Avx2::modify_row(ys.as_mut_ptr(), xs.len(), &hook),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon | Isa::NeonBf16 => crate::neon::Neon::modify_row(ys.as_mut_ptr(), xs.len(), &hook),
                _ => Portable::modify_row(ys.as_mut_ptr(), xs.len(), &hook),
            }
        }
        ys.truncate(xs.len());
        ys
    }

    /// Relative to the result, so that a cap far above all scores leaves them as they are.
    #[test]
    fn softcap_is_within_a_few_ulp_for_any_cap() {
        let sizes = (0..60_000).map(|i| 1e-6 * f32::powf(2.0, i as f32 * 25.0 / 60_000.0));
        let xs: Vec<f32> = sizes.flat_map(|x| [x, -x]).collect();
        for (isa, cap) in
            Isa::available().into_iter().flat_map(|isa| [0.5, 1.0, 30.0, 1e6].map(|cap| (isa, cap)))
        {
            let mut worst = 0.0f64;
            for (x, y) in xs.iter().zip(softcap_of(isa, &xs, cap)) {
                let want = f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh();
                worst = worst.max((f64::from(y) - want).abs() / want.abs());
            }
            assert!(worst <= 5.0 * f64::from(f32::EPSILON), "{isa} {cap}: {worst}");
            let ends = softcap_of(isa, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0], cap);
            assert!((ends[0] - cap).abs() <= cap * 1e-6 && ends[1] == -ends[0], "{isa}: {ends:?}");
            assert!(ends[2].is_nan() && ends[3] == 0.0, "{isa}: {ends:?}");
        }
    }
}
