//! Which lane holds what, against the formulas of the PTX ISA as they stand there.

use super::{every_mma, every_quad};
use crate::tensor::mma::Mma;
use crate::tensor::wmma::{Operand, Wmma, default_stride, fragment};
use crate::tensor::{Accumulator, Element, Fragment, Layout, Shape, wgmma};

/// Every element of the matrix is held by `copies` places.
fn assert_owned(fragment: &Fragment, copies: usize, what: &str) {
    let mut owners = vec![0; fragment.rows() * fragment.cols()];
    for element in 0..fragment.elements() {
        for lane in 0..32 {
            let (row, col) = fragment.coordinates(lane, element).expect("within the fragment");
            owners[row * fragment.cols() + col] += 1;
        }
    }
    assert!(owners.iter().all(|&count| count == copies), "{what}: {owners:?}");
    assert_eq!(fragment.coordinates(0, fragment.elements()), None);
    assert_eq!(fragment.coordinates(32, 0), None);
}

#[test]
fn every_element_has_one_owner() {
    for mma in every_mma().into_iter().chain(every_quad()) {
        let product = mma.contraction().unwrap_or_else(|| panic!("{mma:?} is documented"));
        for (name, fragment) in
            [("a", product.a()), ("b", product.b()), ("c", product.c()), ("d", product.d())]
        {
            assert_owned(fragment, 1, &format!("{mma:?} {name}"));
        }
    }
}

#[test]
fn undocumented_combinations_are_refused() {
    let refused = [
        Mma::new(Shape::new(16, 8, 8), Element::F64, Accumulator::F32),
        Mma::new(Shape::new(16, 16, 16), Element::F16, Accumulator::F32),
        Mma::new(Shape::new(16, 8, 4), Element::Bf16, Accumulator::F32),
        Mma::new(Shape::new(16, 8, 16), Element::Bf16, Accumulator::F16),
        Mma { b: Element::Bf16, ..Mma::new(Shape::new(16, 8, 16), Element::F16, Accumulator::F32) },
        Mma { c: Accumulator::F16, ..Mma::new(Shape::new(16, 8, 16), Element::F16, Accumulator::F32) },
        Mma { c: Accumulator::F32, ..Mma::new(Shape::new(8, 8, 4), Element::F16, Accumulator::F16) },
        Mma { a_layout: Layout::Col, ..Mma::new(Shape::new(16, 8, 16), Element::F16, Accumulator::F32) },
        Mma { satfinite: true, ..Mma::new(Shape::new(16, 8, 16), Element::F16, Accumulator::F32) },
    ];
    for mma in refused {
        assert!(mma.contraction().is_none(), "{mma:?}");
    }
    assert!(Wmma::new(Shape::new(16, 16, 16), Element::E4m3, Accumulator::F32).contraction().is_none());
    assert!(Wmma::new(Shape::new(16, 16, 16), Element::S8, Accumulator::F32).contraction().is_none());
    assert!(fragment(Shape::new(16, 16, 8), Operand::C(Accumulator::F16)).is_none());
    assert!(wgmma::d_fragment(12, Accumulator::F32).is_none());
    assert!(wgmma::d_fragment(264, Accumulator::F32).is_none());
    assert!(wgmma::d_fragment(40, Accumulator::S32).is_none());
}

/// Compares a fragment with a formula `(groupID, threadID_in_group, i) -> (row, col)`.
fn assert_formula(fragment: &Fragment, formula: impl Fn(usize, usize, usize) -> (usize, usize), what: &str) {
    for i in 0..fragment.distinct_elements() {
        for lane in 0..32 {
            let want = formula(lane >> 2, lane % 4, i);
            assert_eq!(fragment.coordinates(lane, i), Some(want), "{what} lane {lane} element {i}");
        }
    }
}

fn product_of(
    shape: (usize, usize, usize),
    element: Element,
    accumulator: Accumulator,
) -> crate::tensor::Contraction {
    Mma::new(Shape::new(shape.0, shape.1, shape.2), element, accumulator).contraction().expect("documented")
}

#[test]
fn sixteen_bit_fragments_match_the_documented_formulas() {
    let wide = product_of((16, 8, 16), Element::F16, Accumulator::F32);
    let a = |g, t, i| {
        let row = if i < 2 || (4..6).contains(&i) { g } else { g + 8 };
        (row, t * 2 + (i & 1) + if i >= 4 { 8 } else { 0 })
    };
    assert_formula(wide.a(), a, "m16n8k16 a");
    assert_formula(wide.b(), |g, t, i| (t * 2 + (i & 1) + if i >= 2 { 8 } else { 0 }, g), "m16n8k16 b");
    let c = |g, t, i| (if i < 2 { g } else { g + 8 }, t * 2 + (i & 1));
    assert_formula(wide.c(), c, "m16n8k16 c");
    let narrow = product_of((16, 8, 8), Element::Bf16, Accumulator::F32);
    assert_formula(narrow.a(), |g, t, i| (if i < 2 { g } else { g + 8 }, t * 2 + (i & 1)), "m16n8k8 a");
    assert_formula(narrow.b(), |g, t, i| (t * 2 + i, g), "m16n8k8 b");
    assert_formula(product_of((16, 8, 8), Element::F16, Accumulator::F16).c(), c, "m16n8k8 c");
    assert_eq!((wide.a().registers(), wide.b().registers(), wide.c().registers()), (4, 2, 4));
}

