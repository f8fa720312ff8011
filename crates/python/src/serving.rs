//! The common case of a call over packed sequences or a cache in one go: tensors read, new tokens written, output made, work done.

use evosdpa::{
    Precision,
    gpu::{self, RawStream},
};
use pyo3::prelude::*;

use crate::{
    Angles, Append, Call, Error, List, Operand, Place, Rotate, Side, Table, Visible,
    call::{self, sizes},
    exchange::{self, Kind, Looked},
    exit::detached,
    module::raised,
    straight::{Outputs, head_dim_max},
    torch::Torch,
};

/// A tensor, or nothing.
type Given<'py> = Option<Bound<'py, PyAny>>;

/// Lengths, places and pages, by their place.
pub(crate) type Lists<'py> = (
    Given<'py>, // cu_seqlens_q
    Given<'py>, // cu_seqlens_k
    Given<'py>, // cu_seqlens_k_new
    Given<'py>, // seqused_q
    Given<'py>, // seqused_k, or cache_seqlens
    Given<'py>, // leftpad_k
    Given<'py>, // cache_batch_idx
    Given<'py>, // rotary_seqlens
    Given<'py>, // page_table
);

/// What a call asks for.
pub(crate) struct Served<'py> {
    pub(crate) torch: &'py Torch,
    /// Queries, keys and values: `[…, tokens, heads, dim]`.
    pub(crate) tensors: [Bound<'py, PyAny>; 3],
    /// New keys and values.
    pub(crate) new: Option<[Bound<'py, PyAny>; 2]>,
    /// Cosines and sines.
    pub(crate) angles: Option<[Bound<'py, PyAny>; 2]>,
    pub(crate) lists: Lists<'py>,
    /// The most queries and keys of a packed sequence.
    pub(crate) longest: [Option<i64>; 2],
    pub(crate) scale: Option<f64>,
    pub(crate) visible: Visible,
    pub(crate) interleaved: bool,
    pub(crate) with_lse: bool,
    pub(crate) precision: Precision,
}

/// The same as plain numbers, all of it ordinary.
struct Plain {
    gpu: Option<usize>,
    dtype: u8,
    q: Operand,
    k: Operand,
    v: Operand,
    new: Option<[Operand; 2]>,
    angles: Option<[(u8, Operand); 2]>,
    side: Side,
    cu_new: Option<List>,
    first: Option<List>,
}

/// Attention, or `None` when something is out of the ordinary, for the long way to look into.
pub(crate) fn attention<'py>(py: Python<'py>, served: &Served<'py>) -> PyResult<Option<Outputs<'py>>> {
    let torch = served.torch;
    let new = served.new.iter().flatten();
    if !torch.are_memory(py, served.tensors.iter().chain(new))? || !torch.is_quiet(py)? {
        return Ok(None);
    }
    let Some(mut plain) = served.plain() else { return Ok(None) };
    let place = match plain.gpu {
        None => Place::Cpu { threads: torch.threads(py)? },
        Some(ordinal) => {
            // The long way copies the lists and checks them.
            if std::env::var_os("EVOSDPA_CHECK").is_some_and(|value| value == "1") {
                return Ok(None);
            }
            let Some(stream) = exchange::current_stream(ordinal) else { return Ok(None) };
            Place::Cuda { ordinal, stream }
        }
    };
    let packed = plain.side.cu_seqlens_q.is_some();
    let make = |sizes: &[i64], dtype| {
        torch.make(&*torch.contiguous(py, sizes, dtype)?, &served.tensors[0], plain.gpu)
    };
    let ([batch, heads, rows, dim], dim_v) = (plain.q.shape, plain.v.shape[3]);
    let rows_of = |dim: i64, dtype| match packed {
        true => make(&[rows, heads, dim], dtype),
        false => make(&[batch, rows, heads, dim], dtype),
    };
    let Some((out, found)) = rows_of(dim_v, plain.dtype)? else { return Ok(None) };
    let Some(o) = four(&found, packed) else { return Ok(None) };
    // Kept until the work is queued.
    let (mut filled, mut turned, mut lse) = (None, None, None);
    if let (Some(_), Some(held)) = (&plain.new, &plain.side.seqused_kv) {
        filled = make(&[held.len as i64], Kind::Int32 as u8)?;
    }
    if plain.angles.is_some() {
        turned = rows_of(dim, plain.dtype)?;
    }
    if served.with_lse {
        lse = make(&[batch, heads, rows], Kind::Float32 as u8)?;
    }
    let turned_operand = turned.as_ref().and_then(|(_, found)| four(found, packed));
    let filled_list = filled.as_ref().map(|(_, found)| found.address);
    let lse_address = lse.as_ref().map_or(0, |(_, found)| found.address);
    // Some rows may be nobody's.
    let gaps = packed || plain.side.seqused_q.is_some();
    let scale = served.scale;
    let (visible, precision, interleaved) = (served.visible, served.precision, served.interleaved);
    detached(py, move || {
        if gaps {
            // SAFETY: the output is new.
            unsafe { zero(&o, plain.dtype, place) }?;
        }
        if let Some(write) = plain.append(interleaved) {
            let (Some(held), Some(filled)) = (plain.side.seqused_kv, filled_list) else { return Ok(()) };
            let filled = List { address: filled, len: held.len };
            let rotate = match (write.rotary, turned_operand) {
                (Some(rotary), Some(out)) => Some(plain.rotate(rotary, out, visible)),
                _ => None,
            };
            // SAFETY: the tensors are alive in the caller's frame, and what is written is new or the caches; on a GPU the
            // allocator that owns the memory keeps the order of this stream.
            unsafe { append(&write, rotate.as_ref(), filled, place) }?;
            plain.side.seqused_kv = Some(filled);
            if let Some(rotate) = rotate {
                plain.q = rotate.out;
            }
        }
        let Plain { dtype, q, k, v, side, .. } = plain;
        let (lse, side) = (lse_address, Some(&side));
        let call = Call { dtype, q, k, v, o, lse, scale, visible, precision, side };
        // SAFETY: as above.
        unsafe { call.run(place) }
    })
    .map_err(raised)?;
    Ok(Some((out, lse.map(|(lse, _)| lse))))
}

/// Fills an output with zeros.
///
/// # Safety
/// It is contiguous and nobody else's; on a GPU as [`Call::run`] has it.
unsafe fn zero(o: &Operand, dtype: u8, place: Place) -> Result<(), Error> {
    let bytes = sizes("O", o.shape)?.iter().product::<usize>() * call::dtype(dtype)?.bytes();
    match place {
        // SAFETY: by this function's contract; zeros are numbers of every type.
        Place::Cpu { .. } => unsafe { std::ptr::write_bytes(o.address as *mut u8, 0, bytes) },
        Place::Cuda { ordinal, stream } => {
            // SAFETY: by this function's contract.
            unsafe { gpu::shared(ordinal)?.zero(RawStream(stream), o.address as u64, bytes) }?;
        }
    }
    Ok(())
}

/// `[batch, tokens, heads, dim]`, or packed `[tokens, heads, dim]`, as `[batch, heads, tokens, dim]`.
fn four(found: &Looked, packed: bool) -> Option<Operand> {
    let (s, t) = (found.shape, found.strides);
    let (shape, strides) = match (found.dimensions, packed) {
        (4, false) => ([s[0], s[2], s[1], s[3]], [t[0], t[2], t[1], t[3]]),
        (3, true) => ([1, s[1], s[0], s[2]], [s[0].checked_mul(t[0])?, t[1], t[0], t[2]]),
        _ => return None,
    };
    let usable = strides[3] == 1 && found.address != 0 && !shape.contains(&0);
    usable.then_some(Operand { address: found.address, shape, strides })
}

/// Writes new tokens, turned queries and new lengths.
///
/// # Safety
/// As [`Append::run`] and [`Rotate::run`]; `filled` is new.
unsafe fn append(write: &Append, rotate: Option<&Rotate>, filled: List, place: Place) -> Result<(), Error> {
    let Place::Cuda { ordinal, stream } = place else {
        // SAFETY: by this function's contract; lists are as long as they say.
        unsafe {
            write.run(place)?;
            rotate.map_or(Ok(()), |rotate| rotate.run(place))?;
            let held = write.lengths.read::<i32>("cache_seqlens")?;
            let cu = write.cu_seqlens.map(|cu| cu.read::<i32>("cu_seqlens_k_new")).transpose()?;
            let each = write.new[0].shape[2] as i32;
            let out = std::slice::from_raw_parts_mut(filled.address as *mut i32, filled.len);
            for (b, out) in out.iter_mut().enumerate() {
                *out = held[b] + cu.map_or(each, |cu| cu[b + 1] - cu[b]);
            }
        }
        return Ok(());
    };
    let shapes = [sizes("k_cache", write.caches[0].shape)?, sizes("v_cache", write.caches[1].shape)?];
    let Some(mut asked) = write.on_device(shapes, Some(filled.address as u64))? else { return Ok(()) };
    if let Some(rotate) = rotate {
        asked.queries = rotate.on_device()?;
    }
    // SAFETY: by this function's contract.
    Ok(unsafe { gpu::shared(ordinal)?.write_cache(RawStream(stream), &asked) }?)
}

impl Plain {
    fn append(&self, interleaved: bool) -> Option<Append> {
        let write = Append::new(self.dtype, [self.k, self.v], self.new?);
        let rotary = self.angles.map(|[cos, sin]| Angles { cos, sin, interleaved });
        Some(Append {
            lengths: self.side.seqused_kv?,
            cu_seqlens: self.cu_new,
            page_table: self.side.page_table,
            cache_batch_idx: self.side.cache_batch_idx,
            rotary,
            rotary_first: self.first,
            ..write
        })
    }

    fn rotate(&self, rotary: Angles, out: Operand, visible: Visible) -> Rotate {
        let first = self.first.or(self.side.seqused_kv).unwrap_or(List { address: 0, len: 0 });
        // Without a mask all queries are at the first position.
        let advance = (visible.left, visible.right) != (-1, -1);
        let (dtype, x, cu_seqlens) = (self.dtype, self.q, self.side.cu_seqlens_q);
        Rotate { dtype, x, out, rotary, first, cu_seqlens, advance }
    }
}

impl<'py> Served<'py> {
    /// A plain tensor of the class, and nothing derived from it.
    fn look(&self, tensor: &Bound<'py, PyAny>) -> Option<Looked> {
        self.torch.is_tensor(tensor).then(|| exchange::look(tensor))?
    }

    /// A list of this many 32-bit integers on this device; `Some(None)` when there is none.
    fn list(&self, tensor: &Given<'py>, len: i64, gpu: Option<usize>) -> Option<Option<List>> {
        let Some(tensor) = tensor else { return Some(None) };
        let found = self.look(tensor)?;
        let fits = found.kind == Kind::Int32
            && found.gpu == gpu
            && found.dimensions == 1
            && found.shape[0] == len
            && (found.strides[0] == 1 || len == 1)
            && found.address != 0;
        fits.then_some(Some(List { address: found.address, len: usize::try_from(len).ok()? }))
    }

    fn table(&self, gpu: Option<usize>) -> Option<Option<Table>> {
        let Some(tensor) = &self.lists.8 else { return Some(None) };
        let found = self.look(tensor)?;
        let fits = found.kind == Kind::Int32
            && found.gpu == gpu
            && found.dimensions == 2
            && (found.strides[1] == 1 || found.shape[1] == 1)
            && found.address != 0;
        let shape = [found.shape[0], found.shape[1]];
        (fits && !shape.contains(&0)).then_some(Some(Table {
            address: found.address,
            shape,
            row_stride: found.strides[0],
        }))
    }

    fn angle(&self, tensor: &Bound<'py, PyAny>, gpu: Option<usize>) -> Option<(u8, Operand)> {
        let found = self.look(tensor)?;
        let (s, t) = (found.shape, found.strides);
        let fits = found.dimensions == 2 && found.gpu == gpu && t[1] == 1 && !s[..2].contains(&0);
        let operand =
            Operand { address: found.address, shape: [1, 1, s[0], s[1]], strides: [0, 0, t[0], t[1]] };
        fits.then_some((found.kind.float()?, operand))
    }

    /// One type, one device, contiguous rows, nothing empty, nothing to be said about any size.
    fn plain(&self) -> Option<Plain> {
        let (cu_q, cu_k, cu_new, used_q, used_k, leftpad, index, first, _) = &self.lists;
        let (packed_q, packed_k) = (cu_q.is_some(), cu_k.is_some());
        let found = exchange::look(&self.tensors[0])?;
        let q = four(&found, packed_q)?;
        let (gpu, dtype) = (found.gpu, found.kind.float()?);
        let float = |tensor, packed| {
            let other = exchange::look(tensor)?;
            (other.kind == found.kind && other.gpu == gpu).then(|| four(&other, packed))?
        };
        let (k, v) = (float(&self.tensors[1], packed_k)?, float(&self.tensors[2], packed_k)?);
        let batch = match cu_q {
            None => q.shape[0],
            Some(cu) => self.look(cu)?.shape[0] - 1,
        };
        let new = match &self.new {
            None => None,
            Some([k, v]) => Some([float(k, cu_new.is_some())?, float(v, cu_new.is_some())?]),
        };
        let angles = match &self.angles {
            None => None,
            Some([cos, sin]) => Some([self.angle(cos, gpu)?, self.angle(sin, gpu)?]),
        };
        let side = Side {
            cu_seqlens_q: self.list(cu_q, batch + 1, gpu)?,
            cu_seqlens_kv: self.list(cu_k, batch + 1, gpu)?,
            max_seqlen_q: if packed_q { Some(self.longest[0]?.max(1)) } else { None },
            max_seqlen_kv: if packed_k { Some(self.longest[1]?.max(1)) } else { None },
            seqused_q: self.list(used_q, batch, gpu)?,
            seqused_kv: self.list(used_k, batch, gpu)?,
            leftpad_kv: self.list(leftpad, batch, gpu)?,
            cache_batch_idx: self.list(index, batch, gpu)?,
            page_table: self.table(gpu)?,
            ..Side::default()
        };
        let dim_max = head_dim_max(gpu.is_some(), dtype);
        let rows = |a: &Operand, b: &Operand| a.shape[..3] == b.shape[..3];
        let ordinary = batch > 0
            && rows(&k, &v)
            && q.shape[3] == k.shape[3]
            && q.shape[3].max(v.shape[3]) <= dim_max
            && q.shape[1] % k.shape[1] == 0
            && self.scale.is_none_or(|scale| (scale as f32).is_finite())
            && new.is_none_or(|[new_k, new_v]| rows(&new_k, &new_v) && side.seqused_kv.is_some())
            && (angles.is_none() || new.is_some())
            // Rows of nobody have a log-sum-exp of their own.
            && !(self.with_lse && (packed_q || side.seqused_q.is_some()));
        let (cu_new, first) = (self.list(cu_new, batch + 1, gpu)?, self.list(first, batch, gpu)?);
        ordinary.then_some(Plain { gpu, dtype, q, k, v, new, angles, side, cu_new, first })
    }
}
