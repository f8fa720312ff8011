//! Weights from scores; with pairs of bfloat16 also the rounding residuals of the weights that need a second PV.

use super::{Care, FEW_WEIGHTS, Gemm, TileStep, Weighed, packed_ends};
use crate::simd::{Simd, exp2_each};

/// Scores become weights `2^(s - max)` in place; maximum, sum and rescale factor are brought up to date.
///
/// # Safety
/// As [`scores`], which ran before on the same `t`.
#[inline(always)]
pub(crate) unsafe fn softmax<S: Gemm, const NR: usize>(t: &TileStep) -> Weighed {
    // SAFETY: by contract.
    unsafe {
        let weighed = weights::<S, NR>(t);
        S::lay_weights::<NR>(t, weighed)
    }
}

/// [`softmax`], which leaves weights in rows or pairs of rows.
#[inline(always)]
unsafe fn weights<S: Simd, const NR: usize>(t: &TileStep) -> Weighed {
    let all = (t.key_begin, t.key_end);
    // SAFETY: in bounds by this function's contract.
    unsafe {
        if S::PACKED == 1 || t.care == Care::Rounded {
            weigh::<S, NR, false, true>(t);
            return Weighed { live: all, heavy: 0 };
        }
        if t.care == Care::Whole {
            weigh::<S, NR, false, false>(t);
            return pack_weights::<S, NR, false>(t, &[S::splat(-1.0); NR]);
        }
        if stay_many::<S, NR>(t) {
            weigh::<S, NR, true, true>(t);
            return Weighed { live: all, heavy: 0 };
        }
        weigh::<S, NR, true, false>(t);
        let Some(large) = large_weights::<S, NR>(t) else {
            round_weights::<S, NR>(t);
            return Weighed { live: all, heavy: 0 };
        };
        pack_weights::<S, NR, true>(t, &large)
    }
}

/// How many times the weight seen so far each lane of a vector expects.
#[inline(always)]
unsafe fn hope<S: Simd>(t: &TileStep, at: usize) -> S::V {
    // SAFETY: in bounds by the contract of `softmax`.
    unsafe { S::min(S::splat(t.hope), S::load(t.most_hope.add(at))) }
}

/// Whether every lane's weights are so many before this block that they are whatever it brings. With sum `l` and sum of squares `q`, both relative to the
/// new maximum, and hope `f`, a block whose weights (1 at most) add up to `a` leaves `f(l + a)²` and at most `q + a`: [`FEW_WEIGHTS`] hold between
/// them for every `a` where they hold for 0 and `2fl` is at least as many. A margin for rounding keeps the answer that [`large_weights`] would give.
#[inline(always)]
unsafe fn stay_many<S: Simd, const NR: usize>(t: &TileStep) -> bool {
    const MANY: f32 = FEW_WEIGHTS * 1.01;
    // SAFETY: in bounds by the contract of `softmax`.
    unsafe {
        let mut many = true;
        for v in 0..NR {
            let at = v * S::LANES;
            let shift = S::max(S::load(t.new_max.add(at)), S::splat(f32::MIN));
            let rescale = S::exp2(S::sub(S::load(t.old_max.add(at)), shift));
            let sum = S::mul(S::load(t.sum.add(at)), rescale);
            let squares = S::mul(S::mul(S::load(t.squares.add(at)), rescale), rescale);
            let expected = S::mul(sum, hope::<S>(t, at));
            many &= !S::exceeds(S::splat(0.5 * MANY), expected);
            many &= !S::exceeds(S::mul(squares, S::splat(MANY)), S::mul(sum, expected));
        }
        many
    }
}

/// The exponential and what follows from it. Weights in pairs are rounded at once only with `ROUND`.
#[inline(always)]
unsafe fn weigh<S: Simd, const NR: usize, const SQUARES: bool, const ROUND: bool>(t: &TileStep) {
    // SAFETY: in bounds by the contract of `softmax`.
    unsafe {
        let mut shift = [S::splat(0.0); NR];
        let mut sums = [[S::splat(0.0); 2]; NR];
        for v in 0..NR {
            // A row that has seen no key yet has maximum -inf; a finite shift keeps -inf - shift at -inf, not NaN.
            shift[v] = S::max(S::load(t.new_max.add(v * S::LANES)), S::splat(f32::MIN));
        }
        let end = packed_ends::<S>(t);
        weigh_rows::<S, NR, 0, SQUARES, ROUND>(t, t.key_begin, end[0], &shift, &mut sums);
        if NR > 1 {
            weigh_rows::<S, NR, 1, SQUARES, ROUND>(t, end[0], end[1], &shift, &mut sums);
        }
        if NR > 2 {
            weigh_rows::<S, NR, 2, SQUARES, ROUND>(t, end[1], end[2], &shift, &mut sums);
        }
        for v in 0..NR {
            let at = v * S::LANES;
            let rescale = S::exp2(S::sub(S::load(t.old_max.add(at)), shift[v]));
            let [sum, squares] = sums[v];
            S::store(t.rescale.add(at), rescale);
            S::store(t.sum.add(at), S::fma(S::load(t.sum.add(at)), rescale, sum));
            if SQUARES {
                let before = S::mul(S::load(t.squares.add(at)), rescale);
                S::store(t.squares.add(at), S::fma(before, rescale, squares));
                let whole = S::mul(S::load(t.whole_squares.add(at)), rescale);
                S::store(t.whole_squares.add(at), S::mul(whole, rescale));
            }
            S::store(t.old_max.add(at), S::load(t.new_max.add(at)));
        }
    }
}