#[test]
fn other_widths_match_the_documented_formulas() {
    let tf32 = product_of((16, 8, 8), Element::Tf32, Accumulator::F32);
    let a = |g, t, i| (if i % 2 == 0 { g } else { g + 8 }, if i < 2 { t } else { t + 4 });
    assert_formula(tf32.a(), a, "tf32 k8 a");
    assert_formula(tf32.b(), |g, t, i| (if i == 0 { t } else { t + 4 }, g), "tf32 k8 b");
    let tf32 = product_of((16, 8, 4), Element::Tf32, Accumulator::F32);
    assert_formula(tf32.a(), |g, t, i| (if i == 0 { g } else { g + 8 }, t), "tf32 k4 a");
    assert_formula(tf32.b(), |g, t, _| (t, g), "tf32 k4 b");

    let int8 = product_of((16, 8, 32), Element::S8, Accumulator::S32);
    let a = |g, t, i: usize| {
        let row = if i < 4 || (8..12).contains(&i) { g } else { g + 8 };
        (row, t * 4 + (i & 3) + if i >= 8 { 16 } else { 0 })
    };
    assert_formula(int8.a(), a, "s8 k32 a");
    assert_formula(product_of((16, 8, 32), Element::E4m3, Accumulator::F32).a(), a, "e4m3 k32 a");
    let b = |g, t, i: usize| (t * 4 + (i & 3) + if i >= 4 { 16 } else { 0 }, g);
    assert_formula(int8.b(), b, "s8 k32 b");
    let int8 = product_of((16, 8, 16), Element::U8, Accumulator::S32);
    assert_formula(int8.a(), |g, t, i| (if i < 4 { g } else { g + 8 }, t * 4 + (i & 3)), "u8 k16 a");
    assert_formula(int8.b(), |g, t, i| (t * 4 + i, g), "u8 k16 b");
    let int8 = product_of((8, 8, 16), Element::S8, Accumulator::S32);
    assert_formula(int8.a(), |g, t, i| (g, t * 4 + i), "s8 m8n8k16 a");
    assert_formula(int8.b(), |g, t, i| (t * 4 + i, g), "s8 m8n8k16 b");
    assert_formula(int8.c(), |g, t, i| (g, t * 2 + i), "s8 m8n8k16 c");

    let int4 = product_of((16, 8, 64), Element::S4, Accumulator::S32);
    let a = |g, t, i: usize| {
        let row = if i < 8 || (16..24).contains(&i) { g } else { g + 8 };
        (row, t * 8 + (i & 7) + if i >= 16 { 32 } else { 0 })
    };
    assert_formula(int4.a(), a, "s4 k64 a");
    let int4 = product_of((16, 8, 32), Element::U4, Accumulator::S32);
    assert_formula(int4.a(), |g, t, i| (if i < 8 { g } else { g + 8 }, t * 8 + (i & 7)), "u4 k32 a");

    let double = product_of((16, 8, 16), Element::F64, Accumulator::F64);
    let a = |g, t, i| if i % 2 == 0 { (g, i * 2 + t) } else { (g + 8, i * 2 - 2 + t) };
    assert_formula(double.a(), a, "f64 k16 a");
    assert_formula(double.b(), |g, t, i| (t + i * 4, g), "f64 k16 b");
    let double = product_of((8, 8, 4), Element::F64, Accumulator::F64);
    assert_formula(double.a(), |g, t, _| (g, t), "f64 m8n8k4 a");
    assert_formula(double.b(), |g, t, _| (t, g), "f64 m8n8k4 b");
    assert_formula(double.c(), |g, t, i| (g, t * 2 + (i & 1)), "f64 m8n8k4 c");
    assert_eq!((double.a().registers(), double.c().registers()), (2, 4));
}

