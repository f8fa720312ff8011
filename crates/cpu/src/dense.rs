//! Dense tensors over queries and keys: bias and boolean mask, added to and laid over score tiles.
//!
//! Their rows run along the keys, where score tiles have queries in the lanes. So they are turned on the way, as 32-bit words: one float,
//! two halves, or four bytes of a mask.

use crate::simd::{MAX_LANES, Simd};
use crate::tile::TileStep;
use half::{bf16, f16};
use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;

/// A tile's rows of a dense tensor.
pub(crate) struct DenseRows {
    /// Each lane's row.
    pub(crate) rows: *const *const u8,
    /// The element of the block's first key.
    pub(crate) first: usize,
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

/// Keys that a mask is looked through at once, and how far ahead rows are fetched.
const AT_ONCE: usize = 64;

/// What is done with each key. Not a closure: only functions that are always inlined are compiled for the instruction set.
///
/// # Safety
/// The instruction set of `S`, and what [`each_key`] asks for.
trait AtKey<S: Simd> {
    unsafe fn at(&mut self, row: usize, words: S::V, part: usize);
}

/// Calls `f` with each key row of `begin..end`, the turned word it lies in, and where in the word, for one vector's lanes.
///
/// # Safety
/// The instruction set of `S`; the lanes' rows are valid for the keys.
#[inline(always)]
unsafe fn each_key<S: Simd, E>(
    rows: *const *const u8,
    first: usize,
    begin: usize,
    end: usize,
    f: &mut impl AtKey<S>,
) {
    let per_word = size_of::<u32>() / size_of::<E>();
    let mut turned = MaybeUninit::<[f32; MAX_LANES * MAX_LANES]>::uninit();
    let turned = turned.as_mut_ptr().cast::<f32>();
    let mut words = [ptr::null(); MAX_LANES];
    let mut base = begin;
    // SAFETY: `turned` is written before it is read; rows are valid by contract.
    unsafe {
        while base + S::LANES * per_word <= end {
            for lane in 0..S::LANES {
                let row = (*rows.add(lane)).cast::<E>().add(first + base);
                // The block of keys that comes next.
                S::prefetch(row.wrapping_add(AT_ONCE).cast());
                // Rows that lie 4 KB apart share a set of the first-level cache: no more than the next vector is brought there.
                S::prefetch_near(row.wrapping_add(S::LANES * per_word).cast());
                words[lane] = row.cast();
            }
            S::transpose_rows(&words, turned, S::LANES);
            for word in 0..S::LANES {
                let words = S::load(turned.add(word * S::LANES));
                for part in 0..per_word {
                    f.at(base + word * per_word + part, words, part);
                }
            }
            base += S::LANES * per_word;
        }
        if base < end {
            // The last keys, fewer than a vector's words: what lies behind them may not be read.
            let mut staged = [0u32; MAX_LANES * MAX_LANES];
            for lane in 0..S::LANES {
                let row = (*rows.add(lane)).cast::<E>().add(first + base);
                let dst = staged.as_mut_ptr().add(lane * S::LANES);
                row.copy_to_nonoverlapping(dst.cast(), end - base);
            }
            S::transpose(staged.as_ptr().cast(), S::LANES, turned, S::LANES);
            for key in 0..end - base {
                let words = S::load(turned.add(key / per_word * S::LANES));
                f.at(base + key, words, key % per_word);
            }
        }
    }
}

/// How a dense tensor changes a score.
///
/// # Safety
/// The instruction set of `S`.
trait Change {
    type Element;
    /// What the score kernel is to find in the score tile.
    unsafe fn start<S: Simd>(words: S::V, part: usize) -> S::V;
    unsafe fn change<S: Simd>(score: S::V, words: S::V, part: usize) -> S::V;
}

/// A bias of this type is added.
struct Bias<E>(PhantomData<E>);

impl<E: Turned> Change for Bias<E> {
    type Element = E;
    #[inline(always)]
    unsafe fn start<S: Simd>(words: S::V, part: usize) -> S::V {
        // SAFETY: trait contract.
        unsafe { S::mul(near::<S>(E::part::<S>(words, part)), S::splat(LOG2_E)) }
    }
    #[inline(always)]
    unsafe fn change<S: Simd>(score: S::V, words: S::V, part: usize) -> S::V {
        // SAFETY: trait contract.
        unsafe { biased::<S>(score, E::part::<S>(words, part)) }
    }
}

/// Keys whose byte is zero are hidden.
struct Hide;

impl Change for Hide {
    type Element = u8;
    #[inline(always)]
    unsafe fn start<S: Simd>(words: S::V, part: usize) -> S::V {
        // SAFETY: trait contract.
        unsafe { S::select_byte(words, part, S::splat(f32::INFINITY), S::splat(f32::NEG_INFINITY)) }
    }
    #[inline(always)]
    unsafe fn change<S: Simd>(score: S::V, words: S::V, part: usize) -> S::V {
        // SAFETY: trait contract.
        unsafe { S::select_byte(words, part, score, S::splat(f32::NEG_INFINITY)) }
    }
}

/// Writes what the scores of one vector's lanes start with.
struct Starting<C> {
    /// The vector's first score, and floats from key to key.
    scores: *mut f32,
    width: usize,
    change: PhantomData<C>,
}

impl<S: Simd, C: Change> AtKey<S> for Starting<C> {
    #[inline(always)]
    unsafe fn at(&mut self, row: usize, words: S::V, part: usize) {
        // SAFETY: trait contract.
        unsafe { S::store(self.scores.add(row * self.width), C::start::<S>(words, part)) }
    }
}

#[inline(always)]
unsafe fn start<S: Simd, C: Change>(vectors: usize, t: &TileStep, a: &DenseRows) {
    let width = vectors * S::LANES;
    for v in 0..vectors {
        let at = v * S::LANES;
        // SAFETY: in bounds by the callers' contract.
        unsafe {
            let mut starting = Starting::<C> { scores: t.scores.add(at), width, change: PhantomData };
            let (rows, end) = (a.rows.add(at), t.vector_end[v]);
            each_key::<S, C::Element>(rows, a.first, t.key_begin, end, &mut starting);
        }
    }
}

/// Fills a tile with a bias: [`crate::tile::Start::Added`].
///
/// # Safety
/// As [`crate::tile::scores`] for tiles of so many vectors; rows valid for the tile's keys.
#[inline(always)]
pub(crate) unsafe fn start_bias<S: Simd, E: Turned>(vectors: usize, t: &TileStep, a: &DenseRows) {
    // SAFETY: same contract.
    unsafe { start::<S, Bias<E>>(vectors, t, a) }
}

/// Fills a tile with what a boolean mask says: [`crate::tile::Start::Limits`].
///
/// # Safety
/// As [`crate::tile::scores`] for tiles of so many vectors; rows valid for the tile's keys.
#[inline(always)]
pub(crate) unsafe fn start_limits<S: Simd>(vectors: usize, t: &TileStep, a: &DenseRows) {
    // SAFETY: same contract.
    unsafe { start::<S, Hide>(vectors, t, a) }
}

/// Changes the scores of one vector's lanes, hides again what the band hides, and keeps the maximum.
struct Changing<'a, S: Simd, C> {
    t: &'a TileStep,
    /// The vector's first score, and floats from key to key.
    scores: *mut f32,
    width: usize,
    query: S::V,
    maximum: S::V,
    change: PhantomData<C>,
}

