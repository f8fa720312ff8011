//! The 8-bit codes: what one byte of a quantised tensor stands for at scale one.
//!
//! u8 and e4m3 codes cover ±448, the range of e4m3, so that the same scale per head, `absmax / 448`, serves both; i8 codes are
//! the integers themselves, whose scale is `absmax / 127`. A tensor's real values are its codes' values times their scale.

use crate::{DType, Element, float::binade};

/// The largest value of u8 and e4m3 codes at scale one.
pub const CODE_MAX: f64 = 448.0;

/// The code of zero in u8 tensors; the others lie evenly on both sides of it.
const U8_ZERO: f64 = 128.0;
/// Codes on each side of zero that the scale is spread over.
const U8_STEPS: f64 = 127.0;

/// A u8 code, linear and symmetric around 128: it stands for `(code − 128) / 127 · 448`.
///
/// Quantising gives the codes 1 to 255; code 0 is read as one step below −448. There is no NaN and no infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct U8Code(pub u8);

impl Element for U8Code {
    const DTYPE: DType = DType::U8;

    fn to_f64(self) -> f64 {
        (f64::from(self.0) - U8_ZERO) / U8_STEPS * CODE_MAX
    }

    fn to_f32(self) -> f32 {
        self.to_f64() as f32
    }

    /// The nearest code, saturating at ±448; zero's code for NaN, which u8 cannot hold.
    fn from_f64(x: f64) -> Self {
        let x = if x.is_nan() { 0.0 } else { x.clamp(-CODE_MAX, CODE_MAX) };
        // From 1 to 255, so the conversion cannot lose anything.
        Self((x / CODE_MAX * U8_STEPS + U8_ZERO).round_ties_even() as u8)
    }

    fn from_f32(x: f32) -> Self {
        Self::from_f64(f64::from(x))
    }
}

/// An i8 code: it stands for the integer itself.
///
/// Quantising gives the codes −127 to 127; −128 is read as one step below. There is no NaN and no infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct I8Code(pub i8);

impl Element for I8Code {
    const DTYPE: DType = DType::I8;

    fn to_f64(self) -> f64 {
        f64::from(self.0)
    }

    fn to_f32(self) -> f32 {
        f32::from(self.0)
    }

    /// The nearest code, ties to even, saturating at ±127; zero for NaN, which i8 cannot hold.
    fn from_f64(x: f64) -> Self {
        // The conversion takes NaN to zero; from −127 to 127 it cannot lose anything.
        let most = f64::from(i8::MAX);
        Self(x.clamp(-most, most).round_ties_even() as i8)
    }

    fn from_f32(x: f32) -> Self {
        Self::from_f64(f64::from(x))
    }
}

/// An OCP e4m3fn code: a sign, four bits of exponent biased by 7, three of mantissa; no infinity, NaN is S.1111.111.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct E4M3Code(pub u8);

impl E4M3Code {
    /// The smallest positive normal value.
    pub const MIN_NORMAL: f64 = 1.0 / 64.0;
    /// The code of NaN with its sign bit clear.
    const NAN: u8 = 0x7F;
    /// The code of 448.
    const MAX: u8 = 0x7E;
}

impl Element for E4M3Code {
    const DTYPE: DType = DType::E4M3;

    fn to_f64(self) -> f64 {
        let (magnitude, exponent, mantissa) =
            (self.0 & 0x7F, i32::from(self.0 >> 3 & 0xF), f64::from(self.0 & 7));
        let value = match (magnitude, exponent) {
            (Self::NAN, _) => f64::NAN,
            (_, 0) => Self::MIN_NORMAL * mantissa / 8.0,
            _ => f64::powi(2.0, exponent - 7) * (1.0 + mantissa / 8.0),
        };
        if self.0 & 0x80 == 0 { value } else { -value }
    }

    fn to_f32(self) -> f32 {
        // Four significant bits fit.
        self.to_f64() as f32
    }

    /// The nearest code, ties to the even one, saturating at ±448; infinities saturate too, NaN stays NaN.
    fn from_f64(x: f64) -> Self {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() {
            return Self(sign | Self::NAN);
        }
        let size = x.abs().min(CODE_MAX);
        // Eight steps to a binade; those below the smallest normal have its spacing.
        let base = binade(size.max(Self::MIN_NORMAL));
        let steps = (size / base * 8.0).round_ties_even() as u8;
        // `steps` is 0 to 16: with 8 the exponent's own lowest step, a carry to 16 moves on to the next binade.
        let binades_up = (base / Self::MIN_NORMAL).log2() as u8;
        Self(sign | (binades_up * 8 + steps).min(Self::MAX))
    }

