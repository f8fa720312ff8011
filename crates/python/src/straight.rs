//! The common case of a torch call in one go: tensors read, output made, work done.
//!
//! What a call needs that depends on its tensors' forms alone is kept from the first such call: the plan, and the form of the
//! output.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hash, Hasher},
    sync::{Arc, Mutex, PoisonError},
};

use evosdpa::{
    Attention, Device, DeviceTensors, Options, Precision, SideInputs,
    gpu::{self, RawStream},
};
use pyo3::prelude::*;

use crate::{
    Call, Error, Operand, Visible,
    call::{caught, sizes},
    exchange::{self, Described},
    exit::detached,
    module::raised,
    torch::{Form, Torch},
};

/// Past this many forms all are looked at anew.
const KNOWN_MAX: usize = 4096;

/// What a call asks for beside its tensors.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) scale: Option<f64>,
    pub(crate) visible: Visible,
    pub(crate) enable_gqa: bool,
    /// `[batch, sequence, heads, head dimension]` instead of `[batch, heads, sequence, head dimension]`.
    pub(crate) flash_layout: bool,
    pub(crate) with_lse: bool,
    pub(crate) precision: Precision,
}

/// The output and the log-sum-exp.
pub(crate) type Outputs<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// All that a plan depends on: the tensors without their addresses.
#[derive(PartialEq)]
struct Key {
    forms: [([i64; 4], [i64; 4]); 3],
    dtype: u8,
    gpu: Option<usize>,
    /// 0 on a GPU.
    threads: usize,
    wanted: Wanted,
}

/// What is known from the first call with such tensors.
struct Known {
    attention: Attention,
    /// Forms of the outputs.
    out: Form,
    lse: Option<Form>,
    /// The output's sizes and strides, `[batch, heads, sequence, head dimension]`.
    o: Operand,
    /// The tensors on a GPU, without their addresses.
    tensors: Option<DeviceTensors>,
}

type AllKnown = HashMap<Key, Arc<Known>, BuildHasherDefault<Mix>>;

/// `None` before the first call.
static KNOWN: Mutex<Option<AllKnown>> = Mutex::new(None);

/// Attention, or `None` when something is out of the ordinary, for the long way to look into.
pub(crate) fn attention<'py>(
    tensors: [&Bound<'py, PyAny>; 3],
    wanted: &Wanted,
) -> PyResult<Option<Outputs<'py>>> {
    let py = tensors[0].py();
    let Some(torch) = Torch::bound(py) else { return Ok(None) };
    if !torch.are_memory(py, tensors.into_iter())? || !torch.is_quiet(py)? {
        return Ok(None);
    }
    let [Some(q), Some(k), Some(v)] = tensors.map(exchange::describe) else { return Ok(None) };
    if !are_addresses(&q, &k, &v) {
        return Ok(None);
    }
    let threads = if q.gpu.is_some() { 0 } else { torch.threads(py)? };
    let forms = [q, k, v].map(|tensor| (tensor.operand.shape, tensor.operand.strides));
    let key = Key { forms, dtype: q.dtype, gpu: q.gpu, threads, wanted: *wanted };
    let known = match look_up(&key) {
        Some(known) => known,
        None => match planned(torch, tensors[0], [&q, &k, &v], key)? {
            Some(known) => known,
            None => return Ok(None),
        },
    };
    let Some((out, o)) = torch.make(&known.out, tensors[0], q.gpu)? else { return Ok(None) };
    let (lse, lse_address) = match &known.lse {
        None => (None, 0),
        Some(form) => match torch.make(form, tensors[0], q.gpu)? {
            None => return Ok(None),
            Some((lse, found)) => (Some(lse), found.address),
        },
    };
    let addresses = [q.operand.address, k.operand.address, v.operand.address, o.address];
    let stream = match q.gpu.map(exchange::current_stream) {
        None => 0,
        Some(Some(stream)) => stream,
        Some(None) => return Ok(None),
    };
    let operands = [q, k, v].map(|tensor| oriented(&tensor, wanted.flash_layout));
    detached(py, || {
        // SAFETY: the tensors are alive in the caller's frame, and the outputs are new; on a GPU the allocator that owns the
        // memory keeps the order of this stream.
        caught(|| unsafe { known.run(operands, addresses, lse_address, stream) })
    })
    .map_err(raised)?;
    Ok(Some((out, lse)))
}

