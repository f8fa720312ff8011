//! `.f16` and `.bf16`: arithmetic, `min`/`max`, comparisons.

use super::Random;
use super::model::Exact;
use crate::numeric::half::*;
use crate::numeric::{Compare, Extreme, ExtremeMode, Round};

const PLAIN: HalfMode = HalfMode { ftz: false, sat: false, relu: false };

#[test]
fn fma_add_mul_match_the_model() {
    let mut random = Random(4);
    for half in [Half::F16, Half::Bf16] {
        let format = half.format();
        let mut checked = 0;
        while checked < 6000 {
            let [a, b, c] = [0; 3].map(|_| random.next() as u16);
            if [a, b, c].iter().any(|&x| x as u64 & format.infinity() == format.infinity()) {
                continue;
            }
            checked += 1;
            let product = Exact::product(format, a as u64, b as u64);
            let total = product.plus(&Exact::of(format, c as u64));
            let sum = Exact::of(format, a as u64).plus(&Exact::of(format, c as u64));
            let round = |exact: &Exact| exact.round(format, Round::NearestEven) as u16;
            assert_eq!(half.mul(a, b, PLAIN), round(&product), "{half:?} mul {a:x} {b:x}");
            if !total.magnitude.is_zero() {
                assert_eq!(half.fma(a, b, c, PLAIN), round(&total), "{half:?} fma {a:x} {b:x} {c:x}");
            }
            if !sum.magnitude.is_zero() {
                assert_eq!(half.add(a, c, PLAIN), round(&sum), "{half:?} add {a:x} {c:x}");
                assert_eq!(half.sub(a, c ^ 0x8000, PLAIN), round(&sum), "{half:?} sub {a:x} {c:x}");
            }
        }
    }
}

#[test]
fn fma_rounds_once_where_single_precision_would_round_twice() {
    // 1.0009765625 · 1.0009765625 = 1 + 2^-9 + 2^-20; the addend decides a tie far below.
    let (a, tiny) = (0x3c01, 0x0001);
    let once = Half::F16.fma(a, a, tiny, PLAIN);
    let exact = Exact::product(Half::F16.format(), a as u64, a as u64)
        .plus(&Exact::of(Half::F16.format(), tiny as u64))
        .round(Half::F16.format(), Round::NearestEven);
    assert_eq!(once as u64, exact);
}

#[test]
fn modifiers_act_on_results() {
    let sat = HalfMode { sat: true, ..PLAIN };
    let relu = HalfMode { relu: true, ..PLAIN };
    let ftz = HalfMode { ftz: true, ..PLAIN };
    for (half, one) in [(Half::F16, 0x3c00u16), (Half::Bf16, 0x3f80)] {
        let minus_one = one | 0x8000;
        assert_eq!(half.add(one, one, sat), one);
        assert_eq!(half.add(minus_one, 0, sat), 0);
        assert_eq!(half.add(0x7fff, 0, sat), 0);
        assert_eq!(half.add(minus_one, 0, relu), 0);
        assert_eq!(half.add(0x8000, 0x8000, relu), 0);
        assert_eq!(half.add(one, 0, relu), one);
        assert_eq!(half.fma(0xffff, one, one, relu), 0x7fff);
        assert_eq!(half.add(1, 1, ftz), 0);
        assert_eq!(half.add(0x8001, 0x8000, ftz), 0x8000);
        assert_eq!(half.neg(0x0001, true), 0x8000);
        assert_eq!(half.neg(0x0001, false), 0x8001);
        assert_eq!(half.abs(0x8001, false), 0x0001);
    }
}

#[test]
fn packed_pairs_keep_their_halves_apart() {
    let sum = each2(0x3c00_4000, 0x4000_3c00, |a, b| Half::F16.sub(a, b, PLAIN));
    assert_eq!(sum, 0xbc00_3c00);
    assert_eq!(each1(0x3c00_8000, |a| Half::F16.neg(a, false)), 0xbc00_0000);
    let fused = each3(0x4000_3c00, 0x3c00_4000, 0x3c00_0000, |a, b, c| Half::F16.fma(a, b, c, PLAIN));
    assert_eq!(fused, 0x4200_4000);
}