impl<S: Simd, C: Change> AtKey<S> for Changing<'_, S, C> {
    #[inline(always)]
    unsafe fn at(&mut self, row: usize, words: S::V, part: usize) {
        let mask = &self.t.mask;
        // SAFETY: trait contract.
        unsafe {
            let p = self.scores.add(row * self.width);
            let mut score = C::change::<S>(S::load(p), words, part);
            if row < mask.clear_begin || row >= mask.clear_end {
                let (lo, hi) = mask.bounds(row);
                score = S::select_between(self.query, lo, hi, score, S::splat(f32::NEG_INFINITY));
            }
            S::store(p, score);
            self.maximum = S::max(score, self.maximum);
        }
    }
}

#[inline(always)]
unsafe fn change<S: Simd, C: Change, const NR: usize>(t: &TileStep, a: &DenseRows) {
    for v in 0..NR {
        let at = v * S::LANES;
        // SAFETY: in bounds by the callers' contract.
        unsafe {
            let mut changing = Changing::<S, C> {
                t,
                scores: t.scores.add(at),
                width: NR * S::LANES,
                query: S::load(t.mask.lane_query.add(at)),
                maximum: S::load(t.old_max.add(at)),
                change: PhantomData,
            };
            let (rows, end) = (a.rows.add(at), t.vector_end[v]);
            each_key::<S, C::Element>(rows, a.first, t.key_begin, end, &mut changing);
            S::store(t.new_max.add(at), changing.maximum);
        }
    }
}

