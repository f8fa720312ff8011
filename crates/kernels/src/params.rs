//! The parameter struct that every kernel takes by value as its first argument.
//!
//! The C side is `cuda/common/params.h`; both sides assert size and offsets, so a change on one side cannot go
//! unnoticed.

use std::mem::{offset_of, size_of};

/// `band_lo` at or below this means: no limit on that side.
pub const BAND_UNBOUNDED_LO: i32 = -(1 << 30);
/// `band_hi` at or above this means: no limit on that side.
pub const BAND_UNBOUNDED_HI: i32 = 1 << 30;

/// Parameters of one attention launch. Device addresses are plain integers: this crate knows no GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SdpaParams {
    /// Device address of Q.
    pub q: u64,
    /// Device address of K.
    pub k: u64,
    /// Device address of V.
    pub v: u64,
    /// Device address of O.
    pub o: u64,
    /// Device address of the log-sum-exp rows (fp32, natural log); 0 when not wanted.
    pub lse: u64,
    /// Scales of 8-bit Q, one per (batch, head), contiguous; 0 for 16-bit inputs.
    pub q_scale: u64,
    /// Scales of 8-bit K.
    pub k_scale: u64,
    /// Scales of 8-bit V.
    pub v_scale: u64,
    /// Strides of Q in elements: batch, head, sequence. The innermost dimension is contiguous.
    pub q_stride: [i64; 3],
    /// Strides of K in elements.
    pub k_stride: [i64; 3],
    /// Strides of V in elements.
    pub v_stride: [i64; 3],
    /// Strides of O in elements.
    pub o_stride: [i64; 3],
    /// Strides of the log-sum-exp in elements: batch, head. The sequence is contiguous.
    pub lse_stride: [i64; 2],
    /// Batch size.
    pub batch: i32,
    /// Query heads.
    pub heads_q: i32,
    /// Key/value heads.
    pub heads_kv: i32,
    /// Query length.
    pub seq_q: i32,
    /// Key/value length.
    pub seq_kv: i32,
    /// Head dimension of Q and K.
    pub dim_qk: i32,
    /// Head dimension of V and O.
    pub dim_v: i32,
    /// Key `j` is visible to query `i` iff `i + band_lo <= j <= i + band_hi`.
    pub band_lo: i32,
    /// See `band_lo`.
    pub band_hi: i32,
    /// Softmax scale.
    pub scale: f32,
    /// `scale · log2(e)`.
    pub scale_log2: f32,
    /// Zero.
    pub reserved: i32,
    /// Device address of a 32-bit word that hands out work: 0 before the launch, left at 0 by the kernel. 0: there is none,
    /// and the kernel divides its work up beforehand.
    pub counter: u64,
}

const _: () = {
    assert!(size_of::<SdpaParams>() == 232);
    assert!(offset_of!(SdpaParams, q) == 0);
    assert!(offset_of!(SdpaParams, k) == 8);
    assert!(offset_of!(SdpaParams, v) == 16);
    assert!(offset_of!(SdpaParams, o) == 24);
    assert!(offset_of!(SdpaParams, lse) == 32);
    assert!(offset_of!(SdpaParams, q_scale) == 40);
    assert!(offset_of!(SdpaParams, k_scale) == 48);
    assert!(offset_of!(SdpaParams, v_scale) == 56);
    assert!(offset_of!(SdpaParams, q_stride) == 64);
    assert!(offset_of!(SdpaParams, k_stride) == 88);
    assert!(offset_of!(SdpaParams, v_stride) == 112);
    assert!(offset_of!(SdpaParams, o_stride) == 136);
    assert!(offset_of!(SdpaParams, lse_stride) == 160);
    assert!(offset_of!(SdpaParams, batch) == 176);
    assert!(offset_of!(SdpaParams, heads_q) == 180);
    assert!(offset_of!(SdpaParams, heads_kv) == 184);
    assert!(offset_of!(SdpaParams, seq_q) == 188);
    assert!(offset_of!(SdpaParams, seq_kv) == 192);
    assert!(offset_of!(SdpaParams, dim_qk) == 196);
    assert!(offset_of!(SdpaParams, dim_v) == 200);
    assert!(offset_of!(SdpaParams, band_lo) == 204);
    assert!(offset_of!(SdpaParams, band_hi) == 208);
    assert!(offset_of!(SdpaParams, scale) == 212);
    assert!(offset_of!(SdpaParams, scale_log2) == 216);
    assert!(offset_of!(SdpaParams, reserved) == 220);
    assert!(offset_of!(SdpaParams, counter) == 224);
};
