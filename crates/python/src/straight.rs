//! The common case of a torch call in one go: tensors read, output made, work done.

use evosdpa::{Precision, gpu::HEAD_DIM_MAX};
use pyo3::{intern, prelude::*, types::PyTuple};

use crate::{
    Call, Operand, Place, Visible,
    exchange::{self, Described},
    exit::detached,
    module::raised,
};

/// What a call asks for beside its tensors.
pub(crate) struct Wanted {
    pub(crate) scale: Option<f64>,
    pub(crate) visible: Visible,
    pub(crate) enable_gqa: bool,
    /// `[batch, sequence, heads, head dimension]` instead of `[batch, heads, sequence, head dimension]`.
    pub(crate) flash_layout: bool,
    pub(crate) with_lse: bool,
    pub(crate) precision: Precision,
    pub(crate) threads: usize,
}

/// The output and the log-sum-exp.
pub(crate) type Outputs<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// Attention, or `None` when something is out of the ordinary, for the long way to look into.
pub(crate) fn attention<'py>(
    tensors: [&Bound<'py, PyAny>; 3],
    empty_like: &Bound<'py, PyAny>,
    wanted: &Wanted,
) -> PyResult<Option<Outputs<'py>>> {
    let py = tensors[0].py();
    let [Some(q), Some(k), Some(v)] = tensors.map(exchange::describe) else { return Ok(None) };
    if !are_ordinary(&q, &k, &v, wanted) {
        return Ok(None);
    }
    let (given_shape, given_strides) = (q.operand.shape, q.operand.strides);
    let [q, k, v] = [q, k, v].map(|tensor| if wanted.flash_layout { swapped(tensor) } else { tensor });
    let [batch, heads, queries, _] = q.operand.shape;
    let dim = v.operand.shape[3];
    // The output lies in memory as the queries do.
    let by_sequence = wanted.flash_layout || q.operand.strides[1] < q.operand.strides[2];
    let strides = if by_sequence {
        [queries * heads * dim, dim, heads * dim, 1]
    } else {
        [heads * queries * dim, queries * dim, dim, 1]
    };
    let swap = |four: [i64; 4]| if wanted.flash_layout { swap(four) } else { four };
    let (shape, strides) = (swap([batch, heads, queries, dim]), swap(strides));
    let is_like_q = !wanted.flash_layout && shape == given_shape;
    let out = if is_like_q || (shape == given_shape && strides == given_strides) {
        // The quickest way to memory of this form; torch's own attention makes its output so too.
        empty_like.call1((tensors[0],))?
    } else {
        let (shape, strides) = (PyTuple::new(py, shape)?, PyTuple::new(py, strides)?);
        tensors[0].call_method1(intern!(py, "new_empty_strided"), (shape, strides))?
    };
    let Some(o) = exchange::describe(&out) else { return Ok(None) };
    let o = if wanted.flash_layout { swapped(o) } else { o };
    let lse = if wanted.with_lse { Some(new_lse(tensors[0], [batch, heads, queries])?) } else { None };
    let lse_address = match &lse {
        None => 0,
        Some(lse) => lse.call_method0(intern!(py, "data_ptr"))?.extract::<usize>()?,
    };
    let call = Call {
        dtype: q.dtype,
        q: q.operand,
        k: k.operand,
        v: v.operand,
        o: o.operand,
        lse: lse_address,
        scale: wanted.scale,
        visible: wanted.visible,
        precision: wanted.precision,
        side: None,
    };
    let place = match q.gpu {
        None => Place::Cpu { threads: wanted.threads },
        Some(ordinal) => {
            let Some(stream) = exchange::current_stream(ordinal) else { return Ok(None) };
            Place::Cuda { ordinal, stream }
        }
    };
    // SAFETY: the tensors are alive in the caller's frame, and the outputs are new; on a GPU the allocator that owns the memory
    // keeps the order of this stream.
    detached(py, || unsafe { call.run(place) }).map_err(raised)?;
    Ok(Some((out, lse)))
}

/// One type, one device, contiguous rows, nothing empty, nothing to be spread, nothing to be said about any size.
fn are_ordinary(q: &Described, k: &Described, v: &Described, wanted: &Wanted) -> bool {
    let all = [q, k, v];
    let [heads, sequence] = if wanted.flash_layout { [2, 1] } else { [1, 2] };
    let size = |tensor: &Described, of: usize| tensor.operand.shape[of];
    let dim_max = if q.gpu.is_some() { HEAD_DIM_MAX } else { evosdpa_core::MAX_HEAD_DIM } as i64;
    let bytes = if q.dtype == 0 { 4 } else { 2 };
    let is_usable = |tensor: &&Described| {
        let Operand { address, shape, strides } = tensor.operand;
        tensor.dtype == q.dtype
            && tensor.gpu == q.gpu
            && address != 0
            && address % bytes == 0
            && strides[3] == 1
            && shape[0] == q.operand.shape[0]
            && shape[3] <= dim_max
            && !shape.contains(&0)
    };
    let (heads_q, heads_kv) = (size(q, heads), size(k, heads));
    all.iter().all(is_usable)
        && size(k, sequence) == size(v, sequence)
        && size(k, 3) == size(q, 3)
        && heads_kv == size(v, heads)
        && (heads_q == heads_kv || ((wanted.enable_gqa || wanted.flash_layout) && heads_q % heads_kv == 0))
        && wanted.scale.is_none_or(|scale| (scale as f32).is_finite())
        && (q.gpu.is_none() || q.dtype != 0)
}

pub(crate) fn new_lse<'py>(like: &Bound<'py, PyAny>, shape: [i64; 3]) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    let torch = py.import(intern!(py, "torch"))?;
    let options = pyo3::types::PyDict::new(py);
    options.set_item(intern!(py, "dtype"), torch.getattr(intern!(py, "float32"))?)?;
    like.call_method(intern!(py, "new_empty"), (PyTuple::new(py, shape)?,), Some(&options))
}

/// Sequence and heads change places.
fn swapped(mut tensor: Described) -> Described {
    tensor.operand.shape = swap(tensor.operand.shape);
    tensor.operand.strides = swap(tensor.operand.strides);
    tensor
}

fn swap([batch, sequence, heads, dim]: [i64; 4]) -> [i64; 4] {
    [batch, heads, sequence, dim]
}
