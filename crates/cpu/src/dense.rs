//! A bias over queries and keys, added to score tiles.
//!
//! Its rows run along the keys, where score tiles have queries in the lanes. So they are turned on the way, as 32-bit words: one float or two halves.

use crate::simd::{MAX_LANES, Simd};
use crate::tile::TileStep;
use half::{bf16, f16};
use std::f32::consts::LOG2_E;
use std::mem::MaybeUninit;
use std::ptr;

/// A tile's rows of a bias.
pub(crate) struct DenseRows {
    /// Each lane's row.
    pub(crate) rows: *const *const u8,
    /// The element of the block's first key.
    pub(crate) first: usize,
    /// The rows that are read next, and where, to be fetched meanwhile.
    pub(crate) next_rows: *const *const u8,
    pub(crate) next_first: usize,
}

/// Elements as they come out of turned words.
///
/// # Safety
/// The instruction set of `S`; `part` is below the number of elements in a word.
pub(crate) trait Turned: Copy {
    /// The elements at one place of every word.
    unsafe fn part<S: Simd>(words: S::V, part: usize) -> S::V;
}

impl Turned for f32 {
    #[inline(always)]
    unsafe fn part<S: Simd>(words: S::V, _part: usize) -> S::V {
        words
    }
}

impl Turned for bf16 {
    #[inline(always)]
    unsafe fn part<S: Simd>(words: S::V, part: usize) -> S::V {
        // SAFETY: trait contract.
        unsafe { S::part_bf16(words, part) }
    }
}

impl Turned for f16 {
    #[inline(always)]
    unsafe fn part<S: Simd>(words: S::V, part: usize) -> S::V {
        // SAFETY: trait contract.
        unsafe { S::part_f16(words, part) }
    }
}

/// What is done with each key. Not a closure: only functions that are always inlined are compiled for the instruction set.
///
/// # Safety
/// The instruction set of `S`, and what [`each_key`] asks for.
trait AtKey<S: Simd> {
    /// Takes the bias of one key row.
    unsafe fn at(&mut self, row: usize, bias: S::V);
}

/// Keys in a turned word.
const fn per_word<E>() -> usize {
    size_of::<u32>() / size_of::<E>()
}

/// Turns words of the keys from `base` on, as many as a vector has lanes of words or up to `end`, for the lanes from `lane` on: a row for each word, `stride` floats apart.
///
/// # Safety
/// The instruction set of `S`; the lanes' rows are valid for the keys, `dst` for the rows.
#[inline(always)]
unsafe fn turn<S: Simd, E: Turned>(
    a: &DenseRows,
    lane: usize,
    base: usize,
    end: usize,
    dst: *mut f32,
    stride: usize,
) {
    let mut words = [ptr::null::<f32>(); MAX_LANES];
    // SAFETY: rows are valid by contract.
    unsafe {
        let rows = a.rows.add(lane);
        if base + S::LANES * per_word::<E>() <= end {
            for i in 0..S::LANES {
                words[i] = (*rows.add(i)).cast::<E>().add(a.first + base).cast();
                let next = (*a.next_rows.add(lane + i)).cast::<E>();
                S::prefetch(next.wrapping_add(a.next_first + base).cast());
            }
            S::transpose_rows(&words, dst, stride);
            return;
        }
        // The last keys, fewer than a vector's words: what lies behind them may not be read.
        let (mut staged, mut turned) = ([0u32; MAX_LANES * MAX_LANES], [0f32; MAX_LANES * MAX_LANES]);
        for i in 0..S::LANES {
            let row = (*rows.add(i)).cast::<E>().add(a.first + base);
            row.copy_to_nonoverlapping(staged.as_mut_ptr().add(i * S::LANES).cast(), end - base);
        }
        S::transpose(staged.as_ptr().cast(), S::LANES, turned.as_mut_ptr(), S::LANES);
        for word in 0..(end - base).div_ceil(per_word::<E>()) {
            S::store(dst.add(word * stride), S::load(turned.as_ptr().add(word * S::LANES)));
        }
    }
}

/// Calls `f` with the bias of each key row of `begin..end`, for one vector's lanes, which begin at `lane`.
///
/// # Safety
/// The instruction set of `S`; the lanes' rows are valid for the keys.
#[inline(always)]
unsafe fn each_key<S: Simd, E: Turned>(
    a: &DenseRows,
    lane: usize,
    begin: usize,
    end: usize,
    f: &mut impl AtKey<S>,
) {
    let at_once = S::LANES * per_word::<E>();
    let mut turned = MaybeUninit::<[f32; MAX_LANES * MAX_LANES]>::uninit();
    let turned = turned.as_mut_ptr().cast::<f32>();
    let mut base = begin;
    // SAFETY: `turned` is written before it is read; rows are valid by contract.
    unsafe {
        while base + at_once <= end {
            turn::<S, E>(a, lane, base, end, turned, S::LANES);
            for word in 0..S::LANES {
                let words = S::load(turned.add(word * S::LANES));
                for part in 0..per_word::<E>() {
                    f.at(base + word * per_word::<E>() + part, E::part::<S>(words, part));
                }
            }
            base += at_once;
        }
        if base < end {
            turn::<S, E>(a, lane, base, end, turned, S::LANES);
            for key in 0..end - base {
                let words = S::load(turned.add(key / per_word::<E>() * S::LANES));
                f.at(base + key, E::part::<S>(words, key % per_word::<E>()));
            }
        }
    }
}

