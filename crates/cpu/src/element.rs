//! The three element types of tensors, and how vectors of them are read and written.

use crate::simd::{MAX_LANES, Simd};
use half::{bf16, f16};

/// A tensor element.
///
/// # Safety
/// The pointer functions require the instruction set of `S` and pointers valid for `S::LANES` elements, or for
/// `count < S::LANES` elements where a count is given (nothing beyond is touched).
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V);
    fn from_f32(x: f32) -> Self;

    /// The first `count` lanes from memory, the others zero.
    #[inline(always)]
    unsafe fn load_first<S: Simd>(p: *const Self, count: usize) -> S::V {
        let mut lanes = [Self::default(); MAX_LANES];
        // SAFETY: `count` elements are valid by contract and fewer than MAX_LANES.
        unsafe {
            for lane in 0..count {
                lanes[lane] = *p.add(lane);
            }
            Self::load::<S>(lanes.as_ptr())
        }
    }

    /// The first `count` lanes to memory.
    #[inline(always)]
    unsafe fn store_first<S: Simd>(p: *mut Self, count: usize, v: S::V) {
        let mut lanes = [Self::default(); MAX_LANES];
        // SAFETY: `count` elements are valid by contract and fewer than MAX_LANES.
        unsafe {
            Self::store::<S>(lanes.as_mut_ptr(), v);
            for lane in 0..count {
                *p.add(lane) = lanes[lane];
            }
        }
    }
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut f32, v: S::V) {
        // SAFETY: contract of this trait is that of `Simd`.
        unsafe { S::store(p, v) }
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f16) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`; f16 is a transparent u16.
        unsafe { S::load_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut f16, v: S::V) {
        // SAFETY: contract of this trait is that of `Simd`; f16 is a transparent u16.
        unsafe { S::store_f16(p.cast(), v) }
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const bf16) -> S::V {
        // SAFETY: contract of this trait is that of `Simd`; bf16 is a transparent u16.
        unsafe { S::load_bf16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut bf16, v: S::V) {
        // SAFETY: contract of this trait is that of `Simd`; bf16 is a transparent u16.
        unsafe { S::store_bf16(p.cast(), v) }
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}
