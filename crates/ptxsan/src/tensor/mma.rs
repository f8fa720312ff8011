//! `mma.sync.aligned`

use super::contraction::Contraction;
use super::element::{Accumulator, Element};
use super::fragment::{Fragment, accumulator, multiplicand_a, multiplicand_b};
use super::{Layout, Shape};
use crate::numeric::Round;

/// An `mma` as its opcode spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mma {
    /// `.m16n8k16` and so on.
    pub shape: Shape,
    /// A's layout; only `.m8n8k4` of `.f16` may be other than [`Layout::Row`].
    pub a_layout: Layout,
    /// B's layout; only `.m8n8k4` of `.f16` may be other than [`Layout::Col`].
    pub b_layout: Layout,
    /// D's type.
    pub d: Accumulator,
    /// A's type.
    pub a: Element,
    /// B's type.
    pub b: Element,
    /// C's type.
    pub c: Accumulator,
    /// `.satfinite`
    pub satfinite: bool,
    /// The rounding modifier of `.f64`.
    pub round: Round,
}

impl Mma {
    /// An `mma` of `.row.col` with equal types on each side and no modifiers.
    pub const fn new(shape: Shape, multiplicand: Element, accumulator: Accumulator) -> Self {
        Mma {
            shape,
            a_layout: Layout::Row,
            b_layout: Layout::Col,
            d: accumulator,
            a: multiplicand,
            b: multiplicand,
            c: accumulator,
            satfinite: false,
            round: Round::NearestEven,
        }
    }

    /// The product this spells, or `None` if the PTX ISA has no such instruction.
    pub fn contraction(self) -> Option<Contraction> {
        let Shape { m, n, k } = self.shape;
        let quads = self.shape == Shape::new(8, 8, 4) && self.a == Element::F16;
        let layouts_fit = quads || (self.a_layout == Layout::Row && self.b_layout == Layout::Col);
        if !self.is_documented() || !layouts_fit || (self.satfinite && !self.a.is_integer()) {
            return None;
        }
        let (a, b, c, d) = if quads {
            (quad_a(self.a_layout), quad_b(self.b_layout), quad_c(self.c), quad_c(self.d))
        } else {
            (
                multiplicand_a(m, k, self.a.bits()),
                multiplicand_b(k, n, self.b.bits()),
                accumulator(m, n, self.c.bits()),
                accumulator(m, n, self.d.bits()),
            )
        };
        Some(Contraction {
            shape: self.shape,
            batches: if quads { 4 } else { 1 },
            a,
            b,
            c,
            d,
            a_type: self.a,
            b_type: self.b,
            c_type: self.c,
            d_type: self.d,
            satfinite: self.satfinite,
            round: self.round,
        })
    }

    /// The table of shapes and types.
    fn is_documented(self) -> bool {
        use Accumulator as Acc;
        use Element::*;
        let shape = (self.shape.m, self.shape.n, self.shape.k);
        let same = self.a == self.b;
        let float = self.c == self.d && matches!(self.d, Acc::F16 | Acc::F32);
        match (self.a, self.b) {
            // C may be narrower than D in the oldest shape.
            (F16, F16) if shape == (8, 8, 4) => {
                matches!((self.c, self.d), (Acc::F16, Acc::F16 | Acc::F32) | (Acc::F32, Acc::F32))
            }
            (F16, F16) => float && matches!(shape, (16, 8, 8 | 16)),
            (Bf16, Bf16) => (self.c, self.d) == (Acc::F32, Acc::F32) && matches!(shape, (16, 8, 8 | 16)),
            (Tf32, Tf32) => (self.c, self.d) == (Acc::F32, Acc::F32) && matches!(shape, (16, 8, 4 | 8)),
            (E4m3 | E5m2, E4m3 | E5m2) => float && matches!(shape, (16, 8, 16 | 32)),
            (F64, F64) => {
                let shapes = matches!(shape, (8, 8, 4) | (16, 8, 4 | 8 | 16));
                same && (self.c, self.d) == (Acc::F64, Acc::F64) && shapes
            }
            (S8 | U8, S8 | U8) => {
                let shapes = matches!(shape, (8, 8, 16) | (16, 8, 16 | 32));
                (self.c, self.d) == (Acc::S32, Acc::S32) && shapes
            }
            (S4 | U4, S4 | U4) => {
                let shapes = matches!(shape, (8, 8, 32) | (16, 8, 32 | 64));
                (self.c, self.d) == (Acc::S32, Acc::S32) && shapes
            }
            _ => false,
        }
    }
}

/// The product a lane of `mma.m8n8k4` works on: lanes 0–3 and 16–19 do the first, and so on.
const fn quad_of(lane: usize) -> usize {
    lane % 16 / 4
}

/// The upper half of the warp holds the upper half of a quad's rows or columns.
const fn quad_half(lane: usize) -> usize {
    lane / 16 * 4
}

fn quad_a(layout: Layout) -> Fragment {
    Fragment::new(32, 4, 16, 4, |lane, i| {
        let (row, col) = match layout {
            Layout::Row => (lane % 4, i),
            Layout::Col => (i, lane % 4),
        };
        (quad_of(lane) * 8 + quad_half(lane) + row, col)
    })
}

fn quad_b(layout: Layout) -> Fragment {
    Fragment::new(4, 32, 16, 4, |lane, i| {
        let (row, col) = match layout {
            Layout::Row => (lane % 4, i),
            Layout::Col => (i, lane % 4),
        };
        (row, quad_of(lane) * 8 + quad_half(lane) + col)
    })
}

fn quad_c(kind: Accumulator) -> Fragment {
    Fragment::new(32, 8, kind.bits(), 8, |lane, i| {
        let (row, col) = match kind {
            Accumulator::F16 => (lane % 4, i),
            _ => ((lane & 1) + (i & 2), (i & 4) + (lane & 2) + (i & 1)),
        };
        (quad_of(lane) * 8 + quad_half(lane) + row, col)
    })
}
