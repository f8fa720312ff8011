//! Integer, bit and predicate instructions.

use super::lanes::*;
use super::opcode::Opcode;
use crate::numeric::bits::{self, Excess, Permute};
use crate::numeric::integer;
use crate::parse::ast::Type;

/// The plan of an integer instruction; `None` when this file does not know it.
pub(super) fn plan(op: &Opcode<'_>) -> Option<Plan> {
    let kind = op.kind()?;
    match op.name {
        "add" | "sub" | "addc" | "subc" => sum(op, kind),
        "mul" | "mad" | "madc" => product(op, kind),
        "mul24" | "mad24" => product24(op, kind),
        "div" | "rem" => quotient(op.name == "div", kind),
        "min" | "max" => Some(extreme(op.name == "max", kind)?),
        "abs" | "neg" => sign(op.name, kind),
        "sad" => sad(kind),
        "and" | "or" | "xor" | "not" | "cnot" => logic(op.name, kind),
        "shl" | "shr" => shift(op.name, kind),
        "popc" | "clz" | "brev" | "bfind" => count(op, kind),
        "bfe" | "bfi" => field(op.name, kind),
        "shf" => funnel(op),
        "prmt" => Some(permute(op)),
        "lop3" => None,
        "dp4a" | "dp2a" => dot(op),
        "fns" => Some(same(Type::B32, 3, b32_3(|mask, base, offset| bits::fns(mask, base, offset as i32)))),
        "szext" | "bmsk" => mask_field(op),
        "selp" => (kind != Type::Pred).then(|| select(kind)),
        "slct" => slct(op, kind),
        _ => None,
    }
}

fn low16(x: u32) -> u32 {
    x & 0xffff
}

fn s16(x: u32) -> i32 {
    i32::from(x as i16)
}

fn sum(op: &Opcode<'_>, kind: Type) -> Option<Plan> {
    let is_add = op.name.starts_with("add");
    let (takes, sets) = (op.name.ends_with('c'), op.has("cc"));
    if takes || sets {
        return carry_sum(is_add, takes, sets, kind);
    }
    Some(match kind {
        Type::S32 if op.has("sat") && is_add => {
            same(kind, 2, b32_2(|a, b| (a as i32).saturating_add(b as i32) as u32))
        }
        Type::S32 if op.has("sat") => same(kind, 2, b32_2(|a, b| (a as i32).saturating_sub(b as i32) as u32)),
        Type::U32 | Type::S32 if is_add => same(kind, 2, b32_2(u32::wrapping_add)),
        Type::U32 | Type::S32 => same(kind, 2, b32_2(u32::wrapping_sub)),
        Type::U64 | Type::S64 if is_add => same(kind, 2, b64_2(u64::wrapping_add)),
        Type::U64 | Type::S64 => same(kind, 2, b64_2(u64::wrapping_sub)),
        Type::U16 | Type::S16 if is_add => same(kind, 2, b32_2(|a, b| low16(a.wrapping_add(b)))),
        Type::U16 | Type::S16 => same(kind, 2, b32_2(|a, b| low16(a.wrapping_sub(b)))),
        _ => return None,
    })
}

/// `add`, `min` and `max` of two 16-bit integers in a register; `None`: no such instruction.
pub(super) fn packed(op: &Opcode<'_>) -> Option<Plan> {
    let is_signed = op.has("s16x2");
    let relu = op.has("relu");
    if relu && !(is_signed && matches!(op.name, "min" | "max")) || op.has("sat") {
        return None;
    }
    let half: fn(i32, i32) -> i32 = match op.name {
        "add" => i32::wrapping_add,
        "min" => i32::min,
        "max" => i32::max,
        _ => return None,
    };
    let widen = move |x: u32| if is_signed { s16(x) } else { low16(x) as i32 };
    let one = move |a: u32, b: u32| {
        let value = half(widen(a), widen(b));
        low16(if relu { value.max(0) } else { value } as u32)
    };
    Some(same(Type::B32, 2, b32_2(move |a, b| one(a, b) | one(a >> 16, b >> 16) << 16)))
}