/// The semantics block of the documentation, on values instead of codes.
fn documented(which: Extreme, a: f64, b: f64, mode: ExtremeMode) -> f64 {
    let negative = a.is_sign_negative() != b.is_sign_negative();
    let (x, y) = if mode.xorsign_abs { (a.abs(), b.abs()) } else { (a, b) };
    let less = x < y || (x == y && x.is_sign_negative() && y.is_sign_positive());
    let kept = if x.is_nan() && y.is_nan() || mode.nan && (x.is_nan() || y.is_nan()) {
        return f64::NAN;
    } else if x.is_nan() {
        y
    } else if y.is_nan() || less == (which == Extreme::Min) {
        x
    } else {
        y
    };
    if mode.xorsign_abs { kept.abs() * if negative { -1.0 } else { 1.0 } } else { kept }
}

#[test]
fn min_and_max_follow_the_documented_rules() {
    let mut random = Random(5);
    let special = [0u16, 0x8000, 1, 0x8001, 0x7c00, 0xfc00, 0x7f80, 0xff80, 0x7fff, 0xffff, 0x3c00, 0xbc00];
    for half in [Half::F16, Half::Bf16] {
        for round in 0..40_000 {
            let pick = |r: &mut Random| {
                if round % 2 == 0 { special[r.below(12) as usize] } else { r.next() as u16 }
            };
            let (a, b) = (pick(&mut random), pick(&mut random));
            for which in [Extreme::Min, Extreme::Max] {
                for bits in 0..4 {
                    let mode = ExtremeMode { ftz: false, nan: bits & 1 == 1, xorsign_abs: bits & 2 == 2 };
                    let got = half.extreme(which, a, b, mode);
                    let want = documented(which, half.widen(a) as f64, half.widen(b) as f64, mode);
                    if want.is_nan() {
                        assert_eq!(got, 0x7fff, "{half:?} {which:?} {a:x} {b:x} {mode:?}");
                    } else {
                        let value = half.widen(got) as f64;
                        let same = value == want && value.is_sign_negative() == want.is_sign_negative();
                        assert!(same, "{half:?} {which:?} {a:x} {b:x} {mode:?}: {value} for {want}");
                    }
                }
            }
        }
    }
    let ftz = ExtremeMode { ftz: true, ..ExtremeMode::default() };
    assert_eq!(Half::F16.extreme(Extreme::Min, 0x8001, 0x0000, ftz), 0x8000);
}

#[test]
fn comparisons_treat_nan_as_documented() {
    let (nan, one, two) = (0x7fff, 0x3c00, 0x4000);
    let compare = |op, a, b| Half::F16.compare(op, a, b, false);
    use Compare::*;
    for op in [Eq, Ne, Lt, Le, Gt, Ge, Num] {
        assert!(!compare(op, nan, one), "{op:?}");
    }
    for op in [Equ, Neu, Ltu, Leu, Gtu, Geu, Nan] {
        assert!(compare(op, one, nan), "{op:?}");
    }
    for (ordered, unordered) in [(Eq, Equ), (Ne, Neu), (Lt, Ltu), (Le, Leu), (Gt, Gtu), (Ge, Geu)] {
        for (a, b) in [(one, two), (two, one), (one, one), (0x8000, 0)] {
            assert_eq!(compare(ordered, a, b), compare(unordered, a, b), "{ordered:?} {a:x} {b:x}");
        }
    }
    assert!(compare(Lt, one, two) && !compare(Lt, one, one) && compare(Le, one, one));
    assert!(compare(Eq, 0x8000, 0) && compare(Num, one, two));
    assert!(Half::F16.compare(Eq, 1, 0, true) && !Half::F16.compare(Eq, 1, 0, false));
}