    fn from_f32(x: f32) -> Self {
        Self::from_f64(f64::from(x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_u8_code_is_where_the_formula_puts_it() {
        for code in 0..=255u8 {
            let value = U8Code(code).to_f64();
            assert!((value - (f64::from(code) - 128.0) / 127.0 * 448.0).abs() < 1e-12);
            // Code 0 lies outside ±448, where quantising never goes.
            assert_eq!(U8Code::from_f64(value), U8Code(code.max(1)));
        }
        assert_eq!((U8Code(1).to_f64(), U8Code(128).to_f64(), U8Code(255).to_f64()), (-448.0, 0.0, 448.0));
        assert_eq!([f64::NAN, f64::INFINITY, -1e9].map(|x| U8Code::from_f64(x).0), [128, 255, 1]);
    }

    #[test]
    fn u8_rounds_to_the_nearest_code() {
        for i in 0..20_000 {
            let x = -448.0 + i as f64 * 0.0448;
            let error = (U8Code::from_f64(x).to_f64() - x).abs();
            assert!(error <= 448.0 / 127.0 / 2.0 + 1e-12, "{x}: {error}");
        }
    }

    #[test]
    fn every_i8_code_is_its_integer() {
        for code in i8::MIN..=i8::MAX {
            assert_eq!((I8Code(code).to_f64(), I8Code(code).to_f32()), (f64::from(code), f32::from(code)));
            // −128 lies outside ±127, where quantising never goes.
            assert_eq!(I8Code::from_f64(f64::from(code)), I8Code(code.max(-127)));
        }
        let rounded = [0.5, 1.5, -0.5, -2.5, 126.5, 126.51, -127.4].map(|x| I8Code::from_f64(x).0);
        assert_eq!(rounded, [0, 2, 0, -2, 126, 127, -127]);
        assert_eq!([f64::NAN, f64::INFINITY, -1e9].map(|x| I8Code::from_f64(x).0), [0, 127, -127]);
    }

    /// Values from the OCP 8-bit floating point specification, and the order of the codes between them.
    #[test]
    fn every_e4m3_code_decodes_and_encodes_back() {
        for (code, value) in [
            (0x00, 0.0),
            (0x01, f64::powi(2.0, -9)),
            (0x07, 0.875 * f64::powi(2.0, -6)),
            (0x08, f64::powi(2.0, -6)),
            (0x38, 1.0),
            (0x39, 1.125),
            (0xB8, -1.0),
            (0x7E, 448.0),
            (0xFE, -448.0),
        ] {
            assert_eq!(E4M3Code(code).to_f64(), value, "{code:#x}");
        }
        for code in 0..=255u8 {
            let value = E4M3Code(code).to_f64();
            assert_eq!(value.is_nan(), code & 0x7F == 0x7F, "{code:#x}");
            assert_eq!(E4M3Code::from_f64(value), E4M3Code(code), "{code:#x}");
            if code & 0x7F < 0x7E {
                let next = E4M3Code(code + 1).to_f64();
                assert!(next.abs() > value.abs(), "{code:#x}");
            }
        }
    }

    #[test]
    fn e4m3_rounds_to_nearest_with_ties_to_even_codes() {
        for code in 0..0x7Eu8 {
            let (low, high) = (E4M3Code(code).to_f64(), E4M3Code(code + 1).to_f64());
            let middle = (low + high) / 2.0;
            let even = code + code % 2;
            assert_eq!(E4M3Code::from_f64(middle).0, even, "{middle}");
            assert_eq!(E4M3Code::from_f64(-middle).0, 0x80 | even, "{middle}");
            assert_eq!(E4M3Code::from_f64(middle * (1.0 - 1e-9)).0, code, "{middle}");
            assert_eq!(E4M3Code::from_f64(middle * (1.0 + 1e-9)).0, code + 1, "{middle}");
        }
        assert_eq!([449.0, 1e30, f64::INFINITY].map(|x| E4M3Code::from_f64(x).0), [0x7E; 3]);
        assert_eq!(E4M3Code::from_f64(f64::NEG_INFINITY).0, 0xFE);
    }
}