/// Key rows `begin..end` for the tile's vectors from `FIRST` on: weights, their sums and those of their squares.
#[inline(always)]
unsafe fn weigh_rows<S: Simd, const NR: usize, const FIRST: usize, const SQUARES: bool, const ROUND: bool>(
    t: &TileStep,
    begin: usize,
    end: usize,
    shift: &[S::V; NR],
    sums: &mut [[S::V; 2]; NR],
) {
    // A pair's second key may lie behind the last that this part has.
    let last = if S::PACKED == 1 { end } else { t.key_end };
    // With half as many registers the exponentials of two rows would not all have one.
    let rows = if S::PACKED == 2 || S::REGISTERS >= 32 { 2 } else { 1 };
    let mut row = begin;
    while row < end {
        // SAFETY: in bounds by the contract of `softmax`.
        unsafe {
            if rows == 2 && row + 1 < last {
                weigh_at::<S, NR, FIRST, 2, SQUARES, ROUND>(t, row, shift, sums);
            } else {
                weigh_at::<S, NR, FIRST, 1, SQUARES, ROUND>(t, row, shift, sums);
            }
        }
        row += rows;
    }
}

/// [`weigh_rows`] of `ROWS` key rows, 1 or 2.
#[inline(always)]
unsafe fn weigh_at<
    S: Simd,
    const NR: usize,
    const FIRST: usize,
    const ROWS: usize,
    const SQUARES: bool,
    const ROUND: bool,
>(
    t: &TileStep,
    row: usize,
    shift: &[S::V; NR],
    sums: &mut [[S::V; 2]; NR],
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `softmax`.
    unsafe {
        let at = t.scores.add(row * width);
        let zero = S::splat(0.0);
        let mut weights = [[zero; NR]; ROWS];
        for r in 0..ROWS {
            for v in FIRST..NR {
                weights[r][v] = S::sub(S::load(at.add(r * width + v * S::LANES)), shift[v]);
            }
        }
        weights = exp2_each::<S, NR, ROWS>(weights);
        for v in FIRST..NR {
            for r in 0..ROWS {
                sums[v][0] = S::add(sums[v][0], weights[r][v]);
            }
            if SQUARES {
                for r in (0..ROWS).rev() {
                    sums[v][1] = S::fma(weights[r][v], weights[r][v], sums[v][1]);
                }
            }
            let p = at.add(v * S::LANES);
            if S::PACKED == 2 && ROUND {
                // The last key may have no partner.
                let partner = if ROWS == 2 { weights[ROWS - 1][v] } else { zero };
                S::store(p, S::round_pair(weights[0][v], partner));
                continue;
            }
            for r in 0..ROWS {
                S::store(p.add(r * width), weights[r][v]);
            }
        }
    }
}

/// Of rows whose weights are fewer than this part of [`FEW_WEIGHTS`] those above twice a share are seldom enough.
const VERY_FEW: f32 = 0.4;

