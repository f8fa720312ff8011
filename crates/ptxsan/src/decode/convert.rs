//! `cvt` in all its forms.

use super::float::rounding;
use super::lanes::*;
use super::opcode::Opcode;
use crate::numeric::convert::{
    ConvertMode, Fp8, Scalar, convert, convert_pack, extend, f32_to_half2, f32_to_tf32,
};
use crate::numeric::half::{Half, pack2};
use crate::parse::ast::Type;

/// The plan of a `cvt`, given how wide the destination and source registers are, in bits.
pub(super) fn plan(op: &Opcode<'_>, d_bits: u32, a_bits: u32) -> Option<Plan> {
    if op.parts.first() == Some(&"pack") {
        return pack(op);
    }
    let mode = ConvertMode {
        round: rounding(op),
        to_integral: op.parts.iter().any(|p| matches!(*p, "rni" | "rzi" | "rmi" | "rpi")),
        ftz: op.has("ftz"),
        sat: op.has("sat"),
        relu: op.has("relu"),
        satfinite: op.has("satfinite"),
    };
    let [to, from] = [op.parts.iter().rev().nth(1)?, op.parts.last()?];
    if let Some(plan) = packed(to, from, mode) {
        return Some(plan);
    }
    let (to, from) = (scalar(to)?, scalar(from)?);
    let (d, a) = (register(d_bits), register(a_bits));
    let fast = common(to, from, mode, d_bits, a_bits);
    let alu = match (d_bits, a_bits) {
        _ if fast.is_some() => fast?,
        (64, 64) => b64_1(move |x| extend(to, convert(to, from, x, mode), 64)),
        (64, _) => b64_from_b32(move |x| extend(to, convert(to, from, u64::from(x), mode), 64)),
        (bits, 64) => b32_from_b64(move |x| extend(to, convert(to, from, x, mode), bits) as u32),
        (bits, _) => b32_1(move |x| extend(to, convert(to, from, u64::from(x), mode), bits) as u32),
    };
    Some(Plan { d, sources: vec![a], alu })
}

fn register(bits: u32) -> Type {
    match bits {
        64 => Type::B64,
        16 => Type::B16,
        _ => Type::B32,
    }
}

fn scalar(name: &str) -> Option<Scalar> {
    Some(match Type::named(name)? {
        Type::U8 | Type::B8 => Scalar::U8,
        Type::U16 => Scalar::U16,
        Type::U32 => Scalar::U32,
        Type::U64 => Scalar::U64,
        Type::S8 => Scalar::S8,
        Type::S16 => Scalar::S16,
        Type::S32 => Scalar::S32,
        Type::S64 => Scalar::S64,
        Type::F16 => Scalar::F16,
        Type::Bf16 => Scalar::Bf16,
        Type::F32 => Scalar::F32,
        Type::F64 => Scalar::F64,
        _ => return None,
    })
}

/// The conversions that kernels do in inner loops, spelled so that they are fast.
fn common(to: Scalar, from: Scalar, mode: ConvertMode, d_bits: u32, a_bits: u32) -> Option<Alu> {
    if mode.ftz || mode.sat || mode.relu || mode.satfinite || mode.to_integral {
        return None;
    }
    Some(match (to, from, d_bits, a_bits) {
        (Scalar::U64 | Scalar::S64, Scalar::U32, 64, 32) => b64_from_b32(u64::from),
        (Scalar::U64 | Scalar::S64, Scalar::S32, 64, 32) => b64_from_b32(|x| x as i32 as i64 as u64),
        (Scalar::U32 | Scalar::S32, Scalar::U64 | Scalar::S64, 32, 64) => b32_from_b64(|x| x as u32),
        (Scalar::U32 | Scalar::S32, Scalar::U16, 32, 16) => b32_1(|x| x),
        (Scalar::U16 | Scalar::S16, Scalar::U32 | Scalar::S32, 16, 32) => b32_1(|x| x & 0xffff),
        (Scalar::F32, Scalar::F16, 32, 16) => b32_1(|x| {
            let y = half::f16::from_bits(x as u16).to_f32();
            if y.is_nan() { 0x7fff_ffff } else { y.to_bits() }
        }),
        (Scalar::F32, Scalar::Bf16, 32, 16) => b32_1(|x| {
            let y = Half::Bf16.widen(x as u16);
            if y.is_nan() { 0x7fff_ffff } else { y.to_bits() }
        }),
        (Scalar::F16, Scalar::F32, 16, 32) if mode.round == crate::numeric::Round::NearestEven => {
            b32_1(|x| u32::from(narrow_f16(x)))
        }
        _ => return None,
    })
}