/// Adds a bias to a tile's scores and brings the running maximum up to date.
///
/// # Safety
/// As [`crate::tile::scores`], which ran before on the same `t`; rows valid for the tile's keys.
#[inline(always)]
pub(crate) unsafe fn add_bias<S: Simd, E: Turned, const NR: usize>(t: &TileStep, a: &DenseRows) {
    // SAFETY: same contract.
    unsafe { change::<S, Bias<E>, NR>(t, a) }
}

/// Hides from a tile's queries the keys whose byte of the boolean mask is zero, and brings the running maximum up to date.
///
/// # Safety
/// As [`crate::tile::scores`], which ran before on the same `t`; rows valid for the tile's keys.
#[inline(always)]
pub(crate) unsafe fn hide<S: Simd, const NR: usize>(t: &TileStep, a: &DenseRows) {
    // SAFETY: same contract.
    unsafe { change::<S, Hide, NR>(t, a) }
}

/// Marks the keys that a boolean mask hides from one vector's lanes.
struct Marking {
    hidden: *mut f32,
    width: usize,
}

impl<S: Simd> AtKey<S> for Marking {
    #[inline(always)]
    unsafe fn at(&mut self, row: usize, words: S::V, part: usize) {
        // SAFETY: trait contract.
        unsafe {
            let p = self.hidden.add(row * self.width);
            S::store(p, S::select_byte(words, part, S::load(p), S::splat(1.0)));
        }
    }
}

/// Marks with 1 what the band, chunks and a boolean mask hide in a tile of `[key][NR·LANES]`, and all of the row behind the last, which may be
/// the last one's partner in a pair; all else with 0.
///
/// # Safety
/// The instruction set of `S`; `t` describes valid buffers for tiles of `NR` vectors, of which `hidden` is one; the mask's rows, where
/// they are not null, are valid for the tile's keys.
#[inline(always)]
pub(crate) unsafe fn mark_hidden<S: Simd, const NR: usize>(t: &TileStep, hidden: *mut f32, mask: &DenseRows) {
    let width = NR * S::LANES;
    // SAFETY: in bounds by this function's contract.
    unsafe {
        let (shown, marked) = (S::splat(0.0), S::splat(1.0));
        for row in t.key_begin..t.key_end {
            let banded = row < t.mask.clear_begin || row >= t.mask.clear_end;
            let (lo, hi) = t.mask.bounds(row);
            for v in 0..NR {
                let mut mark = shown;
                if banded {
                    let query = S::load(t.mask.lane_query.add(v * S::LANES));
                    mark = S::select_between(query, lo, hi, shown, marked);
                }
                S::store(hidden.add(row * width + v * S::LANES), mark);
            }
        }
        for v in 0..NR {
            let at = v * S::LANES;
            S::store(hidden.add(t.key_end * width + at), marked);
            if mask.rows.is_null() {
                continue;
            }
            let (rows, mut marking) = (mask.rows.add(at), Marking { hidden: hidden.add(at), width });
            each_key::<S, u8>(rows, mask.first, t.key_begin, t.key_end, &mut marking);
        }
    }
}

/// Beyond this a bias is infinite in units of log2.
const BIAS_END: f32 = f32::MAX / 1.5;

/// A score with its bias.
#[inline(always)]
pub(crate) unsafe fn biased<S: Simd>(score: S::V, bias: S::V) -> S::V {
    // SAFETY: the instruction set of `S`.
    unsafe { S::fma(near::<S>(bias), S::splat(LOG2_E), score) }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Kernels;
    use crate::portable::Portable;

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
}
