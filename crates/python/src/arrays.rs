//! NumPy arrays, read through the struct behind `__array_struct__`: the dictionary of `__array_interface__` takes a microsecond to make.
//!
//! <https://numpy.org/doc/stable/reference/arrays.interface.html#c-struct-access>

use std::{
    ffi::{c_char, c_int, c_void},
    ptr, slice,
};

use pyo3::{
    exceptions::PyTypeError,
    ffi, intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyTuple, PyType},
};

use crate::{
    Operand,
    exchange::{Kind, Looked},
    library::{Form, Library, Seen, packed},
};

/// `PyArrayInterface` up to the address.
#[repr(C)]
struct ArrayInterface {
    /// Always 2.
    version: c_int,
    dimensions: c_int,
    kind: c_char,
    item_bytes: c_int,
    flags: c_int,
    shape: *const isize,
    /// In bytes.
    strides: *const isize,
    data: *const c_void,
}

/// An array's address, shape, and strides in elements, rounded down.
pub(crate) type Described<'py> = (usize, Bound<'py, PyTuple>, Bound<'py, PyTuple>);

pub(crate) fn described<'py>(array: &Bound<'py, PyAny>) -> PyResult<Described<'py>> {
    let py = array.py();
    let capsule = array.getattr(intern!(py, "__array_struct__"))?;
    let (found, shape, strides) = read(&capsule)?;
    let elements = strides.iter().map(|stride| stride.div_euclid(found.item_bytes as isize));
    Ok((found.data as usize, PyTuple::new(py, shape)?, PyTuple::new(py, elements)?))
}

/// What a capsule holds, with a size and a stride for each dimension.
fn read<'a>(capsule: &'a Bound<'_, PyAny>) -> PyResult<(&'a ArrayInterface, &'a [isize], &'a [isize])> {
    // SAFETY: the object is alive; the call checks that it is a capsule, which has no name.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), ptr::null()) };
    if pointer.is_null() {
        let error = PyErr::take(capsule.py());
        return Err(error.unwrap_or_else(|| PyTypeError::new_err("not an array's interface")));
    }
    // SAFETY: by NumPy's interface the capsule holds this struct as long as it lives.
    let found = unsafe { &*pointer.cast::<ArrayInterface>() };
    if found.version != 2 || found.item_bytes <= 0 {
        return Err(PyTypeError::new_err("an array's interface of another version"));
    }
    let count = found.dimensions as usize;
    if count == 0 {
        return Ok((found, &[], &[]));
    }
    // SAFETY: shape and strides have an element for each dimension, and live as long as the struct.
    let (shape, strides) =
        unsafe { (slice::from_raw_parts(found.shape, count), slice::from_raw_parts(found.strides, count)) };
    Ok((found, shape, strides))
}

/// `NPY_ARRAY_ALIGNED` and `NPY_ARRAY_NOTSWAPPED`.
const READABLE: c_int = 0x100 | 0x200;
/// `NPY_ARRAY_WRITEABLE`.
const WRITABLE: c_int = 0x400;

/// The parts of NumPy that a call touches, looked up once.
pub(crate) struct NumPy {
    /// Of plain arrays.
    class: Py<PyType>,
    float32: Py<PyAny>,
    float16: Py<PyAny>,
    int32: Py<PyAny>,
}

static NUMPY: PyOnceLock<NumPy> = PyOnceLock::new();

impl NumPy {
    /// Of a process that has arrays; `None` where nobody has imported NumPy.
    pub(crate) fn found(py: Python<'_>) -> PyResult<Option<&'static Self>> {
        if let Some(numpy) = NUMPY.get(py) {
            return Ok(Some(numpy));
        }
        let modules = py.import("sys")?.getattr("modules")?;
        if modules.contains("numpy")? { Self::bound(py).map(Some) } else { Ok(None) }
    }

    /// Of a process that has arrays.
    pub(crate) fn bound(py: Python<'_>) -> PyResult<&'static Self> {
        NUMPY.get_or_try_init(py, || {
            let numpy = py.import("numpy")?;
            let dtype = |name: &str| numpy.call_method1("dtype", (name,)).map(Bound::unbind);
            let class = numpy.getattr("ndarray")?.extract()?;
            let [float32, float16, int32] = [dtype("float32")?, dtype("float16")?, dtype("int32")?];
            Ok(Self { class, float32, float16, int32 })
        })
    }
}

impl Library for NumPy {
    fn has_made(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type().is(&self.class)
    }

    fn look(&self, object: &Bound<'_, PyAny>) -> Option<Looked> {
        if !self.has_made(object) {
            return None;
        }
        let capsule = object.getattr(intern!(object.py(), "__array_struct__")).ok()?;
        let (found, sizes, steps) = read(&capsule).ok()?;
        let kind = match (found.kind as u8, found.item_bytes) {
            (b'f', 4) => Kind::Float32,
            (b'f', 2) => Kind::Float16,
            (b'i', 4) => Kind::Int32,
            (b'i', 1) => Kind::Int8,
            (b'b', 1) => Kind::Bool,
            _ => return None,
        };
        if found.flags & READABLE != READABLE || !(1..=4).contains(&sizes.len()) {
            return None;
        }
        let bytes = found.item_bytes as isize;
        let (mut shape, mut strides) = ([0; 4], [0; 4]);
        for (at, (size, step)) in sizes.iter().zip(steps).enumerate() {
            if *size > 1 && (*step < 0 || step % bytes != 0) {
                return None;
            }
            (shape[at], strides[at]) = (*size as i64, (step / bytes) as i64);
        }
        let (dimensions, writable) = (sizes.len(), found.flags & WRITABLE != 0);
        Some(Looked { kind, gpu: None, address: found.data as usize, writable, dimensions, shape, strides })
    }

    fn is_plain(&self, _: &Seen<'_, '_>) -> PyResult<bool> {
        Ok(true)
    }

    fn threads(&self, _: Python<'_>) -> PyResult<usize> {
        Ok(0)
    }

    fn strides(
        &self,
        _: &Bound<'_, PyAny>,
        q: &Operand,
        shape: [i64; 4],
        _: bool,
        _: Option<usize>,
    ) -> PyResult<Option<[i64; 4]>> {
        Ok(Some(packed(shape, q.strides[1] < q.strides[2])))
    }

    fn form(&self, py: Python<'_>, sizes: &[i64], strides: &[i64], dtype: u8) -> PyResult<Form> {
        let (dtype, bytes) = match dtype {
            0 => (&self.float32, 4),
            3 => (&self.int32, 4),
            _ => (&self.float16, 2),
        };
        let strides = strides.iter().map(|stride| stride * bytes);
        let (sizes, strides) = (PyTuple::new(py, sizes)?, PyTuple::new(py, strides.collect::<Vec<_>>())?);
        // Sizes, type, no buffer, no offset in it, and strides.
        Ok(Form((sizes, dtype, py.None(), 0, strides).into_pyobject(py)?.unbind()))
    }

    fn make<'py>(
        &self,
        form: &Form,
        beside: &Bound<'py, PyAny>,
        _: Option<usize>,
    ) -> PyResult<Option<(Bound<'py, PyAny>, Looked)>> {
        let py = beside.py();
        let made = self.class.bind(py).call(form.0.bind(py), None)?;
        Ok(self.look(&made).map(|found| (made, found)))
    }
}
