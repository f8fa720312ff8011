//! Which lane holds which element of a matrix.

use super::Lanes;

/// The distribution of one matrix over the lanes of a warp.
///
/// Elements of a lane are numbered as PTX does (`a0, a1, …`): the low bits of
/// the first register first. Some `wmma` fragments hold elements twice or four
/// times; then every copy is read from memory and only the first takes part in
/// the product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragment {
    rows: usize,
    cols: usize,
    element_bits: usize,
    /// Row and column of element `i` of lane `l` at `i * 32 + l`.
    coordinates: Box<[(u16, u16)]>,
    /// How many of a lane's elements are no copies.
    distinct: usize,
}

impl Fragment {
    /// A fragment of `elements` per lane, placed by `coordinate(lane, element)`.
    pub(crate) fn new(
        rows: usize,
        cols: usize,
        element_bits: usize,
        elements: usize,
        coordinate: impl Fn(usize, usize) -> (usize, usize),
    ) -> Self {
        let place = |i: usize| {
            let (row, col) = coordinate(i % 32, i / 32);
            (row as u16, col as u16)
        };
        Fragment {
            rows,
            cols,
            element_bits,
            coordinates: (0..elements * 32).map(place).collect(),
            distinct: elements,
        }
    }

    /// The same fragment with every register held `times` over.
    pub(crate) fn replicated(mut self, times: usize) -> Self {
        self.coordinates = self.coordinates.repeat(times).into();
        self
    }

    /// Rows of the matrix.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Width of an element in bits.
    pub const fn element_bits(&self) -> usize {
        self.element_bits
    }

    /// Elements each lane holds, copies included.
    pub fn elements(&self) -> usize {
        self.coordinates.len() / 32
    }

    /// Elements each lane holds that are no copies of earlier ones.
    pub fn distinct_elements(&self) -> usize {
        self.distinct
    }

    /// 32-bit registers of each lane: two for each `.f64`.
    pub fn registers(&self) -> usize {
        self.elements() * self.element_bits / 32
    }

    /// Row and column of an element of a lane; `None` beyond the fragment.
    pub fn coordinates(&self, lane: usize, element: usize) -> Option<(usize, usize)> {
        if lane >= 32 {
            return None;
        }
        let &(row, col) = self.coordinates.get(element * 32 + lane)?;
        Some((row as usize, col as usize))
    }

    /// The first register an element lies in, and the bit it starts at.
    #[inline]
    pub const fn position(&self, element: usize) -> (usize, u32) {
        let bit = element * self.element_bits;
        (bit / 32, (bit % 32) as u32)
    }

    /// Calls `visit(row, col, code)` for every element that is no copy. `registers` must cover the
    /// fragment.
    #[inline]
    pub(crate) fn for_each(&self, registers: &[Lanes], mut visit: impl FnMut(usize, usize, u64)) {
        let mask = u64::MAX >> (64 - self.element_bits);
        for (element, places) in self.coordinates.chunks_exact(32).take(self.distinct).enumerate() {
            let (register, shift) = self.position(element);
            let low = &registers[register];
            // Only an element of 64 bits has its other half in the next register.
            let high = if self.element_bits == 64 { &registers[register + 1] } else { &[0; 32] };
            for (lane, &(row, col)) in places.iter().enumerate() {
                let word = low[lane] as u64 | (high[lane] as u64) << 32;
                visit(row as usize, col as usize, (word >> shift) & mask);
            }
        }
    }

    /// As [`Fragment::for_each`] for elements of up to 32 bits, with all lanes' codes of one element and their places.
    #[inline]
    pub(crate) fn for_each_row_of_lanes(
        &self,
        registers: &[Lanes],
        mut visit: impl FnMut(&[u32; 32], &[(u16, u16)]),
    ) {
        let mask = u32::MAX >> (32 - self.element_bits.min(32));
        for (element, places) in self.coordinates.chunks_exact(32).take(self.distinct).enumerate() {
            let (register, shift) = self.position(element);
            visit(&registers[register].map(|word| word >> shift & mask), places);
        }
    }

    /// Writes `code(row, col)` to every element of every lane.
    #[inline]
    pub(crate) fn fill(&self, registers: &mut [Lanes], code: impl Fn(usize, usize) -> u64) {
        for register in registers.iter_mut() {
            *register = [0; 32];
        }
        for element in 0..self.elements() {
            let (register, shift) = self.position(element);
            for lane in 0..32 {
                let (row, col) = self.coordinates[element * 32 + lane];
                let value = code(row as usize, col as usize);
                registers[register][lane] |= (value << shift) as u32;
                if self.element_bits == 64 {
                    registers[register + 1][lane] = (value >> 32) as u32;
                }
            }
        }
    }
}

/// A's place in the `mma` family: blocks of 8 rows and of four lanes' worth of
/// columns; the registers run down the rows of 16, then along the columns, then
/// to the next 16 rows.
pub(crate) fn multiplicand_a(m: usize, k: usize, bits: usize) -> Fragment {
    let per_register = (32 / bits).max(1);
    let tile_rows = m.min(16);
    let row_blocks = tile_rows / 8;
    let col_blocks = k / (4 * per_register);
    let tile_registers = row_blocks * col_blocks;
    Fragment::new(m, k, bits, m / tile_rows * tile_registers * per_register, |lane, element| {
        let (register, inside) = (element / per_register, element % per_register);
        let (tile, register) = (register / tile_registers, register % tile_registers);
        let row = tile * 16 + register % row_blocks * 8 + lane / 4;
        let col = (register / row_blocks * 4 + lane % 4) * per_register + inside;
        (row, col)
    })
}

/// B's place in the `mma` family: A's of 8 rows, transposed, for each 8 columns.
pub(crate) fn multiplicand_b(k: usize, n: usize, bits: usize) -> Fragment {
    let per_register = (32 / bits).max(1);
    let row_blocks = k / (4 * per_register);
    Fragment::new(k, n, bits, n / 8 * row_blocks * per_register, |lane, element| {
        let (register, inside) = (element / per_register, element % per_register);
        let (tile, register) = (register / row_blocks, register % row_blocks);
        ((register * 4 + lane % 4) * per_register + inside, tile * 8 + lane / 4)
    })
}

/// C's and D's place in the `mma` family: two neighbours of a row per lane, in
/// blocks of 8 by 8; down the rows of 16, then to the next tile.
pub(crate) fn accumulator(m: usize, n: usize, bits: usize) -> Fragment {
    let tile_rows = m.min(16);
    let row_blocks = tile_rows / 8;
    Fragment::new(m, n, bits, m * n / 32, |lane, element| {
        let (block, inside) = (element / 2, element % 2);
        let (tile, block) = (block / row_blocks, block % row_blocks);
        // Tiles run along the columns, or down the rows where there are 32 of them.
        let (row_tile, col_tile) = if m > 16 { (tile, 0) } else { (0, tile) };
        (row_tile * 16 + block * 8 + lane / 4, col_tile * 8 + lane % 4 * 2 + inside)
    })
}
