//! Products against three plain loops.

use super::{accumulator_code, element_code, every_mma, every_quad, filled};
use crate::numeric::Round;
use crate::numeric::format::{F16, F32, Overflow};
use crate::tensor::contraction::sum_products;
use crate::tensor::mma::Mma;
use crate::tensor::wmma::Wmma;
use crate::tensor::{Accumulate, Accumulator, Contraction, Element, Lanes, RegisterCount, Shape};

const MODES: [Accumulate; 3] =
    [Accumulate::Double, Accumulate::Single, Accumulate::Aligned { block_k: 8, fraction_bits: 24 }];

/// Small integers that differ from place to place: every sum is exact in every type.
fn small(row: usize, col: usize, spread: i32, signed: bool) -> i32 {
    let value = ((row * 7 + col * 3 + row * col) % spread as usize) as i32;
    if signed { value - spread / 2 } else { value }
}

fn signed(element: Element) -> bool {
    !matches!(element, Element::U8 | Element::U4)
}

/// Runs a product on small integers and compares every element of D exactly.
fn check(product: &Contraction, a: Element, b: Element, c: Accumulator, d: Accumulator, batches: usize) {
    let Shape { m, n, k } = product.shape();
    let value_a = |row, col| small(row, col, 5, signed(a));
    let value_b = |row, col| small(col, row, 7, signed(b));
    let value_c = |row, col| small(row + 1, col, 9, true);
    let a_registers = filled(product.a(), |row, col| element_code(a, value_a(row, col)));
    let b_registers = filled(product.b(), |row, col| element_code(b, value_b(row, col)));
    let c_registers = filled(product.c(), |row, col| accumulator_code(c, value_c(row, col)));
    let mut want = vec![0; batches * m * n];
    for batch in 0..batches {
        for row in 0..m {
            for col in 0..n {
                let mut sum = value_c(batch * m + row, col);
                for inner in 0..k {
                    sum += value_a(batch * m + row, inner) * value_b(inner, batch * n + col);
                }
                want[(batch * m + row) * n + col] = sum;
            }
        }
    }
    for mode in MODES {
        let mut d_registers = vec![[0xdead_beef; 32]; product.d().registers()];
        product
            .execute(&a_registers, &b_registers, &c_registers, &mut d_registers, mode)
            .expect("counts fit");
        product.d().for_each(&d_registers, |row, col, code| {
            let sum = want[row * n + col];
            assert_eq!(code, accumulator_code(d, sum), "{a:?} {b:?} {d:?} {:?} {mode:?}", product.shape());
        });
    }
}

#[test]
fn every_mma_is_a_matrix_product() {
    for mma in every_mma() {
        let product = mma.contraction().expect("documented");
        let quads = mma.a == Element::F16 && mma.shape.m == 8;
        check(&product, mma.a, mma.b, mma.c, mma.d, if quads { 4 } else { 1 });
    }
    for mma in every_quad() {
        check(&mma.contraction().expect("documented"), mma.a, mma.b, mma.c, mma.d, 4);
    }
}

#[test]
fn multiplicands_of_two_types_multiply() {
    use Element::*;
    for (a, b, d) in [(E4m3, E5m2, Accumulator::F32), (S8, U8, Accumulator::S32), (U8, S8, Accumulator::S32)]
    {
        let mma = Mma { b, ..Mma::new(Shape::new(16, 8, 32), a, d) };
        check(&mma.contraction().expect("documented"), a, b, d, d, 1);
    }
    let mma = Mma { b: S4, ..Mma::new(Shape::new(16, 8, 64), U4, Accumulator::S32) };
    check(&mma.contraction().expect("documented"), U4, S4, Accumulator::S32, Accumulator::S32, 1);
}

#[test]
fn every_wmma_is_a_matrix_product() {
    use Element::*;
    let shapes = [Shape::new(16, 16, 16), Shape::new(32, 8, 16), Shape::new(8, 32, 16)];
    for shape in shapes {
        for (c, d) in [
            (Accumulator::F16, Accumulator::F16),
            (Accumulator::F16, Accumulator::F32),
            (Accumulator::F32, Accumulator::F16),
            (Accumulator::F32, Accumulator::F32),
        ] {
            let wmma = Wmma { c, ..Wmma::new(shape, F16, d) };
            check(&wmma.contraction().expect("documented"), F16, F16, c, d, 1);
        }
        for (element, kind) in [(Bf16, Accumulator::F32), (S8, Accumulator::S32), (U8, Accumulator::S32)] {
            check(
                &Wmma::new(shape, element, kind).contraction().expect("documented"),
                element,
                element,
                kind,
                kind,
                1,
            );
        }
    }
    for (shape, element, kind) in [
        (Shape::new(16, 16, 8), Tf32, Accumulator::F32),
        (Shape::new(8, 8, 4), F64, Accumulator::F64),
        (Shape::new(8, 8, 32), S4, Accumulator::S32),
    ] {
        check(
            &Wmma::new(shape, element, kind).contraction().expect("documented"),
            element,
            element,
            kind,
            kind,
            1,
        );
    }
}

