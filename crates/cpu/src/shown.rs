//! A boolean mask or block table as bits: one for each query of a tile and each key.
//!
//! A word of 32 bits belongs to one query and 32 keys, and the words of a tile lie as its scores do, queries in the lanes: `[key / 32][query]`. So one
//! instruction asks a vector of queries about a key, and a mask's bytes are never turned.

use crate::simd::Simd;
use crate::tile::TileStep;

/// Keys of a word.
pub(crate) const WORD: usize = u32::BITS as usize;

/// Keys whose bytes are looked at together.
const AT_ONCE: usize = 64;

/// Words of each query for so many keys: room for what is looked at together.
pub(crate) fn words(keys: usize) -> usize {
    keys.div_ceil(AT_ONCE) * AT_ONCE / WORD
}

/// A tile's rows of a boolean mask, the keys of a block that are wanted of them, and where their bits go.
pub(crate) struct MaskRows {
    /// Each lane's row.
    pub(crate) rows: *const *const u8,
    pub(crate) lanes: usize,
    /// The element of the block's first key.
    pub(crate) first: usize,
    /// Keys of the block.
    pub(crate) begin: usize,
    pub(crate) end: usize,
    /// [`words`] of `end` keys for each lane.
    pub(crate) bits: *mut u32,
}

/// What a boolean mask leaves of some keys of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    /// From the first to one past the last that it shows to any row; empty where it shows none.
    pub(crate) begin: usize,
    pub(crate) end: usize,
    /// Whether it hides any key from any row.
    pub(crate) hides: bool,
}

/// Looks through rows of a mask, and writes down as bits what they show.
///
/// # Safety
/// The instruction set of `S`; rows valid for the keys of the block up to the last that is wanted, `bits` as it says.
#[inline(always)]
pub(crate) unsafe fn scan<S: Simd>(a: &MaskRows) -> Shown {
    let mut shown = Shown { begin: a.end, end: a.begin, hides: false };
    for base in (0..a.end).step_by(AT_ONCE) {
        // Bits of the keys that are wanted.
        let wanted = u64::MAX.checked_shl(a.begin.saturating_sub(base) as u32).unwrap_or(0)
            & u64::MAX.checked_shr((base + AT_ONCE).saturating_sub(a.end) as u32).unwrap_or(0);
        let (mut any, mut all) = (0, u64::MAX);
        let (mut before, mut bits) = (std::ptr::null(), 0);
        for lane in 0..a.lanes {
            // SAFETY: in bounds by this function's contract.
            unsafe {
                let row = *a.rows.add(lane);
                // Neighbours may share a row.
                if std::mem::replace(&mut before, row) != row {
                    bits = bytes_to_bits::<S>(row.add(a.first + base), a.end - base);
                    any |= bits & wanted;
                    all &= bits | !wanted;
                }
                let word = a.bits.add(base / WORD * a.lanes + lane);
                *word = bits as u32;
                *word.add(a.lanes) = (bits >> WORD) as u32;
            }
        }
        shown.hides |= all != u64::MAX;
        if any != 0 {
            shown.begin = shown.begin.min(base + any.trailing_zeros() as usize);
            shown.end = base + AT_ONCE - any.leading_zeros() as usize;
        }
    }
    shown
}

/// A bit for each of the next bytes, of which there are `left`.
#[inline(always)]
unsafe fn bytes_to_bits<S: Simd>(bytes: *const u8, left: usize) -> u64 {
    // SAFETY: valid for `left` bytes by contract of `scan`.
    unsafe {
        if left >= AT_ONCE {
            S::prefetch(bytes.wrapping_add(AT_ONCE));
            return S::nonzero_bytes(bytes);
        }
        let mut staged = [0u8; AT_ONCE];
        bytes.copy_to_nonoverlapping(staged.as_mut_ptr(), left);
        S::nonzero_bytes(staged.as_ptr())
    }
}

/// Clears the bits of keys `from..until` of one lane, whose words lie `stride` apart.
///
/// # Safety
/// `bits` is valid for the words of these keys.
pub(crate) unsafe fn clear(bits: *mut u32, stride: usize, from: usize, until: usize) {
    let mut key = from;
    while key < until {
        let next = (key / WORD * WORD + WORD).min(until);
        let run = (u32::MAX >> (WORD - (next - key))) << (key % WORD);
        // SAFETY: by this function's contract.
        unsafe { *bits.add(key / WORD * stride) &= !run };
        key = next;
    }
}

