//! The fast path of MMAs of halves: 16 rows of A against eight columns of B at a time, sums in binary64.
//!
//! The registers of the `mma` family hold blocks of 8 by 8 halves, one row (of B: one column) for every four lanes, so no table of places
//! is needed. Products of two numbers of at most 26 bits are exact in binary64: to multiply and to add is then to do both at once, and
//! the functions are compiled again for processors that can.

use super::Lanes;
use super::element::Element;
use super::wgmma::WARP_ROWS;
use crate::host::{Host, compiled_thrice};
use crate::numeric::Half;
use crate::numeric::format::F32;

/// Rows and columns of a block of halves, and columns of a tile of D.
const SIDE: usize = 8;
/// Registers of D for each tile.
const D_REGISTERS: usize = 4;
/// The values of halves, as a type so that loops are made for each.
trait Value {
    /// Eight halves, two in a word.
    fn eight(words: [u32; 4], host: Host) -> [f64; SIDE];
}

struct F16;
struct Bf16;

impl Value for F16 {
    #[inline(always)]
    fn eight(words: [u32; 4], host: Host) -> [f64; SIDE] {
        #[cfg(target_arch = "x86_64")]
        if host != Host::Any {
            // SAFETY: a host that is named has the feature.
            return unsafe { widen(words) }.map(f64::from);
        }
        let _ = host;
        std::array::from_fn(|i| f64::from(Half::F16.widen((words[i / 2] >> (i % 2 * 16)) as u16)))
    }
}

impl Value for Bf16 {
    #[inline(always)]
    fn eight(words: [u32; 4], _host: Host) -> [f64; SIDE] {
        std::array::from_fn(|i| f64::from(Half::Bf16.widen((words[i / 2] >> (i % 2 * 16)) as u16)))
    }
}

/// The values of eight halves in binary16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
#[inline]
fn widen(words: [u32; 4]) -> [f32; SIDE] {
    use std::arch::x86_64::{__m256, _mm_set_epi32, _mm256_cvtph_ps};
    let [a, b, c, d] = words.map(|word| word as i32);
    // SAFETY: both are eight numbers of binary32.
    unsafe { std::mem::transmute::<__m256, [f32; SIDE]>(_mm256_cvtph_ps(_mm_set_epi32(d, c, b, a))) }
}

/// Whether both operands are halves of one type.
pub(super) fn are_halves(a: Element, b: Element) -> bool {
    a == b && matches!(a, Element::F16 | Element::Bf16)
}

compiled_thrice! {
    /// Sixteen rows of A, row by row, from registers of blocks: down the rows, then along `k`.
    pub(super) fn left_from_blocks = left_blocks(element: Element, registers: &[&Lanes], k: usize, left: &mut [f64])
}

#[inline(always)]
fn left_blocks(element: Element, registers: &[&Lanes], k: usize, left: &mut [f64], host: Host) {
    match element {
        Element::F16 => left_blocks_of::<F16>(registers, k, left, host),
        _ => left_blocks_of::<Bf16>(registers, k, left, host),
    }
}

#[inline(always)]
fn left_blocks_of<T: Value>(registers: &[&Lanes], k: usize, left: &mut [f64], host: Host) {
    for (i, block) in registers.iter().enumerate() {
        let (first_row, first_k) = (i % 2 * SIDE, i / 2 * SIDE);
        for (row, words) in rows_of(block).into_iter().enumerate() {
            let Some(to) = left.get_mut((first_row + row) * k + first_k..) else { return };
            let Some(to) = to.first_chunk_mut::<SIDE>() else { return };
            *to = T::eight(words, host);
        }
    }
}

compiled_thrice! {
    /// B, one row of `n` values for each `k`, from registers of blocks: along `k`, then to the next columns.
    pub(super) fn right_from_blocks = right_blocks(element: Element, registers: &[&Lanes], k: usize, n: usize, right: &mut [f64])
}

#[inline(always)]
fn right_blocks(element: Element, registers: &[&Lanes], k: usize, n: usize, right: &mut [f64], host: Host) {
    match element {
        Element::F16 => right_blocks_of::<F16>(registers, k, n, right, host),
        _ => right_blocks_of::<Bf16>(registers, k, n, right, host),
    }
}

/// The rows of a block of halves.
#[inline(always)]
fn rows_of(block: &Lanes) -> [[u32; 4]; SIDE] {
    let mut rows = [[0; 4]; SIDE];
    for (row, words) in rows.iter_mut().zip(block.as_chunks().0) {
        *row = *words;
    }
    rows
}

/// A block of halves the other way round.
#[inline(always)]
fn columns_of(block: &Lanes) -> [[u32; 4]; SIDE] {
    let mut columns = [[0; 4]; SIDE];
    for word in 0..4 {
        for pair in 0..4 {
            let (even, odd) = (block[8 * word + pair], block[8 * word + 4 + pair]);
            columns[2 * pair][word] = even & 0xffff | odd << 16;
            columns[2 * pair + 1][word] = even >> 16 | odd & 0xffff_0000;
        }
    }
    columns
}