#[test]
fn quad_fragments_match_the_documented_formulas() {
    for mma in every_quad() {
        let product = mma.contraction().expect("documented");
        for lane in 0..32 {
            // The four products lie below one another (A, C) or side by side (B).
            let quad =
                [0..4, 4..8, 8..12, 12..16].iter().position(|r| r.contains(&(lane % 16))).expect("a quad");
            let upper = if lane < 16 { 0 } else { 4 };
            for i in 0..4 {
                let a = match mma.a_layout {
                    Layout::Row => (lane % 4 + upper, i),
                    Layout::Col => (i % 4 + upper, lane % 4),
                };
                assert_eq!(product.a().coordinates(lane, i), Some((quad * 8 + a.0, a.1)));
                let b = match mma.b_layout {
                    Layout::Row => (lane % 4, i + upper),
                    Layout::Col => (i, lane % 4 + upper),
                };
                assert_eq!(product.b().coordinates(lane, i), Some((b.0, quad * 8 + b.1)));
            }
            for i in 0..8 {
                let place = |kind| match kind {
                    Accumulator::F16 => (lane % 4 + upper, i),
                    _ => ((lane & 1) + (i & 2) + upper, (i & 4) + (lane & 2) + (i & 1)),
                };
                for (fragment, kind) in [(product.c(), mma.c), (product.d(), mma.d)] {
                    let (row, col) = place(kind);
                    assert_eq!(fragment.coordinates(lane, i), Some((quad * 8 + row, col)), "{mma:?}");
                }
            }
        }
    }
}

#[test]
fn wmma_fragments_have_the_register_counts_of_the_isa() {
    let square = Shape::new(16, 16, 16);
    let tall = Shape::new(32, 8, 16);
    let flat = Shape::new(8, 32, 16);
    let registers = |shape, operand| fragment(shape, operand).expect("documented").registers();
    for shape in [square, tall, flat] {
        for operand in [Operand::A(Element::F16), Operand::B(Element::F16)] {
            assert_eq!(registers(shape, operand), 8, "{shape:?} {operand:?}");
        }
        assert_eq!(registers(shape, Operand::C(Accumulator::F16)), 4);
        assert_eq!(registers(shape, Operand::C(Accumulator::F32)), 8);
        assert_eq!(registers(shape, Operand::C(Accumulator::S32)), 8);
    }
    for (shape, a16, b16, a8, b8) in [(square, 4, 4, 2, 2), (flat, 2, 8, 1, 4), (tall, 8, 2, 4, 1)] {
        assert_eq!(registers(shape, Operand::A(Element::Bf16)), a16);
        assert_eq!(registers(shape, Operand::B(Element::Bf16)), b16);
        assert_eq!(registers(shape, Operand::A(Element::U8)), a8);
        assert_eq!(registers(shape, Operand::B(Element::S8)), b8);
    }
    let tf32 = Shape::new(16, 16, 8);
    assert_eq!(registers(tf32, Operand::A(Element::Tf32)), 4);
    assert_eq!(registers(tf32, Operand::B(Element::Tf32)), 4);
    assert_eq!(registers(Shape::new(8, 8, 4), Operand::A(Element::F64)), 2);
    assert_eq!(registers(Shape::new(8, 8, 4), Operand::C(Accumulator::F64)), 4);
    assert_eq!(registers(Shape::new(8, 8, 32), Operand::A(Element::S4)), 1);
    for (shape, a_copies, b_copies) in [(square, 2, 2), (tall, 1, 4), (flat, 4, 1)] {
        assert_owned(&fragment(shape, Operand::A(Element::F16)).expect("documented"), a_copies, "f16 a");
        assert_owned(&fragment(shape, Operand::B(Element::F16)).expect("documented"), b_copies, "f16 b");
        assert_owned(&fragment(shape, Operand::B(Element::U8)).expect("documented"), 1, "u8 b");
        assert_owned(&fragment(shape, Operand::C(Accumulator::F32)).expect("documented"), 1, "c");
    }
    assert_eq!(default_stride(flat, Operand::B(Element::F16), Layout::Row), 32);
    assert_eq!(default_stride(flat, Operand::B(Element::F16), Layout::Col), 16);
    assert_eq!(default_stride(tall, Operand::A(Element::F16), Layout::Col), 32);
    assert_eq!(default_stride(tall, Operand::C(Accumulator::F32), Layout::Row), 8);
}

#[test]
fn wgmma_fragments_cover_their_sixteen_rows() {
    for (element, registers) in [(Element::F16, 4), (Element::Tf32, 4), (Element::E4m3, 4), (Element::S8, 4)]
    {
        let a = wgmma::a_fragment(element);
        assert_eq!((a.registers(), a.cols()), (registers, wgmma::depth(element)));
        assert_owned(&a, 1, "wgmma a");
    }
    for n in (8..=256).step_by(8) {
        let d = wgmma::d_fragment(n, Accumulator::F32).expect("documented");
        assert_eq!(d.registers(), n / 2);
        assert_owned(&d, 1, "wgmma d");
        // Figure 149: pairs of columns, 8 rows apart, then the next 8 columns.
        assert_formula(&d, |g, t, i| (g + (i / 2 % 2) * 8, i / 4 * 8 + t * 2 + (i & 1)), "wgmma d");
    }
    assert_eq!(wgmma::d_fragment(64, Accumulator::F16).expect("documented").registers(), 16);
}
