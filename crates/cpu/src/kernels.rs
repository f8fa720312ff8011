//! The kernels compiled once per instruction set.
//!
//! The bodies in `tile`, `pack` and `decode` are generic over [`Simd`] and inlined into the functions here, each of
//! which is compiled with its instruction set enabled. What drives them (`flash`) is ordinary code.

use crate::decode::{self, DecodeScores, DecodeValues};
use crate::dense::{self, DenseRows};
use crate::element::with_element;
use crate::hook::{self, RowHook, TileHook};
#[cfg(target_arch = "aarch64")]
use crate::neon::Neon;
use crate::pack::{self, Rows};
use crate::shown::{self, MaskRows, Shown};
#[cfg(target_arch = "x86_64")]
use crate::{avx2::Avx2, avx512::Avx512};
use crate::{
    portable::{Lanes, Portable},
    simd::Simd,
    tile::{self, TileStep, Weighed},
};
use evosdpa_core::{DType, Float};
use half::{bf16, f16};

/// One instruction set's compiled kernels.
///
/// # Safety
/// Every function requires the instruction set and the contract of the generic function of the same name;
/// `vectors` is in `1..=VECTORS`, `rows` (of the decode kernels) is 1, 2 or 4, and a dtype is that of the elements pointed at.
pub(crate) trait Kernels: Copy + Send + Sync + 'static {
    /// The kernels for few queries: of the same instruction set, or of that for f32 where pairs have none of their own.
    type Few: Kernels;
    /// Queries per vector.
    const LANES: usize;
    /// Rows of the smallest step of the register tile: keys are taken from multiples of it, value columns up to the next multiple.
    const STEP: usize;
    /// Elements of the inner dimension in a lane of packed queries, keys and weights: [`Simd::PACKED`].
    const PACKED: usize = 1;
    /// Vectors of the register tile: a query tile is at most `VECTORS · LANES` wide.
    const VECTORS: usize;

    /// The most that rows with heads of `dim` columns may cost the kernels for few queries ([`crate::few::cost`]) for these to be faster than
    /// tiles, which cost the same for one row as for a vector full of them. Measured on a Zen 5 with 16 lanes and with 8 (docs/log/cpu.md).
    fn few_limit(dim: usize) -> usize {
        if Self::LANES == 16 { (4 + dim / 16).min(12) } else { (5 + dim / 32).min(9) }
    }

    /// Called on a thread before it runs tiles, and [`Kernels::leave`] after: what tile registers are set to.
    unsafe fn enter() {}
    unsafe fn leave() {}
    unsafe fn scores(vectors: usize, t: &TileStep);
    unsafe fn modify(vectors: usize, t: &TileStep, hook: &TileHook);
    unsafe fn start_alibi(vectors: usize, t: &TileStep, hook: &TileHook);
    /// Whether the score kernel takes a bias of bfloat16 as [`tile::Start::Words`].
    const WORDS: bool = true;
    /// Of a bias of bfloat16.
    unsafe fn start_words(vectors: usize, t: &TileStep, a: &DenseRows);
    /// Of a bias in one of the float types.
    unsafe fn start_bias(dtype: DType, vectors: usize, t: &TileStep, a: &DenseRows);
    /// Of a bias in one of the float types.
    unsafe fn add_bias(dtype: DType, vectors: usize, t: &TileStep, a: &DenseRows);
    unsafe fn mark_hidden(vectors: usize, t: &TileStep, hidden: *mut f32);
    unsafe fn scan(a: &MaskRows) -> Shown;
    unsafe fn softmax(vectors: usize, t: &TileStep) -> Weighed;
    unsafe fn values(vectors: usize, exact: bool, t: &TileStep);
    unsafe fn widen_rows(dtype: DType, a: &Rows);
    unsafe fn widen_rows_checked(dtype: DType, a: &Rows) -> bool;
    /// Packs rows of queries or keys for the score kernel.
    unsafe fn pack_rows(dtype: DType, a: &Rows) {
        // SAFETY: same contract.
        unsafe { Self::widen_rows(dtype, a) }
    }
    /// Packs keys for the score kernel, from row `first` of a block on. A row takes `dst_stride`, but its place may be shared with a neighbour's.
    unsafe fn pack_keys(dtype: DType, _first: usize, a: &Rows) {
        // SAFETY: same contract.
        unsafe { Self::pack_rows(dtype, a) }
    }
    /// Packs rows of values for the value kernel. When `checked`, says whether all were finite, otherwise nothing.
    unsafe fn pack_values(dtype: DType, checked: bool, a: &Rows) -> bool {
        // SAFETY: same contract.
        unsafe {
            if checked {
                return Self::widen_rows_checked(dtype, a);
            }
            Self::widen_rows(dtype, a);
        }
        true
    }
    unsafe fn scale_rows(
        data: *mut f32,
        stride: usize,
        rows: usize,
        columns: usize,
        scales: *const f32,
    ) -> bool;
    unsafe fn narrow_row(float: Float, src: *const f32, dst: *mut u8, columns: usize);
    unsafe fn transpose_queries(
        rows: *const f32,
        row_stride: usize,
        columns: usize,
        scale: f32,
        tile: *mut f32,
        tile_stride: usize,
    );
    /// Brings a vector of sums as PV leaves them into rows of value columns, which are then transposed.
    unsafe fn order_outputs(_tile: *mut f32, _tile_stride: usize, _columns: usize) {}
    unsafe fn transpose_outputs(
        tile: *mut f32,
        tile_stride: usize,
        columns: usize,
        factors: *const f32,
        rows: *mut f32,
        row_stride: usize,
    );
    unsafe fn decode_scores(dtype: DType, rows: usize, a: &DecodeScores);
    unsafe fn modify_row(scores: *mut f32, keys: usize, hook: &RowHook);
    unsafe fn decode_softmax(scores: *mut f32, keys: usize, old_max: f32) -> (f32, f32, f32);
    unsafe fn decode_values(dtype: DType, rows: usize, a: &DecodeValues);
}

