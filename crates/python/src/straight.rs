//! The common case of a call on torch's or NumPy's tensors in one go: tensors read, output made, work done. What depends on the tensors' forms alone is kept
//! from the first such call (`known.rs`).

use std::sync::Arc;

use evosdpa::gpu;
use pyo3::prelude::*;

use crate::{
    Operand, Side,
    call::caught,
    exchange::{self, Described},
    exit::detached,
    known::{Key, Known, OutputForms, Wanted},
    library::{Library, Seen},
    module::raised,
    scores::{Scores, ScoresOf},
};

/// Attention (see [`given`]), or `None` when something is out of the ordinary, for the long way to look into.
pub(crate) fn attention<'py>(
    library: &impl Library,
    tensors: [&Bound<'py, PyAny>; 3],
    wanted: &Wanted,
    scores: Option<&Scores<'py>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = tensors[0].py();
    let [Some(q), Some(k), Some(v)] = tensors.map(|tensor| library.look(tensor)) else { return Ok(None) };
    let mut seen = Seen::new(tensors[0], q);
    seen.push(tensors[1], k);
    seen.push(tensors[2], v);
    let kind = q.kind;
    let [Some(q), Some(k), Some(v)] = [q, k, v].map(|found| found.described()) else { return Ok(None) };
    let side = match scores {
        None => None,
        Some(scores) => {
            let [queries, keys] = [&q, &k].map(|tensor| oriented(tensor, wanted.flash_layout).shape);
            let of = ScoresOf { shape: [queries[0], queries[1], queries[2], keys[2]], kind, gpu: q.gpu };
            let mut side = Side::default();
            if scores.add_to(library, of, &mut seen, &mut side).is_none() {
                return Ok(None);
            }
            Some(side)
        }
    };
    let side = side.as_ref();
    if !are_addresses(&q, &k, &v) || !library.is_plain(&seen)? {
        return Ok(None);
    }
    let threads = if q.gpu.is_some() { 0 } else { library.threads(py)? };
    let forms = [&q.operand, &k.operand, &v.operand];
    let key = Key::new(forms, q.dtype, q.gpu, threads, *wanted, side);
    let known = match key.look_up() {
        Some(known) => known,
        None => match planned(library, tensors[0], [&q, &k, &v], wanted, side, key)? {
            Some(known) => known,
            None => return Ok(None),
        },
    };
    let Some((out, o)) = library.make(&known.out, tensors[0], q.gpu)? else { return Ok(None) };
    let (lse, lse_address) = match &known.lse {
        None => (None, 0),
        Some(form) => match library.make(form, tensors[0], q.gpu)? {
            None => return Ok(None),
            Some((lse, found)) => (Some(lse), found.address),
        },
    };
    let stream = match q.gpu.map(exchange::current_stream) {
        None => 0,
        Some(Some(stream)) => stream,
        Some(None) => return Ok(None),
    };
    let operands = [q, k, v].map(|tensor| oriented(&tensor, wanted.flash_layout));
    detached(py, || {
        // SAFETY: the tensors are alive in the caller's frame, and the outputs are new; on a GPU the allocator that owns the
        // memory keeps the order of this stream.
        caught(|| unsafe { known.run(operands, side, [o.address, lse_address], stream) })
    })
    .map_err(raised)?;
    given(out, lse).map(Some)
}

/// The output, in a pair with the log-sum-exp where there is one.
pub(crate) fn given<'py>(
    out: Bound<'py, PyAny>,
    lse: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    match lse {
        None => Ok(out),
        Some(lse) => Ok((&out, lse).into_pyobject(out.py())?.into_any()),
    }
}

/// What a call with such tensors needs; `None` when something about them is out of the ordinary.
#[cold]
fn planned(
    library: &impl Library,
    queries: &Bound<'_, PyAny>,
    tensors: [&Described; 3],
    wanted: &Wanted,
    side: Option<&Side>,
    key: Key,
) -> PyResult<Option<Arc<Known>>> {
    let ([q, k, v], py) = (tensors, queries.py());
    if !are_ordinary(q, k, v, wanted) {
        return Ok(None);
    }
    let forms = tensors.map(|tensor| oriented(tensor, wanted.flash_layout));
    let [q_form, _, v_form] = forms;
    let ([batch, heads, rows, _], dim) = (q_form.shape, v_form.shape[3]);
    let shape = [batch, heads, rows, dim];
    let by_token = wanted.flash_layout || wanted.out_by_token;
    let Some(strides) = library.strides(queries, &q_form, shape, by_token, q.gpu)? else { return Ok(None) };
    // Queries whose rows overlap, as no output's can: the long way copies what the kernels write.
    if strides[3] != 1 && dim != 1 {
        return Ok(None);
    }
    let turned = |four: [i64; 4]| if by_token { swap(four) } else { four };
    let out = library.form(py, &turned(shape), &turned(strides), q.dtype)?;
    let lse = match wanted.with_lse {
        false => None,
        true => Some(library.form(py, &[batch, heads, rows], &[heads * rows, rows, 1], 0)?),
    };
    Ok(Some(key.plan(py, forms, side, OutputForms { out, lse, shape, strides })?))
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
        && takes_scale(wanted.scale, q.gpu)
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

/// Whether there is nothing to be said about a scale.
pub(crate) fn takes_scale(scale: Option<f64>, gpu: Option<usize>) -> bool {
    scale.is_none_or(|scale| (scale as f32).is_finite() && (gpu.is_none() || scale >= 0.0))
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
