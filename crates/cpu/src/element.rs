//! The element types of tensors, and how vectors of them are read and written.

use crate::simd::{MAX_LANES, Simd};
use evosdpa_core::{DType, E4M3Code, I8Code, U8Code};
use half::{bf16, f16};

/// A tensor element as kernels read it: its value, or its code's value over [`unit`].
///
/// # Safety
/// The pointer functions require the instruction set of `S` and pointers valid for `S::LANES` elements, or for
/// `count < S::LANES` elements where a count is given (nothing beyond is touched).
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// What is read as zero.
    const ZERO: Self;

    unsafe fn load<S: Simd>(p: *const Self) -> S::V;

    /// The first `count` lanes from memory, the others zero.
    #[inline(always)]
    unsafe fn load_first<S: Simd>(p: *const Self, count: usize) -> S::V {
        let mut lanes = [Self::ZERO; MAX_LANES];
        // SAFETY: `count` elements are valid by contract and fewer than MAX_LANES.
        unsafe {
            for lane in 0..count {
                lanes[lane] = *p.add(lane);
            }
            Self::load::<S>(lanes.as_ptr())
        }
    }
}

/// A type that outputs are rounded to.
///
/// # Safety
/// As [`Element`].
pub(crate) trait Rounded: Element {
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V);

    /// The first `count` lanes to memory.
    #[inline(always)]
    unsafe fn store_first<S: Simd>(p: *mut Self, count: usize, v: S::V) {
        let mut lanes = [Self::ZERO; MAX_LANES];
        // SAFETY: `count` elements are valid by contract and fewer than MAX_LANES.
        unsafe {
            Self::store::<S>(lanes.as_mut_ptr(), v);
            for lane in 0..count {
                *p.add(lane) = lanes[lane];
            }
        }
    }
}

/// What the values that [`Element::load`] gives for a type are multiples of: folded into scales, where it costs nothing.
pub(crate) fn unit(dtype: DType) -> f32 {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 | DType::I8 => 1.0,
        // The code less 128, of 127 steps to 448.
        DType::U8 => 448.0 / 127.0,
        // Read through f16, whose exponents are biased by 8 more.
        DType::E4M3 => 256.0,
    }
}

/// Evaluates an expression with a type name bound to the element type of a dtype.
macro_rules! with_element {
    ($dtype:expr, $name:ident => $body:expr) => {
        match $dtype {
            evosdpa_core::DType::F32 => {
                type $name = f32;
                $body
            }
            evosdpa_core::DType::F16 => {
                type $name = half::f16;
                $body
            }
            evosdpa_core::DType::BF16 => {
                type $name = half::bf16;
                $body
            }
            evosdpa_core::DType::U8 => {
                type $name = evosdpa_core::U8Code;
                $body
            }
            evosdpa_core::DType::E4M3 => {
                type $name = evosdpa_core::E4M3Code;
                $body
            }
            evosdpa_core::DType::I8 => {
                type $name = evosdpa_core::I8Code;
                $body
            }
        }
    };
}
pub(crate) use with_element;

impl Element for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is read.
        unsafe { S::load(p) }
    }
}

impl Rounded for f32 {
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V) {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is written.
        unsafe { S::store(p, v) }
    }
}

impl Element for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is read.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl Rounded for f16 {
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V) {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is written.
        unsafe { S::store_f16(p.cast(), v) }
    }
}

impl Element for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is read.
        unsafe { S::load_bf16(p.cast()) }
    }
}

impl Rounded for bf16 {
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V) {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is written.
        unsafe { S::store_bf16(p.cast(), v) }
    }
}

impl Element for U8Code {
    const ZERO: Self = U8Code(128);

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is read.
        unsafe { S::load_u8(p.cast()) }
    }
}

impl Element for E4M3Code {
    const ZERO: Self = E4M3Code(0);

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is read.
        unsafe { S::load_e4m3(p.cast()) }
    }
}

impl Element for I8Code {
    const ZERO: Self = I8Code(0);

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`; the type is as large as what is read.
        unsafe { S::load_i8(p.cast()) }
    }
}
