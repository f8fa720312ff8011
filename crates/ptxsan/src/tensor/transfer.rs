//! `ldmatrix`, `stmatrix` and `movmatrix`: 8 by 8 matrices of 16-bit elements.
//!
//! Matrix `j` of an `.x1`, `.x2` or `.x4` instruction goes to register `j`; its
//! row `i` lies at the address that lane [`address_lane`]`(j, i)` holds, 16
//! bytes long and aligned to that.

use super::Lanes;

/// Eight rows of eight 16-bit elements.
pub type Matrix = [[u16; 8]; 8];

/// The lane whose address names row `row` of matrix `matrix`.
#[inline]
pub const fn address_lane(matrix: usize, row: usize) -> usize {
    matrix * 8 + row
}

/// Row and column of the low (`half` 0) or high (`half` 1) element of a lane's register.
#[inline]
pub const fn coordinates(lane: usize, half: usize, transposed: bool) -> (usize, usize) {
    let (major, minor) = (lane / 4, lane % 4 * 2 + half);
    if transposed { (minor, major) } else { (major, minor) }
}

/// A row as it lies in memory: two elements to a word, the first in the low half.
#[inline]
pub const fn row_from_words(words: [u32; 4]) -> [u16; 8] {
    let mut row = [0; 8];
    let mut i = 0;
    while i < 8 {
        row[i] = (words[i / 2] >> (16 * (i % 2))) as u16;
        i += 1;
    }
    row
}

/// The inverse of [`row_from_words`].
#[inline]
pub const fn row_to_words(row: [u16; 8]) -> [u32; 4] {
    let mut words = [0; 4];
    let mut i = 0;
    while i < 8 {
        words[i / 2] |= (row[i] as u32) << (16 * (i % 2));
        i += 1;
    }
    words
}

/// `ldmatrix`: what each lane's register receives.
pub fn distribute(matrix: &Matrix, transposed: bool) -> Lanes {
    std::array::from_fn(|lane| {
        let element = |half| {
            let (row, col) = coordinates(lane, half, transposed);
            matrix[row][col] as u32
        };
        element(0) | element(1) << 16
    })
}

/// `stmatrix`: the matrix that the lanes' registers hold.
pub fn collect(register: &Lanes, transposed: bool) -> Matrix {
    let mut matrix = [[0; 8]; 8];
    for (lane, &word) in register.iter().enumerate() {
        for half in 0..2 {
            let (row, col) = coordinates(lane, half, transposed);
            matrix[row][col] = (word >> (16 * half)) as u16;
        }
    }
    matrix
}

/// `movmatrix.trans`
pub fn transpose(register: &Lanes) -> Lanes {
    distribute(&collect(register, false), true)
}
