//! The common case of a call over packed sequences or a cache in one go: tensors read, new tokens written, output made, work done. What
//! depends on the tensors' forms alone is kept from the first such call (`known.rs`).

use std::sync::Arc;

use evosdpa::{
    Precision,
    gpu::{self, RawStream},
};
use pyo3::prelude::*;

use crate::{
    Angles, Append, Call, Error, List, Operand, Place, Rotate, Side, Table, Visible,
    call::{caught, sizes},
    exchange::{self, Kind, Looked},
    exit::detached,
    known::{Key, Known, OutputForms, Wanted},
    library::{Form, Library, Seen},
    module::raised,
    scores::{Scores, ScoresOf},
    straight::{given as outputs, head_dim_max, takes_scale},
};

/// A tensor, or nothing.
pub(crate) type Given<'py> = Option<Bound<'py, PyAny>>;

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

/// Query and key heads, head dimensions of keys and values, and the types of queries and keys by [`Kind`]'s number, below zero for any.
pub(crate) type PlannedFor = (i64, i64, i64, i64, i64, i64);

/// Of new lengths.
const WORD_BYTES: usize = 4;

/// What kernels like queries to be aligned to.
const ALIGNED_BYTES: usize = 16;

/// What a call asks for.
pub(crate) struct Asked<'py> {
    /// Queries, keys and values: `[…, tokens, heads, dim]`.
    pub(crate) tensors: [Bound<'py, PyAny>; 3],
    /// New keys and values.
    pub(crate) new: Option<[Bound<'py, PyAny>; 2]>,
    /// Cosines and sines.
    pub(crate) angles: Option<[Bound<'py, PyAny>; 2]>,
    pub(crate) lists: Lists<'py>,
    /// Scales of 8-bit keys and values.
    pub(crate) scales: [Given<'py>; 2],
    /// The most queries and keys of a packed sequence.
    pub(crate) longest: [Option<i64>; 2],
    pub(crate) scale: Option<f64>,
    pub(crate) visible: Visible,
    pub(crate) interleaved: bool,
    pub(crate) with_lse: bool,
    pub(crate) precision: Precision,
    /// Queries are `[sequences, heads, dim]`, one each.
    pub(crate) one_query: bool,
    /// What tensors must be; anything where there is none.
    pub(crate) planned: Option<PlannedFor>,
    pub(crate) scores: Option<Scores<'py>>,
}

/// What a call asks for, of the library whose tensors it has.
struct Served<'a, 'py, L> {
    library: &'a L,
    asked: &'a Asked<'py>,
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
pub(crate) fn attention<'py>(
    py: Python<'py>,
    library: &impl Library,
    asked: &Asked<'py>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let served = Served { library, asked };
    let ([q, k, v], new) = (&asked.tensors, asked.new.as_ref());
    let tensors = [q, k, v, new.map_or(q, |[k, _]| k), new.map_or(q, |[_, v]| v)];
    let tensors = &tensors[..if new.is_some() { 5 } else { 3 }];
    let Some(first) = library.look(q) else { return Ok(None) };
    let mut looked = [first; 5];
    for (place, tensor) in looked.iter_mut().zip(tensors).skip(1) {
        let Some(found) = library.look(tensor) else { return Ok(None) };
        *place = found;
    }
    let Some(mut plain) = served.plain(&looked) else { return Ok(None) };
    let mut seen = Seen::new(q, first);
    for (tensor, found) in tensors.iter().zip(looked).skip(1) {
        seen.push(tensor, found);
    }
    if let Some(scores) = &asked.scores
        && scores.add_to(library, plain.scores(first.kind), &mut seen, &mut plain.side).is_none()
    {
        return Ok(None);
    }
    if !library.is_plain(&seen)? {
        return Ok(None);
    }
    let place = match plain.gpu {
        None => Place::Cpu { threads: library.threads(py)? },
        Some(ordinal) => {
            // The long way copies the lists and checks them.
            if std::env::var_os("EVOSDPA_CHECK").is_some_and(|value| value == "1") {
                return Ok(None);
            }
            let Some(stream) = exchange::current_stream(ordinal) else { return Ok(None) };
            Place::Cuda { ordinal, stream }
        }
    };
    let make = |form: &Form| library.make(form, &asked.tensors[0], plain.gpu);
    let (given, q) = (plain.side, plain.q);
    // Turned queries and new lengths, in one piece of memory that is kept until the work is queued.
    let mut scratch = None;
    if let (Some(_), Some(held)) = (&plain.new, given.seqused_kv) {
        let (turned, strides) = match plain.angles {
            None => (0, q.strides),
            Some(_) => {
                let [_, heads, rows, dim] = q.shape;
                // Sizes of a tensor that there is.
                let bytes = q.shape.iter().product::<i64>() as usize * if plain.dtype == 0 { 4 } else { 2 };
                (bytes.next_multiple_of(ALIGNED_BYTES), [rows * heads * dim, dim, heads * dim, 1])
            }
        };
        let words = turned / WORD_BYTES + held.len;
        let Some(made) = make(&*library.contiguous(py, &[words as i64], Kind::Int32 as u8)?)? else {
            return Ok(None);
        };
        let address = made.1.address;
        if turned > 0 {
            plain.q = Operand { address, shape: q.shape, strides };
        }
        plain.side.seqused_kv = Some(List { address: address + turned, len: held.len });
        scratch = Some(made);
    }
    let Some(known) = served.known(py, &plain, place)? else { return Ok(None) };
    let Some((out, o)) = make(&known.out)? else { return Ok(None) };
    let (lse, lse_address) = match &known.lse {
        None => (None, 0),
        Some(form) => match make(form)? {
            None => return Ok(None),
            Some((lse, found)) => (Some(lse), found.address),
        },
    };
    let (visible, interleaved) = (asked.visible, asked.interleaved);
    let work = move || {
        if let (Some(write), Some(filled)) = (plain.append(&given, interleaved), plain.side.seqused_kv) {
            let rotate = write.rotary.map(|rotary| plain.rotate(&given, q, rotary, visible));
            let asks = given.leftpad_kv.is_some() || given.cu_seqlens_q.is_some();
            let call = asks.then(|| plain.call(visible));
            // SAFETY: the tensors are alive in the caller's frame, and what is written is new or the caches; on a GPU the
            // allocator that owns the memory keeps the order of this stream.
            unsafe { append(&write, rotate.as_ref(), call.as_ref(), filled, place) }?;
        }
        let stream = if let Place::Cuda { stream, .. } = place { stream } else { 0 };
        let operands = [plain.q, plain.k, plain.v];
        // SAFETY: as above.
        unsafe { known.run(operands, Some(&plain.side), [o.address, lse_address], stream) }
    };
    detached(py, || caught(work)).map_err(raised)?;
    drop(scratch);
    outputs(out, lse).map(Some)
}

/// `[batch, tokens, heads, …]` as `[batch, heads, tokens, …]`, and back.
fn order([batch, second, third, last]: [i64; 4]) -> [i64; 4] {
    [batch, third, second, last]
}

/// `[batch, tokens, heads, dim]`, or packed `[tokens, heads, dim]`, as `[batch, heads, tokens, dim]`.
fn four(found: &Looked, packed: bool) -> Option<Operand> {
    let (s, t) = (found.shape, found.strides);
    let (shape, strides) = match (found.dimensions, packed) {
        (4, false) => (order(s), order(t)),
        (3, true) => ([1, s[1], s[0], s[2]], [s[0].checked_mul(t[0])?, t[1], t[0], t[2]]),
        _ => return None,
    };
    let usable = strides[3] == 1 && found.address != 0 && !shape.contains(&0);
    usable.then_some(Operand { address: found.address, shape, strides })
}

/// Queries `[sequences, heads, dim]`, one for each sequence.
fn one_query(found: &Looked) -> Option<Operand> {
    let ([batch, heads, dim, _], [step, head, inner, _]) = (found.shape, found.strides);
    let usable = found.dimensions == 3 && inner == 1 && found.address != 0 && !found.shape[..3].contains(&0);
    let (shape, strides) = ([batch, heads, 1, dim], [step, head, heads.checked_mul(head)?, 1]);
    usable.then_some(Operand { address: found.address, shape, strides })
}

/// Writes new tokens, turned queries and new lengths. On a CPU nothing is written where one of them, or the attention behind, is refused.
///
/// # Safety
/// As [`Append::run`] and [`Rotate::run`]; `filled` is new.
unsafe fn append(
    write: &Append,
    rotate: Option<&Rotate>,
    call: Option<&Call<'_>>,
    filled: List,
    place: Place,
) -> Result<(), Error> {
    let Place::Cuda { ordinal, stream } = place else {
        // SAFETY: by this function's contract; lists are as long as they say.
        unsafe {
            if rotate.is_some() || call.is_some() {
                write.check_lists()?;
                rotate.map_or(Ok(()), |rotate| rotate.check_lists())?;
            }
            let held = write.lengths.read::<i32>("cache_seqlens")?;
            let cu = write.cu_seqlens.map(|cu| cu.read::<i32>("cu_seqlens_k_new")).transpose()?;
            let each = write.new[0].shape[2] as i32;
            let out = std::slice::from_raw_parts_mut(filled.address as *mut i32, filled.len);
            for (b, out) in out.iter_mut().enumerate() {
                // Lengths that overflow are refused before they are read.
                *out = held[b].wrapping_add(cu.map_or(each, |cu| cu[b + 1].wrapping_sub(cu[b])));
            }
            call.map_or(Ok(()), |call| call.check_lists())?;
            write.run(place)?;
            rotate.map_or(Ok(()), |rotate| rotate.run(place))?;
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
    /// The scores of a call that has no dense mask: how many queries and keys there are is not asked.
    fn scores(&self, kind: Kind) -> ScoresOf {
        ScoresOf { shape: [0, self.q.shape[1], 0, 0], kind, gpu: self.gpu }
    }

    /// The new tokens, beside what was given.
    fn append(&self, given: &Side, interleaved: bool) -> Option<Append> {
        let write = Append::new(self.dtype, [self.k, self.v], self.new?);
        let rotary = self.angles.map(|[cos, sin]| Angles { cos, sin, interleaved });
        Some(Append {
            lengths: given.seqused_kv?,
            cu_seqlens: self.cu_new,
            page_table: given.page_table,
            cache_batch_idx: given.cache_batch_idx,
            rotary,
            rotary_first: self.first,
            ..write
        })
    }

    /// The attention behind, as far as lists are concerned.
    fn call(&self, visible: Visible) -> Call<'_> {
        let (dtype, side, precision) = (self.dtype, Some(&self.side), Precision::Default);
        let (q, k, v) = (self.q, self.k, self.v);
        Call { dtype, q, k, v, o: q, lse: 0, scale: None, visible, precision, side }
    }

    /// The queries `x`, turned into those that are attended.
    fn rotate(&self, given: &Side, x: Operand, rotary: Angles, visible: Visible) -> Rotate {
        let first = self.first.or(given.seqused_kv).unwrap_or(List { address: 0, len: 0 });
        // Without a mask all queries are at the first position.
        let advance = (visible.left, visible.right) != (-1, -1) || given.chunk.is_some();
        let (dtype, out, cu_seqlens) = (self.dtype, self.q, given.cu_seqlens_q);
        Rotate { dtype, x, out, rotary, first, cu_seqlens, advance }
    }
}

impl<'py, L: Library> Served<'_, 'py, L> {
    /// What such a call needs.
    fn known(&self, py: Python<'py>, plain: &Plain, place: Place) -> PyResult<Option<Arc<Known>>> {
        let Asked { scale, visible, with_lse, precision, one_query, .. } = *self.asked;
        let wanted = Wanted {
            scale,
            visible,
            enable_gqa: true,
            flash_layout: true,
            out_by_token: true,
            one_query,
            with_lse,
            precision,
        };
        let threads = if let Place::Cpu { threads } = place { threads } else { 0 };
        let (side, tensors) = (Some(&plain.side), [&plain.q, &plain.k, &plain.v]);
        let key = Key::new(tensors, plain.dtype, plain.gpu, threads, wanted, side);
        if let Some(known) = key.look_up() {
            return Ok(Some(known));
        }
        let ([batch, heads, rows, _], dim) = (plain.q.shape, plain.v.shape[3]);
        // Packed tensors and their log-sum-exp have no first dimension.
        let from = usize::from(plain.side.cu_seqlens_q.is_some());
        let shape = [batch, heads, rows, dim];
        let queries = &self.asked.tensors[0];
        let Some(strides) = self.library.strides(queries, &plain.q, shape, true, plain.gpu)? else {
            return Ok(None);
        };
        let form = |sizes: &[i64], strides: &[i64], dtype| self.library.form(py, sizes, strides, dtype);
        let out = match one_query {
            false => form(&order(shape)[from..], &order(strides)[from..], plain.dtype)?,
            true => form(&[batch, heads, dim], &[heads * dim, dim, 1], plain.dtype)?,
        };
        // One query's is that of its row.
        let (until, lse_strides) = (if one_query { 2 } else { 3 }, [heads * rows, rows, 1]);
        let lse = with_lse.then(|| form(&shape[from..until], &lse_strides[from..until], 0)).transpose()?;
        key.plan(py, tensors.map(|tensor| *tensor), side, OutputForms { out, lse, shape, strides }).map(Some)
    }

    /// The scales of keys (0) or values (1), `[batch, heads]`; a list of ones is for the long way to make.
    fn scale(&self, of: usize, batch: i64, cache: &Operand, gpu: Option<usize>) -> Option<Option<List>> {
        let found = self.library.look(self.asked.scales[of].as_ref()?)?;
        let heads = cache.shape[1];
        let fits = found.kind == Kind::Float32
            && found.gpu == gpu
            && found.dimensions == 2
            && found.shape[..2] == [batch, heads]
            && (found.strides[1] == 1 || heads == 1)
            && (found.strides[0] == heads || batch == 1)
            && found.address != 0;
        fits.then_some(Some(List { address: found.address, len: usize::try_from(batch * heads).ok()? }))
    }

    /// A list of this many 32-bit integers on this device; `Some(None)` when there is none.
    fn list(&self, tensor: &Given<'py>, len: i64, gpu: Option<usize>) -> Option<Option<List>> {
        let Some(tensor) = tensor else { return Some(None) };
        let found = self.library.look(tensor)?;
        let fits = found.kind == Kind::Int32
            && found.gpu == gpu
            && found.dimensions == 1
            && found.shape[0] == len
            && (found.strides[0] == 1 || len == 1)
            && found.address != 0;
        fits.then_some(Some(List { address: found.address, len: usize::try_from(len).ok()? }))
    }

    fn table(&self, gpu: Option<usize>) -> Option<Option<Table>> {
        let Some(tensor) = &self.asked.lists.8 else { return Some(None) };
        let found = self.library.look(tensor)?;
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
        let found = self.library.look(tensor)?;
        let (s, t) = (found.shape, found.strides);
        let fits = found.dimensions == 2 && found.gpu == gpu && t[1] == 1 && !s[..2].contains(&0);
        let operand =
            Operand { address: found.address, shape: [1, 1, s[0], s[1]], strides: [0, 0, t[0], t[1]] };
        fits.then_some((found.kind.float()?, operand))
    }

    /// One type, one device, contiguous rows, nothing empty, nothing to be said about any size; of queries, keys, values, new keys and new
    /// values, as far as there are any.
    fn plain(&self, looked: &[Looked; 5]) -> Option<Plain> {
        let (cu_q, cu_k, cu_new, used_q, used_k, leftpad, index, first, _) = &self.asked.lists;
        let (packed_q, packed_k) = (cu_q.is_some(), cu_k.is_some());
        let [found, k, v, new_k, new_v] = looked;
        let q = match self.asked.one_query {
            false => four(found, packed_q)?,
            true => one_query(found).filter(|_| !packed_q)?,
        };
        let (gpu, dtype) = (found.gpu, found.kind.float()?);
        let of = |kind: Kind, other: &Looked, packed| {
            (other.kind == kind && other.gpu == gpu).then(|| four(other, packed))?
        };
        let kv_dtype = k.kind.codes();
        let codes = kv_dtype.is_some();
        let kind = if codes { k.kind } else { found.kind };
        let kinds = [found.kind, k.kind];
        let writable = k.writable && v.writable;
        let (k, v) = (of(kind, k, packed_k)?, of(kind, v, packed_k)?);
        if let Some((heads, heads_kv, dim, dim_v, of_queries, of_keys)) = self.asked.planned {
            let sizes = [q.shape[1], k.shape[1], q.shape[3], v.shape[3]] == [heads, heads_kv, dim, dim_v];
            let is = |kind: Kind, planned: i64| planned < 0 || kind as i64 == planned;
            if !sizes || !is(kinds[0], of_queries) || !is(kinds[1], of_keys) {
                return None;
            }
        }
        let batch = match cu_q {
            None => q.shape[0],
            Some(cu) => self.library.look(cu)?.shape[0] - 1,
        };
        let new = match &self.asked.new {
            None => None,
            Some(_) => {
                Some([of(found.kind, new_k, cu_new.is_some())?, of(found.kind, new_v, cu_new.is_some())?])
            }
        };
        let angles = match &self.asked.angles {
            None => None,
            Some([cos, sin]) => Some([self.angle(cos, gpu)?, self.angle(sin, gpu)?]),
        };
        let side = Side {
            cu_seqlens_q: self.list(cu_q, batch + 1, gpu)?,
            cu_seqlens_kv: self.list(cu_k, batch + 1, gpu)?,
            max_seqlen_q: if packed_q { Some(self.asked.longest[0]?.max(1)) } else { None },
            max_seqlen_kv: if packed_k { Some(self.asked.longest[1]?.max(1)) } else { None },
            seqused_q: self.list(used_q, batch, gpu)?,
            seqused_kv: self.list(used_k, batch, gpu)?,
            leftpad_kv: self.list(leftpad, batch, gpu)?,
            cache_batch_idx: self.list(index, batch, gpu)?,
            page_table: self.table(gpu)?,
            kv_dtype,
            scales: match codes {
                false => [None; 3],
                true => [None, self.scale(0, batch, &k, gpu)?, self.scale(1, batch, &v, gpu)?],
            },
            ..Side::default()
        };
        let dim_max = head_dim_max(gpu.is_some(), dtype);
        let rows = |a: &Operand, b: &Operand| a.shape[..3] == b.shape[..3];
        // A block of the cache, or a row of the table, for each sequence, unless others are named.
        let held = match (&side.page_table, packed_k) {
            (Some(table), _) => table.shape[0],
            (None, true) => batch,
            (None, false) => k.shape[0],
        };
        let ordinary = batch > 0
            && (held == batch || side.cache_batch_idx.is_some())
            && rows(&k, &v)
            && q.shape[3] == k.shape[3]
            && q.shape[3].max(v.shape[3]) <= dim_max
            && q.shape[1] % k.shape[1] == 0
            && takes_scale(self.asked.scale, gpu)
            && new.is_none_or(|[new_k, new_v]| rows(&new_k, &new_v) && side.seqused_kv.is_some() && writable)
            && (angles.is_none() || new.is_some())
            && !(codes && (new.is_some() || dtype == 0));
        let (cu_new, first) = (self.list(cu_new, batch + 1, gpu)?, self.list(first, batch, gpu)?);
        ordinary.then_some(Plain { gpu, dtype, q, k, v, new, angles, side, cu_new, first })
    }
}