fn look_up(key: &Key) -> Option<Arc<Known>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(key).cloned()
}

/// What a call with such tensors needs; `None` when something about them is out of the ordinary.
#[cold]
fn planned(
    torch: &Torch,
    queries: &Bound<'_, PyAny>,
    tensors: [&Described; 3],
    key: Key,
) -> PyResult<Option<Arc<Known>>> {
    let ([q, k, v], py) = (tensors, queries.py());
    let wanted = key.wanted;
    if !are_ordinary(q, k, v, &wanted) {
        return Ok(None);
    }
    let [q_form, k_form, v_form] = tensors.map(|tensor| oriented(tensor, wanted.flash_layout));
    let [batch, heads, rows, _] = q_form.shape;
    let dim = v_form.shape[3];
    let shape = [batch, heads, rows, dim];
    // The output lies in memory as the queries do: where it can, as torch's own attention makes it.
    let by_sequence = wanted.flash_layout || q_form.strides[1] < q_form.strides[2];
    let strides = if !wanted.flash_layout && shape == q_form.shape {
        match torch.strides_like(queries)? {
            Some(strides) => strides,
            None => return Ok(None),
        }
    } else if by_sequence {
        [rows * heads * dim, dim, heads * dim, 1]
    } else {
        [heads * rows * dim, rows * dim, dim, 1]
    };
    let turned = |four: [i64; 4]| if wanted.flash_layout { swap(four) } else { four };
    let out = torch.form(py, &turned(shape), &turned(strides), q.dtype)?;
    let lse = match wanted.with_lse {
        false => None,
        true => Some(torch.form(py, &[batch, heads, rows], &[heads * rows, rows, 1], 0)?),
    };
    // Of the output there is only the form yet; its memory will be as aligned as the queries'.
    let o = Operand { address: q_form.address, shape, strides };
    let call = Call {
        dtype: q.dtype,
        q: q_form,
        k: k_form,
        v: v_form,
        o,
        lse: if wanted.with_lse { q_form.address } else { 0 },
        scale: wanted.scale,
        visible: wanted.visible,
        precision: wanted.precision,
        side: None,
    };
    let (attention, tensors) =
        detached(py, || caught(|| call.planned(key.gpu, key.threads))).map_err(raised)?;
    let known = Arc::new(Known { attention, out, lse, o, tensors });
    let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    if all.len() >= KNOWN_MAX {
        all.clear();
    }
    all.insert(key, Arc::clone(&known));
    Ok(Some(known))
}

impl Call<'_> {
    /// How it is computed on a GPU, or a CPU; on a GPU also with what.
    fn planned(
        &self,
        gpu: Option<usize>,
        threads: usize,
    ) -> Result<(Attention, Option<DeviceTensors>), Error> {
        let problem = self.problem()?;
        let Some(ordinal) = gpu else {
            let options = Options { threads: (threads > 0).then_some(threads), ..Options::default() };
            return Ok((Attention::plan_with(problem, Device::Cpu, &options)?, None));
        };
        let tensors = self.on_device(&problem)?;
        let attention = gpu::shared(ordinal)?.plan(&problem, &tensors, &Options::default())?;
        Ok((attention, Some(tensors)))
    }
}

impl Known {
    /// # Safety
    /// As [`Call::run`]: the operands are Q, K and V, the addresses theirs and the output's.
    unsafe fn run(
        &self,
        [q, k, v]: [Operand; 3],
        addresses: [usize; 4],
        lse: usize,
        stream: u64,
    ) -> Result<(), Error> {
        if let Some(mut tensors) = self.tensors {
            let places = [&mut tensors.q, &mut tensors.k, &mut tensors.v, &mut tensors.o];
            for (place, address) in places.into_iter().zip(addresses) {
                place.address = address as u64;
            }
            if let Some(place) = &mut tensors.lse {
                place.address = lse as u64;
            }
            // SAFETY: by this function's contract.
            return Ok(unsafe { self.attention.run_on(RawStream(stream), &tensors) }?);
        }
        let (dtype, o) = (self.attention.problem().dtype(), Operand { address: addresses[3], ..self.o });
        let rows: usize = sizes("O", o.shape)?[..3].iter().product();
        // SAFETY: by contract each operand's elements are valid, and nobody else has the outputs.
        let (inputs, o, lse) = unsafe {
            (
                [q.view("Q", dtype)?, k.view("K", dtype)?, v.view("V", dtype)?],
                o.view_mut("O", dtype)?,
                (lse != 0).then(|| std::slice::from_raw_parts_mut(lse as *mut f32, rows)),
            )
        };
        Ok(self.attention.run_with(inputs, &SideInputs::default(), o, lse)?)
    }
}