/// Marks with 1 what the band, chunks and the bits hide in a tile of `[key][NR·LANES]`, and all of the row behind the last, which may be
/// the last one's partner in a pair; all else with 0.
///
/// # Safety
/// The instruction set of `S`; `t` describes valid buffers for tiles of `NR` vectors, of which `hidden` is one.
#[inline(always)]
pub(crate) unsafe fn mark_hidden<S: Simd, const NR: usize>(t: &TileStep, hidden: *mut f32) {
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
                if !t.shown.is_null() {
                    mark = S::select_bit(t.shown_words::<S, NR>(row, v), row % WORD, mark, marked);
                }
                S::store(hidden.add((row * NR + v) * S::LANES), mark);
            }
        }
        for v in 0..NR {
            S::store(hidden.add((t.key_end * NR + v) * S::LANES), marked);
        }
    }
}

/// # Safety
/// As [`mark_hidden`], of every function.
impl TileStep {
    /// The words of one vector's queries that a key row has its bits in.
    #[inline(always)]
    unsafe fn shown_words<S: Simd, const NR: usize>(&self, row: usize, vector: usize) -> S::V {
        // SAFETY: by contract.
        unsafe { S::load(self.shown.add((row / WORD * NR + vector) * S::LANES).cast()) }
    }

    /// Scores of one key row and vector, less what the bits hide.
    #[inline(always)]
    pub(crate) unsafe fn hide<S: Simd, const NR: usize>(
        &self,
        row: usize,
        vector: usize,
        score: S::V,
    ) -> S::V {
        if self.shown.is_null() {
            return score;
        }
        // SAFETY: by contract.
        unsafe {
            let words = self.shown_words::<S, NR>(row, vector);
            S::select_bit(words, row % WORD, score, S::splat(f32::NEG_INFINITY))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::kernels::Kernels;
    use crate::portable::Portable;

    /// What a scan says and writes, with each instruction set of this machine.
    fn scans(rows: &[Vec<u8>], begin: usize, end: usize) -> Vec<(Shown, Vec<u32>)> {
        let each: Vec<*const u8> = rows.iter().map(|row| row.as_ptr()).collect();
        let scan = |isa| {
            let mut bits = vec![0; words(end) * rows.len()];
            let lanes = rows.len();
            let a = MaskRows { rows: each.as_ptr(), lanes, first: 5, begin, end, bits: bits.as_mut_ptr() };
            // SAFETY: the rows are as long as the keys asked for; only instruction sets of this machine are asked for.
            let shown = unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => crate::avx512::Avx512::scan(&a),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => crate::avx2::Avx2::scan(&a),
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon | Isa::NeonBf16 => crate::neon::Neon::scan(&a),
                    _ => Portable::scan(&a),
                }
            };
            (shown, bits)
        };
        Isa::available().into_iter().map(scan).collect()
    }

    #[test]
    fn a_scan_finds_what_a_mask_shows() {
        for (begin, end) in [(0, 3), (0, 64), (8, 64), (0, 70), (48, 100), (72, 200)] {
            let hidden = vec![0u8; end + 5];
            for (shown, bits) in scans(&[hidden.clone(), hidden.clone()], begin, end) {
                assert!(shown.begin >= shown.end && shown.hides, "{shown:?}");
                assert!(bits.iter().all(|word| *word == 0));
            }
            let all = vec![7u8; end + 5];
            for (shown, _) in scans(&[all.clone(), all.clone()], begin, end) {
                assert_eq!(shown, Shown { begin, end, hides: false });
            }
            let (mut one, mut other) = (hidden.clone(), hidden);
            (one[5 + begin + 1], other[5 + end - 1]) = (1, 255);
            for (shown, bits) in scans(&[one, other], begin, end) {
                assert_eq!(shown, Shown { begin: begin + 1, end, hides: true });
                let set = |lane: usize, key: usize| bits[key / WORD * 2 + lane] >> (key % WORD) & 1 == 1;
                let keys = |lane| (0..end).filter(|key| set(lane, *key)).collect::<Vec<_>>();
                assert_eq!((keys(0), keys(1)), (vec![begin + 1], vec![end - 1]));
            }
        }
    }

    #[test]
    fn bits_of_a_run_are_cleared() {
        for (from, until) in [(0, 0), (0, 1), (0, 32), (3, 40), (31, 33), (60, 96), (7, 96)] {
            let mut bits = [u32::MAX; 6];
            // SAFETY: three words in each of two lanes.
            unsafe { clear(bits.as_mut_ptr().add(1), 2, from, until) };
            for key in 0..96 {
                assert_eq!(bits[key / 32 * 2] >> (key % 32) & 1, 1);
                assert_eq!(bits[key / 32 * 2 + 1] >> (key % 32) & 1 == 0, (from..until).contains(&key));
            }
        }
    }
}
