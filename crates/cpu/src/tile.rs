//! The three inner kernels of flash attention: scores, softmax, values.
//!
//! Everything is laid out with **queries in the vector lanes**: the score tile is `Sᵀ[key][query]`, the output tile is
//! `Oᵀ[value column][query]`. A query tile is `NR` vectors wide, and a kernel keeps `MR × NR` accumulators in registers,
//! reading one broadcast scalar of K (or V) per `NR` multiply-adds. So K and V are never transposed, running
//! maxima and sums are plain vectors without any horizontal step, and rescaling is one multiplication per accumulator.
//!
//! Scores are in units of log2: the queries were multiplied by `scale · log2(e)` when they were packed.
//!
//! Where an instruction set multiplies pairs of bfloat16 ([`Simd::PACKED`] is 2), a lane of packed queries, keys, values and weights holds a pair:
//! neighbours of the head dimension for the scores, neighbouring keys for the values. Queries then are as they were given, and scores
//! are multiplied afterwards.

use crate::simd::Simd;

/// How many floats ahead of its columns the value kernel fetches: one cache line.
const VALUES_AHEAD: usize = 16;

/// Columns of QKᵀ between two looks at the loop's counters; divides a vector.
const COLUMNS_AT_ONCE: usize = 4;

/// Most vectors of a query tile, on any instruction set.
pub(crate) const MAX_VECTORS: usize = 3;

/// Which queries of a tile see a key, when not all do.
pub(crate) struct TileMask {
    /// Per lane, the query's index relative to the tile's first query.
    pub(crate) lane_query: *const f32,
    /// Key row `r` of the block is seen by relative queries in `first + r ..= last + r`.
    pub(crate) first: i64,
    pub(crate) last: i64,
    /// Keys of a chunk, whose keys and queries see no others; 0 without chunks.
    pub(crate) chunk: i64,
    /// The block's first key and the position of the tile's first query: what chunks count from.
    pub(crate) key: i64,
    pub(crate) position: i64,
    /// Key rows seen by every query of the tile: no mask is applied to these.
    pub(crate) clear_begin: usize,
    pub(crate) clear_end: usize,
}

impl TileMask {
    /// The relative queries that see key row `row`, as exact floats.
    #[inline(always)]
    pub(crate) fn bounds(&self, row: usize) -> (f32, f32) {
        const FAR: i64 = 1 << 20;
        let shift = row as i64;
        let (mut first, mut last) = (self.first.saturating_add(shift), self.last.saturating_add(shift));
        if self.chunk > 0 {
            let start = (self.key + shift) / self.chunk * self.chunk - self.position;
            (first, last) = (first.max(start), last.min(start + self.chunk - 1));
        }
        let clamp = |x: i64| x.clamp(-FAR, FAR) as f32;
        (clamp(first), clamp(last))
    }
}

/// What the three kernels share about one query tile against one block of keys.
pub(crate) struct TileStep {
    /// Packed queries, `[dim_qk][NR·LANES]`; pairs are counted.
    pub(crate) queries: *const f32,
    pub(crate) dim_qk: usize,
    /// What scores of pairs are multiplied with.
    pub(crate) score_scale: f32,
    /// Packed keys of the block, `[key][key_stride]`.
    pub(crate) keys: *const f32,
    pub(crate) key_stride: usize,
    /// Packed values of the block, `[key][value_stride]`, or `[pair of keys][value_stride]`.
    pub(crate) values: *const f32,
    pub(crate) value_stride: usize,
    /// Output accumulator, `[dim_v rounded up][NR·LANES]`.
    pub(crate) output: *mut f32,
    pub(crate) dim_v: usize,
    /// Score tile, `[key][NR·LANES]`. Weights in pairs lie in the even rows, and what rounding took from them in the odd ones.
    pub(crate) scores: *mut f32,
    /// What the score tile holds before the scores.
    pub(crate) start: Start,
    pub(crate) care: Care,
    /// What the softmax said of the weights.
    pub(crate) weighed: Weighed,
    /// The first rows of pairs whose weights lost something to rounding that counts, [`Weighed::heavy`] of them, rising.
    pub(crate) heavy_rows: *mut u32,
    /// Key rows of the block to process. `key_begin` is a multiple of `TAIL`; rows up to `key_end` rounded up to `TAIL` are readable.
    pub(crate) key_begin: usize,
    pub(crate) key_end: usize,
    /// Per vector, one past the last key row that any of its queries sees: never falling, the last is `key_end`. What lies beyond is
    /// neither computed nor read, so that a causal diagonal costs little more than its triangle.
    pub(crate) vector_end: [usize; MAX_VECTORS],
    /// Per lane: running maximum before this block, after it, running sum, and the factor between.
    pub(crate) old_max: *mut f32,
    pub(crate) new_max: *mut f32,
    pub(crate) sum: *mut f32,
    pub(crate) rescale: *mut f32,
    /// Per lane, the running sum of squared weights, where weights are [`Care::Measured`].
    pub(crate) squares: *mut f32,
    pub(crate) mask: TileMask,
    /// Read by the exact value kernel alone: 1 where a query does not see a key, else 0, `[key][NR·LANES]`.
    pub(crate) hidden: *const f32,
    /// Rows of the next block to bring nearer meanwhile.
    pub(crate) ahead: [Ahead; 2],
}

