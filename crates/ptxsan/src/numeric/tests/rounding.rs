//! Arithmetic of `.f32` and `.f64` in every rounding mode.

use super::Random;
use super::model::{Exact, Fixed, magnitude, search};
use crate::numeric::float::*;
use crate::numeric::format::{F32, F64};
use crate::numeric::{FloatMode, Format, Round};

/// A finite code with exponents crowded together, so that sums cancel and round.
fn code(format: &Format, random: &mut Random) -> u64 {
    let sign = random.next() & format.sign_mask();
    let fields = (1 << format.exp_bits) - 1;
    let field = match random.below(4) {
        0 => random.below(3),
        1 => fields - 1 - random.below(3),
        2 => (fields / 2 + random.below(8)).saturating_sub(4),
        _ => random.below(fields),
    };
    let fraction = match random.below(3) {
        0 => random.below(4),
        1 => (1 << format.man_bits) - 1 - random.below(4),
        _ => random.below(1 << format.man_bits),
    };
    sign | field << format.man_bits | fraction
}

fn zero(format: &Format, negative: bool) -> u64 {
    if negative { format.sign_mask() } else { 0 }
}

/// `a·b + c` by the model, with the sign rules of a zero sum.
fn model_fma(format: &Format, a: u64, b: u64, c: u64, round: Round) -> u64 {
    let product = Exact::product(format, a, b);
    let addend = Exact::of(format, c);
    let total = product.plus(&addend);
    if total.magnitude.is_zero() {
        let same = product.negative == addend.negative;
        return zero(format, if same { product.negative } else { round == Round::Down });
    }
    total.round(format, round)
}

#[test]
fn f32_fma_add_mul_match_the_model() {
    let mut random = Random(1);
    let one = 1f32.to_bits() as u64;
    for _ in 0..6000 {
        let [a, b, mut c] = [0; 3].map(|_| code(&F32, &mut random));
        if random.below(4) == 0 {
            // Cancel the product as far as possible.
            c = mul_f32(a as u32, b as u32 ^ 0x8000_0000, FloatMode::DEFAULT) as u64;
            if c & F32.infinity() == F32.infinity() {
                continue;
            }
        }
        for round in Round::ARITHMETIC {
            let mode = FloatMode::rounded(round);
            let got = fma_f32(a as u32, b as u32, c as u32, mode) as u64;
            assert_eq!(got, model_fma(&F32, a, b, c, round), "fma {a:x} {b:x} {c:x} {round:?}");
            let got = add_f32(a as u32, c as u32, mode) as u64;
            assert_eq!(got, model_fma(&F32, a, one, c, round), "add {a:x} {c:x} {round:?}");
            let got = sub_f32(a as u32, c as u32, mode) as u64;
            assert_eq!(got, model_fma(&F32, a, one, c ^ 0x8000_0000, round), "sub {a:x} {c:x} {round:?}");
            let got = mul_f32(a as u32, b as u32, mode) as u64;
            assert_eq!(got, Exact::product(&F32, a, b).round(&F32, round), "mul {a:x} {b:x} {round:?}");
        }
    }
}

#[test]
fn f64_fma_add_mul_match_the_model() {
    let mut random = Random(2);
    let one = 1f64.to_bits();
    for _ in 0..4000 {
        let [a, b, mut c] = [0; 3].map(|_| code(&F64, &mut random));
        if random.below(4) == 0 {
            c = mul_f64(a, b ^ F64.sign_mask(), Round::NearestEven);
            if c & F64.infinity() == F64.infinity() {
                continue;
            }
        }
        for round in Round::ARITHMETIC {
            assert_eq!(
                fma_f64(a, b, c, round),
                model_fma(&F64, a, b, c, round),
                "{a:x} {b:x} {c:x} {round:?}"
            );
            assert_eq!(add_f64(a, c, round), model_fma(&F64, a, one, c, round), "{a:x} {c:x} {round:?}");
            let negated = c ^ F64.sign_mask();
            assert_eq!(
                sub_f64(a, c, round),
                model_fma(&F64, a, one, negated, round),
                "{a:x} {c:x} {round:?}"
            );
            let product = Exact::product(&F64, a, b).round(&F64, round);
            assert_eq!(mul_f64(a, b, round), product, "{a:x} {b:x} {round:?}");
        }
    }
}

/// `a/b` by the model: `q` lies to the quotient as `q·|b|` to `|a|`.
fn model_div(format: &Format, a: u64, b: u64, round: Round) -> u64 {
    let mask = format.sign_mask() - 1;
    let ((ma, ea), (mb, eb)) = (magnitude(format, a & mask), magnitude(format, b & mask));
    let numerator = Fixed::new(ma, ea);
    let negative = (a ^ b) & format.sign_mask() != 0;
    search(format, negative, round, |mant, exp| Fixed::new(mant * mb, exp + eb).cmp(&numerator))
}

fn model_sqrt(format: &Format, a: u64, round: Round) -> u64 {
    let (mant, exp) = magnitude(format, a);
    let radicand = Fixed::new(mant, exp);
    search(format, false, round, |m, e| Fixed::new(m * m, 2 * e).cmp(&radicand))
}