/// `vabsdiff2` and `vabsdiff4` of unsigned parts: each apart, or with `.add` their sum on top of the last operand.
pub(super) fn difference(op: &Opcode<'_>) -> Option<Plan> {
    let is_sum = match op.parts[..] {
        ["u32", "u32", "u32"] => false,
        ["u32", "u32", "u32", "add"] => true,
        _ => return None,
    };
    let width = if op.name == "vabsdiff2" { 16 } else { 8 };
    let mask = (1u32 << width) - 1;
    let parts = move |a: u32, b: u32| {
        (0..32).step_by(width).map(move |at| ((a >> at & mask).abs_diff(b >> at & mask), at))
    };
    Some(same(
        Type::U32,
        3,
        b32_3(move |a, b, c| match is_sum {
            true => parts(a, b).fold(c, |sum, (part, _)| sum.wrapping_add(part)),
            false => parts(a, b).fold(0, |all, (part, at)| all | part << at),
        }),
    ))
}

fn carry_sum(is_add: bool, takes: bool, sets: bool, kind: Type) -> Option<Plan> {
    Some(match (kind.bytes(), is_add) {
        (4, true) => same(kind, 2, carry32(move |a, b, _, c| integer::add_carry_u32(a, b, c && takes), sets)),
        (4, false) => {
            same(kind, 2, carry32(move |a, b, _, c| integer::sub_borrow_u32(a, b, c && takes), sets))
        }
        (8, true) => same(kind, 2, carry64(move |a, b, _, c| integer::add_carry_u64(a, b, c && takes), sets)),
        (8, false) => {
            same(kind, 2, carry64(move |a, b, _, c| integer::sub_borrow_u64(a, b, c && takes), sets))
        }
        _ => return None,
    })
}