/// What a score tile holds before QKᵀ: what can be known of scores without them is written first, and costs the kernel one instruction a vector.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// Nothing that counts.
    Nothing,
    /// What is added to the scores: a bias or ALiBi.
    Added,
    /// What scores are at most: -inf hides a key, +inf leaves it.
    Limits,
}

/// What is done about the rounding of weights to pairs of bfloat16, one part in 512 each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Care {
    /// Nothing: rows see so many keys that the errors of their weights cancel.
    Rounded,
    /// What rounding takes from large weights is multiplied too, where few of them hold most of a row ([`FEW_WEIGHTS`]).
    Measured,
    /// What rounding takes is multiplied too, always.
    Whole,
}

/// Weights p of sum l are as few as `l² / Σp²` equal ones. Their rounding to bfloat16 moves an output of unit values by 8.3e-4 over the root of this
/// number, one standard deviation: six of them are 1e-3 at 24. Half of that is left to tiles whose weights are all rounded, half to
/// single weights beside larger ones.
const FEW_WEIGHTS: f32 = 48.0;

/// Key rows of a tile whose weights are multiplied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weighed {
    /// Rows outside hold nothing but zeros.
    pub(crate) live: KeyRange,
    /// How many pairs of rows have weights that lost something to rounding that counts.
    pub(crate) heavy: usize,
}

/// Key rows from the first to one before the second.
pub(crate) type KeyRange = (usize, usize);

/// Tensor rows that will be packed next, fetched into the cache while the arithmetic runs: each tile fetches a share of the rows.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) first: *const u8,
    pub(crate) row_bytes: usize,
    pub(crate) stride_bytes: usize,
    pub(crate) rows: usize,
    /// This tile's number, and how many there are.
    pub(crate) tile: usize,
    pub(crate) tiles: usize,
}

impl Ahead {
    /// Fetches this tile's share of `count` rows from `row` on.
    #[inline(always)]
    unsafe fn prefetch<S: Simd>(&self, row: usize, count: usize) {
        let (from, until) = (count * self.tile / self.tiles, count * (self.tile + 1) / self.tiles);
        for row in row + from..(row + until).min(self.rows) {
            let at = self.first.wrapping_add(row * self.stride_bytes);
            for byte in (0..self.row_bytes).step_by(64) {
                // SAFETY: the instruction set is available; a prefetch reads nothing.
                unsafe { S::prefetch(at.wrapping_add(byte)) };
            }
        }
    }
}

/// `Sᵀ = K·Qᵀ` for the block's key rows, masked at the edges, with the running maximum updated.
///
/// # Safety
/// The instruction set of `S`; `t` describes valid buffers for tiles of `NR` vectors.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd, const MR: usize, const TAIL: usize, const NR: usize>(t: &TileStep) {
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let mut maximum = [S::splat(0.0); NR];
        for v in 0..NR {
            maximum[v] = S::load(t.old_max.add(v * S::LANES));
        }
        let mut row = t.key_begin;
        while row < t.key_end {
            if ends_in_tails::<MR, TAIL>(t.key_end - row) {
                score_step::<S, TAIL, NR>(t, row, &mut maximum);
                row += TAIL;
            } else {
                score_step::<S, MR, NR>(t, row, &mut maximum);
                row += MR;
            }
        }
        for v in 0..NR {
            S::store(t.new_max.add(v * S::LANES), maximum[v]);
        }
    }
}

