//! `cvt`: between every pair of scalar types, and into and out of the packed
//! 16-bit and 8-bit formats.

use super::format::{BF16, E4M3, E5M2, F16, F32, F64, Format, Overflow, Round, TF32, Unpacked};
use super::half::{pack2, unpack2};

/// A scalar type that `cvt` accepts on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scalar {
    /// `.u8`
    U8,
    /// `.u16`
    U16,
    /// `.u32`
    U32,
    /// `.u64`
    U64,
    /// `.s8`
    S8,
    /// `.s16`
    S16,
    /// `.s32`
    S32,
    /// `.s64`
    S64,
    /// `.f16`
    F16,
    /// `.bf16`
    Bf16,
    /// `.f32`
    F32,
    /// `.f64`
    F64,
}

impl Scalar {
    /// Every type.
    pub const ALL: [Scalar; 12] = [
        Scalar::U8,
        Scalar::U16,
        Scalar::U32,
        Scalar::U64,
        Scalar::S8,
        Scalar::S16,
        Scalar::S32,
        Scalar::S64,
        Scalar::F16,
        Scalar::Bf16,
        Scalar::F32,
        Scalar::F64,
    ];

    /// Width in bits.
    pub const fn bits(self) -> u32 {
        match self {
            Scalar::U8 | Scalar::S8 => 8,
            Scalar::U16 | Scalar::S16 | Scalar::F16 | Scalar::Bf16 => 16,
            Scalar::U32 | Scalar::S32 | Scalar::F32 => 32,
            Scalar::U64 | Scalar::S64 | Scalar::F64 => 64,
        }
    }

    /// The format of a floating-point type; `None` for integers.
    pub const fn format(self) -> Option<&'static Format> {
        match self {
            Scalar::F16 => Some(&F16),
            Scalar::Bf16 => Some(&BF16),
            Scalar::F32 => Some(&F32),
            Scalar::F64 => Some(&F64),
            _ => None,
        }
    }

    /// Whether this is a signed integer type.
    pub const fn is_signed(self) -> bool {
        matches!(self, Scalar::S8 | Scalar::S16 | Scalar::S32 | Scalar::S64)
    }

    /// The mask of the type's bits.
    const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// The bounds of an integer type.
    const fn range(self) -> (i128, i128) {
        let bits = self.bits();
        if self.is_signed() {
            (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
        } else {
            (0, (1i128 << bits) - 1)
        }
    }

    /// The value of an integer code.
    const fn integer(self, bits: u64) -> i128 {
        let bits = bits & self.mask();
        if self.is_signed() {
            let unused = 64 - self.bits();
            ((bits << unused) as i64 >> unused) as i128
        } else {
            bits as i128
        }
    }
}

/// The modifiers of a `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvertMode {
    /// `.rn`, `.rz`, `.rm`, `.rp`; for float to integer and integer rounding, `.rni` and so on.
    pub round: Round,
    /// `.rni`, `.rzi`, `.rmi`, `.rpi` between equal floating-point types: round to an integral value.
    pub to_integral: bool,
    /// `.ftz`: applies to `.f32` inputs and results only.
    pub ftz: bool,
    /// `.sat`: to the integer range, or to `[0, 1]`.
    pub sat: bool,
    /// `.relu`: negative results become `+0`.
    pub relu: bool,
    /// `.satfinite`: beyond the largest finite value means the largest finite value.
    pub satfinite: bool,
}

impl ConvertMode {
    /// Rounding to nearest even, no other modifier.
    pub const DEFAULT: ConvertMode = ConvertMode::rounded(Round::NearestEven);

    /// A rounding mode, no other modifier.
    pub const fn rounded(round: Round) -> Self {
        ConvertMode { round, to_integral: false, ftz: false, sat: false, relu: false, satfinite: false }
    }
}

