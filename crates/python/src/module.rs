//! The Python module `evosdpa._native`.

use std::{ffi::OsString, path::PathBuf};

use evosdpa::{Granularity, Precision};
use evosdpa_core::Error as Problem;
use evosdpa_cpu::Error as Cpu;
use pyo3::{
    exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyBool, PyDict, PyFloat},
};

use crate::{
    Angles, Append, Call, Error, List, Operand, Place, Rotate, Side, Table, Visible,
    arrays::{self, NumPy},
    exit::{detached, ending},
    known::Wanted,
    library::Library as _,
    scores::{self, Scores},
    serving::{self, Asked, attention},
    torch::Torch,
};

type Four = (i64, i64, i64, i64);

/// The native half of evosdpa. Private: addresses are taken on trust.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{
        append, check_append, check_call, check_lists, check_rotate, described, ending, forward, rotate, run,
        set_batch_invariant, set_batch_invariant_here, straight, straight_cache, suggest_packages,
        suggest_precompiled, use_torch,
    };
    #[pymodule_export]
    use crate::sanitizer::sanitize;

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        use pyo3::types::PyModuleMethods as _;
        module.add("HEAD_DIM_MAX", evosdpa_core::MAX_HEAD_DIM)?;
        module.add("GPU_HEAD_DIM_MAX", evosdpa::gpu::HEAD_DIM_MAX)?;
        module.add("GPU_HEAD_DIM_MAX_F32", evosdpa::gpu::HEAD_DIM_MAX_F32)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

/// Whether every call from now on asks for batch-invariant results; says what was before.
#[pyfunction]
fn set_batch_invariant(on: bool) -> bool {
    crate::set_batch_invariant(on)
}

/// The same of this thread's calls alone.
#[pyfunction]
fn set_batch_invariant_here(on: bool) -> bool {
    crate::set_batch_invariant_here(on)
}

/// Address, shape, and strides in elements, rounded down, of a NumPy array.
#[pyfunction]
fn described<'py>(array: &Bound<'py, PyAny>) -> PyResult<arrays::Described<'py>> {
    arrays::described(array)
}

/// Attention of tensors given as address, shape and strides in elements. On the CPU (`ordinal` -1) on `queue` threads; on
/// `cuda:ordinal` it is queued on the stream `queue` and not waited for. `side` is what comes beside Q, K and V, by name.
#[pyfunction]
#[pyo3(signature = (dtype, q, k, v, o, lse, scale, window, high, ordinal, queue, side=None))]
fn forward(
    py: Python<'_>,
    dtype: u8,
    q: (usize, Four, Four),
    k: (usize, Four, Four),
    v: (usize, Four, Four),
    o: (usize, Four, Four),
    lse: usize,
    scale: Option<f64>,
    window: (i64, i64, bool),
    high: bool,
    ordinal: i64,
    queue: u64,
    side: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let side = side.map(beside).transpose()?;
    let (left, right, bottom_right) = window;
    let visible = Visible { left, right, bottom_right };
    let (q, k, v, o) = (operand(q), operand(k), operand(v), operand(o));
    let call =
        Call { dtype, q, k, v, o, lse, scale, visible, precision: precision(high), side: side.as_ref() };
    // SAFETY: the Python half describes live tensors, which its caller holds, and an output it has just made; on a GPU also
    // its current stream, whose order the allocator that owns their memory keeps.
    detached(py, || unsafe { call.run(place(ordinal, queue)) }).map_err(raised)
}

/// Takes torch's DLPack interface and the functions that are asked at every call, by name; says whether they can be used.
#[pyfunction]
fn use_torch(exchange: &Bound<'_, PyAny>, parts: &Bound<'_, PyDict>) -> PyResult<bool> {
    Torch::bind(exchange, parts)
}

