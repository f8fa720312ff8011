//! Tests of the matrix instructions against plain products and the documented formulas.

mod layouts;
mod products;
mod shared;

use super::{Accumulator, Element, Fragment, Lanes, Layout, Shape};
use crate::numeric::Round;
use crate::tensor::mma::Mma;

/// Every `mma` of `.row.col` with equal multiplicand types.
pub(super) fn every_mma() -> Vec<Mma> {
    use Accumulator as Acc;
    use Element::*;
    type Row<'a> = (&'a [Element], &'a [Accumulator], &'a [(usize, usize, usize)]);
    let table: &[Row<'_>] = &[
        (&[F16], &[Acc::F16, Acc::F32], &[(8, 8, 4), (16, 8, 8), (16, 8, 16)]),
        (&[Bf16], &[Acc::F32], &[(16, 8, 8), (16, 8, 16)]),
        (&[Tf32], &[Acc::F32], &[(16, 8, 4), (16, 8, 8)]),
        (&[E4m3, E5m2], &[Acc::F16, Acc::F32], &[(16, 8, 16), (16, 8, 32)]),
        (&[F64], &[Acc::F64], &[(8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)]),
        (&[S8, U8], &[Acc::S32], &[(8, 8, 16), (16, 8, 16), (16, 8, 32)]),
        (&[S4, U4], &[Acc::S32], &[(8, 8, 32), (16, 8, 32), (16, 8, 64)]),
    ];
    let mut all = Vec::new();
    for (elements, accumulators, shapes) in table {
        for &element in *elements {
            for &accumulator in *accumulators {
                for &(m, n, k) in *shapes {
                    all.push(Mma::new(Shape::new(m, n, k), element, accumulator));
                }
            }
        }
    }
    all
}

/// The four layouts of `.m8n8k4` with every accumulator pair.
pub(super) fn every_quad() -> Vec<Mma> {
    let mut all = Vec::new();
    for a_layout in [Layout::Row, Layout::Col] {
        for b_layout in [Layout::Row, Layout::Col] {
            for (c, d) in [
                (Accumulator::F16, Accumulator::F16),
                (Accumulator::F16, Accumulator::F32),
                (Accumulator::F32, Accumulator::F32),
            ] {
                let plain = Mma::new(Shape::new(8, 8, 4), Element::F16, d);
                all.push(Mma { a_layout, b_layout, c, ..plain });
            }
        }
    }
    all
}

/// The code of a small integer in an element type.
pub(super) fn element_code(element: Element, value: i32) -> u64 {
    use crate::numeric::format::{BF16, E4M3, E5M2, F16, F64, TF32};
    use crate::numeric::{Format, Overflow};
    let float = |format: &Format| format.narrow(value as f64, Round::NearestEven, Overflow::Ieee);
    match element {
        Element::F16 => float(&F16),
        Element::Bf16 => float(&BF16),
        Element::Tf32 => float(&TF32) << 13,
        Element::E4m3 => float(&E4M3),
        Element::E5m2 => float(&E5M2),
        Element::F64 => float(&F64),
        Element::S8 | Element::U8 => value as u8 as u64,
        Element::S4 | Element::U4 => value as u64 & 0xf,
    }
}

/// The code of a small integer in an accumulator type.
pub(super) fn accumulator_code(kind: Accumulator, value: i32) -> u64 {
    match kind {
        Accumulator::F16 => element_code(Element::F16, value),
        Accumulator::F32 => (value as f32).to_bits() as u64,
        Accumulator::F64 => (value as f64).to_bits(),
        Accumulator::S32 => value as u32 as u64,
    }
}

/// Registers holding `code(row, col)`.
pub(super) fn filled(fragment: &Fragment, code: impl Fn(usize, usize) -> u64) -> Vec<Lanes> {
    let mut registers = vec![[0; 32]; fragment.registers()];
    fragment.fill(&mut registers, code);
    registers
}
