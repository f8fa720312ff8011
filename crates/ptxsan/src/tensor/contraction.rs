//! `D = A·B + C` over fragments.

use super::element::{Accumulator, Element};
use super::fragment::Fragment;
use super::wgmma::WARP_ROWS;
use super::{Lanes, Shape, tile};
use crate::numeric::Half;
use crate::numeric::float::fma_f64;
use crate::numeric::format::{F16, F32, F64, Overflow, Round, Unpacked, pow2};

/// How products of up to 32 bits are summed.
///
/// PTX leaves order and rounding open ("at least single precision"), so a
/// result is to be compared within an error bound, never bit for bit. Integer
/// and `.f64` products are the same in every mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// Exact products, summed in binary64 in the order of `k` starting from C, rounded once to D.
    #[default]
    Double,
    /// Exact products, each added in binary32 to nearest, in the order of `k` starting from C.
    Single,
    /// As tensor cores are known to do it: blocks of `block_k` exact products
    /// and the running sum are aligned at their largest exponent, cut off below
    /// `fraction_bits`, added, and cut to binary32 (Fasi, Higham, Mikaitis and
    /// Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).
    Aligned {
        /// Products per block.
        block_k: u8,
        /// Bits kept below the largest exponent.
        fraction_bits: u8,
    },
}

/// A register list that does not fit its fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operand {operand} needs {expected} 32-bit registers but was given {given}")]
pub struct RegisterCount {
    /// Which operand: `a`, `b`, `c` or `d`.
    pub operand: char,
    /// What its fragment holds.
    pub expected: usize,
    /// What was passed.
    pub given: usize,
}

/// A warp-wide matrix product with everything about it decided.
#[derive(Clone, Debug)]
pub struct Contraction {
    pub(crate) shape: Shape,
    /// Independent products side by side: `mma.m8n8k4` of `.f16` does four. Their
    /// A and C lie below one another in the fragments, their B side by side.
    pub(crate) batches: usize,
    pub(crate) a: Fragment,
    pub(crate) b: Fragment,
    pub(crate) c: Fragment,
    pub(crate) d: Fragment,
    pub(crate) a_type: Element,
    pub(crate) b_type: Element,
    pub(crate) c_type: Accumulator,
    pub(crate) d_type: Accumulator,
    /// `.satfinite` of the integer products.
    pub(crate) satfinite: bool,
    /// Rounding of the `.f64` products.
    pub(crate) round: Round,
}

impl Contraction {
    /// The extents of one product.
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Multiply-adds the instruction does, for counting: two floating-point operations each.
    pub const fn multiply_adds(&self) -> usize {
        self.batches * self.shape.m * self.shape.n * self.shape.k
    }

    /// Where A lies.
    pub const fn a(&self) -> &Fragment {
        &self.a
    }

    /// Where B lies.
    pub const fn b(&self) -> &Fragment {
        &self.b
    }

    /// Where C lies.
    pub const fn c(&self) -> &Fragment {
        &self.c
    }

    /// Where D lies.
    pub const fn d(&self) -> &Fragment {
        &self.d
    }

    /// Computes D from the other three.
    pub fn execute(
        &self,
        a: &[Lanes],
        b: &[Lanes],
        c: &[Lanes],
        d: &mut [Lanes],
        mode: Accumulate,
    ) -> Result<(), RegisterCount> {
        let given = [('a', &self.a, a.len()), ('b', &self.b, b.len()), ('c', &self.c, c.len())];
        for (operand, fragment, given) in given.into_iter().chain([('d', &self.d, d.len())]) {
            let expected = fragment.registers();
            if given != expected {
                return Err(RegisterCount { operand, expected, given });
            }
        }
        if self.a_type == Element::F64 {
            self.doubles(a, b, c, d);
        } else if self.a_type.is_integer() {
            self.integers(a, b, c, d);
        } else {
            self.singles(a, b, c, d, mode);
        }
        Ok(())
    }

    /// A by rows and B by columns, decoded.
    fn decoded<T: Copy + Default>(
        &self,
        a: &[Lanes],
        b: &[Lanes],
        from_a: impl Fn(u64) -> T,
        from_b: impl Fn(u64) -> T,
    ) -> (Vec<T>, Vec<T>) {
        let Shape { m, n, k } = self.shape;
        let mut rows = vec![T::default(); self.batches * m * k];
        let mut cols = vec![T::default(); self.batches * n * k];
        self.a.for_each(a, |row, col, code| rows[row * k + col] = from_a(code));
        self.b.for_each(b, |row, col, code| cols[col * k + row] = from_b(code));
        (rows, cols)
    }

