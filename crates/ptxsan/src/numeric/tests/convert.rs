//! `cvt`, exhaustively where there are at most 65536 codes.

use super::Random;
use super::model::Exact;
use crate::numeric::convert::*;
use crate::numeric::format::{BF16, E4M3, E5M2, F16, F32, F64};
use crate::numeric::{Format, Half, Overflow, Round};

const EVERY_ROUND: [Round; 5] =
    [Round::NearestEven, Round::NearestAway, Round::TowardZero, Round::Down, Round::Up];

/// A power of two by repeated doubling or halving: no code shared with the formats.
fn power(exp: i32) -> f64 {
    (0..exp.unsigned_abs()).fold(1.0, |x, _| if exp > 0 { x * 2.0 } else { x / 2.0 })
}

/// The value of an 8-bit code from the definition of the formats (OCP OFP8 1.0).
fn fp8_value(code: u8, exp_bits: u32) -> f64 {
    let man_bits = 7 - exp_bits;
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let field = (code & 0x7f) >> man_bits;
    let fraction = (code & ((1 << man_bits) - 1)) as f64 / power(man_bits as i32);
    let bias = (1 << (exp_bits - 1)) - 1;
    if exp_bits == 4 && code & 0x7f == 0x7f {
        return f64::NAN;
    }
    if exp_bits == 5 && field == 31 {
        return if fraction == 0.0 { sign * f64::INFINITY } else { f64::NAN };
    }
    sign * if field == 0 { fraction * power(1 - bias) } else { (1.0 + fraction) * power(field as i32 - bias) }
}

#[test]
fn every_fp8_code_has_its_value_and_comes_back() {
    for (fp8, exp_bits) in [(Fp8::E4m3, 4), (Fp8::E5m2, 5)] {
        for code in 0..=255u8 {
            let want = fp8_value(code, exp_bits);
            let got = fp8.widen(code) as f64;
            assert!(got == want || (got.is_nan() && want.is_nan()), "{fp8:?} {code:02x}: {got} for {want}");
            let wide = fp8.to_f16x2(u16::from_le_bytes([code, 0]), false);
            assert_eq!(wide >> 16, 0);
            let back = fp8.from_f16x2(wide, false) as u8;
            if want.is_nan() {
                assert_eq!((wide, back), (0x7fff, 0x7f), "{fp8:?} {code:02x}");
            } else if want.is_infinite() {
                assert_eq!(back, (code & 0x80) | 0x7b, "satfinite takes infinity to the largest value");
            } else {
                assert_eq!(F16.widen(wide as u64), want, "{fp8:?} {code:02x}");
                assert_eq!(back, code, "{fp8:?}");
                assert_eq!(fp8.from_f32x2(0, (want as f32).to_bits(), false) as u8, code);
            }
        }
    }
    assert_eq!(fp8_value(0x7e, 4), 448.0);
    assert_eq!(fp8_value(0x7b, 5), 57344.0);
}

