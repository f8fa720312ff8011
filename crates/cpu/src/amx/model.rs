//! A model of the tile instructions, bit for bit what their documentation says, and vectors to go with it on any machine.

use super::{Product, SIDE, TileUnit};
use crate::portable::Lanes;
use crate::simd::{Simd, simd_of};
use crate::tile::Gemm;
use half::bf16;

/// The tile unit as plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Model;

/// A tile register.
type Tile = [[u32; SIDE]; SIDE];

impl TileUnit for Model {
    unsafe fn enter() {}
    unsafe fn leave() {}
    unsafe fn multiply<const ROWS: usize, const COLUMNS: usize, const FRESH: bool>(a: &Product) {
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                // SAFETY: trait contract.
                unsafe {
                    let sums = a.sums.byte_add(row * SIDE * a.sum_stride).add(column * SIDE);
                    let mut c = if FRESH { [[0; SIDE]; SIDE] } else { load(sums, a.sum_stride) };
                    for depth in 0..a.depth {
                        let left = a.left.byte_add(row * SIDE * a.left_stride + depth * a.left_step);
                        let right = a.right.byte_add(depth * a.right_step).add(column * SIDE);
                        tdpbf16ps(&mut c, &load(left, a.left_stride), &load(right, a.right_stride));
                    }
                    for (i, line) in c.iter().enumerate() {
                        sums.byte_add(i * a.sum_stride).cast::<[u32; SIDE]>().write_unaligned(*line);
                    }
                }
            }
        }
    }
}

/// `tileloadd`.
unsafe fn load(p: *const f32, stride: usize) -> Tile {
    // SAFETY: contract of `TileUnit::multiply`.
    std::array::from_fn(|row| unsafe { p.byte_add(row * stride).cast::<[u32; SIDE]>().read_unaligned() })
}

/// `tdpbf16ps` as Intel's manual for software developers has it: products of even elements are added up one behind the other, from zero, those of odd
/// elements too, and the sum of both sums is added. Each step rounds to nearest even; subnormal numbers are zero, as input and as result.
pub(super) fn tdpbf16ps(c: &mut Tile, a: &Tile, b: &Tile) {
    for m in 0..SIDE {
        let mut sums = [[0.0f32; SIDE]; 2];
        for (parts, right) in a[m].map(split).iter().zip(b) {
            for n in 0..SIDE {
                let with = split(right[n]);
                for part in 0..2 {
                    sums[part][n] = multiply_add(parts[part], with[part], sums[part][n]);
                }
            }
        }
        for n in 0..SIDE {
            let sum = flush(sums[0][n] + sums[1][n]);
            c[m][n] = flush(flush(f32::from_bits(c[m][n])) + sum).to_bits();
        }
    }
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// A pair's elements.
fn split(pair: u32) -> [f32; 2] {
    [pair << 16, pair & 0xffff_0000].map(|bits| flush(f32::from_bits(bits)))
}

/// `a·b + c` rounded once. The product of two bfloat16 is an f32, exactly, unless it is too large or small for one: only then is a fused operation needed,
/// which is a slow function call on many machines.
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    let product = a * b;
    flush(if product.is_normal() { product + c } else { a.mul_add(b, c) })
}

/// Pairs of bfloat16 in vectors as wide as a tile.
#[derive(Clone, Copy)]
pub(crate) struct PortablePairs;

impl Simd for PortablePairs {
    type V = <Lanes<SIDE> as Simd>::V;
    const LANES: usize = SIDE;
    const REGISTERS: usize = 16;
    const PACKED: usize = 2;

    simd_of!(Lanes<SIDE>);

    #[inline(always)]
    unsafe fn dot(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: trait contract.
        unsafe {
            let odd = Self::fma(Self::part_bf16(a, 1), Self::part_bf16(b, 1), c);
            Self::fma(Self::part_bf16(a, 0), Self::part_bf16(b, 0), odd)
        }
    }
    #[inline(always)]
    unsafe fn round_pair(even: Self::V, odd: Self::V) -> Self::V {
        let half = |x: f32| u32::from(bf16::from_f32(x).to_bits());
        std::array::from_fn(|i| f32::from_bits(half(odd[i]) << 16 | half(even[i])))
    }
    #[inline(always)]
    unsafe fn lost_pair(even: Self::V, odd: Self::V) -> Self::V {
        // SAFETY: trait contract.
        unsafe {
            let pairs = Self::round_pair(even, odd);
            let lost = |row: Self::V, part| Self::sub(row, Self::part_bf16(pairs, part));
            Self::round_pair(lost(even, 0), lost(odd, 1))
        }
    }
}

impl Gemm for PortablePairs {}