/// Of one device and type, and at addresses that elements of the type can have: all that a form does not say.
fn are_addresses(q: &Described, k: &Described, v: &Described) -> bool {
    let bytes = if q.dtype == 0 { 4 } else { 2 };
    [q, k, v].into_iter().all(|tensor| {
        let address = tensor.operand.address;
        tensor.dtype == q.dtype && tensor.gpu == q.gpu && address != 0 && address % bytes == 0
    })
}

/// Contiguous rows, nothing empty, nothing to be spread, nothing to be said about any size.
fn are_ordinary(q: &Described, k: &Described, v: &Described, wanted: &Wanted) -> bool {
    let [heads, sequence] = if wanted.flash_layout { [2, 1] } else { [1, 2] };
    let size = |tensor: &Described, of: usize| tensor.operand.shape[of];
    let dim_max = head_dim_max(q.gpu.is_some(), q.dtype);
    let is_usable = |tensor: &Described| {
        let Operand { shape, strides, .. } = tensor.operand;
        strides[3] == 1 && shape[0] == q.operand.shape[0] && shape[3] <= dim_max && !shape.contains(&0)
    };
    let (heads_q, heads_kv) = (size(q, heads), size(k, heads));
    [q, k, v].into_iter().all(is_usable)
        && size(k, sequence) == size(v, sequence)
        && size(k, 3) == size(q, 3)
        && heads_kv == size(v, heads)
        && (heads_q == heads_kv || ((wanted.enable_gqa || wanted.flash_layout) && heads_q % heads_kv == 0))
        && wanted.scale.is_none_or(|scale| (scale as f32).is_finite())
}

/// The largest head dimension of a device and type, by [`crate::call::Call`]'s number.
pub(crate) fn head_dim_max(on_gpu: bool, dtype: u8) -> i64 {
    let largest = match (on_gpu, dtype) {
        (false, _) => evosdpa_core::MAX_HEAD_DIM,
        (true, 0) => gpu::HEAD_DIM_MAX_F32,
        (true, _) => gpu::HEAD_DIM_MAX,
    };
    largest as i64
}

/// `[batch, heads, sequence, head dimension]`, whatever the layout.
fn oriented(tensor: &Described, flash_layout: bool) -> Operand {
    let Operand { address, shape, strides } = tensor.operand;
    if !flash_layout {
        return tensor.operand;
    }
    Operand { address, shape: swap(shape), strides: swap(strides) }
}

/// Sequence and heads change places.
fn swap([batch, sequence, heads, dim]: [i64; 4]) -> [i64; 4] {
    [batch, heads, sequence, dim]
}

// Scales are compared by their bits: one that is NaN is never ordinary, so never kept.
impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for (shape, strides) in &self.forms {
            for number in shape.iter().chain(strides) {
                state.write_i64(*number);
            }
        }
        let Wanted { scale, visible, enable_gqa, flash_layout, with_lse, precision } = self.wanted;
        state.write_u64(scale.map_or(0, f64::to_bits));
        state.write_i64(visible.left);
        state.write_i64(visible.right);
        let flags = [visible.bottom_right, enable_gqa, flash_layout, with_lse, precision == Precision::High];
        let flags = flags.into_iter().fold(0, |bits, flag| bits << 1 | u64::from(flag));
        state.write_u64(flags << 8 | u64::from(self.dtype));
        state.write_usize(self.threads << 8 | self.gpu.map_or(0xff, |gpu| gpu & 0x7f));
    }
}

/// A few instructions a number: forms come from one program and mean no harm.
#[derive(Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // An odd number whose bits look random: the fractional part of the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_i64(&mut self, number: i64) {
        self.write_u64(number as u64);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}
