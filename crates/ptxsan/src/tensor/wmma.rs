//! `wmma.load`, `wmma.mma` and `wmma.store`.
//!
//! PTX leaves the distribution of `wmma` fragments open. Here they are made of
//! the documented fragments of `mma`: tiles of 16 rows of A, of 8 columns of B,
//! of 16 by 8 of C. The register counts are those of the ISA; the `.f16`
//! multiplicands, for which it always asks for eight registers, hold their
//! elements twice or four times where fewer would do.

use super::contraction::Contraction;
use super::element::{Accumulator, Element};
use super::fragment::{Fragment, accumulator, multiplicand_a, multiplicand_b};
use super::{Layout, Shape};
use crate::numeric::Round;

/// Registers of an `.f16` multiplicand of every shape.
const F16_REGISTERS: usize = 8;

/// A matrix operand of `wmma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// The left multiplicand.
    A(Element),
    /// The right multiplicand.
    B(Element),
    /// The accumulator, C or D.
    C(Accumulator),
}

/// Whether the ISA has this shape for this multiplicand.
fn has_shape(shape: Shape, element: Element) -> bool {
    let shape = (shape.m, shape.n, shape.k);
    match element {
        Element::F16 | Element::Bf16 | Element::S8 | Element::U8 => {
            matches!(shape, (16, 16, 16) | (8, 32, 16) | (32, 8, 16))
        }
        Element::Tf32 => shape == (16, 16, 8),
        Element::F64 => shape == (8, 8, 4),
        Element::S4 | Element::U4 => shape == (8, 8, 32),
        Element::E4m3 | Element::E5m2 => false,
    }
}

/// Whether the ISA has this shape with this accumulator.
fn has_accumulator(shape: Shape, kind: Accumulator) -> bool {
    let with = |elements: &[Element]| elements.iter().any(|&element| has_shape(shape, element));
    match kind {
        Accumulator::F16 => with(&[Element::F16]),
        Accumulator::F32 => with(&[Element::F16, Element::Tf32]),
        Accumulator::S32 => with(&[Element::S8, Element::S4]),
        Accumulator::F64 => with(&[Element::F64]),
    }
}

/// The fragment a `wmma.load` fills or a `wmma.store` empties; `None` if the ISA has no such one.
///
/// Lane `l` loads its element `i` from [`Layout::offset`] of `coordinates(l, i)`.
pub fn fragment(shape: Shape, operand: Operand) -> Option<Fragment> {
    let widened = |fragment: Fragment, element: Element| {
        let copies = F16_REGISTERS / fragment.registers();
        if element == Element::F16 { fragment.replicated(copies) } else { fragment }
    };
    let Shape { m, n, k } = shape;
    match operand {
        Operand::A(e) => has_shape(shape, e).then(|| widened(multiplicand_a(m, k, e.bits()), e)),
        Operand::B(e) => has_shape(shape, e).then(|| widened(multiplicand_b(k, n, e.bits()), e)),
        Operand::C(kind) => has_accumulator(shape, kind).then(|| accumulator(m, n, kind.bits())),
    }
}

/// The distance between rows (or columns) that `wmma.load` and `.store` take when none is given.
pub const fn default_stride(shape: Shape, operand: Operand, layout: Layout) -> usize {
    let (rows, cols) = match operand {
        Operand::A(_) => (shape.m, shape.k),
        Operand::B(_) => (shape.k, shape.n),
        Operand::C(_) => (shape.m, shape.n),
    };
    match layout {
        Layout::Row => cols,
        Layout::Col => rows,
    }
}

/// A `wmma.mma` as its opcode spells it. The layouts do not matter: here a
/// fragment is the same for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wmma {
    /// `.m16n16k16` and so on.
    pub shape: Shape,
    /// A's and B's type.
    pub multiplicand: Element,
    /// D's type.
    pub d: Accumulator,
    /// C's type.
    pub c: Accumulator,
    /// `.satfinite`
    pub satfinite: bool,
    /// The rounding modifier of `.f64`.
    pub round: Round,
}

impl Wmma {
    /// A `wmma.mma` with equal accumulators and no modifiers.
    pub const fn new(shape: Shape, multiplicand: Element, accumulator: Accumulator) -> Self {
        Wmma {
            shape,
            multiplicand,
            d: accumulator,
            c: accumulator,
            satfinite: false,
            round: Round::NearestEven,
        }
    }

    /// The product this spells, or `None` if the PTX ISA has no such instruction.
    pub fn contraction(self) -> Option<Contraction> {
        use Accumulator as Acc;
        let fits = |kind: Acc| match self.multiplicand {
            Element::F16 => matches!(kind, Acc::F16 | Acc::F32),
            Element::Bf16 | Element::Tf32 => kind == Acc::F32,
            Element::F64 => kind == Acc::F64,
            _ => kind == Acc::S32,
        };
        if !fits(self.c) || !fits(self.d) || (self.satfinite && self.c != Acc::S32) {
            return None;
        }
        Some(Contraction {
            shape: self.shape,
            batches: 1,
            a: fragment(self.shape, Operand::A(self.multiplicand))?,
            b: fragment(self.shape, Operand::B(self.multiplicand))?,
            c: fragment(self.shape, Operand::C(self.c))?,
            d: fragment(self.shape, Operand::C(self.d))?,
            a_type: self.multiplicand,
            b_type: self.multiplicand,
            c_type: self.c,
            d_type: self.d,
            satfinite: self.satfinite,
            round: self.round,
        })
    }
}
