//! The element types of matrix operands.

use crate::numeric::{Fp8, Half};

/// The type of A's or B's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// `.f16`
    F16,
    /// `.bf16`
    Bf16,
    /// `.tf32`: 32 bits, of which the low 13 are ignored.
    Tf32,
    /// `.e4m3`
    E4m3,
    /// `.e5m2`
    E5m2,
    /// `.f64`
    F64,
    /// `.s8`
    S8,
    /// `.u8`
    U8,
    /// `.s4`
    S4,
    /// `.u4`
    U4,
}

impl Element {
    /// Width in bits.
    pub const fn bits(self) -> usize {
        match self {
            Element::S4 | Element::U4 => 4,
            Element::S8 | Element::U8 | Element::E4m3 | Element::E5m2 => 8,
            Element::F16 | Element::Bf16 => 16,
            Element::Tf32 => 32,
            Element::F64 => 64,
        }
    }

    /// Whether this is an integer type.
    pub const fn is_integer(self) -> bool {
        matches!(self, Element::S8 | Element::U8 | Element::S4 | Element::U4)
    }

    /// The value of a code of up to 32 bits; every such type fits into `f32`.
    #[inline]
    pub fn to_f32(self, bits: u32) -> f32 {
        match self {
            Element::F16 => Half::F16.widen(bits as u16),
            Element::Bf16 => Half::Bf16.widen(bits as u16),
            Element::Tf32 => f32::from_bits(bits & 0xffff_e000),
            Element::E4m3 => Fp8::E4m3.widen(bits as u8),
            Element::E5m2 => Fp8::E5m2.widen(bits as u8),
            Element::F64 => f64::from_bits(bits as u64) as f32,
            Element::S8 | Element::U8 | Element::S4 | Element::U4 => self.to_i32(bits) as f32,
        }
    }

    /// The value of an integer code; 0 for the other types.
    #[inline]
    pub const fn to_i32(self, bits: u32) -> i32 {
        match self {
            Element::S8 => bits as i8 as i32,
            Element::U8 => bits as u8 as i32,
            Element::S4 => (bits << 28) as i32 >> 28,
            Element::U4 => (bits & 0xf) as i32,
            _ => 0,
        }
    }
}

/// The type of C's or D's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulator {
    /// `.f16`
    F16,
    /// `.f32`
    F32,
    /// `.f64`
    F64,
    /// `.s32`
    S32,
}

impl Accumulator {
    /// Width in bits.
    pub const fn bits(self) -> usize {
        match self {
            Accumulator::F16 => 16,
            Accumulator::F32 | Accumulator::S32 => 32,
            Accumulator::F64 => 64,
        }
    }
}
