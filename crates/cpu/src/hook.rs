//! What happens to scores between QKᵀ and the softmax: softcap, ALiBi, bias and boolean masks, in this order.
//!
//! A pass of its own over a score tile, which lies in the first-level cache: the kernels of plain problems know nothing of it. Scores
//! are in units of log2 here, and so are cap, slopes and bias.

use crate::element::Element;
use crate::simd::{MAX_LANES, Simd};
use crate::tile::TileStep;
use std::f32::consts::LOG2_E;

/// What is done to the scores of a query tile against a block of keys. A null pointer leaves its part out.
pub(crate) struct TileHook {
    /// `cap · log2 e`; 0 without a softcap.
    pub(crate) cap: f32,
    /// Per lane, `-slope · log2 e`.
    pub(crate) slopes: *const f32,
    /// The position of the tile's first query relative to the block's first key.
    pub(crate) position: i64,
    /// The bias as it is given, `[key][NR·LANES]`.
    pub(crate) bias: *const f32,
    /// 1 where the boolean mask hides a key, else 0, `[key][NR·LANES]`.
    pub(crate) hidden: *const f32,
}

/// Changes a tile's scores and brings the running maximum up to date.
///
/// # Safety
/// As [`crate::tile::scores`], which ran before on the same `t`; the hook's pointers are null or valid for `t`'s rows and lanes.
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
                    score = S::fma(S::load(hook.slopes.add(v * S::LANES)), abs::<S>(away), score);
                }
                if !hook.bias.is_null() {
                    score = biased::<S>(score, S::load(hook.bias.add(at)));
                }
                if !hook.hidden.is_null() {
                    score = S::select_between(S::load(hook.hidden.add(at)), 0.0, 0.0, score, hidden_score);
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

/// Marks with 1 what the band and chunks hide in a tile of `[key][NR·LANES]`, and all of the row behind the last, which may be the last one's
/// partner in a pair. What the boolean mask hides is there already, or `clear` says that there is none.
///
/// # Safety
/// The instruction set of `S`; `t` describes valid buffers for tiles of `NR` vectors, of which `hidden` is one.
#[inline(always)]
pub(crate) unsafe fn mark_hidden<S: Simd, const NR: usize>(t: &TileStep, hidden: *mut f32, clear: bool) {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        for row in t.key_begin..t.key_end {
            let banded = row < t.mask.clear_begin || row >= t.mask.clear_end;
            let (lo, hi) = t.mask.bounds(row);
            for v in 0..NR {
                let p = hidden.add((row * NR + v) * S::LANES);
                let mut mark = if clear { S::splat(0.0) } else { S::load(p) };
                if banded {
                    let query = S::load(t.mask.lane_query.add(v * S::LANES));
                    mark = S::select_between(query, lo, hi, mark, S::splat(1.0));
                }
                S::store(p, mark);
            }
        }
        for v in 0..NR {
            S::store(hidden.add((t.key_end * NR + v) * S::LANES), S::splat(1.0));
        }
    }
}

/// One vector's rows of a bias or mask, to be turned into columns of a tile.
pub(crate) struct Turned {
    /// Each lane's row, and the first of its elements that is wanted.
    pub(crate) rows: *const *const u8,
    pub(crate) first: usize,
    pub(crate) keys: usize,
    /// `[key][width]`, with room for `keys` rounded up to whole vectors.
    pub(crate) tile: *mut f32,
    pub(crate) width: usize,
}

/// Turns `LANES` rows along the keys into the layout of a score tile.
///
/// # Safety
/// The instruction set of `S`; all of `a` valid, rows for `keys` elements.
#[inline(always)]
pub(crate) unsafe fn turn<S: Simd, E: Element>(a: &Turned) {
    let mut staged = [0.0f32; MAX_LANES * AT_ONCE];
    // SAFETY: in bounds by this function's contract.
    unsafe {
        for base in (0..a.keys).step_by(AT_ONCE) {
            let count = (a.keys - base).min(AT_ONCE);
            // Row by row: rows may lie a power of two apart, where few of them fit into the cache together.
            for lane in 0..S::LANES {
                let row = (*a.rows.add(lane)).cast::<E>().add(a.first + base);
                let dst = staged.as_mut_ptr().add(lane * AT_ONCE);
                fetch_next::<S>(row.cast(), size_of::<E>());
                for at in (0..count / S::LANES * S::LANES).step_by(S::LANES) {
                    S::store(dst.add(at), E::load::<S>(row.add(at)));
                }
                if !count.is_multiple_of(S::LANES) {
                    let at = count / S::LANES * S::LANES;
                    S::store(dst.add(at), E::load_first::<S>(row.add(at), count - at));
                }
            }
            for at in (0..count).step_by(S::LANES) {
                let dst = a.tile.add((base + at) * a.width);
                S::transpose(staged.as_ptr().add(at), AT_ONCE, dst, a.width);
            }
        }
    }
}