/// `cvt.dst.src`: the code of `dst`, in the low bits, zero above. A signed
/// result still has to be sign-extended when its register is wider: see [`extend`].
pub fn convert(dst: Scalar, src: Scalar, bits: u64, mode: ConvertMode) -> u64 {
    if src == Scalar::F32 && mode == ConvertMode::DEFAULT {
        // By far the most frequent conversions of a kernel that stores 16-bit results.
        match dst {
            Scalar::F16 => return f32_to_f16(bits as u32) as u64,
            Scalar::Bf16 => return f32_to_bf16(bits as u32) as u64,
            _ => {}
        }
    }
    let bits = bits & src.mask();
    let bits = if mode.ftz && src == Scalar::F32 { F32.flush(bits) } else { bits };
    match (dst.format(), src.format()) {
        (None, None) => integer_to_integer(dst, src.integer(bits), mode.sat),
        (None, Some(from)) => float_to_integer(dst, src, from, bits, mode.round),
        (Some(to), None) => {
            let value = src.integer(bits);
            let magnitude = value.unsigned_abs() as u64;
            let code = to.pack(value < 0, 0, magnitude, false, mode.round, overflow_of(mode));
            finish_float(dst, to, code, mode)
        }
        (Some(to), Some(from)) => {
            let value = from.widen(bits);
            let code = if from.is_nan(bits) {
                if dst == src { bits } else { to.nan }
            } else if mode.to_integral {
                to.narrow(to_integral(value, mode.round), mode.round, overflow_of(mode))
            } else {
                to.narrow(value, mode.round, overflow_of(mode))
            };
            finish_float(dst, to, code, mode)
        }
    }
}

/// `cvt.rn.f16.f32`
#[inline]
fn f32_to_f16(bits: u32) -> u16 {
    let value = f32::from_bits(bits);
    if value.is_nan() { F16.nan as u16 } else { half::f16::from_f32(value).to_bits() }
}

/// `cvt.rn.bf16.f32`
#[inline]
fn f32_to_bf16(bits: u32) -> u16 {
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return BF16.nan as u16;
    }
    // Half a unit, less one for an even result, carries where rounding goes up.
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The result as a register of `register_bits` holds it.
pub const fn extend(dst: Scalar, bits: u64, register_bits: u32) -> u64 {
    let value = if dst.is_signed() { dst.integer(bits) as u64 } else { bits };
    value & (u64::MAX >> (64 - register_bits))
}

const fn overflow_of(mode: ConvertMode) -> Overflow {
    if mode.satfinite { Overflow::Finite } else { Overflow::Ieee }
}

fn integer_to_integer(dst: Scalar, value: i128, sat: bool) -> u64 {
    let (low, high) = dst.range();
    let value = if sat { value.clamp(low, high) } else { value };
    value as u64 & dst.mask()
}

fn float_to_integer(dst: Scalar, src: Scalar, from: &Format, bits: u64, round: Round) -> u64 {
    let (low, high) = dst.range();
    let value = match from.unpack(bits) {
        Unpacked::Nan if src != Scalar::F64 && dst.bits() != 64 => 0,
        // Documented: only the top bit of the destination set.
        Unpacked::Nan => return 1 << (dst.bits() - 1),
        Unpacked::Infinite(negative) => {
            if negative {
                low
            } else {
                high
            }
        }
        // Casting saturates, and the range of every integer type lies within that of i128.
        Unpacked::Finite { .. } => (to_integral(from.widen(bits), round) as i128).clamp(low, high),
    };
    value as u64 & dst.mask()
}

/// Rounds to an integral value, keeping the sign of zero.
pub fn to_integral(value: f64, round: Round) -> f64 {
    match round {
        Round::NearestEven => value.round_ties_even(),
        Round::NearestAway => value.round(),
        Round::TowardZero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}

/// `.ftz` (on `.f32` only), `.sat` and `.relu` on a floating-point result.
fn finish_float(dst: Scalar, format: &Format, code: u64, mode: ConvertMode) -> u64 {
    let code = if mode.ftz && dst == Scalar::F32 { format.flush(code) } else { code };
    if mode.sat {
        let value = format.widen(code);
        return if value >= 1.0 {
            format.narrow(1.0, Round::NearestEven, Overflow::Ieee)
        } else if value > 0.0 {
            code
        } else {
            0
        };
    }
    if mode.relu { relu(format, code) } else { code }
}

fn relu(format: &Format, code: u64) -> u64 {
    if format.is_nan(code) {
        format.nan
    } else if code & format.sign_mask() != 0 {
        0
    } else {
        code
    }
}

/// `cvt.f16x2.f32` and `cvt.bf16x2.f32`: `a` goes to the upper half, `b` to the lower.
pub fn f32_to_half2(dst: Scalar, a: u32, b: u32, mode: ConvertMode) -> u32 {
    let half = |x: u32| convert(dst, Scalar::F32, x as u64, mode) as u16;
    pack2([half(b), half(a)])
}

/// `cvt.tf32.f32`: the 19 significant bits, where a register holds them.
pub fn f32_to_tf32(a: u32, mode: ConvertMode) -> u32 {
    if f32::from_bits(a).is_nan() && mode.round == Round::NearestAway {
        // Seen on an H200: `.rna` drops the lower bits of a NaN like any others, even if an infinity is left.
        return a & !0x1fff;
    }
    let value = f32::from_bits(a) as f64;
    let code = TF32.narrow(value, mode.round, overflow_of(mode));
    let code = if mode.relu { relu(&TF32, code) } else { code };
    (code << 13) as u32
}

/// The values of an 8-bit format's codes: matrix products look up many of them.
const fn values(format: &Format) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = format.widen(code as u64) as f32;
        code += 1;
    }
    values
}

