//! The scalar instructions of a capture.

use ptxsan::numeric::approx::{
    ErrorBound, Function, Perturb, approx_f32, approx_half, div_approx_f32, div_full_f32,
};
use ptxsan::numeric::bits::*;
use ptxsan::numeric::compare::extreme;
use ptxsan::numeric::convert::{convert, extend, f32_to_half2, f32_to_tf32};
use ptxsan::numeric::float::*;
use ptxsan::numeric::format::{BF16, F16, F32, F64};
use ptxsan::numeric::half::{each2, each3, unpack2};
use ptxsan::numeric::integer::*;
use ptxsan::numeric::{
    ConvertMode, Extreme, ExtremeMode, FloatMode, Format, Fp8, Half, HalfMode, Round, Scalar,
};

/// Compares one captured result.
pub(crate) fn check(name: &str, inputs: &[u64], output: u64) -> Result<(), String> {
    let parts: Vec<&str> = name.split('.').collect();
    let has = |modifier: &str| parts.contains(&modifier);
    if has("approx") || has("full") {
        return check_approx(&parts, inputs, output);
    }
    // A register of .tf32 may hold anything in the bits that are no part of the value.
    let output = if has("tf32") { output & 0xffff_e000 } else { output };
    let (want, format) = expected(&parts, inputs).ok_or("no such instruction is known")?;
    let equal = match format {
        Some(format) if format.width() == 16 => {
            // Packed, or one half with nothing above.
            let pairs = unpack2(output as u32).into_iter().zip(unpack2(want as u32));
            pairs.into_iter().all(|(got, want)| same(format, got as u64, want as u64))
        }
        Some(format) => same(format, output, want),
        None => output == want,
    };
    if equal { Ok(()) } else { Err(format!("computed {want:x}")) }
}

/// Equal, or both NaN.
fn same(format: &Format, got: u64, want: u64) -> bool {
    got == want || (format.is_nan(got) && format.is_nan(want))
}

/// The rounding modifier of an opcode, arithmetic or to integer.
fn round_of(parts: &[&str]) -> Round {
    let round = parts.iter().find_map(|part| match *part {
        "rn" | "rni" => Some(Round::NearestEven),
        "rna" => Some(Round::NearestAway),
        "rz" | "rzi" => Some(Round::TowardZero),
        "rm" | "rmi" => Some(Round::Down),
        "rp" | "rpi" => Some(Round::Up),
        _ => None,
    });
    round.unwrap_or(Round::NearestEven)
}

/// What our functions return, and the format to compare NaN in.
fn expected(parts: &[&str], inputs: &[u64]) -> Option<(u64, Option<&'static Format>)> {
    let kind = *parts.last()?;
    let has = |modifier: &str| parts.contains(&modifier);
    if parts[0] == "cvt" {
        return expected_cvt(parts, inputs);
    }
    if let "min" | "max" = parts[0] {
        let which = if parts[0] == "min" { Extreme::Min } else { Extreme::Max };
        let mode = ExtremeMode { ftz: has("ftz"), nan: has("NaN"), xorsign_abs: has("xorsign") };
        let (a, b) = (inputs[0], inputs[1]);
        return match kind {
            "f32" => Some((extreme(&F32, which, a, b, mode), Some(&F32))),
            "f64" => Some((extreme(&F64, which, a, b, mode), Some(&F64))),
            _ => {
                let half = half_of(kind)?;
                let both = each2(a as u32, b as u32, |a, b| half.extreme(which, a, b, mode));
                Some((both as u64, Some(half.format())))
            }
        };
    }
    match kind {
        "f32" => Some((expected_f32(parts, inputs)? as u64, Some(&F32))),
        "f64" => Some((expected_f64(parts, inputs)?, Some(&F64))),
        "f16x2" | "bf16x2" => {
            let half = half_of(kind)?;
            let mode = HalfMode { ftz: has("ftz"), sat: has("sat"), relu: has("relu") };
            let [a, b] = [inputs[0] as u32, inputs[1] as u32];
            let pair = match parts[0] {
                "add" => each2(a, b, |a, b| half.add(a, b, mode)),
                "sub" => each2(a, b, |a, b| half.sub(a, b, mode)),
                "mul" => each2(a, b, |a, b| half.mul(a, b, mode)),
                "fma" => each3(a, b, inputs[2] as u32, |a, b, c| half.fma(a, b, c, mode)),
                _ => return None,
            };
            Some((pair as u64, Some(half.format())))
        }
        _ => Some((expected_integer(parts, inputs)?, None)),
    }
}