/// Above which weights of each lane what rounding takes from them is multiplied too; none where that is no lane's. A lane's answer does not depend on its
/// neighbours.
///
/// Where weights are very few, or hope was in vain, that is every weight above the share of one among [`FEW_WEIGHTS`]. Elsewhere those above twice that
/// are mostly enough; where they were not, sums of squares say so at the end of the row, and its tile is run again without hope.
#[inline(always)]
unsafe fn large_weights<S: Simd, const NR: usize>(t: &TileStep) -> Option<[S::V; NR]> {
    // SAFETY: in bounds by the contract of `softmax`.
    unsafe {
        let (mut large, mut few) = ([S::splat(0.0); NR], false);
        for v in 0..NR {
            let sum = S::load(t.sum.add(v * S::LANES));
            let expected = S::mul(sum, hope::<S>(t, v * S::LANES));
            let share = S::mul(expected, S::splat(1.0 / FEW_WEIGHTS));
            let (squares, many) = (S::load(t.squares.add(v * S::LANES)), S::mul(sum, share));
            let very_few = S::mul(squares, S::splat(VERY_FEW));
            let most = S::load(t.most_hope.add(v * S::LANES));
            let hopeful = S::select_above(very_few, many, share, S::mul(share, S::splat(2.0)));
            let above = S::select_above(most, S::splat(1.0), hopeful, share);
            large[v] = S::select_above(squares, many, above, S::splat(f32::INFINITY));
            few |= S::exceeds(squares, many);
        }
        few.then_some(large)
    }
}

/// Rounds all weights to pairs.
#[inline(always)]
unsafe fn round_weights<S: Simd, const NR: usize>(t: &TileStep) {
    let width = NR * S::LANES;
    for row in (t.key_begin..t.key_end).step_by(2) {
        for v in 0..NR {
            // SAFETY: in bounds by the contract of `softmax`; what lies behind a vector's last key is not read again.
            unsafe {
                let p = t.scores.add(row * width + v * S::LANES);
                // The last key may have no partner: its place then holds no weight.
                let odd = if row + 1 < t.key_end { S::load(p.add(width)) } else { S::splat(0.0) };
                S::store(p, S::round_pair(S::load(p), odd));
            }
        }
    }
}

/// Rounds the weights to pairs. Where one is above its lane's in `large`, what rounding takes from such weights is kept as well; with `SQUARES` their
/// squares are added up.
#[inline(always)]
unsafe fn pack_weights<S: Simd, const NR: usize, const SQUARES: bool>(
    t: &TileStep,
    large: &[S::V; NR],
) -> Weighed {
    let mut weighed = Weighed { live: (t.key_end, t.key_begin), heavy: 0 };
    // SAFETY: in bounds by the contract of `softmax`.
    unsafe {
        let end = packed_ends::<S>(t);
        pack_rows_of_weights::<S, NR, 0, SQUARES>(t, t.key_begin, end[0], large, &mut weighed);
        if NR > 1 {
            pack_rows_of_weights::<S, NR, 1, SQUARES>(t, end[0], end[1], large, &mut weighed);
        }
        if NR > 2 {
            pack_rows_of_weights::<S, NR, 2, SQUARES>(t, end[1], end[2], large, &mut weighed);
        }
    }
    weighed
}

/// [`pack_weights`] of key rows `begin..end` for the tile's vectors from `FIRST` on.
#[inline(always)]
unsafe fn pack_rows_of_weights<S: Simd, const NR: usize, const FIRST: usize, const SQUARES: bool>(
    t: &TileStep,
    begin: usize,
    end: usize,
    large: &[S::V; NR],
    weighed: &mut Weighed,
) {
    let width = NR * S::LANES;
    for row in (begin..end).step_by(2) {
        // SAFETY: in bounds by the contract of `softmax`; a block has fewer pairs than rows.
        unsafe {
            let zero = S::splat(0.0);
            let at = t.scores.add(row * width);
            let (mut all, mut heavy) = (zero, false);
            let mut weights = [[zero; 2]; NR];
            for v in FIRST..NR {
                let p = at.add(v * S::LANES);
                let even = S::load(p);
                // The last key may have no partner: its place then holds no weight.
                let odd = if row + 1 < t.key_end { S::load(p.add(width)) } else { zero };
                weights[v] = [even, odd];
                // NaN must count as a weight, which a sum keeps.
                all = S::add(all, S::add(even, odd));
                heavy |= S::exceeds(S::max(even, odd), large[v]);
                S::store(p, S::round_pair(even, odd));
            }
            if S::exceeds(all, zero) {
                weighed.live = (weighed.live.0.min(row), (row + 2).min(t.key_end));
            }
            if !heavy {
                continue;
            }
            *t.heavy_rows.add(weighed.heavy) = row as u32;
            weighed.heavy += 1;
            for v in FIRST..NR {
                let [even, odd] = weights[v];
                let even = S::select_above(even, large[v], even, zero);
                let odd = S::select_above(odd, large[v], odd, zero);
                S::store(at.add(width + v * S::LANES), S::lost_pair(even, odd));
                if SQUARES {
                    let p = t.whole_squares.add(v * S::LANES);
                    S::store(p, S::fma(even, even, S::fma(odd, odd, S::load(p))));
                }
            }
        }
    }
}