fn product(op: &Opcode<'_>, kind: Type) -> Option<Plan> {
    let is_mad = op.name != "mul";
    if op.name == "madc" || op.has("cc") {
        return carry_product(op, kind);
    }
    if op.has("wide") {
        return wide_product(is_mad, kind);
    }
    let high = op.has("hi");
    if !high && !op.has("lo") {
        return None;
    }
    let sources = if is_mad { 3 } else { 2 };
    Some(same(
        kind,
        sources,
        match (kind, high, is_mad) {
            (Type::U32 | Type::S32, false, false) => b32_2(u32::wrapping_mul),
            (Type::U32 | Type::S32, false, true) => b32_3(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
            (Type::U32, true, false) => b32_2(integer::mul_hi_u32),
            (Type::S32, true, false) => b32_2(integer::mul_hi_s32),
            (Type::U32, true, true) => b32_3(|a, b, c| integer::mul_hi_u32(a, b).wrapping_add(c)),
            (Type::S32, true, true) if op.has("sat") => b32_3(integer::mad_hi_sat_s32),
            (Type::S32, true, true) => b32_3(|a, b, c| integer::mul_hi_s32(a, b).wrapping_add(c)),
            (Type::U64 | Type::S64, false, false) => b64_2(u64::wrapping_mul),
            (Type::U64 | Type::S64, false, true) => b64_3(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
            (Type::U64, true, false) => b64_2(integer::mul_hi_u64),
            (Type::S64, true, false) => b64_2(integer::mul_hi_s64),
            (Type::U64, true, true) => b64_3(|a, b, c| integer::mul_hi_u64(a, b).wrapping_add(c)),
            (Type::S64, true, true) => b64_3(|a, b, c| integer::mul_hi_s64(a, b).wrapping_add(c)),
            (Type::U16 | Type::S16, false, false) => b32_2(|a, b| low16(a.wrapping_mul(b))),
            (Type::U16 | Type::S16, false, true) => b32_3(|a, b, c| low16(a.wrapping_mul(b).wrapping_add(c))),
            (Type::U16, true, false) => b32_2(|a, b| a.wrapping_mul(b) >> 16),
            (Type::S16, true, false) => b32_2(|a, b| low16((s16(a) * s16(b)) as u32 >> 16)),
            (Type::U16, true, true) => b32_3(|a, b, c| low16((a.wrapping_mul(b) >> 16).wrapping_add(c))),
            (Type::S16, true, true) => {
                b32_3(|a, b, c| low16(((s16(a) * s16(b)) as u32 >> 16).wrapping_add(c)))
            }
            _ => return None,
        },
    ))
}

fn carry_product(op: &Opcode<'_>, kind: Type) -> Option<Plan> {
    let (takes, sets, high) = (op.name == "madc", op.has("cc"), op.has("hi"));
    Some(match kind {
        Type::U32 | Type::S32 => {
            let signed = kind == Type::S32;
            let alu = carry32(
                move |a, b, c, flag| {
                    let p = match (high, signed) {
                        (false, _) => a.wrapping_mul(b),
                        (true, true) => integer::mul_hi_s32(a, b),
                        (true, false) => integer::mul_hi_u32(a, b),
                    };
                    integer::add_carry_u32(p, c, flag && takes)
                },
                sets,
            );
            same(kind, 3, alu)
        }
        Type::U64 | Type::S64 => {
            let signed = kind == Type::S64;
            let alu = carry64(
                move |a, b, c, flag| {
                    let p = match (high, signed) {
                        (false, _) => a.wrapping_mul(b),
                        (true, true) => integer::mul_hi_s64(a, b),
                        (true, false) => integer::mul_hi_u64(a, b),
                    };
                    integer::add_carry_u64(p, c, flag && takes)
                },
                sets,
            );
            same(kind, 3, alu)
        }
        _ => return None,
    })
}

fn wide_product(is_mad: bool, kind: Type) -> Option<Plan> {
    let (d, alu) = match (kind, is_mad) {
        (Type::U32, false) => (Type::U64, b32_wide2(integer::mul_wide_u32)),
        (Type::S32, false) => (Type::S64, b32_wide2(integer::mul_wide_s32)),
        (Type::U32, true) => (Type::U64, b32_wide3(|a, b, c| integer::mul_wide_u32(a, b).wrapping_add(c))),
        (Type::S32, true) => (Type::S64, b32_wide3(|a, b, c| integer::mul_wide_s32(a, b).wrapping_add(c))),
        (Type::U16, false) => (Type::U32, b32_2(|a, b| integer::mul_wide_u16(a as u16, b as u16))),
        (Type::S16, false) => (Type::S32, b32_2(|a, b| integer::mul_wide_s16(a as u16, b as u16))),
        (Type::U16, true) => {
            (Type::U32, b32_3(|a, b, c| integer::mul_wide_u16(a as u16, b as u16).wrapping_add(c)))
        }
        (Type::S16, true) => {
            (Type::S32, b32_3(|a, b, c| integer::mul_wide_s16(a as u16, b as u16).wrapping_add(c)))
        }
        _ => return None,
    };
    let sources = if is_mad { vec![kind, kind, d] } else { vec![kind, kind] };
    Some(Plan { d, sources, alu })
}

fn product24(op: &Opcode<'_>, kind: Type) -> Option<Plan> {
    let (signed, hi) = (kind == Type::S32, op.has("hi"));
    if !matches!(kind, Type::U32 | Type::S32) {
        return None;
    }
    Some(if op.name == "mul24" {
        same(kind, 2, b32_2(move |a, b| integer::mul24(a, b, signed, hi)))
    } else {
        same(kind, 3, b32_3(move |a, b, c| integer::mul24(a, b, signed, hi).wrapping_add(c)))
    })
}

fn quotient(is_div: bool, kind: Type) -> Option<Plan> {
    use integer::{div_s64, div_u64, rem_s64, rem_u64};
    let s = |x: u32| i64::from(x as i32);
    let z = |x: u32| u64::from(x);
    let h = |x: u32| i64::from(x as i16);
    Some(same(
        kind,
        2,
        match (kind, is_div) {
            (Type::U32, true) => b32_2(move |a, b| div_u64(z(a), z(b)) as u32),
            (Type::U32, false) => b32_2(move |a, b| rem_u64(z(a), z(b)) as u32),
            (Type::S32, true) => b32_2(move |a, b| div_s64(s(a), s(b)) as u32),
            (Type::S32, false) => b32_2(move |a, b| rem_s64(s(a), s(b)) as u32),
            (Type::U64, true) => b64_2(div_u64),
            (Type::U64, false) => b64_2(rem_u64),
            (Type::S64, true) => b64_2(|a, b| div_s64(a as i64, b as i64) as u64),
            (Type::S64, false) => b64_2(|a, b| rem_s64(a as i64, b as i64) as u64),
            (Type::U16, true) => b32_2(move |a, b| low16(div_u64(z(a), z(b)) as u32)),
            (Type::U16, false) => b32_2(move |a, b| low16(rem_u64(z(a), z(b)) as u32)),
            (Type::S16, true) => b32_2(move |a, b| low16(div_s64(h(a), h(b)) as u32)),
            (Type::S16, false) => b32_2(move |a, b| low16(rem_s64(h(a), h(b)) as u32)),
            _ => return None,
        },
    ))
}

fn extreme(is_max: bool, kind: Type) -> Option<Plan> {
    Some(same(
        kind,
        2,
        match (kind, is_max) {
            (Type::U16 | Type::U32, true) => b32_2(u32::max),
            (Type::U16 | Type::U32, false) => b32_2(u32::min),
            (Type::S32, true) => b32_2(|a, b| (a as i32).max(b as i32) as u32),
            (Type::S32, false) => b32_2(|a, b| (a as i32).min(b as i32) as u32),
            (Type::S16, true) => b32_2(|a, b| low16(s16(a).max(s16(b)) as u32)),
            (Type::S16, false) => b32_2(|a, b| low16(s16(a).min(s16(b)) as u32)),
            (Type::U64, true) => b64_2(u64::max),
            (Type::U64, false) => b64_2(u64::min),
            (Type::S64, true) => b64_2(|a, b| (a as i64).max(b as i64) as u64),
            (Type::S64, false) => b64_2(|a, b| (a as i64).min(b as i64) as u64),
            _ => return None,
        },
    ))
}

fn sign(name: &str, kind: Type) -> Option<Plan> {
    Some(same(
        kind,
        1,
        match (kind, name) {
            (Type::S32, "abs") => b32_1(|a| (a as i32).wrapping_abs() as u32),
            (Type::S32, _) => b32_1(u32::wrapping_neg),
            (Type::S64, "abs") => b64_1(|a| (a as i64).wrapping_abs() as u64),
            (Type::S64, _) => b64_1(u64::wrapping_neg),
            (Type::S16, "abs") => b32_1(|a| low16(s16(a).wrapping_abs() as u32)),
            (Type::S16, _) => b32_1(|a| low16(a.wrapping_neg())),
            _ => return None,
        },
    ))
}

fn sad(kind: Type) -> Option<Plan> {
    use integer::{sad_s64, sad_u64};
    let s = |x: u32| i64::from(x as i32);
    let h = |x: u32| i64::from(x as i16);
    Some(same(
        kind,
        3,
        match kind {
            Type::U32 => b32_3(|a, b, c| sad_u64(u64::from(a), u64::from(b), u64::from(c)) as u32),
            Type::S32 => b32_3(move |a, b, c| sad_s64(s(a), s(b), s(c)) as u32),
            Type::U64 => b64_3(sad_u64),
            Type::S64 => b64_3(|a, b, c| sad_s64(a as i64, b as i64, c as i64) as u64),
            Type::U16 => b32_3(|a, b, c| low16(sad_u64(u64::from(a), u64::from(b), u64::from(c)) as u32)),
            Type::S16 => b32_3(move |a, b, c| low16(sad_s64(h(a), h(b), h(c)) as u32)),
            _ => return None,
        },
    ))
}

fn logic(name: &str, kind: Type) -> Option<Plan> {
    let sources = if matches!(name, "not" | "cnot") { 1 } else { 2 };
    let mask = if kind.bytes() == 2 { 0xffff } else { u32::MAX };
    Some(same(
        kind,
        sources,
        match (kind, name) {
            (Type::Pred, "and") => pred_2(|a, b| a & b),
            (Type::Pred, "or") => pred_2(|a, b| a | b),
            (Type::Pred, "xor") => pred_2(|a, b| a ^ b),
            (Type::Pred, "not") => pred_1(|a| !a),
            (Type::B16 | Type::B32, "and") => b32_2(|a, b| a & b),
            (Type::B16 | Type::B32, "or") => b32_2(|a, b| a | b),
            (Type::B16 | Type::B32, "xor") => b32_2(|a, b| a ^ b),
            (Type::B16 | Type::B32, "not") => b32_1(move |a| !a & mask),
            (Type::B16 | Type::B32, "cnot") => b32_1(|a| u32::from(a == 0)),
            (Type::B64, "and") => b64_2(|a, b| a & b),
            (Type::B64, "or") => b64_2(|a, b| a | b),
            (Type::B64, "xor") => b64_2(|a, b| a ^ b),
            (Type::B64, "not") => b64_1(|a| !a),
            (Type::B64, "cnot") => b64_1(|a| u64::from(a == 0)),
            _ => return None,
        },
    ))
}

fn shift(name: &str, kind: Type) -> Option<Plan> {
    let width = kind.bytes() * 8;
    let wide = |alu| Plan { d: kind, sources: vec![kind, Type::B32], alu };
    Some(match (name, kind) {
        ("shl", Type::B32) => wide(b32_2(|a, b| if b > 31 { 0 } else { a << b })),
        ("shr", Type::U32 | Type::B32) => wide(b32_2(|a, b| if b > 31 { 0 } else { a >> b })),
        ("shr", Type::S32) => wide(b32_2(|a, b| ((a as i32) >> b.min(31)) as u32)),
        ("shl", Type::B16) => wide(b32_2(move |a, b| bits::shl(u64::from(a), b, width) as u32)),
        ("shr", Type::S16) => wide(b32_2(move |a, b| bits::shr_signed(u64::from(a), b, width) as u32)),
        ("shr", Type::U16 | Type::B16) => {
            wide(b32_2(move |a, b| bits::shr_unsigned(u64::from(a), b, width) as u32))
        }
        ("shl", Type::B64) => wide(b64_shift(|a, b| if b > 63 { 0 } else { a << b })),
        ("shr", Type::S64) => wide(b64_shift(|a, b| ((a as i64) >> b.min(63)) as u64)),
        ("shr", Type::U64 | Type::B64) => wide(b64_shift(|a, b| if b > 63 { 0 } else { a >> b })),
        _ => return None,
    })
}

fn count(op: &Opcode<'_>, kind: Type) -> Option<Plan> {
    let to32 = |alu| Plan { d: Type::U32, sources: vec![kind], alu };
    let (signed, amount) = (kind.is_signed(), op.has("shiftamt"));
    Some(match (op.name, kind.bytes()) {
        ("popc", 4) => to32(b32_1(u32::count_ones)),
        ("popc", 8) => to32(b32_from_b64(u64::count_ones)),
        ("clz", 4) => to32(b32_1(u32::leading_zeros)),
        ("clz", 8) => to32(b32_from_b64(u64::leading_zeros)),
        ("brev", 4) => same(kind, 1, b32_1(u32::reverse_bits)),
        ("brev", 8) => same(kind, 1, b64_1(u64::reverse_bits)),
        ("bfind", 4) => to32(b32_1(move |a| bits::bfind(u64::from(a), 32, signed, amount))),
        ("bfind", 8) => to32(b32_from_b64(move |a| bits::bfind(a, 64, signed, amount))),
        _ => return None,
    })
}

fn field(name: &str, kind: Type) -> Option<Plan> {
    let small = vec![kind, Type::U32, Type::U32];
    Some(match (name, kind) {
        ("bfe", Type::U32) => {
            let alu = b32_3(|a, p, n| bits::bfe_unsigned(u64::from(a), p, n, 32) as u32);
            Plan { d: kind, sources: small, alu }
        }
        ("bfe", Type::S32) => {
            let alu = b32_3(|a, p, n| bits::bfe_signed(u64::from(a), p, n, 32) as u32);
            Plan { d: kind, sources: small, alu }
        }
        ("bfe", Type::U64) => {
            Plan { d: kind, sources: small, alu: b64_field(|a, p, n| bits::bfe_unsigned(a, p, n, 64)) }
        }
        ("bfe", Type::S64) => {
            Plan { d: kind, sources: small, alu: b64_field(|a, p, n| bits::bfe_signed(a, p, n, 64)) }
        }
        _ => return None,
    })
}

/// `bfi` has four sources; the fourth is the register after the third by construction of the decoder.
pub(super) fn insert_field(kind: Type, length: u32) -> Option<Alu> {
    Some(match kind {
        Type::B32 => Box::new(move |r: &mut Regs, args: &Args, mask: u32| {
            let (a, b, p) = (r.b32[args.a as usize], r.b32[args.b as usize], r.b32[args.c as usize]);
            let n = r.b32[length as usize];
            let mut out = [0; 32];
            for l in 0..32 {
                out[l] = bits::bfi(u64::from(a[l]), u64::from(b[l]), p[l], n[l], 32) as u32;
            }
            blend(&mut r.b32[args.d as usize], &out, mask);
        }),
        Type::B64 => Box::new(move |r: &mut Regs, args: &Args, mask: u32| {
            let (a, b, p) = (r.b64[args.a as usize], r.b64[args.b as usize], r.b32[args.c as usize]);
            let n = r.b32[length as usize];
            let mut out = [0; 32];
            for l in 0..32 {
                out[l] = bits::bfi(a[l], b[l], p[l], n[l], 64);
            }
            blend(&mut r.b64[args.d as usize], &out, mask);
        }),
        _ => return None,
    })
}

/// `lop3` with its table known.
pub(super) fn lop3(table: u8) -> Alu {
    match table {
        // The tables compilers use most, spelled so that they vectorise.
        0x80 => b32_3(|a, b, c| a & b & c),
        0xfe => b32_3(|a, b, c| a | b | c),
        0x96 => b32_3(|a, b, c| a ^ b ^ c),
        0xf8 => b32_3(|a, b, c| a | (b & c)),
        0xea => b32_3(|a, b, c| (a & b) | c),
        0xe2 => b32_3(|a, b, c| (b & a) | (!b & c)),
        0xca => b32_3(|a, b, c| (a & b) | (!a & c)),
        _ => b32_3(move |a, b, c| bits::lop3(a, b, c, table)),
    }
}

fn excess(op: &Opcode<'_>) -> Excess {
    if op.has("wrap") { Excess::Wrap } else { Excess::Clamp }
}

fn funnel(op: &Opcode<'_>) -> Option<Plan> {
    let excess = excess(op);
    Some(same(
        Type::B32,
        3,
        if op.has("l") {
            b32_3(move |a, b, c| bits::shf_left(a, b, c, excess))
        } else if op.has("r") {
            b32_3(move |a, b, c| bits::shf_right(a, b, c, excess))
        } else {
            return None;
        },
    ))
}

fn permute(op: &Opcode<'_>) -> Plan {
    let mode = match () {
        () if op.has("f4e") => Permute::Forward4,
        () if op.has("b4e") => Permute::Backward4,
        () if op.has("rc8") => Permute::Replicate8,
        () if op.has("ecl") => Permute::EdgeClampLeft,
        () if op.has("ecr") => Permute::EdgeClampRight,
        () if op.has("rc16") => Permute::Replicate16,
        () => Permute::Generic,
    };
    same(Type::B32, 3, b32_3(move |a, b, c| bits::prmt(a, b, c, mode)))
}

fn dot(op: &Opcode<'_>) -> Option<Plan> {
    let kinds: Vec<_> = op.parts.iter().filter_map(|p| Type::named(p)).collect();
    let [a_kind, b_kind] = kinds[..] else { return None };
    let (sa, sb) = (a_kind.is_signed(), b_kind.is_signed());
    let alu = match op.name {
        "dp4a" => b32_3(move |a, b, c| integer::dp4a(a, b, c, sa, sb)),
        _ => {
            let hi = op.has("hi");
            b32_3(move |a, b, c| integer::dp2a(a, b, c, sa, sb, hi))
        }
    };
    Some(same(Type::B32, 3, alu))
}

fn mask_field(op: &Opcode<'_>) -> Option<Plan> {
    let excess = excess(op);
    let signed = op.kind()?.is_signed();
    Some(same(
        Type::B32,
        2,
        match op.name {
            "szext" => b32_2(move |a, b| bits::szext(a, b, signed, excess)),
            _ => b32_2(move |a, b| bits::bmsk(a, b, excess)),
        },
    ))
}

fn select(kind: Type) -> Plan {
    let alu = if kind.bytes() == 8 { select64() } else { select32() };
    Plan { d: kind, sources: vec![kind, kind, Type::Pred], alu }
}

fn slct(op: &Opcode<'_>, kind: Type) -> Option<Plan> {
    let chooser = Type::named(op.parts.last()?)?;
    let takes_first = move |c: u32| {
        if chooser == Type::F32 { f32::from_bits(c) >= 0.0 } else { c as i32 >= 0 }
    };
    // `kind` is the last type of the opcode; the value's type is the one before it.
    let value = op.parts.iter().rev().nth(1).and_then(|p| Type::named(p)).unwrap_or(kind);
    if value == Type::Pred || chooser.bytes() != 4 {
        return None;
    }
    let alu = if value.bytes() == 8 {
        b64_pick32(move |a, b, c| if takes_first(c) { a } else { b })
    } else {
        b32_3(move |a, b, c| if takes_first(c) { a } else { b })
    };
    Some(Plan { d: value, sources: vec![value, value, chooser], alu })
}

/// An integer comparison into a predicate; `None` for an operator integers do not have.
pub(super) fn compare(operator: &str, kind: Type) -> Option<Alu> {
    let signed = kind.is_signed();
    let narrow = kind.bytes() == 2;
    let s = move |x: u32| if narrow { s16(x) } else { x as i32 };
    Some(match (operator, kind.bytes(), signed) {
        ("eq", 8, _) => test64_2(|a, b| a == b),
        ("ne", 8, _) => test64_2(|a, b| a != b),
        ("lt", 8, true) => test64_2(|a, b| (a as i64) < b as i64),
        ("le", 8, true) => test64_2(|a, b| a as i64 <= b as i64),
        ("gt", 8, true) => test64_2(|a, b| a as i64 > b as i64),
        ("ge", 8, true) => test64_2(|a, b| a as i64 >= b as i64),
        ("lt" | "lo", 8, _) => test64_2(|a, b| a < b),
        ("le" | "ls", 8, _) => test64_2(|a, b| a <= b),
        ("gt" | "hi", 8, _) => test64_2(|a, b| a > b),
        ("ge" | "hs", 8, _) => test64_2(|a, b| a >= b),
        ("eq", 2 | 4, _) => test32_2(|a, b| a == b),
        ("ne", 2 | 4, _) => test32_2(|a, b| a != b),
        ("lt", 2 | 4, true) => test32_2(move |a, b| s(a) < s(b)),
        ("le", 2 | 4, true) => test32_2(move |a, b| s(a) <= s(b)),
        ("gt", 2 | 4, true) => test32_2(move |a, b| s(a) > s(b)),
        ("ge", 2 | 4, true) => test32_2(move |a, b| s(a) >= s(b)),
        ("lt" | "lo", 2 | 4, _) => test32_2(|a, b| a < b),
        ("le" | "ls", 2 | 4, _) => test32_2(|a, b| a <= b),
        ("gt" | "hi", 2 | 4, _) => test32_2(|a, b| a > b),
        ("ge" | "hs", 2 | 4, _) => test32_2(|a, b| a >= b),
        _ => return None,
    })
}
