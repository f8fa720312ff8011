//! Products of halves as they nearly always are: 16 rows of A against eight columns of B at a time, sums in binary64.
//!
//! The registers of the `mma` family hold blocks of 8 by 8 halves, one row (of B: one column) for every four lanes, so no table of places
//! is needed. Products of two numbers of at most 26 bits are exact in binary64: to multiply and to add is then to do both at once, and
//! the functions are compiled a second time for processors that can.

use super::Lanes;
use super::element::Element;
use super::wgmma::WARP_ROWS;
use crate::numeric::Half;
use crate::numeric::format::F32;

/// Rows and columns of a block of halves, and columns of a tile of D.
const SIDE: usize = 8;
/// Registers of D for each tile.
const D_REGISTERS: usize = 4;
/// Rows whose sums stay in the host's registers at a time.
const ROWS_AT_ONCE: usize = 4;

/// A function that is compiled twice, the second time for AVX2 and fused multiply-adds; its last argument says which it is.
macro_rules! compiled_twice {
    ($(#[$doc:meta])* $vis:vis fn $name:ident = $body:ident($($arg:ident: $kind:ty),*)) => {
        $(#[$doc])*
        $vis fn $name($($arg: $kind),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn fused($($arg: $kind),*) {
                    $body($($arg,)* true);
                }
                if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                    // SAFETY: both features the function is compiled for were just found on this processor.
                    return unsafe { fused($($arg),*) };
                }
            }
            $body($($arg,)* false);
        }
    };
}

/// The value of a half, as a type so that loops are made for each.
trait Value {
    fn of(code: u16) -> f64;
}

struct F16;
struct Bf16;

impl Value for F16 {
    #[inline(always)]
    fn of(code: u16) -> f64 {
        f64::from(Half::F16.widen(code))
    }
}

impl Value for Bf16 {
    #[inline(always)]
    fn of(code: u16) -> f64 {
        f64::from(Half::Bf16.widen(code))
    }
}

/// Whether both operands are halves of one type.
pub(super) fn are_halves(a: Element, b: Element) -> bool {
    a == b && matches!(a, Element::F16 | Element::Bf16)
}

compiled_twice! {
    /// Sixteen rows of A, row by row, from registers of blocks: down the rows, then along `k`.
    pub(super) fn left_from_blocks = left_blocks(element: Element, registers: &[&Lanes], k: usize, left: &mut [f64])
}

#[inline(always)]
fn left_blocks(element: Element, registers: &[&Lanes], k: usize, left: &mut [f64], _fused: bool) {
    match element {
        Element::F16 => left_blocks_of::<F16>(registers, k, left),
        _ => left_blocks_of::<Bf16>(registers, k, left),
    }
}

#[inline(always)]
fn left_blocks_of<T: Value>(registers: &[&Lanes], k: usize, left: &mut [f64]) {
    for (i, block) in registers.iter().enumerate() {
        let (first_row, first_k) = (i % 2 * SIDE, i / 2 * SIDE);
        for (row, words) in block.chunks_exact(4).enumerate() {
            let Some(to) = left.get_mut((first_row + row) * k + first_k..) else { return };
            let Some(to) = to.first_chunk_mut::<SIDE>() else { return };
            for (pair, word) in to.chunks_exact_mut(2).zip(words) {
                pair[0] = T::of(*word as u16);
                pair[1] = T::of((*word >> 16) as u16);
            }
        }
    }
}

compiled_twice! {
    /// B, one row of `n` values for each `k`, from registers of blocks: along `k`, then to the next columns.
    pub(super) fn right_from_blocks = right_blocks(element: Element, registers: &[&Lanes], k: usize, n: usize, right: &mut [f64])
}

#[inline(always)]
fn right_blocks(element: Element, registers: &[&Lanes], k: usize, n: usize, right: &mut [f64], _fused: bool) {
    match element {
        Element::F16 => right_blocks_of::<F16>(registers, k, n, right),
        _ => right_blocks_of::<Bf16>(registers, k, n, right),
    }
}

