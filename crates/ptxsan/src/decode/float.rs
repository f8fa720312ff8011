//! Floating-point arithmetic: `f32`, `f64`, `f16`, `bf16` and packed pairs.

use super::lanes::*;
use super::opcode::Opcode;
use crate::numeric::approx::{self, Function, Perturb};
use crate::numeric::compare::{Property, extreme, test_property};
use crate::numeric::format::{BF16, F16, F32, F64};
use crate::numeric::half::{each1, each2, each3};
use crate::numeric::{Compare, Extreme, ExtremeMode, FloatMode, Format, Half, HalfMode, Round, float};
use crate::parse::ast::Type;

/// The plan of a floating-point instruction; `None` when this file does not know it.
pub(super) fn plan(op: &Opcode<'_>, perturb: Perturb) -> Option<Plan> {
    let kind = op.kind()?;
    if op.name == "testp" {
        return testp(op, kind);
    }
    match kind {
        Type::F32 => single(op, perturb),
        Type::F64 => double(op),
        Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2 => half(op, kind, perturb),
        _ => None,
    }
}

pub(super) fn rounding(op: &Opcode<'_>) -> Round {
    for part in &op.parts {
        match *part {
            "rn" | "rni" => return Round::NearestEven,
            "rna" => return Round::NearestAway,
            "rz" | "rzi" => return Round::TowardZero,
            "rm" | "rmi" => return Round::Down,
            "rp" | "rpi" => return Round::Up,
            _ => {}
        }
    }
    Round::NearestEven
}

fn extreme_mode(op: &Opcode<'_>) -> ExtremeMode {
    ExtremeMode { ftz: op.has("ftz"), nan: op.has("NaN"), xorsign_abs: op.has("xorsign") }
}

fn function(name: &str) -> Option<Function> {
    Some(match name {
        "ex2" => Function::Ex2,
        "lg2" => Function::Lg2,
        "rcp" => Function::Rcp,
        "rsqrt" => Function::Rsqrt,
        "sqrt" => Function::Sqrt,
        "sin" => Function::Sin,
        "cos" => Function::Cos,
        "tanh" => Function::Tanh,
        _ => return None,
    })
}

#[inline(always)]
fn canonical(x: f32) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
}

fn single(op: &Opcode<'_>, perturb: Perturb) -> Option<Plan> {
    let mode = FloatMode { round: rounding(op), ftz: op.has("ftz"), sat: op.has("sat") };
    let plain = mode == FloatMode::DEFAULT;
    let ftz = mode.ftz;
    let f = f32::from_bits;
    let (sources, alu) = match op.name {
        "add" if plain => (2, b32_2(move |a, b| canonical(f(a) + f(b)))),
        "sub" if plain => (2, b32_2(move |a, b| canonical(f(a) - f(b)))),
        "mul" if plain => (2, b32_2(move |a, b| canonical(f(a) * f(b)))),
        "fma" | "mad" if plain => (3, b32_3(move |a, b, c| canonical(f(a).mul_add(f(b), f(c))))),
        "add" => (2, b32_2(move |a, b| float::add_f32(a, b, mode))),
        "sub" => (2, b32_2(move |a, b| float::sub_f32(a, b, mode))),
        "mul" => (2, b32_2(move |a, b| float::mul_f32(a, b, mode))),
        "fma" | "mad" => (3, b32_3(move |a, b, c| float::fma_f32(a, b, c, mode))),
        "div" if op.has("approx") => (2, b32_2(move |a, b| approx::div_approx_f32(a, b, ftz, perturb))),
        "div" if op.has("full") => (2, b32_2(move |a, b| approx::div_full_f32(a, b, ftz, perturb))),
        "div" => (2, b32_2(move |a, b| float::div_f32(a, b, mode))),
        "rcp" if !op.has("approx") => (1, b32_1(move |a| float::rcp_f32(a, mode))),
        "sqrt" if !op.has("approx") => (1, b32_1(move |a| float::sqrt_f32(a, mode))),
        "abs" => (1, b32_1(move |a| float::abs_f32(a, ftz))),
        "neg" => (1, b32_1(move |a| float::neg_f32(a, ftz))),
        // PTX: the sign comes from the first operand, the magnitude from the second.
        "copysign" => (2, b32_2(float::copysign_f32)),
        "min" | "max" => {
            let which = if op.name == "min" { Extreme::Min } else { Extreme::Max };
            return Some(single_extreme(op, which, extreme_mode(op)));
        }
        name => {
            let function = function(name)?;
            (1, b32_1(move |a| approx::approx_f32(function, a, ftz, perturb)))
        }
    };
    Some(same(Type::F32, sources, alu))
}