#[inline]
fn narrow_f16(x: u32) -> u16 {
    let y = f32::from_bits(x);
    if y.is_nan() { 0x7fff } else { half::f16::from_f32(y).to_bits() }
}

#[inline]
fn narrow_bf16(x: u32) -> u16 {
    let y = f32::from_bits(x);
    if y.is_nan() { 0x7fff } else { half::bf16::from_f32(y).to_bits() }
}

/// Conversions into and out of packed pairs, and to `tf32`.
fn packed(to: &str, from: &str, mode: ConvertMode) -> Option<Plan> {
    let fp8 = |name: &str| match name {
        "e4m3x2" => Some(Fp8::E4m3),
        "e5m2x2" => Some(Fp8::E5m2),
        _ => None,
    };
    let relu = mode.relu;
    let two = |d: Type, alu| Some(Plan { d, sources: vec![Type::F32, Type::F32], alu });
    let plain = mode == ConvertMode::DEFAULT;
    match (to, from) {
        ("f16x2", "f32") if plain => two(Type::B32, b32_2(|a, b| pack2([narrow_f16(b), narrow_f16(a)]))),
        ("bf16x2", "f32") if plain => two(Type::B32, b32_2(|a, b| pack2([narrow_bf16(b), narrow_bf16(a)]))),
        ("f16x2", "f32") => two(Type::B32, b32_2(move |a, b| f32_to_half2(Scalar::F16, a, b, mode))),
        ("bf16x2", "f32") => two(Type::B32, b32_2(move |a, b| f32_to_half2(Scalar::Bf16, a, b, mode))),
        ("tf32", "f32") => {
            Some(Plan { d: Type::B32, sources: vec![Type::F32], alu: b32_1(move |a| f32_to_tf32(a, mode)) })
        }
        (to, "f32") => {
            let format = fp8(to)?;
            two(Type::B16, b32_2(move |a, b| u32::from(format.from_f32x2(a, b, relu))))
        }
        ("f16x2", from) => {
            let format = fp8(from)?;
            let alu = b32_1(move |a| format.to_f16x2(a as u16, relu));
            Some(Plan { d: Type::B32, sources: vec![Type::B16], alu })
        }
        (to, "f16x2") => {
            let format = fp8(to)?;
            let alu = b32_1(move |a| u32::from(format.from_f16x2(a, relu)));
            Some(Plan { d: Type::B16, sources: vec![Type::B32], alu })
        }
        (to, "bf16x2") => {
            let format = fp8(to)?;
            let alu = b32_1(move |a| u32::from(format.from_bf16x2(a, relu)));
            Some(Plan { d: Type::B16, sources: vec![Type::B32], alu })
        }
        _ => None,
    }
}

/// `cvt.pack.sat.u8.s32.b32 d, a, b, c` and its kin.
fn pack(op: &Opcode<'_>) -> Option<Plan> {
    let (name, signed) = op.parts.iter().find_map(|p| match *p {
        "u8" | "u16" | "u4" | "u2" => Some((&p[1..], false)),
        "s8" | "s16" | "s4" | "s2" => Some((&p[1..], true)),
        _ => None,
    })?;
    let bits: u32 = name.parse().ok()?;
    let with_c = op.parts.last() == Some(&"b32");
    let alu: Alu = if with_c {
        b32_3(move |a, b, c| convert_pack(a as i32, b as i32, c, bits, signed))
    } else {
        b32_2(move |a, b| convert_pack(a as i32, b as i32, 0, bits, signed))
    };
    Some(Plan { d: Type::B32, sources: vec![Type::B32; if with_c { 3 } else { 2 }], alu })
}