#[inline(always)]
fn right_blocks_of<T: Value>(registers: &[&Lanes], k: usize, n: usize, right: &mut [f64]) {
    for (i, block) in registers.iter().enumerate() {
        let (first_k, column) = (i % (k / SIDE) * SIDE, i / (k / SIDE) * SIDE);
        for pair in 0..4 {
            for half in 0..2 {
                let Some(to) = right.get_mut((first_k + 2 * pair + half) * n + column..) else { return };
                let Some(to) = to.first_chunk_mut::<SIDE>() else { return };
                for (j, to) in to.iter_mut().enumerate() {
                    *to = T::of((block[4 * j + pair] >> (16 * half)) as u16);
                }
            }
        }
    }
}

compiled_twice! {
    /// The values of halves as they lie in shared memory, eight in a piece.
    pub(super) fn pieces_in_order = ordered_pieces(element: Element, pieces: &[[u8; 16]], to: &mut [f64])
}

#[inline(always)]
fn ordered_pieces(element: Element, pieces: &[[u8; 16]], to: &mut [f64], _fused: bool) {
    match element {
        Element::F16 => pieces_of::<F16>(pieces, to),
        _ => pieces_of::<Bf16>(pieces, to),
    }
}

#[inline(always)]
fn pieces_of<T: Value>(pieces: &[[u8; 16]], to: &mut [f64]) {
    for (to, piece) in to.chunks_exact_mut(SIDE).zip(pieces) {
        for (to, code) in to.iter_mut().zip(piece.chunks_exact(2)) {
            *to = T::of(u16::from_le_bytes([code[0], code[1]]));
        }
    }
}

compiled_twice! {
    /// A matrix of `rows` rows the other way round.
    pub(super) fn transpose = transposed(from: &[f64], rows: usize, to: &mut [f64])
}

#[inline(always)]
fn transposed(from: &[f64], rows: usize, to: &mut [f64], _fused: bool) {
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

compiled_twice! {
    /// `D = A·B + D` for sixteen rows, or `D = A·B`. Sums go from D on in the order of `k`.
    pub(super) fn multiply = multiply_tiles(left: &[f64], k: usize, right: &[f64], n: usize, adds: bool, d: &mut [Lanes])
}

#[inline(always)]
fn multiply_tiles(left: &[f64], k: usize, right: &[f64], n: usize, adds: bool, d: &mut [Lanes], fused: bool) {
    for (tile, d) in d.chunks_exact_mut(D_REGISTERS).enumerate() {
        let Some(d) = d.first_chunk_mut::<D_REGISTERS>() else { return };
        for first in (0..WARP_ROWS).step_by(ROWS_AT_ONCE) {
            let mut sums = [[0f64; SIDE]; ROWS_AT_ONCE];
            for (row, sums) in sums.iter_mut().enumerate() {
                let lane = (first + row) % SIDE * 4;
                for (column, sum) in sums.iter_mut().enumerate() {
                    let word = d[(first + row) / SIDE * 2 + column % 2][lane + column / 2];
                    *sum = if adds { f64::from(f32::from_bits(word)) } else { 0.0 };
                }
            }
            for at in 0..k {
                let Some(values) =
                    right.get(at * n + tile * SIDE..).and_then(|row| row.first_chunk::<SIDE>())
                else {
                    return;
                };
                for (row, sums) in sums.iter_mut().enumerate() {
                    let x = left[(first + row) * k + at];
                    for (sum, y) in sums.iter_mut().zip(values) {
                        *sum = if fused { x.mul_add(*y, *sum) } else { x * y + *sum };
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                let lane = (first + row) % SIDE * 4;
                for (column, sum) in sums.iter().enumerate() {
                    let bits = if sum.is_nan() { F32.nan as u32 } else { (*sum as f32).to_bits() };
                    d[(first + row) / SIDE * 2 + column % 2][lane + column / 2] = bits;
                }
            }
        }
    }
}