/// Attention of plain torch tensors that nobody differentiates or traces, or of NumPy's plain arrays: the output, or `(out, lse)`, or `None` when something about
/// them, or about what torch is doing, is out of the ordinary.
#[pyfunction]
#[pyo3(signature = (q, k, v, scale, window, enable_gqa, flash_layout, with_lse, high, out_by_token=false, scores=None, numpy=false))]
fn straight<'py>(
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    scale: &Bound<'py, PyAny>,
    window: &Bound<'py, PyAny>,
    enable_gqa: &Bound<'py, PyAny>,
    flash_layout: bool,
    with_lse: &Bound<'py, PyAny>,
    high: bool,
    out_by_token: bool,
    scores: Option<scores::Given<'py>>,
    numpy: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (Some(scale), Some(visible)) = (number(scale), visible(window)) else { return Ok(None) };
    let Some(scores) = read(scores) else { return Ok(None) };
    let (enable_gqa, with_lse, precision) = (enable_gqa.is_truthy()?, with_lse.is_truthy()?, precision(high));
    let one_query = false;
    let wanted =
        Wanted { scale, visible, enable_gqa, flash_layout, out_by_token, one_query, with_lse, precision };
    match numpy {
        true => crate::straight::attention(NumPy::bound(q.py())?, [q, k, v], &wanted, scores.as_ref()),
        false => match Torch::bound(q.py()) {
            Some(torch) => crate::straight::attention(torch, [q, k, v], &wanted, scores.as_ref()),
            None => Ok(None),
        },
    }
}

/// Attention of plain torch tensors, or NumPy's plain arrays, over packed sequences or a cache, new tokens written to it first: the output, or
/// `(out, lse)`, or `None` when something about them is out of the ordinary. With `one_query` queries are `[sequences, heads, dim]`; `planned` is what they must
/// be.
#[pyfunction]
#[pyo3(signature = (tensors, new, angles, lists, scales, longest, scale, window, interleaved, with_lse, high, one_query=false, planned=None, scores=None))]
fn straight_cache<'py>(
    py: Python<'py>,
    tensors: (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>),
    new: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    angles: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    lists: serving::Lists<'py>,
    scales: (serving::Given<'py>, serving::Given<'py>),
    longest: (Bound<'py, PyAny>, Bound<'py, PyAny>),
    scale: &Bound<'py, PyAny>,
    window: &Bound<'py, PyAny>,
    interleaved: &Bound<'py, PyAny>,
    with_lse: &Bound<'py, PyAny>,
    high: bool,
    one_query: bool,
    planned: Option<serving::PlannedFor>,
    scores: Option<scores::Given<'py>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (Some(scale), Some(visible)) = (number(scale), visible(window)) else { return Ok(None) };
    let Some(scores) = read(scores) else { return Ok(None) };
    let (interleaved, with_lse, precision) =
        (interleaved.is_truthy()?, with_lse.is_truthy()?, precision(high));
    // What is no number is missing: the long way says so. An error would cost more than the call.
    let longest = <[Bound<'py, PyAny>; 2]>::from(longest)
        .map(|longest| if longest.is_none() { None } else { longest.extract().ok() });
    let asked = Asked {
        tensors: tensors.into(),
        new: new.map(Into::into),
        angles: angles.map(Into::into),
        lists,
        scales: scales.into(),
        longest,
        scale,
        visible,
        interleaved,
        with_lse,
        precision,
        one_query,
        planned,
        scores,
    };
    match Torch::bound(py) {
        Some(torch) if torch.has_made(&asked.tensors[0]) => attention(py, torch, &asked),
        _ => match NumPy::found(py)? {
            Some(numpy) if numpy.has_made(&asked.tensors[0]) => attention(py, numpy, &asked),
            _ => Ok(None),
        },
    }
}