/// Whether the last `left` rows are taken `TAIL` at a time: what then lies beyond the last row never reaches the next multiple of `TAIL`.
#[inline(always)]
const fn ends_in_tails<const MR: usize, const TAIL: usize>(left: usize) -> bool {
    TAIL < MR && (left <= TAIL || left > MR && left <= 2 * TAIL)
}

/// `MR` key rows from `row` on, against the vectors that see any of them.
#[inline(always)]
unsafe fn score_step<S: Simd, const MR: usize, const NR: usize>(
    t: &TileStep,
    row: usize,
    maximum: &mut [S::V; NR],
) {
    // SAFETY: in bounds by the contract of `scores`.
    unsafe {
        for ahead in &t.ahead {
            ahead.prefetch::<S>(row, MR);
        }
        // The first vector that still sees one of these keys.
        if row < t.vector_end[0] {
            score_rows::<S, MR, NR, 0>(t, row, maximum);
        } else if row < t.vector_end[1] {
            score_rows::<S, MR, NR, 1>(t, row, maximum);
        } else {
            score_rows::<S, MR, NR, 2>(t, row, maximum);
        }
    }
}

/// `MR` key rows against the tile's vectors from `FIRST` on.
#[inline(always)]
unsafe fn score_rows<S: Simd, const MR: usize, const NR: usize, const FIRST: usize>(
    t: &TileStep,
    row: usize,
    maximum: &mut [S::V; NR],
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `scores`.
    unsafe {
        let mut acc = [[S::splat(0.0); NR]; MR];
        let mut query = t.queries;
        // A pointer for every third row: an address can hold once or twice the stride, so that rows cost no arithmetic.
        let mut key = [t.keys.add(row * t.key_stride); MR];
        for r in 0..MR {
            key[r] = t.keys.add((row + r / 3 * 3) * t.key_stride);
        }
        // Packed queries and keys are zero up to whole vectors: the last columns need no loop of their own.
        for _ in 0..t.dim_qk.div_ceil(COLUMNS_AT_ONCE) {
            for c in 0..COLUMNS_AT_ONCE {
                let mut q = [S::splat(0.0); NR];
                for v in FIRST..NR {
                    q[v] = S::load(query.add(c * width + v * S::LANES));
                }
                for r in 0..MR {
                    let k = S::splat(*key[r].add(r % 3 * t.key_stride + c));
                    for v in FIRST..NR {
                        acc[r][v] = S::dot(k, q[v], acc[r][v]);
                    }
                }
            }
            query = query.add(COLUMNS_AT_ONCE * width);
            for r in (0..MR).step_by(3) {
                key[r] = key[r].add(COLUMNS_AT_ONCE);
            }
            for r in 0..MR {
                key[r] = key[r / 3 * 3];
            }
        }
        if S::PACKED == 2 {
            let scale = S::splat(t.score_scale);
            for r in 0..MR {
                for v in FIRST..NR {
                    acc[r][v] = S::mul(acc[r][v], scale);
                }
            }
        }
        let out = t.scores.add(row * width);
        if t.start == Start::Added {
            for r in 0..MR {
                for v in FIRST..NR {
                    acc[r][v] = S::add(acc[r][v], S::load(out.add(r * width + v * S::LANES)));
                }
            }
        } else if t.start == Start::Limits {
            for r in 0..MR {
                for v in FIRST..NR {
                    // A hidden score may be NaN; where one that is seen is NaN, its limit of infinity makes the row NaN as well.
                    acc[r][v] = S::min(acc[r][v], S::load(out.add(r * width + v * S::LANES)));
                }
            }
        }
        for r in 0..MR {
            for v in FIRST..NR {
                S::store(out.add(r * width + v * S::LANES), acc[r][v]);
            }
        }
        if row >= t.mask.clear_begin && row + MR <= t.mask.clear_end.min(t.key_end) {
            for r in 0..MR {
                for v in FIRST..NR {
                    // NaN is left out here and comes back through the exponential.
                    maximum[v] = S::max(acc[r][v], maximum[v]);
                }
            }
        } else {
            // From memory again: accumulators indexed in a loop would not stay in registers on the path above.
            for r in row..(row + MR).min(t.key_end) {
                let (lo, hi) = t.mask.bounds(r);
                for v in FIRST..NR {
                    let p = t.scores.add(r * width + v * S::LANES);
                    let index = S::load(t.mask.lane_query.add(v * S::LANES));
                    let hidden = S::splat(f32::NEG_INFINITY);
                    let score = S::select_between(index, lo, hi, S::load(p), hidden);
                    S::store(p, score);
                    maximum[v] = S::max(score, maximum[v]);
                }
            }
        }
    }
}