#[test]
fn division_and_square_root_match_the_model() {
    let mut random = Random(3);
    for _ in 0..2500 {
        let [a, b] = [0; 2].map(|_| code(&F32, &mut random));
        let [c, d] = [0; 2].map(|_| code(&F64, &mut random));
        if b & 0x7fff_ffff == 0 || d & !F64.sign_mask() == 0 {
            continue;
        }
        let (positive, positive64) = (a & 0x7fff_ffff, c & !F64.sign_mask());
        for round in Round::ARITHMETIC {
            let mode = FloatMode::rounded(round);
            let got = div_f32(a as u32, b as u32, mode) as u64;
            assert_eq!(got, model_div(&F32, a, b, round), "div {a:x} {b:x} {round:?}");
            let one = 1f32.to_bits() as u64;
            assert_eq!(rcp_f32(b as u32, mode) as u64, model_div(&F32, one, b, round), "rcp {b:x} {round:?}");
            assert_eq!(div_f64(c, d, round), model_div(&F64, c, d, round), "div {c:x} {d:x} {round:?}");
            let got = sqrt_f32(positive as u32, mode) as u64;
            assert_eq!(got, model_sqrt(&F32, positive, round), "sqrt {positive:x} {round:?}");
            let got = sqrt_f64(positive64, round);
            assert_eq!(got, model_sqrt(&F64, positive64, round), "sqrt {positive64:x} {round:?}");
        }
    }
}

#[test]
fn special_values_follow_ieee_754() {
    let inf = f32::INFINITY.to_bits();
    let nan = 0x7fff_ffff;
    for round in Round::ARITHMETIC {
        let mode = FloatMode::rounded(round);
        assert_eq!(add_f32(inf, inf ^ 0x8000_0000, mode), nan);
        assert_eq!(fma_f32(inf, 0, 0, mode), nan);
        assert_eq!(fma_f32(inf, 0x3f80_0000, 0xff80_0000, mode), nan);
        assert_eq!(mul_f32(0x7f80_0001, 0, mode), nan);
        assert_eq!(add_f32(inf, 0x3f80_0000, mode), inf);
        assert_eq!(fma_f32(0, 0, inf, mode), inf);
        assert_eq!(div_f32(0x3f80_0000, 0x8000_0000, mode), 0xff80_0000);
        assert_eq!(div_f32(0, 0, mode), nan);
        assert_eq!(div_f32(0x3f80_0000, 0xff80_0000, mode), 0x8000_0000);
        assert_eq!(sqrt_f32(0xbf80_0000, mode), nan);
        assert_eq!(sqrt_f32(0x8000_0000, mode), 0x8000_0000);
        let down = round == Round::Down;
        assert_eq!(add_f32(0, 0x8000_0000, mode), if down { 0x8000_0000 } else { 0 });
        assert_eq!(add_f32(0, 0, mode), 0);
        assert_eq!(add_f32(0x8000_0000, 0x8000_0000, mode), 0x8000_0000);
        let inf64 = f64::INFINITY.to_bits();
        assert!(f64::from_bits(add_f64(inf64, inf64 ^ F64.sign_mask(), round)).is_nan());
        assert!(f64::from_bits(fma_f64(inf64, 0, 0, round)).is_nan());
        assert_eq!(fma_f64(0, 0, inf64, round), inf64);
        assert_eq!(div_f64(1f64.to_bits(), F64.sign_mask(), round), inf64 | F64.sign_mask());
        assert!(f64::from_bits(sqrt_f64((-1f64).to_bits(), round)).is_nan());
        assert_eq!(add_f64(0, F64.sign_mask(), round), if down { F64.sign_mask() } else { 0 });
    }
    // A signalling double comes back quiet, with its payload.
    assert_eq!(add_f64(0x7ff0_0000_0000_0123, 0, Round::Up), 0x7ff8_0000_0000_0123);
    assert_eq!(sub_f64(0, 0x7ff8_0000_0000_0123, Round::NearestEven), 0x7ff8_0000_0000_0123);
}

#[test]
fn ftz_flushes_inputs_and_results_and_sat_clamps() {
    let ftz = FloatMode { ftz: true, ..FloatMode::DEFAULT };
    let sat = FloatMode { sat: true, ..FloatMode::DEFAULT };
    let (subnormal, negative_subnormal, smallest) = (1, 0x8000_0001, 0x0080_0000);
    assert_eq!(add_f32(subnormal, subnormal, ftz), 0);
    assert_eq!(add_f32(negative_subnormal, 0x8000_0000, ftz), 0x8000_0000);
    assert_eq!(mul_f32(smallest, 0x3f00_0000, ftz), 0);
    assert_eq!(mul_f32(smallest, 0xbf00_0000, ftz), 0x8000_0000);
    assert_eq!(mul_f32(smallest, 0x3f00_0000, FloatMode::DEFAULT), smallest >> 1);
    assert_eq!(fma_f32(smallest, 0x3f80_0000, negative_subnormal, ftz), smallest);
    assert_eq!(add_f32(0x4000_0000, 0, sat), 0x3f80_0000);
    assert_eq!(add_f32(0xbf80_0000, 0, sat), 0);
    assert_eq!(add_f32(0x8000_0000, 0x8000_0000, sat), 0);
    assert_eq!(add_f32(0x7fc0_0000, 0, sat), 0);
    assert_eq!(add_f32(0x3e80_0000, 0, sat), 0x3e80_0000);
    assert_eq!(neg_f32(subnormal, true), 0x8000_0000);
    assert_eq!(abs_f32(negative_subnormal, false), 1);
    assert_eq!(copysign_f32(0x8000_0000, 0x3f80_0000), 0xbf80_0000);
    assert_eq!(copysign_f64(F64.sign_mask(), 0x3ff0 << 48), 0xbff0 << 48);
}