fn half_of(kind: &str) -> Option<Half> {
    match kind {
        "f16" | "f16x2" => Some(Half::F16),
        "bf16" | "bf16x2" => Some(Half::Bf16),
        _ => None,
    }
}

fn expected_f32(parts: &[&str], inputs: &[u64]) -> Option<u32> {
    let mode = FloatMode { round: round_of(parts), ftz: parts.contains(&"ftz"), sat: parts.contains(&"sat") };
    let operand = |i: usize| inputs.get(i).map(|&bits| bits as u32);
    let a = operand(0)?;
    Some(match parts[0] {
        "add" => add_f32(a, operand(1)?, mode),
        "sub" => sub_f32(a, operand(1)?, mode),
        "mul" => mul_f32(a, operand(1)?, mode),
        "fma" => fma_f32(a, operand(1)?, operand(2)?, mode),
        "div" => div_f32(a, operand(1)?, mode),
        "rcp" => rcp_f32(a, mode),
        "sqrt" => sqrt_f32(a, mode),
        _ => return None,
    })
}

fn expected_f64(parts: &[&str], inputs: &[u64]) -> Option<u64> {
    let round = round_of(parts);
    Some(match (parts[0], inputs) {
        ("add", &[a, b]) => add_f64(a, b, round),
        ("sub", &[a, b]) => sub_f64(a, b, round),
        ("mul", &[a, b]) => mul_f64(a, b, round),
        ("fma", &[a, b, c]) => fma_f64(a, b, c, round),
        ("div", &[a, b]) => div_f64(a, b, round),
        ("sqrt", &[a]) => sqrt_f64(a, round),
        _ => return None,
    })
}

fn scalar_of(name: &str) -> Option<Scalar> {
    Some(match name {
        "u8" => Scalar::U8,
        "u16" => Scalar::U16,
        "u32" => Scalar::U32,
        "u64" => Scalar::U64,
        "s8" => Scalar::S8,
        "s16" => Scalar::S16,
        "s32" => Scalar::S32,
        "s64" => Scalar::S64,
        "f16" => Scalar::F16,
        "bf16" => Scalar::Bf16,
        "f32" => Scalar::F32,
        "f64" => Scalar::F64,
        _ => return None,
    })
}