/// Scores become weights `2^(s - max)` in place; maximum, sum and rescale factor are brought up to date.
///
/// # Safety
/// As [`scores`], which ran before on the same `t`.
#[inline(always)]
pub(crate) unsafe fn softmax<S: Simd, const NR: usize>(t: &TileStep) -> Weighed {
    let all = (t.key_begin, t.key_end);
    // SAFETY: in bounds by this function's contract.
    unsafe {
        if S::PACKED == 1 || t.care == Care::Rounded {
            weigh::<S, NR, false, true>(t);
            return Weighed { live: all, heavy: 0 };
        }
        if t.care == Care::Whole {
            weigh::<S, NR, false, false>(t);
            return pack_weights::<S, NR>(t, &[S::splat(-1.0); NR]);
        }
        if stay_many::<S, NR>(t) {
            weigh::<S, NR, true, true>(t);
            return Weighed { live: all, heavy: 0 };
        }
        weigh::<S, NR, true, false>(t);
        pack_weights::<S, NR>(t, &large_weights::<S, NR>(t))
    }
}

/// Whether every lane's weights are so many before this block that they are whatever it brings. With sum `l` and sum of squares `q`, both relative to the
/// new maximum, a block whose weights (1 at most) add up to `a` leaves `(l + a)²` and at most `q + a`: [`FEW_WEIGHTS`] hold between
/// them for every `a` where they hold for 0 and `2l` is at least as many. A margin for rounding keeps the answer that [`large_weights`] would give.
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
            many &= !S::exceeds(S::splat(0.5 * MANY), sum);
            many &= !S::exceeds(S::mul(squares, S::splat(MANY)), S::mul(sum, sum));
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
    let width = NR * S::LANES;
    for row in (begin..end).step_by(if ROUND { S::PACKED } else { 1 }) {
        for v in FIRST..NR {
            // SAFETY: in bounds by the contract of `softmax`.
            unsafe {
                let p = t.scores.add(row * width + v * S::LANES);
                let weight = S::exp2(S::sub(S::load(p), shift[v]));
                sums[v][0] = S::add(sums[v][0], weight);
                if SQUARES {
                    sums[v][1] = S::fma(weight, weight, sums[v][1]);
                }
                if S::PACKED == 1 || !ROUND {
                    S::store(p, weight);
                    continue;
                }
                // The last key may have no partner: its place then holds no score.
                let mut partner = S::splat(0.0);
                if row + 1 < t.key_end {
                    partner = S::exp2(S::sub(S::load(p.add(width)), shift[v]));
                    sums[v][0] = S::add(sums[v][0], partner);
                    if SQUARES {
                        sums[v][1] = S::fma(partner, partner, sums[v][1]);
                    }
                }
                S::store(p, S::round_pair(weight, partner));
            }
        }
    }
}

/// Above which weights of each lane what rounding takes from them is multiplied too. A lane's answer does not depend on its neighbours.
#[inline(always)]
unsafe fn large_weights<S: Simd, const NR: usize>(t: &TileStep) -> [S::V; NR] {
    // SAFETY: in bounds by the contract of `softmax`.
    unsafe {
        let mut large = [S::splat(0.0); NR];
        for v in 0..NR {
            let sum = S::load(t.sum.add(v * S::LANES));
            let share = S::mul(sum, S::splat(1.0 / FEW_WEIGHTS));
            let squares = S::load(t.squares.add(v * S::LANES));
            large[v] = S::select_above(squares, S::mul(sum, share), share, S::splat(f32::INFINITY));
        }
        large
    }
}

