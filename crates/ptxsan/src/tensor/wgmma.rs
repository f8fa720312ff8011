//! `wgmma.mma_async`: register fragments and the shared-memory operands.
//!
//! A warpgroup is four warps; warp `w` holds rows `16w` to `16w + 15` of A and
//! D. The functions here say where things are; memory and asynchrony are the
//! machine's. The dot products are [`sum_products`](super::contraction::sum_products).

use super::element::{Accumulator, Element};
use super::fragment::{Fragment, accumulator, multiplicand_a};

/// Rows of every `wgmma`.
pub const ROWS: usize = 64;

/// Columns of A for an element type: 32 bytes' worth.
pub const fn depth(element: Element) -> usize {
    256 / element.bits()
}

/// One warp's 16 rows of A in registers: that of `mma` with the same depth.
/// Add `16 ·` (warp in its warpgroup) to the rows.
pub fn a_fragment(element: Element) -> Fragment {
    multiplicand_a(16, depth(element), element.bits())
}

/// One warp's 16 rows of D, for `n` columns (a multiple of 8 up to 256), `None` otherwise.
/// Add `16 ·` (warp in its warpgroup) to the rows.
pub fn d_fragment(n: usize, kind: Accumulator) -> Option<Fragment> {
    let integer_fits = kind != Accumulator::S32 || n <= 32 || n.is_multiple_of(16);
    let fits = n.is_multiple_of(8) && (8..=256).contains(&n) && kind != Accumulator::F64 && integer_fits;
    fits.then(|| accumulator(16, n, kind.bits()))
}

/// How 16-byte pieces are permuted within their pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Rows of 16 bytes, no permutation.
    None,
    /// Patterns of 32 bytes.
    Bytes32,
    /// Patterns of 64 bytes.
    Bytes64,
    /// Patterns of 128 bytes.
    Bytes128,
}

impl Swizzle {
    /// The length of the contiguous run that is permuted.
    pub const fn span_bytes(self) -> usize {
        16 << self.bits()
    }

    /// How many address bits take part.
    const fn bits(self) -> u32 {
        match self {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes128 => 3,
        }
    }

    /// The shared-memory address a logical address maps to: address bits from 7 on
    /// are added, without carry, to those from 4 on. TMA writes by the same rule.
    pub const fn apply(self, address: usize) -> usize {
        let mask = (1 << self.bits()) - 1;
        address ^ (((address >> 7) & mask) << 4)
    }
}

/// The direction in which a matrix in shared memory is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// Along `k`: `imm-trans` 0.
    K,
    /// Along `m` or `n`: `imm-trans` 1, 16-bit elements only.
    Mn,
}

/// A 64-bit matrix descriptor, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// Where the matrix starts, in bytes.
    pub start_bytes: usize,
    /// Leading-dimension byte offset.
    pub leading_bytes: usize,
    /// Stride-dimension byte offset.
    pub stride_bytes: usize,
    /// Which of the eight 128-byte rows the swizzle pattern starts at.
    pub base_offset: usize,
    /// The swizzling mode.
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Reads the bit fields; every pattern is a descriptor.
    pub const fn decode(bits: u64) -> Self {
        const fn field(bits: u64, from: u32) -> usize {
            (((bits >> from) & 0x3fff) << 4) as usize
        }
        Descriptor {
            start_bytes: field(bits, 0),
            leading_bytes: field(bits, 16),
            stride_bytes: field(bits, 32),
            base_offset: ((bits >> 49) & 7) as usize,
            swizzle: match bits >> 62 {
                0 => Swizzle::None,
                1 => Swizzle::Bytes128,
                2 => Swizzle::Bytes64,
                _ => Swizzle::Bytes32,
            },
        }
    }

    /// The shared-memory address of an element. `mn` is the row of A or the
    /// column of B, `k` the other index, `bytes` the element's size.
    ///
    /// The layouts are the canonical ones of the PTX ISA (9.7.15.5.1.2.1.3).
    pub const fn address(&self, major: Major, mn: usize, k: usize, bytes: usize) -> usize {
        let per_piece = 16 / bytes;
        let pieces = self.swizzle.span_bytes() / 16;
        let logical = match (major, self.swizzle) {
            (Major::K, Swizzle::None) => {
                mn % 8 * 16
                    + mn / 8 * self.stride_bytes
                    + k % per_piece * bytes
                    + k / per_piece * self.leading_bytes
            }
            (Major::K, _) => mn % 8 * pieces * 16 + mn / 8 * self.stride_bytes + k * bytes,
            (Major::Mn, Swizzle::None) => {
                mn % per_piece * bytes
                    + mn / per_piece * self.stride_bytes
                    + k % 8 * 16
                    + k / 8 * self.leading_bytes
            }
            (Major::Mn, _) => {
                let run = per_piece * pieces;
                mn % run * bytes
                    + mn / run * self.leading_bytes
                    + k % 8 * pieces * 16
                    + k / 8 * self.stride_bytes
            }
        };
        let address = self.start_bytes + logical;
        // The permutation goes by the distance from the start of the pattern.
        let phase = self.base_offset << 7;
        self.swizzle.apply(address.wrapping_sub(phase)).wrapping_add(phase)
    }
}
