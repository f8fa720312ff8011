//! Approximate functions: special values, and that no result leaves its bound.

use super::Random;
use crate::numeric::Half;
use crate::numeric::approx::*;
use crate::numeric::format::F32;

const INF: u32 = 0x7f80_0000;
const NEG_INF: u32 = 0xff80_0000;
const NAN: u32 = 0x7fff_ffff;
const ONE: u32 = 0x3f80_0000;

#[test]
fn special_values_are_as_documented() {
    use Function::*;
    let table = [
        (Ex2, NEG_INF, 0),
        (Ex2, 0x8000_0000, ONE),
        (Ex2, 0, ONE),
        (Ex2, INF, INF),
        (Lg2, NEG_INF, NAN),
        (Lg2, 0xbf80_0000, NAN),
        (Lg2, 0x8000_0000, NEG_INF),
        (Lg2, 0, NEG_INF),
        (Lg2, INF, INF),
        (Rcp, NEG_INF, 0x8000_0000),
        (Rcp, 0x8000_0000, NEG_INF),
        (Rcp, 0, INF),
        (Rcp, INF, 0),
        (Rsqrt, NEG_INF, NAN),
        (Rsqrt, 0xbf80_0000, NAN),
        (Rsqrt, 0x8000_0000, NEG_INF),
        (Rsqrt, 0, INF),
        (Rsqrt, INF, 0),
        (Sqrt, NEG_INF, NAN),
        (Sqrt, 0x8000_0000, 0x8000_0000),
        (Sqrt, INF, INF),
        (Sin, INF, NAN),
        (Sin, 0x8000_0000, 0x8000_0000),
        (Cos, NEG_INF, NAN),
        (Cos, 0, ONE),
        (Tanh, NEG_INF, 0xbf80_0000),
        (Tanh, INF, ONE),
        (Tanh, 0x8000_0000, 0x8000_0000),
    ];
    for perturb in [Perturb::None, Perturb::Up, Perturb::Down, Perturb::Seeded(3)] {
        for (function, input, want) in table {
            let got = approx_f32(function, input, false, perturb);
            assert_eq!(got, want, "{function:?} {input:08x} {perturb:?}");
        }
        for function in Function::ALL {
            assert_eq!(approx_f32(function, 0x7f80_0001, false, perturb), NAN);
        }
    }
    // Flushing: a subnormal argument counts as zero, a subnormal result becomes zero.
    assert_eq!(approx_f32(Rcp, 1, true, Perturb::None), INF);
    assert_eq!(approx_f32(Lg2, 1, true, Perturb::None), NEG_INF);
    assert_eq!(approx_f32(Lg2, 1, false, Perturb::None), (-149f32).to_bits());
    assert_eq!(approx_f32(Ex2, (-130f32).to_bits(), true, Perturb::None), 0);
    assert_eq!(approx_f32(Ex2, (-130f32).to_bits(), false, Perturb::None), 1 << 19);
    assert_eq!(approx_f32(Tanh, 0x8000_0001, false, Perturb::Up), 0x8000_0001);
}

#[test]
fn perturbed_results_differ_yet_stay_within_the_documented_error() {
    let mut random = Random(8);
    for function in Function::ALL {
        let mut moved = 0;
        for _ in 0..20_000 {
            let x = match function {
                Function::Sin | Function::Cos => (random.below(1 << 20) as f32 / 1024.0) - 512.0,
                Function::Ex2 => (random.below(1 << 20) as f32 / 4096.0) - 128.0,
                Function::Tanh => (random.below(1 << 20) as f32 / 65536.0) - 8.0,
                _ => f32::from_bits(random.below(INF as u64) as u32),
            };
            let exact = function.exact(x as f64);
            let nearest = approx_f32(function, x.to_bits(), false, Perturb::None);
            for perturb in [Perturb::None, Perturb::Up, Perturb::Down, Perturb::Seeded(random.next())] {
                let bits = approx_f32(function, x.to_bits(), false, perturb);
                moved += (bits != nearest) as u32;
                let got = f32::from_bits(bits) as f64;
                let Some(bound) = function.error_f32(x as f64) else { continue };
                // A result is at best half a unit off, whatever the bound.
                let bound = bound.magnitude(exact, &F32).max(F32.ulp(exact) / 2.0);
                let in_range = got.is_infinite() && exact.abs() > f32::MAX as f64;
                assert!(in_range || (got - exact).abs() <= bound, "{function:?} {x:e} {perturb:?}");
                match perturb {
                    Perturb::Up => assert!(got >= f32::from_bits(nearest) as f64),
                    Perturb::Down => assert!(got <= f32::from_bits(nearest) as f64),
                    _ => {}
                }
            }
        }
        assert!(moved > 1000, "{function:?}: only {moved} results moved");
    }
}