fn expected_cvt(parts: &[&str], inputs: &[u64]) -> Option<(u64, Option<&'static Format>)> {
    let has = |modifier: &str| parts.contains(&modifier);
    let (dst, src) = (parts[parts.len() - 2], parts[parts.len() - 1]);
    let mode = ConvertMode {
        round: round_of(parts),
        to_integral: dst == src && parts.iter().any(|part| matches!(*part, "rni" | "rzi" | "rmi" | "rpi")),
        ftz: has("ftz"),
        sat: has("sat"),
        relu: has("relu"),
        satfinite: has("satfinite"),
    };
    let fp8 = |name: &str| match name {
        "e4m3x2" => Some(Fp8::E4m3),
        "e5m2x2" => Some(Fp8::E5m2),
        _ => None,
    };
    let word = |i: usize| inputs[i] as u32;
    if let Some(fp8) = fp8(dst) {
        let pair = match src {
            "f32" => fp8.from_f32x2(word(0), word(1), mode.relu),
            _ => fp8.from_f16x2(word(0), mode.relu),
        };
        return Some((pair as u64, None));
    }
    if let Some(fp8) = fp8(src) {
        return Some((fp8.to_f16x2(inputs[0] as u16, mode.relu) as u64, Some(&F16)));
    }
    match dst {
        "f16x2" => Some((f32_to_half2(Scalar::F16, word(0), word(1), mode) as u64, Some(&F16))),
        "bf16x2" => Some((f32_to_half2(Scalar::Bf16, word(0), word(1), mode) as u64, Some(&BF16))),
        "tf32" => Some((f32_to_tf32(word(0), mode) as u64, Some(&F32))),
        _ => {
            let (dst, src) = (scalar_of(dst)?, scalar_of(src)?);
            let bits = convert(dst, src, inputs[0], mode);
            // Bytes were captured in registers of 32 bits.
            let register_bits = if dst.bits() == 8 || dst == Scalar::U16 { 32 } else { dst.bits() };
            Some((extend(dst, bits, register_bits), dst.format()))
        }
    }
}

fn expected_integer(parts: &[&str], inputs: &[u64]) -> Option<u64> {
    let kind = *parts.last()?;
    let has = |modifier: &str| parts.contains(&modifier);
    let at = |i: usize| inputs.get(i).copied().unwrap_or(0);
    let word = |i: usize| at(i) as u32;
    let width = if kind.ends_with("64") { 64 } else { 32 };
    let excess = if has("wrap") { Excess::Wrap } else { Excess::Clamp };
    let signed = |part: &str| part.starts_with('s');
    Some(match parts[0] {
        "bfe" if signed(kind) => bfe_signed(at(0), word(1), word(2), width),
        "bfe" => bfe_unsigned(at(0), word(1), word(2), width),
        "bfi" => bfi(at(0), at(1), word(2), word(3), width),
        "bfind" => bfind(at(0), width, signed(kind), has("shiftamt")) as u64,
        "fns" => fns(word(0), word(1), word(2) as i32) as u64,
        "szext" => szext(word(0), word(1), signed(kind), excess) as u64,
        "bmsk" => bmsk(word(0), word(1), excess) as u64,
        "shf" if has("l") => shf_left(word(0), word(1), word(2), excess) as u64,
        "shf" => shf_right(word(0), word(1), word(2), excess) as u64,
        "shl" => shl(at(0), word(1), width),
        "shr" if signed(kind) => shr_signed(at(0), word(1), width),
        "shr" => shr_unsigned(at(0), word(1), width),
        "prmt" => {
            let mode = match kind {
                "f4e" => Permute::Forward4,
                "b4e" => Permute::Backward4,
                "rc8" => Permute::Replicate8,
                "ecl" => Permute::EdgeClampLeft,
                "ecr" => Permute::EdgeClampRight,
                "rc16" => Permute::Replicate16,
                _ => Permute::Generic,
            };
            prmt(word(0), word(1), word(2), mode) as u64
        }
        "lop3" => lop3(word(0), word(1), word(2), u8::from_str_radix(kind, 16).ok()?) as u64,
        "mul" if has("wide") => mul_wide_s32(word(0), word(1)),
        "mul" => match kind {
            "s32" => mul_hi_s32(word(0), word(1)) as u64,
            "u64" => mul_hi_u64(at(0), at(1)),
            "s64" => mul_hi_s64(at(0), at(1)),
            _ => return None,
        },
        "mad" => mad_hi_sat_s32(word(0), word(1), word(2)) as u64,
        "sad" => {
            let extended = |i: usize| word(i) as i32 as i64;
            sad_s64(extended(0), extended(1), extended(2)) as u32 as u64
        }
        "dp4a" => dp4a(word(0), word(1), word(2), signed(parts[1]), signed(parts[2])) as u64,
        "dp2a" => dp2a(word(0), word(1), word(2), signed(parts[2]), signed(parts[3]), has("hi")) as u64,
        _ => return None,
    })
}