/// Any codes, of subnormals, infinities and NaN too: products of halves have a path of their own, which must not show.
#[test]
fn halves_are_multiplied_as_everything_else() {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.rotate_left(11)
    };
    let mut scratch = Vec::new();
    let mma = |k, element| Mma::new(Shape::new(16, 8, k), element, Accumulator::F32).contraction();
    let wmma = |element| Wmma::new(Shape::new(16, 16, 16), element, Accumulator::F32).contraction();
    for element in [Element::F16, Element::Bf16] {
        for product in [mma(8, element), mma(16, element), wmma(element)].map(|p| p.expect("documented")) {
            let Shape { n, k, .. } = product.shape();
            let mut fill = |registers: usize| -> Vec<Lanes> {
                (0..registers).map(|_| std::array::from_fn(|_| next())).collect()
            };
            let [a, b, c] = [product.a(), product.b(), product.c()].map(|f| fill(f.registers()));
            let mut values = [vec![0f32; 16 * k], vec![0f32; k * n], vec![0f32; 16 * n]];
            product.a().for_each(&a, |row, col, code| values[0][row * k + col] = element.to_f32(code as u32));
            product.b().for_each(&b, |row, col, code| values[1][col * k + row] = element.to_f32(code as u32));
            product.c().for_each(&c, |row, col, code| values[2][row * n + col] = f32::from_bits(code as u32));
            let mut d = c.clone();
            let [ra, rb] = [&a, &b].map(|all| all.iter().collect::<Vec<&Lanes>>());
            assert!(product.execute_halves(&ra, &rb, &mut d, Accumulate::Double, &mut scratch));
            let [left, right, start] = &values;
            product.d().for_each(&d, |row, col, code| {
                let (x, y) = (&left[row * k..][..k], &right[col * k..][..k]);
                let sum = sum_products(start[row * n + col], x, y, Accumulate::Double) as f32;
                let want = if sum.is_nan() { 0x7fff_ffff } else { sum.to_bits() };
                assert_eq!(code as u32, want, "{element:?} {:?} at {row}, {col}", product.shape());
            });
        }
    }
}

#[test]
fn integer_products_wrap_or_saturate() {
    let plain = Mma::new(Shape::new(16, 8, 32), Element::S8, Accumulator::S32);
    for (satfinite, up, down) in
        [(true, i32::MAX, i32::MIN), (false, i32::MAX.wrapping_add(127), i32::MIN.wrapping_sub(127))]
    {
        let product = Mma { satfinite, ..plain }.contraction().expect("documented");
        for (sign, c, want) in [(1, i32::MAX, up), (-1, i32::MIN, down)] {
            // One product of 127 on the diagonal of k = 0.
            let a = filled(product.a(), |_, col| {
                element_code(Element::S8, if col == 0 { 127 * sign } else { 0 })
            });
            let b = filled(product.b(), |_, _| element_code(Element::S8, 1));
            let c = filled(product.c(), |_, _| accumulator_code(Accumulator::S32, c));
            let mut d = vec![[0; 32]; 4];
            product.execute(&a, &b, &c, &mut d, Accumulate::Double).expect("counts fit");
            assert!(
                d.iter().flatten().all(|&word| word as i32 == want),
                "{satfinite} {sign}: {:?}",
                d[0][0] as i32
            );
        }
    }
}

#[test]
fn tf32_ignores_the_low_bits() {
    let product =
        Mma::new(Shape::new(16, 8, 4), Element::Tf32, Accumulator::F32).contraction().expect("documented");
    let ones: Vec<Lanes> = vec![[0x3f80_1fff; 32]; product.a().registers()];
    let b: Vec<Lanes> = vec![[0x3f80_0000; 32]; product.b().registers()];
    let c = vec![[0; 32]; 4];
    let mut d = c.clone();
    product.execute(&ones, &b, &c, &mut d, Accumulate::Double).expect("counts fit");
    assert!(d.iter().flatten().all(|&word| word == 4f32.to_bits()));
}