#[test]
fn half_functions_stay_within_their_bounds_for_every_argument() {
    for half in [Half::F16, Half::Bf16] {
        for function in [Function::Ex2, Function::Tanh] {
            let bound = function.error_half(half).expect("documented");
            for code in 0..=0xffffu16 {
                let x = half.widen(code) as f64;
                let exact = function.exact(x);
                let got = approx_half(function, half, code, Perturb::Seeded(code as u64));
                let value = half.widen(got) as f64;
                if x.is_nan() {
                    assert_eq!(got, 0x7fff);
                    continue;
                }
                let smallest = half.format().ulp(0.0);
                let flushed = half == Half::Bf16 && value == 0.0 && exact < 1.2e-38;
                let limit = bound.magnitude(exact, half.format()).max(smallest);
                let overflowed = value.is_infinite() && (exact.is_infinite() || exact >= 65504.0);
                let fits = (value - exact).abs() <= limit || flushed || overflowed;
                assert!(fits, "{half:?} {function:?} {code:04x}: {value:e} for {exact:e}");
            }
        }
    }
    assert_eq!(approx_half(Function::Ex2, Half::Bf16, 0x8001, Perturb::Up), 0x3f80);
}

#[test]
fn approximate_division_loses_large_divisors() {
    let huge = 0x7f00_0000; // 2^127
    assert_eq!(div_approx_f32(ONE, huge, false, Perturb::None), 0);
    assert_eq!(div_approx_f32(0xbf80_0000, huge, false, Perturb::None), 0x8000_0000);
    assert_eq!(div_approx_f32(INF, huge, false, Perturb::None), NAN);
    assert_eq!(div_full_f32(huge, huge, false, Perturb::None), ONE);
    assert_eq!(div_full_f32(ONE, 0, false, Perturb::Up), INF);
    assert_eq!(div_approx_f32(0x4040_0000, 0x4000_0000, false, Perturb::None), 0x3fc0_0000);
    assert_eq!(div_approx_f32(0x4040_0000, 0x4000_0000, false, Perturb::Up), 0x3fc0_0002);
    assert_eq!(div_approx_f32(0x4040_0000, 0x4000_0000, false, Perturb::Down), 0x3fbf_fffe);
}

#[test]
fn gross_double_functions_keep_only_the_upper_word() {
    let a = 3.0f64.to_bits() | 0x1234;
    let got = gross_f64(Function::Rcp, a);
    assert_eq!(got & 0xffff_ffff, 0);
    assert!((f64::from_bits(got) * 3.0 - 1.0).abs() < 1e-5);
    assert_eq!(gross_f64(Function::Rcp, f64::NAN.to_bits()), 0x7fff_ffff_0000_0000);
    assert_eq!(gross_f64(Function::Rcp, 1 << 40), f64::INFINITY.to_bits());
    assert_eq!(gross_f64(Function::Rsqrt, 1 << 63 | 1 << 40), f64::NEG_INFINITY.to_bits());
    assert_eq!(rsqrt_f64(4.0f64.to_bits()), 0.5f64.to_bits());
}