/// Rounds the weights to pairs. Where one is above its lane's in `large`, what rounding takes from such weights is kept as well.
#[inline(always)]
unsafe fn pack_weights<S: Simd, const NR: usize>(t: &TileStep, large: &[S::V; NR]) -> Weighed {
    let mut weighed = Weighed { live: (t.key_end, t.key_begin), heavy: 0 };
    // SAFETY: in bounds by the contract of `softmax`.
    unsafe {
        let end = packed_ends::<S>(t);
        pack_rows_of_weights::<S, NR, 0>(t, t.key_begin, end[0], large, &mut weighed);
        if NR > 1 {
            pack_rows_of_weights::<S, NR, 1>(t, end[0], end[1], large, &mut weighed);
        }
        if NR > 2 {
            pack_rows_of_weights::<S, NR, 2>(t, end[1], end[2], large, &mut weighed);
        }
    }
    weighed
}

/// [`pack_weights`] of key rows `begin..end` for the tile's vectors from `FIRST` on.
#[inline(always)]
unsafe fn pack_rows_of_weights<S: Simd, const NR: usize, const FIRST: usize>(
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
            }
        }
    }
}

/// Where each vector's keys end, in whole pairs but for the last: scores are computed in even steps, so that the partner of a vector's last key
/// has one, hidden by the mask.
#[inline(always)]
fn packed_ends<S: Simd>(t: &TileStep) -> [usize; MAX_VECTORS] {
    t.vector_end.map(|end| end.next_multiple_of(S::PACKED).min(t.key_end))
}

/// `Oᵀ = Oᵀ·rescale + Vᵀ·P`, `MR` value columns at a time, the last ones `TAIL` at a time where that wastes less.
///
/// With `EXACT`, weights of keys a query does not see are not even multiplied, and what rounding took from weights in pairs only with
/// finite values: needed only where V holds NaN or infinity, because 0·NaN and 0·∞ are NaN.
///
/// # Safety
/// As [`softmax`], which ran before on the same `t`.
#[inline(always)]
pub(crate) unsafe fn values<
    S: Simd,
    const MR: usize,
    const TAIL: usize,
    const NR: usize,
    const EXACT: bool,
>(
    t: &TileStep,
) {
    let mut column = 0;
    while column < t.dim_v {
        // SAFETY: in bounds by this function's contract.
        unsafe {
            if ends_in_tails::<MR, TAIL>(t.dim_v - column) {
                value_columns::<S, TAIL, NR, EXACT>(t, column);
                column += TAIL;
            } else {
                value_columns::<S, MR, NR, EXACT>(t, column);
                column += MR;
            }
        }
    }
}

/// `MR` value columns from `column` on.
#[inline(always)]
unsafe fn value_columns<S: Simd, const MR: usize, const NR: usize, const EXACT: bool>(
    t: &TileStep,
    column: usize,
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let out = t.output.add(column * width);
        let mut acc = [[S::splat(0.0); NR]; MR];
        for v in 0..NR {
            let rescale = S::load(t.rescale.add(v * S::LANES));
            for r in 0..MR {
                acc[r][v] = S::mul(S::load(out.add(r * width + v * S::LANES)), rescale);
            }
        }
        let (end, mut heavy) = (packed_ends::<S>(t), 0);
        add_rows::<S, MR, NR, 0, EXACT>(t, column, t.key_begin, end[0], &mut heavy, &mut acc);
        if NR > 1 {
            add_rows::<S, MR, NR, 1, EXACT>(t, column, end[0], end[1], &mut heavy, &mut acc);
        }
        if NR > 2 {
            add_rows::<S, MR, NR, 2, EXACT>(t, column, end[1], end[2], &mut heavy, &mut acc);
        }
        for r in 0..MR {
            for v in 0..NR {
                S::store(out.add(r * width + v * S::LANES), acc[r][v]);
            }
        }
    }
}

