//! `wgmma.mma_async`: register fragments and the shared-memory operands.
//!
//! A warpgroup is four warps; warp `w` holds rows `16w` to `16w + 15` of A and
//! D. The functions here say where things are; memory and asynchrony are the
//! machine's. The dot products are [`sum_products`](super::contraction::sum_products).

use super::contraction::{Accumulate, add_row_products, decode};
use super::element::{Accumulator, Element};
use super::fragment::{Fragment, accumulator, multiplicand_a};
use super::{Lanes, Shape, tile};
use crate::numeric::format::{F16, F32, Overflow, Round};

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

/// A `wgmma.mma_async` with everything about it decided but where its operands lie.
#[derive(Clone, Debug)]
pub struct Product {
    /// 64 × N × K.
    pub shape: Shape,
    /// The types of D, A and B.
    pub d_type: Accumulator,
    /// See `d_type`.
    pub a_type: Element,
    /// See `d_type`.
    pub b_type: Element,
    /// How A lies in shared memory, if it does.
    pub a_major: Major,
    /// How B does.
    pub b_major: Major,
    /// Exactly one of A and B is negated.
    pub is_negative: bool,
    /// `.satfinite` of the integer products.
    pub satfinite: bool,
    /// Where one warp holds D.
    pub d: Fragment,
    /// Where one warp holds A, if not in shared memory.
    pub a: Fragment,
}

/// Rows of a warpgroup's A and D that one warp holds.
pub const WARP_ROWS: usize = 16;

/// Eight or sixteen bytes' worth of neighbours in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Row of A or column of B of its first element.
    pub mn: usize,
    /// The other index of it.
    pub k: usize,
    /// Where its 16 bytes lie.
    pub address: usize,
}

impl Product {
    /// `None` for shapes and types that do not go together. Both operands are K-major until said otherwise.
    pub fn new(shape: Shape, d_type: Accumulator, a_type: Element, b_type: Element) -> Option<Self> {
        use Element::{Bf16, E4m3, E5m2, F16, S8, Tf32, U8};
        let types = match (a_type, b_type) {
            (F16, F16) | (E4m3 | E5m2, E4m3 | E5m2) => matches!(d_type, Accumulator::F16 | Accumulator::F32),
            (Bf16, Bf16) | (Tf32, Tf32) => d_type == Accumulator::F32,
            (S8 | U8, S8 | U8) => d_type == Accumulator::S32,
            _ => false,
        };
        if !types || shape.m != ROWS || shape.k != depth(a_type) {
            return None;
        }
        Some(Product {
            d: d_fragment(shape.n, d_type)?,
            a: a_fragment(a_type),
            shape,
            d_type,
            a_type,
            b_type,
            a_major: Major::K,
            b_major: Major::K,
            is_negative: false,
            satfinite: false,
        })
    }

    /// Every 16-byte piece of an operand in shared memory, `count` rows or columns of it from `first` on.
    pub fn pieces(
        &self,
        descriptor: Descriptor,
        major: Major,
        first: usize,
        count: usize,
    ) -> impl Iterator<Item = Piece> + use<> {
        let bytes = self.a_type.bits() / 8;
        let (per_piece, k) = (16 / bytes, self.shape.k);
        let (mn_step, k_step) = match major {
            Major::K => (1, per_piece),
            Major::Mn => (per_piece, 1),
        };
        (first..first + count).step_by(mn_step).flat_map(move |mn| {
            (0..k).step_by(k_step).map(move |k| Piece {
                mn,
                k,
                address: descriptor.address(major, mn, k, bytes),
            })
        })
    }

    /// A warp's rows of A, row by row, from the 16 bytes of its pieces in the order of [`Product::pieces`].
    pub fn left_from_memory(&self, pieces: &[[u8; 16]]) -> Vec<f64> {
        let k = self.shape.k;
        let mut rows = vec![0.0; WARP_ROWS * k];
        match self.a_major {
            Major::K => self.values(self.a_type, pieces, &mut rows),
            Major::Mn => {
                let mut columns = vec![0.0; rows.len()];
                self.values(self.a_type, pieces, &mut columns);
                for (i, part) in columns.chunks_exact(self.per_piece()).enumerate() {
                    for (j, value) in part.iter().enumerate() {
                        rows[(i / k * self.per_piece() + j) * k + i % k] = *value;
                    }
                }
            }
        }
        rows
    }

