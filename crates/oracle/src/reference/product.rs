//! The two matrix products, written so that the compiler vectorises them, compiled once for each instruction set.

use std::ops::{Add, Div, Mul, Neg, Range, Sub};

use super::panels::Panels;

/// Rows worked on together; with `LANES` columns they fit in vector registers.
pub(super) const ROWS: usize = 4;
/// Columns worked on together.
pub(super) const LANES: usize = 16;

/// The floating-point type that a computation is done in.
pub(super) trait Real:
    Copy
    + Send
    + Sync
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    const ZERO: Self;
    const INFINITY: Self;
    const NAN: Self;

    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn abs(self) -> Self;
    fn is_nan(self) -> bool;

    /// Raw products of `ROWS` queries with the keys in range, `[row][key]`.
    fn scores(q_rows: &[[Self; ROWS]], panels: &Panels<Self>, keys: Range<usize>, scores: &mut [Self]);

    /// `round(Σ weight·v)` over each row's visible keys; with `absolute`, of |v|. Weights outside are zero, and so are those
    /// of `hidden` keys, `[row][key]`, where it is not empty.
    fn weighted_sum(
        weights: &[Self],
        panels: &Panels<Self>,
        visible: &[Range<usize>],
        hidden: &[bool],
        absolute: bool,
        out: &mut [Self],
        round: &(dyn Fn(Self) -> Self + Sync),
    );
}

#[inline(always)]
fn scores_body<R: Real>(q_rows: &[[R; ROWS]], panels: &Panels<R>, keys: Range<usize>, scores: &mut [R]) {
    let stride = panels.score_stride();
    for block in keys.start / LANES..keys.end.div_ceil(LANES) {
        let mut sums = [[R::ZERO; LANES]; ROWS];
        for (q, k) in q_rows.iter().zip(panels.key_block(block)) {
            for r in 0..ROWS {
                for lane in 0..LANES {
                    sums[r][lane] = sums[r][lane] + q[r] * k[lane];
                }
            }
        }
        for r in 0..ROWS {
            scores[r * stride + block * LANES..][..LANES].copy_from_slice(&sums[r]);
        }
    }
}

#[inline(always)]
fn weighted_sum_body<R: Real>(
    weights: &[R],
    panels: &Panels<R>,
    visible: &[Range<usize>],
    hidden: &[bool],
    absolute: bool,
    out: &mut [R],
    round: &(dyn Fn(R) -> R + Sync),
) {
    let (stride, dim_v) = (panels.score_stride(), panels.dim_v());
    let weight_rows: [&[R]; ROWS] = std::array::from_fn(|r| &weights[r * stride..][..stride]);
    let keys = union(visible);
    for block in 0..dim_v.div_ceil(LANES) {
        let values = panels.value_block(block);
        let mut totals = [[R::ZERO; LANES]; ROWS];
        if panels.values_finite() {
            for key in keys.clone() {
                let v = if absolute { values[key].map(Real::abs) } else { values[key] };
                for r in 0..ROWS {
                    for lane in 0..LANES {
                        totals[r][lane] = totals[r][lane] + weight_rows[r][key] * v[lane];
                    }
                }
            }
        } else {
            // Zero times NaN is NaN: a row must not even touch the keys that it does not see.
            for (r, seen) in visible.iter().enumerate() {
                let is_hidden = |key: usize| hidden.get(r * stride + key) == Some(&true);
                for key in seen.clone().filter(|&key| !is_hidden(key)) {
                    for lane in 0..LANES {
                        let v = if absolute { values[key][lane].abs() } else { values[key][lane] };
                        totals[r][lane] = totals[r][lane] + weight_rows[r][key] * v;
                    }
                }
            }
        }
        let columns = LANES.min(dim_v - block * LANES);
        for r in 0..visible.len() {
            for lane in 0..columns {
                out[r * dim_v + block * LANES + lane] = round(totals[r][lane]);
            }
        }
    }
}

/// The keys that any of the rows sees; bands move right with the row, so the ranges leave no gap.
pub(super) fn union(visible: &[Range<usize>]) -> Range<usize> {
    let seen = || visible.iter().filter(|range| !range.is_empty());
    let start = seen().map(|range| range.start).min().unwrap_or(0);
    start..seen().map(|range| range.end).max().unwrap_or(start)
}

macro_rules! real {
    ($ty:ty) => {
        impl Real for $ty {
            const ZERO: Self = 0.0;
            const INFINITY: Self = <$ty>::INFINITY;
            const NAN: Self = <$ty>::NAN;

            fn from_f64(x: f64) -> Self {
                x as $ty
            }

            fn to_f64(self) -> f64 {
                self as f64
            }

            fn exp(self) -> Self {
                self.exp()
            }

            fn ln(self) -> Self {
                self.ln()
            }

            #[inline(always)]
            fn abs(self) -> Self {
                self.abs()
            }

            fn is_nan(self) -> bool {
                self.is_nan()
            }

            fn scores(
                q_rows: &[[Self; ROWS]],
                panels: &Panels<Self>,
                keys: Range<usize>,
                scores: &mut [Self],
            ) {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx2,fma")]
                    fn avx2(q: &[[$ty; ROWS]], panels: &Panels<$ty>, keys: Range<usize>, scores: &mut [$ty]) {
                        scores_body(q, panels, keys, scores);
                    }
                    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                        // SAFETY: both features were just found on this machine.
                        return unsafe { avx2(q_rows, panels, keys, scores) };
                    }
                }
                scores_body(q_rows, panels, keys, scores);
            }

            fn weighted_sum(
                weights: &[Self],
                panels: &Panels<Self>,
                visible: &[Range<usize>],
                hidden: &[bool],
                absolute: bool,
                out: &mut [Self],
                round: &(dyn Fn(Self) -> Self + Sync),
            ) {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx2,fma")]
                    fn avx2(
                        weights: &[$ty],
                        panels: &Panels<$ty>,
                        visible: &[Range<usize>],
                        hidden: &[bool],
                        absolute: bool,
                        out: &mut [$ty],
                        round: &(dyn Fn($ty) -> $ty + Sync),
                    ) {
                        weighted_sum_body(weights, panels, visible, hidden, absolute, out, round);
                    }
                    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                        // SAFETY: both features were just found on this machine.
                        return unsafe { avx2(weights, panels, visible, hidden, absolute, out, round) };
                    }
                }
                weighted_sum_body(weights, panels, visible, hidden, absolute, out, round);
            }
        }
    };
}

real!(f32);
real!(f64);