/// Those functions of [`Kernels`] that are the same for pairs of bfloat16 as for f32, whose vectors they have: `$of`'s.
macro_rules! kernels_of {
    ($of:ty) => {
        $crate::kernels::kernels_of! { $of;
            modify(vectors: usize, t: &$crate::tile::TileStep, hook: &$crate::hook::TileHook);
            start_alibi(vectors: usize, t: &$crate::tile::TileStep, hook: &$crate::hook::TileHook);
            start_words(vectors: usize, t: &$crate::tile::TileStep, a: &$crate::dense::DenseRows);
            start_bias(dtype: DType, vectors: usize, t: &$crate::tile::TileStep, a: &$crate::dense::DenseRows);
            add_bias(dtype: DType, vectors: usize, t: &$crate::tile::TileStep, a: &$crate::dense::DenseRows);
            mark_hidden(vectors: usize, t: &$crate::tile::TileStep, hidden: *mut f32);
            scan(a: &$crate::shown::MaskRows) -> $crate::shown::Shown;
            modify_row(scores: *mut f32, keys: usize, hook: &$crate::hook::RowHook);
            widen_rows(dtype: DType, a: &$crate::pack::Rows);
            widen_rows_checked(dtype: DType, a: &$crate::pack::Rows) -> bool;
            scale_rows(data: *mut f32, stride: usize, rows: usize, columns: usize, scales: *const f32) -> bool;
            narrow_row(float: evosdpa_core::Float, src: *const f32, dst: *mut u8, columns: usize);
            transpose_outputs(
                tile: *mut f32,
                tile_stride: usize,
                columns: usize,
                factors: *const f32,
                rows: *mut f32,
                row_stride: usize,
            );
            decode_softmax(scores: *mut f32, keys: usize, old_max: f32) -> (f32, f32, f32);
        }
    };
    ($of:ty; $($name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        $(
            unsafe fn $name($($argument: $kind),*) $(-> $result)? {
                // SAFETY: trait contract.
                unsafe { <$of as Kernels>::$name($($argument),*) }
            }
        )*
    };
}
pub(crate) use kernels_of;

/// Implements [`Kernels`] for an instruction set with a register tile of `$step` rows and `$vectors` vectors, which ends in tiles of
/// `$tail` rows.
macro_rules! compile_kernels {
    ($isa:ty, $step:literal by $vectors:literal, tail $tail:literal, $(#[$feature:meta])?) => {
        impl tile::Gemm for $isa {}

        // SAFETY of every block below: the trait's contract is that of the functions called.
        impl Kernels for $isa {
            type Few = $isa;
            const LANES: usize = <$isa as Simd>::LANES;
            const STEP: usize = $tail;
            const VECTORS: usize = $vectors;

            $(#[$feature])?
            unsafe fn scores(vectors: usize, t: &TileStep) {
                // SAFETY: trait contract.
                unsafe {
                    match vectors {
                        1 => tile::scores::<$isa, $step, $tail, 1>(t),
                        2 => tile::scores::<$isa, $step, $tail, 2>(t),
                        _ => tile::scores::<$isa, $step, $tail, $vectors>(t),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn modify(vectors: usize, t: &TileStep, hook: &TileHook) {
                // SAFETY: trait contract.
                unsafe {
                    match vectors {
                        1 => hook::modify::<$isa, 1>(t, hook),
                        2 => hook::modify::<$isa, 2>(t, hook),
                        _ => hook::modify::<$isa, $vectors>(t, hook),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn start_alibi(vectors: usize, t: &TileStep, hook: &TileHook) {
                // SAFETY: trait contract.
                unsafe {
                    match vectors {
                        1 => hook::start_alibi::<$isa, 1>(t, hook),
                        2 => hook::start_alibi::<$isa, 2>(t, hook),
                        _ => hook::start_alibi::<$isa, $vectors>(t, hook),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn start_words(vectors: usize, t: &TileStep, a: &DenseRows) {
                // SAFETY: trait contract.
                unsafe {
                    match vectors {
                        1 => dense::start_words::<$isa, 1>(t, a),
                        2 => dense::start_words::<$isa, 2>(t, a),
                        _ => dense::start_words::<$isa, $vectors>(t, a),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn start_bias(dtype: DType, vectors: usize, t: &TileStep, a: &DenseRows) {
                // SAFETY: trait contract.
                unsafe {
                    match (dtype, vectors) {
                        (DType::F16, 1) => dense::start_bias::<$isa, f16, 1>(t, a),
                        (DType::F16, 2) => dense::start_bias::<$isa, f16, 2>(t, a),
                        (DType::F16, _) => dense::start_bias::<$isa, f16, $vectors>(t, a),
                        (DType::BF16, 1) => dense::start_bias::<$isa, bf16, 1>(t, a),
                        (DType::BF16, 2) => dense::start_bias::<$isa, bf16, 2>(t, a),
                        (DType::BF16, _) => dense::start_bias::<$isa, bf16, $vectors>(t, a),
                        (_, 1) => dense::start_bias::<$isa, f32, 1>(t, a),
                        (_, 2) => dense::start_bias::<$isa, f32, 2>(t, a),
                        _ => dense::start_bias::<$isa, f32, $vectors>(t, a),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn add_bias(dtype: DType, vectors: usize, t: &TileStep, a: &DenseRows) {
                // SAFETY: trait contract.
                unsafe {
                    match (dtype, vectors) {
                        (DType::F16, 1) => dense::add_bias::<$isa, f16, 1>(t, a),
                        (DType::F16, 2) => dense::add_bias::<$isa, f16, 2>(t, a),
                        (DType::F16, _) => dense::add_bias::<$isa, f16, $vectors>(t, a),
                        (DType::BF16, 1) => dense::add_bias::<$isa, bf16, 1>(t, a),
                        (DType::BF16, 2) => dense::add_bias::<$isa, bf16, 2>(t, a),
                        (DType::BF16, _) => dense::add_bias::<$isa, bf16, $vectors>(t, a),
                        (_, 1) => dense::add_bias::<$isa, f32, 1>(t, a),
                        (_, 2) => dense::add_bias::<$isa, f32, 2>(t, a),
                        _ => dense::add_bias::<$isa, f32, $vectors>(t, a),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn mark_hidden(vectors: usize, t: &TileStep, hidden: *mut f32) {
                // SAFETY: trait contract.
                unsafe {
                    match vectors {
                        1 => shown::mark_hidden::<$isa, 1>(t, hidden),
                        2 => shown::mark_hidden::<$isa, 2>(t, hidden),
                        _ => shown::mark_hidden::<$isa, $vectors>(t, hidden),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn scan(a: &MaskRows) -> Shown {
                // SAFETY: trait contract.
                unsafe { shown::scan::<$isa>(a) }
            }
            $(#[$feature])?
            unsafe fn softmax(vectors: usize, t: &TileStep) -> Weighed {
                // SAFETY: trait contract.
                unsafe {
                    match vectors {
                        1 => tile::softmax::<$isa, 1>(t),
                        2 => tile::softmax::<$isa, 2>(t),
                        _ => tile::softmax::<$isa, $vectors>(t),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn values(vectors: usize, exact: bool, t: &TileStep) {
                // SAFETY: trait contract.
                unsafe {
                    match (vectors, exact) {
                        (1, false) => tile::values::<$isa, $step, $tail, 1, false>(t),
                        (2, false) => tile::values::<$isa, $step, $tail, 2, false>(t),
                        (_, false) => tile::values::<$isa, $step, $tail, $vectors, false>(t),
                        (1, true) => tile::values::<$isa, $step, $tail, 1, true>(t),
                        (2, true) => tile::values::<$isa, $step, $tail, 2, true>(t),
                        (_, true) => tile::values::<$isa, $step, $tail, $vectors, true>(t),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn widen_rows(dtype: DType, a: &Rows) {
                // SAFETY: trait contract.
                with_element!(dtype, E => unsafe { pack::widen_rows::<$isa, E, false>(a) });
            }
            $(#[$feature])?
            unsafe fn widen_rows_checked(dtype: DType, a: &Rows) -> bool {
                // SAFETY: trait contract.
                with_element!(dtype, E => unsafe { pack::widen_rows::<$isa, E, true>(a) })
            }
            $(#[$feature])?
            unsafe fn scale_rows(
                data: *mut f32,
                stride: usize,
                rows: usize,
                columns: usize,
                scales: *const f32,
            ) -> bool {
                // SAFETY: trait contract.
                unsafe { pack::scale_rows::<$isa>(data, stride, rows, columns, scales) }
            }
            $(#[$feature])?
            unsafe fn narrow_row(float: Float, src: *const f32, dst: *mut u8, columns: usize) {
                // SAFETY: trait contract.
                unsafe {
                    match float {
                        Float::F32 => pack::narrow_row::<$isa, f32>(src, dst.cast(), columns),
                        Float::F16 => pack::narrow_row::<$isa, f16>(src, dst.cast(), columns),
                        Float::BF16 => pack::narrow_row::<$isa, bf16>(src, dst.cast(), columns),
                    }
                }
            }
            $(#[$feature])?
            unsafe fn transpose_queries(
                rows: *const f32,
                row_stride: usize,
                columns: usize,
                scale: f32,
                tile: *mut f32,
                tile_stride: usize,
            ) {
                // SAFETY: trait contract.
                unsafe { pack::transpose_queries::<$isa>(rows, row_stride, columns, scale, tile, tile_stride) }
            }
            $(#[$feature])?
            unsafe fn transpose_outputs(
                tile: *mut f32,
                tile_stride: usize,
                columns: usize,
                factors: *const f32,
                rows: *mut f32,
                row_stride: usize,
            ) {
                // SAFETY: trait contract.
                unsafe { pack::transpose_outputs::<$isa>(tile, tile_stride, columns, factors, rows, row_stride) }
            }
            $(#[$feature])?
            unsafe fn decode_scores(dtype: DType, rows: usize, a: &DecodeScores) {
                // SAFETY: trait contract.
                with_element!(dtype, E => unsafe {
                    match rows {
                        1 => decode::scores::<$isa, E, 1>(a),
                        2 => decode::scores::<$isa, E, 2>(a),
                        _ => decode::scores::<$isa, E, 4>(a),
                    }
                })
            }
            $(#[$feature])?
            unsafe fn modify_row(scores: *mut f32, keys: usize, hook: &RowHook) {
                // SAFETY: trait contract.
                unsafe { hook::modify_row::<$isa>(scores, keys, hook) }
            }
            $(#[$feature])?
            unsafe fn decode_softmax(scores: *mut f32, keys: usize, old_max: f32) -> (f32, f32, f32) {
                // SAFETY: trait contract.
                unsafe { decode::softmax_row::<$isa>(scores, keys, old_max) }
            }
            $(#[$feature])?
            unsafe fn decode_values(dtype: DType, rows: usize, a: &DecodeValues) {
                // SAFETY: trait contract.
                with_element!(dtype, E => unsafe {
                    match rows {
                        1 => decode::values::<$isa, E, 1>(a),
                        2 => decode::values::<$isa, E, 2>(a),
                        _ => decode::values::<$isa, E, 4>(a),
                    }
                })
            }
        }
    };
}

// 8×3 of 32 registers: 24 accumulators, 3 loads and 8 broadcasts for 24 multiply-adds, so the two load ports are never the limit.
#[cfg(target_arch = "x86_64")]
compile_kernels!(Avx512, 8 by 3, tail 8, #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]);
// 6×2 of 16 registers: 12 accumulators hide the latency of two FMA ports (4 or 5 cycles by 2) and leave four registers for two loads and
// broadcasts. 4×3 would need all sixteen, and the compiler then keeps an accumulator in memory.
#[cfg(target_arch = "x86_64")]
compile_kernels!(Avx2, 6 by 2, tail 4, #[target_feature(enable = "avx2,fma,f16c")]);
// 8×3 of 32 registers, as for AVX-512: 11 loads for 24 multiply-adds.
#[cfg(target_arch = "aarch64")]
compile_kernels!(Neon, 8 by 3, tail 8, #[target_feature(enable = "neon")]);
// 4×2 fits the sixteen 128-bit registers of the x86-64 baseline and of most others.
compile_kernels!(Portable, 4 by 2, tail 4,);
// As wide as a matrix tile, for the model of one.
compile_kernels!(Lanes<16>, 4 by 2, tail 4,);