    /// A warp's rows of A from its registers.
    pub fn left_from_registers(&self, registers: &[Lanes]) -> Vec<f64> {
        let mut rows = vec![0.0; WARP_ROWS * self.shape.k];
        if tile::are_halves(self.a_type, self.b_type) {
            let registers: Vec<&Lanes> = registers.iter().collect();
            tile::left_from_blocks(self.a_type, &registers, self.shape.k, &mut rows);
        } else if self.a_type.is_integer() {
            let k = self.shape.k;
            self.a.for_each(registers, |row, col, code| {
                rows[row * k + col] = f64::from(self.a_type.to_i32(code as u32));
            });
        } else {
            decode(&self.a, self.a_type, registers, &mut rows);
        }
        rows
    }

    /// B, one row of N values for each `k`, from the 16 bytes of its pieces in the order of [`Product::pieces`].
    pub fn right_from_memory(&self, pieces: &[[u8; 16]]) -> Vec<f64> {
        let Shape { n, k, .. } = self.shape;
        let mut read = vec![0.0; k * n];
        self.values(self.b_type, pieces, &mut read);
        let mut rows = vec![0.0; k * n];
        match self.b_major {
            Major::K => tile::transpose(&read, n, &mut rows),
            Major::Mn => {
                let per_piece = self.per_piece();
                for (i, part) in read.chunks_exact(per_piece).enumerate() {
                    rows[i % k * n + i / k * per_piece..][..per_piece].copy_from_slice(part);
                }
            }
        }
        rows
    }

    /// The elements of a piece.
    fn per_piece(&self) -> usize {
        128 / self.a_type.bits()
    }

    /// The values of pieces, one after the other.
    fn values(&self, element: Element, pieces: &[[u8; 16]], to: &mut [f64]) {
        if tile::are_halves(self.a_type, self.b_type) {
            tile::pieces_in_order(element, pieces, to);
            return;
        }
        let bytes = element.bits() / 8;
        let codes = pieces.iter().flat_map(|piece| piece.chunks_exact(bytes));
        for (to, code) in to.iter_mut().zip(codes) {
            let code = code.iter().rev().fold(0u32, |value, byte| value << 8 | u32::from(*byte));
            *to = if element.is_integer() {
                f64::from(element.to_i32(code))
            } else {
                f64::from(element.to_f32(code))
            };
        }
    }

    /// One warp's `D = A·B (+ D)`.
    pub fn multiply(&self, left: &[f64], right: &[f64], adds: bool, d: &mut [Lanes], mode: Accumulate) {
        let Shape { n, k, .. } = self.shape;
        if (self.d_type, mode) == (Accumulator::F32, Accumulate::Double) {
            let negated: Vec<f64>;
            let left = if self.is_negative {
                negated = left.iter().map(|x| -x).collect();
                &negated
            } else {
                left
            };
            return tile::multiply(left, k, right, n, adds, d);
        }
        let is_integer = self.a_type.is_integer();
        let mut sums = vec![0f64; WARP_ROWS * n];
        if adds {
            self.d.for_each(d, |row, col, code| {
                sums[row * n + col] = match self.d_type {
                    Accumulator::S32 => f64::from(code as u32 as i32),
                    Accumulator::F16 => f64::from(Element::F16.to_f32(code as u32)),
                    _ => f64::from(f32::from_bits(code as u32)),
                };
            });
        }
        // Sums of integers are exact in binary64.
        let mode = if is_integer { Accumulate::Double } else { mode };
        for (row, sums) in sums.chunks_exact_mut(n).enumerate() {
            let x = &left[row * k..(row + 1) * k];
            if self.is_negative {
                let negated: Vec<f64> = x.iter().map(|x| -x).collect();
                add_row_products(sums, &negated, right, n, mode);
            } else {
                add_row_products(sums, x, right, n, mode);
            }
        }
        self.d.fill(d, |row, col| {
            let total = sums[row * n + col];
            match self.d_type {
                Accumulator::S32 if self.satfinite => {
                    total.clamp(f64::from(i32::MIN), f64::from(i32::MAX)) as i32 as u32 as u64
                }
                Accumulator::S32 => total as i64 as u32 as u64,
                Accumulator::F16 => F16.narrow(total, Round::NearestEven, Overflow::Ieee),
                _ if total.is_nan() => F32.nan,
                _ => u64::from((total as f32).to_bits()),
            }
        });
    }
}