/// Adds key rows `begin..end`, weighted, for `MR` value columns and the tile's vectors from `FIRST` on, and then what rounding took from the heavy ones
/// among them, which begin at `heavy` in their list.
#[inline(always)]
unsafe fn add_rows<S: Simd, const MR: usize, const NR: usize, const FIRST: usize, const EXACT: bool>(
    t: &TileStep,
    column: usize,
    begin: usize,
    end: usize,
    heavy: &mut usize,
    acc: &mut [[S::V; NR]; MR],
) {
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let live = t.weighed.live;
        let (first, last) = if S::PACKED == 1 { (begin, end) } else { (begin.max(live.0), end.min(live.1)) };
        let mut row = first;
        while row < last {
            if EXACT {
                add_seen_row::<S, MR, NR, FIRST, false>(t, column, row, acc);
            } else {
                add_row::<S, MR, NR, FIRST, false>(t, column, row, acc);
            }
            row += S::PACKED;
        }
        while S::PACKED == 2 && *heavy < t.weighed.heavy {
            let row = *t.heavy_rows.add(*heavy) as usize;
            if row >= end {
                break;
            }
            *heavy += 1;
            if EXACT {
                add_seen_row::<S, MR, NR, FIRST, true>(t, column, row, acc);
            } else {
                add_row::<S, MR, NR, FIRST, true>(t, column, row, acc);
            }
        }
    }
}

/// Adds one key row, or pair of rows, where no value is NaN or infinite, or every query sees every key. With `LOST`, what rounding took from its weights.
#[inline(always)]
unsafe fn add_row<S: Simd, const MR: usize, const NR: usize, const FIRST: usize, const LOST: bool>(
    t: &TileStep,
    column: usize,
    row: usize,
    acc: &mut [[S::V; NR]; MR],
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let weight = t.scores.add((row + usize::from(LOST)) * width);
        let value = t.values.add(row / S::PACKED * t.value_stride + column);
        // The next columns of this row: K and V of a block together are larger than the first-level cache.
        S::prefetch_near(value.wrapping_add(VALUES_AHEAD).cast());
        let mut p = [S::splat(0.0); NR];
        for v in FIRST..NR {
            p[v] = S::load(weight.add(v * S::LANES));
        }
        for r in 0..MR {
            let x = S::splat(*value.add(r));
            for v in FIRST..NR {
                acc[r][v] = S::dot(x, p[v], acc[r][v]);
            }
        }
    }
}

/// [`add_row`] that leaves out what a query does not see. Sums are in the order of [`add_row`], whose pairs have their second element
/// added first: what is left out changes nothing else.
#[inline(always)]
unsafe fn add_seen_row<S: Simd, const MR: usize, const NR: usize, const FIRST: usize, const LOST: bool>(
    t: &TileStep,
    column: usize,
    row: usize,
    acc: &mut [[S::V; NR]; MR],
) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by the contract of `values`.
    unsafe {
        let weight = t.scores.add((row + usize::from(LOST)) * width);
        let value = t.values.add(row / S::PACKED * t.value_stride + column);
        for r in 0..MR {
            let x = *value.add(r);
            let x = S::halves(S::splat(if LOST { finite_pair(x) } else { x }));
            for v in FIRST..NR {
                let p = S::halves(S::load(weight.add(v * S::LANES)));
                for part in (0..S::PACKED).rev() {
                    let hidden = S::load(t.hidden.add((row + part) * width + v * S::LANES));
                    let next = S::dot(x[part], p[part], acc[r][v]);
                    acc[r][v] = S::select_between(hidden, 0.0, 0.0, next, acc[r][v]);
                }
            }
        }
    }
}

/// A pair of bfloat16 with zeros for what is not finite.
fn finite_pair(pair: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80;
    let keep = |half: u32| if half & EXPONENT == EXPONENT { 0 } else { half };
    let bits = pair.to_bits();
    f32::from_bits(keep(bits >> 16) << 16 | keep(bits & 0xffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What scores and outputs have room for: rows up to the next multiple of the smaller step, from any multiple of it.
    #[test]
    fn steps_cover_every_row_and_stay_within_the_next_multiple() {
        fn reach<const MR: usize, const TAIL: usize>(rows: usize) -> usize {
            let mut at = 0;
            while at < rows {
                at += if ends_in_tails::<MR, TAIL>(rows - at) { TAIL } else { MR };
            }
            at
        }
        for rows in 1..400 {
            for (reached, tail) in
                [(reach::<6, 4>(rows), 4), (reach::<8, 8>(rows), 8), (reach::<4, 4>(rows), 4)]
            {
                assert!(reached >= rows && reached <= rows.next_multiple_of(tail), "{rows} rows, {reached}");
            }
            // Whole vectors of head dimension waste nothing.
            assert!(rows % 16 != 0 || reach::<6, 4>(rows) == rows, "{rows}");
        }
    }
}