fn single_extreme(op: &Opcode<'_>, which: Extreme, mode: ExtremeMode) -> Plan {
    let _ = op;
    let f = f32::from_bits;
    let alu = if mode == ExtremeMode::default() {
        // The common case without a NaN or equal operands decides by one comparison.
        b32_2(move |a, b| {
            if f(a) < f(b) {
                if which == Extreme::Min { a } else { b }
            } else if f(a) > f(b) {
                if which == Extreme::Min { b } else { a }
            } else {
                extreme(&F32, which, u64::from(a), u64::from(b), mode) as u32
            }
        })
    } else {
        b32_2(move |a, b| extreme(&F32, which, u64::from(a), u64::from(b), mode) as u32)
    };
    same(Type::F32, 2, alu)
}

fn double(op: &Opcode<'_>) -> Option<Plan> {
    let round = rounding(op);
    let (sources, alu) = match op.name {
        "add" => (2, b64_2(move |a, b| float::add_f64(a, b, round))),
        "sub" => (2, b64_2(move |a, b| float::sub_f64(a, b, round))),
        "mul" => (2, b64_2(move |a, b| float::mul_f64(a, b, round))),
        "fma" | "mad" => (3, b64_3(move |a, b, c| float::fma_f64(a, b, c, round))),
        "div" => (2, b64_2(move |a, b| float::div_f64(a, b, round))),
        "rcp" if op.has("approx") => (1, b64_1(|a| approx::gross_f64(Function::Rcp, a))),
        "rcp" => (1, b64_1(move |a| float::rcp_f64(a, round))),
        "sqrt" => (1, b64_1(move |a| float::sqrt_f64(a, round))),
        "rsqrt" if op.has("ftz") => (1, b64_1(|a| approx::gross_f64(Function::Rsqrt, a))),
        "rsqrt" => (1, b64_1(approx::rsqrt_f64)),
        "abs" => (1, b64_1(float::abs_f64)),
        "neg" => (1, b64_1(float::neg_f64)),
        "copysign" => (2, b64_2(float::copysign_f64)),
        "min" | "max" => {
            let which = if op.name == "min" { Extreme::Min } else { Extreme::Max };
            let mode = extreme_mode(op);
            (2, b64_2(move |a, b| extreme(&F64, which, a, b, mode)))
        }
        _ => return None,
    };
    Some(same(Type::F64, sources, alu))
}