#[inline(always)]
fn right_blocks_of<T: Value>(registers: &[&Lanes], k: usize, n: usize, right: &mut [f64], host: Host) {
    for (i, block) in registers.iter().enumerate() {
        let (first_k, column) = (i % (k / SIDE) * SIDE, i / (k / SIDE) * SIDE);
        for (i, words) in columns_of(block).into_iter().enumerate() {
            let Some(to) = right.get_mut((first_k + i) * n + column..) else { return };
            let Some(to) = to.first_chunk_mut::<SIDE>() else { return };
            *to = T::eight(words, host);
        }
    }
}

compiled_thrice! {
    /// The values of halves as they lie in shared memory, eight in a piece.
    pub(super) fn pieces_in_order = ordered_pieces(element: Element, pieces: &[[u8; 16]], to: &mut [f64])
}

#[inline(always)]
fn ordered_pieces(element: Element, pieces: &[[u8; 16]], to: &mut [f64], host: Host) {
    match element {
        Element::F16 => pieces_of::<F16>(pieces, to, host),
        _ => pieces_of::<Bf16>(pieces, to, host),
    }
}

#[inline(always)]
fn pieces_of<T: Value>(pieces: &[[u8; 16]], to: &mut [f64], host: Host) {
    for (to, piece) in to.chunks_exact_mut(SIDE).zip(pieces) {
        let word = |i: usize| u32::from_le_bytes([piece[i], piece[i + 1], piece[i + 2], piece[i + 3]]);
        to.copy_from_slice(&T::eight([word(0), word(4), word(8), word(12)], host));
    }
}

compiled_thrice! {
    /// A matrix of `rows` rows the other way round.
    pub(super) fn transpose = transposed(from: &[f64], rows: usize, to: &mut [f64])
}

#[inline(always)]
fn transposed(from: &[f64], rows: usize, to: &mut [f64], _host: Host) {
    let columns = from.len() / rows.max(1);
    for (first, block) in from.chunks_exact(SIDE * columns).enumerate() {
        for column in 0..columns {
            let Some(to) = to.get_mut(column * rows + first * SIDE..) else { return };
            let Some(to) = to.first_chunk_mut::<SIDE>() else { return };
            for (row, to) in to.iter_mut().enumerate() {
                *to = block[row * columns + column];
            }
        }
    }
}

compiled_thrice! {
    /// `D = A·B + D` for sixteen rows, or `D = A·B`. Sums go from D on in the order of `k`.
    pub(super) fn multiply = multiply_tiles(left: &[f64], k: usize, right: &[f64], n: usize, adds: bool, d: &mut [Lanes])
}

#[inline(always)]
fn multiply_tiles(left: &[f64], k: usize, right: &[f64], n: usize, adds: bool, d: &mut [Lanes], host: Host) {
    // As many rows at once as their sums stay in the host's registers.
    match host {
        Host::Wide => multiply_rows::<8>(left, k, right, n, adds, d, true),
        Host::Fused => multiply_rows::<4>(left, k, right, n, adds, d, true),
        Host::Any => multiply_rows::<4>(left, k, right, n, adds, d, false),
    }
}

#[inline(always)]
fn multiply_rows<const ROWS: usize>(
    left: &[f64],
    k: usize,
    right: &[f64],
    n: usize,
    adds: bool,
    d: &mut [Lanes],
    fused: bool,
) {
    if left.len() < WARP_ROWS * k {
        return;
    }
    for (tile, d) in d.chunks_exact_mut(D_REGISTERS).enumerate() {
        let Some(d) = d.first_chunk_mut::<D_REGISTERS>() else { return };
        for first in (0..WARP_ROWS).step_by(ROWS) {
            let x: [&[f64]; ROWS] = std::array::from_fn(|row| &left[(first + row) * k..][..k]);
            let mut sums = [[0f64; SIDE]; ROWS];
            if adds {
                for (row, sums) in sums.iter_mut().enumerate() {
                    *sums = row_of(d, first + row).map(|word| f64::from(f32::from_bits(word)));
                }
            }
            for at in 0..k {
                let y = right.get(at * n + tile * SIDE..).and_then(|row| row.first_chunk::<SIDE>());
                let Some(y) = y else { return };
                // Even columns lie in one register of D, odd ones in the next.
                let y = [y[0], y[2], y[4], y[6], y[1], y[3], y[5], y[7]];
                for (x, sums) in x.iter().zip(&mut sums) {
                    let x = x[at];
                    for (sum, y) in sums.iter_mut().zip(y) {
                        *sum = if fused { x.mul_add(y, *sum) } else { x * y + *sum };
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                let bits = sums.map(|sum| if sum.is_nan() { F32.nan as u32 } else { (sum as f32).to_bits() });
                set_row(d, first + row, bits);
            }
        }
    }
}

/// A row of a tile of D: its even columns, then the odd ones.
#[inline(always)]
fn row_of(d: &[Lanes; D_REGISTERS], row: usize) -> [u32; SIDE] {
    let (register, lane) = (row / SIDE * 2, row % SIDE * 4);
    std::array::from_fn(|i| d[register + i / 4][lane + i % 4])
}

#[inline(always)]
fn set_row(d: &mut [Lanes; D_REGISTERS], row: usize, words: [u32; SIDE]) {
    let (register, lane) = (row / SIDE * 2, row % SIDE * 4);
    for (i, word) in words.into_iter().enumerate() {
        d[register + i / 4][lane + i % 4] = word;
    }
}