/// Keys that rows of a bias or mask are read for at once; a multiple of every vector.
const AT_ONCE: usize = 64;

/// Fetches what lies [`AT_ONCE`] elements behind `p`: the next block of keys.
#[inline(always)]
unsafe fn fetch_next<S: Simd>(p: *const u8, element_bytes: usize) {
    for line in (0..AT_ONCE * element_bytes).step_by(64) {
        // SAFETY: the instruction set of `S`; a prefetch reads nothing.
        unsafe { S::prefetch(p.wrapping_add(AT_ONCE * element_bytes + line)) };
    }
}

/// What a boolean mask leaves of some keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    /// From the first to one past the last that it shows to any row; empty where it shows none.
    pub(crate) begin: usize,
    pub(crate) end: usize,
    /// Whether it hides any key from any row.
    pub(crate) hides: bool,
}

/// Looks through keys `first .. first + keys` of `lanes` rows of a mask. Begin and end count from `first`.
///
/// # Safety
/// The instruction set of `S`; rows valid for all of these keys.
#[inline(always)]
pub(crate) unsafe fn scan<S: Simd>(rows: *const *const u8, lanes: usize, first: usize, keys: usize) -> Shown {
    let mut shown = Shown { begin: keys, end: 0, hides: false };
    for base in (0..keys).step_by(AT_ONCE) {
        let count = (keys - base).min(AT_ONCE);
        let (mut any, mut least) = ([0u8; AT_ONCE], [u8::MAX; AT_ONCE]);
        let mut before = std::ptr::null();
        for lane in 0..lanes {
            // SAFETY: in bounds by this function's contract.
            unsafe {
                let row = *rows.add(lane);
                // Neighbours may share a row.
                if std::mem::replace(&mut before, row) == row {
                    continue;
                }
                let row = row.add(first + base);
                S::prefetch(row.wrapping_add(AT_ONCE));
                if count == AT_ONCE {
                    // A length that is known becomes vectors.
                    let bytes = *row.cast::<[u8; AT_ONCE]>();
                    for j in 0..AT_ONCE {
                        any[j] |= bytes[j];
                        least[j] = least[j].min(bytes[j]);
                    }
                } else {
                    for j in 0..count {
                        any[j] |= *row.add(j);
                        least[j] = least[j].min(*row.add(j));
                    }
                }
            }
        }
        shown.hides |= least[..count].contains(&0);
        if let Some(at) = any[..count].iter().position(|byte| *byte != 0) {
            shown.begin = shown.begin.min(base + at);
            let hidden = any[..count].iter().rev().take_while(|byte| **byte == 0).count();
            shown.end = base + count - hidden;
        }
    }
    shown
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

/// Beyond this a bias is infinite in units of log2.
const BIAS_END: f32 = f32::MAX / 1.5;

/// A score with its bias. A finite bias stays finite: rows that a model fills with the lowest number are means, not nothing.
#[inline(always)]
unsafe fn biased<S: Simd>(score: S::V, bias: S::V) -> S::V {
    // SAFETY: the instruction set of `S`.
    unsafe {
        let end = S::splat(-BIAS_END);
        let near = S::select_between(bias, f32::MIN, -BIAS_END, end, bias);
        let near = S::select_between(near, BIAS_END, f32::MAX, S::sub(S::splat(0.0), end), near);
        S::fma(near, S::splat(LOG2_E), score)
    }
}

#[inline(always)]
unsafe fn abs<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the instruction set of `S`.
    unsafe { S::max(S::sub(S::splat(0.0), x), x) }
}

/// `cap · tanh(x / cap)`; NaN stays NaN.
#[inline(always)]
unsafe fn softcap<S: Simd>(x: S::V, cap: f32) -> S::V {
    // SAFETY: the instruction set of `S`.
    unsafe { S::mul(tanh::<S>(S::mul(x, S::splat(1.0 / cap))), S::splat(cap)) }
}

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

    #[test]
    fn a_scan_finds_what_a_mask_shows() {
        let scan = |rows: &[Vec<u8>], first: usize, keys: usize| {
            let rows: Vec<*const u8> = rows.iter().map(|row| row.as_ptr()).collect();
            // SAFETY: the rows are as long as the keys asked for.
            unsafe { Portable::scan(rows.as_ptr(), rows.len(), first, keys) }
        };
        for keys in [3, 64, 70, 200] {
            let hidden = vec![0u8; keys + 5];
            let shown = scan(&[hidden.clone(), hidden.clone()], 5, keys);
            assert!(shown.begin >= shown.end && shown.hides, "{shown:?}");
            let all = vec![7u8; keys + 5];
            assert_eq!(scan(&[all.clone(), all], 5, keys), Shown { begin: 0, end: keys, hides: false });
            let (mut one, mut other) = (hidden.clone(), hidden);
            (one[5 + 1], other[5 + keys - 1]) = (1, 255);
            assert_eq!(scan(&[one, other], 5, keys), Shown { begin: 1, end: keys, hides: true });
        }
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