/// What changes scores, if anything does; `None` where that is out of the ordinary.
fn read(scores: Option<scores::Given<'_>>) -> Option<Option<Scores<'_>>> {
    match scores {
        None => Some(None),
        Some(given) => Scores::read(given).map(Some),
    }
}

/// A float or nothing, and nothing that could be made one: that is for the long way.
fn number(value: &Bound<'_, PyAny>) -> Option<Option<f64>> {
    if value.is_none() {
        return Some(None);
    }
    value.cast_exact::<PyFloat>().ok().map(|number| Some(number.value()))
}

/// Names a folder of Python packages that may hold the CUDA compiler library.
#[pyfunction]
fn suggest_packages(folder: PathBuf) {
    ptxsan::nvrtc::toolkit::suggest_packages(folder.clone());
    evosdpa_cuda::toolkit::suggest_packages(folder);
}

/// Names a folder that may hold kernels compiled elsewhere.
#[pyfunction]
fn suggest_precompiled(folder: PathBuf) {
    evosdpa_cuda::precompiled::suggest(folder);
}

/// Runs a command line of the `evosdpa` program in this process, which Python says how to start again, and returns its exit status.
#[pyfunction]
fn run(py: Python<'_>, python: PathBuf, arguments: Vec<OsString>) -> u8 {
    evosdpa_cuda::Program::declare(python, vec!["-m".into(), "evosdpa".into()]);
    let name = OsString::from("evosdpa");
    py.detach(|| evosdpa_cli::run(std::iter::once(name).chain(arguments)))
}

/// Checks lengths and pages that were copied to this process's memory against tensors that may be elsewhere.
#[pyfunction]
fn check_lists(
    dtype: u8,
    q: (usize, Four, Four),
    k: (usize, Four, Four),
    v: (usize, Four, Four),
    side: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let (q, k, v, side) = (operand(q), operand(k), operand(v), beside(side)?);
    let visible = Visible { left: -1, right: -1, bottom_right: true };
    let (scale, precision) = (None, Precision::Default);
    let call = Call { dtype, q, k, v, o: q, lse: 0, scale, visible, precision, side: Some(&side) };
    // SAFETY: the Python half has copied the lists, and holds them.
    unsafe { call.check_lists() }.map_err(raised)
}

/// Checks a call before anything is done: whole where `reads`, else without looking at what is in memory.
#[pyfunction]
fn check_call(
    dtype: u8,
    q: (usize, Four, Four),
    k: (usize, Four, Four),
    v: (usize, Four, Four),
    scale: Option<f64>,
    window: (i64, i64, bool),
    side: &Bound<'_, PyDict>,
    reads: bool,
) -> PyResult<()> {
    let (q, k, v, side) = (operand(q), operand(k), operand(v), beside(side)?);
    let (left, right, bottom_right) = window;
    let visible = Visible { left, right, bottom_right };
    let precision = Precision::Default;
    let call = Call { dtype, q, k, v, o: q, lse: 0, scale, visible, precision, side: Some(&side) };
    if reads {
        // SAFETY: the Python half holds the tensors and the lists, which are in this process's memory.
        return unsafe { call.check() }.map_err(raised);
    }
    call.check_shapes().map_err(raised)
}

/// Lists come as `(address, length)`, the page table as `(address, (rows, columns), row stride)`, a bias as `(type, operand)`.
fn beside(named: &Bound<'_, PyDict>) -> PyResult<Side> {
    let mut side = Side::default();
    for (name, value) in named.iter() {
        let list = || value.extract().map(|(address, len)| Some(List { address, len }));
        match name.extract::<String>()?.as_str() {
            "cu_seqlens_q" => side.cu_seqlens_q = list()?,
            "cu_seqlens_k" => side.cu_seqlens_kv = list()?,
            "max_seqlen_q" => side.max_seqlen_q = Some(value.extract()?),
            "max_seqlen_k" => side.max_seqlen_kv = Some(value.extract()?),
            "seqused_q" => side.seqused_q = list()?,
            "seqused_k" => side.seqused_kv = list()?,
            "leftpad_k" => side.leftpad_kv = list()?,
            "cache_batch_idx" => side.cache_batch_idx = list()?,
            "page_table" => {
                side.page_table = Some(table(&value)?);
            }
            "bias" => {
                let (code, bias) = value.extract()?;
                side.bias = Some((code, operand(bias)));
            }
            "mask" => side.mask = Some(operand(value.extract()?)),
            "blocks" => side.blocks = Some(operand(value.extract()?)),
            "block_q" => side.block_q = value.extract()?,
            "block_k" => side.block_kv = value.extract()?,
            "alibi_slopes" => side.alibi_slopes = list()?,
            "sinks" => side.sinks = list()?,
            "q_scales" => side.scales[0] = list()?,
            "k_scales" => side.scales[1] = list()?,
            "v_scales" => side.scales[2] = list()?,
            "scales_per" => {
                let per = value.extract::<String>()?.parse::<Granularity>();
                side.granularity = per.map_err(|error| PyValueError::new_err(error.to_string()))?;
            }
            "softcap" => side.softcap = Some(value.extract()?),
            "chunk" => side.chunk = Some(value.extract()?),
            "fast" => side.fast = value.extract()?,
            "kv_dtype" => side.kv_dtype = Some(value.extract()?),
            "o_dtype" => side.o_dtype = Some(value.extract()?),
            other => return Err(PyTypeError::new_err(format!("there is no side input named {other:?}"))),
        }
    }
    Ok(side)
}

fn table(value: &Bound<'_, PyAny>) -> PyResult<Table> {
    let (address, (rows, columns), row_stride) = value.extract()?;
    Ok(Table { address, shape: [rows, columns], row_stride })
}

/// Puts new keys and values into a cache, as [`forward`] takes tensors; the rest by name.
#[pyfunction]
fn append(
    py: Python<'_>,
    dtype: u8,
    k_cache: (usize, Four, Four),
    v_cache: (usize, Four, Four),
    k: (usize, Four, Four),
    v: (usize, Four, Four),
    ordinal: i64,
    queue: u64,
    named: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let append = appended(dtype, [k_cache, v_cache, k, v], named)?;
    // SAFETY: the Python half describes live tensors, which its caller holds; on a GPU also its current stream, whose order the
    // allocator that owns their memory keeps.
    detached(py, || unsafe { append.run(place(ordinal, queue)) }).map_err(raised)
}

/// Checks lists that were copied to this process's memory as [`append`] would check them on a CPU.
#[pyfunction]
fn check_append(
    dtype: u8,
    k_cache: (usize, Four, Four),
    v_cache: (usize, Four, Four),
    k: (usize, Four, Four),
    v: (usize, Four, Four),
    named: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let append = appended(dtype, [k_cache, v_cache, k, v], named)?;
    // SAFETY: the Python half has copied the lists, and holds them.
    unsafe { append.check_lists() }.map_err(raised)
}

fn appended(dtype: u8, tensors: [(usize, Four, Four); 4], named: &Bound<'_, PyDict>) -> PyResult<Append> {
    let [k_cache, v_cache, k, v] = tensors.map(operand);
    let mut append = Append::new(dtype, [k_cache, v_cache], [k, v]);
    for (name, value) in named.iter() {
        let list = || value.extract().map(|(address, len)| List { address, len });
        match name.extract::<String>()?.as_str() {
            "cache_seqlens" => append.lengths = list()?,
            "cu_seqlens_k_new" => append.cu_seqlens = Some(list()?),
            "page_table" => append.page_table = Some(table(&value)?),
            "cache_batch_idx" => append.cache_batch_idx = Some(list()?),
            "rotary" => append.rotary = Some(angles(&value)?),
            "rotary_seqlens" => append.rotary_first = Some(list()?),
            other => return Err(PyTypeError::new_err(format!("append takes no {other:?}"))),
        }
    }
    Ok(append)
}

/// Turns the tokens of a tensor into another of its shape: those of each sequence from its own position on.
#[pyfunction]
fn rotate(
    py: Python<'_>,
    dtype: u8,
    x: (usize, Four, Four),
    out: (usize, Four, Four),
    rotary: &Bound<'_, PyAny>,
    first: (usize, usize),
    cu_seqlens: Option<(usize, usize)>,
    advance: bool,
    ordinal: i64,
    queue: u64,
) -> PyResult<()> {
    let rotate = rotated(dtype, x, out, rotary, first, cu_seqlens, advance)?;
    // SAFETY: the Python half describes live tensors, which its caller holds, and an output it has just made; on a GPU also its
    // current stream.
    detached(py, || unsafe { rotate.run(place(ordinal, queue)) }).map_err(raised)
}

/// Checks lists that were copied to this process's memory as [`rotate`] would check them on a CPU.
#[pyfunction]
fn check_rotate(
    dtype: u8,
    x: (usize, Four, Four),
    rotary: &Bound<'_, PyAny>,
    first: (usize, usize),
    cu_seqlens: Option<(usize, usize)>,
    advance: bool,
) -> PyResult<()> {
    let rotate = rotated(dtype, x, x, rotary, first, cu_seqlens, advance)?;
    // SAFETY: the Python half has copied the lists, and holds them.
    unsafe { rotate.check_lists() }.map_err(raised)
}

fn rotated(
    dtype: u8,
    x: (usize, Four, Four),
    out: (usize, Four, Four),
    rotary: &Bound<'_, PyAny>,
    first: (usize, usize),
    cu_seqlens: Option<(usize, usize)>,
    advance: bool,
) -> PyResult<Rotate> {
    let list = |(address, len)| List { address, len };
    let (x, out, rotary) = (operand(x), operand(out), angles(rotary)?);
    Ok(Rotate { dtype, x, out, rotary, first: list(first), cu_seqlens: cu_seqlens.map(list), advance })
}

/// On the CPU (`ordinal` -1) on `queue` threads, or on the stream `queue` of a GPU.
fn place(ordinal: i64, queue: u64) -> Place {
    match usize::try_from(ordinal) {
        Ok(ordinal) => Place::Cuda { ordinal, stream: queue },
        Err(_) => Place::Cpu { threads: usize::try_from(queue).unwrap_or(usize::MAX) },
    }
}

/// `((type, cosines), (type, sines), interleaved)`.
fn angles(value: &Bound<'_, PyAny>) -> PyResult<Angles> {
    let ((cos_type, cos), (sin_type, sin), interleaved) = value.extract()?;
    Ok(Angles { cos: (cos_type, operand(cos)), sin: (sin_type, operand(sin)), interleaved })
}

/// `(left, right, bottom_right)`, or whether to mask from the top left, as PyTorch does; what is no such thing is for the long way to say.
fn visible(window: &Bound<'_, PyAny>) -> Option<Visible> {
    if let Ok(causal) = window.cast_exact::<PyBool>() {
        return Some(Visible { left: -1, right: if causal.is_true() { 0 } else { -1 }, bottom_right: false });
    }
    let (left, right, bottom_right) = window.extract().ok()?;
    Some(Visible { left, right, bottom_right })
}

fn precision(high: bool) -> Precision {
    if high { Precision::High } else { Precision::Default }
}

fn operand((address, shape, strides): (usize, Four, Four)) -> Operand {
    Operand { address, shape: shape.into(), strides: strides.into() }
}

/// The exception a Python programmer expects for an error, with the library's words.
pub(crate) fn raised(error: Error) -> PyErr {
    use evosdpa::Error as Library;
    let said = error.to_string();
    match error {
        Error::Library(
            Library::Problem(Problem::TensorDType { .. } | Problem::SideType { .. })
            | Library::Cpu(Cpu::Problem(Problem::TensorDType { .. } | Problem::SideType { .. })),
        ) => PyTypeError::new_err(said),
        Error::Library(
            Library::Kernels(_)
            | Library::CacheOnHost { .. }
            | Library::Unreachable { .. }
            | Library::NegativeScale { .. },
        ) => PyNotImplementedError::new_err(said),
        Error::Library(Library::Cuda(_)) => PyRuntimeError::new_err(said),
        Error::Panic { .. } => PyRuntimeError::new_err(said),
        _ => PyValueError::new_err(said),
    }
}
