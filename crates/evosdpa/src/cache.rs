//! A cache of keys and values in this process's memory: new ones put behind those there are, and rotary embedding on the way.
//! One in a GPU's memory is written by [`Gpu::write_cache`](crate::gpu::Gpu::write_cache).

use evosdpa_core::{DType, NewTokens, Placement, TensorView, TensorViewMut};
use evosdpa_cpu::{Positions, Rotary};

use crate::{Device, Error};

/// Puts new keys and values into a cache, behind the tokens that each sequence holds. Keys are turned by `rotary` where it
/// is given, with the position of each sequence's first new token (the one it gets in the cache when that is `None`).
///
/// Caches are `[blocks, heads, tokens, dim]`, or `[pages, heads, page size, dim]` with a page table; new tokens are
/// `[sequences, heads, tokens, dim]` or packed `[1, heads, all tokens, dim]`, of the cache's type. What does not fit is
/// refused before anything is written: a full cache, a page that is not there, two tokens at one place.
///
/// ```
/// use evosdpa::{Device, Layout, NewTokens, TensorView, TensorViewMut, cache};
///
/// # fn main() -> Result<(), evosdpa::Error> {
/// // Two sequences with room for four tokens hold three and one; each gets one more.
/// let (mut k_cache, mut v_cache) = (vec![0f32; 16], vec![0f32; 16]);
/// let (k, v) = ([1f32, 2.0, 3.0, 4.0], [5f32, 6.0, 7.0, 8.0]);
/// let room = [2, 1, 4, 2];
/// cache::append(
///     Device::Cpu,
///     [
///         TensorViewMut::from_slice(&mut k_cache, room, Layout::Bhsd)?,
///         TensorViewMut::from_slice(&mut v_cache, room, Layout::Bhsd)?,
///     ],
///     [
///         TensorView::from_slice(&k, [2, 1, 1, 2], Layout::Bhsd)?,
///         TensorView::from_slice(&v, [2, 1, 1, 2], Layout::Bhsd)?,
///     ],
///     &NewTokens { lengths: &[3, 1], ..NewTokens::default() },
///     None,
/// )?;
/// assert_eq!(k_cache[6..8], [1.0, 2.0]);
/// assert_eq!(v_cache[10..12], [7.0, 8.0]);
/// # Ok(())
/// # }
/// ```
pub fn append(
    device: Device,
    [mut k_cache, mut v_cache]: [TensorViewMut<'_>; 2],
    [k, v]: [TensorView<'_>; 2],
    tokens: &NewTokens<'_>,
    rotary: Option<(Rotary<'_>, Option<&[i32]>)>,
) -> Result<(), Error> {
    let placement = Placement::new(tokens, k_cache.shape(), k.shape())?;
    check(v_cache.shape(), v_cache.dtype(), v, &placement, None)?;
    append_tensor(device, &mut k_cache, k, &placement, rotary)?;
    append_tensor(device, &mut v_cache, v, &placement, None)
}

/// One half of [`append`]: keys, or values, whose caches may lie between each other in memory.
pub fn append_tensor(
    device: Device,
    cache: &mut TensorViewMut<'_>,
    new: TensorView<'_>,
    placement: &Placement,
    rotary: Option<(Rotary<'_>, Option<&[i32]>)>,
) -> Result<(), Error> {
    on_cpu(device, "appending to a cache")?;
    Ok(evosdpa_cpu::append(cache, new, placement, rotary)?)
}

/// What [`append_tensor`] refuses about a cache of this shape and type, without writing.
pub fn check(
    cache_shape: [usize; 4],
    cache_dtype: DType,
    new: TensorView<'_>,
    placement: &Placement,
    rotary: Option<(Rotary<'_>, Option<&[i32]>)>,
) -> Result<(), Error> {
    Ok(evosdpa_cpu::check_append(cache_shape, cache_dtype, &new, placement, rotary)?)
}

/// Turns every token of `x` by the angles of its position into `out`, a tensor of its shape and type.
pub fn rotate(
    device: Device,
    x: TensorView<'_>,
    mut out: TensorViewMut<'_>,
    rotary: Rotary<'_>,
    positions: Positions<'_>,
) -> Result<(), Error> {
    on_cpu(device, "rotary embedding")?;
    Ok(evosdpa_cpu::rotate(x, &mut out, rotary, positions)?)
}

#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU alone refuses nothing"))]
fn on_cpu(device: Device, what: &'static str) -> Result<(), Error> {
    match device {
        Device::Cpu => Ok(()),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Err(Error::CacheOnHost { what, device }),
    }
}
