//! The Python module `evosdpa._native`.

use std::{ffi::OsString, path::PathBuf};

use evosdpa::Precision;
use evosdpa_core::Error as Problem;
use evosdpa_cpu::Error as Cpu;
use pyo3::{
    exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
};

use crate::{
    Call, Error, Operand, Place, Visible, exchange,
    straight::{Outputs, Wanted},
};

type Four = (i64, i64, i64, i64);

/// The native half of evosdpa. Private: addresses are taken on trust.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{forward, run, straight, suggest_packages, use_exchange};

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        use pyo3::types::PyModuleMethods as _;
        module.add("HEAD_DIM_MAX", evosdpa_core::MAX_HEAD_DIM)?;
        module.add("GPU_HEAD_DIM_MAX", evosdpa::gpu::HEAD_DIM_MAX)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

/// Attention of tensors given as address, shape and strides in elements. On the CPU (`ordinal` -1) on `queue` threads; on
/// `cuda:ordinal` it is queued on the stream `queue` and not waited for.
#[pyfunction]
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
) -> PyResult<()> {
    let (left, right, bottom_right) = window;
    let visible = Visible { left, right, bottom_right };
    let (q, k, v, o) = (operand(q), operand(k), operand(v), operand(o));
    let call = Call { dtype, q, k, v, o, lse, scale, visible, precision: precision(high) };
    let place = match usize::try_from(ordinal) {
        Ok(ordinal) => Place::Cuda { ordinal, stream: queue },
        Err(_) => Place::Cpu { threads: usize::try_from(queue).unwrap_or(usize::MAX) },
    };
    // SAFETY: the Python half describes live tensors, which its caller holds, and an output it has just made; on a GPU also
    // its current stream, whose order the allocator that owns their memory keeps.
    py.detach(|| unsafe { call.run(place) }).map_err(raised)
}

/// Takes torch's DLPack interface for [`straight`]; says whether it can be used.
#[pyfunction]
fn use_exchange(capsule: &Bound<'_, PyAny>) -> PyResult<bool> {
    exchange::take(capsule)
}

/// Attention of plain torch tensors that nobody differentiates or traces: `(out, lse)`, or `None` when something about
/// them is out of the ordinary.
#[pyfunction]
fn straight<'py>(
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    scale: Option<f64>,
    window: (i64, i64, bool),
    enable_gqa: bool,
    flash_layout: bool,
    with_lse: bool,
    high: bool,
    threads: usize,
    empty_like: &Bound<'py, PyAny>,
) -> PyResult<Option<Outputs<'py>>> {
    let (left, right, bottom_right) = window;
    let visible = Visible { left, right, bottom_right };
    let precision = precision(high);
    let wanted = Wanted { scale, visible, enable_gqa, flash_layout, with_lse, precision, threads };
    crate::straight::attention([q, k, v], empty_like, &wanted)
}

/// Names a folder of Python packages that may hold the CUDA compiler library.
#[pyfunction]
fn suggest_packages(folder: PathBuf) {
    evosdpa_cuda::toolkit::suggest_packages(folder);
}

/// Runs a command line of the `evosdpa` program in this process, which Python says how to start again, and returns its exit status.
#[pyfunction]
fn run(py: Python<'_>, python: PathBuf, arguments: Vec<OsString>) -> u8 {
    evosdpa_cuda::Program::declare(python, vec!["-m".into(), "evosdpa".into()]);
    let name = OsString::from("evosdpa");
    py.detach(|| evosdpa_cli::run(std::iter::once(name).chain(arguments)))
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
            Library::Problem(Problem::TensorDType { .. })
            | Library::Cpu(Cpu::Problem(Problem::TensorDType { .. })),
        ) => PyTypeError::new_err(said),
        Error::Library(Library::Kernels(_) | Library::Unreachable { .. }) => {
            PyNotImplementedError::new_err(said)
        }
        Error::Library(Library::Cuda(_)) => PyRuntimeError::new_err(said),
        Error::Panic { .. } => PyRuntimeError::new_err(said),
        _ => PyValueError::new_err(said),
    }
}