/// Writes what the scores of one vector's lanes start with.
struct Starting<const NR: usize> {
    /// The vector's first score.
    scores: *mut f32,
}

impl<S: Simd, const NR: usize> AtKey<S> for Starting<NR> {
    #[inline(always)]
    unsafe fn at(&mut self, row: usize, bias: S::V) {
        // SAFETY: trait contract.
        unsafe { S::store(self.scores.add(row * NR * S::LANES), S::mul(bias, S::splat(LOG2_E))) }
    }
}

/// Fills a tile with a bias: [`crate::tile::Start::Added`], or [`crate::tile::Start::Words`] where that is asked for. One that is infinite in units of log2 is written as infinity, though it may be finite as given:
/// rows whose maximum is infinite at the end have to be computed again with [`add_bias`].
///
/// # Safety
/// As [`crate::tile::scores`]; rows valid for the tile's keys.
#[inline(always)]
pub(crate) unsafe fn start_bias<S: Simd, E: Turned, const NR: usize>(t: &TileStep, a: &DenseRows) {
    for v in 0..NR {
        // SAFETY: in bounds by this function's contract.
        unsafe {
            let mut starting = Starting::<NR> { scores: t.scores.add(v * S::LANES) };
            each_key::<S, E>(a, v * S::LANES, t.key_begin, t.vector_end[v], &mut starting);
        }
    }
}

/// Fills every other row of a tile with the words of a bias of two keys each, the first of which is the row's: [`crate::tile::Start::Words`].
///
/// # Safety
/// As [`start_bias`]; the tile's keys begin with an even one.
#[inline(always)]
pub(crate) unsafe fn start_words<S: Simd, const NR: usize>(t: &TileStep, a: &DenseRows) {
    let width = NR * S::LANES;
    for v in 0..NR {
        for base in (t.key_begin..t.vector_end[v]).step_by(2 * S::LANES) {
            // SAFETY: in bounds by this function's contract: the second row of a pair is beyond what is written.
            unsafe {
                let dst = t.scores.add(base * width + v * S::LANES);
                turn::<S, bf16>(a, v * S::LANES, base, t.vector_end[v], dst, 2 * width);
            }
        }
    }
}

/// A key's bias in units of log2, from the words of its pair.
///
/// # Safety
/// The instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn of_words<S: Simd>(words: S::V, key: usize) -> S::V {
    // SAFETY: by contract.
    unsafe { S::mul(S::part_bf16(words, key % 2), S::splat(LOG2_E)) }
}

/// Adds to the scores of one vector's lanes, hides again what is hidden, and keeps the maximum.
struct Adding<'a, S: Simd, const NR: usize> {
    t: &'a TileStep,
    vector: usize,
    query: S::V,
    maximum: S::V,
}

impl<S: Simd, const NR: usize> AtKey<S> for Adding<'_, S, NR> {
    #[inline(always)]
    unsafe fn at(&mut self, row: usize, bias: S::V) {
        let mask = &self.t.mask;
        // SAFETY: trait contract.
        unsafe {
            let p = self.t.scores.add((row * NR + self.vector) * S::LANES);
            let mut score = biased::<S>(S::load(p), bias);
            if row < mask.clear_begin || row >= mask.clear_end {
                let (lo, hi) = mask.bounds(row);
                score = S::select_between(self.query, lo, hi, score, S::splat(f32::NEG_INFINITY));
            }
            score = self.t.hide::<S, NR>(row, self.vector, score);
            S::store(p, score);
            self.maximum = S::max(score, self.maximum);
        }
    }
}

/// Adds a bias to a tile's scores and brings the running maximum up to date: the same bits as by [`start_bias`], where that has them.
///
/// # Safety
/// As [`crate::tile::scores`], which ran before on the same `t`; rows valid for the tile's keys.
#[inline(always)]
pub(crate) unsafe fn add_bias<S: Simd, E: Turned, const NR: usize>(t: &TileStep, a: &DenseRows) {
    for v in 0..NR {
        let at = v * S::LANES;
        // SAFETY: in bounds by this function's contract.
        unsafe {
            let (query, maximum) = (S::load(t.mask.lane_query.add(at)), S::load(t.old_max.add(at)));
            let mut adding = Adding::<S, NR> { t, vector: v, query, maximum };
            each_key::<S, E>(a, at, t.key_begin, t.vector_end[v], &mut adding);
            S::store(t.new_max.add(at), adding.maximum);
        }
    }
}

/// Beyond this a bias is infinite in units of log2.
const BIAS_END: f32 = f32::MAX / 1.5;

/// A score with its bias, rounded as where the bias is there first.
#[inline(always)]
pub(crate) unsafe fn biased<S: Simd>(score: S::V, bias: S::V) -> S::V {
    // SAFETY: the instruction set of `S`.
    unsafe { S::add(score, S::mul(near::<S>(bias), S::splat(LOG2_E))) }
}

/// A bias that is finite in units of log2 if it is as given: rows that a model fills with the lowest number are means, not nothing.
#[inline(always)]
unsafe fn near<S: Simd>(bias: S::V) -> S::V {
    // SAFETY: the instruction set of `S`.
    unsafe {
        if !S::exceeds(S::abs(bias), S::splat(BIAS_END)) {
            return bias;
        }
        let end = S::splat(-BIAS_END);
        let near = S::select_between(bias, f32::MIN, -BIAS_END, end, bias);
        S::select_between(near, BIAS_END, f32::MAX, S::sub(S::splat(0.0), end), near)
    }
}