#[test]
fn accumulation_modes_differ_where_they_should() {
    let tiny = 2f32.powi(-24);
    let ones = [1f32; 4];
    let terms = [tiny; 4];
    // Four halves of a unit: kept together by the wide sum, lost one by one in single precision.
    assert_eq!(sum_products(1.0, &terms, &ones, Accumulate::Double) as f32, 1.0 + 4.0 * tiny);
    assert_eq!(sum_products(1.0, &terms, &ones, Accumulate::Single) as f32, 1.0);
    let cut = |fraction_bits, block_k| Accumulate::Aligned { block_k, fraction_bits };
    assert_eq!(sum_products(1.0, &terms, &ones, cut(23, 4)) as f32, 1.0);
    assert_eq!(sum_products(1.0, &terms, &ones, cut(24, 4)) as f32, 1.0 + 4.0 * tiny);
    // One at a time even 24 bits lose to the truncation of the running sum.
    assert_eq!(sum_products(1.0, &terms, &ones, cut(24, 1)) as f32, 1.0);
    assert_eq!(sum_products(0.0, &[-1.0, 1.0], &[1.0, 1.0], cut(24, 8)), 0.0);
    assert_eq!(sum_products(0.0, &[], &[], cut(24, 0)), 0.0);
    for mode in MODES {
        assert!(sum_products(f32::INFINITY, &[f32::NEG_INFINITY], &[1.0], mode).is_nan());
        assert_eq!(sum_products(1.0, &[f32::INFINITY], &[2.0], mode), f64::INFINITY);
    }
}

#[test]
fn results_are_rounded_to_the_type_of_d() {
    for (kind, overflow, nan) in
        [(Accumulator::F16, 0x7c00u64, 0x7fffu64), (Accumulator::F32, 0, 0x7fff_ffff)]
    {
        let product = Mma::new(Shape::new(16, 8, 16), Element::F16, kind).contraction().expect("documented");
        let b = filled(product.b(), |_, _| element_code(Element::F16, 1));
        let c = filled(product.c(), |_, _| 0);
        let mut d = vec![[0; 32]; product.d().registers()];
        let a = filled(product.a(), |_, _| F16.narrow(60000.0, Round::NearestEven, Overflow::Ieee));
        product.execute(&a, &b, &c, &mut d, Accumulate::Double).expect("counts fit");
        let exact = F32.narrow(16.0 * 60000.0, Round::NearestEven, Overflow::Ieee);
        let want = if kind == Accumulator::F16 { overflow } else { exact };
        product.d().for_each(&d, |_, _, code| assert_eq!(code, want));
        let a = filled(product.a(), |_, col| if col == 3 { 0xfe01 } else { 0 });
        product.execute(&a, &b, &c, &mut d, Accumulate::Double).expect("counts fit");
        product.d().for_each(&d, |_, _, code| assert_eq!(code, nan));
    }
}

#[test]
fn double_products_round_in_the_asked_direction() {
    let third = 1.0f64 / 3.0;
    let value = |round| {
        let mma = Mma { round, ..Mma::new(Shape::new(8, 8, 4), Element::F64, Accumulator::F64) };
        let product = mma.contraction().expect("documented");
        let a = filled(product.a(), |_, _| third.to_bits());
        let b = filled(product.b(), |_, _| third.to_bits());
        let c = filled(product.c(), |_, _| 1f64.to_bits());
        let mut d = vec![[0; 32]; 4];
        product.execute(&a, &b, &c, &mut d, Accumulate::Double).expect("counts fit");
        f64::from_bits(d[0][0] as u64 | (d[1][0] as u64) << 32)
    };
    assert!(value(Round::Down) < value(Round::Up));
    assert!((value(Round::NearestEven) - (1.0 + 4.0 / 9.0)).abs() < 1e-15);
}

#[test]
fn wrong_register_counts_are_reported() {
    let product =
        Mma::new(Shape::new(16, 8, 16), Element::F16, Accumulator::F32).contraction().expect("documented");
    let lanes = [[0; 32]; 8];
    let mut d = [[0; 32]; 8];
    let run = |a: usize, b: usize, c: usize, d: &mut [Lanes]| {
        product.execute(&lanes[..a], &lanes[..b], &lanes[..c], d, Accumulate::Double)
    };
    assert_eq!(run(4, 2, 4, &mut d[..4]), Ok(()));
    let error = RegisterCount { operand: 'b', expected: 2, given: 1 };
    assert_eq!(run(4, 1, 4, &mut d[..4]), Err(error));
    assert_eq!(error.to_string(), "operand b needs 2 32-bit registers but was given 1");
    assert!(run(4, 2, 4, &mut d[..5]).is_err() && run(3, 2, 4, &mut d[..4]).is_err());
}
