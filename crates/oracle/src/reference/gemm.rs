//! QKᵀ and PV, written so that the compiler vectorises them, compiled once for each instruction set.

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

    /// `self·a + b`, rounded once.
    fn fused(self, a: Self, b: Self) -> Self;

    /// `ROWS` rows of QKᵀ for the keys in range, `[row][key]`. Whole blocks of `LANES` keys are written.
    fn scores(q_rows: &[[Self; ROWS]], panels: &Panels<Self>, keys: Range<usize>, scores: &mut [Self]);

    /// Adds `Σ weight·v` over the keys in range to `[row][column]` of `sums`, whose rows are padded to whole blocks of
    /// `LANES`; with `absolute`, of |v|. For values that are all finite.
    fn weighted_sum(
        weights: [&[Self]; ROWS],
        panels: &Panels<Self>,
        keys: Range<usize>,
        absolute: bool,
        sums: &mut [Self],
    );
}

/// `x + a·b`: in one step where the instruction set has one, else in two.
#[inline(always)]
fn accumulate<R: Real, const FUSED: bool>(x: R, a: R, b: R) -> R {
    if FUSED { a.fused(b, x) } else { x + a * b }
}

/// `WIDTH` columns at a time: as many as the sums of `ROWS` rows leave registers for.
#[inline(always)]
fn scores_body<R: Real, const WIDTH: usize, const FUSED: bool>(
    q_rows: &[[R; ROWS]],
    panels: &Panels<R>,
    keys: Range<usize>,
    scores: &mut [R],
) {
    let stride = panels.score_stride();
    for block in keys.start / LANES..keys.end.div_ceil(LANES) {
        for part in (0..LANES).step_by(WIDTH) {
            let mut sums = [[R::ZERO; WIDTH]; ROWS];
            for (q, k) in q_rows.iter().zip(panels.key_block(block)) {
                let k = &k[part..part + WIDTH];
                for r in 0..ROWS {
                    for lane in 0..WIDTH {
                        sums[r][lane] = accumulate::<R, FUSED>(sums[r][lane], q[r], k[lane]);
                    }
                }
            }
            for r in 0..ROWS {
                scores[r * stride + block * LANES + part..][..WIDTH].copy_from_slice(&sums[r]);
            }
        }
    }
}

#[inline(always)]
fn weighted_sum_body<R: Real, const WIDTH: usize, const FUSED: bool>(
    weights: [&[R]; ROWS],
    panels: &Panels<R>,
    keys: Range<usize>,
    absolute: bool,
    sums: &mut [R],
) {
    let (blocks, weights) = (panels.value_blocks(), weights.map(|row| &row[keys.clone()]));
    for block in 0..blocks {
        let values = &panels.value_block(block)[keys.clone()];
        for part in (0..LANES).step_by(WIDTH) {
            let at = |r: usize| (r * blocks + block) * LANES + part;
            let mut totals = [[R::ZERO; WIDTH]; ROWS];
            for r in 0..ROWS {
                totals[r].copy_from_slice(&sums[at(r)..][..WIDTH]);
            }
            for (key, v) in values.iter().enumerate() {
                let mut columns = [R::ZERO; WIDTH];
                columns.copy_from_slice(&v[part..part + WIDTH]);
                let v = if absolute { columns.map(Real::abs) } else { columns };
                for r in 0..ROWS {
                    for lane in 0..WIDTH {
                        totals[r][lane] = accumulate::<R, FUSED>(totals[r][lane], weights[r][key], v[lane]);
                    }
                }
            }
            for r in 0..ROWS {
                sums[at(r)..][..WIDTH].copy_from_slice(&totals[r]);
            }
        }
    }
}

/// The keys that any of the rows sees; between two ranges there may be keys that none does.
pub(super) fn union(visible: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    visible
        .filter(|range| !range.is_empty())
        .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
        .unwrap_or(0..0)
}

macro_rules! real {
    ($ty:ty, $avx2_width:literal) => {
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

            #[inline(always)]
            fn fused(self, a: Self, b: Self) -> Self {
                self.mul_add(a, b)
            }

            fn scores(
                q_rows: &[[Self; ROWS]],
                panels: &Panels<Self>,
                keys: Range<usize>,
                scores: &mut [Self],
            ) {
                type Args<'a> = (&'a [[$ty; ROWS]], &'a Panels<$ty>, Range<usize>, &'a mut [$ty]);
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx512f,avx2,fma")]
                    fn avx512((q, panels, keys, scores): Args<'_>) {
                        scores_body::<$ty, LANES, true>(q, panels, keys, scores);
                    }
                    #[target_feature(enable = "avx2,fma")]
                    fn avx2((q, panels, keys, scores): Args<'_>) {
                        scores_body::<$ty, $avx2_width, true>(q, panels, keys, scores);
                    }
                    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                        let args = (q_rows, panels, keys, scores);
                        if is_x86_feature_detected!("avx512f") {
                            // SAFETY: the features were just found on this machine.
                            return unsafe { avx512(args) };
                        }
                        // SAFETY: both features were just found on this machine.
                        return unsafe { avx2(args) };
                    }
                }
                let (q, panels, keys, scores): Args<'_> = (q_rows, panels, keys, scores);
                scores_body::<$ty, 4, { cfg!(target_arch = "aarch64") }>(q, panels, keys, scores);
            }

            fn weighted_sum(
                weights: [&[Self]; ROWS],
                panels: &Panels<Self>,
                keys: Range<usize>,
                absolute: bool,
                sums: &mut [Self],
            ) {
                type Args<'a> = ([&'a [$ty]; ROWS], &'a Panels<$ty>, Range<usize>, bool, &'a mut [$ty]);
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx512f,avx2,fma")]
                    fn avx512((weights, panels, keys, absolute, sums): Args<'_>) {
                        weighted_sum_body::<$ty, LANES, true>(weights, panels, keys, absolute, sums);
                    }
                    #[target_feature(enable = "avx2,fma")]
                    fn avx2((weights, panels, keys, absolute, sums): Args<'_>) {
                        weighted_sum_body::<$ty, $avx2_width, true>(weights, panels, keys, absolute, sums);
                    }
                    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                        let args = (weights, panels, keys, absolute, sums);
                        if is_x86_feature_detected!("avx512f") {
                            // SAFETY: the features were just found on this machine.
                            return unsafe { avx512(args) };
                        }
                        // SAFETY: both features were just found on this machine.
                        return unsafe { avx2(args) };
                    }
                }
                let (weights, panels, keys, absolute, sums): Args<'_> =
                    (weights, panels, keys, absolute, sums);
                weighted_sum_body::<$ty, 4, { cfg!(target_arch = "aarch64") }>(
                    weights, panels, keys, absolute, sums,
                );
            }
        }
    };
}

real!(f32, 16);
real!(f64, 8);
