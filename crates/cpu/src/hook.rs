//! What happens to scores between QKᵀ and the softmax: softcap and ALiBi here, then bias and boolean masks in `dense`.
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

/// Changes a tile's scores and brings the running maximum up to date.
///
/// # Safety
/// As [`crate::tile::scores`], which ran before on the same `t`; the slopes are null or valid for `t`'s lanes.
#[inline(always)]
pub(crate) unsafe fn modify<S: Simd, const NR: usize>(t: &TileStep, hook: &TileHook) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let mut maximum = [S::splat(0.0); NR];
        for v in 0..NR {
            maximum[v] = S::load(t.old_max.add(v * S::LANES));
        }
        let hidden_score = S::splat(f32::NEG_INFINITY);
        for row in t.key_begin..t.key_end {
            let distance = S::splat((hook.position - row as i64) as f32);
            let banded = row < t.mask.clear_begin || row >= t.mask.clear_end;
            let (lo, hi) = if banded { t.mask.bounds(row) } else { (0.0, 0.0) };
            for v in 0..NR {
                if row >= t.vector_end[v] {
                    continue;
                }
                let at = row * width + v * S::LANES;
                let mut score = S::load(t.scores.add(at));
                if hook.cap > 0.0 {
                    score = softcap::<S>(score, hook.cap);
                }
                if !hook.slopes.is_null() {
                    let away = S::add(S::load(t.mask.lane_query.add(v * S::LANES)), distance);
                    score = S::fma(S::load(hook.slopes.add(v * S::LANES)), S::abs(away), score);
                }
                if banded {
                    let query = S::load(t.mask.lane_query.add(v * S::LANES));
                    score = S::select_between(query, lo, hi, score, hidden_score);
                }
                S::store(t.scores.add(at), score);
                maximum[v] = S::max(score, maximum[v]);
            }
        }
        for v in 0..NR {
            S::store(t.new_max.add(v * S::LANES), maximum[v]);
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
                score = softcap::<S>(score, hook.cap);
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
unsafe fn softcap<S: Simd>(x: S::V, cap: f32) -> S::V {
    // SAFETY: the instruction set of `S`.
    unsafe {
        let small = S::mul(x, S::splat(1.0 / cap));
        if S::exceeds(S::abs(small), S::splat(TANH_NEAR)) {
            return S::mul(tanh::<S>(small), S::splat(cap));
        }
        let u = S::mul(small, small);
        let mut p = S::splat(TANH_NEAR_P[4]);
        for degree in (0..4).rev() {
            p = S::fma(p, u, S::splat(TANH_NEAR_P[degree]));
        }
        S::mul(x, p)
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
                Isa::Avx512 | Isa::Avx512Bf16 => {
                    crate::avx512::Avx512::modify_row(ys.as_mut_ptr(), xs.len(), &hook)
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => crate::avx2::Avx2::modify_row(ys.as_mut_ptr(), xs.len(), &hook),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => crate::neon::Neon::modify_row(ys.as_mut_ptr(), xs.len(), &hook),
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