fn check_approx(parts: &[&str], inputs: &[u64], output: u64) -> Result<(), String> {
    let kind = *parts.last().ok_or("empty")?;
    let ftz = parts.contains(&"ftz");
    let none = Perturb::None;
    let a = inputs[0] as u32;
    if parts[0] == "div" {
        let b = inputs[1] as u32;
        let full = parts.contains(&"full");
        let divisor = f32::from_bits(b).abs();
        if !full && divisor < f32::MIN_POSITIVE && divisor > 0.0 {
            return Ok(()); // No error is documented for subnormal divisors.
        }
        let nearest = if full { div_full_f32(a, b, ftz, none) } else { div_approx_f32(a, b, ftz, none) };
        let exact = f32::from_bits(a) as f64 / f32::from_bits(b) as f64;
        let value = f32::from_bits(nearest);
        let special = !value.is_finite() || value == 0.0;
        let bound = if special { None } else { Some(ErrorBound::Ulps(2.0)) };
        return within(&F32, output, nearest as u64, exact, bound, ftz);
    }
    let function = match parts[0] {
        "ex2" => Function::Ex2,
        "lg2" => Function::Lg2,
        "rcp" => Function::Rcp,
        "rsqrt" => Function::Rsqrt,
        "sqrt" => Function::Sqrt,
        "sin" => Function::Sin,
        "cos" => Function::Cos,
        "tanh" => Function::Tanh,
        other => return Err(format!("no function {other} is known")),
    };
    if kind == "f32" {
        let x = f32::from_bits(if ftz { F32.flush(a as u64) as u32 } else { a }) as f64;
        let nearest = approx_f32(function, a, ftz, none) as u64;
        let bound = function.error_f32(x);
        if bound.is_none() && x.is_finite() {
            return Ok(()); // Sine and cosine far out: best effort.
        }
        let special = x == 0.0 || !x.is_finite();
        return within(&F32, output, nearest, function.exact(x), bound.filter(|_| !special), ftz);
    }
    let half = half_of(kind).ok_or("no such type is known")?;
    for (x, got) in unpack2(a).into_iter().zip(unpack2(output as u32)) {
        let flushed = if ftz { half.format().flush(x as u64) as u16 } else { x };
        let value = half.widen(flushed) as f64;
        let special = value == 0.0 || !value.is_finite();
        let bound = function.error_half(half).filter(|_| !special);
        let nearest = approx_half(function, half, x, none) as u64;
        within(half.format(), got as u64, nearest, function.exact(value), bound, ftz)?;
    }
    Ok(())
}

/// Equal, or within the bound around the exact value.
fn within(
    format: &Format,
    got: u64,
    nearest: u64,
    exact: f64,
    bound: Option<ErrorBound>,
    ftz: bool,
) -> Result<(), String> {
    if same(format, got, nearest) {
        return Ok(());
    }
    let failed = |why: &str| Err(format!("nearest is {nearest:x}, exact {exact:e}: {why}"));
    let Some(bound) = bound else { return failed("a fixed value") };
    let value = format.widen(got);
    let smallest_normal = format.widen(1 << format.man_bits);
    if ftz && value == 0.0 && exact.abs() <= smallest_normal * 1.01 {
        return Ok(());
    }
    // Errors in units count from the rounded result; below the normal range a unit is all there is.
    let half_unit = format.ulp(exact) / 2.0;
    let slack = match bound {
        ErrorBound::Ulps(_) => half_unit,
        _ if exact.abs() < smallest_normal => 2.0 * half_unit,
        _ => 0.0,
    };
    let error = bound.magnitude(exact, format) + slack;
    let largest = format.widen(format.max_finite());
    if value.is_infinite() && exact.abs() + error > largest {
        return Ok(());
    }
    if (value - exact).abs() <= error { Ok(()) } else { failed("out of bounds") }
}