    /// The row of A and the column of B that meet in an element of D.
    #[inline]
    fn pair<'a, T>(&self, rows: &'a [T], cols: &'a [T], row: usize, col: usize) -> (&'a [T], &'a [T]) {
        let Shape { m, n, k } = self.shape;
        let b_col = row / m * n + col;
        (&rows[row * k..(row + 1) * k], &cols[b_col * k..(b_col + 1) * k])
    }

    fn singles(&self, a: &[Lanes], b: &[Lanes], c: &[Lanes], d: &mut [Lanes], mode: Accumulate) {
        if mode == Accumulate::Double && self.is_tiled() {
            return self.tiles(a, b, c, d);
        }
        let Shape { m, n, k } = self.shape;
        let b_cols = self.batches * n;
        let mut left = vec![0f64; self.batches * m * k];
        let mut right = vec![0f64; k * b_cols];
        let mut sums = vec![0f64; self.batches * m * n];
        decode(&self.a, self.a_type, a, &mut left);
        decode(&self.b, self.b_type, b, &mut right);
        self.c.for_each(c, |row, col, code| {
            sums[row * n + col] = match self.c_type {
                Accumulator::F16 => Element::F16.to_f32(code as u32) as f64,
                _ => f32::from_bits(code as u32) as f64,
            };
        });
        for (row, sums) in sums.chunks_exact_mut(n).enumerate() {
            let x = &left[row * k..(row + 1) * k];
            let right = &right[row / m * n..];
            add_row_products(sums, x, right, b_cols, mode);
        }
        self.d.fill(d, |row, col| {
            let total = sums[row * n + col];
            match self.d_type {
                Accumulator::F16 => F16.narrow(total, Round::NearestEven, Overflow::Ieee),
                _ if total.is_nan() => F32.nan,
                _ => (total as f32).to_bits() as u64,
            }
        });
    }

    /// Whether D is made of tiles of 16 by 8 in binary32.
    fn is_tiled(&self) -> bool {
        let of_singles = (self.c_type, self.d_type) == (Accumulator::F32, Accumulator::F32);
        of_singles && self.batches == 1 && self.shape.m == WARP_ROWS
    }

    /// Adds A·B to D as [`Contraction::execute`] does, in binary64 for D of tiles and operands that are halves, without copying registers;
    /// `false` for others. `scratch` is room for values that need not be made again and again.
    pub(crate) fn execute_halves(
        &self,
        a: &[&Lanes],
        b: &[&Lanes],
        d: &mut [Lanes],
        mode: Accumulate,
        scratch: &mut Vec<f64>,
    ) -> bool {
        let Shape { m, n, k } = self.shape;
        let halves = tile::are_halves(self.a_type, self.b_type) && mode == Accumulate::Double;
        let of_a = m * k / 64;
        let of_b = k * n / 64;
        if !halves || !self.is_tiled() || m * k > 256 || k * n > 256 {
            return false;
        }
        if scratch.len() < (m + n) * k {
            scratch.resize((m + n) * k, 0.0);
        }
        // Every value of both is set below.
        let (left, right) = scratch[..(m + n) * k].split_at_mut(m * k);
        // Behind the registers of blocks there may be copies of them.
        let (Some(a), Some(b)) = (a.get(..of_a), b.get(..of_b)) else { return false };
        tile::left_from_blocks(self.a_type, a, k, left);
        tile::right_from_blocks(self.b_type, b, k, n, right);
        tile::multiply(left, k, right, n, true, d);
        true
    }

    /// As [`Contraction::singles`] for D of tiles, in binary64.
    fn tiles(&self, a: &[Lanes], b: &[Lanes], c: &[Lanes], d: &mut [Lanes]) {
        let Shape { m, n, k } = self.shape;
        let (mut left, mut right) = (vec![0.0; m * k], vec![0.0; k * n]);
        decode(&self.a, self.a_type, a, &mut left);
        decode(&self.b, self.b_type, b, &mut right);
        d.copy_from_slice(c);
        tile::multiply(&left, k, &right, n, true, d);
    }

    fn integers(&self, a: &[Lanes], b: &[Lanes], c: &[Lanes], d: &mut [Lanes]) {
        let (rows, cols) =
            self.decoded(a, b, |x| self.a_type.to_i32(x as u32), |x| self.b_type.to_i32(x as u32));
        let n = self.shape.n;
        let mut start = vec![0i64; self.batches * self.shape.m * n];
        self.c.for_each(c, |row, col, code| start[row * n + col] = code as u32 as i32 as i64);
        self.d.fill(d, |row, col| {
            let (x, y) = self.pair(&rows, &cols, row, col);
            let products: i64 = x.iter().zip(y).map(|(&p, &q)| (p * q) as i64).sum();
            let total = start[row * n + col] + products;
            let total = if self.satfinite { total.clamp(i32::MIN as i64, i32::MAX as i64) } else { total };
            total as u32 as u64
        });
    }

    fn doubles(&self, a: &[Lanes], b: &[Lanes], c: &[Lanes], d: &mut [Lanes]) {
        let (rows, cols) = self.decoded(a, b, |x| x, |x| x);
        let n = self.shape.n;
        let mut start = vec![0u64; self.batches * self.shape.m * n];
        self.c.for_each(c, |row, col, code| start[row * n + col] = code);
        self.d.fill(d, |row, col| {
            let (x, y) = self.pair(&rows, &cols, row, col);
            x.iter().zip(y).fold(start[row * n + col], |sum, (&p, &q)| fma_f64(p, q, sum, self.round))
        });
    }
}