#[test]
fn fp8_rounds_to_nearest_even_and_saturates() {
    for (fp8, largest) in [(Fp8::E4m3, 448.0f32), (Fp8::E5m2, 57344.0)] {
        let top = if fp8 == Fp8::E4m3 { 0x7e } else { 0x7b };
        // Between each neighbouring pair: the middle goes to the even code, a hair off it to the nearer.
        for code in 0..top {
            let (low, high) = (fp8.widen(code), fp8.widen(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            let narrow = |x: f32| fp8.from_f32x2(0, x.to_bits(), false) as u8;
            assert_eq!(narrow(middle), even, "{fp8:?} {code:02x}");
            assert_eq!(narrow(-middle), even | 0x80, "{fp8:?} {code:02x}");
            assert_eq!(narrow(f32::from_bits(middle.to_bits() - 1)), code, "{fp8:?} {code:02x}");
            assert_eq!(narrow(f32::from_bits(middle.to_bits() + 1)), code + 1, "{fp8:?} {code:02x}");
        }
        for x in [largest * 1.01, largest * 4.0, f32::MAX, f32::INFINITY] {
            let pair = fp8.from_f32x2(x.to_bits(), (-x).to_bits(), false);
            assert_eq!(pair, u16::from_le_bytes([top | 0x80, top]), "a goes to the upper byte");
        }
        assert_eq!(fp8.from_f32x2(0xffc0_0000, (-1f32).to_bits(), true), 0x7f00);
    }
}

#[test]
fn every_half_code_widens_and_narrows_in_every_mode() {
    for (scalar, format) in [(Scalar::F16, &F16), (Scalar::Bf16, &BF16)] {
        for code in 0..=0xffffu64 {
            let single = convert(Scalar::F32, scalar, code, ConvertMode::DEFAULT) as u32;
            let value = f32::from_bits(single);
            if format.is_nan(code) {
                let kind = if scalar == Scalar::F16 { Half::F16 } else { Half::Bf16 };
                assert!(kind.widen(code as u16).is_nan(), "{scalar:?} {code:04x}");
                assert_eq!(single, 0x7fff_ffff);
                continue;
            }
            let reference = match scalar {
                Scalar::F16 => half::f16::from_bits(code as u16).to_f32(),
                _ => half::bf16::from_bits(code as u16).to_f32(),
            };
            assert_eq!(single, reference.to_bits(), "{scalar:?} {code:04x}");
            let kind = if scalar == Scalar::F16 { Half::F16 } else { Half::Bf16 };
            assert_eq!(kind.widen(code as u16).to_bits(), single, "{scalar:?} {code:04x}");
            for round in EVERY_ROUND {
                let mode = ConvertMode::rounded(round);
                assert_eq!(convert(scalar, Scalar::F32, single as u64, mode), code, "{scalar:?} {round:?}");
            }
            if !value.is_finite() || code & 0x7fff == format.max_finite() {
                continue;
            }
            // Up from this code: the middle and its neighbours, in every mode.
            let next = f32::from_bits(convert(Scalar::F32, scalar, code + 1, ConvertMode::DEFAULT) as u32);
            let middle = ((value as f64 + next as f64) / 2.0) as f32;
            let negative = value.is_sign_negative();
            for (x, side) in [(middle, 0), (outward(middle), 1), (inward(middle), -1)] {
                for round in EVERY_ROUND {
                    let away = match round {
                        Round::NearestEven => side > 0 || (side == 0 && code & 1 == 1),
                        Round::NearestAway => side >= 0,
                        Round::TowardZero => false,
                        Round::Down => negative,
                        Round::Up => !negative,
                    };
                    // Where single precision has no value between, the neighbour is the code itself.
                    if x == value || x == next {
                        continue;
                    }
                    let mode = ConvertMode::rounded(round);
                    let got = convert(scalar, Scalar::F32, x.to_bits() as u64, mode);
                    assert_eq!(got, code + away as u64, "{scalar:?} {x:e} {round:?}");
                }
            }
        }
    }
}

fn outward(x: f32) -> f32 {
    f32::from_bits(x.to_bits() + 1)
}

fn inward(x: f32) -> f32 {
    f32::from_bits(x.to_bits() - 1)
}

#[test]
fn narrowing_matches_the_model() {
    let mut random = Random(6);
    let formats: [&Format; 5] = [&F32, &F16, &BF16, &E4M3, &E5M2];
    for i in 0..30_000 {
        let to = formats[i % 5];
        // Exponents around the range of the destination.
        let span = (to.bias() + to.man_bits as i32 + 4) as u64;
        let field = 1023 + random.below(2 * span) - span;
        let code = (random.next() & F64.sign_mask()) | field << 52 | (random.next() >> 12);
        let code = if random.below(3) == 0 { code & !((1 << 40) - 1) } else { code };
        let value = f64::from_bits(code);
        let largest = to.widen(to.max_finite());
        if value.abs() > largest {
            continue;
        }
        for round in EVERY_ROUND {
            let got = to.narrow(value, round, Overflow::Ieee);
            assert_eq!(got, Exact::of(&F64, code).round(to, round), "{to:?} {value:e} {round:?}");
        }
    }
}

#[test]
fn the_short_way_to_sixteen_bits_is_the_long_way() {
    let mut random = Random(11);
    for i in 0..200_000u64 {
        let bits = match i % 3 {
            0 => random.next() & 0xffff_ffff,
            // Around the ties of both formats.
            1 => (random.next() & 0xffff_0000) | (0x8000 + random.below(3) - 1),
            _ => (random.next() & 0xffff_e000) | (0x1000 + random.below(3) - 1),
        };
        for (scalar, format) in [(Scalar::F16, &F16), (Scalar::Bf16, &BF16)] {
            let long = format.narrow(F32.widen(bits), Round::NearestEven, Overflow::Ieee);
            assert_eq!(
                convert(scalar, Scalar::F32, bits, ConvertMode::DEFAULT),
                long,
                "{scalar:?} {bits:08x}"
            );
        }
    }
}

#[test]
fn overflow_depends_on_mode_and_sign() {
    for (round, positive, negative) in [
        (Round::NearestEven, 0x7c00, 0xfc00),
        (Round::TowardZero, 0x7bff, 0xfbff),
        (Round::Down, 0x7bff, 0xfc00),
        (Round::Up, 0x7c00, 0xfbff),
    ] {
        assert_eq!(F16.narrow(1e6, round, Overflow::Ieee), positive);
        assert_eq!(F16.narrow(-1e6, round, Overflow::Ieee), negative);
        assert_eq!(F16.narrow(-1e6, round, Overflow::Finite), 0xfbff);
    }
    assert_eq!(F16.narrow(65519.0, Round::NearestEven, Overflow::Ieee), 0x7bff);
    assert_eq!(F16.narrow(65520.0, Round::NearestEven, Overflow::Ieee), 0x7c00);
    let satfinite = ConvertMode { satfinite: true, ..ConvertMode::DEFAULT };
    assert_eq!(convert(Scalar::F16, Scalar::F32, f32::INFINITY.to_bits() as u64, satfinite), 0x7bff);
    assert_eq!(convert(Scalar::Bf16, Scalar::F32, 0xff80_0000, satfinite), 0xff7f);
    assert_eq!(convert(Scalar::Bf16, Scalar::F32, 0xffc0_0000, satfinite), 0x7fff);
}

#[test]
fn floats_become_integers_clamped_with_the_documented_nan() {
    let mode = ConvertMode::rounded;
    let f32_code = |x: f32| x.to_bits() as u64;
    for (round, want) in [(Round::NearestEven, 2), (Round::TowardZero, 2), (Round::Down, 2), (Round::Up, 3)] {
        assert_eq!(convert(Scalar::S32, Scalar::F32, f32_code(2.5), mode(round)), want, "{round:?}");
    }
    for (round, want) in
        [(Round::NearestEven, -2), (Round::TowardZero, -2), (Round::Down, -3), (Round::Up, -2)]
    {
        let got = convert(Scalar::S32, Scalar::F32, f32_code(-2.5), mode(round)) as u32 as i32;
        assert_eq!(got, want, "{round:?}");
    }
    let rz = mode(Round::TowardZero);
    assert_eq!(convert(Scalar::U8, Scalar::F32, f32_code(300.0), rz), 255);
    assert_eq!(convert(Scalar::U8, Scalar::F32, f32_code(-1.0), rz), 0);
    assert_eq!(convert(Scalar::S8, Scalar::F32, f32_code(-300.0), rz), 0x80);
    assert_eq!(convert(Scalar::S64, Scalar::F64, 1e300f64.to_bits(), rz), i64::MAX as u64);
    assert_eq!(convert(Scalar::U64, Scalar::F32, f32_code(f32::INFINITY), rz), u64::MAX);
    assert_eq!(convert(Scalar::S32, Scalar::F32, 0x7fc0_0000, rz), 0);
    assert_eq!(convert(Scalar::U64, Scalar::F32, 0x7fc0_0000, rz), 1 << 63);
    assert_eq!(convert(Scalar::S32, Scalar::F64, f64::NAN.to_bits(), rz), 1 << 31);
    assert_eq!(convert(Scalar::S16, Scalar::F16, 0x7e00, rz), 0);
    // A subnormal flushed first cannot round up to one.
    let ftz_up = ConvertMode { ftz: true, ..mode(Round::Up) };
    assert_eq!(convert(Scalar::S32, Scalar::F32, 1, ftz_up), 0);
    assert_eq!(convert(Scalar::S32, Scalar::F32, 1, mode(Round::Up)), 1);
}

#[test]
fn integers_become_floats_rounded_once() {
    let mut random = Random(7);
    for _ in 0..20_000 {
        let x = random.next() >> random.below(64);
        let (nearest, signed) = (x as f32, x as i64 as f32);
        let mode = ConvertMode::DEFAULT;
        assert_eq!(convert(Scalar::F32, Scalar::U64, x, mode), nearest.to_bits() as u64);
        assert_eq!(convert(Scalar::F32, Scalar::S64, x, mode), signed.to_bits() as u64);
        assert_eq!(convert(Scalar::F64, Scalar::S64, x, mode), (x as i64 as f64).to_bits());
        let (down, up) = (mode_value(x, Round::Down), mode_value(x, Round::Up));
        assert!(down as u128 <= x as u128 && x as u128 <= up as u128, "{x}");
        assert!(down == up || f32::from_bits(down.to_bits() + 1) == up, "{x}: {down} {up}");
    }
    assert_eq!(convert(Scalar::F16, Scalar::U32, 65520, ConvertMode::DEFAULT), 0x7c00);
    assert_eq!(convert(Scalar::F16, Scalar::U32, 65520, ConvertMode::rounded(Round::TowardZero)), 0x7bff);
}

fn mode_value(x: u64, round: Round) -> f32 {
    f32::from_bits(convert(Scalar::F32, Scalar::U64, x, ConvertMode::rounded(round)) as u32)
}

#[test]
fn integers_wrap_or_saturate_and_extend() {
    let plain = ConvertMode::DEFAULT;
    let sat = ConvertMode { sat: true, ..plain };
    assert_eq!(convert(Scalar::S8, Scalar::S32, 0x1ff, plain), 0xff);
    assert_eq!(convert(Scalar::S8, Scalar::S32, 0x1ff, sat), 0x7f);
    assert_eq!(convert(Scalar::U8, Scalar::S32, 0xffff_ffff, sat), 0);
    assert_eq!(convert(Scalar::S32, Scalar::U64, u64::MAX, sat), 0x7fff_ffff);
    assert_eq!(convert(Scalar::S64, Scalar::S8, 0x80, plain), 0xffff_ffff_ffff_ff80);
    assert_eq!(convert(Scalar::U32, Scalar::S8, 0x80, plain), 0xffff_ff80);
    assert_eq!(convert(Scalar::U64, Scalar::U16, 0xdead_8000, plain), 0x8000);
    assert_eq!(extend(Scalar::S8, 0x80, 32), 0xffff_ff80);
    assert_eq!(extend(Scalar::U8, 0x80, 32), 0x80);
    assert_eq!(extend(Scalar::F16, 0xbc00, 32), 0xbc00);
}

#[test]
fn float_modifiers_and_integral_rounding() {
    let sat = ConvertMode { sat: true, ..ConvertMode::DEFAULT };
    let code = |x: f32| x.to_bits() as u64;
    assert_eq!(convert(Scalar::F32, Scalar::F32, code(3.0), sat), code(1.0));
    assert_eq!(convert(Scalar::F32, Scalar::F32, code(-3.0), sat), 0);
    assert_eq!(convert(Scalar::F16, Scalar::F32, 0x7fc0_0000, sat), 0);
    let relu = ConvertMode { relu: true, ..ConvertMode::DEFAULT };
    assert_eq!(f32_to_half2(Scalar::Bf16, code(-1.0) as u32, code(2.0) as u32, relu), 0x0000_4000);
    assert_eq!(
        f32_to_half2(Scalar::F16, code(1.0) as u32, code(-2.0) as u32, ConvertMode::DEFAULT),
        0x3c00_c000
    );
    for (round, want) in [(Round::NearestEven, 2.0), (Round::Up, 3.0), (Round::Down, 2.0)] {
        let integral = ConvertMode { to_integral: true, ..ConvertMode::rounded(round) };
        assert_eq!(convert(Scalar::F32, Scalar::F32, code(2.5), integral), code(want));
        assert_eq!(convert(Scalar::F32, Scalar::F32, code(-0.0), integral), code(-0.0));
    }
    let ftz = ConvertMode { ftz: true, ..ConvertMode::DEFAULT };
    assert_eq!(convert(Scalar::F32, Scalar::F64, 1e-40f64.to_bits(), ftz), 0);
    assert_eq!(convert(Scalar::F64, Scalar::F32, 0x8000_0001, ftz), F64.sign_mask());
    // Ten stored bits, where a register holds them; ties away from zero.
    let rna = ConvertMode::rounded(Round::NearestAway);
    assert_eq!(f32_to_tf32(0x3f80_1000, rna), 0x3f80_2000);
    assert_eq!(f32_to_tf32(0x3f80_1000, ConvertMode::DEFAULT), 0x3f80_0000);
    assert_eq!(f32_to_tf32(0xbf80_3000, rna), 0xbf80_4000);
}

#[test]
fn convert_pack_saturates_and_shifts_in() {
    assert_eq!(convert_pack(40000, -40000, 0, 16, true), 0x7fff_8000);
    assert_eq!(convert_pack(300, -5, 0x1122_3344, 8, false), 0x3344_ff00);
    assert_eq!(convert_pack(-100, 100, 0xabc, 4, true), 0x000a_bc87);
}