fn half(op: &Opcode<'_>, kind: Type, perturb: Perturb) -> Option<Plan> {
    let format = if matches!(kind, Type::F16 | Type::F16x2) { Half::F16 } else { Half::Bf16 };
    let packed = matches!(kind, Type::F16x2 | Type::Bf16x2);
    let mode = HalfMode { ftz: op.has("ftz"), sat: op.has("sat"), relu: op.has("relu") };
    let ftz = mode.ftz;
    let one = |f: Box<dyn Fn(u16) -> u16 + Send + Sync>| {
        if packed { b32_1(move |a| each1(a, &f)) } else { b32_1(move |a| u32::from(f(a as u16))) }
    };
    let two = |f: Box<dyn Fn(u16, u16) -> u16 + Send + Sync>| {
        if packed {
            b32_2(move |a, b| each2(a, b, &f))
        } else {
            b32_2(move |a, b| u32::from(f(a as u16, b as u16)))
        }
    };
    let (sources, alu) = match op.name {
        "add" => (2, two(Box::new(move |a, b| format.add(a, b, mode)))),
        "sub" => (2, two(Box::new(move |a, b| format.sub(a, b, mode)))),
        "mul" => (2, two(Box::new(move |a, b| format.mul(a, b, mode)))),
        "fma" if packed => (3, b32_3(move |a, b, c| each3(a, b, c, |x, y, z| format.fma(x, y, z, mode)))),
        "fma" => (3, b32_3(move |a, b, c| u32::from(format.fma(a as u16, b as u16, c as u16, mode)))),
        "neg" => (1, one(Box::new(move |a| format.neg(a, ftz)))),
        "abs" => (1, one(Box::new(move |a| format.abs(a, ftz)))),
        "min" | "max" => {
            let which = if op.name == "min" { Extreme::Min } else { Extreme::Max };
            let mode = extreme_mode(op);
            (2, two(Box::new(move |a, b| format.extreme(which, a, b, mode))))
        }
        "ex2" | "tanh" => {
            let function = function(op.name)?;
            (1, one(Box::new(move |a| approx::approx_half(function, format, a, perturb))))
        }
        _ => return None,
    };
    Some(same(kind, sources, alu))
}

fn testp(op: &Opcode<'_>, kind: Type) -> Option<Plan> {
    let property = match op.parts.first().copied()? {
        "finite" => Property::Finite,
        "infinite" => Property::Infinite,
        "number" => Property::Number,
        "notanumber" => Property::NotANumber,
        "normal" => Property::Normal,
        "subnormal" => Property::Subnormal,
        _ => return None,
    };
    let alu = match kind {
        Type::F32 => test32_1(move |a| test_property(&F32, property, u64::from(a))),
        Type::F64 => test64_1(move |a| test_property(&F64, property, a)),
        _ => return None,
    };
    Some(Plan { d: Type::Pred, sources: vec![kind], alu })
}

/// The comparison operator of a name, for floating point.
pub(super) fn comparison(name: &str) -> Option<Compare> {
    Some(match name {
        "eq" => Compare::Eq,
        "ne" => Compare::Ne,
        "lt" => Compare::Lt,
        "le" => Compare::Le,
        "gt" => Compare::Gt,
        "ge" => Compare::Ge,
        "equ" => Compare::Equ,
        "neu" => Compare::Neu,
        "ltu" => Compare::Ltu,
        "leu" => Compare::Leu,
        "gtu" => Compare::Gtu,
        "geu" => Compare::Geu,
        "num" => Compare::Num,
        "nan" => Compare::Nan,
        _ => return None,
    })
}

/// A floating-point comparison into a predicate; of a packed pair, `half` says which element.
pub(super) fn compare(operator: &str, kind: Type, ftz: bool, half: u32) -> Option<Alu> {
    let operator = comparison(operator)?;
    let f = |x: u32| f64::from(f32::from_bits(x));
    let small = |format: &'static Format, shift: u32| {
        test32_2(move |a, b| {
            let (a, b) = (a >> shift & 0xffff, b >> shift & 0xffff);
            operator.holds_for(format, u64::from(a), u64::from(b), ftz)
        })
    };
    Some(match kind {
        Type::F32 if !ftz => match operator {
            Compare::Lt => test32_2(|a, b| f32::from_bits(a) < f32::from_bits(b)),
            Compare::Gt => test32_2(|a, b| f32::from_bits(a) > f32::from_bits(b)),
            _ => test32_2(move |a, b| operator.holds(f(a), f(b))),
        },
        Type::F32 => test32_2(move |a, b| operator.holds_for(&F32, u64::from(a), u64::from(b), true)),
        Type::F64 => test64_2(move |a, b| operator.holds(f64::from_bits(a), f64::from_bits(b))),
        Type::F16 => small(&F16, 0),
        Type::Bf16 => small(&BF16, 0),
        Type::F16x2 => small(&F16, 16 * half),
        Type::Bf16x2 => small(&BF16, 16 * half),
        _ => return None,
    })
}