/// Writes the values of a fragment to a matrix by rows. The type is looked at once, not per element, and 32 values are
/// converted at a time.
pub(super) fn decode(fragment: &Fragment, element: Element, registers: &[Lanes], matrix: &mut [f64]) {
    fn with(fragment: &Fragment, registers: &[Lanes], matrix: &mut [f64], value: impl Fn(u32) -> f32) {
        let cols = fragment.cols();
        fragment.for_each_row_of_lanes(registers, |codes, places| {
            let values = codes.map(|code| f64::from(value(code)));
            for (value, &(row, col)) in values.iter().zip(places) {
                matrix[usize::from(row) * cols + usize::from(col)] = *value;
            }
        });
    }
    match element {
        Element::F16 => with(fragment, registers, matrix, |code| Half::F16.widen(code as u16)),
        Element::Bf16 => with(fragment, registers, matrix, |code| Half::Bf16.widen(code as u16)),
        _ => with(fragment, registers, matrix, |code| element.to_f32(code)),
    }
}

/// Adds a row of A times the columns of B to a row of sums. `right` holds B by rows, `stride` apart.
/// The columns are the inner loop: their sums do not wait for one another.
pub(super) fn add_row_products(sums: &mut [f64], x: &[f64], right: &[f64], stride: usize, mode: Accumulate) {
    match mode {
        Accumulate::Double | Accumulate::Single => {
            for (&p, row) in x.iter().zip(right.chunks(stride)) {
                for (sum, &q) in sums.iter_mut().zip(row) {
                    let next = *sum + p * q;
                    *sum = if mode == Accumulate::Double { next } else { next as f32 as f64 };
                }
            }
        }
        Accumulate::Aligned { .. } => {
            let narrow = |x: &f64| *x as f32;
            let x: Vec<f32> = x.iter().map(narrow).collect();
            for (col, sum) in sums.iter_mut().enumerate() {
                let y: Vec<f32> = (0..x.len()).map(|i| narrow(&right[i * stride + col])).collect();
                *sum = sum_products(*sum as f32, &x, &y, mode);
            }
        }
    }
}

/// `start + Σ x·y`. Products of operands of at most 24 bits are exact in `f64`.
pub fn sum_products(start: f32, x: &[f32], y: &[f32], mode: Accumulate) -> f64 {
    let products = x.iter().zip(y).map(|(&p, &q)| p as f64 * q as f64);
    match mode {
        Accumulate::Double => products.fold(start as f64, |sum, product| sum + product),
        Accumulate::Single => products.fold(start, |sum, product| (sum as f64 + product) as f32) as f64,
        Accumulate::Aligned { block_k, fraction_bits } => {
            let products: Vec<f64> = products.collect();
            products
                .chunks(block_k.max(1) as usize)
                .fold(start as f64, |sum, block| aligned_sum(sum, block, fraction_bits))
        }
    }
}

/// One block of [`Accumulate::Aligned`].
fn aligned_sum(sum: f64, block: &[f64], fraction_bits: u8) -> f64 {
    let plain: f64 = block.iter().sum::<f64>() + sum;
    let terms = || block.iter().copied().chain([sum]);
    let largest = terms().filter(|term| *term != 0.0).map(exponent).max();
    let (Some(largest), true) = (largest, plain.is_finite()) else { return plain };
    let unit = pow2(largest - fraction_bits as i32);
    // Multiples of one unit, at most 2^(fraction_bits + 1) each: their sum is exact.
    let total: f64 = terms().map(|term| (term / unit).trunc()).sum::<f64>() * unit;
    F32.widen(F32.narrow(total, Round::TowardZero, Overflow::Ieee))
}

/// The exponent of the leading bit of a nonzero finite double.
fn exponent(value: f64) -> i32 {
    match F64.unpack(value.to_bits()) {
        Unpacked::Finite { exp, mant, .. } => exp + 63 - mant.leading_zeros() as i32,
        _ => 0,
    }
}