static E4M3_VALUES: [f32; 256] = values(&E4M3);
static E5M2_VALUES: [f32; 256] = values(&E5M2);

/// An 8-bit floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// `.e4m3`
    E4m3,
    /// `.e5m2`
    E5m2,
}

impl Fp8 {
    /// The format behind the name.
    pub const fn format(self) -> &'static Format {
        match self {
            Fp8::E4m3 => &E4M3,
            Fp8::E5m2 => &E5M2,
        }
    }

    /// The value of a code.
    #[inline]
    pub fn widen(self, code: u8) -> f32 {
        match self {
            Fp8::E4m3 => E4M3_VALUES[code as usize],
            Fp8::E5m2 => E5M2_VALUES[code as usize],
        }
    }

    /// `cvt.rn.satfinite{.relu}` of one value.
    pub fn narrow(self, value: f64, with_relu: bool) -> u8 {
        let code = self.format().narrow(value, Round::NearestEven, Overflow::Finite);
        (if with_relu { relu(self.format(), code) } else { code }) as u8
    }

    /// `cvt.rn.satfinite{.relu}.e4m3x2.f32`: `a` goes to the upper byte, `b` to the lower.
    pub fn from_f32x2(self, a: u32, b: u32, with_relu: bool) -> u16 {
        let [low, high] = [b, a].map(|x| self.narrow(f32::from_bits(x) as f64, with_relu));
        u16::from_le_bytes([low, high])
    }

    /// `cvt.rn.satfinite{.relu}.e4m3x2.f16x2`
    pub fn from_f16x2(self, pair: u32, with_relu: bool) -> u16 {
        u16::from_le_bytes(unpack2(pair).map(|x| self.narrow(F16.widen(x as u64), with_relu)))
    }

    /// `cvt.rn.satfinite{.relu}.e4m3x2.bf16x2`
    pub fn from_bf16x2(self, pair: u32, with_relu: bool) -> u16 {
        u16::from_le_bytes(unpack2(pair).map(|x| self.narrow(BF16.widen(x as u64), with_relu)))
    }

    /// `cvt.rn{.relu}.f16x2.e4m3x2`, exact.
    pub fn to_f16x2(self, pair: u16, with_relu: bool) -> u32 {
        pack2(pair.to_le_bytes().map(|code| {
            let half = F16.narrow(self.format().widen(code as u64), Round::NearestEven, Overflow::Ieee);
            (if with_relu { relu(&F16, half) } else { half }) as u16
        }))
    }
}

/// `cvt.pack.sat`: both values saturated to `bits` (2, 4, 8 or 16) wide integers,
/// `a` above `b`, then the low bits of `c` above both.
pub fn convert_pack(a: i32, b: i32, c: u32, bits: u32, signed: bool) -> u32 {
    let (low, high) =
        if signed { (-(1i64 << (bits - 1)), (1i64 << (bits - 1)) - 1) } else { (0, (1i64 << bits) - 1) };
    let field = |x: i32| ((x as i64).clamp(low, high) as u64) & ((1 << bits) - 1);
    (((c as u64) << (2 * bits)) | field(a) << bits | field(b)) as u32
}
