//! What PTX's warp-wide matrix instructions compute, as pure functions.
//!
//! A register of a whole warp is a [`Lanes`]: one 32-bit word per lane. A
//! 64-bit register is two of them, the low words first.
//!
//! [`Fragment`] says which lane holds which matrix element; [`Contraction`]
//! is `D = A·B + C` over four fragments; [`mma`], [`wmma`] and [`wgmma`] make
//! those for the shapes and types of the PTX ISA (9.7.14 and 9.7.15);
//! [`transfer`] is `ldmatrix`, `stmatrix` and `movmatrix`.

pub mod contraction;
pub mod element;
pub mod fragment;
pub mod mma;
mod tile;
pub mod transfer;
pub mod wgmma;
pub mod wmma;

#[cfg(test)]
mod tests;

pub use contraction::{Accumulate, Contraction, RegisterCount};
pub use element::{Accumulator, Element};
pub use fragment::Fragment;

/// One 32-bit register of all lanes of a warp.
pub type Lanes = [u32; 32];

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Rows are contiguous.
    Row,
    /// Columns are contiguous.
    Col,
}

impl Layout {
    /// The offset, in elements, of an element from the start of the matrix.
    #[inline]
    pub const fn offset(self, row: usize, col: usize, stride: usize) -> usize {
        match self {
            Layout::Row => row * stride + col,
            Layout::Col => col * stride + row,
        }
    }
}

/// The extents `m`, `n`, `k` of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
}

impl Shape {
    /// `m·n·k` as PTX spells it: `.m16n8k16` is `Shape::new(16, 8, 16)`.
    pub const fn new(m: usize, n: usize, k: usize) -> Self {
        Shape { m, n, k }
    }
}
